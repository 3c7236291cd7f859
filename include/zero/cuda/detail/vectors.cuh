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

/// Bytes that a thread of `each_element` has under way at a time.
inline constexpr unsigned each_element_bytes = 64;
template <class T>
inline constexpr unsigned each_element_excess = (each_element_bytes + 2 * access_bytes) / sizeof(T);

/// Calls `body` with each of this thread's elements among `count` that the block's threads share,
/// and with some zeros: with at most `count / blockDim.x + each_element_excess<T>` in all.
template <class T, class Body>
__device__ inline void each_element(const T* from, unsigned count, const Body& body) {
  constexpr unsigned width = access_bytes / sizeof(T);
  constexpr unsigned vectors = each_element_bytes / access_bytes;
  const unsigned skipped = elements_to_vector<width>(from);
  const unsigned head = skipped < count ? skipped : count;
  const unsigned end = head + (count - head) / width * width;
  for (unsigned i = threadIdx.x; i < head + (count - end); i += blockDim.x) {
    body(from[i < head ? i : i - head + end]);
  }
  for (unsigned at = head; at < end; at += blockDim.x * vectors * width) {
    Vector<T, width> held[vectors] = {};
    ZERO_UNROLL
    for (unsigned v = 0; v < vectors; ++v) {
      const unsigned i = at + (v * blockDim.x + threadIdx.x) * width;
      if (i < end) held[v] = load_vector<width>(from + i);
    }
    ZERO_UNROLL
    for (unsigned v = 0; v < vectors; ++v) {
      ZERO_UNROLL
      for (unsigned j = 0; j < width; ++j) body(held[v].at[j]);
    }
  }
}

/// Elements [begin, end) of `to`, of `f` of those of `from`, in vectors, `w` elements each.
template <unsigned w, class From, class To, class F>
__device__ inline void transform_vectors(const From* from, To* to, unsigned begin, unsigned end,
                                         const F& f) {
  constexpr unsigned vectors = 4;
  for (unsigned at = begin; at < end; at += blockDim.x * vectors * w) {
    Vector<From, w> held[vectors] = {};
    ZERO_UNROLL
    for (unsigned v = 0; v < vectors; ++v) {
      const unsigned i = at + (v * blockDim.x + threadIdx.x) * w;
      if (i < end) held[v] = load_vector<w>(from + i);
    }
    ZERO_UNROLL
    for (unsigned v = 0; v < vectors; ++v) {
      const unsigned i = at + (v * blockDim.x + threadIdx.x) * w;
      Vector<To, w> out;
      ZERO_UNROLL
      for (unsigned j = 0; j < w; ++j) out.at[j] = f(held[v].at[j]);
      if (i < end) store_vector<w>(out, to + i);
    }
  }
}

/// The block's threads set `count` elements of `to` to `f` of those of `from`.
template <class From, class To, class F>
__device__ inline void transform_elements(const From* from, To* to, unsigned count, const F& f) {
  constexpr unsigned width = access_bytes / (sizeof(From) > sizeof(To) ? sizeof(From) : sizeof(To));
  const unsigned head = elements_to_vector<width>(to);
  const bool together = elements_to_vector<width>(from) == head;
  const unsigned begin = together && head < count ? head : count;
  const unsigned end = begin + (count - begin) / width * width;
  transform_vectors<1>(from, to, 0, begin, f);
  transform_vectors<width>(from, to, begin, end, f);
  transform_vectors<1>(from, to, end, count, f);
}

}  // namespace zero::cuda::detail
