// SPDX-License-Identifier: Apache-2.0
/// @file
/// The one sum over ranks: (((x0 + x1) + x2) + …) for each element, whatever the slicing.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <type_traits>

#include "zero/config.hpp"
#include "zero/detail/convert.hpp"
#include "zero/detail/pack.hpp"
#include "zero/detail/rounding.hpp"
#include "zero/detail/streamed_copy.hpp"
#include "zero/element.hpp"
#include "zero/rounding.hpp"

#if ZERO_SSE2
#include <emmintrin.h>
#endif

namespace zero::detail {

// Compiler vectors, since g++ at -O2 vectorises no loop whose arrays may alias. 16 bytes exist on
// every supported target, and a sum of arrays in memory gains nothing from wider ones.
template <class T>
struct SumVector {
  static constexpr bool available = false;
};
template <>
struct SumVector<float> {
  static constexpr bool available = true;
  typedef float type __attribute__((vector_size(16)));
};
template <>
struct SumVector<double> {
  static constexpr bool available = true;
  typedef double type __attribute__((vector_size(16)));
};

template <class V, class T>
inline V load_vector(const T* from) noexcept {
  V vector;
  std::memcpy(&vector, from, sizeof vector);
  return vector;
}
template <class V, class T>
inline void store_vector(const V& vector, T* to) noexcept {
  std::memcpy(to, &vector, sizeof vector);
}

/// Whole blocks of `sum_in_rank_order`, stored by `store(vector, to)`; returns where it stopped.
template <class V, class T, class Store>
std::size_t sum_blocks(std::span<const T* const> sources, std::size_t i, std::size_t n, T* out,
                       Store store) noexcept {
  constexpr std::size_t w = sizeof(V) / sizeof(T);
  constexpr std::size_t block = 8 * w;
  // Every source of a block is read before the block is written: that's what lets `out` be one
  // of the sources. Eight named sums stay in registers at -O2; an array of them would not.
  for (; n - i >= block; i += block) {
    const T* x = sources[0] + i;
    V s0 = load_vector<V>(x), s1 = load_vector<V>(x + w);
    V s2 = load_vector<V>(x + 2 * w), s3 = load_vector<V>(x + 3 * w);
    V s4 = load_vector<V>(x + 4 * w), s5 = load_vector<V>(x + 5 * w);
    V s6 = load_vector<V>(x + 6 * w), s7 = load_vector<V>(x + 7 * w);
    for (std::size_t r = 1; r < sources.size(); ++r) {
      x = sources[r] + i;
      s0 += load_vector<V>(x), s1 += load_vector<V>(x + w);
      s2 += load_vector<V>(x + 2 * w), s3 += load_vector<V>(x + 3 * w);
      s4 += load_vector<V>(x + 4 * w), s5 += load_vector<V>(x + 5 * w);
      s6 += load_vector<V>(x + 6 * w), s7 += load_vector<V>(x + 7 * w);
    }
    T* to = out + i;
    store(s0, to), store(s1, to + w), store(s2, to + 2 * w), store(s3, to + 3 * w);
    store(s4, to + 4 * w), store(s5, to + 5 * w), store(s6, to + 6 * w), store(s7, to + 7 * w);
  }
  return i;
}

/// The elements from `i` to `n`, one by one.
template <Element T>
void sum_elements(std::span<const T* const> sources, std::size_t i, std::size_t n,
                  T* out) noexcept {
  for (; i < n; ++i) {
    arithmetic_t<T> sum = load_element(sources[0][i]);
    for (std::size_t r = 1; r < sources.size(); ++r) sum += load_element(sources[r][i]);
    out[i] = round_to<T, Rounding::nearest>(sum);
  }
}

#if ZERO_VECTOR_TYPES

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wpsabi"

template <class X, bool streamed, Element T>
[[gnu::always_inline]] inline void store_sum(const X& sum, T* to) {
  if constexpr (streamed) {
#if ZERO_SSE2
    alignas(32) T stored[X::width];
    store_sum<X, false>(sum, stored);
    for (std::size_t i = 0; i < sizeof stored / 16; ++i) {
      _mm_stream_si128(reinterpret_cast<__m128i*>(to) + i,
                       _mm_load_si128(reinterpret_cast<const __m128i*>(stored) + i));
    }
#endif
  } else {
    store_pack(sum, to);
  }
}

/// Whole blocks of sums of 16-bit elements; returns where it stopped.
/// @tparam streamed past the caches; `out` lies on 16 bytes
template <class X, bool streamed, Element T>
[[gnu::always_inline]] inline std::size_t sum_packed_blocks(std::span<const T* const> sources,
                                                            std::size_t i, std::size_t n, T* out) {
  constexpr std::size_t w = X::width;
  constexpr std::size_t block = 4 * w;  // a cache line of each source
  // As above: every source is read before the block is written.
  for (; n - i >= block; i += block) {
    const T* x = sources[0] + i;
    X s0 = load_pack<X>(x), s1 = load_pack<X>(x + w);
    X s2 = load_pack<X>(x + 2 * w), s3 = load_pack<X>(x + 3 * w);
    for (std::size_t r = 1; r < sources.size(); ++r) {
      x = sources[r] + i;
      s0 += load_pack<X>(x), s1 += load_pack<X>(x + w);
      s2 += load_pack<X>(x + 2 * w), s3 += load_pack<X>(x + 3 * w);
    }
    T* to = out + i;
    store_sum<X, streamed>(s0, to), store_sum<X, streamed>(s1, to + w);
    store_sum<X, streamed>(s2, to + 2 * w), store_sum<X, streamed>(s3, to + 3 * w);
  }
  return i;
}

template <class X, bool streamed, Element T>
[[gnu::flatten, gnu::noinline]] std::size_t sum_packed_baseline(std::span<const T* const> sources,
                                                                std::size_t i, std::size_t n,
                                                                T* out) noexcept {
  return sum_packed_blocks<X, streamed>(sources, i, n, out);
}

#if ZERO_AVX2_CLONES
template <class X, bool streamed, Element T>
[[gnu::target("avx2"), gnu::flatten, gnu::noinline]] std::size_t sum_packed_avx2(
    std::span<const T* const> sources, std::size_t i, std::size_t n, T* out) noexcept {
  return sum_packed_blocks<typename X::InAvx, streamed>(sources, i, n, out);
}
#endif

/// The sums of 16-bit elements from `i` on, as far as they fill blocks; returns where it stopped.
template <bool streamed, class X = Pack<float>, Element T>
std::size_t sum_packed(std::span<const T* const> sources, std::size_t i, std::size_t n,
                       T* out) noexcept {
#if ZERO_AVX2_CLONES
  if (__builtin_cpu_supports("avx2")) {
    return sum_packed_avx2<X, streamed, T>(sources, i, n, out);
  }
#endif
  return sum_packed_baseline<X, streamed, T>(sources, i, n, out);
}

#pragma GCC diagnostic pop

#endif

/// Sums of elements that are computed in another type.
template <Element T>
void sum_converted(std::span<const T* const> sources, std::size_t n, T* out) noexcept {
#if ZERO_VECTOR_TYPES
  if constexpr (is_16_bit<T>) {
    std::size_t done = 0;
#if ZERO_SSE2
    if (n * sizeof(T) >= streamed_bytes &&
        std::find(sources.begin(), sources.end(), out) == sources.end()) {
      done = unaligned_elements(out, n);
      sum_elements(sources, 0, done, out);
      done = sum_packed<true>(sources, done, n, out);
      _mm_sfence();
    }
#endif
    done = sum_packed<false>(sources, done, n, out);
    return sum_elements(sources, done, n, out);
  }
#endif
  constexpr std::size_t block = 1024;
  arithmetic_t<T> sums[block];
  for (std::size_t i = 0; i < n; i += block) {
    const std::size_t count = std::min(block, n - i);
    for (std::size_t j = 0; j < count; ++j) sums[j] = load_element(sources[0][i + j]);
    for (std::size_t r = 1; r < sources.size(); ++r) {
      const T* x = sources[r] + i;
      for (std::size_t j = 0; j < count; ++j) sums[j] += load_element(x[j]);
    }
    for (std::size_t j = 0; j < count; ++j) out[i + j] = round_to<T, Rounding::nearest>(sums[j]);
  }
}

/// `out[i] = ((sources[0][i] + sources[1][i]) + sources[2][i]) + …` in `arithmetic_t<T>`, rounded
/// to `T` once, to nearest. There is at least one source. `out` is disjoint from every source or is
/// exactly one of them. The bits don't depend on `n`, on alignment, or on how a caller cuts a
/// longer array.
template <Element T>
void sum_in_rank_order(std::span<const T* const> sources, std::size_t n, T* out) noexcept {
  if constexpr (SumVector<T>::available && std::is_same_v<T, arithmetic_t<T>>) {
    using V = typename SumVector<T>::type;
    const auto sum_until = [&](std::size_t i, std::size_t end) {
      for (; i < end; ++i) {
        T sum = sources[0][i];
        for (std::size_t r = 1; r < sources.size(); ++r) sum += sources[r][i];
        out[i] = sum;
      }
    };
    std::size_t done = 0;
#if ZERO_SSE2
    if (n * sizeof(T) >= streamed_bytes &&
        std::find(sources.begin(), sources.end(), out) == sources.end()) {
      done = unaligned_elements(out, n);
      sum_until(0, done);
      done = sum_blocks<V>(sources, done, n, out, [](const V& vector, T* to) {
        _mm_stream_si128(reinterpret_cast<__m128i*>(to), (__m128i)vector);
      });
      _mm_sfence();
    }
#endif
    done = sum_blocks<V>(sources, done, n, out,
                         [](const V& vector, T* to) { store_vector(vector, to); });
    sum_until(done, n);
  } else {
    sum_converted(sources, n, out);
  }
}

}  // namespace zero::detail
