// SPDX-License-Identifier: Apache-2.0
/// @file
/// How ranks step that work in CUDA memory: everything is enqueued, nothing is waited for.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <memory_resource>
#include <optional>
#include <span>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "zero/communicator.hpp"
#include "zero/cuda/communicator.hpp"
#include "zero/cuda/detail/device_decision.cuh"
#include "zero/cuda/detail/device_traffic.cuh"
#include "zero/cuda/detail/device_units.cuh"
#include "zero/cuda/detail/fragment_table.cuh"
#include "zero/cuda/detail/gradient_blocks.hpp"
#include "zero/cuda/detail/look.cuh"
#include "zero/cuda/detail/step_reports.hpp"
#include "zero/cuda/detail/tensor_step.cuh"
#include "zero/cuda/detail/update.cuh"
#include "zero/cuda/memory.hpp"
#include "zero/cuda/step.hpp"
#include "zero/cuda/stream.hpp"
#include "zero/detail/agreement.hpp"
#include "zero/detail/join_scope.hpp"
#include "zero/detail/lane.hpp"
#include "zero/detail/lane_room.hpp"
#include "zero/detail/launch_order.hpp"
#include "zero/detail/rounding.hpp"
#include "zero/detail/storage.hpp"
#include "zero/detail/units.hpp"
#include "zero/element.hpp"
#include "zero/error.hpp"
#include "zero/layout.hpp"
#include "zero/observer.hpp"
#include "zero/optimizer.hpp"
#include "zero/outcome.hpp"
#include "zero/settings.hpp"

namespace zero::detail {

/// Two streams: the communicator's, in which gradients are packed, reduced and gathered, bucket
/// after bucket in one fixed order, the same on all ranks; and the caller's, in which sums are
/// looked at, the step is decided upon, and the shard is updated. What ranks tell each other
/// travels as one more gather, so the host learns of skipped steps only when it asks. (But for
/// whole-tensor optimizers, which the host calls: it waits for the decision then.)
template <class State>
class DeviceStep {
  using Opt = typename State::optimizer_type;
  using Comm = typename State::communicator_type;
  template <class Lane>
  using Traffic =
      cuda::detail::DeviceTraffic<Lane, Comm, typename State::Partition, typename State::Stage>;
  using StreamView = cuda::StreamView;

  static_assert(!State::has_replicas,
                "zero: groups of ranks (zero::HybridCommunicator) are not known on a device");

  struct NoUnits {
    explicit NoUnits(State&) {}
    void rebuild() {}
  };
  using Units =
      std::conditional_t<State::Stage::shards_values, cuda::detail::DeviceUnits<State>, NoUnits>;

  /// What a rank keeps of one lane beside its arrays.
  template <class Lane>
  struct OfLane {
    using Table = cuda::detail::FragmentTable<typename Lane::element>;
    Table kept;    ///< what it updates, by bucket
    Table looked;  ///< its own slices, where it updates more than these
    std::optional<Traffic<Lane>> traffic;
  };
  template <class Lanes>
  struct OfLanes;
  template <class... Lane>
  struct OfLanes<std::tuple<Lane...>> {
    using type = std::tuple<OfLane<Lane>...>;
  };

 public:
  /// To be followed by `rebuild`.
  explicit DeviceStep(State& state) : state_(state), units_(state), decision_(state) {
    cuda::check(cudaGetDevice(&own_device_), "cudaGetDevice");
    require_device("construction", talks());
  }
  DeviceStep(const DeviceStep&) = delete;
  DeviceStep& operator=(const DeviceStep&) = delete;
  /// Memory is freed in the order of the legacy default stream: after what is under way.
  ~DeviceStep() { order_frees(); }

  /// Prepares for the layout, which is new or has grown. Nothing may be on its way.
  void rebuild() {
    order_frees();
    order_.rebuild(*state_.layout, [&](std::size_t i) { return state_.steps_alone(i); });
    std::pmr::memory_resource* const memory = state_.memory();
    for_each_lane([&](auto& lane, auto& of) {
      of.kept = table_of(lane, State::Stage::shards_state, memory);
      if (updates_all()) of.looked = table_of(lane, true, memory);
      of.traffic.reset();
      if (!reduces() && state_.alone()) return;
      of.traffic.emplace(lane, *state_.layout, state_.comm(), state_.settings.poison_padding,
                         memory);
    });
    if (captured_) upload_always();
    reserve();
    const std::size_t count = state_.parameters.size();
    marked_.resize(count);
    late_.assign(count, 0);
    if constexpr (State::pools_gradients) {
      const std::size_t limit = limit_of_pool(state_.stage, *state_.layout, state_.parameters,
                                              element_bytes(typename State::elements{}));
      blocks_ =
          cuda::detail::GradientBlocks(count, limit, reduces() && pool_bytes(state_.stage) != 0,
                                       state_.settings.poison_released, memory);
      packed_.assign(count, 0);
      learned_ = false;
      round_is_over_ = true;
      units_.rebuild();
    }
    decision_.rebuild();
  }

  /// Throws `UsageError` unless the optimizer's device is current, and `stream`'s, and where that
  /// captures what can't be captured.
  void require_device(const char* verb, StreamView stream = {}) {
    int current = 0, of_stream = 0;
    cuda::check(cudaGetDevice(&current), "cudaGetDevice");
    const std::string ours = std::to_string(own_device_);
    if (current != own_device_) {
      throw UsageError(std::string(verb) + ": device " + std::to_string(current) +
                       " is current, but this optimizer was made on device " + ours +
                       "; call cudaSetDevice(" + ours + ") in this thread first");
    }
    cuda::check(cudaStreamGetDevice(stream.get(), &of_stream), "cudaStreamGetDevice");
    if (of_stream != own_device_) {
      throw UsageError(std::string(verb) + ": the stream is of device " +
                       std::to_string(of_stream) + ", but this optimizer was made on device " +
                       ours + "; give it a stream of that device");
    }
    require_capturable(verb, stream);
  }
  /// Throws `UsageError` where marks came in streams that captured and the step's does not, or the
  /// other way round: the graph would reduce nothing, or nothing but the graph.
  void require_marks_alike(StreamView stream = {}) {
    const Capture other = captures(stream) ? Capture::no : Capture::yes;
    if (!marked_in_[static_cast<std::size_t>(other)]) return;
    throw UsageError(
        std::string("step: its stream ") +
        (other == Capture::no
             ? "captures, but gradients were marked before the capture began; mark them "
               "within it"
             : "does not capture, but gradients were marked within a capture; step "
               "within it"));
  }

  /// What `stream` holds now comes before parameter i's gradient is read.
  void note_mark(std::size_t i, StreamView stream) {
    marked_in_[static_cast<std::size_t>(captures(stream) ? Capture::yes : Capture::no)] = true;
    marked_[i].record(stream);
    if (reduces()) {
      state_.comm().stream().wait(marked_[i]);
    } else {
      awaited_.push_back(i);  // by the step, in its stream
    }
  }

  /// Parameter i's gradient is there when the step's stream comes to the step, and not before.
  void note_mark(std::size_t i) { late_[state_.parameters[i].leader] = 1; }

  /// Whether a leader's gradient was marked so.
  [[nodiscard]] bool is_late(std::size_t leader) const { return late_[leader] != 0; }

  /// A parameter's place has its whole gradient: sends every bucket whose turn has come.
  void complete(std::size_t leader) {
    begin_round();
    if (!reduces() || late_[leader] != 0) return;
    order_.complete(*state_.layout, leader);
    while (order_.turn_has_come()) start_next_reduce();
  }

  /// Forgets what was marked.
  void forget() noexcept {
    awaited_.clear();
    marked_in_ = {};
    rounds_ = 0;
    end_of_round();
    if constexpr (State::pools_gradients) let_go_of_gradients();
  }

  // Of stages that pool gradients, whose rounds are one backward each.

  /// To be called before any of a round's gradients is noted.
  void begin_round() {
    if constexpr (State::pools_gradients) {
      if (!std::exchange(round_is_over_, false)) return;
      std::fill(packed_.begin(), packed_.end(), std::size_t{0});
      state_.for_each_lane(
          [](auto& lane) { std::fill(lane.gradients.begin(), lane.gradients.end(), nullptr); });
    }
  }
  /// Makes room for a parameter's gradient, which `stream` is about to write.
  void open(std::size_t leader, const char* verb, bool, StreamView stream = {}) {
    begin_round();
    const ParameterInfo& info = state_.parameters[leader];
    blocks_.note_capture(captures(stream));
    blocks_.open(leader, info.elements * info.element_bytes, verb, state_.name_of(leader), stream);
  }
  [[nodiscard]] std::byte* pooled_gradient(std::size_t leader) const {
    return blocks_.memory(leader);
  }
  /// A gradient stays where the framework has it until it is packed, and is in order with that.
  void borrow() noexcept {}
  void prepare_to_add() {
    for_each_lane([&](auto&, auto& of) {
      if (of.traffic) of.traffic->prepare_to_add(state_.memory());
    });
  }
  /// The backward is over, and the next one's gradients are added to its. What wasn't marked comes
  /// after what the legacy default stream holds; what that is given later, after all reading.
  void end_round() {
    begin_round();
    let_wait(talks(), StreamView());
    while (order_.any_left()) start_next_reduce();
    let_wait(StreamView(), talks());
    ++rounds_;
    end_of_round();
  }
  [[nodiscard]] auto& values() noexcept { return units_; }
  [[nodiscard]] std::size_t pooled_bytes() const { return blocks_.reserved(); }
  [[nodiscard]] std::size_t gathered_bytes() const {
    if constexpr (State::Stage::shards_values) return units_.reserved();
    return 0;
  }

  void give_up(const std::string& why) noexcept {
    try {
      if constexpr (State::Stage::shards_values) units_.abort(why);
    } catch (...) {  // peers learn by a timeout
    }
  }

  [[nodiscard]] std::size_t staging_bytes() const {
    std::size_t sum = decision_.bytes();
    std::apply(
        [&](const auto&... of) {
          ((sum +=
            of.kept.bytes() + of.looked.bytes() + (of.traffic ? of.traffic->staging_bytes() : 0)),
           ...);
        },
        of_lanes_);
    return sum;
  }

  /// Reduces the round's remaining buckets for nothing, waits for all that is under way, and shows
  /// where it has led.
  void drain() {
    if (reduces()) {
      begin_round();
      while (order_.any_left()) start_next_reduce();
    }
    refresh();
  }

  /// Between steps: no values are on their way, or here ahead of time, and the state shows where
  /// the device stands.
  void settle() {
    if constexpr (State::Stage::shards_values) units_.settle(StreamView());
    refresh();
  }
  /// The host has changed what the state shows.
  void restate() {
    decision_.rebuild();
    if constexpr (State::Stage::shards_values) units_.changed(StreamView());
  }

  /// Blocks the host until nothing is under way, and shows the state where the device stands.
  void refresh() {
    synchronize();
    decision_.show();
  }

  /// Enqueues a whole step. A rank that refuses takes part in it, so that its peers learn of it.
  StepEnd step(const std::string& refusal, bool& updating, StreamView stream) {
    try {
      return enqueue_step(refusal, updating, stream);
    } catch (...) {
      note_broken_step(stream);
      throw;
    }
  }

  /// Throws `UsageError` where an earlier step was not taken and nobody has asked what it came to.
  /// Not where the last one wasn't, though it may be done by now: it can still be asked.
  void require_told() {
    if (last_ == nullptr) return;  // while it captures, nobody may ask for events
    reports_.for_each_done_before(last_.get(),
                                  [&](const Report& report) { decision_.require_told(report); });
  }

  /// The step that was enqueued last.
  [[nodiscard]] cuda::Step last_step() {
    return cuda::Step(
        this,
        [](void* self, const void* slot) {
          return static_cast<DeviceStep*>(self)->outcome_of(*static_cast<const Slot*>(slot));
        },
        last_);
  }
  /// In device memory.
  [[nodiscard]] const double* loss_scale() const {
    return &decision_.device_report()->scale.loss_scale;
  }
  /// Blocks the host until nothing is under way, in `stream` neither, where graphs may be.
  [[nodiscard]] Outcome last_outcome(StreamView stream) {
    cuda::Event& launched = turns_[turn_++ % turns_.size()];
    launched.record(stream);
    wait_for(launched);
    synchronize();
    Report report{};
    State::Memory::copy(decision_.device_report(), 1, &report);
    return decision_.outcome_of(report);
  }

 private:
  using Report = cuda::detail::StepReport;
  using Slot = cuda::detail::ReportSlot<Report>;

  [[nodiscard]] std::size_t ranks() { return static_cast<std::size_t>(state_.world()); }
  /// Whether gradients are summed, if only with those of earlier backward passes.
  [[nodiscard]] bool reduces() {
    return (State::pools_gradients || !state_.alone()) &&
           state_.settings.gradients == Gradients::local;
  }
  [[nodiscard]] StreamView talks() { return state_.comm().stream(); }

  enum class Capture : std::uint8_t { no, yes };
  [[nodiscard]] static bool is_capturing(StreamView stream) {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    cuda::check(cudaStreamIsCapturing(stream.get(), &status), "cudaStreamIsCapturing");
    return status != cudaStreamCaptureStatusNone;
  }
  void require_capturable(const char* verb, StreamView stream) {
    if (!is_capturing(stream)) return;
    const auto refuse = [&](const char* why) {
      throw UsageError(std::string(verb) + ": the stream captures, but " + why);
    };
    if constexpr (State::steps_tensors) {
      refuse(
          "a whole-tensor optimizer waits for the device in each step and can't be captured; step "
          "it "
          "outside of graphs, or use an update rule");
    }
    if (state_.alone()) return;
    if constexpr (requires { requires !Comm::capturable; }) {
      refuse(
          "ranks over this communicator meet on the host; capture ranks over NCCL, or one alone");
    }
    if (State::Stage::shards_values) {
      refuse(
          "units of several ranks are gathered ahead, in a stream of their own; use "
          "zero::Stage2 in graphs");
    }
  }

  StepEnd enqueue_step(const std::string& refusal, bool& updating, StreamView stream) {
    if (!refusal.empty() && state_.alone()) throw AgreedRefusal(refusal);
    if (!state_.alone()) state_.comm().check();
    if constexpr (State::Stage::shards_values) {
      units_.check();
      units_.settle(stream);
    }
    // Steps come one after the other. Of a graph that is the concern of whoever launches it.
    if (!captures(stream) && stream != ended_stream_) stream.wait(ended_);
    begin_.record(stream);
    for (const std::size_t i : awaited_) stream.wait(marked_[i]);
    // Nobody else is told where nobody else is.
    const StreamView tells = state_.alone() ? stream : talks();
    if (reduces() || !state_.alone()) talks().wait(begin_);
    if (reduces()) {
      begin_round();
      while (order_.any_left()) start_next_reduce();
      if (state_.alone()) let_wait(stream, talks());
    }
    const bool looks = state_.scaling.looks_first();
    if (refusal.empty()) decision_.upload_options(captured_, stream);
    std::uint64_t units = 0;
    if constexpr (State::Stage::shards_values) units = units_.history();
    decision_.tell(refusal, units, tells);
    if (looks && refusal.empty()) {
      if (reduces()) let_wait(stream, talks());
      look(stream);
      if (!state_.alone()) let_wait(talks(), stream);
    }
    updating = true;
    if (!state_.alone()) {
      decision_.gather();
      let_wait(stream, talks());
    }
    decision_.decide(stream);
    if constexpr (State::steps_tensors) {  // the host calls it
      cuda::Event& decided = turns_[turn_++ % turns_.size()];
      decided.record(stream);
      wait_for(decided);
      decision_.learn();
    }
    update_and_gather(stream);
    if constexpr (State::pools_gradients) {
      if (!reduces()) blocks_.close_all(stream);
    }
    if constexpr (State::Stage::shards_values) units_.changed(stream);
    report(stream);
    learn_order();  // before a refusal, of which the peers don't know
    if (!refusal.empty()) throw AgreedRefusal(refusal);
    return StepEnd::applied;
  }

  /// Of a round that was not sent to its end. Among others it would have been the last.
  void let_go_of_gradients() noexcept {
    if (!blocks_.any_open() || !state_.alone()) return;
    try {
      cuda::check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");  // whoever writes to them
      blocks_.close_all(talks());
    } catch (...) {  // a device that is lost has no use for them
    }
  }

  /// Room for sums in rank order, where the communicator needs it: made now, a capture can't grow
  /// it.
  void reserve() {
    if constexpr (requires { state_.comm().reserve(std::size_t{}); }) {
      std::size_t bytes = 0;
      for_each_lane([&]<class Lane>(Lane& lane, auto&) {
        for (std::size_t b = 0; b < state_.layout->buckets(lane.index); ++b) {
          for (int r = 0; r < state_.world(); ++r) {
            bytes = std::max(bytes, state_.layout->slice(lane.index, b, r).size() *
                                        sizeof(typename Lane::arithmetic));
          }
        }
      });
      state_.comm().reserve((bytes + slice_alignment) * ranks());
    }
  }

  void end_of_round() noexcept {
    order_.begin_round();
    std::fill(late_.begin(), late_.end(), std::uint8_t{0});
    round_is_over_ = true;
  }

  /// After the first step: the one time that the host waits for its peers.
  void learn_order() {
    if constexpr (State::pools_gradients) {
      if (learned_ || state_.alone() || !reduces() || last_ == nullptr) return;
      learned_ = true;
      std::vector<LaunchOrder::Position> all(order_.size() * ranks());
      state_.comm()
          .exchange(std::as_bytes(order_.positions()), std::as_writable_bytes(std::span(all)))
          .wait();
      order_.adopt(all);
    }
  }

  template <class F>
  void for_each_lane(F&& f) {
    [&]<std::size_t... I>(std::index_sequence<I...>) {
      (f(std::get<I>(state_.lanes), std::get<I>(of_lanes_)), ...);
    }(std::make_index_sequence<State::lane_count>{});
  }

  /// Whether this rank updates more than its own slices.
  [[nodiscard]] bool updates_all() { return !State::Stage::shards_state && !state_.alone(); }

  /// By bucket, `begin` as slots count.
  /// @param own its own slices only
  template <class Lane>
  [[nodiscard]] auto table_of(Lane& lane, bool own, std::pmr::memory_resource* memory) {
    using T = typename Lane::element;
    std::vector<std::vector<cuda::detail::DeviceFragment<T>>> buckets(
        state_.layout->buckets(lane.index));
    const auto add = [&](std::size_t bucket, const Fragment& f, T* values, std::size_t begin) {
      buckets[bucket].push_back({values, nullptr, begin, f.elements, f.parameter_begin,
                                 static_cast<std::uint32_t>(f.parameter)});
    };
    for (std::size_t b = 0; b < buckets.size(); ++b) {
      const Interval whole = state_.layout->bucket(lane.index, b);
      if (own) {
        for (std::size_t k = lane.owned_begin[b]; k < lane.owned_begin[b + 1]; ++k) {
          const OwnedFragment& owned = lane.owned[k];
          const Fragment& f = owned.fragment;
          T* const values =
              lane.comes_and_goes(b) ? lane.kept_values(owned) : lane.value_in_place(b, whole, f);
          add(b, f, values, State::Stage::shards_state ? owned.shard_begin : f.lane_begin);
        }
      } else {
        for (const Fragment& f : state_.layout->fragments(lane.index, whole)) {
          add(b, f, lane.value_in_place(b, whole, f), f.lane_begin);
        }
      }
    }
    return typename OfLane<Lane>::Table(buckets, memory);
  }

  void start_next_reduce() {
    const Launch next = order_.take_next();
    with_lane(next.lane, [&](auto& lane, auto& of) {
      state_.observe(Phase::reduce, lane.index, next.bucket,
                     [&] { of.traffic->reduce(next.bucket, rounds_ > 0); });
      if constexpr (State::pools_gradients) close_gradients(lane, next.bucket);
    });
  }

  /// Of parameters all of whose buckets have been packed.
  template <class Lane>
  void close_gradients(Lane& lane, std::size_t bucket) {
    closed_.clear();
    for (const Fragment& f :
         state_.layout->fragments(lane.index, state_.layout->bucket(lane.index, bucket))) {
      packed_[f.parameter] += f.elements;
      if (packed_[f.parameter] == state_.parameters[f.parameter].elements) {
        closed_.push_back(f.parameter);
      }
    }
    blocks_.close(closed_, talks());
  }

  template <class F>
  void with_lane(std::size_t index, F&& f) {
    for_each_lane([&](auto& lane, auto& of) {
      if (lane.index == index) f(lane, of);
    });
  }

  /// What `later` is given from now on comes after what `earlier` holds.
  void let_wait(StreamView later, StreamView earlier) {
    cuda::Event& event = turns_[turn_++ % turns_.size()];
    event.record(earlier);
    later.wait(event);
  }

  /// Whether `stream` captures. A graph takes along all that its step is to find on the device and,
  /// once there is one, so does every step, since graphs may have been launched before it.
  [[nodiscard]] bool captures(StreamView stream) {
    if (!is_capturing(stream)) return false;
    if (!std::exchange(captured_, true)) upload_always();
    return true;
  }
  void upload_always() {
    for_each_lane([](auto&, auto& of) {
      of.kept.upload_always();
      of.looked.upload_always();
      if (of.traffic) of.traffic->upload_always();
    });
  }

  /// Where a fragment's gradients are summed, or null where they are the caller's own.
  template <class Lane>
  [[nodiscard]] const typename Lane::arithmetic* sums_of(const Lane& lane) {
    return reduces() ? lane.reduced.data() : nullptr;
  }
  template <class Lane, class Table>
  [[nodiscard]] auto range_of(Lane& lane, Table& table, Interval buckets, StreamView stream) {
    if (!reduces()) {
      table.find_gradients(buckets, [&](std::size_t i) { return lane.gradients[i]; }, stream);
    }
    return table.of(buckets);
  }

  void look(StreamView stream) {
    for_each_lane([&](auto& lane, auto& of) {
      using T = typename std::remove_cvref_t<decltype(lane)>::element;
      const auto range = range_of(lane, updates_all() ? of.looked : of.kept,
                                  {0, state_.layout->buckets(lane.index)}, stream);
      const cuda::detail::LookTask<T> task{range.fragments, range.chunks, range.chunk_count,
                                           sums_of(lane), decision_.digits()};
      if (state_.scaling.max_norm) {
        cuda::detail::add_squares(task, stream);
      } else {
        cuda::detail::find_not_finite(task, stream);
      }
    });
  }
  /// Where values are gathered, a bucket is as soon as it is updated.
  void update_and_gather(StreamView stream) {
    if constexpr (State::Stage::shards_state) {
      if (state_.world() > 1) return gather_updated(stream);
    }
    for_each_lane([&](auto& lane, auto& of) {
      update(lane, of, {0, state_.layout->buckets(lane.index)}, stream);
    });
    // Sums are not overwritten before they have been used.
    if (!state_.alone() || (reduces() && !captures(stream))) let_wait(talks(), stream);
  }
  void gather_updated(StreamView stream) {
    for (std::size_t k = 0; k < order_.size(); ++k) {
      const Launch& launch = order_[k];
      with_lane(launch.lane, [&](auto& lane, auto& of) {
        state_.observe(Phase::update, lane.index, launch.bucket,
                       [&] { update(lane, of, {launch.bucket, launch.bucket + 1}, stream); });
        if (lane.comes_and_goes(launch.bucket)) return;
        let_wait(talks(), stream);
        state_.observe(Phase::gather, lane.index, launch.bucket,
                       [&] { of.traffic->gather(launch.bucket, decision_.step()); });
      });
    }
    // Sums are not overwritten before they have been used.
    if constexpr (State::Stage::shards_values) let_wait(talks(), stream);
    let_wait(stream, talks());
  }

  template <class Lane, class Of>
  void update_tensors(Lane& lane, Of& of, Interval buckets, StreamView stream) {
    using S = typename Lane::storage;
    if (!decision_.known_to_apply()) return;
    if (!reduces()) (void)range_of(lane, of.kept, buckets, stream);  // finds gradients
    for (const auto& tensor : of.kept.on_host(buckets)) {
      const auto& step = decision_.template known<typename Lane::arithmetic>()[tensor.parameter];
      if (step.stepping == 0) continue;
      const ParameterInfo& info = state_.parameters[tensor.parameter];
      NoiseKey noise{};
      if constexpr (S::rounding == Rounding::stochastic) {
        noise =
            noise_key(state_.precision.seed, static_cast<std::uint64_t>(step.t), tensor.parameter);
      }
      cuda::detail::step_tensor(state_.groups[info.group], step.t, lane, tensor, sums_of(lane),
                                decision_.step(), noise, std::span<const std::size_t>(info.shape),
                                stream);
    }
  }

  template <class Lane, class Of>
  void update(Lane& lane, Of& of, Interval buckets, StreamView stream) {
    if constexpr (State::steps_tensors) {
      update_tensors(lane, of, buckets, stream);
    } else {
      update_elements(lane, of, buckets, stream);
    }
  }
  template <class Lane, class Of>
  void update_elements(Lane& lane, Of& of, Interval buckets, StreamView stream) {
    const auto range = range_of(lane, of.kept, buckets, stream);
    cuda::detail::UpdateTask<Opt, typename Lane::storage> task{};
    task.fragments = range.fragments;
    task.chunks = range.chunks;
    task.chunk_count = range.chunk_count;
    task.master = lane.master.data();
    if constexpr (State::slots != 0) {
      for (std::size_t s = 0; s < State::slots; ++s) task.state[s] = lane.state[s].data();
    }
    task.sums = sums_of(lane);
    task.steps = decision_.template steps<typename Lane::arithmetic>();
    task.step = decision_.step();
    if constexpr (Lane::storage::rounding == Rounding::stochastic) {
      task.seed = state_.precision.seed;
    }
    cuda::detail::update(task, stream);
  }

  /// The host gets a copy when the step is done; none while it is captured into a graph.
  void report(StreamView stream) {
    last_.reset();
    if (captures(stream)) return;
    last_ = reports_.take();
    cuda::check(cudaMemcpyAsync(last_->memory(), decision_.device_report(), sizeof(Report),
                                cudaMemcpyDeviceToHost, stream.get()),
                "cudaMemcpyAsync");
    last_->done().record(stream);
    ended_.record(stream);
    ended_stream_ = stream;
  }

  [[nodiscard]] Outcome outcome_of(const Slot& slot) {
    wait_for(slot.done());
    return decision_.outcome_of(*slot.memory());
  }
  void wait_for(const cuda::Event& event) {
    if (state_.alone()) {
      event.synchronize();
    } else {
      state_.comm().wait(event);
    }
  }
  void synchronize() {
    if (!state_.alone() || reduces()) {
      cuda::Event& event = turns_[turn_++ % turns_.size()];
      event.record(talks());
      wait_for(event);
    }
    if constexpr (State::Stage::shards_values) {
      cuda::Event& event = turns_[turn_++ % turns_.size()];
      units_.record(event);
      wait_for(event);
    }
    wait_for(ended_);
  }
  /// What is freed comes after what `stream` holds of a step that was not enqueued to its end.
  void note_broken_step(StreamView stream) noexcept {
    try {
      if (captures(stream)) return;
      ended_.record(stream);
      ended_stream_ = stream;
      broken_ = true;
    } catch (...) {
      (void)cudaDeviceSynchronize();
    }
  }

  /// What is freed from now on is freed after what is under way. For the last step's stream its
  /// report has waited by then, which is freed first; where it got that far.
  void order_frees() noexcept {
    try {
      if (broken_) StreamView().wait(ended_);
      if (!state_.alone() || reduces()) let_wait(StreamView(), talks());
      if constexpr (State::Stage::shards_values) units_.order(StreamView());
    } catch (...) {  // a device that is lost doesn't wait
      (void)cudaDeviceSynchronize();
    }
  }

  State& state_;
  int own_device_ = 0;
  bool broken_ = false;              ///< some step was not enqueued to its end
  bool captured_ = false;            ///< some step was, into a graph
  std::array<bool, 2> marked_in_{};  ///< by `Capture`: whether gradients were in this step
  LaunchOrder order_{};
  typename OfLanes<typename State::Lanes>::type of_lanes_{};
  // Of stages that pool gradients.
  struct NoBlocks {};
  std::conditional_t<State::pools_gradients, cuda::detail::GradientBlocks, NoBlocks> blocks_{};
  std::vector<std::size_t> packed_{};  ///< by leader: elements of its gradient, in this round
  std::vector<std::size_t> closed_{};
  std::size_t rounds_ = 0;     ///< that have been reduced for the step to come
  bool round_is_over_ = true;  ///< and none has begun since
  bool learned_ = false;
  Units units_;
  std::vector<cuda::Event> marked_{};   ///< by parameter
  std::vector<std::size_t> awaited_{};  ///< marked, where nothing is sent
  std::vector<std::uint8_t> late_{};    ///< by parameter: sent by the step, not before
  cuda::Event begin_{};
  std::array<cuda::Event, 4> turns_{};
  std::size_t turn_ = 0;
  cuda::Event ended_{};        ///< the last step
  StreamView ended_stream_{};  ///< its stream
  cuda::detail::DeviceDecision<State> decision_;
  cuda::detail::StepReports<Report> reports_{};
  std::shared_ptr<Slot> last_{};
};

}  // namespace zero::detail
