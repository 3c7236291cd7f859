// SPDX-License-Identifier: Apache-2.0
/// @file
/// Adds squares to an exact sum: one by one, which defines it, and block by block in vectors.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <span>
#include <type_traits>

#include "zero/config.hpp"
#include "zero/detail/exact_sum.hpp"
#include "zero/detail/pack.hpp"

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wpsabi"

namespace zero::detail {

/// How squares are summed here: in vectors of so many bytes, or one by one (0). A parameter of
/// whatever depends on it, so that files of one program may differ.
#if !ZERO_VECTOR_TYPES
inline constexpr std::size_t square_vector_bytes = 0;
#elif ZERO_SSE2 && !ZERO_AVX2_CLONES
inline constexpr std::size_t square_vector_bytes = 32;
#else
inline constexpr std::size_t square_vector_bytes = 16;
#endif

/// What is known of floats and doubles as bits.
template <class T>
using FloatBits = std::conditional_t<sizeof(T) == 4, std::uint32_t, std::uint64_t>;
template <class T>
inline constexpr int mantissa_bits = std::numeric_limits<T>::digits - 1;
template <class T>
inline constexpr auto magnitude_mask = FloatBits<T>(~FloatBits<T>{0} >> 1);
template <class T>
inline constexpr auto infinity_bits =
    std::bit_cast<FloatBits<T>>(std::numeric_limits<T>::infinity());
/// The exponent's field, of denormal numbers as of the smallest normal ones, whose unit they share.
template <class T>
[[gnu::always_inline]] inline int exponent_field(FloatBits<T> magnitude) noexcept {
  return std::max(int(magnitude >> mantissa_bits<T>), 1);
}

/// A number's term in the sum: a float's square; a double as it is, since doubles are squared
/// before. Every finite one is an integer below 2^`bits` times 2^(`per_exponent` * field + `unit`).
template <class T>
struct SquareTerm;
template <>
struct SquareTerm<float> {
  static constexpr int per_exponent = 2, unit = -300, bits = 48;
  /// From which to which field of the largest number the units to fold with are normal doubles.
  static constexpr int first_safe = 0, last_safe = 255;
};
template <>
struct SquareTerm<double> {
  static constexpr int per_exponent = 1, unit = -1075, bits = 53;
  static constexpr int first_safe = 150, last_safe = 2000;
};

/// One term by integer arithmetic: what defines the sum.
template <class T>
void add_term(ExactSum& sum, T value) noexcept {
  using Term = SquareTerm<T>;
  const auto magnitude = FloatBits<T>(std::bit_cast<FloatBits<T>>(value) & magnitude_mask<T>);
  if (magnitude > infinity_bits<T>) return sum.add_nan();
  if (magnitude == infinity_bits<T>) return sum.add_infinity();
  constexpr auto leading = FloatBits<T>{1} << mantissa_bits<T>;
  std::uint64_t number = magnitude & (leading - 1);
  if (magnitude >= leading) number |= leading;
  if constexpr (Term::per_exponent == 2) number *= number;
  sum.add_integer(number, Term::per_exponent * exponent_field<T>(magnitude) + Term::unit);
}

/// Floats without vectors: squares of one exponent have one unit, so they are summed as integers.
inline void add_by_exponent(ExactSum& sum, std::span<const float> values) noexcept {
  constexpr std::size_t block = 4096;  // times 2^48, the largest square, it's below 2^64
  constexpr std::size_t not_finite = 255;
  while (!values.empty()) {
    const auto taken = values.first(std::min(block, values.size()));
    std::array<std::uint64_t, not_finite + 1> sums{};
    for (const float value : taken) {
      const std::uint32_t magnitude = std::bit_cast<std::uint32_t>(value) & magnitude_mask<float>;
      const std::uint32_t field = magnitude >> mantissa_bits<float>;
      const std::uint32_t leading = std::uint32_t{field != 0} << mantissa_bits<float>;
      const std::uint64_t number = (magnitude & 0x7fffff) | leading;
      sums[field] += number * number;
    }
    for (std::size_t field = 0; field < not_finite; ++field) {
      if (sums[field] == 0) continue;
      sum.add_integer(sums[field], 2 * std::max(int(field), 1) + SquareTerm<float>::unit);
    }
    if (sums[not_finite] != 0) {
      for (const float value : taken)
        if ((std::bit_cast<std::uint32_t>(value) & magnitude_mask<float>) >= infinity_bits<float>)
          add_term(sum, value);
    }
    values = values.subspan(taken.size());
  }
}

#if ZERO_VECTOR_TYPES

/// How many terms are folded with one pair of units: enough to pay for what follows them, so few
/// that their sums leave most of a double's digits to the terms.
inline constexpr std::size_t square_block = 512;

#if ZERO_SSE2
// Instructions by name, since g++ 12 makes scalar or half as wide conversions of
// `__builtin_convertvector`.

[[gnu::always_inline]] inline void widen(const float* from, VectorOf<double, 16>::type& wide) {
  VectorOf<double, 16>::type two{};
  std::memcpy(&two, from, 2 * sizeof(float));
  wide = (VectorOf<double, 16>::type)_mm_cvtps_pd((__m128)two);
}

#if ZERO_AVX2_CLONES
[[gnu::target("avx2")]]
#endif
inline void widen(const float* from, VectorOf<double, 32>::type& wide) {
  struct Four {
    float of[4];
  };
  asm("vcvtps2pd {%1, %0|%0, %1}" : "=x"(wide) : "m"(*reinterpret_cast<const Four*>(from)));
}

#else

template <class Wide>
[[gnu::always_inline]] inline void widen(const float* from, Wide& wide) {
  typename VectorOf<float, sizeof(Wide) / 2>::type narrow;
  std::memcpy(&narrow, from, sizeof narrow);
  wide = __builtin_convertvector(narrow, Wide);
}

#endif

/// Vectors that blocks of terms are folded in. None is ever passed to a real call.
template <class T, std::size_t bytes>
struct SquareVectors {
  using Source = typename VectorOf<T, bytes>::type;
  using SourceBits = typename VectorOf<FloatBits<T>, bytes>::type;
  using Wide = typename VectorOf<double, bytes>::type;
  using WideBits = typename VectorOf<std::int64_t, bytes>::type;
  static constexpr std::size_t lanes = bytes / sizeof(double);
  static constexpr std::size_t width = bytes / sizeof(T);

  [[gnu::always_inline]] static void load_terms(const T* from, Wide& terms) {
    if constexpr (sizeof(T) == sizeof(double)) {
      std::memcpy(&terms, from, sizeof terms);
    } else {
      Wide wide;
      widen(from, wide);
      // No rounding here, so it doesn't matter whether it's contracted with what follows.
      terms = wide * wide;
    }
  }
};

/// Of the largest number that is no NaN, and of the smallest that is not zero (or one less).
struct SquareRange {
  int largest_field, smallest_field;
};

template <class T, std::size_t bytes>
[[gnu::always_inline]] inline SquareRange square_range(const T* values, std::size_t count) {
  using V = SquareVectors<T, bytes>;
  using Source = typename V::Source;
  using Bits = typename V::SourceBits;
  Source largest{};
  Source smallest = Source{} + std::numeric_limits<T>::infinity();
  for (std::size_t i = 0; i < count; i += V::width) {
    Bits magnitude;
    std::memcpy(&magnitude, values + i, sizeof magnitude);
    magnitude &= magnitude_mask<T>;
    const Source value = (Source)magnitude;
    // One less, zero is the largest integer. A quarter of each is a positive number again, never
    // NaN, whose comparison could trap; and vectors of numbers always have a minimum.
    Source quarter = (Source)((magnitude - 1) >> 2);
#if ZERO_SSE2 && !ZERO_AVX2_CLONES
    // g++ 12 with AVX-512 would merge the integer operation into a masked, much slower minimum.
    asm("" : "+x"(quarter));
#endif
    largest = value > largest ? value : largest;
    smallest = quarter < smallest ? quarter : smallest;
  }
  FloatBits<T> above = 0, below = infinity_bits<T>;
  for (std::size_t lane = 0; lane < V::width; ++lane) {
    above = std::max(above, std::bit_cast<FloatBits<T>>(T(largest[lane])));
    below = std::min(below, std::bit_cast<FloatBits<T>>(T(smallest[lane])));
  }
  // Quarters that are denormal as numbers may have been compared as zeros.
  const bool denormal = below >> mantissa_bits<T> == 0;
  return {exponent_field<T>(above), denormal ? 1 : exponent_field<T>(FloatBits<T>(below * 4 + 1))};
}

/// Copies a block: numbers of magnitude `least` and more, and NaNs, to `large`, the others to
/// `small`, each with zeros in the gaps.
template <class T, std::size_t bytes>
[[gnu::always_inline]] inline void split_block(const T* values, std::size_t count, T least,
                                               T* large, T* small) {
  using V = SquareVectors<T, bytes>;
  using Bits = typename V::SourceBits;
  const typename V::Source limit = typename V::Source{} + least;
  for (std::size_t i = 0; i < count; i += V::width) {
    Bits number;
    std::memcpy(&number, values + i, sizeof number);
    number &= magnitude_mask<T>;
    const Bits below = (Bits)((typename V::Source)number < limit);
    const Bits above = number & ~below;
    number &= below;
    std::memcpy(large + i, &above, sizeof above);
    std::memcpy(small + i, &number, sizeof number);
  }
}

// Of a block, all terms are below 2^top and each of its (at least 4) lanes sums up to 128 of them:
// below 2^(top + 7).
inline constexpr int fold_sum = 7;
/// A lane's first sum starts at 2^52 units and does not pass 2^53, so that it has this unit.
inline constexpr int fold_first = fold_sum - 52;
/// What the first sum leaves of a term is at most its unit, in whatever rounding mode, and 128 of
/// that from each of 2 lanes are at most 2^53 of these units.
inline constexpr int fold_second = fold_first + 8 - 53;

[[gnu::always_inline]] inline double power_of_two(int exponent) noexcept {
  return std::bit_cast<double>(std::uint64_t(exponent + 1023) << 52);
}

/// Adds `high` first and `low` second units, together not negative, `high` not either.
inline void add_folded(ExactSum& sum, std::int64_t high, std::int64_t low, int top) noexcept {
  // high * 2^distance + low in two words.
  constexpr int distance = fold_first - fold_second;
  const std::uint64_t shifted = std::uint64_t(high) << distance;
  const std::uint64_t word = shifted + std::uint64_t(low);
  const std::uint64_t carry = std::uint64_t{word < shifted} - std::uint64_t{low < 0};
  sum.add_integer(word, top + fold_second);
  sum.add_integer((std::uint64_t(high) >> (64 - distance)) + carry, top + fold_second + 64);
}

/// Adds a block whose terms are below 2^top and multiples of 2^(top + fold_second). False, with
/// nothing added, if a number was not finite.
///
/// Each term is split by adding it to a sum whose last digit is the first unit: Rump, Ogita & Oishi
/// 2008, "Accurate Floating-Point Summation I", as indexed by Demmel & Nguyen 2013, "Fast
/// Reproducible Floating-Point Summation".
template <class T, std::size_t bytes>
[[gnu::always_inline]] inline bool fold_square_block(ExactSum& sum, const T* values,
                                                     std::size_t count, int top) {
  using V = SquareVectors<T, bytes>;
  using Wide = typename V::Wide;
  using WideBits = typename V::WideBits;
  const Wide start = Wide{} + power_of_two(top + fold_sum);
  Wide first0 = start, first1 = start, second0{}, second1{};
  const auto fold = [](const Wide& term, Wide& first, Wide& second) __attribute__((always_inline)) {
    const Wide before = first;
    first = before + term;
    second += term - (first - before);
  };
  for (std::size_t i = 0; i < count; i += 2 * V::lanes) {
    Wide term0, term1;
    V::load_terms(values + i, term0);
    V::load_terms(values + i + V::lanes, term1);
    fold(term0, first0, second0);
    fold(term1, first1, second1);
  }
  const WideBits first =
      ((WideBits)first0 - (WideBits)start) + ((WideBits)first1 - (WideBits)start);
  const Wide second = second0 + second1;
  const double scale = power_of_two(-(top + fold_second));
  double any = 0;
  std::int64_t high = 0, low = 0;
  for (std::size_t lane = 0; lane < V::lanes; ++lane) any += second[lane];
  if (any != any) return false;
  for (std::size_t lane = 0; lane < V::lanes; ++lane) {
    high += first[lane];
    low += std::int64_t(second[lane] * scale);
  }
  add_folded(sum, high, low, top);
  return true;
}

/// So much smaller a number may be than the largest one, in powers of two.
template <class T>
inline constexpr int square_reach =
    (-fold_second - SquareTerm<T>::bits) / SquareTerm<T>::per_exponent;

/// Adds a block of numbers, `count` a multiple of twice the lanes. The largest one's field, or 0 if
/// they were too far apart, or not finite, to be folded at once.
template <class T, std::size_t bytes>
[[gnu::always_inline]] inline int add_square_block(ExactSum& sum, const T* values,
                                                   std::size_t count) {
  using Term = SquareTerm<T>;
  constexpr int reach = square_reach<T>;
  bool split = false;
  alignas(64) T within[square_block];
  alignas(64) T rest[square_block];
  for (;;) {
    const auto range = square_range<T, bytes>(values, count);
    const int largest = range.largest_field;
    if (largest < Term::first_safe || largest > Term::last_safe) break;
    const bool wide = largest - range.smallest_field > reach;
    const T* folded = values;
    if (wide) {
      // First the numbers within reach, then the others in the same way.
      const auto least = std::bit_cast<T>(FloatBits<T>(largest - reach) << mantissa_bits<T>);
      split_block<T, bytes>(values, count, least, within, rest);
      folded = within;
    }
    const int top = Term::per_exponent * largest + Term::unit + Term::bits;
    if (!fold_square_block<T, bytes>(sum, folded, count, top)) break;
    if (!wide) return split ? 0 : largest;
    split = true;
    values = rest;
  }
  for (std::size_t i = 0; i < count; ++i) add_term(sum, values[i]);
  return 0;
}

template <class T, std::size_t bytes>
[[gnu::always_inline]] inline void add_square_blocks(ExactSum& sum, const T* values,
                                                     std::size_t count) {
  using V = SquareVectors<T, bytes>;
  constexpr std::size_t step = 2 * V::lanes;
  alignas(64) T copy[square_block];
  while (count != 0) {
    const std::size_t taken = std::min(count, square_block);
    const std::size_t padded = (taken + step - 1) / step * step;
    const T* block = values;
    if (padded != taken) {
      std::memset(copy + taken, 0, (padded - taken) * sizeof(T));
      std::memcpy(copy, values, taken * sizeof(T));
      block = copy;
    }
    if constexpr (std::is_same_v<T, double>) {
      for (std::size_t i = 0; i < padded; i += V::width) {
        typename V::Source numbers;
        std::memcpy(&numbers, block + i, sizeof numbers);
        numbers *= numbers;
        std::memcpy(copy + i, &numbers, sizeof numbers);
      }
      // The multiplication ends here: contracted with an addition it would round once less.
      asm("" : "+m"(copy));
      block = copy;
    }
    add_square_block<T, bytes>(sum, block, padded);
    values += taken;
    count -= taken;
  }
}

#endif

}  // namespace zero::detail

#pragma GCC diagnostic pop
