// SPDX-License-Identifier: Apache-2.0
/// @file
/// bfloat16: the upper half of an IEEE 754 binary32.
#pragma once

#include <cstdint>
#include <string_view>

#include "zero/config.hpp"
#include "zero/element.hpp"

namespace zero {

namespace detail {

/// The value of a bfloat16; exact. A signalling NaN stays one.
ZERO_HOST_DEVICE constexpr float bfloat16_value(std::uint16_t bits) noexcept {
  return __builtin_bit_cast(float, static_cast<std::uint32_t>(bits) << 16);
}

/// The nearest bfloat16, of two equally near the even one; from half a step past the largest finite
/// one (2^128 - 2^119) on infinity. NaN becomes the quiet NaN of all bits set, which costs packs
/// one instruction. In integers alone, so that it depends on no floating-point mode.
ZERO_HOST_DEVICE constexpr std::uint16_t nearest_bfloat16(float x) noexcept {
  const auto bits = __builtin_bit_cast(std::uint32_t, x);
  if ((bits & 0x7fffffffU) > 0x7f800000U) return 0xffffU;
  // A carry out of the mantissa is what the next exponent, and at last infinity, needs.
  return static_cast<std::uint16_t>((bits + 0x7fffU + (bits >> 16 & 1U)) >> 16);
}

}  // namespace detail

/// A bfloat16 in memory: 1 sign bit, 8 of exponent, 7 of mantissa. It has no arithmetic of its own:
/// that's done in `float`.
struct bfloat16 {  // NOLINT(readability-identifier-naming): named as the built-in types are
  std::uint16_t bits;

  bfloat16() = default;
  /// Rounds to nearest, ties to even; NaN stays NaN.
  ZERO_HOST_DEVICE explicit constexpr bfloat16(float x) noexcept
      : bits(detail::nearest_bfloat16(x)) {}
  ZERO_HOST_DEVICE explicit constexpr operator float() const noexcept {
    return detail::bfloat16_value(bits);
  }

  ZERO_HOST_DEVICE static constexpr bfloat16 from_bits(std::uint16_t bits) noexcept {
    return __builtin_bit_cast(bfloat16, bits);
  }

  /// Of values, not of bits: zeros are equal and a NaN equals nothing.
  ZERO_HOST_DEVICE friend constexpr bool operator==(bfloat16 a, bfloat16 b) noexcept {
    return static_cast<float>(a) == static_cast<float>(b);
  }
};

template <>
struct element_traits<bfloat16> {
  static constexpr ElementType type = ElementType::bfloat16;
  static constexpr std::string_view name = "bfloat16";
  using arithmetic = float;
  ZERO_HOST_DEVICE static constexpr float load(bfloat16 x) noexcept {
    return static_cast<float>(x);
  }
  ZERO_HOST_DEVICE static constexpr bfloat16 store(float x) noexcept { return bfloat16(x); }
};

static_assert(Element<bfloat16> && detail::is_16_bit<bfloat16>);
static_assert(std::is_trivially_default_constructible_v<bfloat16>);

}  // namespace zero
