// SPDX-License-Identifier: Apache-2.0
/// @file
/// What NCCL reports, in words that say what to do.
#pragma once

#include <nccl.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <string>

namespace zero::detail {

inline std::string seconds_of(std::chrono::nanoseconds time) {
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%g s", std::chrono::duration<double>(time).count());
  return text.data();
}

/// When `timeout` is over; a huge one counts as ten years.
inline std::chrono::steady_clock::time_point deadline(std::chrono::nanoseconds timeout) {
  return std::chrono::steady_clock::now() +
         std::min<std::chrono::nanoseconds>(timeout, std::chrono::hours(87600));
}

inline std::string nccl_version_text(int code) {
  if (code < 10000) {
    return std::to_string(code / 1000) + "." + std::to_string(code / 100 % 10) + "." +
           std::to_string(code % 100);
  }
  return std::to_string(code / 10000) + "." + std::to_string(code / 100 % 100) + "." +
         std::to_string(code % 100);
}

/// "NCCL 2.28.9", and what the program was compiled for where that's another.
inline std::string nccl_version_text() {
  int code = 0;
  if (ncclGetVersion(&code) != ncclSuccess) return "NCCL of an unknown version";
  std::string text = "NCCL " + nccl_version_text(code);
  if (code != NCCL_VERSION_CODE) {
    text += " (compiled for " + nccl_version_text(NCCL_VERSION_CODE) + ")";
  }
  return text;
}

/// What a user can do about it.
inline const char* nccl_remedy(ncclResult_t result) noexcept {
  switch (result) {
    case ncclUnhandledCudaError:
      return "a CUDA call within NCCL failed: run with NCCL_DEBUG=INFO to see which, and under "
             "compute-sanitizer if it is an illegal address";
    case ncclSystemError:
      return "a system call or the network failed: run with NCCL_DEBUG=INFO to see which; "
             "NCCL_SOCKET_IFNAME names the network interface to use, and a container needs a large "
             "enough /dev/shm";
    case ncclInvalidArgument:
    case ncclInvalidUsage:
      return "each rank needs a GPU of its own (NCCL refuses two on one), all ranks the same NCCL, "
             "and the same operations with the same sizes; NCCL_DEBUG=INFO tells more";
    case ncclRemoteError:
      return "a peer's process ended, gave up or can't be reached: see what the other ranks "
             "printed";
    default: return "run with NCCL_DEBUG=INFO to see more";
  }
}

/// @param call e.g. "ncclGroupEnd"
/// @param comm whose last error is quoted; null: the calling thread's
inline std::string nccl_failure_text(ncclResult_t result, const char* call, ncclComm_t comm) {
  std::string text = std::string(call) + " failed: " + ncclGetErrorString(result);
  const char* last = ncclGetLastError(comm);
  if (last != nullptr && *last != '\0') text += std::string(" (") + last + ")";
  return text + ", in " + nccl_version_text() + "; " + nccl_remedy(result);
}

}  // namespace zero::detail
