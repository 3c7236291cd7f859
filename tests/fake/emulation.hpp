// SPDX-License-Identifier: Apache-2.0
/// @file
/// CUDA's language extensions for a C++ compiler: force-included (`-include`) where kernels are
/// compiled to run on a processor. A block's threads run one after the other, so kernels whose
/// threads wait for each other (`__syncthreads`) are launched with one thread a block.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <functional>
#include <stdexcept>

#include "fake/cuda_runtime.hpp"

namespace zero_emulation {

// What kernels ask; set by the fake runtime around each thread.
extern thread_local uint3 thread_index;
extern thread_local uint3 block_index;
extern thread_local dim3 block_size;
extern thread_local dim3 grid_size;

/// Enqueues `body`, once for each thread of each block; defined by the fake runtime.
cudaError_t launch_function(cudaStream_t stream, unsigned blocks, unsigned threads,
                            std::function<void()> body);
template <class Body>
cudaError_t launch(cudaStream_t stream, unsigned blocks, unsigned threads, Body body) {
  const InRuntime inside;  // which may allocate; whoever launches does not
  return launch_function(stream, blocks, threads, std::function<void()>(std::move(body)));
}

}  // namespace zero_emulation

#define threadIdx (::zero_emulation::thread_index)
#define blockIdx (::zero_emulation::block_index)
#define blockDim (::zero_emulation::block_size)
#define gridDim (::zero_emulation::grid_size)
#if !defined(__launch_bounds__)
#define __launch_bounds__(...)
#endif

// A block's threads can't meet here, and one alone need not.
inline void __syncthreads() {
  if (blockDim.x * blockDim.y * blockDim.z != 1)
    throw std::logic_error("__syncthreads with several threads in a block");
}
inline void __threadfence() {}

template <class T, class U>
inline T atomicAdd(T* at, U add) {
  return std::atomic_ref<T>(*at).fetch_add(static_cast<T>(add), std::memory_order_relaxed);
}
template <class T, class U>
inline T atomicOr(T* at, U bits) {
  return std::atomic_ref<T>(*at).fetch_or(static_cast<T>(bits), std::memory_order_relaxed);
}
template <class T, class U>
inline T atomicMin(T* at, U limit) {
  T seen = __atomic_load_n(at, __ATOMIC_RELAXED);
  while (static_cast<T>(limit) < seen &&
         !__atomic_compare_exchange_n(at, &seen, static_cast<T>(limit), true, __ATOMIC_RELAXED,
                                      __ATOMIC_RELAXED)) {
  }
  return seen;
}
