// SPDX-License-Identifier: Apache-2.0
/// @file
/// How a communicator over MPI waits, sums and cuts its messages.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>

namespace zero {

/// Who sums floats and doubles. Other elements, minima and maxima are always reduced by the ranks.
enum class MpiReduction : std::uint8_t {
  rank_order,  ///< each rank sums its slice in rank order: the same bits everywhere, always
  native,      ///< MPI's own reductions: bits may depend on the MPI, its settings and the hosts
};

/// The same on all ranks, save for the times and `share_memory`.
struct MpiOptions {
  /// How long a rank waits while nothing at all arrives from its peers before it gives up.
  std::chrono::nanoseconds timeout = std::chrono::seconds(60);
  /// How long the end of an owning communicator waits for its peers' ends.
  std::chrono::nanoseconds teardown = std::chrono::seconds(5);
  /// How long a rank watches for messages before it sleeps between looks. It yields meanwhile.
  std::chrono::nanoseconds spin = std::chrono::milliseconds(1);
  MpiReduction reduction = MpiReduction::rank_order;
  /// What one message carries at most, at least 64; 0: 512 KiB, less where there are many ranks.
  /// A communicator keeps memory for four messages a peer. Operations may have any number of
  /// elements, beyond MPI's `int` too: they are cut.
  std::size_t chunk_bytes = 0;
  /// Ranks of one host take large payloads straight out of each other's memory where the system
  /// lets them (Linux: process_vm_readv); an owning communicator finds out when it is made.
  bool share_memory = true;
};

}  // namespace zero
