// SPDX-License-Identifier: Apache-2.0
/// @file
/// Copies past the caches.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "zero/config.hpp"

#if ZERO_SSE2
#include <emmintrin.h>
#endif

namespace zero::detail {

/// Where so many bytes or more are written in one go, stores go past the caches: what is written
/// would push everything else out and be gone before anybody reads it, and memory need not be read
/// before it is overwritten (measured: two threads copy 1.5 to 2 times as fast).
inline constexpr std::size_t streamed_bytes = std::size_t{4} << 20;

#if ZERO_SSE2

/// Elements until `to` lies on 16 bytes, which streaming stores need.
template <class T>
std::size_t unaligned_elements(const T* to, std::size_t n) noexcept {
  const std::size_t bytes = -reinterpret_cast<std::uintptr_t>(to) % 16;
  return bytes % sizeof(T) == 0 ? std::min(n, bytes / sizeof(T)) : n;
}

/// `to = from` past the caches; they are disjoint.
template <class T>
void streamed_copy(const T* from, std::size_t n, T* to) noexcept {
  const std::size_t head = unaligned_elements(to, n);
  std::memcpy(to, from, head * sizeof(T));
  const char* source = reinterpret_cast<const char*>(from + head);
  char* target = reinterpret_cast<char*>(to + head);
  std::size_t bytes = (n - head) * sizeof(T);
  for (; bytes >= 64; bytes -= 64, source += 64, target += 64) {
    const auto load = [&](int i) {
      return _mm_loadu_si128(reinterpret_cast<const __m128i*>(source) + i);
    };
    const __m128i x0 = load(0), x1 = load(1), x2 = load(2), x3 = load(3);
    auto* const line = reinterpret_cast<__m128i*>(target);
    _mm_stream_si128(line, x0), _mm_stream_si128(line + 1, x1);
    _mm_stream_si128(line + 2, x2), _mm_stream_si128(line + 3, x3);
  }
  std::memcpy(target, source, bytes);
  _mm_sfence();  // such stores are ordered with nothing else
}

#else

template <class T>
void streamed_copy(const T* from, std::size_t n, T* to) noexcept {
  std::memcpy(to, from, n * sizeof(T));
}

#endif

}  // namespace zero::detail
