// SPDX-License-Identifier: Apache-2.0
/// @file
/// The reduction of what all ranks hold, in rank order, where a rank's peers have sent theirs into
/// one array: the bits of `zero/detail/rank_order_sum.hpp`, in CUDA memory.
#pragma once

#include <cstddef>
#include <cstdint>

#include "zero/communicator.hpp"
#include "zero/config.hpp"
#include "zero/cuda/detail/launch.cuh"
#include "zero/cuda/stream.hpp"
#include "zero/detail/rounding.hpp"
#include "zero/element.hpp"
#include "zero/rounding.hpp"

namespace zero::cuda::detail {

/// `out[i]` becomes the reduction of element `i` of every rank's array, times `scale` if `scaled`.
struct RankOrderTask {
  const void* own;     ///< what this rank holds, `count` elements
  const void* others;  ///< what its peers do, by rank, one every `stride` elements; without its own
  void* out;           ///< disjoint from all of them, or exactly `own`
  std::size_t count;
  std::size_t stride;
  int rank;
  int ranks;
  ReduceOp op;
  bool scaled;
  double scale;
};

/// So many elements are read and written at once.
template <Element T>
inline constexpr unsigned rank_order_width = sizeof(T) < 16 ? 16 / sizeof(T) : 1;

template <Element T, unsigned width>
struct alignas(width == 1 ? alignof(T) : 16) RankOrderPack {
  T x[width];
};

/// The elements from `i * width` on.
template <Element T, ReduceOp op, unsigned width>
ZERO_HOST_DEVICE inline void reduce_in_rank_order(const RankOrderTask& task, std::size_t i) {
  using A = arithmetic_t<T>;
  using Pack = RankOrderPack<T, width>;
  A sum[width] = {};
  for (int r = 0; r < task.ranks; ++r) {
    const std::size_t slot = static_cast<std::size_t>(r < task.rank ? r : r - 1);
    const T* from = r == task.rank ? static_cast<const T*>(task.own)
                                   : static_cast<const T*>(task.others) + slot * task.stride;
    const Pack pack = reinterpret_cast<const Pack*>(from)[i];
    for (unsigned j = 0; j < width; ++j) {
      const A x = zero::detail::load_element(pack.x[j]);
      if (r == 0) {
        sum[j] = x;
      } else if constexpr (op == ReduceOp::sum) {
        sum[j] += x;
      } else if ((op == ReduceOp::min ? x < sum[j] : sum[j] < x) || x != x) {
        sum[j] = x;  // a NaN wins, or it would depend on the order whether anybody learns of it
      }
    }
  }
  Pack out;
  for (unsigned j = 0; j < width; ++j) {
    if (task.scaled) sum[j] *= static_cast<A>(task.scale);
    out.x[j] = zero::detail::round_to<T, Rounding::nearest>(sum[j]);
  }
  reinterpret_cast<Pack*>(task.out)[i] = out;
}

template <Element T, ReduceOp op, unsigned width>
__global__ void rank_order_kernel(RankOrderTask task) {
  const std::size_t thread = static_cast<std::size_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const std::size_t threads = static_cast<std::size_t>(gridDim.x) * blockDim.x;
  const std::size_t packs = task.count / width;
  for (std::size_t i = thread; i < packs; i += threads) {
    reduce_in_rank_order<T, op, width>(task, i);
  }
  for (std::size_t i = packs * width + thread; i < task.count; i += threads) {
    reduce_in_rank_order<T, op, 1>(task, i);
  }
}

template <Element T, ReduceOp op>
void launch_rank_order(const RankOrderTask& task, StreamView stream) {
  constexpr unsigned width = rank_order_width<T>;
  const auto on_16_bytes = [](const void* at) {
    return reinterpret_cast<std::uintptr_t>(at) % 16 == 0;
  };
  const bool aligned = on_16_bytes(task.own) && on_16_bytes(task.out) && on_16_bytes(task.others) &&
                       task.stride * sizeof(T) % 16 == 0;
  const std::size_t items = aligned ? (task.count + width - 1) / width : task.count;
  // Enough to fill any GPU; each thread goes on where the grid ends.
  constexpr std::size_t threads = 256, most_blocks = 4096;
  const std::size_t blocks = (items + threads - 1) / threads;
  const LaunchShape shape{static_cast<unsigned>(blocks < most_blocks ? blocks : most_blocks),
                          static_cast<unsigned>(threads)};
  launch("rank_order_sum", aligned ? rank_order_kernel<T, op, width> : rank_order_kernel<T, op, 1>,
         shape, stream, task);
}

/// Enqueues one kernel; none where there is nothing to do. Throws `CudaError`.
template <Element T>
void rank_order_reduce(const RankOrderTask& task, StreamView stream) {
  switch (task.op) {
    case ReduceOp::sum: return launch_rank_order<T, ReduceOp::sum>(task, stream);
    case ReduceOp::min: return launch_rank_order<T, ReduceOp::min>(task, stream);
    case ReduceOp::max: return launch_rank_order<T, ReduceOp::max>(task, stream);
  }
}

}  // namespace zero::cuda::detail
