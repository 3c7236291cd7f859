// SPDX-License-Identifier: Apache-2.0
/// @file
/// A sum without rounding.
#pragma once

#include <cstddef>
#include <cstdint>

#include "zero/config.hpp"

namespace zero::detail {

/// A sum of terms that are not negative, exact: an integer wide enough for all doubles. Its bytes
/// depend on neither order nor grouping, and equal sums have equal bytes. Host and device.
class ExactSum {
 public:
  ZERO_HOST_DEVICE void add(const ExactSum& other) noexcept {
    std::uint64_t carry = 0;
    for (std::size_t i = 0; i < limbs; ++i) {
      const std::uint64_t theirs = other.limbs_[i];  // which may be ours
      const std::uint64_t sum = limbs_[i] + theirs;
      limbs_[i] = sum + carry;
      carry = std::uint64_t{sum < theirs} | std::uint64_t{limbs_[i] < carry};
    }
    not_finite_ |= other.not_finite_;
  }

  /// The sum, rounded to the nearest double, ties to even. NaN if a NaN was added, else infinite if
  /// an infinite term was, or if the sum is beyond the doubles.
  [[nodiscard]] ZERO_HOST_DEVICE double value() const noexcept {
    constexpr std::uint64_t infinity = 0x7ff0000000000000U;
    constexpr std::uint64_t quiet_nan = 0x7ff8000000000000U;
    if ((not_finite_ & nan) != 0) return __builtin_bit_cast(double, quiet_nan);
    if ((not_finite_ & infinite) != 0) return __builtin_bit_cast(double, infinity);
    std::size_t top = limbs - 1;
    while (top > 0 && limbs_[top] == 0) --top;
    // Sums below 2^53 units are doubles as they are: the unit is the smallest denormal number.
    int length = int(64 * top);
    for (std::uint64_t rest = limbs_[top]; rest != 0; rest >>= 1) ++length;
    if (length <= 53) return __builtin_bit_cast(double, limbs_[0]);
    const int dropped = length - 53;
    const auto limb = std::size_t(dropped) / 64;
    const int shift = dropped % 64;
    std::uint64_t kept = limbs_[limb] >> shift;
    if (shift > 11) kept |= limbs_[limb + 1] << (64 - shift);
    const auto bit = [&](int i) { return limbs_[std::size_t(i) / 64] >> (i % 64); };
    if ((bit(dropped - 1) & 1) != 0) {
      const auto half = std::size_t(dropped - 1) / 64;
      bool above_half = (limbs_[half] & ((std::uint64_t{1} << ((dropped - 1) % 64)) - 1)) != 0;
      for (std::size_t i = 0; i < half; ++i) above_half |= limbs_[i] != 0;
      kept += std::uint64_t{above_half} | (kept & 1);
    }
    // `kept` holds its leading bit, or the next higher one after rounding up: added, not or-ed, it
    // raises the exponent.
    if (dropped + 1 > 2046) return __builtin_bit_cast(double, infinity);
    return __builtin_bit_cast(double, (std::uint64_t(dropped) << 52) + kept);
  }

  /// Whether all terms were finite.
  [[nodiscard]] ZERO_HOST_DEVICE bool finite() const noexcept { return not_finite_ == 0; }

  /// Adds `number * 2^exponent`, `exponent` at least -1074.
  ZERO_HOST_DEVICE void add_integer(std::uint64_t number, int exponent) noexcept {
    const auto at = std::size_t(exponent - lowest_exponent);
    const int shift = int(at % 64);
    add_limb(at / 64, number << shift);
    if (shift != 0) add_limb(at / 64 + 1, number >> (64 - shift));
  }
  ZERO_HOST_DEVICE void add_infinity() noexcept { not_finite_ |= infinite; }
  ZERO_HOST_DEVICE void add_nan() noexcept { not_finite_ |= nan; }

  friend bool operator==(const ExactSum&, const ExactSum&) = default;

 private:
  /// The unit is the smallest positive double.
  static constexpr int lowest_exponent = -1074;
  static constexpr std::uint64_t infinite = 1;
  static constexpr std::uint64_t nan = 2;

  ZERO_HOST_DEVICE void add_limb(std::size_t limb, std::uint64_t number) noexcept {
    limbs_[limb] += number;
    if (limbs_[limb] >= number) return;
    while (++limbs_[++limb] == 0) {
    }
  }

  /// Least significant first; room for 2^78 of the largest terms.
  static constexpr std::size_t limbs = 34;
  std::uint64_t limbs_[limbs]{};
  std::uint64_t not_finite_ = 0;
};

}  // namespace zero::detail
