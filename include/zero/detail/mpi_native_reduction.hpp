// SPDX-License-Identifier: Apache-2.0
/// @file
/// MPI's own sums: pieces of the buffers, through the slots' memory, one at a time.
#pragma once

#include <mpi.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <vector>

#include "zero/detail/in_process_operation.hpp"
#include "zero/detail/mpi_operation.hpp"
#include "zero/detail/mpi_staging.hpp"

namespace zero::detail {

class MpiNativeReduction {
 public:
  MpiNativeReduction(MPI_Comm comm, std::size_t rank, std::size_t size)
      : comm_(comm), rank_(rank), counts_(size) {}

  /// Nothing is to be done where ranks sum in their order.
  void begin(const MpiOperation& operation, const MpiPlan& plan, std::size_t piece) noexcept {
    piece_ = piece;
    at_ = end_ = 0;
    if (operation.native == MpiNativeSum::none || counts_.size() == 1) return;
    scatters_ = operation.kind != InProcessKind::all_reduce;
    if (!scatters_) {
      end_ = operation.input_count * operation.element_bytes;
      return;
    }
    for (std::size_t r = 0; r < counts_.size(); ++r) {
      end_ = std::max(end_, plan.reduced_slice(r).bytes);
    }
  }

  [[nodiscard]] bool over() const noexcept { return at_ >= end_; }
  /// What `advance` has called MPI for.
  [[nodiscard]] const char* call() const noexcept {
    return scatters_ ? "MPI_Ireduce_scatter" : "MPI_Iallreduce";
  }

  /// Starts the next piece, or ends one that is complete. Returns MPI's code.
  [[nodiscard]] int advance(const MpiOperation& operation, const MpiPlan& plan, MpiStaging& staging,
                            bool& moved) {
    if (staging.native == MPI_REQUEST_NULL) {
      moved = true;
      return start(operation, plan, staging);
    }
    int done = 0;
    const int code = MPI_Test(&staging.native, &done, MPI_STATUS_IGNORE);
    if (code != MPI_SUCCESS || done == 0) return code;
    moved = true;
    const std::size_t whole = scatters_ ? plan.reduced_slice(rank_).bytes : end_;
    if (const std::size_t bytes = bytes_of(whole); bytes != 0) {
      std::memcpy(static_cast<std::byte*>(operation.output) + at_, staging.receiving(), bytes);
    }
    at_ += piece_;
    return MPI_SUCCESS;
  }

 private:
  [[nodiscard]] int start(const MpiOperation& operation, const MpiPlan& plan, MpiStaging& staging) {
    const MPI_Datatype type = operation.native == MpiNativeSum::float32 ? MPI_FLOAT : MPI_DOUBLE;
    const auto* const input = static_cast<const std::byte*>(operation.input);
    std::byte* to = staging.sending();
    if (!scatters_) {
      const std::size_t bytes = bytes_of(end_);
      std::memcpy(to, input + at_, bytes);
      return MPI_Iallreduce(to, staging.receiving(),
                            static_cast<int>(bytes / operation.element_bytes), type, MPI_SUM, comm_,
                            &staging.native);
    }
    for (std::size_t r = 0; r < counts_.size(); ++r) {
      const MpiPlan::Slice slice = plan.reduced_slice(r);
      const std::size_t bytes = bytes_of(slice.bytes);
      if (bytes != 0) std::memcpy(to, input + slice.begin + at_, bytes);
      to += bytes;
      counts_[r] = static_cast<int>(bytes / operation.element_bytes);
    }
    return MPI_Ireduce_scatter(staging.sending(), staging.receiving(), counts_.data(), type,
                               MPI_SUM, comm_, &staging.native);
  }

  /// Of the piece under way.
  [[nodiscard]] std::size_t bytes_of(std::size_t whole) const noexcept {
    return at_ >= whole ? 0 : std::min(piece_, whole - at_);
  }

  MPI_Comm comm_;
  std::size_t rank_;
  std::vector<int> counts_;
  bool scatters_ = false;
  std::size_t piece_ = 0;
  std::size_t at_ = 0, end_ = 0;  // bytes of every slice
};

}  // namespace zero::detail
