// SPDX-License-Identifier: Apache-2.0
/// @file
/// A lane's values or gradients that are there bucket by bucket, and gone again.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "zero/detail/reserved_array.hpp"
#include "zero/element.hpp"
#include "zero/fragment.hpp"

namespace zero::detail {

/// The element that stands where nobody should look.
template <Element T>
[[nodiscard]] T poison_of() {
  return element_traits<T>::store(std::numeric_limits<arithmetic_t<T>>::quiet_NaN());
}

/// As much address space as the lane has elements, so that a parameter is contiguous across its
/// buckets, and where it lies never changes. Not synchronised, but buckets are apart.
template <Element T>
class PagedLane {
 public:
  /// @param poisons whether what is let go is filled with NaN, and kept, so that a use shows
  PagedLane(std::size_t elements, std::size_t buckets, bool poisons)
      : pages_(elements), poisons_(poisons), poisoned_(buckets, 0) {}

  [[nodiscard]] T* data() noexcept { return pages_.data(); }

  /// A bucket's memory goes back to the system.
  /// @param clears whether all of it must read as zeros then: pages that other buckets share stay
  void let_go(std::size_t bucket, Interval whole, bool clears = false) noexcept {
    if (!poisons_) {
      clears ? clear(whole) : pages_.release(whole.begin, whole.end);
      return;
    }
    std::fill(data() + whole.begin, data() + whole.end, poison_of<T>());
    poisoned_[bucket] = 1;
  }

  /// It reads as zeros, and takes no memory, but for what shares a page with others.
  void clear(Interval part) noexcept { pages_.clear(part.begin, part.end); }

  /// Whether something was written to `part` of a bucket since that was let go. False where nothing
  /// is poisoned.
  [[nodiscard]] bool written_since(std::size_t bucket, Interval part) const {
    if (poisoned_[bucket] == 0) return false;
    const T poison = poison_of<T>();
    const T* const begin = pages_.data() + part.begin;
    return std::any_of(begin, begin + part.size(), [&](const T& x) {
      return std::memcmp(&x, &poison, sizeof poison) != 0;
    });
  }
  /// The bucket is in use again.
  void take(std::size_t bucket) noexcept { poisoned_[bucket] = 0; }

 private:
  ReservedArray<T> pages_;
  bool poisons_;
  std::vector<std::uint8_t> poisoned_;  ///< by bucket
};

}  // namespace zero::detail
