// SPDX-License-Identifier: Apache-2.0
/// @file
/// How a communicator over NCCL waits and sums.
#pragma once

#include <chrono>
#include <cstdint>

namespace zero {

/// Who sums. Minima and maxima, and elements that NCCL doesn't know, are always reduced by the
/// ranks.
enum class NcclReduction : std::uint8_t {
  rank_order,  ///< each rank sums its slice in rank order: the same bits everywhere, always
  native,      ///< NCCL's own reductions: bits may depend on NCCL, its settings and the machines
};

/// The same on all ranks, save for the times.
struct NcclOptions {
  /// How long an operation may take once the stream has come to it; whoever waits on the host, or
  /// the watchdog, then gives up. Kernels that stand before it in the stream count too.
  std::chrono::nanoseconds timeout = std::chrono::seconds(60);
  /// How long a rank waits for its peers while a communicator is made.
  std::chrono::nanoseconds init_timeout = std::chrono::seconds(120);
  /// How long the end of an owning communicator waits for what is under way.
  std::chrono::nanoseconds teardown = std::chrono::seconds(5);
  /// How long a waiting host looks without pause before it sleeps between looks. It yields
  /// meanwhile.
  std::chrono::nanoseconds spin = std::chrono::milliseconds(1);
  NcclReduction reduction = NcclReduction::rank_order;
  /// A thread of the communicator's own looks after operations that no host thread waits for. Any
  /// that doesn't end within the timeout, or any failure that NCCL reports, then ends them all;
  /// without it such a stream may stand still until `check` or `wait` is called.
  bool watchdog = true;
  /// How often it looks.
  std::chrono::nanoseconds watchdog_interval = std::chrono::milliseconds(50);
};

}  // namespace zero
