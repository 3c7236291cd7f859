// SPDX-License-Identifier: Apache-2.0
// Concepts: minimal types model them, types that lack one thing don't, and ZeroSharded asks its
// arguments for nothing that the concepts don't say.
#include <zero/comm/fault_injector.hpp>
#include <zero/zero.hpp>

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <ranges>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "archetypes.hpp"
#include "catch.hpp"
#include "conformance/communicator_suite.hpp"

using namespace archetypes;  // NOLINT: this file is about them

// ---- Each concept is modelled by its archetype, and by nothing that lacks one thing

namespace {

/// `Model` models `Concept`, but no longer without its member of that name.
#define ZERO_NEEDS(Concept, Model, member)                  \
  struct Model##_without_##member : Model {                 \
    void member() = delete;                                 \
  };                                                        \
  static_assert(zero::Concept<Model>);                      \
  static_assert(!zero::Concept<Model##_without_##member>)

// Element
static_assert(zero::Element<BareElement> && !zero::Element<int> && !zero::Element<const float>);
struct Incomplete {};
template <class Lacks>
struct Odd {};
struct Type;
struct Name;
struct Arithmetic;
struct Load;
struct Store;
struct Trivial;
template <>
struct Odd<Trivial> {
  Odd() = default;
  Odd(const Odd&) {}
};

// Parameter
ZERO_NEEDS(Parameter, BareParameter, name);
ZERO_NEEDS(Parameter, BareParameter, shape);
ZERO_NEEDS(Parameter, BareParameter, values);
ZERO_NEEDS(Parameter, BareParameter, gradient);
static_assert(zero::Parameter<BareVariantParameter>);
static_assert(!zero::RebindableParameter<BareParameter>);
ZERO_NEEDS(RebindableParameter, BareRebindable, rebind);
ZERO_NEEDS(RebindableParameter, BareRebindable, values);
template <class Values, class Gradient = Values, class Shape = std::span<const std::size_t>>
struct ParameterOf {
  const char* name() const;
  Shape shape() const;
  Values values() const;
  Gradient gradient() const;
};
static_assert(zero::Parameter<ParameterOf<std::span<float>>>);
static_assert(zero::Parameter<ParameterOf<std::span<BareElement>>>);
static_assert(!zero::Parameter<ParameterOf<std::span<int>>>);
static_assert(!zero::Parameter<ParameterOf<std::span<const float>>>);
static_assert(!zero::Parameter<ParameterOf<float*>>);
static_assert(!zero::Parameter<ParameterOf<std::span<float>, std::span<double>>>);
static_assert(!zero::Parameter<ParameterOf<std::span<float>, std::span<float>, std::size_t>>);
static_assert(!zero::Parameter<ParameterOf<std::variant<std::span<float>, int>>>);
struct MutableName : ParameterOf<std::span<float>> {
  const char* name();  // a const parameter has none
};
static_assert(!zero::Parameter<MutableName>);

// ParamStore
using Store_ = BareStore<BareParameter>;
ZERO_NEEDS(ParamStore, Store_, begin);
ZERO_NEEDS(ParamStore, Store_, end);
static_assert(!zero::ParamStore<const Store_>, "this one is only read as non-const");
static_assert(!zero::ParamStore<std::list<BareParameter>>, "no random access");
static_assert(!zero::ParamStore<std::vector<int>>, "no parameters");
static_assert(!zero::ParamStore<BareParameter>, "no range");
struct Unsized {
  BareIterator<BareParameter> begin();
  std::unreachable_sentinel_t end();
};
static_assert(std::ranges::random_access_range<Unsized> && !zero::ParamStore<Unsized>);

// FlatParamStore
static_assert(!zero::FlatParamStore<Store_>);
ZERO_NEEDS(FlatParamStore, BareFlatStore, flat_values);
ZERO_NEEDS(FlatParamStore, BareFlatStore, flat_gradient);
ZERO_NEEDS(FlatParamStore, BareFlatStore, begin);
struct OtherFlatType : BareFlatStore {
  std::span<double> flat_values();
  std::span<double> flat_gradient();
};
static_assert(!zero::FlatParamStore<OtherFlatType>, "not the parameters' element type");
struct VariantFlat : BareStore<BareVariantParameter> {
  BareVariantParameter::Values flat_values();
  BareVariantParameter::Values flat_gradient();
};
static_assert(zero::ParamStore<VariantFlat> && !zero::FlatParamStore<VariantFlat>);

// Optimizers
static_assert(zero::UpdateRule<SignSgd, float> && zero::UpdateRule<SignSgd, double>);
static_assert(zero::UpdateRule<BareRule, float> && zero::UpdateRule<BareRule, double>);
static_assert(zero::Optimizer<SignSgd> && !zero::WholeTensorOptimizer<SignSgd>);
static_assert(zero::Optimizer<BareRule> && !zero::WholeTensorOptimizer<BareRule>);
ZERO_NEEDS(UpdateRule, BareRule, slots);
ZERO_NEEDS(UpdateRule, BareRule, scalars);
ZERO_NEEDS(UpdateRule, BareRule, update);
ZERO_NEEDS(WholeTensorOptimizer, BareWholeTensor, slots);
ZERO_NEEDS(WholeTensorOptimizer, BareWholeTensor, update);
static_assert(zero::Optimizer<BareWholeTensor> && !zero::UpdateRule<BareWholeTensor>);
static_assert(!zero::WholeTensorOptimizer<BareWholeTensor, double>, "written for float alone");
struct MoveOnlyRule : BareRule {
  MoveOnlyRule(MoveOnlyRule&&) = default;
  MoveOnlyRule& operator=(MoveOnlyRule&&) = default;
};
static_assert(!zero::UpdateRule<MoveOnlyRule>);
struct OneSlotMore : BareRule {
  static constexpr std::array<const char*, 2> slots{"velocity", "of which update knows nothing"};
};
static_assert(!zero::UpdateRule<OneSlotMore>);
struct NumberedSlots : BareRule {
  static constexpr std::array<int, 1> slots{0};
};
static_assert(!zero::UpdateRule<NumberedSlots>);
struct RunTimeSlots : BareRule {
  static std::vector<std::string_view> slots;
};
static_assert(!zero::UpdateRule<RunTimeSlots>, "slots are counted at compile time");
struct FloatAlone {
  static constexpr std::array<const char*, 0> slots{};
  template <class Real>
  Real scalars(std::int64_t) const;
  static void update(float& value, const float& gradient, const float& lr);
};
static_assert(!zero::UpdateRule<FloatAlone, float>, "an update is generic in its numbers");
struct MemberUpdate {
  static constexpr std::array<const char*, 0> slots{};
  template <class Real>
  Real scalars(std::int64_t) const;
  template <class X, class Real>
  void update(X& value, const X& gradient, const Real& lr) const;
};
static_assert(!zero::UpdateRule<MemberUpdate>, "an update is static");
struct Both : BareWholeTensor {
  using BareWholeTensor::update;
  template <class Real>
  Real scalars(std::int64_t) const;
  template <class X, class Real>
  static void update(X& value, const X& gradient, X& velocity, const Real& lr);
};
static_assert(zero::UpdateRule<Both> && zero::WholeTensorOptimizer<Both> && !zero::Optimizer<Both>);

// Communicators
static_assert(zero::Communicator<SoloCommunicator, float>);
static_assert(zero::Communicator<SoloCommunicator, double>);
static_assert(!zero::Communicator<SoloCommunicator, int>, "no element type");
static_assert(zero::Communicator<BareCommunicator, float>);
static_assert(!zero::SharedMemoryCommunicator<SoloCommunicator>);
static_assert(!zero::SharedMemoryCommunicator<BareCommunicator>);
ZERO_NEEDS(Communicator, SoloCommunicator, memory_space);
ZERO_NEEDS(Communicator, SoloCommunicator, supports);
ZERO_NEEDS(Communicator, SoloCommunicator, rank);
ZERO_NEEDS(Communicator, SoloCommunicator, size);
ZERO_NEEDS(Communicator, SoloCommunicator, all_reduce);
ZERO_NEEDS(Communicator, SoloCommunicator, reduce_scatter);
ZERO_NEEDS(Communicator, SoloCommunicator, reduce_scatter_v);
ZERO_NEEDS(Communicator, SoloCommunicator, all_gather);
ZERO_NEEDS(Communicator, SoloCommunicator, all_gather_v);
ZERO_NEEDS(Communicator, SoloCommunicator, all_to_all);
ZERO_NEEDS(Communicator, SoloCommunicator, all_to_all_v);
ZERO_NEEDS(Communicator, SoloCommunicator, broadcast);
ZERO_NEEDS(Communicator, SoloCommunicator, barrier);
ZERO_NEEDS(Communicator, SoloCommunicator, exchange);
ZERO_NEEDS(Communicator, SoloCommunicator, abort);
ZERO_NEEDS(Communicator, SoloCommunicator, batch);
ZERO_NEEDS(SharedMemoryCommunicator, SoloSharedCommunicator, meet);
ZERO_NEEDS(SharedMemoryCommunicator, SoloSharedCommunicator, rank);
// And each operation's own concept by what has that operation alone.
using C = SoloCommunicator;
static_assert(zero::Ranked<C> && !zero::Ranked<C_without_rank_> && !zero::Ranked<C_without_size_>);
}  // namespace
