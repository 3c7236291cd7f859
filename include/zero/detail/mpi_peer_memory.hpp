// SPDX-License-Identifier: Apache-2.0
/// @file
/// Which peers' memory this process can read, and how it does.
///
/// Ranks of one host take what they need out of their peers' buffers: one copy, by the kernel, and
/// no message but a header that says where. The kernel checks every address, so that a peer which
/// has died or freed its memory makes for an error and never for a crash. What a peer keeps in its
/// shared segment is read where it lies.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

#include "zero/config.hpp"
#include "zero/detail/hash.hpp"
#include "zero/detail/shared_segment.hpp"

#if ZERO_PROCESS_MEMORY
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <fstream>
#endif

namespace zero::detail {

/// How a process is found by those of its host. Shown to all peers.
struct MpiProcessCard {
  std::uint64_t host = 0;     ///< the same in processes that may see each other; 0: in none
  std::int64_t process = 0;   ///< its number there
  std::uint64_t address = 0;  ///< where it keeps what it shows
  std::uint64_t secret = 0;
  SharedSegment::Card segment{};
};

class MpiPeerMemory {
  // What can be done with a peer's memory.
  static constexpr std::uint8_t readable = 1;  ///< all of it read
  static constexpr std::uint8_t mapped = 2;    ///< its segment seen

 public:
  /// @param host_name MPI's; network namespaces of one machine may be hosts of their own
  MpiPeerMemory(std::string_view host_name, std::size_t ranks, bool allowed) {
    if (!allowed) return;
#if ZERO_PROCESS_MEMORY
    Hash host;
    host.add(host_name.data(), host_name.size());
    std::string boot, space;
    std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
    std::error_code none;
    space = std::filesystem::read_symlink("/proc/self/ns/pid", none).string();
    if (boot.empty() || space.empty()) return;
    host.add(boot.data(), boot.size());
    host.add(space.data(), space.size());
    std::random_device random;
    shown_.secret = std::uint64_t{random()} << 32U | random();
    segment_ = SharedSegment::make(ranks);
    card_ = {host.value(), ::getpid(), reinterpret_cast<std::uintptr_t>(&shown_), shown_.secret,
             segment_ ? segment_->card() : SharedSegment::Card{}};
#else
    (void)host_name, (void)ranks;
#endif
  }
  MpiPeerMemory(const MpiPeerMemory&) = delete;
  MpiPeerMemory& operator=(const MpiPeerMemory&) = delete;

  ~MpiPeerMemory() { unmap_all(); }

  /// Where peers that map it find what is allocated; null where there is none.
  [[nodiscard]] const std::shared_ptr<SharedSegment>& segment() const noexcept { return segment_; }

  /// How ranks reach each other's memory: both ways, or it is no way.
  struct Reach {
    std::vector<std::uint8_t> direct;  ///< by rank: whether this one and that read each other's
    bool any_direct = false;           ///< whether there are two such ranks at all
    bool all_mapped = true;            ///< whether each has mapped all others' segments
  };
  /// Collective: `exchange(mine, all)` gives all ranks' bytes in rank order.
  template <class Exchange>
  [[nodiscard]] Reach meet(std::size_t rank, std::size_t size, const Exchange& exchange) {
    std::vector<MpiProcessCard> cards(size);
    exchange(std::as_bytes(std::span(&card_, 1)), std::as_writable_bytes(std::span(cards)));
    const std::vector<std::uint8_t> own = ways_to(cards);
    std::vector<std::uint8_t> all(size * size);
    exchange(std::as_bytes(std::span(own)), std::as_writable_bytes(std::span(all)));
    Reach reach{std::vector<std::uint8_t>(size)};
    for (std::size_t r = 0; r < size; ++r) {
      for (std::size_t s = 0; s < size; ++s) {
        const std::uint8_t both = all[r * size + s] & all[s * size + r];
        if (r == rank) {
          reach.direct[s] = both & readable;
          peers_[s].direct = reach.direct[s] != 0 && s != rank;
        }
        reach.any_direct = reach.any_direct || (r != s && (both & readable) != 0);
        // What is mapped is of use only where payloads are taken, and not sent.
        reach.all_mapped = reach.all_mapped && both == (readable | mapped);
      }
    }
    if (!reach.all_mapped) {  // addresses are dear, and nobody uses them
      unmap_all();
      segment_.reset();
    }
    return reach;
  }

  /// This rank has taken something: a peer that waits for it sees that it lives.
  void worked() noexcept {
    const std::atomic_ref work(shown_.work);
    work.store(work.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
  }
  /// Whether some direct peer has taken anything since this was asked last.
  [[nodiscard]] bool peers_work() noexcept {
    bool any = false;
    for (std::size_t r = 0; r < peers_.size(); ++r) {
      if (!peers_[r].direct) continue;
      std::uint64_t work = 0;
      if (read(r, peers_[r].shown + offsetof(Shown, work), &work, sizeof work) != 0) continue;
      any = any || work != peers_[r].work;
      peers_[r].work = work;
    }
    return any;
  }

  /// Where `bytes` at `address` of `rank`'s segment lie here; null where they aren't in it.
  [[nodiscard]] const std::byte* find(std::size_t rank, std::uint64_t address,
                                      std::size_t bytes) const noexcept {
    if (rank >= peers_.size()) return nullptr;
    const Peer& peer = peers_[rank];
    if (peer.memory == nullptr || address < peer.segment.begin) return nullptr;
    const std::uint64_t offset = address - peer.segment.begin;
    if (offset > peer.segment.bytes || peer.segment.bytes - offset < bytes) return nullptr;
    return peer.memory + offset;
  }

  /// Copies out of `rank`'s memory. 0, or an `errno`.
  [[nodiscard]] int read(std::size_t rank, std::uint64_t address, void* into,
                         std::size_t bytes) const noexcept {
#if ZERO_PROCESS_MEMORY
    auto* to = static_cast<char*>(into);
    while (bytes != 0) {
      const iovec local{to, bytes};
      const iovec remote{reinterpret_cast<void*>(static_cast<std::uintptr_t>(address)), bytes};
      const ssize_t read =
          ::process_vm_readv(static_cast<pid_t>(peers_[rank].process), &local, 1, &remote, 1, 0);
      if (read <= 0) return read < 0 ? errno : EFAULT;
      to += read;
      address += static_cast<std::uint64_t>(read);
      bytes -= static_cast<std::size_t>(read);
    }
    return 0;
#else
    (void)rank, (void)address, (void)into, (void)bytes;
    return -1;
#endif
  }

 private:
  /// What peers may read.
  struct Shown {
    std::uint64_t secret = 0;
    std::uint64_t work = 0;  ///< rises as this rank takes what they lend
  };
  struct Peer {
    std::int64_t process;
    std::uint64_t shown;
    SharedSegment::Card segment;
    std::byte* memory = nullptr;  ///< its segment, here
    bool direct = false;
    std::uint64_t work = 0;  ///< as it was last seen
  };

  void unmap_all() noexcept {
#if ZERO_PROCESS_MEMORY
    for (Peer& peer : peers_) {
      if (peer.memory != nullptr) ::munmap(peer.memory, peer.segment.bytes);
      peer.memory = nullptr;
    }
#endif
  }

  /// By rank, what can be done with its memory (with the own one too).
  [[nodiscard]] std::vector<std::uint8_t> ways_to(std::span<const MpiProcessCard> cards) {
    std::vector<std::uint8_t> ways(cards.size(), std::uint8_t{0});
    peers_.reserve(cards.size());
    for (std::size_t r = 0; r < cards.size(); ++r) {
      peers_.push_back({cards[r].process, cards[r].address, cards[r].segment});
      if (card_.host == 0 || cards[r].host != card_.host) continue;
      std::uint64_t secret = 0;
      if (read(r, cards[r].address, &secret, sizeof secret) == 0 && secret == cards[r].secret) {
        ways[r] |= readable;
      }
      if (map(peers_[r])) ways[r] |= mapped;
    }
    return ways;
  }

  bool map(Peer& peer) {
#if ZERO_PROCESS_MEMORY
    // Addresses are not without end either.
    constexpr std::uint64_t most_mapped = std::uint64_t{32} << 40U;
    if (peer.segment.file < 0 || peer.segment.bytes > most_mapped - mapped_bytes_ ||
        !SharedSegment::addresses_are_free()) {
      return false;
    }
    // Another user's, or hidden: it can't be opened.
    const std::string name =
        "/proc/" + std::to_string(peer.process) + "/fd/" + std::to_string(peer.segment.file);
    const int file = ::open(name.c_str(), O_RDONLY | O_CLOEXEC);
    if (file < 0) return false;
    peer.memory = SharedSegment::map(file, peer.segment.bytes, PROT_READ);
    ::close(file);
    if (peer.memory == nullptr) return false;
    std::uint64_t secret = 0;
    std::memcpy(&secret, peer.memory, sizeof secret);
    mapped_bytes_ += peer.segment.bytes;
    if (secret == peer.segment.secret) return true;
    ::munmap(peer.memory, peer.segment.bytes);
    peer.memory = nullptr;
#else
    (void)peer;
#endif
    return false;
  }

  Shown shown_{};
  std::shared_ptr<SharedSegment> segment_{};
  MpiProcessCard card_{};
  std::vector<Peer> peers_{};  // by rank
  std::uint64_t mapped_bytes_ = 0;
};

}  // namespace zero::detail
