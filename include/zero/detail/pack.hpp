// SPDX-License-Identifier: Apache-2.0
/// @file
/// A pack of numbers that update rules' generic arithmetic runs over on the host. With a compiler
/// vector type it vectorises under any flags; every lane has the bits of the scalar operation.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "zero/config.hpp"

#if ZERO_SSE2
#include <emmintrin.h>
#endif

// Packs are wider than the baseline's registers. They never cross a real call (everything here is
// inlined into the update loop), so how one would be passed between functions does not matter.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wpsabi"

namespace zero::detail {

template <class T>
using MaskLane = std::conditional_t<sizeof(T) == 4, std::int32_t, std::int64_t>;

#if ZERO_VECTOR_TYPES

template <class T, std::size_t bytes>
struct VectorOf {
  typedef T type __attribute__((vector_size(bytes)));
};

/// What comparing two packs gives; for `select`.
template <class T, std::size_t bytes>
struct VectorMask {
  typename VectorOf<MaskLane<T>, bytes>::type lanes;
};

#if ZERO_SSE2

/// The roots of a 32-byte vector, in one instruction instead of two that take as long each. By
/// reference, since how such vectors are returned depends on the instruction set.
template <class T, class Vector>
#if ZERO_AVX2_CLONES
[[gnu::target("avx2")]]
#endif
inline void sqrt_avx(const Vector& x, Vector& root) {
  if constexpr (std::is_same_v<T, float>) {
    asm("vsqrtps {%1, %0|%0, %1}" : "=x"(root) : "x"(x));
  } else {
    asm("vsqrtpd {%1, %0|%0, %1}" : "=x"(root) : "x"(x));
  }
}

#endif

/// `bytes / sizeof(T)` numbers that are computed on together.
/// @tparam avx whether only functions that may use AVX compute on them: all functions, or clones
template <class T, std::size_t bytes = 32, bool avx = (ZERO_SSE2 && !ZERO_AVX2_CLONES)>
struct VectorPack {
  using InAvx = VectorPack<T, bytes, true>;
  static constexpr std::size_t width = bytes / sizeof(T);
  using value_type = T;
  using Mask = VectorMask<T, bytes>;
  using Vector = typename VectorOf<T, bytes>::type;
  Vector lanes;

  VectorPack() = default;
  [[gnu::always_inline]] VectorPack(const Vector& vector) : lanes(vector) {}  // NOLINT: implicit
  /// All lanes alike: lets a rule mix packs with its scalars.
  [[gnu::always_inline]] VectorPack(T scalar) {  // NOLINT: implicit
    // Through a 16-byte register: g++ 12 builds a wider one lane by lane, in every iteration.
    if constexpr (sizeof(T) == 4) {
      const typename VectorOf<T, 16>::type four{scalar, scalar, scalar, scalar};
      lanes = __builtin_shufflevector(four, four, 0, 1, 2, 3, 0, 1, 2, 3);
    } else {
      const typename VectorOf<T, 16>::type two{scalar, scalar};
      lanes = __builtin_shufflevector(two, two, 0, 1, 0, 1);
    }
  }

  [[gnu::always_inline]] static VectorPack load(const T* from) {
    VectorPack pack;
    std::memcpy(&pack.lanes, from, sizeof pack.lanes);
    return pack;
  }
  [[gnu::always_inline]] void store(T* to) const { std::memcpy(to, &lanes, sizeof lanes); }

  [[gnu::always_inline]] friend VectorPack operator+(const VectorPack& a, const VectorPack& b) {
    return a.lanes + b.lanes;
  }
  [[gnu::always_inline]] friend VectorPack operator-(const VectorPack& a, const VectorPack& b) {
    return a.lanes - b.lanes;
  }
  [[gnu::always_inline]] friend VectorPack operator*(const VectorPack& a, const VectorPack& b) {
    return a.lanes * b.lanes;
  }
  [[gnu::always_inline]] friend VectorPack operator/(const VectorPack& a, const VectorPack& b) {
    return a.lanes / b.lanes;
  }
  [[gnu::always_inline]] friend VectorPack operator-(const VectorPack& a) { return -a.lanes; }
  [[gnu::always_inline]] VectorPack& operator+=(const VectorPack& b) { return *this = *this + b; }
  [[gnu::always_inline]] VectorPack& operator-=(const VectorPack& b) { return *this = *this - b; }
  [[gnu::always_inline]] VectorPack& operator*=(const VectorPack& b) { return *this = *this * b; }
  [[gnu::always_inline]] VectorPack& operator/=(const VectorPack& b) { return *this = *this / b; }

  [[gnu::always_inline]] friend Mask operator<(const VectorPack& a, const VectorPack& b) {
    return {a.lanes < b.lanes};
  }
  [[gnu::always_inline]] friend Mask operator>(const VectorPack& a, const VectorPack& b) {
    return {a.lanes > b.lanes};
  }
  [[gnu::always_inline]] friend Mask operator<=(const VectorPack& a, const VectorPack& b) {
    return {a.lanes <= b.lanes};
  }
  [[gnu::always_inline]] friend Mask operator>=(const VectorPack& a, const VectorPack& b) {
    return {a.lanes >= b.lanes};
  }
  [[gnu::always_inline]] friend Mask operator==(const VectorPack& a, const VectorPack& b) {
    return {a.lanes == b.lanes};
  }
  [[gnu::always_inline]] friend Mask operator!=(const VectorPack& a, const VectorPack& b) {
    return {a.lanes != b.lanes};
  }

  [[gnu::always_inline]] friend VectorPack select(const Mask& mask, const VectorPack& yes,
                                                  const VectorPack& no) {
    return mask.lanes ? yes.lanes : no.lanes;
  }

  [[gnu::always_inline]] friend VectorPack sqrt(const VectorPack& x) {
#if ZERO_SSE2
    // Without AVX in 16-byte halves, which every x86-64 has; through registers, since a load that
    // spans two recent stores stalls.
    if constexpr (avx) {
      VectorPack root;
      sqrt_avx<T>(x.lanes, root.lanes);
      return root;
    } else if constexpr (std::is_same_v<T, float>) {
      const __m128 low = _mm_sqrt_ps((__m128)__builtin_shufflevector(x.lanes, x.lanes, 0, 1, 2, 3));
      const __m128 high =
          _mm_sqrt_ps((__m128)__builtin_shufflevector(x.lanes, x.lanes, 4, 5, 6, 7));
      return Vector(__builtin_shufflevector(low, high, 0, 1, 2, 3, 4, 5, 6, 7));
    } else {
      const __m128d low = _mm_sqrt_pd((__m128d)__builtin_shufflevector(x.lanes, x.lanes, 0, 1));
      const __m128d high = _mm_sqrt_pd((__m128d)__builtin_shufflevector(x.lanes, x.lanes, 2, 3));
      return Vector(__builtin_shufflevector(low, high, 0, 1, 2, 3));
    }
#else
    VectorPack root;
    for (std::size_t i = 0; i < width; ++i) {
      if constexpr (std::is_same_v<T, float>) {
        root.lanes[i] = __builtin_sqrtf(x.lanes[i]);
      } else {
        root.lanes[i] = __builtin_sqrt(x.lanes[i]);
      }
    }
    return root;
#endif
  }
};

template <class T>
using Pack = VectorPack<T, 32>;

#else

/// The same without vector types, which CUDA's compiler refuses in host-and-device functions.
/// Another name than `VectorPack`, so that both may meet in one program.
template <class T, std::size_t bytes>
struct ArrayMask {
  bool lanes[bytes / sizeof(T)];
};

template <class T, std::size_t bytes = 32>
struct ArrayPack {
  static constexpr std::size_t width = bytes / sizeof(T);
  using value_type = T;
  using Mask = ArrayMask<T, bytes>;
  T lanes[width];

  ArrayPack() = default;
  ZERO_HOST_DEVICE ArrayPack(T scalar) {  // NOLINT: implicit
    for (auto& lane : lanes) lane = scalar;
  }
  ZERO_HOST_DEVICE static ArrayPack load(const T* from) {
    ArrayPack pack;
    for (std::size_t i = 0; i < width; ++i) pack.lanes[i] = from[i];
    return pack;
  }
  ZERO_HOST_DEVICE void store(T* to) const {
    for (std::size_t i = 0; i < width; ++i) to[i] = lanes[i];
  }

#define ZERO_PACK_OPERATOR(result, op)                                                 \
  ZERO_HOST_DEVICE friend result operator op(const ArrayPack& a, const ArrayPack& b) { \
    result out;                                                                        \
    for (std::size_t i = 0; i < width; ++i) out.lanes[i] = a.lanes[i] op b.lanes[i];   \
    return out;                                                                        \
  }
  ZERO_PACK_OPERATOR(ArrayPack, +)
  ZERO_PACK_OPERATOR(ArrayPack, -)
  ZERO_PACK_OPERATOR(ArrayPack, *)
  ZERO_PACK_OPERATOR(ArrayPack, /)
  ZERO_PACK_OPERATOR(Mask, <)
  ZERO_PACK_OPERATOR(Mask, >)
  ZERO_PACK_OPERATOR(Mask, <=)
  ZERO_PACK_OPERATOR(Mask, >=)
  ZERO_PACK_OPERATOR(Mask, ==)
  ZERO_PACK_OPERATOR(Mask, !=)
#undef ZERO_PACK_OPERATOR

  ZERO_HOST_DEVICE ArrayPack& operator+=(const ArrayPack& b) { return *this = *this + b; }
  ZERO_HOST_DEVICE ArrayPack& operator-=(const ArrayPack& b) { return *this = *this - b; }
  ZERO_HOST_DEVICE ArrayPack& operator*=(const ArrayPack& b) { return *this = *this * b; }
  ZERO_HOST_DEVICE ArrayPack& operator/=(const ArrayPack& b) { return *this = *this / b; }
  ZERO_HOST_DEVICE friend ArrayPack operator-(const ArrayPack& a) {
    ArrayPack out;
    for (std::size_t i = 0; i < width; ++i) out.lanes[i] = -a.lanes[i];
    return out;
  }
  ZERO_HOST_DEVICE friend ArrayPack select(const Mask& mask, const ArrayPack& yes,
                                           const ArrayPack& no) {
    ArrayPack out;
    for (std::size_t i = 0; i < width; ++i)
      out.lanes[i] = mask.lanes[i] ? yes.lanes[i] : no.lanes[i];
    return out;
  }
  ZERO_HOST_DEVICE friend ArrayPack sqrt(const ArrayPack& x) {
    ArrayPack out;
    for (std::size_t i = 0; i < width; ++i) {
      if constexpr (std::is_same_v<T, float>) {
        out.lanes[i] = ::sqrtf(x.lanes[i]);
      } else {
        out.lanes[i] = ::sqrt(x.lanes[i]);
      }
    }
    return out;
  }
};

template <class T>
using Pack = ArrayPack<T, 32>;

#endif

}  // namespace zero::detail

#pragma GCC diagnostic pop
