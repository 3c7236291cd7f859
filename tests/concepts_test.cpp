// SPDX-License-Identifier: Apache-2.0
// Concepts: minimal types model them, types that lack one thing don't, and ZeroSharded asks its
// arguments for nothing that the concepts don't say.
#include <zero/zero.hpp>

#include <array>
#include <bit>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <ranges>
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

/// `Model` models `Concept`, but no longer where its member of that name can't be used.
#define ZERO_NEEDS(Concept, Model, member)  \
  struct Model##_without_##member : Model { \
    void member() = delete;                 \
  };                                        \
  static_assert(zero::Concept<Model> && !zero::Concept<Model##_without_##member>)

/// The same for a member template that is a type, which a function of its name would not hide.
#define ZERO_NEEDS_TYPE(Concept, Model, member)   \
  class Model##_without_##member : public Model { \
    using Model::member;                          \
  };                                              \
  static_assert(zero::Concept<Model> && !zero::Concept<Model##_without_##member>)

/// `archetypes::Solo<Concept>` has one operation, and `SoloCommunicator` needs it.
#define ZERO_OPERATION(Concept, member)                                              \
  static_assert(zero::Concept<Solo##Concept> && !zero::Communicator<Solo##Concept>); \
  ZERO_NEEDS(Concept, SoloCommunicator, member);                                     \
  static_assert(!zero::Communicator<SoloCommunicator_without_##member>)
#define ZERO_TYPED_OPERATION(Concept, member)                                               \
  static_assert(zero::Concept<Solo##Concept, float> && !zero::Communicator<Solo##Concept>); \
  struct SoloCommunicator_without_##member : SoloCommunicator {                             \
    void member() = delete;                                                                 \
  };                                                                                        \
  static_assert(zero::Concept<SoloCommunicator, float> &&                                   \
                !zero::Concept<SoloCommunicator_without_##member, float>);                  \
  static_assert(!zero::Communicator<SoloCommunicator_without_##member>)

/// An element with all traits but one.
#define ZERO_ELEMENT_NEEDS(member)                           \
  struct element_without_##member : complete_element {};     \
  template <>                                                \
  struct zero::element_traits<element_without_##member>      \
      : complete_traits<element_without_##member> {          \
   private:                                                  \
    using complete_traits<element_without_##member>::member; \
  };                                                         \
  static_assert(!zero::Element<element_without_##member>)

struct complete_element {
  float x;
};
template <class T>
struct complete_traits {
  static constexpr zero::ElementType type = zero::ElementType::float32;
  static constexpr const char* name = "complete";
  using arithmetic = float;
  static float load(T from) { return from.x; }
  static T store(float x) { return {{x}}; }
};
struct derived_element : complete_element {};
template <>
struct zero::element_traits<derived_element> : complete_traits<derived_element> {};
struct heavy_element : complete_element {
  heavy_element(const heavy_element&) {}
};
template <>
struct zero::element_traits<heavy_element> : complete_traits<heavy_element> {};
static_assert(zero::Element<BareElement> && zero::Element<derived_element>);
static_assert(!zero::Element<heavy_element>, "not trivially copyable");
static_assert(!zero::Element<int> && !zero::Element<const float>, "no traits");
ZERO_ELEMENT_NEEDS(type);
ZERO_ELEMENT_NEEDS(name);
ZERO_ELEMENT_NEEDS(arithmetic);
ZERO_ELEMENT_NEEDS(load);
ZERO_ELEMENT_NEEDS(store);

namespace lacking {

// Parameter
ZERO_NEEDS(Parameter, BareParameter, name);
ZERO_NEEDS(Parameter, BareParameter, shape);
ZERO_NEEDS(Parameter, BareParameter, values);
ZERO_NEEDS(Parameter, BareParameter, gradient);
static_assert(zero::Parameter<Scalar> && zero::Parameter<BareVariantParameter>);
static_assert(!zero::RebindableParameter<BareParameter>);
ZERO_NEEDS(RebindableParameter, BareRebindable, rebind);
ZERO_NEEDS(RebindableGradient, BareGradientRebindable, rebind_gradient);
static_assert(!zero::RebindableGradient<BareRebindable>);
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

// Stores
using ScatteredStore = BareStore<BareParameter>;
ZERO_NEEDS(ParamStore, ScatteredStore, begin);
ZERO_NEEDS(ParamStore, ScatteredStore, end);
static_assert(!zero::ParamStore<const ScatteredStore>, "this one is only read as non-const");
static_assert(!zero::ParamStore<std::list<BareParameter>>, "no random access");
static_assert(!zero::ParamStore<std::vector<int>>, "no parameters");
static_assert(!zero::ParamStore<BareParameter>, "no range");
struct Unsized {
  BareIterator<BareParameter> begin();
  std::unreachable_sentinel_t end();
};
static_assert(std::ranges::random_access_range<Unsized> && !zero::ParamStore<Unsized>);
static_assert(!zero::FlatParamStore<ScatteredStore>);
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
static_assert(zero::WholeTensorOptimizer<NormalizedDescent, float> &&
              zero::WholeTensorOptimizer<NormalizedDescent, double>);
static_assert(zero::Optimizer<NormalizedDescent> && !zero::UpdateRule<NormalizedDescent>);
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
  static constexpr std::array<const char*, 2> slots{"velocity", "unknown to update"};
};
static_assert(zero::NamesSlots<OneSlotMore> && !zero::UpdateRule<OneSlotMore>);
struct NumberedSlots : BareRule {
  static constexpr std::array<int, 1> slots{0};
};
static_assert(!zero::NamesSlots<NumberedSlots>);
struct RunTimeSlots : BareRule {
  static std::vector<std::string_view> slots;
};
static_assert(!zero::NamesSlots<RunTimeSlots>, "slots are counted at compile time");
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

// Matrix products
static_assert(zero::MatrixProduct<NaiveProduct, float> &&
              zero::MatrixProduct<NaiveProduct, double>);
ZERO_NEEDS(MatrixProduct, BareProduct, multiply);
static_assert(!zero::MatrixProduct<BareProduct, double>, "written for float alone");
static_assert(zero::Optimizer<zero::BasicMuon<BareProduct>, float> &&
              !zero::Optimizer<zero::BasicMuon<BareProduct>, double>);

// Communicators
static_assert(zero::Communicator<SoloCommunicator, float>);
static_assert(zero::Communicator<SoloCommunicator, double>);
static_assert(!zero::Communicator<SoloCommunicator, int>, "no element type");
static_assert(zero::Communicator<BareCommunicator, float>);
static_assert(!zero::SharedMemoryCommunicator<SoloCommunicator>);
static_assert(!zero::SharedMemoryCommunicator<BareCommunicator>);
ZERO_OPERATION(Ranked, rank);
ZERO_OPERATION(Ranked, size);
ZERO_OPERATION(Capable, memory_space);
ZERO_OPERATION(Capable, supports);
ZERO_TYPED_OPERATION(AllReduce, all_reduce);
ZERO_TYPED_OPERATION(ReduceScatter, reduce_scatter);
ZERO_TYPED_OPERATION(ReduceScatterV, reduce_scatter_v);
ZERO_TYPED_OPERATION(AllGather, all_gather);
ZERO_TYPED_OPERATION(AllGatherV, all_gather_v);
ZERO_TYPED_OPERATION(AllToAll, all_to_all);
ZERO_TYPED_OPERATION(AllToAllV, all_to_all_v);
ZERO_TYPED_OPERATION(Broadcast, broadcast);
ZERO_OPERATION(Barrier, barrier);
ZERO_OPERATION(HostExchange, exchange);
ZERO_OPERATION(Abortable, abort);
ZERO_OPERATION(Batching, batch);
struct LongRank : SoloRanked {
  long rank() const;
};
static_assert(!zero::Ranked<LongRank>);
struct SilentOnReductions : SoloCapable {
  static constexpr bool supports(zero::ElementType) { return true; }
};
static_assert(!zero::Capable<SilentOnReductions>, "says nothing of reductions");
struct RunTimeCapable : SoloCapable {
  static bool supports(zero::ElementType);
  static bool supports(zero::ReduceOp);
};
static_assert(!zero::Capable<RunTimeCapable>, "capabilities are known at compile time");
struct NoScope {
  void batch();
};
static_assert(!zero::Batching<NoScope>);
struct NoRequest {
  template <class T>
  void all_reduce(std::span<T>, zero::ReduceOp);
};
static_assert(!zero::AllReduce<NoRequest, float>);
struct DoubleAlone {
  SoloRequest all_reduce(std::span<double>, zero::ReduceOp);
};
static_assert(zero::AllReduce<DoubleAlone, double> && !zero::AllReduce<DoubleAlone, float>);

ZERO_NEEDS(Request, SoloRequest, wait);
ZERO_NEEDS(Request, SoloRequest, done);
struct EndlessRequest : SoloRequest {
  void wait();
};
static_assert(!zero::Request<EndlessRequest>, "knows no timeout");
struct ImpatientRequest : SoloRequest {
  void wait(std::chrono::nanoseconds);
};
static_assert(!zero::Request<ImpatientRequest>, "has no timeout of its own");
struct FixedRequest : SoloRequest {
  FixedRequest(FixedRequest&&) = delete;
};
static_assert(!zero::Request<FixedRequest>);
static_assert(!zero::Request<SoloRequest&>);

ZERO_NEEDS(Meeting, SoloMeeting, wait);
ZERO_NEEDS(Meeting, SoloMeeting, done);
ZERO_NEEDS(Meeting, SoloMeeting, peers);
ZERO_NEEDS(Meeting, SoloMeeting, leave);
static_assert(!zero::Meeting<SoloRequest> && zero::Meeting<BareMeeting>);
ZERO_NEEDS(SharedMemoryCommunicator, SoloSharedCommunicator, meet);
ZERO_NEEDS(SharedMemoryCommunicator, SoloSharedCommunicator, rank);
static_assert(zero::SharedMemoryCommunicator<BareSharedCommunicator>);

// Partitions
ZERO_NEEDS(CuttingPartition, FirstRankOnly, cut);
ZERO_NEEDS(CuttingPartition, FirstRankOnly, cuts_tensors);
ZERO_NEEDS(CuttingPartition, BareCuttingPartition, cut);
ZERO_NEEDS(WholeTensorPartition, BareWholeTensorPartition, assign);
ZERO_NEEDS(WholeTensorPartition, BareWholeTensorPartition, cuts_tensors);
static_assert(zero::PartitionPolicy<FirstRankOnly> && !zero::WholeTensorPartition<FirstRankOnly>);
static_assert(zero::PartitionPolicy<BareWholeTensorPartition> &&
              !zero::CuttingPartition<BareWholeTensorPartition>);
struct DeniesCutting : FirstRankOnly {
  static constexpr bool cuts_tensors = false;
};
static_assert(!zero::PartitionPolicy<DeniesCutting>);
struct DeniesWholeness : BareWholeTensorPartition {
  static constexpr bool cuts_tensors = true;
};
static_assert(!zero::PartitionPolicy<DeniesWholeness>);
struct CutsAtRunTime : FirstRankOnly {
  static bool cuts_tensors;
};
static_assert(!zero::PartitionPolicy<CutsAtRunTime>);
struct CutsToInt : FirstRankOnly {
  int cut(std::size_t, std::size_t, int, int) const;
};
static_assert(!zero::PartitionPolicy<CutsToInt>);
struct MoveOnlyPartition : FirstRankOnly {
  MoveOnlyPartition(MoveOnlyPartition&&) = default;
};
static_assert(!zero::PartitionPolicy<MoveOnlyPartition>);

// Bucket views
ZERO_NEEDS(BucketViewPolicy, SmallBuckets, values);
ZERO_NEEDS(BucketViewPolicy, SmallBuckets, gradients);
ZERO_NEEDS(BucketViewPolicy, SmallBuckets, bucket_bytes);
ZERO_NEEDS(BucketViewPolicy, BareArenaView, bucket_bytes);
struct RunTimeView : SmallBuckets {
  static zero::Residency values;
};
static_assert(!zero::BucketViewPolicy<RunTimeView>, "one decision, made at compile time");
struct MoveOnlyView : SmallBuckets {
  MoveOnlyView(MoveOnlyView&&) = default;
};
static_assert(!zero::BucketViewPolicy<MoveOnlyView>);

// Stages
ZERO_NEEDS(StagePolicy, BareStage, shards_state);
ZERO_NEEDS(StagePolicy, BareStage, shards_gradients);
ZERO_NEEDS(StagePolicy, BareStage, shards_values);
template <bool state, bool gradients, bool values>
struct StageOf {
  static constexpr bool shards_state = state;
  static constexpr bool shards_gradients = gradients;
  static constexpr bool shards_values = values;
};
static_assert(zero::StagePolicy<StageOf<true, true, false>>);
static_assert(zero::StagePolicy<StageOf<true, true, true>>);
static_assert(!zero::StagePolicy<StageOf<false, true, false>>);
static_assert(!zero::StagePolicy<StageOf<true, false, true>>);
static_assert(!zero::StagePolicy<StageOf<false, false, true>>);
struct RunTimeStage : StageOf<true, false, false> {
  static bool shards_state;
};
static_assert(!zero::StagePolicy<RunTimeStage>);

// Precisions
static_assert(zero::PrecisionPolicy<OwnPrecision>);
static_assert(zero::PrecisionPolicy<BareNoisyPrecision>);
ZERO_NEEDS_TYPE(PrecisionPolicy, BarePrecision, Master);
ZERO_NEEDS_TYPE(PrecisionPolicy, BarePrecision, Slot);
ZERO_NEEDS(PrecisionPolicy, BarePrecision, rounding);
ZERO_NEEDS(PrecisionPolicy, BareNoisyPrecision, seed);
ZERO_NEEDS_TYPE(PrecisionPolicy, BarePrecision, Wire);
struct IntegerSlots : BarePrecision {
  template <class>
  using Slot = int;
};
static_assert(!zero::PrecisionPolicy<IntegerSlots>);

// Observers
static_assert(zero::Observer<BucketCounter>);
ZERO_NEEDS(Observer, BareObserver, begin);
ZERO_NEEDS(Observer, BareObserver, end);
struct FixedObserver : BareObserver {
  FixedObserver(FixedObserver&&) = delete;
};
static_assert(!zero::Observer<FixedObserver>);

// No archetype belongs to two families, so that its place among the arguments doesn't matter.
template <class... P>
constexpr bool one_family_each = ((zero::detail::families<P> == 1) && ...);
static_assert(
    one_family_each<FirstRankOnly, BareCuttingPartition, BareWholeTensorPartition, SmallBuckets,
                    BareArenaView, BareStage, BarePrecision, BareObserver, zero::Settings>);

}  // namespace lacking

// ---- ZeroSharded over archetypes: the shipped path's bits

namespace {

/// Element for element, whatever the type; a float's is that of the double of the same value.
using Bits = std::vector<std::uint64_t>;

using Tensors = std::vector<Tensor<float>>;

/// Odd sizes, an empty tensor, a scalar; the same on every rank.
template <class T = float>
std::vector<Tensor<T>> model() {
  std::vector<Tensor<T>> tensors;
  const auto add = [&](const char* name, std::vector<std::size_t> shape) {
    std::size_t elements = 1;
    for (const std::size_t extent : shape) elements *= extent;
    Tensor<T> tensor{name, std::move(shape), std::vector<T>(elements), std::vector<T>(elements)};
    for (std::size_t i = 0; i < elements; ++i) {
      tensor.values[i] = static_cast<T>(static_cast<int>(i * 7 % 23) - 11) / T(8) + T(0.01);
    }
    tensors.push_back(std::move(tensor));
  };
  add("embedding", {13, 7});
  add("empty", {0, 4});
  add("bias", {5});
  add("scale", {});
  add("dense", {3, 11, 5});
  return tensors;
}

template <class Store>
Bits bits_of(Store& store) {
  Bits bits;
  for (auto&& parameter : store) {
    zero::detail::visit_span(parameter.values(), [&](auto values) {
      for (const auto x : values) {
        bits.push_back(std::bit_cast<std::uint64_t>(static_cast<double>(x)));
      }
    });
  }
  return bits;
}

/// Another gradient on every rank, in every step.
template <class Store>
void backward(Store& store, int rank, int step) {
  std::size_t at = 0;
  for (auto&& parameter : store) {
    zero::detail::visit_span(parameter.values(), [&]<class T>(std::span<T> values) {
      T* const gradient = static_cast<T*>(zero::detail::visit_span(
          parameter.gradient(), [](auto span) -> void* { return span.data(); }));
      for (std::size_t i = 0; i < values.size(); ++i, ++at) {
        const std::size_t salt = at * 31 + static_cast<std::size_t>(rank * 17 + step * 5);
        gradient[i] = values[i] * T(0.3) + static_cast<T>(static_cast<int>(salt % 41) - 20) / T(7);
      }
    });
  }
}

constexpr int steps = 4;

template <class Optimizer, class Store>
Bits train(Optimizer& optimizer, Store& store, int rank) {
  for (int step = 0; step < steps; ++step) {
    backward(store, rank, step);
    optimizer.step();
  }
  return bits_of(store);
}

/// `f(comm)` on every rank, which must all come to the same bits.
template <class F>
Bits on_ranks(int world, F f) {
  std::vector<Bits> all(static_cast<std::size_t>(world));
  zero::run_ranks(world, [&](zero::InProcessCommunicator& comm) {
    all[static_cast<std::size_t>(comm.rank())] = f(comm);
  });
  for (const Bits& bits : all) REQUIRE(bits == all[0]);
  return all[0];
}

constexpr double lr = 0.05;
constexpr double momentum = 0.9;
const zero::Sgd shipped_rule{.lr = lr, .momentum = momentum};

std::vector<zero::ParamRef<float>> refs(Tensors& tensors) {
  std::vector<zero::ParamRef<float>> store;
  for (auto& t : tensors) store.emplace_back(t.name, t.shape, t.values.data(), t.gradient.data());
  return store;
}

/// Shipped types only, with all defaults.
Bits shipped(int world) {
  return on_ranks(world, [](zero::InProcessCommunicator& comm) {
    Tensors tensors = model();
    std::vector store = refs(tensors);
    zero::ZeroSharded optimizer{shipped_rule, store, comm};
    return train(optimizer, store, comm.rank());
  });
}

/// `make(store, comm)` gives an optimizer over a `Store`.
template <class Store, class Make>
Bits with_store(int world, Make make) {
  return on_ranks(world, [&](zero::InProcessCommunicator& comm) {
    Tensors tensors = model();
    Store store(tensors);
    auto optimizer = make(store, comm);
    return train(optimizer, store, comm.rank());
  });
}

using zero::ZeroSharded;

}  // namespace

TEST_CASE("the minimal communicator passes what a world of one can be asked") {
  SoloCommunicator comm(0);
  zero_test::check_all_reduce<float>(comm);
  zero_test::check_reduce_scatter<double>(comm);
  zero_test::check_uneven<float>(comm);
  zero_test::check_all_gather<float>(comm);
  zero_test::check_all_to_all<double>(comm);
  zero_test::check_broadcast<float>(comm);
  zero_test::check_exchange_and_barrier(comm);
}

TEST_CASE("a world of one, in archetypes only") {
  const Bits expected = shipped(1);
  SECTION("moved values") {
    Tensors tensors = model();
    BareStore<BareRebindable> store(tensors);
    ZeroSharded<BareRule, BareStore<BareRebindable>&, SoloCommunicator, BareCuttingPartition,
                BareArenaView, BareStage, BarePrecision, BareObserver>
        optimizer{
            BareRule(lr, momentum), store,        SoloCommunicator(0), BareCuttingPartition(0),
            BareArenaView(64),      BareStage(0), BarePrecision(0),    BareObserver(0)};
    CHECK(train(optimizer, store, 0) == expected);
    CHECK(optimizer.layout().buckets(0) > 1);
  }
  SECTION("values stay, the communicator is the caller's") {
    Tensors tensors = model();
    BareStore<BareParameter> store(tensors);
    SoloSharedCommunicator comm(0);
    ZeroSharded optimizer{BareRule(lr, momentum), store,          comm,
                          FirstRankOnly{},        SmallBuckets{}, BareStage(0),
                          BarePrecision(0),       BareObserver(0)};
    CHECK(train(optimizer, store, 0) == expected);
  }
}

TEST_CASE("archetypes together, on several ranks", "[ranks]") {
  const int world = GENERATE(1, 2, 3, 5);
  CAPTURE(world);
  const Bits expected = shipped(world);
  const auto all = [&]<class Comm, class Store>(std::type_identity<Comm>, std::type_identity<Store>,
                                                auto partition, auto view) {
    return with_store<Store>(world, [&](Store& store, auto& comm) {
             return ZeroSharded{
                 BareRule(lr, momentum), store,          Comm(comm), partition, view, BareStage(0),
                 BarePrecision(0),       BareObserver(0)};
           }) == expected;
  };
  constexpr std::type_identity<BareCommunicator> buckets;
  constexpr std::type_identity<BareSharedCommunicator> shared;
  constexpr std::type_identity<BareStore<BareParameter>> stay;
  constexpr std::type_identity<BareStore<BareRebindable>> move;
  CHECK(all(buckets, stay, FirstRankOnly{}, SmallBuckets{96}));
  CHECK(all(buckets, stay, FirstRankOnly{}, SmallBuckets{1}));
  CHECK(all(shared, stay, BareWholeTensorPartition(0), SmallBuckets{96}));
  CHECK(all(buckets, move, BareWholeTensorPartition(0), BareArenaView(96)));
  CHECK(all(shared, move, BareCuttingPartition(1), BareArenaView(96)));
  constexpr std::type_identity<BareStore<BareGradientRebindable>> move_both;
  CHECK(all(buckets, move_both, BareCuttingPartition(1), BareGradientArenaView(96)));
  CHECK(all(shared, move_both, FirstRankOnly{}, BareGradientArenaView(96)));
}

TEST_CASE("whole tensors in archetypes, on several ranks", "[ranks]") {
  const int world = GENERATE(1, 2, 3, 5);
  CAPTURE(world);
  const Bits expected = on_ranks(world, [](zero::InProcessCommunicator& comm) {
    Tensors tensors = model();
    std::vector store = refs(tensors);
    ZeroSharded optimizer{BareWholeTensor(0), store, comm, zero::BalancedPartition{},
                          zero::Replicated{}};
    return train(optimizer, store, comm.rank());
  });
  const auto all = [&]<class Comm, class Store>(std::type_identity<Comm>, std::type_identity<Store>,
                                                auto view) {
    return with_store<Store>(world, [&](Store& store, auto& comm) {
             return ZeroSharded{BareWholeTensor(0),
                                store,
                                Comm(comm),
                                BareWholeTensorPartition(0),
                                view,
                                BareStage(0),
                                BarePrecision(0),
                                BareObserver(0)};
           }) == expected;
  };
  CHECK(all(std::type_identity<BareCommunicator>{}, std::type_identity<BareStore<BareParameter>>{},
            SmallBuckets{96}));
  CHECK(all(std::type_identity<BareSharedCommunicator>{},
            std::type_identity<BareStore<BareGradientRebindable>>{}, BareGradientArenaView(96)));
}

TEST_CASE("a flat store", "[ranks]") {
  const int world = GENERATE(1, 2, 3);
  CAPTURE(world);
  const Bits expected = shipped(world);
  struct View {
    std::string_view name;
    std::span<const std::size_t> shape;
    std::span<float> values, gradient;
  };
  const auto flat = [&]<class Comm>(std::type_identity<Comm>) {
    return on_ranks(world, [](zero::InProcessCommunicator& comm) {
      const Tensors tensors = model();
      std::vector<float> values;
      for (const auto& t : tensors) values.insert(values.end(), t.values.begin(), t.values.end());
      std::vector<float> gradient(values.size());
      std::vector<View> views;
      std::size_t offset = 0;
      for (const auto& t : tensors) {
        const std::size_t n = t.values.size();
        views.push_back({t.name, t.shape, std::span(values).subspan(offset, n),
                         std::span(gradient).subspan(offset, n)});
        offset += n;
      }
      BareFlatStore store(views, values, gradient);
      Comm bare(comm);
      ZeroSharded optimizer{shipped_rule, store, bare, SmallBuckets{64}};
      return train(optimizer, store, comm.rank());
    });
  };
  CHECK(flat(std::type_identity<BareCommunicator>{}) == expected);
  CHECK(flat(std::type_identity<BareSharedCommunicator>{}) == expected);
}

TEST_CASE("the minimal rule does what it says", "[ranks]") {
  const int world = GENERATE(1, 3);
  const Bits got = on_ranks(world, [](zero::InProcessCommunicator& comm) {
    Tensors tensors = model();
    std::vector store = refs(tensors);
    ZeroSharded optimizer{SignSgd{.lr = lr}, store, comm};
    return train(optimizer, store, 0);  // everywhere the same gradients, so their mean's sign too
  });
  Tensors tensors = model();
  std::vector store = refs(tensors);
  for (int step = 0; step < steps; ++step) {
    backward(store, 0, step);
    for (auto& t : tensors) {
      for (std::size_t i = 0; i < t.values.size(); ++i) {
        const float g = t.gradient[i];
        const float sign = g > 0 ? 1.0F : g < 0 ? -1.0F : 0.0F;
        t.values[i] = t.values[i] - static_cast<float>(lr) * sign;
      }
    }
  }
  CHECK(got == bits_of(store));
}

TEST_CASE("the minimal parameter and the minimal observer") {
  float value = 1;
  float slope = 2;
  std::vector store{Scalar{&value, &slope}};
  ZeroSharded optimizer{SignSgd{.lr = 0.25}, store, SoloCommunicator(0), BucketCounter{}};
  optimizer.step();
  CHECK(value == 0.75F);
  CHECK(optimizer.observer().updated == 1);
}

// ---- Stores that users write

namespace {

/// A user's own type, which knows nothing of zero.
struct Layer {
  std::string label;
  std::size_t rows, columns;
  std::unique_ptr<float[]> data, grad;
};

zero::ParamRef<float> as_param(const Layer& layer) {
  return {layer.label, {layer.rows, layer.columns}, layer.data.get(), layer.grad.get()};
}

/// The same with a type of the user's that says no more than it must, by value.
struct LayerView {
  const Layer* layer;
  std::string name() const { return layer->label + ".weight"; }
  std::vector<std::size_t> shape() const { return {layer->rows, layer->columns}; }
  std::span<float> values() const { return {layer->data.get(), layer->rows * layer->columns}; }
  std::span<float> gradient() const { return {layer->grad.get(), layer->rows * layer->columns}; }
};

std::vector<Layer> layers() {
  std::vector<Layer> made;
  for (std::size_t n = 1; n < 6; ++n) {
    Layer layer{"layer" + std::to_string(n), n, 2 * n + 1, {}, {}};
    const std::size_t elements = layer.rows * layer.columns;
    layer.data = std::make_unique<float[]>(elements);
    layer.grad = std::make_unique<float[]>(elements);
    for (std::size_t i = 0; i < elements; ++i) {
      layer.data[i] = static_cast<float>(i % 5) - 1.5F;
    }
    made.push_back(std::move(layer));
  }
  return made;
}

/// Rebinds the user's tensor through a parameter that lasts no longer than a call.
struct MovableTensor {
  std::string name;
  std::array<std::size_t, 1> shape;
  std::span<float> values, gradient;
  std::shared_ptr<const void> owner;
};
struct MovableView {
  MovableTensor* tensor;
  const std::string& name() const { return tensor->name; }
  std::span<const std::size_t> shape() const { return tensor->shape; }
  std::span<float> values() const { return tensor->values; }
  std::span<float> gradient() const { return tensor->gradient; }
  void rebind(std::span<float> values, std::shared_ptr<const void> owner) const {
    tensor->values = values;
    tensor->owner = std::move(owner);
  }
};

}  // namespace

TEST_CASE("a view that makes parameters of a user's own tensors", "[ranks]") {
  const int world = GENERATE(1, 2, 3);
  const Bits expected = on_ranks(world, [](zero::InProcessCommunicator& comm) {
    std::vector<Layer> own = layers();
    std::vector<zero::ParamRef<float>> store;
    for (const Layer& layer : own) store.push_back(as_param(layer));
    ZeroSharded optimizer{BareRule(lr, momentum), store, comm};
    return train(optimizer, store, comm.rank());
  });
  CHECK(on_ranks(world, [](zero::InProcessCommunicator& comm) {
          std::vector<Layer> own = layers();
          ZeroSharded optimizer{BareRule(lr, momentum), own | std::views::transform(as_param),
                                comm};
          auto store = own | std::views::transform(as_param);
          return train(optimizer, store, comm.rank());
        }) == expected);
  CHECK(on_ranks(world, [](zero::InProcessCommunicator& comm) {
          std::vector<Layer> own = layers();
          const auto view = [](const Layer& layer) { return LayerView{&layer}; };
          auto store = own | std::views::transform(view);
          ZeroSharded optimizer{BareRule(lr, momentum), store, comm};
          return train(optimizer, store, comm.rank());
        }) == expected);
}

TEST_CASE("a view of parameters that can be moved", "[ranks]") {
  const int world = GENERATE(1, 2);
  const auto run = [&](auto view) {
    return on_ranks(world, [&](zero::InProcessCommunicator& comm) {
      std::vector<float> first(9, 1.5F), second(14, -0.5F);
      std::vector<float> first_gradient(9), second_gradient(14);
      std::vector<MovableTensor> own{{"first", {9}, first, first_gradient, {}},
                                     {"second", {14}, second, second_gradient, {}}};
      auto store = own | std::views::transform([](MovableTensor& t) { return MovableView{&t}; });
      Bits bits;
      {
        ZeroSharded optimizer{BareRule(lr, momentum), store, comm, view};
        bits = train(optimizer, store, comm.rank());
      }
      if (bits_of(store) != bits) bits.clear();  // the values outlive the optimizer
      const bool moved = own[0].owner != nullptr && own[0].values.data() != first.data();
      if (moved != std::is_same_v<decltype(view), zero::ParamView>) bits.clear();
      return bits;
    });
  };
  const Bits moved = run(zero::ParamView{});
  CHECK(!moved.empty());
  CHECK(moved == run(zero::NoView{}));
}

TEST_CASE("a store typed at run time has a lane of float and one of double", "[ranks]") {
  const int world = GENERATE(1, 2, 3);
  CAPTURE(world);
  const auto alone = [&]<class T>(std::type_identity<T>) {
    return on_ranks(world, [](zero::InProcessCommunicator& comm) {
      std::vector<Tensor<T>> tensors = model<T>();
      std::vector<zero::ParamRef<T>> store;
      for (auto& t : tensors) {
        store.emplace_back(t.name, t.shape, t.values.data(), t.gradient.data());
      }
      ZeroSharded optimizer{BareRule(lr, momentum), store, comm};
      return train(optimizer, store, comm.rank());
    });
  };
  const Bits floats = alone(std::type_identity<float>{});
  const Bits doubles = alone(std::type_identity<double>{});

  const auto mixed = [&]<class Comm>(std::type_identity<Comm>, bool want_floats) {
    return on_ranks(world, [&](zero::InProcessCommunicator& in_process) {
      // Alternating; gradients as if each element type were alone.
      std::vector<BareVariantParameter::AnyTensor> tensors;
      std::vector<Tensor<float>> f = model<float>();
      std::vector<Tensor<double>> d = model<double>();
      for (std::size_t i = 0; i < f.size(); ++i) {
        f[i].name += ".float";
        d[i].name += ".double";
        tensors.emplace_back(std::move(f[i]));
        tensors.emplace_back(std::move(d[i]));
      }
      BareStore<BareVariantParameter> store(tensors);
      std::vector<BareVariantParameter> float_half, double_half;
      for (std::size_t i = 0; i < tensors.size(); ++i) {
        (i % 2 == 0 ? float_half : double_half).emplace_back(tensors[i]);
      }
      Comm comm(in_process);
      ZeroSharded optimizer{BareRule(lr, momentum), store, comm, SmallBuckets{128}};
      for (int step = 0; step < steps; ++step) {
        backward(float_half, comm.rank(), step);
        backward(double_half, comm.rank(), step);
        optimizer.step();
      }
      static_cast<void>(optimizer.template state<double>());
      return bits_of(want_floats ? float_half : double_half);
    });
  };
  const auto check = [&](auto comm) {
    CHECK(mixed(comm, true) == floats);
    CHECK(mixed(comm, false) == doubles);
  };
  check(std::type_identity<BareSharedCommunicator>{});
  check(std::type_identity<BareCommunicator>{});
}

// ---- Observers

namespace {

/// Counts events and remembers whether they came in pairs.
struct Counter {
  using Key = std::tuple<zero::Phase, std::size_t, std::size_t>;
  std::map<Key, int> seen{};
  std::map<zero::Phase, std::size_t> elements{};
  std::vector<zero::Event> open{};
  bool paired = true;

  static Key key(const zero::Event& e) { return {e.phase, e.lane, e.bucket}; }
  void begin(const zero::Event& event) { open.push_back(event); }
  void end(const zero::Event& event) {
    paired = paired && !open.empty() && key(open.back()) == key(event) &&
             open.back().elements == event.elements;
    if (!open.empty()) open.pop_back();
    ++seen[key(event)];
    elements[event.phase] += event.elements;
  }
};

/// Whether each bucket of each lane was seen once a step in just these phases.
template <class Optimizer>
bool saw(Optimizer& optimizer, std::vector<zero::Phase> phases, int rank) {
  Counter expected;
  for (const zero::Phase phase : phases) {
    for (std::size_t lane = 0; lane < optimizer.layout().lanes(); ++lane) {
      for (std::size_t b = 0; b < optimizer.layout().buckets(lane); ++b) {
        expected.seen[{phase, lane, b}] = steps;
      }
      // Without sharding every rank updates everything, padding aside.
      const bool all = phase == zero::Phase::update && !Optimizer::stage_type::shards_state;
      expected.elements[phase] += steps * (all ? optimizer.layout().extent(lane)
                                               : optimizer.layout().shard_elements(lane, rank));
    }
  }
  const Counter& got = optimizer.observer();
  return got.paired && got.open.empty() && got.seen == expected.seen &&
         got.elements == expected.elements && optimizer.layout().buckets(0) > 3;
}

}  // namespace

TEST_CASE("observers see each bucket begin and end, once a step and phase", "[ranks]") {
  const int world = GENERATE(1, 2, 3);
  CAPTURE(world);
  const auto observed = [&]<class Comm>(std::type_identity<Comm>, auto stage,
                                        std::vector<zero::Phase> phases,
                                        zero::Gradients gradients) {
    if (world == 1) phases = {zero::Phase::update};
    const Bits all = on_ranks(world, [&](zero::InProcessCommunicator& in_process) {
      Tensors tensors = model();
      BareStore<BareParameter> store(tensors);
      Comm comm(in_process);
      ZeroSharded optimizer{SignSgd{},
                            store,
                            comm,
                            Counter{},
                            SmallBuckets{64},
                            stage,
                            zero::Settings{.gradients = gradients}};
      for (int step = 0; step < steps; ++step) {
        backward(store, gradients == zero::Gradients::local ? comm.rank() : 0, step);
        optimizer.step();
      }
      return Bits{saw(optimizer, phases, comm.rank())};
    });
    return all == Bits{1};
  };
  using enum zero::Phase;
  using enum zero::Gradients;
  constexpr std::type_identity<BareCommunicator> buckets;
  constexpr std::type_identity<BareSharedCommunicator> shared;
  CHECK(observed(shared, zero::Stage1{}, {update, gather}, local));
  CHECK(observed(shared, zero::Stage1{}, {update, gather}, reduced));
  CHECK(observed(shared, zero::Replicated{}, {reduce, update}, local));
  CHECK(observed(shared, zero::Replicated{}, {update}, reduced));
  CHECK(observed(buckets, zero::Stage1{}, {reduce, update, gather}, local));
  CHECK(observed(buckets, zero::Stage1{}, {update, gather}, reduced));
  CHECK(observed(buckets, zero::Replicated{}, {reduce, update}, local));
  CHECK(observed(buckets, zero::Replicated{}, {update}, reduced));
}
