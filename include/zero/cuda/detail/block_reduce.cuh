// SPDX-License-Identifier: Apache-2.0
/// @file
/// Reductions over the threads of a block. This is the one place that knows that emulated blocks
/// which wait for each other have one thread.
#pragma once

#include "zero/config.hpp"

#if !ZERO_CUDA_EMULATED
#include <cub/block/block_reduce.cuh>
#endif

namespace zero::cuda::detail {

#if ZERO_CUDA_EMULATED

inline constexpr unsigned reducing_threads = 1;

template <class T, class Op>
T block_reduce(const T& mine, Op) {
  return mine;
}

#else

/// So many threads a block are launched of kernels that reduce.
inline constexpr unsigned reducing_threads = 128;

/// All threads' numbers by `op`, on thread 0; arbitrary on the others. All threads call it, and
/// `__syncthreads` before they call it again.
template <class T, class Op>
__device__ T block_reduce(const T& mine, Op op) {
  using Reduce = cub::BlockReduce<T, reducing_threads>;
  __shared__ typename Reduce::TempStorage storage;
  return Reduce(storage).Reduce(mine, op);
}

#endif

}  // namespace zero::cuda::detail
