// SPDX-License-Identifier: Apache-2.0
/// @file
/// One rank's part of one round of messages: cuts shares into messages, moves them through the
/// slots, and reduces or stores what arrives. Large shares between ranks of one host don't travel:
/// the sender's one message says where they lie, and the receiver takes them from there; a last,
/// empty round then tells each rank that its buffers are its own again. Never blocks.
#pragma once

#include <mpi.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <string>
#include <system_error>
#include <vector>

#include "zero/detail/mpi_context.hpp"
#include "zero/detail/mpi_environment.hpp"
#include "zero/detail/mpi_native_reduction.hpp"
#include "zero/detail/mpi_operation.hpp"
#include "zero/detail/mpi_peer_memory.hpp"
#include "zero/detail/mpi_staging.hpp"

namespace zero::detail {

class MpiRound {
 public:
  MpiRound(const MpiMembers& members, std::size_t chunk_bytes)
      : comm_(members.context->comm()),
        tag_(members.tag),
        rank_(members.rank),
        size_(members.size()),
        chunk_bytes_(chunk_bytes),
        sent_bytes_(std::min(most_sent_bytes, chunk_bytes)),
        staging_(size_ - 1, chunk_bytes),
        peers_(size_ - 1),
        arrived_(staging_.count()),
        indices_(staging_.count()),
        statuses_(staging_.count()),
        sources_(size_),
        typed_sources_(size_),
        native_(comm_, rank_, size_) {
    // Everybody begins behind itself, so that not all send to one rank at a time.
    for (std::size_t i = 0; i < peers_.size(); ++i) {
      peers_[i].rank = (rank_ + 1 + i) % size_;
      peers_[i].mpi_rank = members.mpi_ranks[peers_[i].rank];
    }
  }

  [[nodiscard]] MpiStaging& staging() noexcept { return staging_; }

  /// From now on takes large shares straight out of the memory of some peers, as these do here.
  /// @param direct by rank; the same of both sides
  /// @param any whether there are two such ranks at all
  void take_from(MpiPeerMemory& memory, std::span<const std::uint8_t> direct, bool any) {
    memory_ = &memory;
    any_direct_ = any;
    for (Peer& peer : peers_) peer.direct = direct[peer.rank] != 0;
  }

  void begin(const MpiOperation& operation, std::uint64_t sequence, unsigned round) noexcept {
    op_ = &operation;
    const std::size_t element = operation.element_bytes;
    piece_ = element == 0 ? chunk_bytes_ : chunk_bytes_ / element * element;
    const MpiPlan plan(operation, rank_, size_, piece_);
    header_ = header_of(operation, sequence, round, chunk_bytes_);
    const unsigned rounds = plan.rounds();
    const bool closing = round == rounds;  // all have taken what they need
    last_ = round + 1 >= rounds && (closing || !any_direct_ || !plan.moves_more_than(sent_bytes_));
    if (round == 0) plan.copy_own();
    reduces_ = plan.reduces(round);
    reduced_ = reductions_ = 0;
    if (reduces_) {
      reduction_ = plan.reduction();
      reductions_ = messages(reduction_.count * element);
    }
    unfinished_ = reductions_;
    for (Peer& peer : peers_) {
      peer.share = closing ? MpiShare{} : plan.share(round, peer.rank);
      peer.lends = peer.direct && peer.share.send_bytes > sent_bytes_;
      peer.takes = peer.direct && peer.share.receive_bytes > sent_bytes_;
      peer.sends = peer.lends ? 1 : messages(peer.share.send_bytes);
      peer.receives = peer.takes ? 1 : messages(peer.share.receive_bytes);
      peer.sent = peer.received = peer.consumed = peer.taken = 0;
      peer.address = 0;
      unfinished_ += peer.sends + peer.receives;
      if (peer.takes && !reduces_) ++unfinished_;
    }
    if (last_) native_.begin(operation, plan, piece_);
  }

  /// The operation that was begun lies elsewhere now.
  void moved(const MpiOperation& operation) noexcept { op_ = &operation; }

  [[nodiscard]] bool is_last() const noexcept { return last_; }
  [[nodiscard]] bool over() const noexcept { return unfinished_ == 0 && native_.over(); }

  /// Does what can be done without waiting; whether that was anything.
  bool advance() {
    bool moved = false;
    if (unfinished_ != 0) {
      moved = post();
      if (!test(moved)) return false;
      if (reduces_ ? reduce() : take_payloads()) moved = true;
      if (trouble_ || (moved && !post_again())) return false;
    }
    if (unfinished_ != 0 || native_.over()) return moved;
    const MpiPlan plan(*op_, rank_, size_, piece_);
    if (!succeeded(native_.call(), native_.advance(*op_, plan, staging_, moved))) return false;
    return moved;
  }

  [[nodiscard]] const std::optional<MpiTrouble>& trouble() const noexcept { return trouble_; }
  [[nodiscard]] const MpiHeader& header() const noexcept { return header_; }

  /// The ranks from which messages are missing, "1, 3", or else those that take none.
  [[nodiscard]] std::string missing() const {
    std::vector<std::size_t> ranks;
    for (const Peer& peer : peers_) {
      if (peer.consumed < peer.receives && arrived_[slot_of_next(peer)] == 0) {
        ranks.push_back(peer.rank);
      }
    }
    if (ranks.empty()) {
      for (const Peer& peer : peers_) ranks.push_back(peer.rank);
    }
    std::sort(ranks.begin(), ranks.end());
    std::string text;
    for (const std::size_t rank : ranks) text += (text.empty() ? "" : ", ") + std::to_string(rank);
    return text;
  }

 private:
  struct Peer {
    std::size_t rank = 0;
    int mpi_rank = 0;  // in comm_
    MpiShare share{};
    std::size_t sends = 0, sent = 0;                       // messages
    std::size_t receives = 0, received = 0, consumed = 0;  // `received`: asked for
    bool direct = false;                                   // one that this rank may read
    bool lends = false, takes = false;                     // the share, rather than sends it
    std::uint64_t address = 0;                             // of what is taken, once known
    std::size_t taken = 0;                                 // bytes
  };

  /// Shares of so many bytes or fewer travel in messages, whose latency counts for more than a
  /// copy; so do those that fit into one. (A small all_reduce relies on it: its ranks overwrite
  /// what they have sent.)
  static constexpr std::size_t most_sent_bytes = std::size_t{64} << 10U;
  /// So many are taken before the next look at what else there is.
  static constexpr std::size_t taken_bytes = std::size_t{4} << 20U;

  [[nodiscard]] std::size_t messages(std::size_t bytes) const noexcept {
    return bytes == 0 ? 1 : (bytes - 1) / piece_ + 1;
  }
  [[nodiscard]] std::size_t index_of(const Peer& peer) const noexcept {
    return static_cast<std::size_t>(&peer - peers_.data());
  }
  [[nodiscard]] std::size_t slot_of_next(const Peer& peer) const noexcept {
    return staging_.receive_slot(index_of(peer), peer.consumed);
  }
  [[nodiscard]] bool succeeded(const char* call, int code) {
    if (code != MPI_SUCCESS && !trouble_) trouble_ = MpiTrouble{.text = mpi_error(call, code)};
    return code == MPI_SUCCESS;
  }

  /// All that there are slots for.
  bool post() {
    bool moved = false;
    for (Peer& peer : peers_) {
      while (peer.received < peer.receives && peer.received - peer.consumed < MpiStaging::depth) {
        const std::size_t slot = staging_.receive_slot(index_of(peer), peer.received);
        if (!succeeded("MPI_Irecv",
                       MPI_Irecv(staging_.slot(slot), static_cast<int>(staging_.slot_bytes()),
                                 MPI_BYTE, peer.mpi_rank, tag_, comm_, &staging_.requests[slot]))) {
          return moved;
        }
        ++peer.received;
      }
      while (peer.sent < peer.sends) {
        const std::size_t slot = staging_.send_slot(index_of(peer), peer.sent);
        if (staging_.requests[slot] != MPI_REQUEST_NULL) break;
        header_.pair_bytes = peer.share.send_bytes;
        header_.offset = peer.sent * piece_;
        header_.address = peer.lends ? reinterpret_cast<std::uintptr_t>(peer.share.from) : 0;
        const std::size_t bytes =
            peer.lends ? 0 : std::min(piece_, peer.share.send_bytes - header_.offset);
        std::memcpy(staging_.slot(slot), &header_, sizeof header_);
        if (bytes != 0) {
          std::memcpy(staging_.payload(slot), peer.share.from + header_.offset, bytes);
        }
        if (!succeeded("MPI_Isend",
                       MPI_Isend(staging_.slot(slot), static_cast<int>(sizeof header_ + bytes),
                                 MPI_BYTE, peer.mpi_rank, tag_, comm_, &staging_.requests[slot]))) {
          return moved;
        }
        ++peer.sent;
        moved = true;
      }
    }
    return moved;
  }
  bool post_again() {
    post();
    return !trouble_;
  }

  /// Looks for messages that have come or gone. False where something is wrong.
  bool test(bool& moved) {
    if (trouble_) return false;
    if (staging_.count() == 0) return true;
    int count = 0;
    const int code = MPI_Testsome(static_cast<int>(staging_.count()), staging_.requests.data(),
                                  &count, indices_.data(), statuses_.data());
    if (code != MPI_SUCCESS && code != MPI_ERR_IN_STATUS) return succeeded("MPI_Testsome", code);
    if (count == MPI_UNDEFINED) return true;
    for (std::size_t i = 0; i < static_cast<std::size_t>(count); ++i) {
      const auto slot = static_cast<std::size_t>(indices_[i]);
      if (code == MPI_ERR_IN_STATUS && !arrived_whole(slot, statuses_[i].MPI_ERROR)) return false;
      moved = true;
      if (staging_.sends(slot)) {
        --unfinished_;
      } else {
        arrived_[slot] = 1;
        int bytes = 0;
        MPI_Get_count(&statuses_[i], MPI_BYTE, &bytes);
        sizes_of_arrival(slot, static_cast<std::size_t>(bytes));
      }
    }
    for (Peer& peer : peers_) {
      if (!take(peer)) return false;
    }
    return true;
  }

  /// A message larger than its slot is a peer's with other options, or a stranger's.
  bool arrived_whole(std::size_t slot, int code) {
    int kind = MPI_SUCCESS;
    MPI_Error_class(code, &kind);
    if (kind != MPI_ERR_TRUNCATE || staging_.sends(slot)) return succeeded("MPI_Testsome", code);
    const Peer& peer = peers_[staging_.peer_of(slot)];
    // What fits has arrived, as a rule; if not, an earlier message's header has the own options.
    MpiHeader theirs;
    std::memcpy(&theirs, staging_.slot(slot), sizeof theirs);
    if (theirs.chunk_bytes == header_.chunk_bytes) theirs.magic = 0;
    trouble_ = MpiTrouble{
        .peer = static_cast<int>(peer.rank), .theirs = theirs, .expected_bytes = theirs.pair_bytes};
    return false;
  }

  void sizes_of_arrival(std::size_t slot, std::size_t bytes) noexcept {
    // A message of other origin or size is told by a header that can't be right.
    MpiHeader header;
    if (bytes >= sizeof header) std::memcpy(&header, staging_.slot(slot), sizeof header);
    const std::size_t left = header.address != 0 ? 0 : header.pair_bytes - header.offset;
    if (bytes < sizeof header || header.offset > header.pair_bytes ||
        bytes - sizeof header != std::min(left, piece_)) {
      header.magic = 0;
    }
    std::memcpy(staging_.slot(slot), &header, sizeof header);
  }

  /// Checks and stores what has come from `peer`, in order. False where it is not what was
  /// expected.
  bool take(Peer& peer) {
    for (std::size_t message = peer.consumed; message < peer.received; ++message) {
      const std::size_t slot = staging_.receive_slot(index_of(peer), message);
      if (arrived_[slot] == 2) continue;
      if (arrived_[slot] == 0) break;
      MpiHeader theirs;
      std::memcpy(&theirs, staging_.slot(slot), sizeof theirs);
      const std::size_t offset = message * piece_;
      if (theirs.magic != MpiHeader::magic_number || !agree(header_, theirs) ||
          theirs.pair_bytes != peer.share.receive_bytes || theirs.offset != offset ||
          (theirs.address != 0) != peer.takes) {
        trouble_ = MpiTrouble{.peer = static_cast<int>(peer.rank),
                              .theirs = theirs,
                              .expected_bytes = peer.share.receive_bytes};
        return false;
      }
      arrived_[slot] = 2;  // checked
      if (peer.takes) {
        peer.address = theirs.address;
        release(peer);
        continue;
      }
      if (reduces_) continue;
      const std::size_t bytes = std::min(piece_, peer.share.receive_bytes - offset);
      // Past the caches where all messages together are too much for them.
      if (peer.share.receive_bytes >= streamed_bytes) {
        streamed_copy(staging_.payload(slot), bytes, peer.share.into + offset);
      } else {
        copy_elements(staging_.payload(slot), bytes, peer.share.into + offset);
      }
      release(peer);
    }
    return true;
  }

  /// Takes some of what peers have in their memory; whether that was anything.
  bool take_payloads() {
    bool moved = false;
    for (Peer& peer : peers_) {
      if (peer.address == 0) continue;
      const std::size_t bytes = std::min(taken_bytes, peer.share.receive_bytes - peer.taken);
      if (!take_bytes(peer, peer.taken, peer.share.into + peer.taken, bytes)) return false;
      moved = true;
      memory_->worked();
      peer.taken += bytes;
      if (peer.taken < peer.share.receive_bytes) continue;
      peer.address = 0;
      --unfinished_;
    }
    return moved;
  }

  bool take_bytes(const Peer& peer, std::size_t offset, std::byte* into, std::size_t bytes) {
    if (const std::byte* const there = memory_->find(peer.rank, peer.address + offset, bytes)) {
      copy_elements(there, bytes, into);
      return true;
    }
    const int error = memory_->read(peer.rank, peer.address + offset, into, bytes);
    if (error == 0) return true;
    trouble_ = MpiTrouble{.peer = static_cast<int>(peer.rank),
                          .text = std::generic_category().message(error)};
    return false;
  }

  void release(Peer& peer) noexcept {
    arrived_[slot_of_next(peer)] = 0;
    ++peer.consumed;
    --unfinished_;
  }

  /// Reduces each piece that has come from everybody.
  bool reduce() {
    bool moved = false;
    const std::size_t all = reduction_.count * op_->element_bytes;
    while (reduced_ < reductions_) {
      const std::size_t offset = reduced_ * piece_;
      for (const Peer& peer : peers_) {
        if (peer.takes ? peer.address == 0 : arrived_[slot_of_next(peer)] != 2) return moved;
      }
      // What is read where it lies needs no room, so pieces may be of the size to be streamed.
      const std::size_t pieces = std::min(lies_open(offset, all - offset), reductions_ - reduced_);
      const std::size_t bytes = std::min(pieces * piece_, all - offset);
      sources_[rank_] = reduction_.own + offset;
      for (const Peer& peer : peers_) {
        if (!source(peer, offset, bytes)) return false;
      }
      if (bytes != 0) {
        op_->reducer(sources_, bytes / op_->element_bytes, reduction_.out + offset, op_->reduce,
                     typed_sources_.data());
      }
      for (Peer& peer : peers_) {
        if (!peer.takes) release(peer);
      }
      unfinished_ -= pieces;
      reduced_ += pieces;
      moved = true;
      if (any_direct_) memory_->worked();
    }
    return moved;
  }

  /// How many pieces may be reduced at once.
  [[nodiscard]] std::size_t lies_open(std::size_t offset, std::size_t bytes) const noexcept {
    for (const Peer& peer : peers_) {
      if (!peer.takes || memory_->find(peer.rank, peer.address + offset, bytes) == nullptr)
        return 1;
    }
    return peers_.empty() ? 1 : std::max<std::size_t>(2 * streamed_bytes / piece_, 1);
  }

  /// Sets where a peer's piece is read.
  bool source(const Peer& peer, std::size_t offset, std::size_t bytes) {
    // What is taken has the room of a message that such a peer doesn't send.
    const std::size_t slot =
        peer.takes ? staging_.receive_slot(index_of(peer), 1) : slot_of_next(peer);
    sources_[peer.rank] = staging_.payload(slot);
    if (!peer.takes) return true;
    if (const std::byte* const there = memory_->find(peer.rank, peer.address + offset, bytes)) {
      sources_[peer.rank] = there;
      return true;
    }
    return take_bytes(peer, offset, staging_.payload(slot), bytes);
  }

  MPI_Comm comm_;
  int tag_;
  std::size_t rank_;
  std::size_t size_;
  std::size_t chunk_bytes_;
  std::size_t sent_bytes_;
  MpiStaging staging_;
  MpiPeerMemory* memory_ = nullptr;
  bool any_direct_ = false;
  std::vector<Peer> peers_;
  std::vector<char> arrived_;  // by slot: 0 not, 1 arrived, 2 checked too
  std::vector<int> indices_;
  std::vector<MPI_Status> statuses_;
  std::vector<const void*> sources_;
  std::vector<const void*> typed_sources_;  // room in which a reducer keeps pointers of its type

  const MpiOperation* op_ = nullptr;
  MpiHeader header_{};
  std::size_t piece_ = 0;
  std::size_t unfinished_ = 0;  // messages and reductions
  bool last_ = true;
  bool reduces_ = false;
  MpiPlan::Reduction reduction_{};
  std::size_t reductions_ = 0, reduced_ = 0;
  MpiNativeReduction native_;
  std::optional<MpiTrouble> trouble_{};
};

}  // namespace zero::detail
