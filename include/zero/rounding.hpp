// SPDX-License-Identifier: Apache-2.0
/// @file
/// How a result is rounded to an element type with fewer bits.
#pragma once

#include <cstdint>

namespace zero {

/// How results that were computed in `float` are rounded to 16-bit elements. Other elements hold
/// what was computed, so for them it makes no difference.
enum class Rounding : std::uint8_t {
  /// To the nearest value, ties to even. A step smaller than half the distance to the next value is
  /// lost, however often it is made.
  nearest,
  /// To one of the two values around the result, to the upper one with the probability
  /// (result - lower) / (upper - lower): right on average, so many small steps add up. What is
  /// drawn depends on the seed, the step, the parameter and the element alone, so the same program
  /// gives the same bits on any number of ranks. Values that need no rounding stay as they are.
  stochastic,
};

}  // namespace zero
