// SPDX-License-Identifier: Apache-2.0
/// @file
/// Loads and stores of several neighbouring elements at once.
#pragma once

#include <cstddef>
#include <cstdint>

#include "zero/config.hpp"

namespace zero::cuda::detail {

/// What one memory access moves at most.
inline constexpr std::size_t access_bytes = 16;

/// Elements that one access moves, of 2, 4, 8 or 16 bytes in all.
template <class T, unsigned width>
struct alignas(width * sizeof(T)) Vector {
  static_assert(width * sizeof(T) <= access_bytes);
  T at[width];
};

/// `from` lies on `width * sizeof(T)` bytes.
template <unsigned width, class T>
ZERO_HOST_DEVICE inline Vector<T, width> load_vector(const T* from) {
  return *reinterpret_cast<const Vector<T, width>*>(from);
}
template <unsigned width, class T>
ZERO_HOST_DEVICE inline void store_vector(const Vector<T, width>& vector, T* to) {
  *reinterpret_cast<Vector<T, width>*>(to) = vector;
}

/// How many elements come before the first one that a vector of `width` may start with: less than
/// `width`.
template <unsigned width, class T>
ZERO_HOST_DEVICE inline unsigned elements_to_vector(const T* from) {
  const auto index = reinterpret_cast<std::uintptr_t>(from) / sizeof(T);
  return static_cast<unsigned>(-index % width);
}

}  // namespace zero::cuda::detail
