// SPDX-License-Identifier: Apache-2.0
/// @file
/// How ranks step that reach each other through collectives alone.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "zero/detail/agreement.hpp"
#include "zero/detail/bucket_traffic.hpp"
#include "zero/detail/findings.hpp"
#include "zero/detail/join_scope.hpp"
#include "zero/detail/lane.hpp"
#include "zero/detail/store.hpp"
#include "zero/error.hpp"
#include "zero/layout.hpp"
#include "zero/observer.hpp"
#include "zero/settings.hpp"

namespace zero::detail {

/// What ranks that don't share memory tell each other in a step, followed by one bit a parameter:
/// whether its gradient is there.
struct StepMessage {
  Topic topic;
  Text refusal;           ///< why the rank can't step, or empty
  JoinWord join;          ///< of the join that it steps in
  std::uint64_t options;  ///< fingerprint of all groups
  std::uint64_t identity;
};

/// A bucket of some lane, in the order in which all ranks send them.
struct Launch {
  std::size_t lane;
  std::size_t bucket;
  std::size_t last_parameter;
};

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
  explicit BucketStep(State& state) : state_(state) {}

  /// A parameter's place has its whole gradient: sends every bucket whose turn has come.
  void complete(std::size_t leader) {
    if (!reduces_buckets()) return;
    const Interval buckets = state_.layout->buckets_of(leader);
    auto& waiting = waiting_[state_.parameters[leader].lane];
    for (std::size_t b = buckets.begin; b < buckets.end; ++b) --waiting[b];
    while (next_launch_ < launches_.size()) {
      const Launch& next = launches_[next_launch_];
      if (waiting_[next.lane][next.bucket] > 0) return;
      start_next_reduce();
    }
  }

  /// Forgets what was marked; nothing may be on its way.
  void forget() {
    if (!state_.alone()) expect_all();
  }

  /// Ends what was on its way, and frees its memory for the peers' part.
  void give_up() noexcept {
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
    while (next_launch_ < launches_.size()) start_next_reduce();
    finish_traffic();
  }

  /// Prepares for the layout, which is new or has grown. Nothing may be on its way.
  void rebuild() {
    launches_.clear();
    state_.for_each_lane(
        [&](auto& lane) { waiting_[lane.index].assign(state_.layout->buckets(lane.index), 0); });
    if (!state_.alone()) prepare_traffic();
  }

  /// Buckets go through the communicator: reductions were started as gradients became ready, each
  /// bucket is updated once its sum is there, and gathered while the next is updated. Where sums
  /// must be looked at first, all reductions end before the first update.
  StepEnd step(const std::string& refusal, bool& updating) {
    const bool reduces = reduces_buckets();
    while (reduces && next_launch_ < launches_.size()) start_next_reduce();
    std::optional<StepEnd> ended;
    try {
      ended = exchange_presence(refusal);
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
      if (!state_.scaling.decide(exchange_findings())) {
        finish_traffic();
        return StepEnd::skipped;
      }
    }
    if (looks || !reduces || launches_.empty()) state_.begin_update(updating);
    std::array<std::size_t, State::lane_count> reduced{};
    for (const Launch& launch : launches_) {
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
    for (const Launch& launch : launches_) {
      with_lane_and_traffic(launch.lane, [&](auto& lane, auto& traffic) {
        finish_reduce(launch, lane, traffic, finished);
        state_.look_at_bucket(lane, launch.bucket, false, sums_of(launch.bucket, lane, traffic));
      });
    }
  }

  [[nodiscard]] Findings exchange_findings() {
    state_.comm()
        .exchange(std::as_bytes(std::span(&state_.findings, 1)),
                  std::as_writable_bytes(std::span(findings_)))
        .wait();
    Findings all;
    for (const Findings& of_rank : findings_) all.add(of_rank);
    return all;
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
    const Launch& next = launches_[next_launch_++];
    with_lane_and_traffic(next.lane,
                          [&](auto&, auto& traffic) { traffic.start_reduce(next.bucket); });
  }

  template <class Lane, class Traffic>
  void make_traffic(Lane& lane, std::optional<Traffic>& traffic) {
    traffic.emplace(lane, *state_.layout, state_.comm(), state_.settings.poison_padding,
                    state_.memory_for_peers(), state_.settings.memory);
  }

  void prepare_traffic() {
    for_each_lane_and_traffic([&](auto& lane, auto& traffic) {
      make_traffic(lane, traffic);
      for (std::size_t b = 0; b < state_.layout->buckets(lane.index); ++b) {
        std::size_t last = 0;
        for (const Fragment& f :
             state_.layout->fragments(lane.index, state_.layout->bucket(lane.index, b))) {
          last = std::max(last, f.parameter);
        }
        launches_.push_back({lane.index, b, last});
      }
    });
    // Backward makes the last registered gradients first.
    std::sort(launches_.begin(), launches_.end(), [](const Launch& a, const Launch& b) {
      if (a.last_parameter != b.last_parameter) return a.last_parameter > b.last_parameter;
      return a.bucket > b.bucket;
    });
    message_.resize(sizeof(StepMessage) + (state_.parameters.size() + 7) / 8);
    messages_.resize(message_.size() * static_cast<std::size_t>(state_.all_ranks()));
    findings_.resize(static_cast<std::size_t>(state_.world()));
    expect_all();
  }

  /// Sets each bucket to wait for all its parameters.
  void expect_all() {
    next_launch_ = 0;
    for (auto& waiting : waiting_) std::fill(waiting.begin(), waiting.end(), 0);
    for (std::size_t i = 0; i < state_.parameters.size(); ++i) {
      if (!state_.steps_alone(i)) continue;
      const Interval buckets = state_.layout->buckets_of(i);
      for (std::size_t b = buckets.begin; b < buckets.end; ++b) {
        ++waiting_[state_.parameters[i].lane][b];
      }
    }
  }

  /// Tells the others what this rank has, or why it refuses. Returns what `agree_to_go_on` does.
  [[nodiscard]] std::optional<StepEnd> exchange_presence(const std::string& refusal) {
    const StepMessage mine{Topic::step, to_text(refusal), state_.join_word, state_.options,
                           state_.identity};
    std::memcpy(message_.data(), &mine, sizeof mine);
    std::fill(message_.begin() + sizeof mine, message_.end(), std::byte{0});
    for (std::size_t i = 0; i < state_.present.size(); ++i) {
      if (state_.present[i] != 0) message_[sizeof mine + i / 8] |= std::byte{1} << (i % 8);
    }
    state_.everyone()
        .exchange(std::span<const std::byte>(message_), std::span<std::byte>(messages_))
        .wait();
    const auto from = [&](int r) {
      return std::span<const std::byte>(messages_).subspan(
          static_cast<std::size_t>(r) * message_.size(), message_.size());
    };
    const auto head = [&](int r) {
      StepMessage theirs;
      std::memcpy(&theirs, from(r).data(), sizeof theirs);
      return theirs;
    };
    for (int r = 0; r < state_.all_ranks(); ++r) {
      require_topic("step", static_cast<std::size_t>(r), head(r).topic, mine.topic);
    }
    for (int r = 0; r < state_.all_ranks(); ++r) {
      require_same_optimizer(r, head(r).identity, state_.identity);
    }
    const auto ended = state_.agree_to_go_on([&](int r) { return head(r).join; });
    // Where nothing will be stepped, options may differ.
    const std::uint64_t options_of_rank_0 = head(0).options;
    for (int r = 0; r < state_.all_ranks(); ++r) {
      const StepMessage theirs = head(r);
      require_agreement_to_step(r, theirs.refusal.data(), theirs.options,
                                ended ? theirs.options : options_of_rank_0, state_.some_serve());
    }
    if (ended) return ended;
    state_.agree_on_presence([&](std::size_t i) {
      typename State::Presence presence{false, true};
      for (int r = 0; r < state_.all_ranks(); ++r) {
        const bool there =
            (from(r)[sizeof(StepMessage) + i / 8] >> (i % 8) & std::byte{1}) != std::byte{0};
        presence.somewhere = presence.somewhere || there;
        presence.everywhere = presence.everywhere && there;
      }
      return presence;
    });
    return std::nullopt;
  }

  State& state_;
  std::vector<Launch> launches_{};
  std::size_t next_launch_ = 0;
  std::array<std::vector<std::size_t>, State::lane_count> waiting_{};  ///< parameters to come
  std::vector<std::byte> message_{};
  std::vector<std::byte> messages_{};
  std::vector<Findings> findings_{};  ///< of the group's ranks; other groups have the same
  typename TrafficOf<typename State::Lanes, State>::type traffic_{};
};

}  // namespace zero::detail
