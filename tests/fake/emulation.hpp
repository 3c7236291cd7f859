// SPDX-License-Identifier: Apache-2.0
/// @file
/// CUDA's language extensions for a C++ compiler: force-included (`-include`) where kernels are
/// compiled to run on a processor. A block's threads run one after the other, so kernels that wait
/// for each other within a block (`__syncthreads`) are launched with one thread a block.
#pragma once

#include <cuda_runtime.h>

#include <functional>
#include <utility>

namespace zero_emulation {

// What kernels ask; set by the fake runtime around each thread.
extern thread_local uint3 thread_index;
extern thread_local uint3 block_index;
extern thread_local dim3 block_size;
extern thread_local dim3 grid_size;

/// Enqueues `body`, once for each thread of each block; defined by the fake runtime.
cudaError_t launch(cudaStream_t stream, unsigned blocks, unsigned threads,
                   std::function<void()> body);

}  // namespace zero_emulation

#define threadIdx (::zero_emulation::thread_index)
#define blockIdx (::zero_emulation::block_index)
#define blockDim (::zero_emulation::block_size)
#define gridDim (::zero_emulation::grid_size)
#if !defined(__launch_bounds__)
#define __launch_bounds__(...)
#endif

inline void __syncthreads() {}
inline void __threadfence() {}

template <class T, class U>
inline T atomicAdd(T* at, U add) {
  return __atomic_fetch_add(at, static_cast<T>(add), __ATOMIC_RELAXED);
}
template <class T, class U>
inline T atomicOr(T* at, U bits) {
  return __atomic_fetch_or(at, static_cast<T>(bits), __ATOMIC_RELAXED);
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
