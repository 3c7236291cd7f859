// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace bert {

/// Bits that look random and depend on all of z's (SplitMix64's finaliser).
constexpr std::uint64_t mixed(std::uint64_t z) {
  z = (z ^ (z >> 30U)) * 0xbf58476d1ce4e5b9U;
  z = (z ^ (z >> 27U)) * 0x94d049bb133111ebU;
  return z ^ (z >> 31U);
}

/// Of two numbers: the b-th of those that SplitMix64 draws from the seed a.
constexpr std::uint64_t mix(std::uint64_t a, std::uint64_t b) {
  return mixed(a + 0x9e3779b97f4a7c15U * (b + 1));
}

/// SplitMix64 (Steele, Lea and Flood, OOPSLA 2014). Numbers of a (seed, rank, step) depend on
/// nothing else: not on earlier draws, nor on the standard library, whose distributions differ.
class Random {
 public:
  Random(std::uint64_t seed, std::uint64_t rank, std::uint64_t step)
      : state_(mixed(mixed(mixed(seed) + rank) + step)) {}

  std::uint64_t next() {
    state_ += increment;
    return mixed(state_);
  }

  /// Uniform in [0, bound); `bound` is at least 1.
  std::uint64_t below(std::uint64_t bound) {
    // The 2^64 values are not a multiple of `bound`: without the first 2^64 % bound of them the
    // remainders are equally likely.
    const std::uint64_t surplus = (0 - bound) % bound;
    std::uint64_t value = next();
    while (value < surplus) value = next();
    return value % bound;
  }

 private:
  static constexpr std::uint64_t increment = 0x9e3779b97f4a7c15U;

  std::uint64_t state_;
};

}  // namespace bert
