// SPDX-License-Identifier: Apache-2.0
/// @file
/// The default partition.
#pragma once

#include <cstddef>

#include "zero/partition.hpp"

namespace zero {

/// Cuts every bucket into K equal aligned slices: each bucket is one even reduce-scatter, all ranks
/// work on each, and no rank owns more than one alignment unit above its share.
struct ContiguousPartition {
  static constexpr bool cuts_tensors = true;
  static constexpr bool even = true;

  [[nodiscard]] constexpr std::size_t cut(std::size_t elements, std::size_t alignment, int world,
                                          int rank) const noexcept {
    const std::size_t unit = alignment * static_cast<std::size_t>(world);
    const std::size_t slice = (elements + unit - 1) / unit * alignment;
    const std::size_t begin = slice * static_cast<std::size_t>(rank);
    return begin < elements ? begin : elements;
  }
};

static_assert(PartitionPolicy<ContiguousPartition>);

}  // namespace zero
