// SPDX-License-Identifier: Apache-2.0
/// @file
/// The partition for optimizers that must see whole tensors.
#pragma once

#include <algorithm>
#include <cstddef>
#include <numeric>
#include <span>
#include <vector>

#include "zero/partition.hpp"

namespace zero {

/// Gives every tensor whole to one rank, by the rule of PyTorch's ZeroRedundancyOptimizer: group
/// after group, the largest tensor first (those of one size in registration order), each to the
/// rank that owns the fewest elements so far, ties to the lowest rank. Loads carry over from group
/// to group. Frozen and tied parameters don't weigh: the layout leaves them out.
///
/// Costs: ranks own unequal parts of a bucket, so the uneven `_v` collectives are used; and
/// whoever owns the largest tensor owns all of it, so more ranks stop helping once an equal share
/// is smaller than that. Prefer `ContiguousPartition` unless the optimizer needs whole tensors.
///
/// O(n log n + n * world) for n tensors.
struct BalancedPartition {
  static constexpr bool cuts_tensors = false;

  constexpr void assign(std::span<const std::size_t> elements, std::span<std::size_t> loads,
                        std::span<int> owners) const {
    std::vector<std::size_t> order(elements.size(), 0);
    std::iota(order.begin(), order.end(), std::size_t{0});
    // A stable sort, spelt so that it is constexpr in C++20.
    std::sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
      return elements[a] != elements[b] ? elements[a] > elements[b] : a < b;
    });
    for (const std::size_t i : order) {
      const auto least = std::min_element(loads.begin(), loads.end());  // the first of equals
      *least += elements[i];
      owners[i] = static_cast<int>(least - loads.begin());
    }
  }
};

static_assert(PartitionPolicy<BalancedPartition>);

}  // namespace zero
