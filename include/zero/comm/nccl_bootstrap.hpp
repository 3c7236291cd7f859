// SPDX-License-Identifier: Apache-2.0
/// @file
/// How ranks meet before NCCL connects them: each way carries rank 0's unique id to all.
#pragma once

#include <nccl.h>

#include <chrono>
#include <concepts>
#include <cstddef>
#include <cstdio>
#include <span>
#include <string>
#include <vector>

#include "zero/comm/nccl_file.hpp"
#include "zero/comm/nccl_tcp.hpp"
#include "zero/communicator.hpp"
#include "zero/detail/nccl_id.hpp"
#include "zero/error.hpp"

namespace zero {

/// Intent: which rank this is, and a unique id that all ranks share. All ranks call `unique_id`,
/// which throws within the timeout where a peer doesn't.
template <class B>
concept NcclBootstrap = requires(const B& bootstrap, std::chrono::nanoseconds timeout) {
  { bootstrap.rank } -> std::convertible_to<int>;
  { bootstrap.size } -> std::convertible_to<int>;
  { bootstrap.unique_id(timeout) } -> std::same_as<ncclUniqueId>;
};

/// Over a communicator in host memory, whose ranks and order the new one's are: one over MPI, or
/// one in-process. It is used while the new one is made, and no longer.
template <class Comm>
struct NcclOver {
  static_assert(Ranked<Comm> && HostExchange<Comm>,
                "NcclOver takes a communicator that exchanges host bytes, such as "
                "zero::MpiCommunicator.");

  Comm* comm;
  int rank;
  int size;

  explicit NcclOver(Comm& over) : comm(&over), rank(over.rank()), size(over.size()) {}

  [[nodiscard]] ncclUniqueId unique_id(std::chrono::nanoseconds timeout) const {
    struct Card {
      ncclUniqueId id;
      char failure[512];  // of rank 0; empty: none
    };
    Card mine{};
    if (rank == 0) {
      try {
        mine.id = detail::new_nccl_id();
      } catch (const std::exception& error) {  // the others must hear of it
        std::snprintf(mine.failure, sizeof mine.failure, "%s", error.what());
      }
    }
    std::vector<Card> all(static_cast<std::size_t>(size));
    comm->exchange(std::as_bytes(std::span(&mine, 1)), std::as_writable_bytes(std::span(all)))
        .wait(timeout);
    if (all[0].failure[0] != '\0') {
      throw CommunicatorError(CommunicatorFailure::transport, rank, "NcclCommunicator", 0,
                              all[0].failure);
    }
    return all[0].id;
  }
};

static_assert(NcclBootstrap<NcclFile> && NcclBootstrap<NcclTcp>);

}  // namespace zero
