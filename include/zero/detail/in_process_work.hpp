// SPDX-License-Identifier: Apache-2.0
/// @file
/// The in-process operations: what one rank may ask for, and its part of the work.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <utility>

#include "zero/communicator.hpp"
#include "zero/detail/in_process_world.hpp"
#include "zero/detail/rank_order_sum.hpp"
#include "zero/detail/streamed_copy.hpp"
#include "zero/element.hpp"
#include "zero/error.hpp"

namespace zero::detail {

inline std::size_t offset_of(const std::size_t* counts, std::size_t rank) noexcept {
  std::size_t offset = 0;
  for (std::size_t r = 0; r < rank; ++r) offset += counts[r];
  return offset;
}

/// Checks one rank's arguments of one call; each check throws a `UsageError` that says what is
/// wrong.
class ArgumentCheck {
 public:
  template <class Comm>
  ArgumentCheck(const Comm& comm, const char* operation)
      : operation_(operation),
        rank_(static_cast<std::size_t>(comm.rank())),
        size_(static_cast<std::size_t>(comm.size())) {}

  [[noreturn]] void reject(const std::string& why) const {
    throw UsageError("rank " + std::to_string(rank_) + ": " + operation_ + ": " + why +
                     ". Nothing was started.");
  }

  template <class T>
  void memory(const char* name, std::span<T> span) const {
    if (span.data() != nullptr || span.empty()) return;
    reject(std::string(name) + " is null but has " + std::to_string(span.size()) + " elements");
  }

  /// `whole == size() * part`
  void multiple(const char* whole_name, std::size_t whole, const char* part_name,
                std::size_t part) const {
    if (whole % size_ == 0 && whole / size_ == part) return;
    reject(std::string(whole_name) + " has " + std::to_string(whole) + " elements and " +
           part_name + " " + std::to_string(part) + " on " + std::to_string(size_) + " ranks; " +
           whole_name + " must have size() times as many as " + part_name + ", that is " +
           std::to_string(part * size_) + " (or use the _v form, which takes any sizes)");
  }

  /// One count a rank, adding up to `total`.
  void counts(const char* name, std::span<const std::size_t> counts, const char* total_name,
              std::size_t total) const {
    if (counts.size() != size_) {
      reject(std::string(name) + " has " + std::to_string(counts.size()) +
             " entries; it must have one a rank, that is " + std::to_string(size_));
    }
    std::size_t left = total;
    bool fits = true;
    for (const std::size_t count : counts) {
      fits = fits && count <= left;
      if (fits) left -= count;
    }
    if (fits && left == 0) return;
    reject(std::string(name) + " adds up to " + std::to_string(offset_of(counts.data(), size_)) +
           ", but " + total_name + " has " + std::to_string(total) + " elements; make them equal");
  }

  void own_count(std::span<const std::size_t> counts, const char* name, std::size_t count) const {
    if (counts[rank_] == count) return;
    reject(std::string(name) + " has " + std::to_string(count) + " elements, but counts[" +
           std::to_string(rank_) + "], for this rank, is " + std::to_string(counts[rank_]) +
           "; make them equal");
  }

  /// What a rank sends to itself is what it receives.
  void same_own(std::span<const std::size_t> send, std::span<const std::size_t> receive) const {
    if (send[rank_] == receive[rank_]) return;
    reject("send_counts[" + std::to_string(rank_) + "], for this rank, is " +
           std::to_string(send[rank_]) + ", but receive_counts[" + std::to_string(rank_) + "] is " +
           std::to_string(receive[rank_]) + "; make them equal");
  }

  /// `part` is `whole`'s own slice, which starts at `offset`, or disjoint from `whole`.
  template <class T>
  void whole_slice(const char* part_name, std::span<const T> part, const char* whole_name,
                   std::span<const T> whole, std::size_t offset) const {
    if (!overlap(part, whole) || part.data() == whole.data() + offset) return;
    reject(std::string(part_name) + " (" + std::to_string(part.size()) + " elements) overlaps " +
           whole_name + " (" + std::to_string(whole.size()) +
           " elements) partly; it must be disjoint, or exactly this rank's slice, which starts at "
           "element " +
           std::to_string(offset));
  }

  template <class T>
  void disjoint(const char* name, std::span<const T> span, const char* other_name,
                std::span<const T> other) const {
    if (!overlap(span, other)) return;
    reject(std::string(name) + " (" + std::to_string(span.size()) + " elements) overlaps " +
           other_name + " (" + std::to_string(other.size()) + " elements); they must be disjoint");
  }

 private:
  template <class T>
  static bool overlap(std::span<const T> a, std::span<const T> b) {
    const auto begin = [](std::span<const T> span) {
      return reinterpret_cast<std::uintptr_t>(span.data());
    };
    return !a.empty() && !b.empty() && begin(a) < begin(b) + b.size_bytes() &&
           begin(b) < begin(a) + a.size_bytes();
  }

  const char* operation_;
  std::size_t rank_;
  std::size_t size_;
};

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
