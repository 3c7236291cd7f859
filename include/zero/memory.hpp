// SPDX-License-Identifier: Apache-2.0
/// @file
/// Memory spaces, and the one kind of allocation that the library makes: aligned, touched once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory_resource>
#include <new>
#include <span>
#include <utility>

#include "zero/config.hpp"
#include "zero/element.hpp"

#if ZERO_HUGE_PAGES
#include <sys/mman.h>
#endif

namespace zero {

/// Where memory lies; decides allocation, executor and which communicators fit.
enum class MemorySpace : std::uint8_t { host, cuda };

/// Every array that the library owns starts on this many bytes.
inline constexpr std::size_t array_alignment = 256;

/// Slices of the library's own memory start and end on this many bytes: vector loads and NCCL
/// (three times slower otherwise) want it.
inline constexpr std::size_t slice_alignment = 16;

/// The default host allocator: 256-byte aligned; from 4 MiB on aligned to 2 MiB, with huge pages
/// asked for, since page faults and address translation otherwise cost as much as the arithmetic.
class HugePageResource final : public std::pmr::memory_resource {
  static constexpr std::size_t huge_page = std::size_t{2} << 20;

  static constexpr std::align_val_t alignment_for(std::size_t bytes, std::size_t alignment) {
    const std::size_t wanted = bytes >= 2 * huge_page ? huge_page : array_alignment;
    return std::align_val_t{alignment > wanted ? alignment : wanted};
  }

  void* do_allocate(std::size_t bytes, std::size_t alignment) override {
    void* memory = ::operator new(bytes, alignment_for(bytes, alignment));
#if ZERO_HUGE_PAGES
    // Advice: a refusal changes speed, not meaning.
    if (bytes >= 2 * huge_page) (void)::madvise(memory, bytes & ~(huge_page - 1), MADV_HUGEPAGE);
#endif
    return memory;
  }
  void do_deallocate(void* memory, std::size_t bytes, std::size_t alignment) override {
    // Not the sized form: clang 16 offers it only under -fsized-deallocation.
    ::operator delete(memory, alignment_for(bytes, alignment));
  }
  bool do_is_equal(const std::pmr::memory_resource& other) const noexcept override {
    return dynamic_cast<const HugePageResource*>(&other) != nullptr;
  }
};

/// The default of every `memory` setting. It has no state: any two compare equal.
[[nodiscard]] inline std::pmr::memory_resource* huge_page_resource() noexcept {
  static HugePageResource resource;
  return &resource;
}

/// One fixed run of host elements, zero-filled (and so touched) by the thread that makes it.
template <Element T>
class HostArray {
 public:
  using value_type = T;

  HostArray() = default;
  /// Throws what `resource` throws (`std::bad_alloc`).
  explicit HostArray(std::size_t count, std::pmr::memory_resource* resource = huge_page_resource())
      : resource_(resource), count_(count) {
    if (count == 0) return;
    data_ = static_cast<T*>(resource_->allocate(count * sizeof(T), array_alignment));
    std::memset(static_cast<void*>(data_), 0, count * sizeof(T));
  }
  HostArray(HostArray&& other) noexcept
      : resource_(other.resource_),
        data_(std::exchange(other.data_, nullptr)),
        count_(std::exchange(other.count_, 0)) {}
  HostArray& operator=(HostArray&& other) noexcept {
    std::swap(resource_, other.resource_);
    std::swap(data_, other.data_);
    std::swap(count_, other.count_);
    return *this;
  }
  ~HostArray() {
    if (data_ != nullptr) resource_->deallocate(data_, count_ * sizeof(T), array_alignment);
  }

  [[nodiscard]] T* data() noexcept { return data_; }
  [[nodiscard]] const T* data() const noexcept { return data_; }
  [[nodiscard]] std::size_t size() const noexcept { return count_; }
  [[nodiscard]] std::size_t bytes() const noexcept { return count_ * sizeof(T); }
  [[nodiscard]] std::span<T> span() noexcept { return {data_, count_}; }
  [[nodiscard]] std::span<const T> span() const noexcept { return {data_, count_}; }

 private:
  std::pmr::memory_resource* resource_ = nullptr;
  T* data_ = nullptr;
  std::size_t count_ = 0;
};

}  // namespace zero
