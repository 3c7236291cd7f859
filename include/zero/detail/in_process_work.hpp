// SPDX-License-Identifier: Apache-2.0
/// @file
/// The in-process operations, and one rank's part of the work.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <memory>
#include <span>
#include <utility>

#include "zero/communicator.hpp"
#include "zero/detail/in_process_world.hpp"
#include "zero/detail/rank_order_sum.hpp"
#include "zero/detail/streamed_copy.hpp"
#include "zero/element.hpp"

namespace zero::detail {

inline std::size_t offset_of(const std::size_t* counts, std::size_t rank) noexcept {
  std::size_t offset = 0;
  for (std::size_t r = 0; r < rank; ++r) offset += counts[r];
  return offset;
}

using InProcessRanks = std::span<const InProcessOperation>;

template <class T>
const T* input_of(const InProcessOperation& operation) noexcept {
  return static_cast<const T*>(operation.input);
}

template <class T>
void copy_elements(const T* from, std::size_t count, T* to) noexcept {
  if (count == 0 || from == to) return;
  if (count * sizeof(T) >= streamed_bytes) return streamed_copy(from, count, to);
  std::memcpy(to, from, count * sizeof(T));
}

/// `out[i]` becomes the reduction of element `i` of every source. `out` is disjoint from those, or
/// is exactly one of them.
template <Element T>
void reduce_sources(std::span<const T* const> sources, std::size_t count, T* out,
                    ReduceOp op) noexcept {
  if (op == ReduceOp::sum) {
    if (sources.size() == 1) return copy_elements(sources[0], count, out);
    return sum_in_rank_order<T>(sources, count, out);
  }
  // A NaN wins, or it would depend on the order whether anybody learns of it.
  using Traits = element_traits<T>;
  for (std::size_t i = 0; i < count; ++i) {
    auto best = Traits::load(sources[0][i]);
    for (std::size_t r = 1; r < sources.size(); ++r) {
      const auto x = Traits::load(sources[r][i]);
      if ((op == ReduceOp::min ? x < best : best < x) || x != x) best = x;
    }
    out[i] = Traits::store(best);
  }
}

/// `out[i]` becomes the reduction of element `begin + i` of every rank's input. `out` is disjoint
/// from those, or is exactly the own one.
template <Element T>
void reduce_slice(InProcessRanks ranks, std::size_t begin, std::size_t count, T* out, ReduceOp op,
                  void* scratch) noexcept {
  if (count == 0) return;
  auto* const sources = static_cast<const T**>(scratch);
  for (std::size_t r = 0; r < ranks.size(); ++r) {
    std::construct_at(sources + r, input_of<T>(ranks[r]) + begin);
  }
  reduce_sources<T>(std::span<const T* const>(sources, ranks.size()), count, out, op);
}

/// Slices of whole cache lines, so that no two ranks write to one.
template <class T>
constexpr std::size_t slice_length(std::size_t count, std::size_t ranks) noexcept {
  constexpr std::size_t line = sizeof(T) < 64 ? 64 / sizeof(T) : 1;
  const std::size_t even = count / ranks + (count % ranks != 0 ? 1 : 0);
  return (even + line - 1) / line * line;
}

template <Element T>
InProcessOperation all_reduce_operation(std::size_t size, std::span<T> data, ReduceOp op) {
  constexpr auto work = [](InProcessRanks ranks, std::size_t rank, unsigned phase,
                           void* scratch) noexcept {
    const InProcessOperation& own = ranks[rank];
    auto* const out = static_cast<T*>(own.output);
    const std::size_t count = own.input_count;
    const std::size_t length = slice_length<T>(count, ranks.size());
    const auto slice = [&](std::size_t r) {
      const std::size_t begin = std::min(count, r * length);
      return std::pair(begin, std::min(count - begin, length));
    };
    if (phase == 0) {
      const auto [begin, elements] = slice(rank);
      return reduce_slice<T>(ranks, begin, elements, out + begin, own.reduce, scratch);
    }
    for (std::size_t i = 1; i < ranks.size(); ++i) {
      // Everybody starts behind itself, so that not all read from one rank at a time.
      const std::size_t peer = (rank + i) % ranks.size();
      const auto [begin, elements] = slice(peer);
      copy_elements(input_of<T>(ranks[peer]) + begin, elements, out + begin);
    }
  };
  return {.kind = InProcessKind::all_reduce,
          .name = "all_reduce",
          .element = element_traits<T>::name,
          .element_bytes = sizeof(T),
          .input_count = data.size(),
          .output_count = data.size(),
          .reduce = op,
          .input = data.data(),
          .output = data.data(),
          .phases = size == 1 ? 0U : 2U,
          .work = work};
}

/// Even slices where `counts` is null.
template <Element T>
InProcessOperation reduce_scatter_operation(std::span<const T> input, std::span<T> output,
                                            const std::size_t* counts, ReduceOp op) {
  constexpr auto work = [](InProcessRanks ranks, std::size_t rank, unsigned,
                           void* scratch) noexcept {
    const InProcessOperation& own = ranks[rank];
    const std::size_t begin =
        own.output_counts != nullptr ? offset_of(own.output_counts, rank) : rank * own.output_count;
    reduce_slice<T>(ranks, begin, own.output_count, static_cast<T*>(own.output), own.reduce,
                    scratch);
  };
  return {.kind = counts ? InProcessKind::reduce_scatter_v : InProcessKind::reduce_scatter,
          .name = counts ? "reduce_scatter_v" : "reduce_scatter",
          .element = element_traits<T>::name,
          .element_bytes = sizeof(T),
          .input_count = input.size(),
          .output_count = output.size(),
          .reduce = op,
          .input = input.data(),
          .output = output.data(),
          .output_counts = counts,
          .phases = 1,
          .work = work};
}

template <class T>
void gather_work(InProcessRanks ranks, std::size_t rank, unsigned, void*) noexcept {
  const InProcessOperation& own = ranks[rank];
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    const std::size_t peer = (rank + i) % ranks.size();
    const std::size_t count = ranks[peer].input_count;
    const std::size_t begin =
        own.input_counts != nullptr ? offset_of(own.input_counts, peer) : peer * count;
    copy_elements(input_of<T>(ranks[peer]), count, static_cast<T*>(own.output) + begin);
  }
}

/// Even slices where `counts` is null.
template <Element T>
InProcessOperation all_gather_operation(std::span<const T> input, std::span<T> output,
                                        const std::size_t* counts) {
  return {.kind = counts ? InProcessKind::all_gather_v : InProcessKind::all_gather,
          .name = counts ? "all_gather_v" : "all_gather",
          .element = element_traits<T>::name,
          .element_bytes = sizeof(T),
          .input_count = input.size(),
          .output_count = output.size(),
          .input = input.data(),
          .output = output.data(),
          .input_counts = counts,
          .phases = 1,
          .work = &gather_work<T>};
}

inline InProcessOperation exchange_operation(std::span<const std::byte> mine,
                                             std::span<std::byte> all) {
  return {.kind = InProcessKind::exchange,
          .name = "exchange",
          .element = "bytes",
          .element_bytes = 1,
          .input_count = mine.size(),
          .output_count = all.size(),
          .input = mine.data(),
          .output = all.data(),
          .phases = 1,
          .work = &gather_work<std::byte>};
}

/// Even slices where the counts are null.
template <Element T>
InProcessOperation all_to_all_operation(std::span<const T> input, const std::size_t* send_counts,
                                        std::span<T> output, const std::size_t* receive_counts) {
  constexpr auto work = [](InProcessRanks ranks, std::size_t rank, unsigned, void*) noexcept {
    const InProcessOperation& own = ranks[rank];
    const bool even = own.output_counts == nullptr;
    for (std::size_t i = 0; i < ranks.size(); ++i) {
      const std::size_t peer = (rank + i) % ranks.size();
      const std::size_t count = even ? own.output_count / ranks.size() : own.output_counts[peer];
      const std::size_t from = even ? rank * count : offset_of(ranks[peer].input_counts, rank);
      const std::size_t to = even ? peer * count : offset_of(own.output_counts, peer);
      copy_elements(input_of<T>(ranks[peer]) + from, count, static_cast<T*>(own.output) + to);
    }
  };
  return {.kind = send_counts ? InProcessKind::all_to_all_v : InProcessKind::all_to_all,
          .name = send_counts ? "all_to_all_v" : "all_to_all",
          .element = element_traits<T>::name,
          .element_bytes = sizeof(T),
          .input_count = input.size(),
          .output_count = output.size(),
          .input = input.data(),
          .output = output.data(),
          .input_counts = send_counts,
          .output_counts = receive_counts,
          .phases = 1,
          .work = work};
}

template <Element T>
InProcessOperation broadcast_operation(std::span<T> data, int root) {
  constexpr auto work = [](InProcessRanks ranks, std::size_t rank, unsigned, void*) noexcept {
    const InProcessOperation& own = ranks[rank];
    copy_elements(input_of<T>(ranks[static_cast<std::size_t>(own.root)]), own.input_count,
                  static_cast<T*>(own.output));
  };
  return {.kind = InProcessKind::broadcast,
          .name = "broadcast",
          .element = element_traits<T>::name,
          .element_bytes = sizeof(T),
          .input_count = data.size(),
          .output_count = data.size(),
          .root = root,
          .input = data.data(),
          .output = data.data(),
          .phases = 1,
          .work = work};
}

}  // namespace zero::detail
