// SPDX-License-Identifier: Apache-2.0
/// @file
/// What one rank keeps for all parameters of one element type, and the update of one fragment.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <vector>

#include "zero/detail/paged_lane.hpp"
#include "zero/detail/rounding.hpp"
#include "zero/detail/space.hpp"
#include "zero/detail/storage.hpp"
#include "zero/detail/update_loop.hpp"
#include "zero/layout.hpp"
#include "zero/memory.hpp"
#include "zero/optimizer.hpp"

namespace zero::detail {

/// Of a fragment whose values are not in `Lane::shard`.
inline constexpr std::size_t not_in_shard = std::numeric_limits<std::size_t>::max();

/// A fragment that this rank owns.
struct OwnedFragment {
  Fragment fragment;
  std::size_t bucket;
  std::size_t shard_begin;  ///< where it starts among the rank's slices, one after the other
  std::size_t value_begin = not_in_shard;  ///< where its values start in `Lane::shard`
};

/// @tparam S a `Storage`
template <class S, std::size_t slots, MemorySpace where = MemorySpace::host>
struct Lane {
  using storage = S;
  using element = typename S::value;
  using arithmetic = typename S::arithmetic;
  static constexpr MemorySpace space = where;
  template <class T>
  using Array = typename Space<where>::template Array<T>;

  std::size_t index = 0;
  /// By parameter index of the store; null for parameters of other lanes, and frozen ones.
  std::vector<element*> values;
  /// This step's gradients; null where absent. Peers that share memory read them.
  std::vector<const element*> gradients;
  /// Where the whole lane lies one behind the other (arena, or the caller's flat buffer), or null.
  element* base = nullptr;
  std::shared_ptr<Array<element>> arena;
  std::shared_ptr<Array<element>> gradient_arena;
  /// As large as the lane, with memory only where gradients wait to be reduced; of stages that
  /// shard them.
  std::shared_ptr<PagedLane<element>> gradient_pages;
  /// As large as the lane, with memory only where units are gathered; of stages that shard values.
  std::shared_ptr<PagedLane<element>> value_pages;
  /// The values of the own slices of all buckets that come and go, one slice after the other.
  Array<element> shard;
  /// By bucket: where the own slice starts in `shard`, or `not_in_shard`. Empty where all stay.
  std::vector<std::size_t> shard_values;
  /// Over the own slices (over everything without sharding), as the slots; empty without masters.
  Array<typename S::master> master;
  std::array<Array<typename S::slot>, slots> state;
  /// Sums of gradients over the own slices (over everything without sharding), where a step needs
  /// them stored.
  Array<arithmetic> reduced;
  /// What a whole-tensor optimizer needs beside the caller's memory.
  Array<arithmetic> workspace;
  std::vector<OwnedFragment> owned;
  /// By bucket, and one more: where its fragments start in `owned`.
  std::vector<std::size_t> owned_begin;
  /// One pointer a rank, kept so that no step allocates; and one to sums.
  std::vector<const element*> sources;
  const arithmetic* sums = nullptr;

  /// By bucket: where all of its values are on a device that shards values; null elsewhere, and of
  /// buckets that come and go.
  std::vector<element*> bucket_values;

  /// Where a bucket lies as in the lane, all the time; or null.
  [[nodiscard]] element* bucket_in_place(std::size_t bucket, Interval whole) const {
    if (!bucket_values.empty()) return bucket_values[bucket];
    return base == nullptr ? nullptr : base + whole.begin;
  }
  /// The same of a fragment of it; where its parameter is, if that lies on its own.
  [[nodiscard]] element* value_in_place(std::size_t bucket, Interval whole,
                                        const Fragment& f) const {
    element* const first = bucket_in_place(bucket, whole);
    return first == nullptr ? values_at(f) : first + (f.lane_begin - whole.begin);
  }
  [[nodiscard]] element* values_at(const Fragment& f) const {
    return values[f.parameter] + f.parameter_begin;
  }
  /// Where the values of an own fragment are kept.
  [[nodiscard]] element* kept_values(const OwnedFragment& of) {
    return of.value_begin == not_in_shard ? values_at(of.fragment) : shard.data() + of.value_begin;
  }
  /// Whether a bucket's values are on this rank only while they are acquired.
  [[nodiscard]] bool comes_and_goes(std::size_t bucket) const {
    return !shard_values.empty() && shard_values[bucket] != not_in_shard;
  }
  [[nodiscard]] const element* gradient_at(const Fragment& f) const {
    const element* whole = gradients[f.parameter];
    return whole == nullptr ? nullptr : whole + f.parameter_begin;
  }
  /// The gradient that lies summed at `at`.
  [[nodiscard]] GradientSum<arithmetic> summed(const arithmetic* at, arithmetic scale) {
    sums = at;
    return {{&sums, 1}, scale};
  }
};

/// Elements that are summed, and then looked at, in one go.
inline constexpr std::size_t look_chunk = 512;

/// Steps one fragment by an update rule.
/// @param values where the fragment's values are kept
/// @param state_begin where its slots start
template <class Rule, class Scalars, class S, std::size_t slots, class G>
void update_fragment(const Rule& rule, const Scalars& scalars, Lane<S, slots>& lane,
                     const Fragment& fragment, typename S::value* values, std::size_t state_begin,
                     NoiseKey noise, const GradientSum<G>& gradient) {
  UpdateArrays<S, slots> arrays{
      values, nullptr, {}, noise, static_cast<std::uint32_t>(fragment.parameter_begin)};
  if constexpr (S::has_master) arrays.master = lane.master.data() + state_begin;
  for (std::size_t s = 0; s < zero::used_slots(rule); ++s) {
    arrays.state[s] = lane.state[s].data() + state_begin;
  }
  update_elements(rule, scalars, arrays, gradient, fragment.elements);
}

}  // namespace zero::detail
