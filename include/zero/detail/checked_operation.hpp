// SPDX-License-Identifier: Apache-2.0
/// @file
/// What one rank may ask of a communicator in host memory: its arguments, checked, as an operation.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "zero/communicator.hpp"
#include "zero/detail/in_process_operation.hpp"
#include "zero/detail/in_process_work.hpp"
#include "zero/element.hpp"
#include "zero/error.hpp"

namespace zero::detail {

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

/// What the host communicators start, each operation only after its arguments have been checked.
/// `comm` is the communicator that is called: its rank and size are what arguments are held
/// against.
namespace checked {

template <class Comm>
[[nodiscard]] std::size_t own(const Comm& comm) noexcept {
  return static_cast<std::size_t>(comm.rank());
}
template <class Comm>
[[nodiscard]] std::size_t world(const Comm& comm) noexcept {
  return static_cast<std::size_t>(comm.size());
}

template <Element T, class Comm>
[[nodiscard]] InProcessOperation all_reduce(const Comm& comm, std::span<T> data, ReduceOp op) {
  const ArgumentCheck call(comm, "all_reduce");
  call.memory("data", data);
  return all_reduce_operation<T>(world(comm), data, op);
}

template <Element T, class Comm>
[[nodiscard]] InProcessOperation reduce_scatter(const Comm& comm, std::span<const T> input,
                                                std::span<T> output, ReduceOp op) {
  const ArgumentCheck call(comm, "reduce_scatter");
  call.memory("input", input);
  call.memory("output", output);
  call.multiple("input", input.size(), "output", output.size());
  call.whole_slice("output", std::span<const T>(output), "input", input, own(comm) * output.size());
  return reduce_scatter_operation<T>(input, output, nullptr, op);
}

template <Element T, class Comm>
[[nodiscard]] InProcessOperation reduce_scatter_v(const Comm& comm, std::span<const T> input,
                                                  std::span<T> output,
                                                  std::span<const std::size_t> counts,
                                                  ReduceOp op) {
  const ArgumentCheck call(comm, "reduce_scatter_v");
  call.memory("input", input);
  call.memory("output", output);
  call.counts("counts", counts, "input", input.size());
  call.own_count(counts, "output", output.size());
  call.whole_slice("output", std::span<const T>(output), "input", input,
                   offset_of(counts.data(), own(comm)));
  return reduce_scatter_operation<T>(input, output, counts.data(), op);
}

template <Element T, class Comm>
[[nodiscard]] InProcessOperation all_gather(const Comm& comm, std::span<const T> input,
                                            std::span<T> output) {
  const ArgumentCheck call(comm, "all_gather");
  call.memory("input", input);
  call.memory("output", output);
  call.multiple("output", output.size(), "input", input.size());
  call.whole_slice("input", input, "output", std::span<const T>(output), own(comm) * input.size());
  return all_gather_operation<T>(input, output, nullptr);
}

template <Element T, class Comm>
[[nodiscard]] InProcessOperation all_gather_v(const Comm& comm, std::span<const T> input,
                                              std::span<T> output,
                                              std::span<const std::size_t> counts) {
  const ArgumentCheck call(comm, "all_gather_v");
  call.memory("input", input);
  call.memory("output", output);
  call.counts("counts", counts, "output", output.size());
  call.own_count(counts, "input", input.size());
  call.whole_slice("input", input, "output", std::span<const T>(output),
                   offset_of(counts.data(), own(comm)));
  return all_gather_operation<T>(input, output, counts.data());
}

template <Element T, class Comm>
[[nodiscard]] InProcessOperation all_to_all(const Comm& comm, std::span<const T> input,
                                            std::span<T> output) {
  const ArgumentCheck call(comm, "all_to_all");
  call.memory("input", input);
  call.memory("output", output);
  if (input.size() != output.size() || input.size() % world(comm) != 0) {
    call.reject("input has " + std::to_string(input.size()) + " elements and output " +
                std::to_string(output.size()) +
                "; both must have the same multiple of size() = " + std::to_string(world(comm)));
  }
  call.disjoint("input", input, "output", std::span<const T>(output));
  return all_to_all_operation<T>(input, nullptr, output, nullptr);
}

template <Element T, class Comm>
[[nodiscard]] InProcessOperation all_to_all_v(const Comm& comm, std::span<const T> input,
                                              std::span<const std::size_t> send_counts,
                                              std::span<T> output,
                                              std::span<const std::size_t> receive_counts) {
  const ArgumentCheck call(comm, "all_to_all_v");
  call.memory("input", input);
  call.memory("output", output);
  call.counts("send_counts", send_counts, "input", input.size());
  call.counts("receive_counts", receive_counts, "output", output.size());
  call.same_own(send_counts, receive_counts);
  call.disjoint("input", input, "output", std::span<const T>(output));
  return all_to_all_operation<T>(input, send_counts.data(), output, receive_counts.data());
}

template <Element T, class Comm>
[[nodiscard]] InProcessOperation broadcast(const Comm& comm, std::span<T> data, int root) {
  const ArgumentCheck call(comm, "broadcast");
  call.memory("data", data);
  if (root < 0 || root >= comm.size()) {
    call.reject("root is " + std::to_string(root) + "; it must be a rank, 0 to " +
                std::to_string(comm.size() - 1));
  }
  return broadcast_operation<T>(data, root);
}

template <class Comm>
[[nodiscard]] InProcessOperation exchange(const Comm& comm, std::span<const std::byte> mine,
                                          std::span<std::byte> all) {
  const ArgumentCheck call(comm, "exchange");
  call.memory("mine", mine);
  call.memory("all", all);
  call.multiple("all", all.size(), "mine", mine.size());
  call.whole_slice("mine", mine, "all", std::span<const std::byte>(all), own(comm) * mine.size());
  return exchange_operation(mine, all);
}

}  // namespace checked

}  // namespace zero::detail
