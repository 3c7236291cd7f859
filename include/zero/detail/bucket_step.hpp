// SPDX-License-Identifier: Apache-2.0
/// @file
/// How ranks step that reach each other through collectives alone.
#pragma once

#include <array>
#include <cstddef>
#include <optional>
#include <string>
#include <tuple>
#include <utility>

#include "zero/detail/agreement.hpp"
#include "zero/detail/bucket_traffic.hpp"
#include "zero/detail/join_scope.hpp"
#include "zero/detail/lane.hpp"
#include "zero/detail/lane_room.hpp"
#include "zero/detail/launch_order.hpp"
#include "zero/detail/step_agreement.hpp"
#include "zero/layout.hpp"
#include "zero/observer.hpp"
#include "zero/settings.hpp"

namespace zero::detail {

template <class Lanes, class State>
struct TrafficOf;
template <class... Lane, class State>
struct TrafficOf<std::tuple<Lane...>, State> {
  using type =
      std::tuple<std::optional<BucketTraffic<Lane, typename State::communicator_type,
                                             typename State::Partition, typename State::Stage>>...>;
};

/// Sends buckets in one fixed order, the same on all ranks, as soon as their gradients are there
/// and their turn has come.
template <class State>
class BucketStep {
 public:
  /// To be followed by `rebuild`.
  explicit BucketStep(State& state) : state_(state), agreement_(state) {}

  /// A parameter's place has its whole gradient: sends every bucket whose turn has come.
  void complete(std::size_t leader) {
    if (!reduces_buckets()) return;
    order_.complete(*state_.layout, leader);
    while (order_.turn_has_come()) start_next_reduce();
  }

  /// Forgets what was marked; nothing may be on its way.
  void forget() { order_.begin_round(); }

  /// Ends what was on its way, and frees its memory for the peers' part.
  void give_up(const std::string&) noexcept {
    for_each_lane_and_traffic([](auto&, auto& traffic) {
      if (traffic) traffic->abandon();
    });
  }

  [[nodiscard]] std::size_t staging_bytes() const {
    std::size_t sum = 0;
    std::apply([&](const auto&... t) { ((sum += t ? t->staging_bytes() : 0), ...); }, traffic_);
    return sum;
  }

  /// Reduces the round's remaining buckets for nothing: a rank that marked gradients has started
  /// some, and the peers must have started as many before anything else is agreed upon.
  void drain() {
    if (!reduces_buckets()) return;
    while (order_.any_left()) start_next_reduce();
    finish_traffic();
  }

  /// Between steps nothing is under way but what was marked.
  void settle() noexcept {}

  /// Prepares for the layout, which is new or has grown. Nothing may be on its way.
  void rebuild() {
    order_.rebuild(*state_.layout, [&](std::size_t i) { return state_.steps_alone(i); });
    if (state_.alone()) return;
    for_each_lane_and_traffic([&](auto& lane, auto& traffic) {
      traffic.emplace(lane, *state_.layout, state_.comm(), Journey::both,
                      state_.settings.poison_padding, state_.memory_for_peers(),
                      state_.settings.memory);
    });
    agreement_.rebuild();
  }

  /// Buckets go through the communicator: reductions were started as gradients became ready, each
  /// bucket is updated once its sum is there, and gathered while the next is updated. Where sums
  /// must be looked at first, all reductions end before the first update.
  StepEnd step(const std::string& refusal, bool& updating) {
    const bool reduces = reduces_buckets();
    while (reduces && order_.any_left()) start_next_reduce();
    std::optional<StepEnd> ended;
    try {
      ended = agreement_.on_presence(state_.everyone(), refusal);
    } catch (const AgreedRefusal&) {
      finish_traffic();
      throw;
    }
    if (ended) {
      finish_traffic();
      return *ended;
    }
    const bool looks = state_.scaling.looks_first();
    if (looks) {
      look_at_all();
      if (!state_.scaling.decide(agreement_.on_findings(state_.comm()))) {
        finish_traffic();
        return StepEnd::skipped;
      }
    }
    if (looks || !reduces || order_.size() == 0) state_.begin_update(updating);
    std::array<std::size_t, State::lane_count> reduced{};
    for (std::size_t k = 0; k < order_.size(); ++k) {
      const Launch& launch = order_[k];
      with_lane_and_traffic(launch.lane, [&](auto& lane, auto& traffic) {
        if (reduces) {
          if (!looks) finish_reduce(launch, lane, traffic, reduced);
          state_.begin_update(updating);
          state_.update_bucket(lane, launch.bucket, sums_of(launch.bucket, lane, traffic));
        } else {
          state_.update_bucket(lane, launch.bucket, state_.own_gradient(lane));
        }
        if (State::Stage::shards_state && state_.world() > 1) {
          state_.observe(Phase::gather, lane.index, launch.bucket,
                         [&] { traffic.start_gather(launch.bucket); });
        }
      });
    }
    finish_traffic();
    return StepEnd::applied;
  }

 private:
  [[nodiscard]] bool reduces_buckets() {
    return !state_.alone() && state_.settings.gradients == Gradients::local;
  }

  void finish_traffic() {
    for_each_lane_and_traffic([](auto&, auto& traffic) { traffic->finish_all(); });
  }

  /// Launches are finished in the order in which they were started.
  template <class Lane, class Traffic>
  void finish_reduce(const Launch& launch, Lane& lane, Traffic& traffic,
                     std::array<std::size_t, State::lane_count>& finished) {
    state_.observe(Phase::reduce, lane.index, launch.bucket,
                   [&] { traffic.finish_reduces(++finished[lane.index]); });
  }

  /// Gives a fragment's gradient out of the summed bucket.
  template <class Lane, class Traffic>
  [[nodiscard]] auto sums_of(std::size_t bucket, Lane& lane, Traffic& traffic) {
    const auto scale = static_cast<typename Lane::arithmetic>(state_.scaling.of_step());
    const Interval whole = state_.layout->bucket(lane.index, bucket);
    const Interval mine = state_.layout->slice(lane.index, bucket, state_.rank());
    const std::size_t lane_begin = State::Stage::shards_state ? mine.begin : whole.begin;
    const typename Lane::arithmetic* const sums = lane.reduced.data() + traffic.sum_begin(bucket);
    return [&lane, scale, sums, lane_begin](const Fragment& f, std::size_t) {
      return lane.summed(sums + (f.lane_begin - lane_begin), scale);
    };
  }

  void look_at_all() {
    if (!reduces_buckets()) {
      state_.look_at_own_gradients();
      return;
    }
    std::array<std::size_t, State::lane_count> finished{};
    for (std::size_t k = 0; k < order_.size(); ++k) {
      const Launch& launch = order_[k];
      with_lane_and_traffic(launch.lane, [&](auto& lane, auto& traffic) {
        finish_reduce(launch, lane, traffic, finished);
        state_.look_at_bucket(lane, launch.bucket, false, sums_of(launch.bucket, lane, traffic));
      });
    }
  }

  template <class F>
  void for_each_lane_and_traffic(F&& f) {
    [&]<std::size_t... I>(std::index_sequence<I...>) {
      (f(std::get<I>(state_.lanes), std::get<I>(traffic_)), ...);
    }(std::make_index_sequence<State::lane_count>{});
  }
  template <class F>
  void with_lane_and_traffic(std::size_t lane, F&& f) {
    for_each_lane_and_traffic([&](auto& l, auto& traffic) {
      if (l.index == lane) f(l, *traffic);
    });
  }

  void start_next_reduce() {
    const Launch next = order_.take_next();
    with_lane_and_traffic(next.lane,
                          [&](auto&, auto& traffic) { traffic.start_reduce(next.bucket); });
  }

  State& state_;
  LaunchOrder order_{};
  StepAgreement<State> agreement_;
  typename TrafficOf<typename State::Lanes, State>::type traffic_{};
};

}  // namespace zero::detail
