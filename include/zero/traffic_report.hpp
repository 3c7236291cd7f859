// SPDX-License-Identifier: Apache-2.0
/// @file
/// What a rank's traffic cost it, and how much of it was hidden.
#pragma once

#include <cstdint>

namespace zero {

/// Since construction, of one rank. Only stages that shard gradients have traffic beside the
/// computation; with others all is 0. Of a `HybridCommunicator` the group's: what is summed over
/// replicas takes time, but is not among the bytes.
struct TrafficReport {
  /// One kind of traffic.
  struct Kind {
    double busy = 0;          ///< seconds in which some was under way, waiting for peers included
    double exposed = 0;       ///< seconds that verbs waited for it, and for its thread to wake up
    std::uint64_t bytes = 0;  ///< payload that this rank sent to peers, padding included
    /// The part of its time that computation went on in, in [0, 1]; 1 without traffic.
    [[nodiscard]] double hidden() const noexcept {
      return busy > exposed ? (busy - exposed) / busy : busy > 0 ? 0 : 1;
    }
  };
  Kind reduce{};  ///< of gradients
  Kind gather{};  ///< of values: after an update and, at stage 3, of units
};

}  // namespace zero
