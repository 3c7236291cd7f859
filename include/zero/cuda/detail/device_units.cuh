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
/// A unit that is gathered takes memory of a pool; one that is released is given out again at once,
/// to gathers that wait for the stream it was released in.
/// @tparam State an `EngineState`
template <class State>
class DeviceUnits {
  using Comm = typename State::communicator_type;
  using Unit = zero::detail::Unit;

 public:
  /// To be followed by `rebuild`.
  explicit DeviceUnits(State& state) : state_(state) {}

  void acquire(int unit, StreamView stream) {
    const std::scoped_lock lock(mutex_);
    residence_.acquire(
        unit, [&](const Unit& u) { return fetch(u); },
        [&](std::uint64_t arrival) { stream.wait(event_of(arrival)); });
  }
  void release(int unit, StreamView stream) {
    const std::scoped_lock lock(mutex_);
    residence_.release(
        unit,
        [&](const Unit& u) {
          // Before anything is gathered into that memory.
          released_.record(stream);
          gather_stream().wait(released_);
          let_go(u);
        },
        [&](const Unit& u) { return fetch(u); });
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
    if (state_.alone()) return;
    released_.record(gather_stream());
    stream.wait(released_);
  }
  /// Values have changed: what is gathered from now on comes after what `stream` holds.
  void changed(StreamView stream) {
    if (state_.alone()) return;
    released_.record(stream);
    gather_stream().wait(released_);
  }

  /// Collective: prepares for the layout. Nothing may be on its way.
  void rebuild() {
    std::vector<Unit> units = state_.units();
    std::size_t largest = 0;
    for (const Unit& unit : units) {
      if (!unit.resident) largest = std::max(largest, unit.bytes);
    }
    const std::size_t ahead = zero::detail::prefetched_units(state_.stage);
    blocks_.assign(units.size(), {});
    residence_.rebuild(std::move(units), ahead);
    if (state_.alone()) return;
    if (!comm_) comm_.emplace(state_.comm().duplicate());
    pool_ = BlockPool((1 + ahead) * largest, true, state_.memory());
    counts_.resize(static_cast<std::size_t>(state_.world()));
  }

  /// Of memory for units.
  [[nodiscard]] std::size_t reserved() const noexcept { return pool_.reserved(); }
  /// A number that ranks share that have acquired the same units in the same order.
  [[nodiscard]] std::uint64_t history() const noexcept { return history_.value(); }
  /// Where it is recorded is after all gathers so far.
  void order(StreamView later) {
    if (!comm_) return;
    released_.record(gather_stream());
    later.wait(released_);
  }
  void abort(const std::string& why) {
    if (comm_) comm_->abort(why);
  }
  void check() {
    if (comm_) comm_->check();
  }

 private:
  [[nodiscard]] StreamView gather_stream() { return comm_->stream(); }
  [[nodiscard]] const Event& event_of(std::uint64_t arrival) const {
    return arrived_[arrival % arrived_.size()];
  }

  /// Starts to gather a unit, and shows parameters where they will be.
  std::uint64_t fetch(const Unit& unit) {
    history_.add(static_cast<std::uint64_t>(unit.id));
    auto& blocks = blocks_[residence_.find(unit.id)];
    for (const zero::detail::UnitBuckets& part : unit.parts) {
      state_.for_each_lane([&]<class Lane>(Lane& lane) {
        if (lane.index == part.lane) blocks.push_back(fetch_part(lane, part.buckets));
      });
    }
    event_of(++arrivals_).record(gather_stream());
    return arrivals_;
  }

  template <class Lane>
  [[nodiscard]] BlockPool::Block fetch_part(Lane& lane, Interval buckets) {
    using T = typename Lane::element;
    const std::size_t begin = state_.layout->bucket(lane.index, buckets.begin).begin;
    const std::size_t end = state_.layout->bucket(lane.index, buckets.end - 1).end;
    const BlockPool::Block block = *pool_.take((end - begin) * sizeof(T));
    T* const values = reinterpret_cast<T*>(block.memory);
    for (std::size_t b = buckets.begin; b < buckets.end; ++b) {
      const Interval whole = state_.layout->bucket(lane.index, b);
      if (whole.empty()) continue;
      const Interval mine = state_.layout->slice(lane.index, b, state_.rank());
      state_.observe(Phase::gather, lane.index, b, [&] {
        gather_slices(*state_.layout, lane.index, b, *comm_,
                      std::span<const T>(lane.shard.data() + lane.shard_values[b], mine.size()),
                      std::span<T>(values + (whole.begin - begin), whole.size()), counts_);
      });
    }
    for (std::size_t i = 0; i < state_.parameters.size(); ++i) {
      const auto& info = state_.parameters[i];
      if (info.lane != lane.index || info.frozen) continue;
      const std::size_t offset = state_.layout->place(i).offset;
      if (offset < begin || offset >= end) continue;
      show(lane, i, std::span<T>(values + (offset - begin), info.elements), block.memory);
    }
    return block;
  }

  template <class Lane, class T>
  void show(Lane& lane, std::size_t i, std::span<T> place, const std::byte* block) {
    if (state_.steps_alone(i)) {
      if (lane.values[i] == place.data() && state_.parameters[i].ties == 1) return;
      lane.values[i] = place.data();
    }
    auto&& parameter = zero::detail::parameter_at(state_.store(), i);
    using Span = zero::detail::values_t<parameter_t<typename State::store_type>>;
    parameter.rebind(Span(place), pool_.owner(block));
  }

  void let_go(const Unit& unit) {
    auto& blocks = blocks_[residence_.find(unit.id)];
    for (const BlockPool::Block& block : blocks) pool_.give_back(block);
    blocks.clear();
  }

  State& state_;
  std::mutex mutex_{};  ///< of what follows; taken after the engine's
  zero::detail::UnitResidence residence_{};
  zero::detail::Hash history_{};
  std::vector<std::vector<BlockPool::Block>> blocks_{};  ///< by unit, one a part, while it is there
  std::vector<std::size_t> counts_{};
  std::optional<Comm> comm_{};
  BlockPool pool_{};
  Event released_{};
  /// One stream's, so that one which was recorded anew does for the earlier arrival.
  std::array<Event, 16> arrived_{};
  std::uint64_t arrivals_ = 0;
};

}  // namespace zero::cuda::detail
