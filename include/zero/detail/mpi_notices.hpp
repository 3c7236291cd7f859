// SPDX-License-Identifier: Apache-2.0
/// @file
/// By what ranks tell each other of a failure, or of their end. Never blocks: a peer may die with
/// its notice half sent.
#pragma once

#include <mpi.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <type_traits>
#include <vector>

#include "zero/detail/mpi_context.hpp"
#include "zero/detail/mpi_operation.hpp"
#include "zero/detail/mpi_staging.hpp"
#include "zero/error.hpp"

namespace zero::detail {

struct MpiNotice {
  std::uint32_t magic = MpiHeader::magic_number;
  CommunicatorFailure failure = CommunicatorFailure::rank_left;
  bool orderly = false;  ///< the sender has left after `operations`, all of them over
  std::uint64_t operations = 0;
  std::uint64_t origin_rank = 0;
  std::array<char, MpiStaging::notice_bytes - 24> text{};
};
static_assert(sizeof(MpiNotice) == MpiStaging::notice_bytes &&
              std::is_trivially_copyable_v<MpiNotice>);

class MpiNotices {
 public:
  /// @param staging has the memory of what is sent
  MpiNotices(const MpiMembers& members, MpiStaging& staging)
      : comm_(members.context->comm()),
        tag_(members.tag + 1),
        rank_(members.rank),
        mpi_ranks_(members.mpi_ranks),
        staging_(staging),
        incoming_(std::make_unique<MpiNotice>()) {}
  MpiNotices(const MpiNotices&) = delete;
  MpiNotices& operator=(const MpiNotices&) = delete;
  ~MpiNotices() {
    if (receive_ != MPI_REQUEST_NULL) (void)incoming_.release();
  }

  /// To all peers. Once, or an earlier one must have been `sent`.
  void send(const MpiNotice& notice) noexcept {
    std::memcpy(staging_.notice(), &notice, sizeof notice);
    for (std::size_t r = 0, i = 0; r < mpi_ranks_.size(); ++r) {
      if (r == rank_) continue;
      MPI_Isend(staging_.notice(), static_cast<int>(sizeof notice), MPI_BYTE, mpi_ranks_[r], tag_,
                comm_, &staging_.notices[i++]);
    }
  }
  [[nodiscard]] bool sent() noexcept {
    int over = 1;
    MPI_Testall(static_cast<int>(staging_.notices.size()), staging_.notices.data(), &over,
                MPI_STATUSES_IGNORE);
    return over != 0;
  }

  struct Arrival {
    MpiNotice notice;
    std::size_t sender;
  };
  /// The next notice that has come, if any.
  [[nodiscard]] std::optional<Arrival> take() noexcept {
    while (mpi_ranks_.size() > 1 && receive()) {
      int over = 0;
      MPI_Status status;
      const int code = MPI_Test(&receive_, &over, &status);
      if (code != MPI_SUCCESS || over == 0) return {};
      const auto from = std::find(mpi_ranks_.begin(), mpi_ranks_.end(), status.MPI_SOURCE);
      if (incoming_->magic != MpiHeader::magic_number || from == mpi_ranks_.end()) continue;
      incoming_->text.back() = '\0';
      return Arrival{*incoming_, static_cast<std::size_t>(from - mpi_ranks_.begin())};
    }
    return {};
  }

  /// Takes no more: the next user of the same `MPI_Comm` shall get what comes then.
  void end() noexcept {
    if (receive_ == MPI_REQUEST_NULL) return;
    MPI_Cancel(&receive_);
    // One that has not begun is over at once; of a dead peer's half of one nothing is heard again.
    for (int look = 0, over = 0; over == 0 && look < 100; ++look) {
      MPI_Test(&receive_, &over, MPI_STATUS_IGNORE);
    }
  }

 private:
  /// Whether a receive is posted.
  bool receive() noexcept {
    if (receive_ != MPI_REQUEST_NULL) return true;
    incoming_->magic = 0;
    return MPI_Irecv(incoming_.get(), static_cast<int>(sizeof(MpiNotice)), MPI_BYTE, MPI_ANY_SOURCE,
                     tag_, comm_, &receive_) == MPI_SUCCESS;
  }

  MPI_Comm comm_;
  int tag_;
  std::size_t rank_;
  std::vector<int> mpi_ranks_;
  MpiStaging& staging_;
  std::unique_ptr<MpiNotice> incoming_;
  MPI_Request receive_ = MPI_REQUEST_NULL;
};

}  // namespace zero::detail
