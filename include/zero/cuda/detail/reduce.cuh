// SPDX-License-Identifier: Apache-2.0
/// @file
/// The reduction of K arrays of device memory into one, in rank order: what `sum_in_rank_order` is
/// on the host, to the bit.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "zero/communicator.hpp"
#include "zero/config.hpp"
#include "zero/cuda/detail/launch.cuh"
#include "zero/cuda/stream.hpp"
#include "zero/detail/rounding.hpp"
#include "zero/element.hpp"
#include "zero/rounding.hpp"

namespace zero::cuda::detail {

/// How many arrays a launch can take by address: addresses travel as arguments, of which every
/// device takes 4 KiB.
inline constexpr std::size_t max_reduce_sources = 480;

/// Arrays anywhere, in rank order.
template <class T, unsigned capacity>
struct ScatteredSources {
  const T* first[capacity];

  [[nodiscard]] ZERO_HOST_DEVICE const T* operator()(unsigned rank) const { return first[rank]; }
};

/// What a rank has and what its peers sent, one behind the other, without its own.
template <class T>
struct ReceivedSources {
  const T* own;
  const T* others;
  std::size_t stride;  ///< elements from one peer's to the next one's
  unsigned rank;

  [[nodiscard]] ZERO_HOST_DEVICE const T* operator()(unsigned r) const {
    return r == rank ? own : others + (r < rank ? r : r - 1) * stride;
  }
};

/// Elements in 16 bytes.
template <class T>
inline constexpr std::size_t reduce_lanes = 16 / sizeof(T);

/// What one instruction loads and stores.
template <class T>
struct alignas(16) ReducePack {
  T lane[reduce_lanes<T>];
};

/// A NaN wins over minimum and maximum, or it would depend on the order whether anybody learns of
/// it.
template <class A>
ZERO_HOST_DEVICE A reduce_step(ReduceOp op, A so_far, A x) noexcept {
  if (op == ReduceOp::sum) return so_far + x;
  const bool better = op == ReduceOp::min ? x < so_far : so_far < x;
  return better || x != x ? x : so_far;
}

/// As many elements of what sums are rounded to, stored by whole 16 bytes where there are so many.
template <class T, class Out>
struct alignas(sizeof(Out) < sizeof(T) ? sizeof(Out) * reduce_lanes<T> : 16) ReducedPack {
  Out lane[reduce_lanes<T>];
};

/// @param head elements before the first whole 16 bytes, which all arrays have in the same place
template <Element T, Element Out, class Sources>
__global__ void reduce_kernel(const __grid_constant__ Sources sources, unsigned ranks,
                              std::size_t head, std::size_t count, Out* out, ReduceOp op,
                              arithmetic_t<T> scale) {
  static_assert(16 % sizeof(T) == 0, "elements of 1, 2, 4, 8 or 16 bytes");
  constexpr std::size_t lanes = reduce_lanes<T>;
  const std::size_t first = std::size_t{blockIdx.x} * blockDim.x + threadIdx.x;
  const std::size_t stride = std::size_t{gridDim.x} * blockDim.x;

  // `out` may be one of the sources: all are read before it is written.
  const std::size_t packs = (count - head) / lanes;
  for (std::size_t pack = first; pack < packs; pack += stride) {
    const std::size_t i = head + pack * lanes;
    arithmetic_t<T> reduced[lanes];
    for (unsigned r = 0; r < ranks; ++r) {
      const auto loaded = *reinterpret_cast<const ReducePack<T>*>(sources(r) + i);
      for (std::size_t j = 0; j < lanes; ++j) {
        const arithmetic_t<T> x = zero::detail::load_element(loaded.lane[j]);
        reduced[j] = r == 0 ? x : reduce_step(op, reduced[j], x);
      }
    }
    ReducedPack<T, Out> rounded;
    for (std::size_t j = 0; j < lanes; ++j) {
      rounded.lane[j] = zero::detail::round_to<Out, Rounding::nearest>(reduced[j] * scale);
    }
    *reinterpret_cast<ReducedPack<T, Out>*>(out + i) = rounded;
  }

  const std::size_t tail = head + packs * lanes;
  const std::size_t singles = head + (count - tail);
  for (std::size_t single = first; single < singles; single += stride) {
    const std::size_t i = single < head ? single : single - head + tail;
    arithmetic_t<T> reduced = zero::detail::load_element(sources(0)[i]);
    for (unsigned r = 1; r < ranks; ++r) {
      reduced = reduce_step(op, reduced, zero::detail::load_element(sources(r)[i]));
    }
    out[i] = zero::detail::round_to<Out, Rounding::nearest>(reduced * scale);
  }
}

template <Element T, Element Out, class Sources>
void launch_reduce(const Sources& sources, unsigned ranks, std::size_t count, Out* out, ReduceOp op,
                   arithmetic_t<T> scale, StreamView stream) {
  constexpr std::size_t bytes = sizeof(ReducePack<T>);
  const auto misalignment = [](const void* x) {
    return reinterpret_cast<std::uintptr_t>(x) % bytes;
  };
  const std::size_t first = misalignment(sources(0));
  bool alike = first % sizeof(T) == 0;
  for (unsigned r = 1; r < ranks; ++r) alike = alike && misalignment(sources(r)) == first;
  const std::size_t before = (bytes - first) % bytes / sizeof(T);
  alike =
      alike && reinterpret_cast<std::uintptr_t>(out + before) % alignof(ReducedPack<T, Out>) == 0;
  const std::size_t head = alike ? std::min(before, count) : count;

  constexpr unsigned threads = 256, most_blocks = 2048;
  const std::size_t packs = (count - head) / reduce_lanes<T>;
  const std::size_t items = std::max(packs, count - packs * reduce_lanes<T>);
  const auto blocks =
      static_cast<unsigned>(std::min<std::size_t>((items + threads - 1) / threads, most_blocks));
  launch("reduce", &reduce_kernel<T, Out, Sources>, {blocks, threads}, stream, sources, ranks, head,
         count, out, op, scale);
}

/// Enqueues `out[i] = (((x0[i] + x1[i]) + x2[i]) + …) * scale` (or minimum, maximum) for all
/// `count` elements, in `arithmetic_t<T>`, rounded to `Out` once, to nearest. `source(r)` is where
/// array r of `ranks`, at most `max_reduce_sources`, starts. `out` is disjoint from every array or
/// is exactly one of them. Throws `CudaError`.
/// @tparam Out `T`, or its arithmetic type
template <Element T, Element Out, class Source>
void reduce(std::size_t ranks, Source source, std::size_t count, Out* out, ReduceOp op,
            StreamView stream) {
  const auto run = [&]<unsigned capacity>(std::integral_constant<unsigned, capacity>) {
    ScatteredSources<T, capacity> sources{};
    for (unsigned r = 0; r < ranks; ++r) sources.first[r] = source(r);
    launch_reduce<T>(sources, static_cast<unsigned>(ranks), count, out, op, arithmetic_t<T>(1),
                     stream);
  };
  constexpr unsigned few = 16;
  if (ranks <= few) return run(std::integral_constant<unsigned, few>{});
  run(std::integral_constant<unsigned, max_reduce_sources>{});
}

/// The same of what was received, from any number of ranks.
template <Element T>
void reduce_received(const ReceivedSources<T>& sources, std::size_t ranks, std::size_t count,
                     T* out, ReduceOp op, arithmetic_t<T> scale, StreamView stream) {
  launch_reduce<T>(sources, static_cast<unsigned>(ranks), count, out, op, scale, stream);
}

}  // namespace zero::cuda::detail
