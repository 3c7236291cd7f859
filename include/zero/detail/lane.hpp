// SPDX-License-Identifier: Apache-2.0
/// @file
/// What one rank keeps for all parameters of one element type, and the update of one fragment.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>
#include <limits>
#include <memory>
#include <span>
#include <vector>

#include "zero/detail/rank_order_sum.hpp"
#include "zero/detail/update_loop.hpp"
#include "zero/layout.hpp"
#include "zero/memory.hpp"
#include "zero/optimizer.hpp"

namespace zero::detail {

/// A fragment that this rank owns.
struct OwnedFragment {
  Fragment fragment;
  std::size_t bucket;
  std::size_t shard_begin;  ///< where it starts among the rank's slices, one after the other
};

template <Element T, std::size_t slots>
struct HostLane {
  using element = T;

  std::size_t index = 0;
  /// By parameter index of the store; null for parameters of other lanes, and frozen ones.
  std::vector<T*> values;
  /// This step's gradients; null where absent. Peers that share memory read them.
  std::vector<const T*> gradients;
  /// Where the whole lane lies one behind the other (arena, or the caller's flat buffer), or null.
  T* base = nullptr;
  std::shared_ptr<HostArray<T>> arena;
  std::array<HostArray<T>, slots> state;
  /// Sums of gradients over the own slices (over everything without sharding), where a step needs
  /// them stored.
  HostArray<T> reduced;
  std::vector<OwnedFragment> owned;
  /// By bucket, and one more: where its fragments start in `owned`.
  std::vector<std::size_t> owned_begin;
  /// One pointer a rank, kept so that no step allocates.
  std::vector<const T*> sources;
  std::vector<const T*> scratch;

  [[nodiscard]] T* values_at(const Fragment& f) const {
    return values[f.parameter] + f.parameter_begin;
  }
  [[nodiscard]] const T* gradient_at(const Fragment& f) const {
    const T* whole = gradients[f.parameter];
    return whole == nullptr ? nullptr : whole + f.parameter_begin;
  }
};

/// Elements that are summed in one go.
inline constexpr std::size_t sum_chunk = 2048;

/// `out` = the `count` elements of all sources from `offset` on, summed in rank order; a null
/// source counts as zeros. @param count at most `sum_chunk`
template <Element T>
void sum_chunk_of(std::span<const T* const> sources, std::size_t offset, std::size_t count, T* out,
                  std::vector<const T*>& scratch) {
  alignas(64) static constexpr T no_gradient[sum_chunk] = {};
  scratch.resize(sources.size());
  for (std::size_t r = 0; r < sources.size(); ++r) {
    scratch[r] = sources[r] == nullptr ? no_gradient : sources[r] + offset;
  }
  sum_in_rank_order<T>(scratch, count, out);
}

/// Steps one fragment.
/// @param state_begin where the fragment's slots start
template <class Rule, class Scalars, Element T, std::size_t slots>
void update_fragment(const Rule& rule, const Scalars& scalars, HostLane<T, slots>& lane,
                     const Fragment& fragment, std::size_t state_begin,
                     const GradientSum<T>& gradient) {
  UpdateArrays<T, slots> arrays{lane.values_at(fragment), nullptr, {}};
  for (std::size_t s = 0; s < zero::used_slots(rule); ++s) {
    arrays.state[s] = lane.state[s].data() + state_begin;
  }
  update_elements(rule, scalars, arrays, gradient, fragment.elements);
}

}  // namespace zero::detail
