// SPDX-License-Identifier: Apache-2.0
/// @file
/// `rounding.hpp` on packs: 16-bit elements to packs of floats and back, with the bits of the
/// scalar functions in every lane.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "zero/config.hpp"
#include "zero/detail/pack.hpp"
#include "zero/detail/rounding.hpp"
#include "zero/element.hpp"
#include "zero/rounding.hpp"

#if ZERO_SSE2
#include <emmintrin.h>
#endif

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wpsabi"

namespace zero::detail {

#if ZERO_VECTOR_TYPES

/// Eight 16-bit elements.
using Packed16 = typename VectorOf<std::uint16_t, 16>::type;

#if ZERO_SSE2

enum class AvxConversion : std::uint8_t { broadcast, widen, narrow, from_float16, to_float16 };

/// Single instructions that g++ 12 replaces by several 16-byte ones when the code around them was
/// written outside an AVX2 function. Those for float16 are F16C's, which every processor with AVX2
/// has; they take rounding and subnormal numbers as IEEE 754 does, whatever the floating-point
/// mode. By reference, as `sqrt_avx`.
template <AvxConversion conversion, class From, class To>
#if ZERO_AVX2_CLONES
[[gnu::target("avx2")]]
#endif
inline void convert_avx(const From& from, To& to) {
  if constexpr (conversion == AvxConversion::broadcast) {
    asm("vpbroadcastd {%1, %0|%0, %1}" : "=x"(to) : "x"(from));
  } else if constexpr (conversion == AvxConversion::widen) {
    asm("vpmovzxwd {%1, %0|%0, %1}" : "=x"(to) : "x"(from));
  } else if constexpr (conversion == AvxConversion::narrow) {
    To high;
    asm("vextracti128 {$1, %1, %0|%0, %1, 1}" : "=x"(high) : "x"(from));
    const auto low = __builtin_shufflevector(from, from, 0, 1, 2, 3);
    to = (To)_mm_packs_epi32((__m128i)low, (__m128i)high);
  } else if constexpr (conversion == AvxConversion::from_float16) {
    asm("vcvtph2ps {%1, %0|%0, %1}" : "=x"(to) : "x"(from));
  } else {
    asm("vcvtps2ph {$0, %1, %0|%0, %1, 0}" : "=x"(to) : "x"(from));
  }
}

#endif

/// The conversions on vectors of `bytes / 4` lanes, which hold 16-bit elements in their lower
/// halves. Without branches: where the scalar functions decide, these take both ways and pick by
/// masks, in integers, since `?:` on vectors wider than the registers is compiled lane by lane.
/// Vectors go in and come out by reference: how they'd be passed depends on the instruction set.
template <std::size_t bytes>
struct WideConversion {
  using Float = typename VectorOf<float, bytes>::type;
  using Signed = typename VectorOf<std::int32_t, bytes>::type;  // for comparing and sign extension
  using Unsigned = typename VectorOf<std::uint32_t, bytes>::type;

  /// All lanes alike; through 16 bytes, as in `VectorPack`.
  [[gnu::always_inline]] static void broadcast(std::uint32_t x, Unsigned& all) {
    const typename VectorOf<std::uint32_t, 16>::type four{x, x, x, x};
    if constexpr (bytes == 16) {
      all = four;
#if ZERO_SSE2
    } else if constexpr (bytes == 32) {
      convert_avx<AvxConversion::broadcast>(_mm_cvtsi32_si128(static_cast<int>(x)), all);
#endif
    } else {
      all = __builtin_shufflevector(four, four, 0, 1, 2, 3, 0, 1, 2, 3);
    }
  }

  [[gnu::always_inline]] static void number_lanes(Unsigned& numbers) {
    if constexpr (bytes == 16) {
      numbers = Unsigned{0, 1, 2, 3};
    } else {
      numbers = Unsigned{0, 1, 2, 3, 4, 5, 6, 7};
    }
  }

  /// All bits set in lanes that are greater than `limit`; both are less than 2^31.
  [[gnu::always_inline]] static void is_greater(const Unsigned& lanes, std::int32_t limit,
                                                Unsigned& mask) {
    mask = (Unsigned)((Signed)lanes > limit);
  }

  [[gnu::always_inline]] static void pick(const Unsigned& mask, const Unsigned& yes,
                                          const Unsigned& no, Unsigned& out) {
    out = (yes & mask) | (no & ~mask);
  }

  /// @param stored zero-extended 16-bit elements
  template <ElementType type>
  [[gnu::always_inline]] static void load(const Unsigned& stored, Float& values) {
    if constexpr (type == ElementType::bfloat16) {
      values = (Float)(stored << 16);
    } else {
      const Unsigned magnitude = stored & 0x7fffU;
      const Unsigned sign = (stored ^ magnitude) << 16;
      const auto small = (Unsigned)(__builtin_convertvector((Signed)magnitude, Float) * 0x1p-24F);
      Unsigned is_normal, is_special, is_nan, value;
      is_greater(magnitude, 0x3ff, is_normal);
      is_greater(magnitude, 0x7bff, is_special);
      is_greater(magnitude, 0x7c00, is_nan);
      const Unsigned large = (magnitude << 13) + (112U << 23) + (is_special & (112U << 23));
      pick(is_normal, large, small, value);
      values = (Float)(value | sign | (is_nan & 0x400000U));
    }
  }

  /// @param noise16 for stochastic rounding, less than 2^16 in each lane
  /// @param rounded sign-extended 16-bit elements
  template <ElementType type, Rounding rounding>
  [[gnu::always_inline]] static void store(const Float& values, const Unsigned& noise16,
                                           Unsigned& rounded) {
    const auto bits = (Unsigned)values;
    if constexpr (type == ElementType::bfloat16) {
      Unsigned added;
      if constexpr (rounding == Rounding::nearest) {
        added = (bits >> 16 & 1U) + 0x7fffU;
      } else {
        added = noise16;
      }
      // Comparing, and setting all bits of a NaN: any other way takes twice as many instructions.
      rounded = (Unsigned)((Signed)(bits + added) >> 16) | (Unsigned)(values != values);
    } else {
      const Unsigned magnitude = bits & 0x7fffffffU;
      Unsigned is_nan;
      is_greater(magnitude, 0x7f800000, is_nan);
      const auto sign = (Unsigned)((Signed)(bits ^ magnitude) >> 16);
      Unsigned is_normal, is_infinite, large, small, result;
      is_greater(magnitude, 0x387fffff, is_normal);
      if constexpr (rounding == Rounding::nearest) {
        large = (magnitude - (112U << 23) + 0xfffU + (magnitude >> 13 & 1U)) >> 13;
        small = (Unsigned)((Float)magnitude + 0.5F) - 0x3f000000U;
      } else {
        large = (magnitude - (112U << 23) + (noise16 >> 3)) >> 13;
        // Other lanes may not fit into integers.
        const Float scaled = (Float)(magnitude & ~is_normal) * 0x1p40F;
        small = ((Unsigned) __builtin_convertvector(scaled, Signed) + noise16) >> 16;
      }
      is_greater(large, 0x7c00, is_infinite);
      large = (large & ~is_infinite) | (is_infinite & 0x7c00U);
      pick(is_normal, large, small, result);
      pick(is_nan, (magnitude >> 13 & 0x3ffU) | 0x7e00U, result, result);
      rounded = result | sign;
    }
  }

  /// `noise_bits` of elements `first`, `first` + 1, …
  template <unsigned quantity>
  [[gnu::always_inline]] static void noise(NoiseKey key, std::uint32_t first, Unsigned& noise16) {
    const NoiseKey keys = stream_key(key, quantity / 2);
    Unsigned x, numbers, middle;
    broadcast(first + keys.a, x);
    number_lanes(numbers);
    broadcast(keys.b, middle);
    x += numbers;
    x = (x ^ x >> 16) * noise_factor_1;
    x = (x ^ x >> 13 ^ middle) * noise_factor_2;
    x ^= x >> 16;
    noise16 = quantity % 2 == 0 ? x & 0xffffU : x >> 16;
  }
};

/// Whether 32-byte vectors exist where `X` is computed on, or are two of 16 bytes.
template <class X>
inline constexpr bool has_wide_vectors = !ZERO_SSE2 || std::is_same_v<X, typename X::InAvx>;

/// The noise of a pack of elements. It is computed where it's used; two quantities that share a
/// stream share the computation.
template <class X>
struct PackNoise {
  NoiseKey key;
  std::uint32_t first;  ///< the first lane's element; numbers wrap at 2^32
};

template <ElementType type, class X>
[[gnu::always_inline]] inline void load_packed(const Packed16& stored, X& x) {
#if ZERO_SSE2
  if constexpr (!has_wide_vectors<X>) {
    using Half = WideConversion<16>;
    const __m128i zero_bits = _mm_setzero_si128();
    const auto low = (typename Half::Unsigned)_mm_unpacklo_epi16((__m128i)stored, zero_bits);
    const auto high = (typename Half::Unsigned)_mm_unpackhi_epi16((__m128i)stored, zero_bits);
    typename Half::Float low_values, high_values;
    Half::template load<type>(low, low_values);
    Half::template load<type>(high, high_values);
    // Through memory: g++ 12 joins them lane by lane otherwise. What reads them reads halves again.
    std::memcpy(&x.lanes, &low_values, 16);
    std::memcpy(reinterpret_cast<char*>(&x.lanes) + 16, &high_values, 16);
  } else if constexpr (type == ElementType::float16) {
    convert_avx<AvxConversion::from_float16>(stored, x.lanes);
  } else {
    using Wide = WideConversion<32>;
    typename Wide::Unsigned wide;
    convert_avx<AvxConversion::widen>(stored, wide);
    Wide::template load<type>(wide, x.lanes);
  }
#else
  using Wide = WideConversion<32>;
  Wide::template load<type>(__builtin_convertvector(stored, typename Wide::Unsigned), x.lanes);
#endif
}

template <ElementType type, Rounding rounding, unsigned quantity, class X>
[[gnu::always_inline]] inline void round_packed(const X& x, const PackNoise<X>& noise,
                                                Packed16& rounded) {
  constexpr bool noisy = rounding == Rounding::stochastic;
#if ZERO_SSE2
  if constexpr (!has_wide_vectors<X>) {
    using Half = WideConversion<16>;
    const typename Half::Float low = __builtin_shufflevector(x.lanes, x.lanes, 0, 1, 2, 3);
    const typename Half::Float high = __builtin_shufflevector(x.lanes, x.lanes, 4, 5, 6, 7);
    typename Half::Unsigned low_noise{}, high_noise{}, low_bits, high_bits;
    if constexpr (noisy) {
      Half::template noise<quantity>(noise.key, noise.first, low_noise);
      Half::template noise<quantity>(noise.key, noise.first + 4, high_noise);
    }
    Half::template store<type, rounding>(low, low_noise, low_bits);
    Half::template store<type, rounding>(high, high_noise, high_bits);
    rounded = (Packed16)_mm_packs_epi32((__m128i)low_bits, (__m128i)high_bits);
    return;
  } else if constexpr (type == ElementType::float16 && !noisy) {
    convert_avx<AvxConversion::to_float16>(x.lanes, rounded);
    return;
  }
#endif
  if constexpr (has_wide_vectors<X>) {
    using Wide = WideConversion<32>;
    typename Wide::Unsigned noise16{}, wide;
    if constexpr (noisy) Wide::template noise<quantity>(noise.key, noise.first, noise16);
    Wide::template store<type, rounding>(x.lanes, noise16, wide);
#if ZERO_SSE2
    convert_avx<AvxConversion::narrow>(wide, rounded);
#else
    rounded = __builtin_convertvector(wide, Packed16);
#endif
  }
}

#else

template <class X>
struct PackNoise {
  NoiseKey key;
  std::uint32_t first;
};

#endif

/// The values of `X::width` elements: of the pack's own type, or of 16 bits.
template <class X, Element T>
[[gnu::always_inline]] inline X load_pack(const T* from) {
  if constexpr (std::is_same_v<T, typename X::value_type>) {
    return X::load(from);
  } else {
    static_assert(is_16_bit<T> && std::is_same_v<typename X::value_type, float> && X::width == 8);
    X x;
#if ZERO_VECTOR_TYPES
    Packed16 stored;
    std::memcpy(&stored, from, sizeof stored);
    load_packed<element_traits<T>::type>(stored, x);
#else
    for (std::size_t i = 0; i < X::width; ++i) x.lanes[i] = load_element(from[i]);
#endif
    return x;
  }
}

/// Rounds a pack to `X::width` elements. The pack's own type is stored as it is.
/// @tparam quantity which of an element's roundings it is, as in `noise_bits`
template <Rounding rounding, unsigned quantity, class X, Element T>
[[gnu::always_inline]] inline void store_pack(const X& x, T* to, const PackNoise<X>& noise) {
  if constexpr (std::is_same_v<T, typename X::value_type>) {
    x.store(to);
  } else {
    static_assert(is_16_bit<T> && std::is_same_v<typename X::value_type, float> && X::width == 8);
#if ZERO_VECTOR_TYPES
    Packed16 rounded;
    round_packed<element_traits<T>::type, rounding, quantity>(x, noise, rounded);
    std::memcpy(static_cast<void*>(to), &rounded, sizeof rounded);
#else
    for (std::uint32_t i = 0; i < X::width; ++i) {
      to[i] = round_to<T, rounding>(x.lanes[i], noise_bits(noise.key, noise.first + i, quantity));
    }
#endif
  }
}

/// The same, to nearest.
template <class X, Element T>
[[gnu::always_inline]] inline void store_pack(const X& x, T* to) {
  store_pack<Rounding::nearest, 0>(x, to, PackNoise<X>{});
}

}  // namespace zero::detail

#pragma GCC diagnostic pop
