// SPDX-License-Identifier: Apache-2.0
/// @file
/// What one rank's optimizer keeps, in bytes.
#pragma once

#include <cstddef>

namespace zero {

/// Bytes that one rank keeps beyond the caller's own memory. Element arrays, exactly; bookkeeping
/// (a few dozen bytes a parameter and bucket) is not counted.
struct MemoryReport {
  std::size_t state = 0;        ///< the optimizer's slots
  std::size_t master = 0;       ///< master copies of 16-bit parameters
  std::size_t values = 0;       ///< arenas that parameters were moved into, or the own part of them
  std::size_t gradients = 0;    ///< summed gradients, and arenas that gradients were moved into
  std::size_t staging = 0;      ///< buckets on their way, and a whole-tensor optimizer's workspace
  std::size_t pooled = 0;       ///< gradients that are not reduced yet (stages 2 and 3)
  std::size_t gathered = 0;     ///< units that are acquired, or gathered ahead (stage 3)
  std::size_t pooled_peak = 0;  ///< the most that `pooled` has been
  std::size_t gathered_peak = 0;  ///< the most that `gathered` has been
  /// Of now: without the peaks.
  [[nodiscard]] constexpr std::size_t total() const noexcept {
    return state + master + values + gradients + staging + pooled + gathered;
  }
  friend constexpr bool operator==(const MemoryReport&, const MemoryReport&) = default;
};

}  // namespace zero
