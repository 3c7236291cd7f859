// SPDX-License-Identifier: Apache-2.0
/// @file
/// Rounding to 16-bit elements, and the noise that stochastic rounding draws from: one number at a
/// time, host and device. `convert.hpp` does the same, to the bit, for packs.
#pragma once

#include <cstdint>

#include "zero/bfloat16.hpp"
#include "zero/config.hpp"
#include "zero/element.hpp"
#include "zero/float16.hpp"
#include "zero/rounding.hpp"

namespace zero::detail {

/// What the noise of all elements of one parameter in one step has in common.
struct NoiseKey {
  std::uint32_t a, b;
};

/// A bijection after which every bit depends on every bit: the output function of SplitMix64
/// (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014).
ZERO_HOST_DEVICE constexpr std::uint64_t mix64(std::uint64_t x) noexcept {
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9U;
  x = (x ^ x >> 27) * 0x94d049bb133111ebU;
  return x ^ x >> 31;
}

ZERO_HOST_DEVICE constexpr NoiseKey noise_key(std::uint64_t seed, std::uint64_t step,
                                              std::uint64_t parameter) noexcept {
  constexpr std::uint64_t golden = 0x9e3779b97f4a7c15U;  // so that zeros don't stay zero
  std::uint64_t x = mix64(seed + golden);
  x = mix64((x ^ step) + golden);
  x = mix64((x ^ parameter) + golden);
  return {.a = static_cast<std::uint32_t>(x >> 32), .b = static_cast<std::uint32_t>(x)};
}

/// What stands in for `key` in stream number `stream`: another key, as of another parameter.
/// Sharing half of it between streams would save work, and correlate the streams of a few keys.
ZERO_HOST_DEVICE constexpr NoiseKey stream_key(NoiseKey key, std::uint32_t stream) noexcept {
  const std::uint64_t both = static_cast<std::uint64_t>(key.a) << 32 | key.b;
  const std::uint64_t x = mix64(both + 0x9e3779b97f4a7c15U * (stream + std::uint64_t{1}));
  return {.a = static_cast<std::uint32_t>(x >> 32), .b = static_cast<std::uint32_t>(x)};
}

/// The factors of MurmurHash3's 32-bit finalizer (https://github.com/aappleby/smhasher).
inline constexpr std::uint32_t noise_factor_1 = 0x85ebca6bU;
inline constexpr std::uint32_t noise_factor_2 = 0xc2b2ae35U;

/// 32 random bits, a function of its arguments: MurmurHash3's finalizer with a second key amid it,
/// without which two parameters would have one sequence from different places. (Measured: other
/// published factors leave elements at some distances correlated by up to 0.005.) Elements 2^32
/// apart have the same noise.
ZERO_HOST_DEVICE constexpr std::uint32_t noise(NoiseKey key, std::uint32_t element,
                                               std::uint32_t stream) noexcept {
  const NoiseKey keys = stream_key(key, stream);
  std::uint32_t x = element + keys.a;
  x = (x ^ x >> 16) * noise_factor_1;
  x = (x ^ x >> 13 ^ keys.b) * noise_factor_2;
  return x ^ x >> 16;
}

/// 16 random bits for an element's rounding number `quantity`: 0 is its value, 1 its first slot…
/// Two roundings share the bits of one stream.
ZERO_HOST_DEVICE constexpr std::uint32_t noise_bits(NoiseKey key, std::uint32_t element,
                                                    std::uint32_t quantity) noexcept {
  const std::uint32_t both = noise(key, element, quantity / 2);
  return quantity % 2 == 0 ? both & 0xffffU : both >> 16;
}

/// A bfloat16 around `x`, which is up by `noise16` / 2^16 of the distance between the two: the
/// upper one if that's past it. Infinity past the largest finite one with that same probability.
/// NaN becomes that of all bits set.
ZERO_HOST_DEVICE constexpr std::uint16_t stochastic_bfloat16(float x,
                                                             std::uint32_t noise16) noexcept {
  const auto bits = __builtin_bit_cast(std::uint32_t, x);
  if ((bits & 0x7fffffffU) > 0x7f800000U) return 0xffffU;
  return static_cast<std::uint16_t>((bits + noise16) >> 16);
}

/// The same for binary16, with infinity from 65536 on for certain. The probabilities are exact for
/// normal results (which drop 13 bits, so the noise's upper 13 are used), and for subnormal ones
/// cut to a multiple of 2^-16. Independent of whether subnormal floats count as 0.
ZERO_HOST_DEVICE constexpr std::uint16_t stochastic_float16(float x,
                                                            std::uint32_t noise16) noexcept {
  const auto bits = __builtin_bit_cast(std::uint32_t, x);
  const std::uint32_t magnitude = bits & 0x7fffffffU;
  const std::uint32_t sign = bits >> 16 & 0x8000U;
  std::uint32_t rounded = 0;
  if (magnitude > 0x7f800000U) {
    rounded = 0x7e00U | (magnitude >> 13 & 0x3ffU);
  } else if (magnitude >= 0x38800000U) {  // 2^-14, the smallest normal number
    rounded = (magnitude - (112U << 23) + (noise16 >> 3)) >> 13;
    if (rounded > 0x7c00U) rounded = 0x7c00U;
  } else {
    // Multiples of 2^-24, in integers with 16 binary places: in floats the sum with the noise would
    // be rounded, past the next multiple at worst.
    const auto fixed = static_cast<std::int32_t>(__builtin_bit_cast(float, magnitude) * 0x1p40F);
    rounded = (static_cast<std::uint32_t>(fixed) + noise16) >> 16;
  }
  return static_cast<std::uint16_t>(rounded | sign);
}

/// An element's value; for 16-bit elements by their bits.
template <Element T>
ZERO_HOST_DEVICE constexpr arithmetic_t<T> load_element(const T& stored) noexcept {
  if constexpr (!is_16_bit<T>) {
    return element_traits<T>::load(stored);
  } else if constexpr (element_traits<T>::type == ElementType::bfloat16) {
    return bfloat16_value(__builtin_bit_cast(std::uint16_t, stored));
  } else {
    return float16_value(__builtin_bit_cast(std::uint16_t, stored));
  }
}

/// `x` rounded to an element. Only stochastic rounding to 16 bits reads the noise.
/// @param noise16 less than 2^16, as `noise_bits` gives it
template <Element T, Rounding rounding>
ZERO_HOST_DEVICE constexpr T round_to(arithmetic_t<T> x,
                                      [[maybe_unused]] std::uint32_t noise16 = 0) noexcept {
  if constexpr (!is_16_bit<T>) {
    return element_traits<T>::store(x);
  } else if constexpr (element_traits<T>::type == ElementType::bfloat16) {
    return __builtin_bit_cast(
        T, rounding == Rounding::nearest ? nearest_bfloat16(x) : stochastic_bfloat16(x, noise16));
  } else {
    return __builtin_bit_cast(
        T, rounding == Rounding::nearest ? nearest_float16(x) : stochastic_float16(x, noise16));
  }
}

}  // namespace zero::detail
