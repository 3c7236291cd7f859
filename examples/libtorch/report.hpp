// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>
#include <zero/memory_report.hpp>

#include "options.hpp"

namespace example {

/// What one rank says of a run.
struct RankReport {
  zero::MemoryReport memory{};
  std::size_t gradients = 0;  ///< bytes that torch keeps in `grad()` when a step is done
  std::int64_t grown = 0;     ///< bytes by which the process has grown; of all ranks, if threads
  double step_ms = 0;         ///< mean time of a step but for the first
  double update_ms = 0;       ///< of that within `step()`: reduce, update, gather
  std::uint64_t hash = 0;     ///< of all parameters
};

/// A run, as all its ranks know it.
struct RunReport {
  std::string mode{};
  std::vector<double> losses{};  ///< means over ranks
  double accuracy = 0;
  std::vector<RankReport> ranks{};
};

/// Whether all runs have the same losses, accuracy and parameters, bit for bit, on all ranks.
[[nodiscard]] bool same_bits(const std::vector<RunReport>& reports);

/// Tables of memory and time, and what came of it.
[[nodiscard]] std::string tables(const Options& options, const std::vector<RunReport>& reports);

}  // namespace example
