// SPDX-License-Identifier: Apache-2.0
/// @file
/// What goes into training and what comes out of it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>
#include <zero/memory_report.hpp>

namespace example {

/// What the command line says.
struct Options {
  std::string model = "conv", communicator = "threads", mode = "compare", optimizer = "adamw";
  int ranks = 2, stage = 1;
  std::int64_t steps = 0;  ///< 0: the model's own
  std::int64_t batch = 16;
  std::int64_t width = 128, layers = 2, context = 64;  ///< of the transformer
  double lr = 2e-3;
  std::uint64_t seed = 1;
  std::filesystem::path digits = "build/data/digits.csv";
  std::vector<std::filesystem::path> text{};
};

/// What one rank says of a run.
struct RankReport {
  zero::MemoryReport memory{};
  std::size_t gradients = 0;  ///< bytes that torch keeps in `grad()` when a step is done
  std::int64_t grown = 0;     ///< bytes by which the process has grown since before the model
  double step_ms = 0;         ///< mean time of a step but for the first
  double update_ms = 0;       ///< of that within `step()`: reduce, update, gather
  std::uint64_t hash = 0;     ///< of all parameters and buffers, at the end
};

/// A run, as all its ranks know it.
struct RunReport {
  std::string mode{};
  std::vector<double> losses{};  ///< means over ranks
  double accuracy = 0;           ///< share of unseen items that the model tells right
  std::vector<RankReport> ranks{};
};

/// Replicated, sharded, or one after the other, on ranks that are threads of this process. Throws
/// `bert::InputError` for data that can't be used.
[[nodiscard]] std::vector<RunReport> train_on_threads(const Options& options);

/// The same on the processes that mpirun started, this one among them. MPI begins and ends here;
/// where this throws anything but `bert::InputError`, leave by `std::_Exit`.
[[nodiscard]] std::vector<RunReport> train_over_mpi(const Options& options);

}  // namespace example
