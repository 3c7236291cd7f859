// SPDX-License-Identifier: Apache-2.0
/// @file
/// Memory of this process that other processes of the same user can map.
#pragma once

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <fstream>
#include <iterator>
#include <map>
#include <memory>
#include <memory_resource>
#include <mutex>
#include <new>
#include <random>
#include <string>
#include <utility>

#include "zero/config.hpp"
#include "zero/memory.hpp"

#if ZERO_PROCESS_MEMORY
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>
#endif

namespace zero::detail {

/// A range of addresses backed by a file without a name, so that nothing is left behind. Pages
/// exist from their allocation to their deallocation; the range itself costs nothing. A peer that
/// has mapped it keeps the pages it sees, whatever becomes of this process. When it is full,
/// ordinary memory is given.
class SharedSegment final : public std::pmr::memory_resource {
 public:
  /// How a peer finds it: by this process's number and these.
  struct Card {
    std::int64_t file = -1;   ///< its number in this process; negative: there is none
    std::uint64_t begin = 0;  ///< here
    std::uint64_t bytes = 0;
    std::uint64_t secret = 0;  ///< what its first bytes are
  };

  /// Null where the system has no such thing, or where a range of addresses isn't free of charge.
  /// @param peers how many will map it, each another's
  [[nodiscard]] static std::shared_ptr<SharedSegment> make([[maybe_unused]] std::size_t peers) {
#if ZERO_PROCESS_MEMORY
    if (!addresses_are_free()) return nullptr;
    // Of what the machine has, several times an even share.
    const auto pages = static_cast<std::size_t>(std::max(::sysconf(_SC_PHYS_PAGES), 1L));
    const std::size_t all = pages * page_size();
    const std::size_t bytes =
        round_up(std::min(all, all / std::max<std::size_t>(peers, 1) * 4), huge_page);
    const int file = ::memfd_create("zero", MFD_CLOEXEC);
    if (file < 0) return nullptr;
    std::byte* memory = nullptr;
    if (::ftruncate(file, static_cast<off_t>(bytes)) == 0) {
      memory = map(file, bytes, PROT_READ | PROT_WRITE);
    }
    if (memory != nullptr) {
      auto segment = std::shared_ptr<SharedSegment>(new SharedSegment(file, memory, bytes));
      return segment->hides_secret() ? segment : nullptr;
    }
    ::close(file);
#endif
    return nullptr;
  }

#if ZERO_PROCESS_MEMORY
  ~SharedSegment() override {
    ::munmap(memory_, bytes_);
    ::close(file_);
  }
#endif
  SharedSegment(const SharedSegment&) = delete;
  SharedSegment& operator=(const SharedSegment&) = delete;

  [[nodiscard]] Card card() const noexcept {
    return {file_, reinterpret_cast<std::uintptr_t>(memory_), bytes_, secret_};
  }

#if ZERO_PROCESS_MEMORY
  /// Whether a range of addresses takes nothing from what else there is. Not where they are
  /// counted (`ulimit -v`), where a file's size is (`ulimit -f`, whose excess is a signal), and
  /// where memory is locked, which would make all of it resident.
  [[nodiscard]] static bool addresses_are_free() {
    for (const auto kind : {RLIMIT_AS, RLIMIT_FSIZE}) {
      rlimit limit{};
      if (::getrlimit(kind, &limit) != 0 || limit.rlim_cur != RLIM_INFINITY) return false;
    }
    std::ifstream status("/proc/self/status");
    for (std::string line; std::getline(status, line);) {
      if (line.starts_with("VmLck:")) return line.find_first_of("123456789") == std::string::npos;
    }
    return false;
  }

  /// Maps a file so that huge pages of it stay huge; null where that fails.
  [[nodiscard]] static std::byte* map(int file, std::size_t bytes, int protection) noexcept {
    // Only where addresses and offsets agree modulo their size are huge pages mapped as such.
    const std::size_t room = bytes + huge_page;
    void* const reserved =
        ::mmap(nullptr, room, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (reserved == MAP_FAILED) return nullptr;
    const auto start = reinterpret_cast<std::uintptr_t>(reserved);
    const std::size_t before = round_up(start, huge_page) - start;
    auto* const begin = static_cast<std::byte*>(reserved) + before;
    if (before != 0) ::munmap(reserved, before);
    if (before != huge_page) ::munmap(begin + bytes, huge_page - before);
    if (::mmap(begin, bytes, protection, MAP_SHARED | MAP_NORESERVE | MAP_FIXED, file, 0) ==
            MAP_FAILED ||
        // Or a core dump would fill all of it with pages, and write them.
        ::madvise(begin, bytes, MADV_DONTDUMP) != 0) {
      ::munmap(begin, bytes);
      return nullptr;
    }
    return begin;
  }
#endif

 private:
  static constexpr std::size_t huge_page = std::size_t{2} << 20U;

  static constexpr std::size_t round_up(std::size_t bytes, std::size_t to) noexcept {
    return (bytes + to - 1) / to * to;
  }

#if ZERO_PROCESS_MEMORY
#ifdef MADV_COLLAPSE
  static constexpr int collapse = MADV_COLLAPSE;
#else
  static constexpr int collapse = 25;  // Linux 6.1, whose headers may be older
#endif

  static std::size_t page_size() noexcept {
    return static_cast<std::size_t>(std::max(::sysconf(_SC_PAGESIZE), 4096L));
  }

  SharedSegment(int file, std::byte* memory, std::size_t bytes)
      : file_(file), memory_(memory), bytes_(bytes), owner_(::getpid()) {
    free_.emplace(0, bytes);
  }

  bool hides_secret() noexcept {
    try {
      std::random_device random;
      secret_ = std::uint64_t{random()} << 32U | random();
      std::construct_at(static_cast<std::uint64_t*>(allocate(sizeof secret_)), secret_);
    } catch (...) {
      return false;
    }
    return true;
  }

  void* do_allocate(std::size_t bytes, std::size_t alignment) override {
    // A child of a fork would take what its parent takes.
    void* const memory = ::getpid() == owner_ ? take(bytes, alignment) : nullptr;
    if (memory != nullptr) return memory;
    return huge_page_resource()->allocate(bytes, alignment);  // which peers are sent
  }

  /// Null where there is no room.
  void* take(std::size_t bytes, std::size_t alignment) {
    const bool large = bytes >= 2 * huge_page;
    const std::size_t length = extent_of(bytes);
    const std::size_t unit = std::max(large ? huge_page : page_size(), alignment);
    const auto base = reinterpret_cast<std::uintptr_t>(memory_);
    const std::lock_guard lock(mutex_);
    for (auto it = free_.begin(); it != free_.end(); ++it) {
      const auto [at, room] = *it;
      const std::size_t begin = round_up(base + at, unit) - base;
      if (begin > at + room || at + room - begin < length) continue;
      if (begin + length != at + room) {
        free_.emplace(begin + length, at + room - begin - length);
      }
      if (begin != at) {
        it->second = begin - at;
      } else {
        free_.erase(it);
      }
      if (fill(begin, length)) {
        (void)::madvise(memory_ + begin, length, MADV_DODUMP);
        if (large) (void)::madvise(memory_ + begin, length, collapse);  // advice, as elsewhere
        return memory_ + begin;
      }
      give_back(begin, length);
      return nullptr;
    }
    return nullptr;
  }

  /// Makes pages, here and now, or the first write to one that there is no memory for would end the
  /// process.
  bool fill(std::size_t begin, std::size_t length) noexcept {
    // In pieces, since a signal may end each of them early.
    constexpr std::size_t most = std::size_t{64} << 20U;
    for (std::size_t done = 0; done < length;) {
      const std::size_t piece = std::min(most, length - done);
      if (::fallocate(file_, 0, static_cast<off_t>(begin + done), static_cast<off_t>(piece)) == 0) {
        done += piece;
      } else if (errno != EINTR) {
        return false;
      }
    }
    return true;
  }

  void do_deallocate(void* memory, std::size_t bytes, std::size_t alignment) override {
    const auto address = reinterpret_cast<std::uintptr_t>(memory);
    const auto base = reinterpret_cast<std::uintptr_t>(memory_);
    if (address < base || address >= base + bytes_) {
      huge_page_resource()->deallocate(memory, bytes, alignment);
      return;
    }
    if (::getpid() != owner_) return;  // a child of a fork sees the same pages
    const std::lock_guard lock(mutex_);
    give_back(address - base, extent_of(bytes));
  }

  /// Frees the pages and joins the range to those around it.
  void give_back(std::size_t at, std::size_t length) noexcept {
    (void)::madvise(memory_ + at, length, MADV_DONTDUMP);
    while (::fallocate(file_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(at),
                       static_cast<off_t>(length)) != 0 &&
           errno == EINTR) {
    }
    auto next = free_.lower_bound(at);
    if (next != free_.end() && next->first == at + length) {
      length += next->second;
      next = free_.erase(next);
    }
    if (next != free_.begin()) {
      const auto before = std::prev(next);
      if (before->first + before->second == at) {
        before->second += length;
        return;
      }
    }
    try {
      free_.emplace(at, length);
    } catch (...) {  // no memory to remember it: these addresses are not used again
    }
  }

  static std::size_t extent_of(std::size_t bytes) noexcept {
    return round_up(std::max<std::size_t>(bytes, 1),
                    bytes >= 2 * huge_page ? huge_page : page_size());
  }
#else
  SharedSegment() = default;
  void* do_allocate(std::size_t, std::size_t) override { throw std::bad_alloc(); }
  void do_deallocate(void*, std::size_t, std::size_t) override {}
#endif
  bool do_is_equal(const std::pmr::memory_resource& other) const noexcept override {
    return this == &other;
  }

  const int file_ = -1;
  std::byte* const memory_ = nullptr;
  const std::size_t bytes_ = 0;
  const std::int64_t owner_ = 0;  // the process
  std::uint64_t secret_ = 0;
  std::mutex mutex_{};
  std::map<std::size_t, std::size_t> free_{};  // offset and length, none next to another
};

}  // namespace zero::detail
