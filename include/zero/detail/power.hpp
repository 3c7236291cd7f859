// SPDX-License-Identifier: Apache-2.0
/// @file
/// Integer powers with the same bits everywhere.
#pragma once

#include <cstdint>

#include "zero/config.hpp"

namespace zero {

namespace detail {

/// A positive number, mantissa * 2^exponent; the mantissa's highest bit is set.
struct Scaled {
  std::uint64_t mantissa;
  std::int64_t exponent;
};

/// The product, rounded to 64 bits. Exponents saturate far outside the range of `double`.
ZERO_HOST_DEVICE constexpr Scaled multiply(const Scaled& a, const Scaled& b) {
  constexpr std::uint64_t low_half = 0xffffffff;
  constexpr std::int64_t limit = 1 << 20;
  const std::uint64_t a1 = a.mantissa >> 32, a0 = a.mantissa & low_half;
  const std::uint64_t b1 = b.mantissa >> 32, b0 = b.mantissa & low_half;
  const std::uint64_t middle = (a0 * b0 >> 32) + (a0 * b1 & low_half) + (a1 * b0 & low_half);
  std::uint64_t high = a1 * b1 + (a0 * b1 >> 32) + (a1 * b0 >> 32) + (middle >> 32);
  std::uint64_t low = (middle << 32) | (a0 * b0 & low_half);
  std::int64_t exponent = a.exponent + b.exponent + 64;
  if (high >> 63 == 0) {
    high = (high << 1) | (low >> 63);
    low <<= 1;
    --exponent;
  }
  if (low >> 63 == 1 && ++high == 0) {
    high = std::uint64_t{1} << 63;
    ++exponent;
  }
  if (exponent > limit) exponent = limit;
  if (exponent < -limit) exponent = -limit;
  return {high, exponent};
}

}  // namespace detail

/// `base` to an integer power; the relative error before the last rounding is below
/// exponent * 2^-64. Adam's 1 - beta^t needs that: for small t it magnifies an error in the last
/// place of beta^t a thousand times. In integers, so that the bits are the same on host and device
/// and under any contraction, which the libraries' `pow` does not promise. @param exponent >= 0
ZERO_HOST_DEVICE constexpr double power(double base, std::int64_t exponent) {
  if (exponent <= 0) return 1;
  if (base == 0 || !(base - base == 0)) return base;  // 0, NaN, infinity
  const bool negative = base < 0 && exponent % 2 == 1;
  double scaled = base < 0 ? -base : base;
  detail::Scaled square{0, -63};
  for (; scaled >= 2; ++square.exponent) scaled *= 0.5;
  for (; scaled < 1; --square.exponent) scaled *= 2;
  square.mantissa = static_cast<std::uint64_t>(scaled * 0x1p63);
  detail::Scaled product{std::uint64_t{1} << 63, -63};
  for (; exponent > 0; exponent /= 2) {
    if (exponent % 2 == 1) product = detail::multiply(product, square);
    square = detail::multiply(square, square);
  }
  if (product.exponent < -1200) return negative ? -0.0 : 0.0;
  auto result = static_cast<double>(product.mantissa);
  for (; product.exponent <= -32; product.exponent += 32) result *= 0x1p-32;
  for (; product.exponent < 0; ++product.exponent) result *= 0.5;
  for (; product.exponent > 0 && result - result == 0; --product.exponent) result *= 2;
  return negative ? -result : result;
}

}  // namespace zero
