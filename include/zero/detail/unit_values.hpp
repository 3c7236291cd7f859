// SPDX-License-Identifier: Apache-2.0
/// @file
/// How values reach a rank: bucket by bucket after an update, and unit by unit where they are
/// acquired.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "zero/communicator.hpp"
#include "zero/detail/agreement.hpp"
#include "zero/detail/bucket_traffic.hpp"
#include "zero/detail/courier.hpp"
#include "zero/detail/gradient_pool.hpp"
#include "zero/detail/lane.hpp"
#include "zero/detail/lane_room.hpp"
#include "zero/detail/launch_order.hpp"
#include "zero/detail/unit_residence.hpp"
#include "zero/detail/units.hpp"
#include "zero/error.hpp"
#include "zero/layout.hpp"
#include "zero/observer.hpp"
#include "zero/stage.hpp"

namespace zero::detail {

template <class Lanes, class State, class Comm>
struct OverlappedTrafficOf;
template <class... Lane, class State, class Comm>
struct OverlappedTrafficOf<std::tuple<Lane...>, State, Comm> {
  using type = std::tuple<std::optional<
      BucketTraffic<Lane, Comm, typename State::Partition, typename State::Stage>>...>;
};

/// `f(lane, traffic)` for each lane.
template <class State, class Traffics, class F>
void for_each_lane_and(State& state, Traffics& traffics, F&& f) {
  [&]<std::size_t... I>(std::index_sequence<I...>) {
    (f(std::get<I>(state.lanes), std::get<I>(traffics)), ...);
  }(std::make_index_sequence<State::lane_count>{});
}

/// What can't be told, for want of memory, peers learn by a timeout.
template <class Comm>
void abort_quietly(std::optional<Comm>& comm, const std::string& why) noexcept {
  try {
    if (comm) comm->abort(why);
  } catch (...) {
  }
}

/// A duplicate of the communicator, with a thread that gathers over it. Between gathers the step
/// exchanges its messages over it, too.
template <class State, class Comm>
class UnitValues {
 public:
  /// To be followed by `rebuild`.
  explicit UnitValues(State& state) : state_(state) {}

  // What `ZeroSharded` documents.

  void acquire(int unit) {
    const std::scoped_lock lock(mutex_);
    // Where traffic has failed, what came before is there all the same: a peer may have ended
    // already what this rank is about to end.
    residence_.acquire(
        unit, [&](const Unit& u) { return fetch(u); },
        [&](std::uint64_t arrival) { courier_.wait(arrival); });
  }
  void release(int unit) {
    const std::scoped_lock lock(mutex_);
    residence_.release(
        unit, [&](const Unit& u) { let_go(u); }, [&](const Unit& u) { return fetch(u); });
  }
  [[nodiscard]] bool is_there(int id) {
    const std::scoped_lock lock(mutex_);
    return residence_.is_there(id);
  }
  /// Throws `UsageError` where a unit is still held.
  void require_none_held(const char* verb) {
    const std::scoped_lock lock(mutex_);
    residence_.require_none_held(verb);
  }

  /// All gathers have been carried out, and none is ahead of the caller.
  void settle() {
    const std::scoped_lock lock(mutex_);
    courier_.wait_for_all();
    residence_.drop_what_is_ahead([&](const Unit& u) { let_go(u); });
    residence_.end_round();
  }
  /// All ranks are about to step, and none to acquire a unit. Everything must be settled.
  void agree_to_step() {
    if constexpr (State::Stage::shards_values) agree_on({Topic::step, 0});
  }
  /// Starts to gather a bucket that has been updated.
  void gather(const Launch& launch) { courier_.push({launch, nullptr}); }
  void wait_for_all() { courier_.wait_for_all(); }

  [[nodiscard]] Comm& comm() { return *comm_; }
  /// All ranks of all groups.
  [[nodiscard]] auto& everyone() { return all_ranks_of(*comm_); }

  /// Collective: prepares for the layout. Nothing may be on its way.
  void rebuild() {
    std::vector<Unit> units = state_.units();
    const std::size_t count = units.size();
    residence_.rebuild(std::move(units), prefetched_units(state_.stage));
    if (state_.alone()) return;
    if (!comm_) comm_.emplace(state_.comm().duplicate());
    courier_.stop();
    std::size_t buckets = 0;
    for_each_lane_and(state_, traffic_, [&](auto& lane, auto& traffic) {
      traffic.emplace(lane, *state_.layout, *comm_, Journey::gather, state_.settings.poison_padding,
                      state_.memory_for_peers(), state_.settings.memory);
      buckets += state_.layout->buckets(lane.index);
    });
    announcements_.resize(static_cast<std::size_t>(state_.world()));
    courier_.start(buckets + count + 1, [this](const Gather& errand) { carry_out(errand); });
  }

  /// Units that are gathered ahead are so by peers, too, and need nobody's caller: a last pass that
  /// only reads values ends with one on its way. Waits for it.
  void finish_what_is_ahead() noexcept {
    if (residence_.any_held()) return;
    try {
      courier_.wait_for_all();
    } catch (...) {  // peers know
    }
  }
  [[nodiscard]] bool idle() const { return courier_.idle(); }
  void abort(const std::string& why) noexcept { abort_quietly(comm_, why); }
  void stop() noexcept { courier_.stop(); }
  /// After `abort` and `stop`: frees its memory for the peers' part.
  void abandon() noexcept {
    for_each_lane_and(state_, traffic_, [](auto&, auto& traffic) {
      if (traffic) traffic->abandon();
    });
  }

  [[nodiscard]] std::size_t staging_bytes() const {
    std::size_t sum = 0;
    std::apply([&](const auto&... t) { ((sum += t ? t->staging_bytes() : 0), ...); }, traffic_);
    return sum;
  }
  /// Of units that are gathered.
  [[nodiscard]] const PeakCounter& bytes() const noexcept { return gathered_; }
  [[nodiscard]] auto worked_and_waited() const { return courier_.worked_and_waited(); }
  [[nodiscard]] std::uint64_t payload() const noexcept { return payload_; }

 private:
  /// Of a bucket; or, with a unit, says that this is the next that the rank gathers.
  struct Gather {
    Launch launch{};
    const Unit* announced = nullptr;
  };

  /// Starts to gather a unit; returns how many gathers must have been carried out then.
  std::uint64_t fetch(const Unit& unit) {
    for_each_bucket(unit, [&](auto& lane, std::size_t b) {
      const Interval whole = state_.layout->bucket(lane.index, b);
      for (const Fragment& f : state_.layout->fragments(lane.index, whole)) {
        if (!lane.value_pages->written_since(b, {f.lane_begin, f.lane_begin + f.elements})) {
          continue;
        }
        throw UsageError("acquire: " + state_.name_of(f.parameter) +
                         " was written after its unit " + std::to_string(unit.id) +
                         " had been released; use no pointer to it after release");
      }
      lane.value_pages->take(b, whole);
      gathered_.add(whole.size() * sizeof(*lane.base));
    });
    std::uint64_t last = courier_.push({{}, &unit});
    for_each_bucket(
        unit, [&](auto& lane, std::size_t b) { last = courier_.push({{lane.index, b}, nullptr}); });
    return last + 1;
  }
  void let_go(const Unit& unit) {
    for_each_bucket(unit, [&](auto& lane, std::size_t b) {
      const Interval whole = state_.layout->bucket(lane.index, b);
      lane.value_pages->let_go(b, whole);
      gathered_.subtract(whole.size() * sizeof(*lane.base));
    });
  }
  template <class F>
  void for_each_bucket(const Unit& unit, F&& f) {
    for (const UnitBuckets& part : unit.parts) {
      state_.for_each_lane([&](auto& lane) {
        if (lane.index != part.lane) return;
        for (std::size_t b = part.buckets.begin; b < part.buckets.end; ++b) f(lane, b);
      });
    }
  }

  /// On the gathering thread.
  void carry_out(const Gather& errand) {
    if (errand.announced != nullptr) {
      agree_on({Topic::unit, errand.announced->id});
      return;
    }
    for_each_lane_and(state_, traffic_, [&](auto& lane, auto& traffic) {
      if (lane.index != errand.launch.lane) return;
      const std::size_t bucket = errand.launch.bucket;
      state_.observe(Phase::gather, lane.index, bucket, [&] {
        traffic->start_gather(bucket);
        traffic->finish_all();
      });
      const Interval mine = state_.layout->slice(lane.index, bucket, state_.rank());
      payload_ += mine.size() * sizeof(*lane.base) * static_cast<std::size_t>(state_.world() - 1);
    });
  }

  /// Throws `UsageError` where a rank is at something else. Units of equal size would be taken for
  /// one another.
  void agree_on(const UnitAnnouncement& mine) {
    comm_
        ->exchange(std::as_bytes(std::span(&mine, 1)),
                   std::as_writable_bytes(std::span(announcements_)))
        .wait();
    const auto words = [&](std::size_t r) {
      const UnitAnnouncement& of = announcements_[r];
      return "rank " + std::to_string(r) +
             (of.topic == Topic::unit ? " acquires unit " + std::to_string(of.unit)
                                      : std::string(" steps"));
    };
    for (std::size_t r = 1; r < announcements_.size(); ++r) {
      const UnitAnnouncement& theirs = announcements_[r];
      if (theirs.topic == announcements_[0].topic && theirs.unit == announcements_[0].unit)
        continue;
      throw UsageError((mine.topic == Topic::unit ? "acquire: " : "step: ") + words(r) + " where " +
                       words(0) +
                       "; acquire the same units in the same order on all ranks, and step after "
                       "them. This optimizer can't go on");
    }
  }

  State& state_;
  std::mutex mutex_{};  ///< of what follows; taken after the engine's
  UnitResidence residence_{};
  std::vector<UnitAnnouncement> announcements_{};
  PeakCounter gathered_{};
  std::atomic<std::uint64_t> payload_{0};
  std::optional<Comm> comm_{};
  typename OverlappedTrafficOf<typename State::Lanes, State, Comm>::type traffic_{};
  Courier<Gather> courier_{};  ///< last: its thread uses everything above
};

}  // namespace zero::detail
