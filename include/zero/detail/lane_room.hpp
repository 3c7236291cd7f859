// SPDX-License-Identifier: Apache-2.0
/// @file
/// How many elements a rank's arrays have: the one place that sizes are computed in. The engine
/// allocates by it, and an estimate adds it up.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include "zero/bucket_view.hpp"
#include "zero/detail/inspect.hpp"
#include "zero/detail/policies.hpp"
#include "zero/detail/store.hpp"
#include "zero/detail/tensor_step.hpp"
#include "zero/detail/units.hpp"
#include "zero/element.hpp"
#include "zero/layout.hpp"
#include "zero/optimizer.hpp"
#include "zero/parameter.hpp"
#include "zero/partition.hpp"
#include "zero/settings.hpp"
#include "zero/stage.hpp"

namespace zero::detail {

/// Whether values and gradients of each lane are the caller's flat buffers.
template <class Store, class View, class Partition>
inline constexpr bool lies_flat =
    FlatParamStore<Store> && View::values == Residency::caller &&
    View::gradients == Residency::caller && CuttingPartition<Partition>;

/// One lane for each element type.
template <class... T>
[[nodiscard]] std::vector<LayoutLane> layout_lanes(TypeList<T...>, std::size_t bucket_bytes,
                                                   bool foreign) {
  return {LayoutLane{sizeof(T), bucket_bytes, foreign}...};
}

/// How many slots are allocated: those that some group's options need.
template <class Opt>
[[nodiscard]] std::size_t slots_for(const std::vector<Opt>& groups) {
  std::size_t most = 0;
  for (const Opt& group : groups) most = std::max(most, zero::used_slots(group));
  return most;
}

/// Whether some gradients are rounded to travel.
template <class Precision, class... T>
[[nodiscard]] constexpr bool rounds_some(TypeList<T...>) {
  return (!std::is_same_v<T, typename Precision::template Wire<T>> || ...);
}

/// Whether ranks that share memory read each other's gradients where they lie: not where these live
/// for a bucket's time, nor where they are rounded to travel.
template <class Stage, class Precision, class Elements>
inline constexpr bool may_read_peers =
    !Stage::shards_gradients && !rounds_some<Precision>(Elements{});

/// Bytes of gradients that may wait to be reduced: what the user says; otherwise two buckets, or
/// one and the largest parameter, and tied gradients, which stay open for long.
template <class Stage, class Partition>
[[nodiscard]] std::size_t limit_of_pool(const Stage& stage, const Layout<Partition>& map,
                                        const std::vector<ParameterInfo>& parameters,
                                        std::span<const std::size_t> element_bytes) {
  if (const std::size_t given = pool_bytes(stage)) return given;
  std::size_t bucket = 0;
  for (std::size_t lane = 0; lane < map.lanes(); ++lane) {
    for (std::size_t b = 0; b < map.buckets(lane); ++b) {
      bucket = std::max(bucket, map.bucket(lane, b).size() * element_bytes[lane]);
    }
  }
  std::size_t tied = 0;
  std::size_t largest = bucket;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    if (!stands_alone(parameters, i)) continue;
    const std::size_t bytes = parameters[i].elements * parameters[i].element_bytes;
    (parameters[i].ties > 1 ? tied += bytes : largest = std::max(largest, bytes));
  }
  return bucket + largest + tied;
}

/// Whether some trainable parameter is kept in 16 bits.
[[nodiscard]] inline bool trains_16_bits(const std::vector<ParameterInfo>& parameters) {
  return std::any_of(parameters.begin(), parameters.end(), [](const ParameterInfo& info) {
    return info.element_bytes == 2 && !info.frozen;
  });
}

/// Whether ranks that share memory keep sums instead of adding in the update: where they must look
/// first, and where the update flushes denormals, which sums nowhere do.
[[nodiscard]] inline bool keeps_sums(const Settings& settings, bool looks_first) {
  return looks_first || settings.flush_denormals;
}

/// Buffers that a lane's buckets travel through, in elements.
struct StagingRoom {
  std::size_t flights = 0;  ///< buckets in flight at once
  std::size_t buffer = 0;   ///< of each flight: a whole bucket
  std::size_t wire = 0;     ///< of each flight: a whole bucket in the type that gradients travel in
  std::size_t received = 0;  ///< of each flight: everybody's part of the own slice, likewise
  /// @param value bytes of a parameter's element
  /// @param wire_bytes of one that travels
  [[nodiscard]] std::size_t bytes(std::size_t value, std::size_t wire_bytes) const {
    return flights * (buffer * value + (wire + received) * wire_bytes);
  }
};

/// What buffers are for.
enum class Journey : std::uint8_t { both, reduce, gather };

/// Sizes of one rank's arrays of one lane, in elements. The layout must outlive it.
/// @tparam S a `Storage`
template <class S, class Stage, class Partition>
class LaneRoom {
 public:
  /// Buckets in flight at once, at most.
  static constexpr std::size_t ring_size = 4;
  /// Gradients are summed where they arrive, in the arithmetic type, since they travel in another.
  static constexpr bool sums_here = !std::is_same_v<typename S::wire, typename S::arithmetic>;
  /// Gradients are rounded to the type that they travel in.
  static constexpr bool rounds = !std::is_same_v<typename S::wire, typename S::value>;

  /// @param alone whether there are no other ranks at all, not of other groups either
  LaneRoom(const Layout<Partition>& map, std::size_t lane, int rank, bool alone)
      : map_(&map), lane_(lane), rank_(rank), alone_(alone) {}

  /// An arena that holds the lane, padding included.
  [[nodiscard]] std::size_t arena() const { return map_->extent(lane_); }

  /// Each slot, and the master copies.
  [[nodiscard]] std::size_t kept() const {
    return Stage::shards_state ? map_->shard_elements(lane_, rank_) : map_->extent(lane_);
  }

  /// Sums of gradients that have to be stored.
  /// @param reads_peers whether ranks read each other's gradients where they lie
  /// @param keeps as `keeps_sums` says
  [[nodiscard]] std::size_t sums(bool reads_peers, const Settings& settings, bool keeps) const {
    if (alone_ || settings.gradients == Gradients::reduced) return 0;
    // Ranks that share memory sum while they update, unless they have to look first; without
    // sharding, where everyone needs all sums, each keeps those of its slices for the others.
    if (reads_peers) {
      return Stage::shards_state && !keeps ? 0 : map_->shard_elements(lane_, rank_);
    }
    return kept();
  }

  /// Of values where they are sharded: own slices, and everything of what stays. First all
  /// elements, then those that are a parameter's.
  [[nodiscard]] std::pair<std::size_t, std::size_t> values_kept(
      const std::vector<Unit>& units) const {
    std::pair<std::size_t, std::size_t> sum{0, 0};
    for (const Unit& unit : units) {
      for (const UnitBuckets& part : unit.parts) {
        if (part.lane != lane_) continue;
        for (std::size_t b = part.buckets.begin; b < part.buckets.end; ++b) {
          const Interval kept =
              unit.resident ? map_->bucket(lane_, b) : map_->slice(lane_, b, rank_);
          sum.first += kept.size();
          for (const Fragment& f : map_->fragments(lane_, kept)) sum.second += f.elements;
        }
      }
    }
    return sum;
  }

  /// What the tensor that needs most needs beside the caller's memory; none for update rules.
  template <class Opt>
  [[nodiscard]] std::size_t workspace(const std::vector<ParameterInfo>& parameters,
                                      const std::vector<Opt>& groups) const {
    std::size_t most = 0;
    const auto add = [&](const Fragment& f) {
      const ParameterInfo& info = parameters[f.parameter];
      most =
          std::max(most, tensor_workspace<S>(groups[info.group], slot_count<Opt>,
                                             std::span<const std::size_t>(info.shape), f.elements));
    };
    for_each_kept(add);
    return most;
  }

  /// Buckets on their way between ranks that don't share memory.
  /// @param in_place whether values lie as in the lane, so that they are gathered where they are
  [[nodiscard]] StagingRoom staging(Journey journey, bool in_place) const {
    if (alone_) return {};
    StagingRoom room;
    std::size_t largest = 0;
    std::size_t largest_slice = 0;
    const std::size_t buckets = map_->buckets(lane_);
    for (std::size_t b = 0; b < buckets; ++b) {
      largest = std::max(largest, map_->bucket(lane_, b).size());
      largest_slice = std::max(largest_slice, map_->slice(lane_, b, rank_).size());
    }
    room.flights = std::min(journey == Journey::both ? ring_size : 1, buckets);
    if (journey != Journey::gather) {
      if (rounds) room.wire = largest;
      if (sums_here) room.received = largest_slice * static_cast<std::size_t>(map_->world());
    }
    if (journey == Journey::both) {
      // Without sharding a bucket of the arithmetic type is packed and summed where sums are kept.
      if (Stage::shards_state || sums_here) room.buffer = largest;
    } else if (journey == Journey::gather && !in_place) {
      room.buffer = largest;
    }
    return room;
  }
  /// All of it, in bytes.
  [[nodiscard]] std::size_t staging_bytes(bool in_place) const {
    const auto bytes = [&](Journey journey) {
      return staging(journey, in_place).bytes(sizeof(typename S::value), sizeof(typename S::wire));
    };
    if constexpr (Stage::shards_gradients) return bytes(Journey::reduce) + bytes(Journey::gather);
    return bytes(Journey::both);
  }

  /// Elements of parameters among `kept`: the rest is padding.
  [[nodiscard]] std::size_t kept_of_parameters() const {
    return Stage::shards_state ? owned() : map_->elements(lane_);
  }
  /// Elements of parameters among those of the own slices.
  [[nodiscard]] std::size_t owned() const {
    std::size_t sum = 0;
    map_->for_each_owned(lane_, rank_,
                         [&](const Fragment& f, std::size_t, std::size_t) { sum += f.elements; });
    return sum;
  }

 private:
  template <class F>
  void for_each_kept(F&& f) const {
    if constexpr (Stage::shards_state) {
      map_->for_each_owned(
          lane_, rank_, [&](const Fragment& fragment, std::size_t, std::size_t) { f(fragment); });
    } else {
      for (const Fragment& fragment : map_->fragments(lane_, {0, map_->extent(lane_)})) f(fragment);
    }
  }

  const Layout<Partition>* map_;
  std::size_t lane_;
  int rank_;
  bool alone_;
};

}  // namespace zero::detail
