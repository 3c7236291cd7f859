// SPDX-License-Identifier: Apache-2.0
/// @file
/// Values that are sharded over devices: gathered a unit at a time, in a stream of their own.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory_resource>
#include <mutex>
#include <optional>
#include <ranges>
#include <span>
#include <utility>
#include <vector>

#include "zero/cuda/communicator.hpp"
#include "zero/cuda/detail/block_pool.hpp"
#include "zero/cuda/detail/device_traffic.cuh"
#include "zero/cuda/stream.hpp"
#include "zero/detail/hash.hpp"
#include "zero/detail/store.hpp"
#include "zero/detail/unit_residence.hpp"
#include "zero/detail/units.hpp"
#include "zero/error.hpp"
#include "zero/layout.hpp"
#include "zero/observer.hpp"
#include "zero/stage.hpp"

namespace zero::cuda::detail {

/// A duplicate of the communicator, so that gathers need not come in one order with reductions on
/// all ranks, which go by when gradients are ready.
///
/// A unit that is gathered takes memory of a pool, as much as the largest, so that nothing is left
/// in between; one that is released is given out again at once, to gathers that wait for the
/// streams it was released in.
///
/// Communicators whose operations wait for peers as they are enqueued
/// (`cuda::InProcessCommunicator`) need one more thing of ranks: that those which reduce and those
/// which gather come in one order, or each rank waits for the other until the timeout. So on all
/// ranks a bucket's last mark must stand between the same two calls that acquire.
/// @tparam State an `EngineState`
template <class State>
class DeviceUnits {
  using Comm = typename State::communicator_type;
  using Unit = zero::detail::Unit;

 public:
  /// To be followed by `rebuild`.
  explicit DeviceUnits(State& state) : state_(state) {}

  void acquire(int unit, StreamView stream = {}) {
    const std::scoped_lock lock(mutex_);
    residence_.acquire(
        unit, [&](const Unit& u) { return fetch(u); },
        [&](std::uint64_t arrival) { stream.wait(event_of(arrival)); });
    if (!captures(stream)) stream.wait(changed_);  // of units that stay
  }
  void release(int unit, StreamView stream = {}) {
    const std::scoped_lock lock(mutex_);
    // Before anything is gathered into that memory, and before the next step. Also of holds that
    // are not the last, in another stream perhaps.
    if (!captures(stream)) {
      released_.record(stream);
      gather_stream().wait(released_);
    }
    residence_.release(
        unit, [&](const Unit& u) { let_go(u); }, [&](const Unit& u) { return fetch(u); });
  }
  /// Throws `UsageError` where a unit is still held.
  void require_none_held(const char* verb) {
    const std::scoped_lock lock(mutex_);
    residence_.require_none_held(verb);
  }

  /// None is ahead of the caller: values are about to change, once `stream`, which they change in,
  /// is past all gathers.
  void settle(StreamView stream) {
    const std::scoped_lock lock(mutex_);
    residence_.drop_what_is_ahead([&](const Unit& u) { let_go(u); });
    residence_.end_round();
    if (captures(stream)) return;
    released_.record(gather_stream());
    stream.wait(released_);
  }
  /// Values have changed: what is gathered from now on comes after what `stream` holds.
  void changed(StreamView stream) {
    const std::scoped_lock lock(mutex_);
    if (captures(stream)) return;
    changed_.record(stream);
    gather_stream().wait(changed_);
  }

  /// Collective: prepares for the layout. Nothing may be on its way.
  void rebuild() {
    std::vector<Unit> units = state_.units();
    std::size_t largest = 0;
    for (Unit& unit : units) {
      join_parts(unit);
      if (!unit.resident) largest = std::max(largest, bytes_of(unit));
    }
    const std::size_t ahead = zero::detail::prefetched_units(state_.stage);
    blocks_.assign(units.size(), {});
    residence_.rebuild(std::move(units), ahead);
    if (state_.alone()) return;
    if (!comm_) comm_.emplace(state_.comm().duplicate());
    pool_ = BlockPool((1 + ahead) * largest, true, state_.memory(), largest);
    block_bytes_ = largest;
    counts_.resize(static_cast<std::size_t>(state_.world()));
  }

  /// Of memory for units.
  [[nodiscard]] std::size_t reserved() const noexcept { return pool_.reserved(); }
  /// A number that ranks share that have gathered the same units in the same order.
  [[nodiscard]] std::uint64_t history() const noexcept { return history_.value(); }
  /// What `later` is given from now on comes after all gathers so far.
  void order(StreamView later) {
    if (!comm_) return;
    released_.record(gather_stream());
    later.wait(released_);
  }
  /// Records what comes after all gathers so far.
  void record(const Event& event) { event.record(gather_stream()); }
  void abort(const std::string& why) {
    if (comm_) comm_->abort(why);
  }
  void check() {
    if (comm_) comm_->check();
  }

 private:
  [[nodiscard]] StreamView gather_stream() {
    return comm_ ? comm_->stream() : state_.comm().stream();
  }
  /// Whether a rank alone captures a step into a graph, which nothing outside of it can order.
  [[nodiscard]] bool captures(StreamView stream) {
    if (!state_.alone()) return false;
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    cuda::check(cudaStreamIsCapturing(stream.get(), &status), "cudaStreamIsCapturing");
    return status != cudaStreamCaptureStatusNone;
  }
  [[nodiscard]] const Event& event_of(std::uint64_t arrival) const {
    return arrived_[arrival % arrived_.size()];
  }

  /// Starts to gather a unit, and shows parameters where they will be.
  std::uint64_t fetch(const Unit& unit) {
    history_.add(static_cast<std::uint64_t>(unit.id));
    comm_->check();
    BlockPool::Block& block = blocks_[residence_.find(unit.id)];
    if (block.memory == nullptr) block = *pool_.take(block_bytes_);
    std::byte* memory = block.memory;
    for (const zero::detail::UnitBuckets& part : unit.parts) {
      state_.for_each_lane([&]<class Lane>(Lane& lane) {
        if (lane.index != part.lane) return;
        fetch_part(lane, part.buckets, reinterpret_cast<typename Lane::element*>(memory));
        memory += part_bytes(lane, part);
      });
    }
    event_of(++arrivals_).record(gather_stream());
    return arrivals_;
  }

  [[nodiscard]] Interval elements_of(const zero::detail::UnitBuckets& part) const {
    return {state_.layout->bucket(part.lane, part.buckets.begin).begin,
            state_.layout->bucket(part.lane, part.buckets.end - 1).end};
  }
  /// A parameter lies in one part: buckets that moved cuts have left empty part nothing.
  void join_parts(Unit& unit) const {
    std::vector<zero::detail::UnitBuckets> joined;
    for (const zero::detail::UnitBuckets& part : unit.parts) {
      if (!joined.empty() && joined.back().lane == part.lane &&
          elements_of(joined.back()).end == elements_of(part).begin) {
        joined.back().buckets.end = part.buckets.end;
      } else {
        joined.push_back(part);
      }
    }
    unit.parts = std::move(joined);
  }
  /// Parts of a unit lie one behind the other, aligned.
  template <class Lane>
  [[nodiscard]] std::size_t part_bytes(const Lane&, const zero::detail::UnitBuckets& part) const {
    return BlockPool::round_up(elements_of(part).size() * sizeof(typename Lane::element));
  }
  [[nodiscard]] std::size_t bytes_of(const Unit& unit) const {
    std::size_t bytes = 0;
    for (const zero::detail::UnitBuckets& part : unit.parts) {
      state_.for_each_lane([&](const auto& lane) {
        if (lane.index == part.lane) bytes += part_bytes(lane, part);
      });
    }
    return bytes;
  }

  template <class Lane, class T = typename Lane::element>
  void fetch_part(Lane& lane, Interval buckets, T* values) {
    const Interval part = elements_of({lane.index, buckets});
    for (std::size_t b = buckets.begin; b < buckets.end; ++b) {
      const Interval whole = state_.layout->bucket(lane.index, b);
      if (whole.empty()) continue;
      const Interval mine = state_.layout->slice(lane.index, b, state_.rank());
      state_.observe(Phase::gather, lane.index, b, [&] {
        gather_slices(*state_.layout, lane.index, b, *comm_,
                      std::span<const T>(lane.shard.data() + lane.shard_values[b], mine.size()),
                      std::span<T>(values + (whole.begin - part.begin), whole.size()), counts_);
      });
    }
    for (std::size_t i = 0; i < state_.parameters.size(); ++i) {
      const auto& info = state_.parameters[i];
      if (info.lane != lane.index || info.frozen) continue;
      const std::size_t offset = state_.layout->place(i).offset;
      if (offset < part.begin || offset >= part.end) continue;
      show(lane, i, std::span<T>(values + (offset - part.begin), info.elements));
    }
  }

  template <class Lane, class T>
  void show(Lane& lane, std::size_t i, std::span<T> place) {
    if (state_.steps_alone(i)) {
      if (lane.values[i] == place.data() && state_.parameters[i].ties == 1) return;
      lane.values[i] = place.data();
    }
    auto&& parameter = zero::detail::parameter_at(state_.store(), i);
    using Span = zero::detail::values_t<parameter_t<typename State::store_type>>;
    parameter.rebind(Span(place), pool_.owner(reinterpret_cast<const std::byte*>(place.data())));
  }

  void let_go(const Unit& unit) {
    BlockPool::Block& block = blocks_[residence_.find(unit.id)];
    if (state_.settings.poison_released) poison_block(block, gather_stream());
    pool_.give_back(std::exchange(block, {}));
  }

  State& state_;
  std::mutex mutex_{};  ///< of what follows; taken after the engine's
  zero::detail::UnitResidence residence_{};
  zero::detail::Hash history_{};
  std::vector<BlockPool::Block> blocks_{};  ///< by unit, while it is there
  std::size_t block_bytes_ = 0;             ///< the largest unit's
  std::vector<std::size_t> counts_{};
  std::optional<Comm> comm_{};
  BlockPool pool_{};
  Event released_{};
  Event changed_{};  ///< the last step's updates
  /// One stream's, so that one which was recorded anew does for the earlier arrival.
  std::array<Event, 16> arrived_{};
  std::uint64_t arrivals_ = 0;
};

}  // namespace zero::cuda::detail
