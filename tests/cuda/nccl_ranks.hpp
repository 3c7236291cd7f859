// SPDX-License-Identifier: Apache-2.0
/// @file
/// Ranks over NCCL as threads, each on a device of its own: of the fake runtime's, or the
/// machine's.
#pragma once

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <cstddef>
#include <exception>
#include <thread>
#include <vector>

#include "zero/comm/nccl.cuh"
#include "zero/config.hpp"
#include "zero/cuda/stream.hpp"

#if ZERO_CUDA_EMULATED
#include "fake/cuda_runtime.hpp"
#endif

namespace nccl_ranks {

/// The largest world to test: 4, or as many as there are devices.
inline int largest_world() {
#if ZERO_CUDA_EMULATED
  zero_emulation::set_devices(4);
#endif
  int devices = 0;
  zero::cuda::check(cudaGetDeviceCount(&devices), "cudaGetDeviceCount");
  return devices < 4 ? devices : 4;
}

/// Calls `rank_main(rank)` on `size` threads, whose devices are their ranks, and returns what each
/// of them threw.
template <class F>
std::vector<std::exception_ptr> run_threads(int size, F&& rank_main) {
  std::vector<std::exception_ptr> thrown(static_cast<std::size_t>(size));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        zero::cuda::check(cudaSetDevice(rank), "cudaSetDevice");
        rank_main(rank);
      } catch (...) {
        thrown[static_cast<std::size_t>(rank)] = std::current_exception();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return thrown;
}

/// Calls `rank_main(comm)` on every rank of a world and returns what each of them threw.
template <class F>
std::vector<std::exception_ptr> run(int size, F&& rank_main,
                                    const zero::NcclOptions& options = {}) {
  const ncclUniqueId id = zero::detail::new_nccl_id();
  return run_threads(size, [&](int rank) {
    const zero::cuda::Stream stream;
    zero::NcclCommunicator comm(id, rank, size, stream, options);
    rank_main(comm);
  });
}

inline void rethrow_any(const std::vector<std::exception_ptr>& thrown) {
  for (const std::exception_ptr& exception : thrown) {
    if (exception) std::rethrow_exception(exception);
  }
}

}  // namespace nccl_ranks
