// SPDX-License-Identifier: Apache-2.0
/// @file
/// float16: IEEE 754 binary16.
#pragma once

#include <cstdint>
#include <string_view>

#include "zero/config.hpp"
#include "zero/element.hpp"

namespace zero {

namespace detail {

/// The value of a binary16; exact. NaN stays NaN and becomes quiet, as F16C's instruction has it.
ZERO_HOST_DEVICE constexpr float float16_value(std::uint16_t bits) noexcept {
  const std::uint32_t magnitude = bits & 0x7fffU;
  const std::uint32_t sign = (bits & 0x8000U) << 16;
  std::uint32_t value = 0;
  if (magnitude < 0x400U) {
    // Subnormal: a multiple of 2^-24, which is normal as a float, so flushing subnormals to zero
    // does it no harm.
    value = __builtin_bit_cast(std::uint32_t,
                               static_cast<float>(static_cast<std::int32_t>(magnitude)) * 0x1p-24F);
  } else {
    // The exponents' biases are 15 and 127; 31 means infinity or NaN, as 255 does.
    value = (magnitude << 13) + (112U << 23) + (magnitude < 0x7c00U ? 0U : 112U << 23);
    if (magnitude > 0x7c00U) value |= 0x400000U;
  }
  return __builtin_bit_cast(float, value | sign);
}

/// The nearest binary16, of two equally near the even one; from 65520 on infinity. NaN stays NaN
/// and becomes quiet. Subnormal floats are nearest to 0 with or without their being flushed to it.
ZERO_HOST_DEVICE constexpr std::uint16_t nearest_float16(float x) noexcept {
  const auto bits = __builtin_bit_cast(std::uint32_t, x);
  const std::uint32_t magnitude = bits & 0x7fffffffU;
  const std::uint32_t sign = bits >> 16 & 0x8000U;
  std::uint32_t rounded = 0;
  if (magnitude > 0x7f800000U) {
    rounded = 0x7e00U | (magnitude >> 13 & 0x3ffU);
  } else if (magnitude >= 0x38800000U) {  // 2^-14, the smallest normal number
    rounded = (magnitude - (112U << 23) + 0xfffU + (magnitude >> 13 & 1U)) >> 13;
    if (rounded > 0x7c00U) rounded = 0x7c00U;
  } else {
    // Between 1/2 and 1 floats are multiples of 2^-24, as subnormal halves are: the sum is rounded
    // to those.
    rounded = __builtin_bit_cast(std::uint32_t, __builtin_bit_cast(float, magnitude) + 0.5F) -
              0x3f000000U;
  }
  return static_cast<std::uint16_t>(rounded | sign);
}

}  // namespace detail

/// An IEEE 754 binary16 in memory: 1 sign bit, 5 of exponent, 10 of mantissa. It has no arithmetic
/// of its own: that's done in `float`.
struct float16 {  // NOLINT(readability-identifier-naming): named as the built-in types are
  std::uint16_t bits;

  float16() = default;
  /// Rounds to nearest, ties to even; infinity from 65520 on; NaN stays NaN.
  ZERO_HOST_DEVICE explicit constexpr float16(float x) noexcept
      : bits(detail::nearest_float16(x)) {}
  ZERO_HOST_DEVICE explicit constexpr operator float() const noexcept {
    return detail::float16_value(bits);
  }

  ZERO_HOST_DEVICE static constexpr float16 from_bits(std::uint16_t bits) noexcept {
    return __builtin_bit_cast(float16, bits);
  }

  /// Of values, not of bits: zeros are equal and a NaN equals nothing.
  ZERO_HOST_DEVICE friend constexpr bool operator==(float16 a, float16 b) noexcept {
    return static_cast<float>(a) == static_cast<float>(b);
  }
};

template <>
struct element_traits<float16> {
  static constexpr ElementType type = ElementType::float16;
  static constexpr std::string_view name = "float16";
  using arithmetic = float;
  ZERO_HOST_DEVICE static constexpr float load(float16 x) noexcept { return static_cast<float>(x); }
  ZERO_HOST_DEVICE static constexpr float16 store(float x) noexcept { return float16(x); }
};

static_assert(Element<float16> && detail::is_16_bit<float16>);
static_assert(std::is_trivially_default_constructible_v<float16>);

}  // namespace zero
