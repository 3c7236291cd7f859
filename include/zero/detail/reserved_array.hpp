// SPDX-License-Identifier: Apache-2.0
/// @file
/// Memory whose pages come when they are touched, and go when they are released.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
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

/// Address space for `count` elements, which read as zeros until they are written. Where the
/// system can't give pages back one by one it is all there, always.
template <Element T>
class ReservedArray {
 public:
  /// Whether `release` gives memory back.
  static constexpr bool releases = ZERO_RESERVED_MEMORY != 0;

  ReservedArray() = default;
  /// Throws `std::bad_alloc` where there is not as much address space.
  explicit ReservedArray(std::size_t count) : count_(count) {
    if (count == 0) return;
#if ZERO_RESERVED_MEMORY
    if (count > (std::numeric_limits<std::size_t>::max() - huge_page) / sizeof(T)) {
      throw std::bad_alloc();
    }
    // Huge pages need an aligned beginning; address space costs nothing.
    reserved_bytes_ = count * sizeof(T) + huge_page;
    reserved_ = ::mmap(nullptr, reserved_bytes_, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | no_reserve, -1, 0);
    if (reserved_ == MAP_FAILED) {
      reserved_ = nullptr;
      throw std::bad_alloc();
    }
    const auto begin = reinterpret_cast<std::uintptr_t>(reserved_);
    data_ = reinterpret_cast<T*>((begin + huge_page - 1) / huge_page * huge_page);
#if ZERO_HUGE_PAGES
    if (count * sizeof(T) >= 2 * huge_page) {
      (void)::madvise(data_, count * sizeof(T) / huge_page * huge_page, MADV_HUGEPAGE);
    }
#endif
#else
    array_ = HostArray<T>(count);
    data_ = array_.data();
#endif
  }
  ReservedArray(ReservedArray&& other) noexcept { swap(other); }
  ReservedArray& operator=(ReservedArray&& other) noexcept {
    ReservedArray(std::move(other)).swap(*this);
    return *this;
  }
  ~ReservedArray() {
#if ZERO_RESERVED_MEMORY
    if (reserved_ != nullptr) (void)::munmap(reserved_, reserved_bytes_);
#endif
  }

  [[nodiscard]] T* data() noexcept { return data_; }
  [[nodiscard]] const T* data() const noexcept { return data_; }
  [[nodiscard]] std::size_t size() const noexcept { return count_; }
  [[nodiscard]] std::span<T> span() noexcept { return {data_, count_}; }

  /// Gives back the pages that lie wholly in elements [begin, end), which read as zeros again. What
  /// lies on a page at either end stays as it is.
  void release([[maybe_unused]] std::size_t begin, [[maybe_unused]] std::size_t end) noexcept {
#if ZERO_RESERVED_MEMORY
    static const auto page = static_cast<std::uintptr_t>(::sysconf(_SC_PAGESIZE));
    const std::uintptr_t from =
        (reinterpret_cast<std::uintptr_t>(data_ + begin) + page - 1) / page * page;
    const std::uintptr_t to = reinterpret_cast<std::uintptr_t>(data_ + end) / page * page;
    if (from < to) (void)::madvise(reinterpret_cast<void*>(from), to - from, MADV_DONTNEED);
#endif
  }

 private:
  void swap(ReservedArray& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(count_, other.count_);
#if ZERO_RESERVED_MEMORY
    std::swap(reserved_, other.reserved_);
    std::swap(reserved_bytes_, other.reserved_bytes_);
#else
    std::swap(array_, other.array_);
#endif
  }

  T* data_ = nullptr;
  std::size_t count_ = 0;
#if ZERO_RESERVED_MEMORY
  static constexpr std::size_t huge_page = std::size_t{2} << 20;
#ifdef MAP_NORESERVE
  static constexpr int no_reserve = MAP_NORESERVE;
#else
  static constexpr int no_reserve = 0;
#endif
  void* reserved_ = nullptr;
  std::size_t reserved_bytes_ = 0;
#else
  HostArray<T> array_{};
#endif
};

}  // namespace zero::detail
