// SPDX-License-Identifier: Apache-2.0
/// @file
/// A lane's values or gradients that are there bucket by bucket, and gone again.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <mutex>
#include <utility>
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
/// buckets, and where it lies never changes.
///
/// Memory goes by blocks, which are the huge pages that it comes by, when no bucket in them is in
/// use any more: what was released in part comes back as small pages, each with a fault (measured
/// over BERT-base: 22 times as many at stage 2, 28 times at stage 3). At most a block at either end
/// of what is in use stays for it.
///
/// Buckets may be taken and let go by several threads at once, each bucket by one.
template <Element T>
class PagedLane {
 public:
  /// @param poisons whether what is let go is filled with NaN, and kept, so that a use shows
  PagedLane(std::size_t elements, std::size_t buckets, bool poisons)
      : pages_(elements),
        poisons_(poisons),
        poisoned_(buckets, 0),
        taken_(buckets, 0),
        users_(elements / block + 1, 0) {}

  [[nodiscard]] T* data() noexcept { return pages_.data(); }

  /// The bucket is in use: what is written to it stays until it is let go. Again is no difference.
  void take(std::size_t bucket, Interval whole) noexcept {
    poisoned_[bucket] = 0;
    if (whole.empty()) return;
    const std::scoped_lock lock(mutex_);
    if (std::exchange(taken_[bucket], std::uint8_t{1}) == 0) count(whole, 1);
  }

  /// A bucket's memory goes back to the system.
  /// @param clears whether all of it must read as zeros then, and others may have written to
  /// buckets that they didn't take
  void let_go(std::size_t bucket, Interval whole, bool clears = false) noexcept {
    if (poisons_) {
      std::fill(data() + whole.begin, data() + whole.end, poison_of<T>());
      poisoned_[bucket] = 1;
      return;
    }
    if (whole.empty()) return;
    // Whoever takes a neighbour meanwhile waits, or what it then writes would be released.
    const std::scoped_lock lock(mutex_);
    if (std::exchange(taken_[bucket], std::uint8_t{0}) != 0) count(whole, -1);
    if (clears) {
      clear(whole);
      return;
    }
    const std::size_t first = whole.begin / block;
    const std::size_t last = (whole.end - 1) / block;
    const std::size_t begin = first + (users_[first] == 0 ? 0 : 1);
    const std::size_t end = last + (users_[last] == 0 ? 1 : 0);
    if (begin < end) pages_.release(begin * block, std::min(end * block, pages_.size()));
  }

  /// It reads as zeros, and takes no memory, but for what shares a page with others.
  void clear(Interval part) noexcept { pages_.clear(part.begin, part.end); }

  /// Whether something was written to `part` of a bucket since that was let go. False where nothing
  /// is poisoned.
  [[nodiscard]] bool written_since(std::size_t bucket, Interval part) const {
    if (poisoned_[bucket] == 0) return false;
    const T poison = poison_of<T>();
    const T* const begin = pages_.data() + part.begin;
    return std::any_of(begin, begin + part.size(),
                       [&](const T& x) { return std::memcmp(&x, &poison, sizeof poison) != 0; });
  }

 private:
  /// In elements.
  static constexpr std::size_t block = ReservedArray<T>::huge_page / sizeof(T);

  /// Blocks between the first and the last are a bucket's alone.
  void count(Interval whole, int change) noexcept {
    const std::size_t first = whole.begin / block;
    const std::size_t last = (whole.end - 1) / block;
    users_[first] += change;
    if (last != first) users_[last] += change;
  }

  ReservedArray<T> pages_;
  bool poisons_;
  std::vector<std::uint8_t> poisoned_;  ///< by bucket
  std::mutex mutex_{};                  ///< of what follows
  std::vector<std::uint8_t> taken_;     ///< by bucket
  std::vector<int> users_;  ///< by block: buckets that were taken, and begin or end there
};

}  // namespace zero::detail
