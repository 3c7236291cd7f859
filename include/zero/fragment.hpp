// SPDX-License-Identifier: Apache-2.0
/// @file
/// Runs of elements: of a lane, and of a parameter in it.
#pragma once

#include <cstddef>

namespace zero {

/// A half-open run of elements of a lane.
struct Interval {
  std::size_t begin = 0;
  std::size_t end = 0;
  [[nodiscard]] constexpr std::size_t size() const noexcept { return end - begin; }
  [[nodiscard]] constexpr bool empty() const noexcept { return begin == end; }
  friend constexpr bool operator==(const Interval&, const Interval&) = default;
};

/// A run of elements of one parameter that lies in one interval of a lane (usually: one rank's
/// slice of one bucket).
struct Fragment {
  std::size_t parameter = 0;        ///< index in the store
  std::size_t parameter_begin = 0;  ///< first element, counted in the parameter
  std::size_t lane_begin = 0;       ///< the same element, counted in the lane
  std::size_t elements = 0;
  friend constexpr bool operator==(const Fragment&, const Fragment&) = default;
};

}  // namespace zero
