// SPDX-License-Identifier: Apache-2.0
/// @file
/// An array of address space, in which memory comes by writing and goes by being released.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory_resource>
#include <new>
#include <span>
#include <utility>

#include "zero/config.hpp"
#include "zero/element.hpp"
#include "zero/memory.hpp"

#if ZERO_RESERVED_MEMORY
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace zero::detail {

/// Zero-filled bytes whose memory the system gives where they are written, and takes back where
/// they are released.
class ReservedMemory {
 public:
  static constexpr std::size_t huge_page = std::size_t{2} << 20U;

#if ZERO_RESERVED_MEMORY
  static constexpr bool releases = true;

  ReservedMemory() = default;
  /// Throws `std::bad_alloc`.
  explicit ReservedMemory(std::size_t bytes) {
    if (bytes == 0) return;
    const std::size_t page = page_size();
    const std::size_t whole = round_up(bytes, page);
    const bool large = whole >= 2 * huge_page;
    // A mapping starts on a page; one on a huge page is cut out of a longer one.
    const std::size_t length = whole + (large ? huge_page : 0);
    void* const mapped = ::mmap(nullptr, length, PROT_READ | PROT_WRITE,
                                MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapped == MAP_FAILED) throw std::bad_alloc();
    const auto address = reinterpret_cast<std::uintptr_t>(mapped);
    const std::size_t before = large ? round_up(address, huge_page) - address : 0;
    const std::size_t after = length - before - whole;
    memory_ = static_cast<std::byte*>(mapped) + before;
    bytes_ = whole;
    if (before > 0) (void)::munmap(mapped, before);
    if (after > 0) (void)::munmap(memory_ + whole, after);
#if ZERO_HUGE_PAGES
    // Advice: a refusal changes speed, not meaning.
    if (large) (void)::madvise(memory_, whole & ~(huge_page - 1), MADV_HUGEPAGE);
#endif
  }

  void release(std::size_t begin, std::size_t end) noexcept {
    const std::size_t page = page_size();
    begin = round_up(begin, page);
    end = end / page * page;
    if (begin >= end) return;
    // Memory that may not go (it is locked) reads as zeros all the same.
    if (::madvise(memory_ + begin, end - begin, MADV_DONTNEED) != 0) {
      std::memset(memory_ + begin, 0, end - begin);
    }
  }

 private:
  static std::size_t page_size() noexcept {
    static const auto bytes = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
    return bytes;
  }
  static constexpr std::size_t round_up(std::size_t bytes, std::size_t unit) noexcept {
    return (bytes + unit - 1) / unit * unit;
  }
  void free() noexcept {
    if (memory_ != nullptr) (void)::munmap(memory_, bytes_);
  }
#else
  static constexpr bool releases = false;

  ReservedMemory() = default;
  explicit ReservedMemory(std::size_t bytes) : bytes_(bytes) {
    if (bytes == 0) return;
    memory_ = static_cast<std::byte*>(huge_page_resource()->allocate(bytes, array_alignment));
    std::memset(memory_, 0, bytes);
  }

  void release(std::size_t, std::size_t) noexcept {}

 private:
  void free() noexcept {
    if (memory_ != nullptr) huge_page_resource()->deallocate(memory_, bytes_, array_alignment);
  }
#endif

 public:
  ReservedMemory(ReservedMemory&& other) noexcept
      : memory_(std::exchange(other.memory_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
  ReservedMemory& operator=(ReservedMemory&& other) noexcept {
    std::swap(memory_, other.memory_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~ReservedMemory() { free(); }

  [[nodiscard]] std::byte* data() const noexcept { return memory_; }

  void clear(std::size_t begin, std::size_t end) noexcept {
#if ZERO_RESERVED_MEMORY
    const std::size_t first = std::min(round_up(begin, page_size()), end);
    const std::size_t last = std::max(end / page_size() * page_size(), first);
    fill_with_zeros(begin, first);
    fill_with_zeros(last, end);
    release(first, last);
#else
    fill_with_zeros(begin, end);
#endif
  }

 private:
  /// To look takes no memory where nothing was written; to write would.
  void fill_with_zeros(std::size_t begin, std::size_t end) noexcept {
    const bool any =
        std::any_of(memory_ + begin, memory_ + end, [](std::byte b) { return b != std::byte{0}; });
    if (any) std::memset(memory_ + begin, 0, end - begin);
  }

  std::byte* memory_ = nullptr;
  std::size_t bytes_ = 0;  // whole pages
};

/// A fixed run of host elements with stable addresses, which read as zeros until they are written.
/// Memory is had where elements were written and not released since, by whole pages.
///
/// These are huge ones (2 MiB) in large arrays. One that is released in part counts no longer as
/// resident, but Linux takes back what is free of it only when memory is short, or fills it again
/// (measured: 256 KiB kept of each 1 MiB cost what 1 MiB does). So release neighbours too, and copy
/// what is to stay elsewhere.
template <Element T>
class ReservedArray {
 public:
  using value_type = T;

  /// Whether this system can give memory back. Elsewhere all of it is there from the start, and
  /// `release` does nothing.
  static constexpr bool releases = ReservedMemory::releases;
  /// Bytes that large arrays come by, and had best go by, counted from their start.
  static constexpr std::size_t huge_page = ReservedMemory::huge_page;

  ReservedArray() = default;
  /// Address space for `count` elements. Throws `std::bad_alloc` where there is none.
  explicit ReservedArray(std::size_t count) : memory_(bytes_of(count)), count_(count) {}
  ReservedArray(ReservedArray&& other) noexcept
      : memory_(std::move(other.memory_)), count_(std::exchange(other.count_, 0)) {}
  ReservedArray& operator=(ReservedArray&& other) noexcept {
    std::swap(memory_, other.memory_);
    std::swap(count_, other.count_);
    return *this;
  }
  ~ReservedArray() = default;

  /// Gives back the memory of the pages that lie in elements `begin`, …, `end` - 1 altogether,
  /// which read as zeros then; what shares a page with other elements stays as it is. From any
  /// thread, as long as nobody uses these elements meanwhile.
  void release(std::size_t begin, std::size_t end) noexcept {
    memory_.release(begin * sizeof(T), end * sizeof(T));
  }
  /// The same, and elements that share a page with others, or aren't given back, read as zeros too.
  void clear(std::size_t begin, std::size_t end) noexcept {
    memory_.clear(begin * sizeof(T), end * sizeof(T));
  }

  [[nodiscard]] T* data() noexcept { return reinterpret_cast<T*>(memory_.data()); }
  [[nodiscard]] const T* data() const noexcept {
    return reinterpret_cast<const T*>(memory_.data());
  }
  [[nodiscard]] std::size_t size() const noexcept { return count_; }
  /// Of the elements, whether memory is there or not.
  [[nodiscard]] std::size_t bytes() const noexcept { return count_ * sizeof(T); }
  [[nodiscard]] std::span<T> span() noexcept { return {data(), count_}; }
  [[nodiscard]] std::span<const T> span() const noexcept { return {data(), count_}; }

 private:
  static std::size_t bytes_of(std::size_t count) {
    // Half of what an address can say, so that rounding up is no concern.
    if (count > std::numeric_limits<std::size_t>::max() / 2 / sizeof(T)) throw std::bad_alloc();
    return count * sizeof(T);
  }

  ReservedMemory memory_{};
  std::size_t count_ = 0;
};

}  // namespace zero::detail
