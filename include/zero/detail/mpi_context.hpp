// SPDX-License-Identifier: Apache-2.0
/// @file
/// The `MPI_Comm` that a communicator and its parts talk over, and who is who in it.
#pragma once

#include <mpi.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "zero/comm/mpi_options.hpp"
#include "zero/detail/broken_pipe.hpp"
#include "zero/detail/mpi_environment.hpp"
#include "zero/error.hpp"

namespace zero::detail {

/// While one lives MPI returns an error on `comm` rather than end the process.
class MpiErrorsReturn {
 public:
  explicit MpiErrorsReturn(MPI_Comm comm) noexcept : comm_(comm) {
    MPI_Comm_get_errhandler(comm_, &former_);
    MPI_Comm_set_errhandler(comm_, MPI_ERRORS_RETURN);
  }
  MpiErrorsReturn(const MpiErrorsReturn&) = delete;
  MpiErrorsReturn& operator=(const MpiErrorsReturn&) = delete;
  ~MpiErrorsReturn() {
    if (!may_call_mpi()) return;
    MPI_Comm_set_errhandler(comm_, former_);
    MPI_Errhandler_free(&former_);
  }

 private:
  MPI_Comm comm_;
  MPI_Errhandler former_ = MPI_ERRHANDLER_NULL;
};

/// A duplicate of `comm`, collectively and within the timeout. Throws `CommunicatorError`.
inline MPI_Comm mpi_duplicate(MPI_Comm comm, const MpiOptions& options) {
  const MpiErrorsReturn errors(comm);
  const BrokenPipeGuard guard;
  // Where it fails MPI may still write the handle, so that then the memory is leaked.
  auto copy = std::make_unique<MPI_Comm>(MPI_COMM_NULL);
  MPI_Request request = MPI_REQUEST_NULL;
  const auto fail = [&](CommunicatorFailure failure, const std::string& why) {
    (void)copy.release();
    const int rank = static_cast<int>(rank_in(comm));
    throw CommunicatorError(failure, rank, "duplicate", 0,
                            "rank " + std::to_string(rank) + ": MpiCommunicator of " +
                                std::to_string(size_of(comm)) + " ranks: " + why);
  };
  int code = MPI_Comm_idup(comm, copy.get(), &request);
  const auto end = std::chrono::steady_clock::now() +
                   std::min<std::chrono::nanoseconds>(options.timeout, std::chrono::hours(100000));
  for (int over = 0;;) {
    if (code == MPI_SUCCESS) code = MPI_Test(&request, &over, MPI_STATUS_IGNORE);
    if (code != MPI_SUCCESS) {
      fail(CommunicatorFailure::transport, mpi_error("MPI_Comm_idup", code));
    }
    if (over != 0) return *copy;
    if (std::chrono::steady_clock::now() > end) {
      fail(CommunicatorFailure::timeout,
           "not all ranks of the given communicator have come to duplicate it; make it on all "
           "of them, or allow more time (MpiOptions::timeout)");
    }
    std::this_thread::yield();
  }
}

/// One `MPI_Comm`. A communicator and the parts that are split from it share one, and are told
/// apart by their tags: so that a split sends nothing by MPI's own collectives, which know no
/// timeout. The last of them frees it.
class MpiContext {
 public:
  static constexpr int first_tag = 24301;

  /// @param owned whether `comm` is freed in the end
  MpiContext(MPI_Comm comm, bool owned) : comm_(comm), owned_(owned), errors_(comm) {}
  MpiContext(const MpiContext&) = delete;
  MpiContext& operator=(const MpiContext&) = delete;
  ~MpiContext() {
    if (!owned_ || left_to_mpi_ || !may_call_mpi()) return;
    errors_.reset();
    MPI_Comm_free(&comm_);
  }

  [[nodiscard]] MPI_Comm comm() const noexcept { return comm_; }
  [[nodiscard]] bool owned() const noexcept { return owned_; }

  /// A message may still be on its way, or a rank in need of it: it is never freed.
  void leave_to_mpi() noexcept { left_to_mpi_ = true; }

  /// The first of the tags that none of its communicators on this rank has used. One uses two.
  [[nodiscard]] int unused_tag() const noexcept { return unused_tag_; }
  void use_up_to(int tag) noexcept { unused_tag_ = tag; }
  /// The last tag there is, on every rank.
  [[nodiscard]] static int last_tag() noexcept {
    int* limit = nullptr;
    int found = 0;
    MPI_Comm_get_attr(MPI_COMM_WORLD, MPI_TAG_UB, static_cast<void*>(&limit), &found);
    return found != 0 ? *limit : 32767;  // the least that there may be
  }

 private:
  MPI_Comm comm_;
  const bool owned_;
  std::optional<MpiErrorsReturn> errors_;
  std::atomic<bool> left_to_mpi_{false};  // parts may be other threads'
  std::atomic<int> unused_tag_{first_tag + 2};
};

/// The ranks of one communicator, as MPI knows them.
struct MpiMembers {
  std::shared_ptr<MpiContext> context{};
  std::size_t rank = 0;             ///< this process's
  std::vector<int> mpi_ranks{};     ///< by rank: the rank in the context's `MPI_Comm`
  int tag = MpiContext::first_tag;  ///< of messages; notices have the next
  bool are_all = true;              ///< of the context's ranks, in their order

  /// All ranks of `comm`, in their order.
  static MpiMembers all(MPI_Comm comm, bool owned) {
    MpiMembers members{std::make_shared<MpiContext>(comm, owned), rank_in(comm),
                       std::vector<int>(size_of(comm))};
    std::iota(members.mpi_ranks.begin(), members.mpi_ranks.end(), 0);
    return members;
  }

  [[nodiscard]] std::size_t size() const noexcept { return mpi_ranks.size(); }
  [[nodiscard]] bool is_part() const noexcept { return tag != MpiContext::first_tag; }
  /// The `MPI_Comm` of just these ranks; MPI_COMM_NULL where there is none, or it is given up.
  [[nodiscard]] MPI_Comm own_comm() const noexcept {
    return context == nullptr || is_part() ? MPI_COMM_NULL : context->comm();
  }
};

}  // namespace zero::detail
