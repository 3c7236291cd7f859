// SPDX-License-Identifier: Apache-2.0
/// @file
/// How a rank becomes one of NCCL's: started without blocking, finished within a timeout.
#pragma once

#include <nccl.h>

#include <chrono>
#include <cstddef>
#include <string>
#include <thread>
#include <utility>

#include "zero/cuda/error.hpp"
#include "zero/cuda/stream.hpp"
#include "zero/detail/nccl_error.hpp"
#include "zero/error.hpp"

namespace zero::detail {

/// The device of `stream`; that is the current one for the legacy default stream. Throws
/// `UsageError` where another is current.
inline int nccl_device(cuda::StreamView stream) {
  int current = 0, device = 0;
  cuda::check(cudaGetDevice(&current), "cudaGetDevice");
  cuda::check(cudaStreamGetDevice(stream.get(), &device), "cudaStreamGetDevice");
  if (current != device) {
    throw UsageError(
        "NcclCommunicator: the stream is one of device " + std::to_string(device) +
        ", but device " + std::to_string(current) +
        " is current; call cudaSetDevice with this rank's device before its stream and "
        "its communicator are made.");
  }
  return device;
}

/// One rank's joining, on the device that is current when it starts. Not finished, it is aborted.
class NcclInit {
 public:
  /// Throws `UsageError`, `CommunicatorError`.
  NcclInit(const ncclUniqueId& id, int rank, int size) : rank_(rank) {
    if (size < 1 || rank < 0 || rank >= size) {
      throw UsageError("NcclCommunicator: rank is " + std::to_string(rank) + " of " +
                       std::to_string(size) + "; it must be 0 to size - 1.");
    }
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    const ncclResult_t result = ncclCommInitRankConfig(&comm_, size, id, rank, &config);
    if (result != ncclSuccess && result != ncclInProgress) fail(result);
  }
  NcclInit(NcclInit&& other) noexcept
      : rank_(other.rank_), comm_(std::exchange(other.comm_, nullptr)) {}
  NcclInit& operator=(NcclInit&& other) noexcept {
    std::swap(rank_, other.rank_);
    std::swap(comm_, other.comm_);
    return *this;
  }
  ~NcclInit() {
    if (comm_ != nullptr) (void)ncclCommAbort(comm_);
  }

  /// Waits for all ranks, until `end`. Throws `CommunicatorError`.
  [[nodiscard]] ncclComm_t finish(std::chrono::steady_clock::time_point end) {
    for (;;) {
      ncclResult_t state = ncclSuccess;
      const ncclResult_t result = ncclCommGetAsyncError(comm_, &state);
      if (result != ncclSuccess) state = result;
      if (state == ncclSuccess) return std::exchange(comm_, nullptr);
      if (state != ncclInProgress) fail(state);
      if (std::chrono::steady_clock::now() >= end) {
        throw CommunicatorError(
            CommunicatorFailure::timeout, rank_, "NcclCommunicator", 0,
            text("not all ranks joined in time; check that all were started, with the same size "
                 "and the same unique id, and that they reach each other (NCCL_DEBUG=INFO shows "
                 "what NCCL waits for; NCCL_SOCKET_IFNAME names the network interface), or allow "
                 "more time (NcclOptions::init_timeout)"));
      }
      std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
  }

 private:
  [[nodiscard]] std::string text(const std::string& why) const {
    return "rank " + std::to_string(rank_) + ": NcclCommunicator: " + why + ".";
  }
  [[noreturn]] void fail(ncclResult_t result) {
    const std::string why = nccl_failure_text(result, "ncclCommInitRankConfig", comm_);
    if (comm_ != nullptr) (void)ncclCommAbort(std::exchange(comm_, nullptr));
    throw CommunicatorError(CommunicatorFailure::transport, rank_, "NcclCommunicator", 0,
                            text(why));
  }

  int rank_;
  ncclComm_t comm_ = nullptr;
};

}  // namespace zero::detail
