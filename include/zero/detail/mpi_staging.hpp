// SPDX-License-Identifier: Apache-2.0
/// @file
/// The memory that MPI reads and writes: slots for messages, and the requests on them.
///
/// MPI never sees a caller's buffers. It may go on with a message long after a rank has given up on
/// it (a send can't be cancelled, nor a receive that has begun), when the caller may have freed
/// them; here it only ever touches slots, which are leaked rather than freed under its hands. Slots
/// are small enough to stay in a cache, so that the copies cost less than they look.
#pragma once

#include <mpi.h>

#include <algorithm>
#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "zero/comm/mpi_options.hpp"
#include "zero/detail/mpi_operation.hpp"
#include "zero/error.hpp"
#include "zero/memory.hpp"

namespace zero::detail {

class MpiStaging {
 public:
  static constexpr std::size_t depth = 2;  ///< messages under way to a peer, and from it

  MpiStaging(std::size_t peers, std::size_t chunk_bytes)
      : peers_(peers),
        lines_((sizeof(MpiHeader) + chunk_bytes + 63) / 64),
        memory_(make_lines(lines_ * count() + notice_lines)),
        requests(count(), MPI_REQUEST_NULL),
        notices(peers, MPI_REQUEST_NULL) {}
  MpiStaging(const MpiStaging&) = delete;
  MpiStaging& operator=(const MpiStaging&) = delete;
  ~MpiStaging() {
    if (in_use()) (void)memory_.release();
  }

  /// Slots for sending come first.
  [[nodiscard]] std::size_t send_slot(std::size_t peer, std::size_t message) const noexcept {
    return peer * depth + message % depth;
  }
  [[nodiscard]] std::size_t receive_slot(std::size_t peer, std::size_t message) const noexcept {
    return (peers_ + peer) * depth + message % depth;
  }
  [[nodiscard]] std::size_t peer_of(std::size_t slot) const noexcept {
    return slot / depth % peers_;
  }
  [[nodiscard]] bool sends(std::size_t slot) const noexcept { return slot < peers_ * depth; }
  [[nodiscard]] std::size_t count() const noexcept { return 2 * depth * peers_; }
  [[nodiscard]] std::size_t slot_bytes() const noexcept { return lines_ * sizeof(Line); }

  [[nodiscard]] std::byte* slot(std::size_t index) noexcept {
    return memory_[index * lines_].bytes;
  }
  [[nodiscard]] std::byte* payload(std::size_t index) noexcept {
    return slot(index) + sizeof(MpiHeader);
  }
  /// The memory for sending as one piece, and that for receiving: what native sums work in.
  [[nodiscard]] std::byte* sending() noexcept { return slot(0); }
  [[nodiscard]] std::byte* receiving() noexcept { return slot(peers_ * depth); }
  [[nodiscard]] std::byte* notice() noexcept { return memory_[lines_ * count()].bytes; }
  static constexpr std::size_t notice_bytes = 512;

  /// Whether MPI may still touch the memory.
  [[nodiscard]] bool in_use() const noexcept {
    const auto any = [](const std::vector<MPI_Request>& all) {
      for (const MPI_Request request : all) {
        if (request != MPI_REQUEST_NULL) return true;
      }
      return false;
    };
    return native != MPI_REQUEST_NULL || any(requests) || any(notices);
  }

  /// Ends what can be ended: receives that have not begun, and what is over anyway.
  void abandon() noexcept {
    for (std::size_t i = peers_ * depth; i < count(); ++i) {
      if (requests[i] != MPI_REQUEST_NULL) MPI_Cancel(&requests[i]);
    }
    int over = 0;
    for (int look = 0; look < 3; ++look) {
      for (auto* all : {&requests, &notices}) {
        for (MPI_Request& request : *all) MPI_Test(&request, &over, MPI_STATUS_IGNORE);
      }
    }
  }

 private:
  struct alignas(64) Line {
    std::byte bytes[64];
  };
  static constexpr std::size_t notice_lines = notice_bytes / sizeof(Line);

  struct Free {
    std::size_t bytes = 0;
    void operator()(Line* lines) const noexcept {
      huge_page_resource()->deallocate(lines, bytes, alignof(Line));
    }
  };
  using Lines = std::unique_ptr<Line[], Free>;
  static Lines make_lines(std::size_t count) {
    const std::size_t bytes = count * sizeof(Line);
    return Lines(static_cast<Line*>(huge_page_resource()->allocate(bytes, alignof(Line))), {bytes});
  }

  std::size_t peers_;
  std::size_t lines_;
  Lines memory_;

 public:
  std::vector<MPI_Request> requests;  ///< one a slot
  std::vector<MPI_Request> notices;
  MPI_Request native = MPI_REQUEST_NULL;
};

/// What a message carries at most. Throws `UsageError` where the option can't be.
inline std::size_t mpi_chunk_bytes(const MpiOptions& options, std::size_t size) {
  if (options.chunk_bytes == 0) {
    constexpr std::size_t most = std::size_t{512} << 10U, all = std::size_t{32} << 20U;
    const std::size_t even = all / (2 * MpiStaging::depth * std::max<std::size_t>(size - 1, 1));
    return std::clamp<std::size_t>(even / 64 * 64, std::size_t{16} << 10U, most);
  }
  if (options.chunk_bytes < 64 || options.chunk_bytes > (std::size_t{1} << 30U)) {
    throw UsageError("MpiOptions::chunk_bytes is " + std::to_string(options.chunk_bytes) +
                     "; it must be 64 to 2^30, or 0 for a size that suits most.");
  }
  return options.chunk_bytes / 64 * 64;
}

}  // namespace zero::detail
