// SPDX-License-Identifier: Apache-2.0
/// @file
/// `ZeroSharded`: an optimizer whose state is spread over the ranks of a communicator.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "zero/bucket_view.hpp"
#include "zero/bucket_view/no_view.hpp"
#include "zero/bucket_view/param_and_grad_view.hpp"
#include "zero/bucket_view/param_view.hpp"
#include "zero/comm/in_process.hpp"
#include "zero/communicator.hpp"
#include "zero/detail/engine.hpp"
#include "zero/detail/join_scope.hpp"
#include "zero/detail/policies.hpp"
#include "zero/error.hpp"
#include "zero/join_options.hpp"
#include "zero/layout.hpp"
#include "zero/memory_report.hpp"  // IWYU pragma: export
#include "zero/observer.hpp"
#include "zero/optimizer.hpp"
#include "zero/outcome.hpp"  // IWYU pragma: export
#include "zero/parameter.hpp"
#include "zero/partition.hpp"
#include "zero/partition/contiguous.hpp"
#include "zero/precision.hpp"
#include "zero/settings.hpp"
#include "zero/stage.hpp"
#include "zero/traffic_report.hpp"

namespace zero {

/// A step on the host, which has finished. On a device it is a `zero::cuda::Step`.
class Step {
 public:
  explicit Step(Outcome outcome) : outcome_(outcome) {}
  /// What the step came to.
  [[nodiscard]] Outcome outcome() const noexcept { return outcome_; }

 private:
  Outcome outcome_;
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
  template <class... On>
  GradientLease(Engine& engine, std::size_t parameter, On... on)
      : engine_(&engine),
        parameter_(parameter),
        memory_(engine.template begin_lease<T>(parameter, adds_, on...)) {}
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

/// While it lives, gradients are only accumulated: see `ZeroSharded::accumulate`.
template <class Engine>
class AccumulationScope {
 public:
  AccumulationScope(Engine& engine, Accumulation mode) : engine_(&engine) {
    engine.begin_accumulating(mode);
  }
  AccumulationScope(AccumulationScope&& other) noexcept
      : engine_(std::exchange(other.engine_, nullptr)) {}
  AccumulationScope& operator=(AccumulationScope&&) = delete;
  ~AccumulationScope() {
    if (engine_ != nullptr) engine_->end_accumulating();
  }

 private:
  Engine* engine_;
};

/// Wraps an optimizer around parameters in any form: each of the K ranks keeps 1/K of the optimizer
/// state, steps its part, and fetches the others', with the same bits for any K.
///
/// @code
/// zero::ZeroSharded optimizer{zero::Adam{.lr = 1e-3}, store, comm};
/// zero::ZeroSharded optimizer{zero::Sgd{.lr = .1}, store, comm, zero::NoView{4_MiB}};
/// optimizer.step();
/// @endcode
///
/// The arguments after the communicator are policies and `Settings`, in any order; a policy left
/// out has its default: `ContiguousPartition`, `ParamView` where parameters have a `rebind` and
/// `NoView` elsewhere, `Stage1`, `MixedPrecision`, `NoObserver`. An lvalue store or communicator is
/// used where it is and must outlive the optimizer; an rvalue is kept inside.
///
/// Construction and `step` are collective: all ranks call them, in the same order. Verbs may be
/// called from any thread; `step` must not run at the same time as another verb's use of the same
/// gradients. Where a verb throws `UsageError`, nothing has changed, but for `PoolExhausted` and
/// for what `acquire` throws of ranks that disagree or of memory that was written after its
/// release: then this optimizer can't go on. Where an operation between ranks fails, every rank
/// gets a `CommunicatorError`; if a step had begun to update, the optimizer has failed for good:
/// whatever marks, leases, steps or shows state and options says so. (Between ranks that share
/// memory one that is reading its peers' is waited for, beyond the timeout, so that memory may be
/// freed once a verb has thrown.) A moved-from optimizer can only be destroyed or assigned to;
/// leases and `accumulate()` scopes end before their optimizer does.
///
/// @tparam Opt an `UpdateRule` or a `WholeTensorOptimizer` for every element type of the store; of
///         whole tensors on a device a `cuda::TensorOptimizer`
/// @tparam Store a `ParamStore`, or a reference to one
/// @tparam Comm a `Communicator` for every element type of the store, or a reference to one
template <class Opt, class Store = std::vector<ParamRef<float>>, class Comm = InProcessCommunicator,
          class Partition = ContiguousPartition, class BucketView = detail::DefaultView<Store>,
          class Stage = Stage1, class Precision = MixedPrecision, class Observe = NoObserver>
class ZeroSharded {
  using store_type = std::remove_reference_t<Store>;
  using comm_type = std::remove_reference_t<Comm>;

  static_assert(detail::known_space<store_type>,
                "zero: the store's parameters lie in CUDA memory; include zero/cuda.cuh, in a file "
                "that nvcc compiles");
  static_assert(ParamStore<store_type>,
                "zero: the store must be a sized random-access range whose elements model "
                "zero::Parameter (name, shape, values, gradient); see zero/parameter.hpp");
  static_assert(detail::AllElements<store_type, detail::IsStored>::value,
                "zero: an element type must be float or double, or 16 bits of a format that zero "
                "knows (float16, bfloat16); see zero/element.hpp");
  static_assert(detail::AllElements<
                    store_type, detail::IsOptimizer<Opt, detail::space_of<store_type>()>>::value,
                "zero: the optimizer must be an update rule (slots, scalars<Real>(t), an update "
                "that is generic in its numbers) or a whole-tensor optimizer for every element "
                "type of the store; see zero/optimizer.hpp");
  static_assert(
      detail::AllElements<store_type,
                          detail::ReachesTensors<Opt, detail::space_of<store_type>()>>::value,
      "zero: this whole-tensor optimizer steps tensors in host memory, but the store's lie in CUDA "
      "memory; give it an update that takes a stream, and options(), as "
      "zero/cuda/tensor_optimizer.hpp says, or use an update rule");
  static_assert(PartitionPolicy<Partition>,
                "zero: the partition must model zero::PartitionPolicy; see zero/partition.hpp");
  static_assert(!detail::AnyWholeTensor<Opt, store_type>::value || !CuttingPartition<Partition>,
                "zero: a whole-tensor optimizer needs complete tensors, but this partition cuts "
                "them; use zero::BalancedPartition");
  static_assert(BucketViewPolicy<BucketView>,
                "zero: the bucket view must model zero::BucketViewPolicy; see "
                "zero/bucket_view.hpp");
  static_assert(!ParamStore<store_type> || !detail::moves_values<BucketView> ||
                    detail::RebindableStore<store_type>,
                "zero: this bucket view moves parameters into buckets, but the store's parameters "
                "have no rebind(values, owner), or are const; add it (a zero::ParamRef can't have "
                "one), or use zero::NoView");
  static_assert(!ParamStore<store_type> || !detail::moves_gradients<BucketView> ||
                    detail::GradientRebindableStore<store_type>,
                "zero: this bucket view moves gradients into buckets, but the store's parameters "
                "have no rebind_gradient(gradient, owner), or are const; add it, or use "
                "zero::ParamView or zero::NoView");
  static_assert(StagePolicy<Stage>,
                "zero: the stage must model zero::StagePolicy; see zero/stage.hpp");
  static_assert(!detail::shards_gradients<Stage> || !detail::is_communicator<comm_type> ||
                    Duplicable<comm_type>,
                "zero: stages 2 and 3 reduce and gather on threads of their own, so the "
                "communicator must have duplicate() and concurrent(); see zero::Duplicable");
  static_assert(!detail::shards_values<Stage> || !ParamStore<store_type> ||
                    detail::moves_values<BucketView>,
                "zero: stage 3 takes values away while nobody uses them, but this bucket view "
                "leaves them where the caller put them; use zero::ParamView with parameters that "
                "have rebind(values, owner), or zero::ShapedParam in place of zero::ParamRef");
  static_assert(!detail::is_on_device<store_type> || !detail::shards_gradients<Stage> ||
                    !detail::moves_gradients<BucketView>,
                "zero: on a device stages 2 and 3 give gradients memory that differs from step to "
                "step, but this bucket view binds them to one place; use zero::ParamView or "
                "zero::NoView, and write to gradient(i)");
  static_assert(detail::AllElements<store_type, detail::IsPrecision<Precision>>::value,
                "zero: the precision must model zero::PrecisionPolicy for every element type of "
                "the store; see zero/precision.hpp");
  static_assert(detail::AllElements<store_type, detail::KeepsArithmetic<Precision>>::value,
                "zero: a precision's master must be the parameter's type or what that is computed "
                "in, and its slots must be computed in the same; see zero/precision.hpp");
  static_assert(detail::AllElements<store_type, detail::SendsNoMore<Precision>>::value,
                "zero: gradients are sent in the parameter's own element type, or those of float "
                "parameters in 16 bits; let the precision's Wire<T> be one of these");
  static_assert(detail::AllElements<store_type, detail::KeepsUpdates<Precision>>::value,
                "zero: 16-bit parameters without a master copy, rounded to nearest, lose every "
                "update smaller than half a unit of their last place; use zero::MixedPrecision "
                "(float masters) or zero::StochasticPrecision");
  static_assert(detail::AllElements<store_type, detail::IsCommunicator<comm_type>>::value,
                "zero: the communicator must model zero::Communicator for every element type of "
                "the store; see zero/communicator.hpp");
  static_assert(detail::same_memory_space<store_type, comm_type>,
                "zero: the store and the communicator work in different memory spaces; use a "
                "communicator for the memory that the parameters lie in");
  static_assert(Observer<Observe>,
                "zero: the observer must model zero::Observer; see zero/observer.hpp");

  using Engine = detail::Engine<Opt, Store, Comm, Partition, BucketView, Stage, Precision, Observe>;
  using first_element = typename detail::first_of<typename Engine::elements>::type;
  static constexpr bool on_device = Engine::State::space == MemorySpace::cuda;

 public:
  /// On a device, a `zero::cuda::StreamView`.
  using Stream = typename Engine::State::Memory::Stream;
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
  /// message names the rank and the first parameter concerned. On a device also where another
  /// device than that of the communicator's stream is current, and where `Settings::memory` gives
  /// memory that the device can't use.
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
            detail::pick<Stage>(policies...), detail::pick<Precision>(policies...),
            detail::pick<Observe>(policies...), detail::pick<Settings>(policies...))) {
    static_assert(
        ((detail::families<P> == 1) && ...),
        "zero: an argument after the communicator is not a policy (partition, bucket "
        "view, stage, precision, observer) nor zero::Settings, or is two of them at once; what a "
        "half-written one lacks static_assert(zero::PartitionPolicy<P>) and the like tell");
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
    static_assert(
        detail::Obtainable<P...>::template all<Partition, BucketView, Stage, Precision, Observe>,
        "zero: a policy type of this optimizer has no default; give one after the "
        "communicator");
  }

  /// Leases the memory that backward writes parameter i's gradient to: the parameter's own or, at
  /// stages 2 and 3, memory that is there until the gradient has been marked and sent. End the
  /// lease before marking the parameter. `T` is its element type, needed only where a store has
  /// several. Throws `UsageError` for a parameter that doesn't exist, is frozen, leased or marked,
  /// whose gradient is null (but at stages 2 and 3) or of another size or type, and where the store
  /// has changed.
  template <Element T = first_element>
  [[nodiscard]] auto gradient(std::size_t i) {
    return GradientLease<Engine, T>(*engine_, i);
  }
  /// The same on a device, for writes that are enqueued in `stream` (without one, in the legacy
  /// default stream): at stages 2 and 3 the memory may have been another gradient's before.
  template <Element T = first_element>
  [[nodiscard]] auto gradient(std::size_t i, Stream stream)
    requires on_device
  {
    return GradientLease<Engine, T>(*engine_, i, stream);
  }

  /// Parameter i's gradient is complete and stays untouched until `step` returns. From any thread,
  /// in any order, once a step. What isn't marked counts as ready at `step` where the store shows a
  /// gradient or one was leased, and as absent elsewhere. Throws `UsageError` as `gradient` does,
  /// and what the communicator throws, since buckets may be sent.
  void mark_ready(std::size_t i) { engine_->mark(i, detail::Mark::ready); }
  /// The same on a device: complete once what `stream` holds now is done. Without a stream, of a
  /// device too, it is complete when the step's stream comes to the step.
  void mark_ready(std::size_t i, Stream stream)
    requires on_device
  {
    engine_->mark(i, detail::Mark::ready, stream);
  }

  /// Parameter i has no gradient on this rank in this step: zeros to the sum. Absent on all ranks,
  /// it is not stepped.
  void mark_absent(std::size_t i) { engine_->mark(i, detail::Mark::absent); }

  /// Until the returned scope ends, backward passes only accumulate; the one after it marks as
  /// usual, and one step is made of all of them. Gradients are summed, so divide the loss, or
  /// `Settings::gradient_scale`, by their number.
  ///
  /// `Accumulation::local`: any number of passes; full gradients stay on this rank, without
  /// traffic. Marks are checked and otherwise ignored, and leases add from the second on.
  /// `Accumulation::sharded`, one pass a scope: marks mean what they do in the last pass. When the
  /// scope ends every bucket has been handed over to be reduced and added to the sums; what was not
  /// marked is taken as `step` takes it. What fails there, the next step throws. On a device the
  /// scope ends in the order of the legacy default stream: what is not marked with a stream must be
  /// complete there, and gradients in memory of the framework's may be overwritten after that.
  ///
  /// The default is the stage's (`Accumulation`). All ranks use the same mode, and as many sharded
  /// scopes in a step. Throws `UsageError` within another such scope, after the first mark of a
  /// step, and for a mode that the stage does not have.
  [[nodiscard]] auto accumulate(Accumulation mode = detail::default_accumulation<Stage>) {
    return AccumulationScope<Engine>(*engine_, mode);
  }

  /// Collective: the values of all parameters whose `Attributes::unit` is `unit` are in their place
  /// when this returns, until it is released as often as it was acquired. All ranks acquire and
  /// release the same units in the same order; from the second step on the next ones are gathered
  /// ahead. A tied parameter's values come with the unit of what it is tied to. Pointers are the
  /// same each time; outside of `acquire` and `release` what they point to means nothing. Where
  /// values aren't sharded, they are always there.
  ///
  /// Throws `UsageError` where there is no such unit, where ranks acquire different ones and, with
  /// `Settings::poison_released`, where something was written after the release; and
  /// `CommunicatorError`.
  void acquire(int unit) { engine_->acquire(unit); }
  /// Lets go of a unit's values; what was written to them is lost. Throws `UsageError` where it is
  /// not acquired. Where values aren't sharded, only the unit's number is checked.
  void release(int unit) { engine_->release(unit); }
  /// The same on a device, for what is enqueued in `stream` (without one, in the legacy default
  /// stream) from now on, or was until now. Where values are sharded a unit may come to another
  /// place each time: `acquire` rebinds its parameters. Units are gathered over a duplicate of the
  /// communicator, in its stream. Ranks that acquire different units learn of it from the step.
  /// Over `cuda::InProcessCommunicator`, whose operations wait for peers as they are enqueued, the
  /// last mark of a bucket must stand between the same two calls to `acquire` on all ranks (or come
  /// before the step on none): otherwise each waits for another, until the timeout.
  void acquire(int unit, Stream stream)
    requires on_device
  {
    engine_->acquire(unit, stream);
  }
  void release(int unit, Stream stream)
    requires on_device
  {
    engine_->release(unit, stream);
  }

  /// What this rank's traffic has cost it so far.
  [[nodiscard]] TrafficReport traffic() const {
    if constexpr (Engine::State::pools_gradients && !on_device) {
      return engine_->way().traffic();
    } else {
      return {};
    }
  }

  /// Collective: reduces gradients, updates this rank's shard, gathers the parameters. Where one
  /// rank refuses (options that make no sense, an open lease, a gradient of another size), all
  /// throw `UsageError` and nothing has changed; marks must be given anew, and at stages 2 and 3
  /// gradients too, which are gone. Where gradients are
  /// checked (`Settings::finite_check`) and one is not finite on any rank, all skip the step.
  /// Within a `join` with `JoinEnd::raise`, all throw `InputsEnded` where some rank has no input.
  Step step()
    requires(!on_device)
  {
    const bool applied = engine_->step();
    return engine_->locked([&](const auto& state) {
      return Step(Outcome{applied, state.step_number, state.scaling.gradient_norm()});
    });
  }
  /// The same on a device, enqueued in `stream` (the legacy default stream, if none is given) and
  /// the communicator's, both ways in order. The host waits for nothing, so what only the ranks
  /// together know is thrown by the returned step's `outcome()`. Of a step that no rank took a
  /// later `step()` throws why, once the report has arrived, on each rank that has not been told
  /// (the one that refused threw at once). That later step is enqueued all the same
  /// (`last_outcome()` tells of it); the text says which one was not taken.
  /// After a peer has failed the next `step` throws `CommunicatorError`.
  ///
  /// May be captured into a CUDA graph, with marks inside the capture: a mark's stream must capture
  /// where the step's does. Stage 3 of several ranks can't be captured, nor ranks over
  /// `cuda::InProcessCommunicator`, nor whole-tensor optimizers; all of this throws `UsageError`.
  /// The graph keeps the options and the places of gradients that it was captured with, so capture
  /// anew after a change. Whoever launches it orders it after other steps, and waits for it before
  /// the optimizer is asked or destroyed.
  auto step(Stream stream = {})
    requires on_device
  {
    engine_->step(stream);
    return engine_->way().last_step();
  }
  /// Of a device: blocks the host until all that was enqueued is done, and what `stream` holds,
  /// into which graphs of captured steps may have been launched; tells what the last step came to.
  [[nodiscard]] Outcome last_outcome(Stream stream = {})
    requires on_device
  {
    return engine_->way().last_outcome(stream);
  }

  /// Collective: `zero::join` of this optimizer, for ranks with unlike numbers of batches; see
  /// zero/join.hpp.
  template <class Body>
    requires std::invocable<Body&>
  void join(Body&& body, const JoinOptions& options = {}) {
    detail::join(body, options, *engine_);
  }

  /// From the next step on gradients are scaled down so that their norm over all parameters and
  /// ranks is at most `max_norm`, by max_norm / (norm + 1e-6) as PyTorch's `clip_grad_norm_` does.
  /// Infinity only measures (`Outcome::gradient_norm`); `std::nullopt` ends it, and frees nothing.
  /// The same on all ranks. Gradients need room once they are summed: 4 bytes (double: 8) an
  /// element of the shard, allocated here. Of `double` gradients above 1e153 the squares overflow,
  /// and the step is skipped. Throws `UsageError` for a norm that is not above 0.
  void clip_grad_norm(std::optional<double> max_norm) { engine_->clip(max_norm); }

  /// What the loss of the next backward is to be multiplied by; 1 without `Settings::loss_scale`.
  /// On a device this blocks the host until all that was enqueued is done: in a loop let a kernel
  /// read `device_loss_scale()`.
  [[nodiscard]] double loss_scale() const {
    return engine_->locked([](const auto& state) { return state.scaling.loss_scale(); });
  }

  /// The same where the device has it, so that a kernel may read it in the step's stream; this
  /// doesn't block. Valid until a group is added.
  [[nodiscard]] const double* device_loss_scale() const
    requires on_device
  {
    return engine_->way().loss_scale();
  }

  /// Collective: the store shows more parameters at its end than before; they form one more group
  /// with these options; their `group()` must be `groups().size()` as it was before the call. What
  /// was there keeps its place and state. To be called between steps. Throws `UsageError` on all
  /// ranks, and changes nothing, where the new parameters can't be used, among them those that the
  /// optimizer has already, or where gradients were marked or leased; marks must then be given
  /// anew. The store's other parameters must be what they were. Refused within a `join`. While it
  /// runs this rank's state is held twice. What else is thrown fails the communicator; where it
  /// came of handing over buffers, the optimizer too.
  void add_param_group(std::type_identity_t<Opt> options) { engine_->append(std::move(options)); }

  /// Reads the master copies of this rank's 16-bit parameters from the parameters anew: to be
  /// called on all ranks after the caller has changed values (loaded weights, say), which otherwise
  /// the next step overwrites. Nothing happens where there are no masters. At stage 3 values can't
  /// be changed so: what is written to an acquired unit is lost when it is released. On a device
  /// this blocks as `steps()`.
  void reload_masters() { engine_->reload_masters(); }

  /// The store that was given.
  [[nodiscard]] store_type& store() noexcept { return engine_->state().store(); }

  /// Fills all gradients that the store shows with zeros.
  void zero_grad()
    requires(!on_device)
  {
    engine_->zero_gradients();
  }
  /// The same on a device, enqueued in `stream`.
  void zero_grad(Stream stream = {})
    requires on_device
  {
    engine_->zero_gradients(stream);
  }

  /// The groups' options. They may be changed between steps (the same on all ranks), so any
  /// schedule works; they are checked at the next step. The span stays valid until a group is
  /// added.
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

  /// How many steps have been applied. On a device this blocks the host until all that was enqueued
  /// is done.
  [[nodiscard]] std::int64_t steps() const {
    return engine_->locked([](const auto& state) { return state.step_number; });
  }
  /// How often parameter i has been stepped: not in steps in which it was absent on all ranks.
  /// Blocks as `steps()`. Throws `UsageError` for a parameter that doesn't exist.
  [[nodiscard]] std::int64_t steps(std::size_t i) const {
    return engine_->locked([&](const auto& state) {
      engine_->require(i, "steps");
      return state.step_counts[state.parameters[i].leader];
    });
  }

  /// Where everything lies and who owns it.
  [[nodiscard]] const Layout<Partition>& layout() const noexcept {
    return *engine_->state().layout;
  }

  /// This rank's optimizer state of the parameters of element type `T`, in the order of its shard.
  /// The spans stay valid as long as the optimizer and until a group is added, their contents until
  /// the next step. On a device they are device memory, whose contents are there when the steps
  /// that were enqueued are done: this does not wait for them.
  template <Element T = first_element>
  [[nodiscard]] auto state() const {
    const auto& lane = lane_of<T>();
    using Slot = typename std::remove_cvref_t<decltype(lane)>::storage::slot;
    std::vector<StateSlice<Slot>> slices;
    Engine::State::for_each_kept(lane, layout(), [&](const Fragment& f, std::size_t begin) {
      for (std::size_t s = 0; s < engine_->state().slots_allocated; ++s) {
        slices.push_back({engine_->state().parameters[f.parameter].name,
                          Opt::slots[s],
                          {f.parameter_begin, f.parameter_begin + f.elements},
                          lane.state[s].span().subspan(begin, f.elements)});
      }
    });
    return slices;
  }

  /// This rank's master copies of the parameters of element type `T`, likewise; the slot is called
  /// "master". None where they are stepped as they lie.
  template <Element T = first_element>
  [[nodiscard]] auto masters() const {
    const auto& lane = lane_of<T>();
    using S = typename std::remove_cvref_t<decltype(lane)>::storage;
    std::vector<StateSlice<typename S::master>> slices;
    if constexpr (S::has_master) {
      Engine::State::for_each_kept(lane, layout(), [&](const Fragment& f, std::size_t begin) {
        slices.push_back({engine_->state().parameters[f.parameter].name,
                          "master",
                          {f.parameter_begin, f.parameter_begin + f.elements},
                          lane.master.span().subspan(begin, f.elements)});
      });
    }
    return slices;
  }

  /// What this rank keeps, in bytes. On a device this blocks as `steps()`.
  [[nodiscard]] MemoryReport memory() const {
    return engine_->locked([&](auto& state) {
      MemoryReport report;
      state.for_each_lane([&](const auto& lane) {
        for (const auto& slot : lane.state) report.state += slot.bytes();
        report.master += lane.master.bytes();
        if (lane.arena) report.values += lane.arena->bytes();
        if (lane.gradient_arena) report.gradients += lane.gradient_arena->bytes();
        report.gradients += lane.reduced.bytes();
        report.values += lane.shard.bytes();
        report.staging += lane.workspace.bytes();
      });
      report.staging += engine_->staging_bytes();
      if constexpr (Engine::State::pools_gradients) {
        const auto& way = engine_->way();
        if constexpr (on_device) {  // what is kept for them
          report.pooled = report.pooled_peak = way.pooled_bytes();
          report.gathered = report.gathered_peak = way.gathered_bytes();
        } else {
          report.pooled = way.pooled().now();
          report.pooled_peak = way.pooled().peak();
          report.values += state.resident_value_bytes();
          report.gathered = way.values().bytes().now();
          report.gathered_peak = way.values().bytes().peak();
        }
      }
      return report;
    });
  }

  [[nodiscard]] Observe& observer() noexcept { return engine_->state().observer; }

 private:
  friend detail::EngineAccess;

  template <class T>
  [[nodiscard]] const auto& lane_of() const {
    static_assert(
        detail::has_lane<T, typename Engine::elements>,
        "zero: the store has no parameters of this element type; ask for one that it has");
    return std::get<detail::lane_of<T, typename Engine::elements>::value>(
        engine_->usable_state().lanes);
  }

  std::unique_ptr<Engine> engine_;
};

/// The only guide: policies in any order, an lvalue store or communicator by reference.
template <class First, class Store, class Comm, class... P>
ZeroSharded(First, Store&&, Comm&&, P...)
    -> ZeroSharded<detail::optimizer_of<First>, Store, Comm,
                   detail::choose<detail::PartitionFamily, ContiguousPartition, P...>,
                   detail::choose<detail::BucketViewFamily, detail::DefaultView<Store>, P...>,
                   detail::choose<detail::StageFamily, Stage1, P...>,
                   detail::choose<detail::PrecisionFamily, MixedPrecision, P...>,
                   detail::choose<detail::ObserverFamily, NoObserver, P...>>;

}  // namespace zero
