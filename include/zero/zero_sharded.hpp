// SPDX-License-Identifier: Apache-2.0
/// @file
/// `ZeroSharded`: an optimizer whose state is spread over the ranks of a communicator.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "zero/bucket_view.hpp"
#include "zero/bucket_view/no_view.hpp"
#include "zero/bucket_view/param_view.hpp"
#include "zero/comm/in_process.hpp"
#include "zero/communicator.hpp"
#include "zero/detail/engine.hpp"
#include "zero/detail/policies.hpp"
#include "zero/error.hpp"
#include "zero/layout.hpp"
#include "zero/observer.hpp"
#include "zero/optimizer.hpp"
#include "zero/parameter.hpp"
#include "zero/partition.hpp"
#include "zero/partition/contiguous.hpp"
#include "zero/precision.hpp"
#include "zero/settings.hpp"
#include "zero/stage.hpp"

namespace zero {

/// What a step came to.
struct Outcome {
  bool applied = false;   ///< false: skipped, nothing has changed
  std::int64_t step = 0;  ///< how many steps have been applied, this one included
};

/// A step that has been started. On the host it has also finished.
class Step {
 public:
  explicit Step(Outcome outcome) : outcome_(outcome) {}
  /// Waits for the step, and tells what it came to.
  [[nodiscard]] Outcome outcome() const noexcept { return outcome_; }

 private:
  Outcome outcome_;
};

/// Bytes that one rank keeps beyond the caller's own memory. Element arrays, exactly; bookkeeping
/// (a few dozen bytes a parameter and bucket) is not counted.
struct MemoryReport {
  std::size_t state = 0;      ///< the optimizer's slots
  std::size_t values = 0;     ///< arenas that parameters were moved into
  std::size_t gradients = 0;  ///< summed gradients
  std::size_t staging = 0;    ///< buckets on their way
  [[nodiscard]] std::size_t total() const noexcept { return state + values + gradients + staging; }
};

/// One interval of one slot of one parameter that this rank keeps.
template <Element T>
struct StateSlice {
  std::string_view parameter;
  std::string_view slot;
  Interval elements;  ///< counted in the parameter
  std::span<const T> values;
};

/// The place where backward writes a gradient, until it goes out of scope.
template <class Engine, Element T>
class GradientLease {
 public:
  GradientLease(Engine& engine, std::size_t parameter)
      : engine_(&engine),
        parameter_(parameter),
        memory_(engine.template begin_lease<T>(parameter, adds_)) {}
  GradientLease(GradientLease&& other) noexcept
      : engine_(std::exchange(other.engine_, nullptr)),
        parameter_(other.parameter_),
        adds_(other.adds_),
        memory_(other.memory_) {}
  GradientLease& operator=(GradientLease&&) = delete;
  ~GradientLease() {
    if (engine_ != nullptr) engine_->end_lease(parameter_);
  }

  /// As many elements as the parameter has.
  [[nodiscard]] std::span<T> values() const noexcept { return memory_; }
  /// True: something was written since the last step (by this parameter, or one tied to it), so add
  /// to it. False: overwrite, whatever is there.
  [[nodiscard]] bool adds() const noexcept { return adds_; }

 private:
  Engine* engine_;
  std::size_t parameter_;
  bool adds_ = false;
  std::span<T> memory_;
};

/// Wraps an optimizer around parameters in any form: each of the K ranks keeps 1/K of the optimizer
/// state, steps its part, and fetches the others', with the same bits for any K.
///
/// @code
/// zero::ZeroSharded optimizer{zero::Adam{.lr = 1e-3}, store, comm};
/// zero::ZeroSharded optimizer{zero::Sgd{.lr = .1}, store, comm, zero::ParamView{4_MiB}};
/// optimizer.step();
/// @endcode
///
/// The third and following arguments are policies and `Settings`, in any order; a policy left out
/// has its default. An lvalue store or communicator is used where it is and must outlive the
/// optimizer; an rvalue is kept inside.
///
/// Construction and `step` are collective: all ranks call them, in the same order. Verbs may be
/// called from any thread; `step` must not run at the same time as another verb's use of the same
/// gradients. Where a verb throws `UsageError`, nothing has changed. Where an operation between
/// ranks fails, every rank gets a `CommunicatorError`; if a step had begun to update, the optimizer
/// has failed for good: whatever marks, leases, steps or shows state and options says so. (Between
/// ranks that share memory one that is reading its peers' is waited for, beyond the timeout, so
/// that memory may be freed once a verb has thrown.) A moved-from optimizer can only be destroyed
/// or assigned to; leases end before their optimizer does.
///
/// @tparam Opt an `UpdateRule` for every element type of the store
/// @tparam Store a `ParamStore`, or a reference to one
/// @tparam Comm a `Communicator` for every element type of the store, or a reference to one
template <class Opt, class Store = std::vector<ParamRef<float>>, class Comm = InProcessCommunicator,
          class Partition = ContiguousPartition, class BucketView = detail::DefaultView<Store>,
          class Stage = Stage1, class Precision = NativePrecision, class Observe = NoObserver>
class ZeroSharded {
  using store_type = std::remove_reference_t<Store>;
  using comm_type = std::remove_reference_t<Comm>;

  static_assert(ParamStore<store_type>,
                "zero: the store must be a sized random-access range whose elements model "
                "zero::Parameter (name, shape, values, gradient); see zero/parameter.hpp");
  static_assert(detail::AllElements<store_type, detail::IsOwnArithmetic>::value,
                "zero: this version steps elements that are computed in as they are stored; use "
                "float or double");
  static_assert(detail::AllElements<store_type, detail::IsOptimizer<Opt>>::value,
                "zero: the optimizer must be an update rule (slots, scalars<Real>(t), an update "
                "that is generic in its numbers) or a whole-tensor optimizer for every element "
                "type of the store; see zero/optimizer.hpp");
  static_assert(PartitionPolicy<Partition>,
                "zero: the partition must model zero::PartitionPolicy; see zero/partition.hpp");
  static_assert(!detail::AnyWholeTensor<Opt, store_type>::value || !CuttingPartition<Partition>,
                "zero: a whole-tensor optimizer needs complete tensors, but this partition cuts "
                "them; use a partition that keeps tensors whole");
  static_assert(!detail::AnyWholeTensor<Opt, store_type>::value,
                "zero: whole-tensor optimizers can't be stepped yet; use an update rule");
  static_assert(BucketViewPolicy<BucketView>,
                "zero: the bucket view must model zero::BucketViewPolicy; see "
                "zero/bucket_view.hpp");
  static_assert(!ParamStore<store_type> || !detail::moves_values<BucketView> ||
                    detail::RebindableStore<store_type>,
                "zero: this bucket view moves parameters into buckets, but the store's parameters "
                "have no rebind(values, owner), or are const; add it, or use zero::NoView");
  static_assert(detail::supported_residency<BucketView>,
                "zero: this version keeps values with the caller or in an arena, and gradients "
                "with the caller; use zero::NoView or zero::ParamView");
  static_assert(StagePolicy<Stage>,
                "zero: the stage must model zero::StagePolicy; see zero/stage.hpp");
  static_assert(!detail::shards_gradients<Stage>,
                "zero: this version shards the optimizer state only; use zero::Stage1");
  static_assert(detail::AllElements<store_type, detail::IsNative<Precision>>::value,
                "zero: this version keeps slots and traffic in the parameters' own element types; "
                "use zero::NativePrecision");
  static_assert(detail::AllElements<store_type, detail::IsCommunicator<comm_type>>::value,
                "zero: the communicator must model zero::Communicator for every element type of "
                "the store; see zero/communicator.hpp");
  static_assert(detail::same_memory_space<store_type, comm_type>,
                "zero: the store and the communicator work in different memory spaces; use a "
                "communicator for the memory that the parameters lie in");
  static_assert(Observer<Observe>,
                "zero: the observer must model zero::Observer; see zero/observer.hpp");

  using Engine = detail::Engine<Opt, Store, Comm, Partition, BucketView, Stage, Observe>;
  using first_element = typename detail::first_of<typename Engine::elements>::type;

 public:
  using optimizer_type = Opt;
  using store_argument = Store;
  using communicator_argument = Comm;
  using partition_type = Partition;
  using bucket_view_type = BucketView;
  using stage_type = Stage;
  using precision_type = Precision;
  using observer_type = Observe;

  /// Collective. Throws `UsageError` on all ranks, and changes nothing, where one rank's store or
  /// options can't be used, or where ranks differ in parameters, initial values or policies; the
  /// message names the rank and the first parameter concerned.
  template <class... P>
  ZeroSharded(std::type_identity_t<Opt> options, std::type_identity_t<Store> store,
              std::type_identity_t<Comm> comm, P... policies)
      : ZeroSharded(Groups<Opt>{std::move(options)}, std::forward<Store>(store),
                    std::forward<Comm>(comm), std::move(policies)...) {}

  /// One set of options a group; `Parameter::group()` counts in them.
  template <class... P>
  ZeroSharded(Groups<std::type_identity_t<Opt>> groups, std::type_identity_t<Store> store,
              std::type_identity_t<Comm> comm, P... policies)
      : engine_(std::make_unique<Engine>(
            std::move(groups.options), std::forward<Store>(store), std::forward<Comm>(comm),
            detail::pick<Partition>(policies...), detail::pick<BucketView>(policies...),
            detail::pick<Observe>(policies...), detail::pick<Settings>(policies...))) {
    static_assert(
        ((detail::families<P> == 1) && ...),
        "zero: an argument after the communicator is not a policy (partition, bucket "
        "view, stage, precision, observer) nor zero::Settings, or is two of them at once");
    static_assert(detail::one_of_each<P...>,
                  "zero: two policies of one kind, or two zero::Settings, were given; give at most "
                  "one of each");
    static_assert(
        ((detail::families<P> != 1 ||
          detail::OneOf<P, Partition, BucketView, Stage, Precision, Observe, Settings>::value) &&
         ...) ||
            !detail::one_of_each<P...>,
        "zero: a policy that was given differs from this type's template argument of its "
        "kind; make them the same");
    static_assert(detail::Obtainable<P...>::template all<Partition, BucketView, Observe>,
                  "zero: a policy type of this optimizer has no default; give one after the "
                  "communicator");
  }

  /// Leases the memory that backward writes parameter i's gradient to. End the lease before marking
  /// the parameter. `T` is its element type, needed only where a store has several.
  template <Element T = first_element>
  [[nodiscard]] auto gradient(std::size_t i) {
    return GradientLease<Engine, T>(*engine_, i);
  }

  /// Parameter i's gradient is complete and stays untouched until `step` returns. From any thread,
  /// in any order, once a step. What isn't marked counts as ready at `step` where the store shows a
  /// gradient, and as absent where it shows none.
  void mark_ready(std::size_t i) { engine_->mark(i, detail::Mark::ready); }

  /// Parameter i has no gradient on this rank in this step: zeros to the sum. Absent on all ranks,
  /// it is not stepped.
  void mark_absent(std::size_t i) { engine_->mark(i, detail::Mark::absent); }

  /// Collective: reduces gradients, updates this rank's shard, gathers the parameters. Where one
  /// rank refuses (options that make no sense, an open lease, a gradient of another size), all
  /// throw `UsageError` and nothing has changed; marks must be given anew.
  Step step() { return Step(Outcome{true, engine_->step()}); }

  /// Fills all gradients that the store shows with zeros.
  void zero_grad() { engine_->zero_gradients(); }

  /// The groups' options. They may be changed between steps (the same on all ranks), so any
  /// schedule works; they are checked at the next step.
  [[nodiscard]] std::span<Opt> groups() { return engine_->usable_state().groups; }
  /// Throws `UsageError` for a group that doesn't exist.
  [[nodiscard]] Opt& group(std::size_t g) {
    std::vector<Opt>& all = engine_->usable_state().groups;
    if (g >= all.size()) {
      throw UsageError("group: there is no group " + std::to_string(g) + "; there are " +
                       std::to_string(all.size()));
    }
    return all[g];
  }

  /// How many steps have been applied.
  [[nodiscard]] std::int64_t steps() const {
    return engine_->locked([](const auto& state) { return state.step_number; });
  }
  /// How often parameter i has been stepped: not in steps in which it was absent on all ranks.
  [[nodiscard]] std::int64_t steps(std::size_t i) const {
    engine_->require(i, "steps");
    return engine_->locked(
        [i](const auto& state) { return state.step_counts[state.parameters[i].leader]; });
  }

  /// Where everything lies and who owns it.
  [[nodiscard]] const Layout<Partition>& layout() const noexcept {
    return *engine_->state().layout;
  }

  /// This rank's optimizer state of element type `T`, in the order of its shard. The spans stay
  /// valid as long as the optimizer, their contents until the next step.
  template <Element T = first_element>
  [[nodiscard]] std::vector<StateSlice<T>> state() const {
    const auto& lane = std::get<detail::lane_of<T, typename Engine::elements>::value>(
        engine_->usable_state().lanes);
    std::vector<StateSlice<T>> slices;
    const auto add = [&](const Fragment& f, std::size_t begin) {
      for (std::size_t s = 0; s < engine_->state().slots_allocated; ++s) {
        slices.push_back({engine_->state().parameters[f.parameter].name,
                          Opt::slots[s],
                          {f.parameter_begin, f.parameter_begin + f.elements},
                          lane.state[s].span().subspan(begin, f.elements)});
      }
    };
    if constexpr (Stage::shards_state) {
      for (const auto& owned : lane.owned) add(owned.fragment, owned.shard_begin);
    } else {
      const Interval all{0, layout().extent(lane.index)};
      for (const Fragment& f : layout().fragments(lane.index, all)) add(f, f.lane_begin);
    }
    return slices;
  }

  [[nodiscard]] MemoryReport memory() const {
    return engine_->locked([&](auto& state) {
      MemoryReport report;
      state.for_each_lane([&](const auto& lane) {
        for (const auto& slot : lane.state) report.state += slot.bytes();
        if (lane.arena) report.values += lane.arena->bytes();
        report.gradients += lane.reduced.bytes();
      });
      report.staging = engine_->staging_bytes();
      return report;
    });
  }

  [[nodiscard]] Observe& observer() noexcept { return engine_->state().observer; }

 private:
  std::unique_ptr<Engine> engine_;
};

/// The only guide: policies in any order, an lvalue store or communicator by reference.
template <class First, class Store, class Comm, class... P>
ZeroSharded(First, Store&&, Comm&&, P...)
    -> ZeroSharded<detail::optimizer_of<First>, Store, Comm,
                   detail::choose<detail::PartitionFamily, ContiguousPartition, P...>,
                   detail::choose<detail::BucketViewFamily, detail::DefaultView<Store>, P...>,
                   detail::choose<detail::StageFamily, Stage1, P...>,
                   detail::choose<detail::PrecisionFamily, NativePrecision, P...>,
                   detail::choose<detail::ObserverFamily, NoObserver, P...>>;

}  // namespace zero
