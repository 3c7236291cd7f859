// SPDX-License-Identifier: Apache-2.0
/// @file
/// Memory of this process that other processes of the same user can map.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <memory_resource>
#include <mutex>
#include <new>
#include <random>
#include <string>
#include <utility>

#include "zero/config.hpp"

#if ZERO_PROCESS_MEMORY
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>
#endif

namespace zero::detail {

/// A range of addresses backed by a file without a name, so that nothing is left behind. Pages
/// exist from their allocation to their deallocation; the range itself costs nothing. A peer that
/// has mapped it keeps the pages it sees, whatever becomes of this process.
class SharedSegment final : public std::pmr::memory_resource {
 public:
  /// How a peer finds it: by this process's number and these.
  struct Card {
    std::int64_t file = -1;   ///< its number in this process; negative: there is none
    std::uint64_t begin = 0;  ///< here
    std::uint64_t bytes = 0;
    std::uint64_t secret = 0;  ///< what its first bytes are
  };

  /// Null where the system has no such thing, or counts addresses.
  [[nodiscard]] static std::shared_ptr<SharedSegment> make() {
#if ZERO_PROCESS_MEMORY
    // All that the machine has: more can't be allocated anyway.
    const auto pages = static_cast<std::size_t>(std::max(::sysconf(_SC_PHYS_PAGES), 1L));
    const std::size_t bytes = round_up(pages * page_size(), huge_page);
    const int file = addresses_are_free() ? ::memfd_create("zero", MFD_CLOEXEC) : -1;
    if (file < 0) return nullptr;
    std::byte* memory = nullptr;
    if (::ftruncate(file, static_cast<off_t>(bytes)) == 0) {
      memory = map(file, bytes, PROT_READ | PROT_WRITE);
    }
    if (memory != nullptr) {
      auto segment = std::shared_ptr<SharedSegment>(new SharedSegment(file, memory, bytes));
      if (segment->hides_secret()) return segment;
      return nullptr;
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
  /// Whether a range of addresses takes nothing from what else is allocated (`ulimit -v`).
  [[nodiscard]] static bool addresses_are_free() noexcept {
    rlimit limit{};
    return ::getrlimit(RLIMIT_AS, &limit) == 0 && limit.rlim_cur == RLIM_INFINITY;
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
        MAP_FAILED) {
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
  static std::size_t page_size() noexcept {
    return static_cast<std::size_t>(std::max(::sysconf(_SC_PAGESIZE), 4096L));
  }

  SharedSegment(int file, std::byte* memory, std::size_t bytes)
      : file_(file), memory_(memory), bytes_(bytes) {
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
    const bool large = bytes >= 2 * huge_page;
    const std::size_t unit = std::max(large ? huge_page : page_size(), alignment);
    const std::size_t length = extent_of(bytes);
    const std::lock_guard lock(mutex_);
    for (auto it = free_.begin(); it != free_.end(); ++it) {
      const auto [at, room] = *it;
      const std::size_t begin = round_up(at, unit);
      if (begin > at + room || at + room - begin < length) continue;
      // Here and now, or the first write to a page that there is no memory for ends the process.
      if (::fallocate(file_, 0, static_cast<off_t>(begin), static_cast<off_t>(length)) != 0) break;
      free_.erase(it);
      if (begin != at) free_.emplace(at, begin - at);
      if (begin + length != at + room) free_.emplace(begin + length, at + room - begin - length);
#ifdef MADV_COLLAPSE
      constexpr int collapse = MADV_COLLAPSE;
#else
      constexpr int collapse = 25;  // Linux 6.1, whose headers may be older
#endif
      if (large) (void)::madvise(memory_ + begin, length, collapse);  // advice, as elsewhere
      return memory_ + begin;
    }
    throw std::bad_alloc();
  }

  void do_deallocate(void* memory, std::size_t bytes, std::size_t) override {
    const auto at = static_cast<std::size_t>(static_cast<std::byte*>(memory) - memory_);
    const std::size_t length = extent_of(bytes);
    const std::lock_guard lock(mutex_);
    (void)::fallocate(file_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(at),
                      static_cast<off_t>(length));
    auto next = free_.lower_bound(at);
    std::size_t begin = at, end = at + length;
    if (next != free_.end() && next->first == end) {
      end += next->second;
      next = free_.erase(next);
    }
    if (next != free_.begin()) {
      const auto before = std::prev(next);
      if (before->first + before->second == begin) {
        before->second = end - before->first;
        return;
      }
    }
    free_.emplace(begin, end - begin);
  }

  static std::size_t extent_of(std::size_t bytes) noexcept {
    return round_up(std::max<std::size_t>(bytes, 1),
                    bytes >= 2 * huge_page ? huge_page : page_size());
  }
#else
  void* do_allocate(std::size_t, std::size_t) override { throw std::bad_alloc(); }
  void do_deallocate(void*, std::size_t, std::size_t) override {}
#endif
  bool do_is_equal(const std::pmr::memory_resource& other) const noexcept override {
    return this == &other;
  }

  const int file_ = -1;
  std::byte* const memory_ = nullptr;
  const std::size_t bytes_ = 0;
  std::uint64_t secret_ = 0;
  std::mutex mutex_{};
  std::map<std::size_t, std::size_t> free_{};  // offset and length, none next to another
};

}  // namespace zero::detail
