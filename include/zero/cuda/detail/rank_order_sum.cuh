// SPDX-License-Identifier: Apache-2.0
/// @file
/// The reduction of what all ranks hold, in rank order, where a rank's peers have sent theirs into
/// one array: the bits of `zero/detail/rank_order_sum.hpp`, in CUDA memory.
#pragma once

#include <cstddef>

#include "zero/communicator.hpp"
#include "zero/cuda/detail/reduce.cuh"
#include "zero/cuda/stream.hpp"
#include "zero/element.hpp"

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

/// Enqueues one kernel; none where there is nothing to do. Throws `CudaError`.
template <Element T>
void rank_order_reduce(const RankOrderTask& task, StreamView stream) {
  const ReceivedSources<T> sources{static_cast<const T*>(task.own),
                                   static_cast<const T*>(task.others), task.stride,
                                   static_cast<unsigned>(task.rank)};
  const auto scale = static_cast<arithmetic_t<T>>(task.scaled ? task.scale : 1);
  reduce_received<T>(sources, static_cast<std::size_t>(task.ranks), task.count,
                     static_cast<T*>(task.out), task.op, scale, stream);
}

}  // namespace zero::cuda::detail
