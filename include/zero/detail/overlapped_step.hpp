// SPDX-License-Identifier: Apache-2.0
/// @file
/// How ranks step that shard gradients, and values: traffic goes on while they compute.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <optional>
#include <span>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "zero/bucket_view.hpp"
#include "zero/communicator.hpp"
#include "zero/detail/agreement.hpp"
#include "zero/detail/bucket_traffic.hpp"
#include "zero/detail/courier.hpp"
#include "zero/detail/gradient_pool.hpp"
#include "zero/detail/join_scope.hpp"
#include "zero/detail/lane.hpp"
#include "zero/detail/lane_room.hpp"
#include "zero/detail/launch_order.hpp"
#include "zero/detail/step_agreement.hpp"
#include "zero/detail/unit_values.hpp"
#include "zero/detail/update_loop.hpp"
#include "zero/layout.hpp"
#include "zero/observer.hpp"
#include "zero/settings.hpp"
#include "zero/traffic_report.hpp"

namespace zero::detail {

/// Two duplicates of the communicator, each with a thread: one reduces buckets in one fixed order
/// as soon as their turn has come, the other gathers. Neither waits for the other, so that the
/// order of gathers need not fit that in which gradients become ready.
///
/// A round is one backward: every bucket is reduced once in it. Without accumulation a step has
/// one.
template <class State>
class OverlappedStep {
  using Comm = decltype(std::declval<typename State::communicator_type&>().duplicate());

 public:
  /// To be followed by `rebuild`.
  explicit OverlappedStep(State& state)
      : state_(state), agreement_(state), pool_(state), values_(state) {}
  OverlappedStep(const OverlappedStep&) = delete;
  OverlappedStep& operator=(const OverlappedStep&) = delete;
  ~OverlappedStep() {
    // A rank that leaves before its time waits for nobody.
    const bool unwinds = std::uncaught_exceptions() > exceptions_;
    if (!unwinds && reducing_.idle()) values_.finish_what_is_ahead();
    // What peers still wait for can't be finished without this rank's caller.
    if (!reducing_.idle() || !values_.idle()) abort("an optimizer was destroyed in a step");
    stop();
  }

  // Gradients.

  /// To be called before any of a round's gradients is noted. The round before must have been
  /// reduced: its gradients lay where this one's will.
  void begin_round() {
    if (!std::exchange(round_is_over_, false)) return;
    if (reduces()) reducing_.wait_for_all();
    order_.begin_round();
    // What parameters show backward writes to as it likes.
    borrows_ = State::View::gradients == Residency::arena;
    pool_.begin_round();
    state_.for_each_lane(
        [](auto& lane) { std::fill(lane.gradients.begin(), lane.gradients.end(), nullptr); });
  }

  /// Makes room for a parameter's gradient, which is about to be written.
  /// @param fresh whether nothing has been written to it in this round
  void open(std::size_t leader, const char* verb, bool fresh) {
    begin_round();
    pool_.open(leader, verb, fresh, [&] {
      if (reducing_.wait_for_one()) return true;
      reducing_.require_sound();
      return false;
    });
  }

  /// A parameter's place has its whole gradient, or none: reduces every bucket whose turn has come.
  void complete(std::size_t leader) {
    begin_round();
    if (!reduces()) return;
    reducing_.require_sound();
    order_.complete(*state_.layout, leader);
    while (order_.turn_has_come()) reduce_next();
  }

  /// The backward is over, and the next one's gradients are added to its.
  void end_round() {
    begin_round();
    if (state_.alone()) {
      add_own_round();
      pool_.close_all();
      ++rounds_;
      round_is_over_ = true;
      return;
    }
    while (order_.any_left()) reduce_next();
    ++rounds_;
    round_is_over_ = true;
    if (borrows_) reducing_.wait_for_all();
  }

  /// A gradient of this round lies where the next backward may write without asking.
  void borrow() noexcept { borrows_ = true; }

  /// Whether sums of earlier backward passes are there.
  [[nodiscard]] bool accumulates() const { return rounds_ > 0; }
  void prepare_to_add() {
    if (state_.alone()) {
      state_.for_each_lane([&](auto& lane) {
        const std::size_t kept = state_.layout->shard_elements(lane.index, state_.rank());
        using Sums = std::remove_cvref_t<decltype(lane.reduced)>;
        if (lane.reduced.size() < kept) lane.reduced = Sums(kept, state_.settings.memory);
      });
      return;
    }
    for_each_lane_and(state_, traffic_, [](auto&, auto& traffic) { traffic->prepare_to_add(); });
  }

  /// Of a rank alone, whose gradients are their own sums.
  void add_own_round() {
    state_.for_each_lane([&]<class Lane>(Lane& lane) {
      using A = typename Lane::arithmetic;
      for (const OwnedFragment& owned : lane.owned) {
        const auto own = state_.own_gradient(lane)(owned.fragment, 0);
        A* const sums = lane.reduced.data() + owned.shard_begin;
        for (std::size_t at = 0; at < owned.fragment.elements; at += look_chunk) {
          const std::size_t count = std::min(look_chunk, owned.fragment.elements - at);
          if (rounds_ == 0) {
            sum_sources(own, at, count, sums + at);
            continue;
          }
          alignas(64) A chunk[look_chunk];
          sum_sources(own, at, count, chunk);
          const std::array<const A*, 2> both{sums + at, chunk};
          sum_sources(GradientSum<A>{both, 1}, 0, count, sums + at);
        }
      }
    });
  }

  // Steps.

  /// Forgets what was marked.
  void forget() noexcept {
    if (!reduces()) pool_.close_all();
    rounds_ = 0;
    round_is_over_ = true;
  }

  /// Ends what is on its way, and frees its memory for the peers' part.
  void give_up(const std::string& why) noexcept {
    abort(why);
    stop();
    for_each_lane_and(state_, traffic_, [](auto&, auto& traffic) {
      if (traffic) traffic->abandon();
    });
    values_.abandon();
  }

  [[nodiscard]] std::size_t staging_bytes() const {
    std::size_t sum = values_.staging_bytes();
    std::apply([&](const auto&... t) { ((sum += t ? t->staging_bytes() : 0), ...); }, traffic_);
    return sum;
  }
  /// Of gradients that wait to be reduced.
  [[nodiscard]] const PeakCounter& pooled() const noexcept { return pool_.bytes(); }
  [[nodiscard]] const auto& values() const noexcept { return values_; }
  [[nodiscard]] auto& values() noexcept { return values_; }

  [[nodiscard]] TrafficReport traffic() const {
    TrafficReport report;
    const auto seconds = [](auto duration) {
      return std::chrono::duration<double>(duration).count();
    };
    const auto tell = [&](const auto& traffic, TrafficReport::Kind& kind) {
      const auto [worked, waited] = traffic.worked_and_waited();
      kind.busy = seconds(worked);
      kind.exposed = seconds(waited);
    };
    tell(reducing_, report.reduce);
    tell(values_, report.gather);
    report.reduce.bytes = payload_;
    report.gather.bytes = values_.payload();
    return report;
  }

  /// Reduces the round's remaining buckets for nothing: a rank that marked gradients has started
  /// some, and the peers must have started as many before anything else is agreed upon.
  void drain() {
    if (state_.alone()) return;
    if (reduces()) {
      begin_round();
      while (order_.any_left()) reduce_next();
      reducing_.wait_for_all();
    }
    values_.settle();
  }

  /// Between steps: no values are on their way, or here ahead of time.
  void settle() {
    if (!state_.alone()) values_.settle();
  }

  /// Prepares for the layout, which is new or has grown. Nothing may be on its way.
  void rebuild() {
    order_.rebuild(*state_.layout, [&](std::size_t i) { return state_.steps_alone(i); });
    round_is_over_ = true;
    learned_ = false;
    pool_.rebuild();
    if (!state_.alone()) {
      if (!comm_) comm_.emplace(state_.comm().duplicate());
      reducing_.stop();
      for_each_lane_and(state_, traffic_, [&](auto& lane, auto& traffic) {
        traffic.emplace(lane, *state_.layout, *comm_, Journey::reduce,
                        state_.settings.poison_padding, state_.memory_for_peers(),
                        state_.settings.memory);
      });
      agreement_.rebuild();
      all_positions_.resize(order_.size() * static_cast<std::size_t>(state_.all_ranks()));
      reducing_.start(order_.size() + 1, [this](const Reduction& errand) { carry_out(errand); });
    }
    values_.rebuild();
  }

  StepEnd step(const std::string& refusal, bool& updating) {
    const bool reduces_now = reduces();
    if (reduces_now) {
      begin_round();
      while (order_.any_left()) reduce_next();
    }
    round_is_over_ = true;
    values_.settle();
    values_.agree_to_step();
    std::optional<StepEnd> ended;
    try {
      ended = agreement_.on_presence(values_.everyone(), refusal, rounds_);
    } catch (const AgreedRefusal&) {
      reducing_.wait_for_all();
      throw;
    }
    if (ended) {
      reducing_.wait_for_all();
      return *ended;
    }
    const bool looks = state_.scaling.looks_first();
    if (looks) {
      look_at_all();
      if (!state_.scaling.decide(agreement_.on_findings(values_.comm()))) return StepEnd::skipped;
    }
    if (looks || !reduces_now || order_.size() == 0) state_.begin_update(updating);
    // The last round's reductions are the last that were handed over, in this order.
    const std::uint64_t before = reducing_.pushed() - (reduces_now ? order_.size() : 0);
    for (std::size_t k = 0; k < order_.size(); ++k) {
      const Launch& launch = order_[k];
      if (reduces_now && !looks) reducing_.wait(before + k + 1);
      state_.begin_update(updating);
      state_.for_each_lane([&](auto& lane) {
        if (lane.index != launch.lane) return;
        if (reduces_now) {
          state_.update_bucket(lane, launch.bucket, state_.own_sums(lane));
        } else {
          state_.update_bucket(lane, launch.bucket, state_.own_gradient(lane));
        }
        if (!lane.comes_and_goes(launch.bucket)) values_.gather(launch);
      });
    }
    values_.wait_for_all();
    if (reduces_now && !std::exchange(learned_, true)) learn_order();
    return StepEnd::applied;
  }

 private:
  struct Reduction {
    Launch launch{};
    bool adds = false;
  };
  [[nodiscard]] bool reduces() {
    return !state_.alone() && state_.settings.gradients == Gradients::local;
  }
  void abort(const std::string& why) noexcept {
    abort_quietly(comm_, why);
    values_.abort(why);
  }
  void stop() noexcept {
    reducing_.stop();
    values_.stop();
  }

  void reduce_next() { reducing_.push({order_.take_next(), rounds_ > 0}); }

  /// On the reducing thread.
  void carry_out(const Reduction& errand) {
    for_each_lane_and(state_, traffic_, [&](auto& lane, auto& traffic) {
      if (lane.index != errand.launch.lane) return;
      const std::size_t bucket = errand.launch.bucket;
      const Interval whole = state_.layout->bucket(lane.index, bucket);
      const Interval mine = state_.layout->slice(lane.index, bucket, state_.rank());
      using Storage = typename std::remove_cvref_t<decltype(lane)>::storage;
      const std::size_t bytes = pool_.complete(lane, whole);
      state_.observe(Phase::reduce, lane.index, bucket, [&] {
        traffic->start_reduce(bucket, errand.adds);
        traffic->finish_all();
      });
      pool_.close(lane, bucket, whole, bytes);
      payload_ += (whole.size() - mine.size()) * sizeof(typename Storage::wire);
    });
  }

  void look_at_all() {
    if (!reduces()) {
      state_.look_at_own_gradients();
      return;
    }
    const std::uint64_t before = reducing_.pushed() - order_.size();
    for (std::size_t k = 0; k < order_.size(); ++k) {
      reducing_.wait(before + k + 1);
      state_.for_each_lane([&](auto& lane) {
        if (lane.index != order_[k].lane) return;
        state_.look_at_bucket(lane, order_[k].bucket, false, state_.own_sums(lane));
      });
    }
  }

  void learn_order() {
    values_.everyone()
        .exchange(std::as_bytes(order_.positions()),
                  std::as_writable_bytes(std::span(all_positions_)))
        .wait();
    order_.adopt(all_positions_);
  }

  State& state_;
  int exceptions_ = std::uncaught_exceptions();  ///< when this was made
  LaunchOrder order_{};
  std::vector<LaunchOrder::Position> all_positions_{};
  bool learned_ = false;
  StepAgreement<State> agreement_;
  std::size_t rounds_ = 0;     ///< that have been reduced for the step to come
  bool round_is_over_ = true;  ///< and none has begun since
  bool borrows_ = false;       ///< whether some of its gradients are not leased
  GradientPool<State> pool_;
  std::atomic<std::uint64_t> payload_{0};
  UnitValues<State, Comm> values_;
  std::optional<Comm> comm_{};
  typename OverlappedTrafficOf<typename State::Lanes, State, Comm>::type traffic_{};
  Courier<Reduction> reducing_{};  ///< last: its thread uses everything above
};

}  // namespace zero::detail
