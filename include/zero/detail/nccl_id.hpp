// SPDX-License-Identifier: Apache-2.0
/// @file
/// NCCL's unique id, and what those who carry it from rank to rank share.
#pragma once

#include <nccl.h>

#include <chrono>
#include <cstdint>
#include <random>
#include <string>

#include "zero/detail/nccl_error.hpp"
#include "zero/error.hpp"

namespace zero::detail {

/// Throws `CommunicatorError`.
inline ncclUniqueId new_nccl_id() {
  ncclUniqueId id{};
  const ncclResult_t result = ncclGetUniqueId(&id);
  if (result == ncclSuccess) return id;
  throw CommunicatorError(CommunicatorFailure::transport, 0, "NcclCommunicator", 0,
                          "rank 0: " + nccl_failure_text(result, "ncclGetUniqueId", nullptr) + ".");
}

/// Not zero, and not the same twice.
inline std::uint64_t new_token() {
  std::random_device device;
  const auto now = std::chrono::steady_clock::now().time_since_epoch().count();
  const std::uint64_t token =
      (std::uint64_t{device()} << 32 | device()) ^ static_cast<std::uint64_t>(now);
  return token != 0 ? token : 1;
}

inline void check_place(const char* what, int rank, int size) {
  if (size >= 1 && rank >= 0 && rank < size) return;
  throw UsageError(std::string(what) + ": rank is " + std::to_string(rank) + " of " +
                   std::to_string(size) + "; it must be 0 to size - 1.");
}

}  // namespace zero::detail
