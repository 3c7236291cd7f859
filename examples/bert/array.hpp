// SPDX-License-Identifier: Apache-2.0
// Memory that a rank's thread allocates and touches once.
#pragma once

#include <algorithm>
#include <cstddef>
#include <memory>
#include <new>

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace bert {

/// `count` zeros. Shared, since a parameter's memory may be anyone's. Large arrays start on 2 MiB
/// and ask for huge pages: page faults and address translation cost as much as the arithmetic.
template <class T>
[[nodiscard]] std::shared_ptr<T> make_array(std::size_t count) {
  constexpr std::size_t huge_page = std::size_t{2} << 20;
  const std::size_t bytes = std::max<std::size_t>(count * sizeof(T), 1);
  const std::align_val_t alignment{bytes >= 2 * huge_page ? huge_page : 64};
  std::shared_ptr<T> array(static_cast<T*>(::operator new(bytes, alignment)),
                           [alignment](T* memory) { ::operator delete(memory, alignment); });
#ifdef __linux__
  if (bytes >= 2 * huge_page) {
    (void)::madvise(array.get(), bytes & ~(huge_page - 1), MADV_HUGEPAGE);
  }
#endif
  std::uninitialized_fill_n(array.get(), count, T{});
  return array;
}

/// Makes arrays and counts their bytes; or only counts.
class Memory {
 public:
  enum class Mode { allocate, count };
  explicit Memory(Mode mode) : mode_(mode) {}

  /// Null where it only counts.
  template <class T>
  [[nodiscard]] std::shared_ptr<T> take(std::size_t count) {
    bytes_ += count * sizeof(T);
    return mode_ == Mode::allocate ? make_array<T>(count) : nullptr;
  }
  [[nodiscard]] std::size_t bytes() const { return bytes_; }

 private:
  Mode mode_;
  std::size_t bytes_ = 0;
};

}  // namespace bert
