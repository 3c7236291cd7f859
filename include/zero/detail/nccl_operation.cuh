// SPDX-License-Identifier: Apache-2.0
/// @file
/// One operation over NCCL: which calls it takes, before and after the kernel that sums.
///
/// Data that only moves is handed to NCCL as bytes, as which NCCL moves it anyway.
#pragma once

#include <nccl.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "zero/communicator.hpp"
#include "zero/cuda/detail/rank_order_sum.cuh"
#include "zero/cuda/stream.hpp"
#include "zero/detail/checked_operation.hpp"
#include "zero/detail/in_process_operation.hpp"
#include "zero/detail/rounding.hpp"
#include "zero/element.hpp"
#include "zero/rounding.hpp"

namespace zero::detail {

/// Whether NCCL's own sums compute as the library defines elements of type `T`.
template <Element T>
inline constexpr bool nccl_sums =
    is_16_bit<T> ||
    ((std::is_same_v<T, float> || std::is_same_v<T, double>) && std::is_same_v<T, arithmetic_t<T>>);

constexpr ncclDataType_t nccl_type(ElementType type) noexcept {
  switch (type) {
    case ElementType::float32: return ncclFloat32;
    case ElementType::float64: return ncclFloat64;
    case ElementType::float16: return ncclFloat16;
    case ElementType::bfloat16: return ncclBfloat16;
  }
  return ncclUint8;
}

/// What the sum over ranks is multiplied by.
enum class NcclScaling : std::uint8_t { none, average, factor };

struct NcclOperation {
  using Reduce = void (*)(const cuda::detail::RankOrderTask&, cuda::StreamView);

  InProcessOperation what{};
  Reduce reduce = nullptr;  ///< sums in rank order; null where nothing is reduced
  bool native = false;      ///< NCCL reduces instead
  ncclDataType_t type = ncclUint8;
  NcclScaling scaling = NcclScaling::none;
  double scale = 1;
  alignas(16) std::byte scalar[16]{};   ///< `scale` as an element
  ncclRedOp_t own_reduction = ncclSum;  ///< where `scaling` is a factor and NCCL reduces
  std::uint64_t batch = 0;              ///< operations of one number are launched together
  std::size_t workspace = 0;            ///< where its part starts, in bytes
};

/// @tparam T what is reduced, or void
template <class T>
NcclOperation nccl_operation(const InProcessOperation& what, bool native,
                             NcclScaling scaling = NcclScaling::none, double scale = 1) {
  NcclOperation operation{.what = what, .scaling = scaling, .scale = scale};
  if constexpr (!std::is_void_v<T>) {
    operation.reduce = cuda::detail::rank_order_reduce<T>;
    if constexpr (nccl_sums<T>) {
      operation.native = native && what.reduce == ReduceOp::sum;
      operation.type = nccl_type(element_traits<T>::type);
      const T stored = round_to<T, Rounding::nearest>(static_cast<arithmetic_t<T>>(scale));
      std::memcpy(operation.scalar, &stored, sizeof stored);
    }
  }
  return operation;
}

/// The calls of one rank's operations.
class NcclCalls {
 public:
  NcclCalls(int rank, int size, cuda::StreamView stream) noexcept
      : rank_(static_cast<std::size_t>(rank)),
        size_(static_cast<std::size_t>(size)),
        stream_(stream) {}

  /// Bytes of workspace that `operation` needs; a multiple of 16.
  [[nodiscard]] std::size_t workspace_bytes(const NcclOperation& operation) const {
    if (!in_rank_order(operation)) return 0;
    const InProcessOperation& what = operation.what;
    const std::size_t elements =
        what.kind == InProcessKind::all_reduce
            ? stride(operation, slice(operation)) + stride(operation, rest(operation))
            : stride(operation, what.output_count);
    return (elements * (size_ - 1) * what.element_bytes + 15) / 16 * 16;
  }

  /// Before the kernel. Within a group.
  ncclResult_t first(const NcclOperation& operation, ncclComm_t comm, std::byte* workspace) const {
    const InProcessOperation& what = operation.what;
    const std::size_t bytes = what.element_bytes;
    switch (what.kind) {
      case InProcessKind::all_reduce: {
        if (operation.native) {
          return ncclAllReduce(what.output, what.output, what.input_count, operation.type,
                               reduction(operation), comm, stream_.get());
        }
        const std::byte* data = input(what);
        const std::size_t mine = slice(operation), left = rest(operation);
        ncclResult_t result = gather_slices(
            comm, workspace + operation.workspace, mine * bytes, stride(operation, mine) * bytes,
            [&](std::size_t r) { return data + r * mine * bytes; },
            [&](std::size_t) { return mine * bytes; });
        if (result != ncclSuccess) return result;
        return gather_slices(
            comm, rest_workspace(operation, workspace), left * bytes,
            stride(operation, left) * bytes,
            [&](std::size_t) { return data + size_ * mine * bytes; },
            [&](std::size_t) { return left * bytes; });
      }
      case InProcessKind::reduce_scatter:
      case InProcessKind::reduce_scatter_v: {
        if (operation.native) return native_reduce_scatter(operation, comm);
        const std::byte* data = input(what);
        return gather_slices(
            comm, workspace + operation.workspace, what.output_count * bytes,
            stride(operation, what.output_count) * bytes,
            [&](std::size_t r) {
              return data + begin(what, what.output_counts, what.output_count, r);
            },
            [&](std::size_t r) { return length(what, what.output_counts, what.output_count, r); });
      }
      case InProcessKind::all_gather:
      case InProcessKind::all_gather_v: return gather(what, comm);
      case InProcessKind::all_to_all:
      case InProcessKind::all_to_all_v: {
        const std::size_t each = what.input_count / size_;
        for (std::size_t r = 0; r < size_; ++r) {
          const ncclResult_t result =
              transfer(comm, r, input(what) + begin(what, what.input_counts, each, r),
                       length(what, what.input_counts, each, r),
                       output(what) + begin(what, what.output_counts, each, r),
                       length(what, what.output_counts, each, r));
          if (result != ncclSuccess) return result;
        }
        return ncclSuccess;
      }
      case InProcessKind::broadcast:
        if (what.input_count == 0) return ncclSuccess;
        return ncclBroadcast(what.output, what.output, what.input_count * bytes, ncclUint8,
                             what.root, comm, stream_.get());
      case InProcessKind::barrier:
        // Not less than an all-reduce, which ends nowhere before it has begun everywhere.
        return ncclAllReduce(what.output, what.output, 1, ncclFloat32, ncclSum, comm,
                             stream_.get());
      default: return ncclInternalError;
    }
  }

  /// Between the calls. Throws `CudaError`.
  void kernel(const NcclOperation& operation, std::byte* workspace) const {
    if (operation.reduce == nullptr || operation.native) return;
    const InProcessOperation& what = operation.what;
    const auto reduce = [&](const std::byte* own, std::byte* others, std::byte* out,
                            std::size_t count) {
      if (count == 0) return;
      const bool scaled = operation.scaling != NcclScaling::none;
      if (size_ == 1 && !scaled) {
        if (own == out) return;
        return cuda::check(cudaMemcpyAsync(out, own, count * what.element_bytes,
                                           cudaMemcpyDeviceToDevice, stream_.get()),
                           "cudaMemcpyAsync");
      }
      operation.reduce({.own = own,
                        .others = others,
                        .out = out,
                        .count = count,
                        .stride = stride(operation, count),
                        .rank = static_cast<int>(rank_),
                        .ranks = static_cast<int>(size_),
                        .op = what.reduce,
                        .scaled = scaled,
                        .scale = operation.scale},
                       stream_);
    };
    std::byte* const others = workspace + operation.workspace;
    if (what.kind == InProcessKind::all_reduce) {
      std::byte* const data = output(what);
      const std::size_t mine = slice(operation), bytes = what.element_bytes;
      reduce(data + rank_ * mine * bytes, others, data + rank_ * mine * bytes, mine);
      reduce(data + size_ * mine * bytes, rest_workspace(operation, workspace),
             data + size_ * mine * bytes, rest(operation));
    } else {
      reduce(input(what) + begin(what, what.output_counts, what.output_count, rank_), others,
             output(what), what.output_count);
    }
  }

  /// After the kernel. Within a group.
  ncclResult_t second(const NcclOperation& operation, ncclComm_t comm) const {
    const InProcessOperation& what = operation.what;
    if (what.kind != InProcessKind::all_reduce || !in_rank_order(operation)) return ncclSuccess;
    const std::size_t bytes = slice(operation) * what.element_bytes;
    if (bytes == 0) return ncclSuccess;
    return ncclAllGather(output(what) + rank_ * bytes, what.output, bytes, ncclUint8, comm,
                         stream_.get());
  }
  [[nodiscard]] bool has_second(const NcclOperation& operation) const {
    return operation.what.kind == InProcessKind::all_reduce && in_rank_order(operation) &&
           slice(operation) != 0;
  }

 private:
  [[nodiscard]] bool in_rank_order(const NcclOperation& operation) const {
    return operation.reduce != nullptr && !operation.native && size_ > 1;
  }
  static const std::byte* input(const InProcessOperation& what) {
    return static_cast<const std::byte*>(what.input);
  }
  static std::byte* output(const InProcessOperation& what) {
    return static_cast<std::byte*>(what.output);
  }
  /// Of rank `r`'s slice, in bytes; `counts` is null where all have `each` elements.
  static std::size_t begin(const InProcessOperation& what, const std::size_t* counts,
                           std::size_t each, std::size_t r) {
    return (counts != nullptr ? offset_of(counts, r) : r * each) * what.element_bytes;
  }
  static std::size_t length(const InProcessOperation& what, const std::size_t* counts,
                            std::size_t each, std::size_t r) {
    return (counts != nullptr ? counts[r] : each) * what.element_bytes;
  }
  static ncclRedOp_t reduction(const NcclOperation& operation) {
    switch (operation.scaling) {
      case NcclScaling::none: return ncclSum;
      case NcclScaling::average: return ncclAvg;
      case NcclScaling::factor: return operation.own_reduction;
    }
    return ncclSum;
  }

  /// In an all-reduce in rank order each rank sums a slice of whole 16 bytes and gathers the
  /// others'; what is left over (all of it, where it is little) every rank sums for itself.
  [[nodiscard]] std::size_t slice(const NcclOperation& operation) const {
    const std::size_t width = width_of(operation);
    return operation.what.input_count / (size_ * width) * width;
  }
  [[nodiscard]] std::size_t rest(const NcclOperation& operation) const {
    return operation.what.input_count - size_ * slice(operation);
  }
  static std::size_t width_of(const NcclOperation& operation) {
    return std::max<std::size_t>(1, 16 / operation.what.element_bytes);
  }
  /// From one rank's part of the workspace to the next one's, in elements.
  static std::size_t stride(const NcclOperation& operation, std::size_t count) {
    const std::size_t width = width_of(operation);
    return (count + width - 1) / width * width;
  }
  [[nodiscard]] std::byte* rest_workspace(const NcclOperation& operation,
                                          std::byte* workspace) const {
    return workspace + operation.workspace +
           (size_ - 1) * stride(operation, slice(operation)) * operation.what.element_bytes;
  }

  /// Sends to every peer its slice of this rank's data and receives theirs of this rank's slice.
  template <class At, class Length>
  ncclResult_t gather_slices(ncclComm_t comm, std::byte* others, std::size_t own_bytes,
                             std::size_t stride_bytes, At at, Length bytes_of) const {
    for (std::size_t r = 0; r < size_; ++r) {
      if (r == rank_) continue;
      const ncclResult_t result = transfer(
          comm, r, at(r), bytes_of(r), others + (r < rank_ ? r : r - 1) * stride_bytes, own_bytes);
      if (result != ncclSuccess) return result;
    }
    return ncclSuccess;
  }

  ncclResult_t transfer(ncclComm_t comm, std::size_t peer, const std::byte* from,
                        std::size_t send_bytes, std::byte* to, std::size_t receive_bytes) const {
    const int r = static_cast<int>(peer);
    if (send_bytes != 0) {
      const ncclResult_t result = ncclSend(from, send_bytes, ncclUint8, r, comm, stream_.get());
      if (result != ncclSuccess) return result;
    }
    if (receive_bytes == 0) return ncclSuccess;
    return ncclRecv(to, receive_bytes, ncclUint8, r, comm, stream_.get());
  }

  /// Where all counts are the same, null counts would do.
  [[nodiscard]] bool even(const std::size_t* counts) const {
    return counts == nullptr || std::all_of(counts, counts + size_,
                                            [&](std::size_t count) { return count == counts[0]; });
  }

  ncclResult_t native_reduce_scatter(const NcclOperation& operation, ncclComm_t comm) const {
    const InProcessOperation& what = operation.what;
    if (even(what.output_counts)) {
      if (what.output_count == 0) return ncclSuccess;
      return ncclReduceScatter(what.input, what.output, what.output_count, operation.type,
                               reduction(operation), comm, stream_.get());
    }
    for (std::size_t r = 0; r < size_; ++r) {
      if (what.output_counts[r] == 0) continue;
      const ncclResult_t result = ncclReduce(
          input(what) + begin(what, what.output_counts, 0, r), what.output, what.output_counts[r],
          operation.type, reduction(operation), static_cast<int>(r), comm, stream_.get());
      if (result != ncclSuccess) return result;
    }
    return ncclSuccess;
  }

  ncclResult_t gather(const InProcessOperation& what, ncclComm_t comm) const {
    if (even(what.input_counts)) {
      if (what.input_count == 0) return ncclSuccess;
      return ncclAllGather(what.input, what.output, what.input_count * what.element_bytes,
                           ncclUint8, comm, stream_.get());
    }
    for (std::size_t r = 0; r < size_; ++r) {
      const std::size_t bytes = what.input_counts[r] * what.element_bytes;
      if (bytes == 0) continue;
      std::byte* const to = output(what) + offset_of(what.input_counts, r) * what.element_bytes;
      const void* const from = r == rank_ ? what.input : to;
      const ncclResult_t result =
          ncclBroadcast(from, to, bytes, ncclUint8, static_cast<int>(r), comm, stream_.get());
      if (result != ncclSuccess) return result;
    }
    return ncclSuccess;
  }

  std::size_t rank_;
  std::size_t size_;
  cuda::StreamView stream_;
};

}  // namespace zero::detail
