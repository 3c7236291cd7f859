// SPDX-License-Identifier: Apache-2.0
/// @file
/// The exact sum of squares of which a global norm is made.
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

/// The sum of squares of numbers, exact: its bytes depend on neither order nor grouping, nor on who
/// summed what, nor on the instruction set. Trivially copyable and of fixed size: ranks exchange it
/// as bytes. Equal sums have equal bytes.
///
/// Under `-ffast-math`, which may reassociate sums, nothing of this holds. Where the processor is
/// told to take denormal numbers for zero, they may count as zero.
class SquareSum {
 public:
  /// Exact.
  template <std::size_t bytes = square_vector_bytes>
  void add(std::span<const float> values) noexcept;
  /// Exact sums of the squares, each rounded to double: beyond 1.3e154 it is infinite, below
  /// 1e-162 zero, and below 1.5e-154 it has fewer digits.
  template <std::size_t bytes = square_vector_bytes>
  void add(std::span<const double> values) noexcept;
  void add(const SquareSum& other) noexcept {
    std::uint64_t carry = 0;
    for (std::size_t i = 0; i < limbs_.size(); ++i) {
      const std::uint64_t theirs = other.limbs_[i];  // which may be ours
      const std::uint64_t sum = limbs_[i] + theirs;
      limbs_[i] = sum + carry;
      carry = std::uint64_t{sum < theirs} | std::uint64_t{limbs_[i] < carry};
    }
    not_finite_ |= other.not_finite_;
  }

  /// The sum, rounded to the nearest double, ties to even. NaN if a NaN was added, else infinite if
  /// an infinite square was, or if the sum is beyond the doubles.
  [[nodiscard]] double value() const noexcept {
    using Limits = std::numeric_limits<double>;
    if ((not_finite_ & nan) != 0) return Limits::quiet_NaN();
    if ((not_finite_ & infinite) != 0) return Limits::infinity();
    std::size_t top = limbs_.size() - 1;
    while (top > 0 && limbs_[top] == 0) --top;
    // Sums below 2^53 units are doubles as they are: the unit is the smallest denormal number.
    const int length = int(64 * top) + int(std::bit_width(limbs_[top]));
    if (length <= 53) return std::bit_cast<double>(limbs_[0]);
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
    if (dropped + 1 > 2046) return Limits::infinity();
    return std::bit_cast<double>((std::uint64_t(dropped) << 52) + kept);
  }

  /// Whether all numbers and their squares were finite.
  [[nodiscard]] bool finite() const noexcept { return not_finite_ == 0; }

  /// Adds `number * 2^exponent`, `exponent` at least -1074.
  void add_integer(std::uint64_t number, int exponent) noexcept {
    const auto at = std::size_t(exponent - lowest_exponent);
    const int shift = int(at % 64);
    add_limb(at / 64, number << shift);
    if (shift != 0) add_limb(at / 64 + 1, number >> (64 - shift));
  }
  void add_infinity() noexcept { not_finite_ |= infinite; }
  void add_nan() noexcept { not_finite_ |= nan; }

  friend bool operator==(const SquareSum&, const SquareSum&) = default;

 private:
  /// The unit is the smallest positive double.
  static constexpr int lowest_exponent = -1074;
  static constexpr std::uint64_t infinite = 1;
  static constexpr std::uint64_t nan = 2;

  void add_limb(std::size_t limb, std::uint64_t number) noexcept {
    limbs_[limb] += number;
    if (limbs_[limb] >= number) return;
    while (++limbs_[++limb] == 0) {
    }
  }

  /// Least significant first; room for 2^78 of the largest squares.
  std::array<std::uint64_t, 34> limbs_{};
  std::uint64_t not_finite_ = 0;
};
static_assert(std::is_trivially_copyable_v<SquareSum> && sizeof(SquareSum) == 280);

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
void add_term(SquareSum& sum, T value) noexcept {
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
inline void add_by_exponent(SquareSum& sum, std::span<const float> values) noexcept {
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
inline void add_folded(SquareSum& sum, std::int64_t high, std::int64_t low, int top) noexcept {
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
[[gnu::always_inline]] inline bool fold_square_block(SquareSum& sum, const T* values,
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
[[gnu::always_inline]] inline int add_square_block(SquareSum& sum, const T* values,
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
[[gnu::always_inline]] inline void add_square_blocks(SquareSum& sum, const T* values,
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

#if ZERO_FUSED_SQUARES

/// How floats are folded in one pass, where the processor can: each gives the same sum.
enum class SquareFold : std::uint8_t {
  fused,    ///< FMA: what a square loses in a sum is a second fused product's result
  modular,  ///< AVX-512 IFMA: a rounded sum, and the exact one's last 52 bits
};

struct FourFloats {
  float of[4];
};
struct EightFloats {
  float of[8];
};

/// Folds eight floats into two lanes' pairs of sums. `smallest` is of magnitudes less one, so that
/// zero is the largest.
///
/// fused: first' = first + x^2, rounded, and second' = second + (x^2 - (first' - first)), exact.
/// modular: first' likewise, and second' = second + (x / unit)^2 mod 2^52: plus `magic`, whose last
/// digit is the unit, x has its integer's last 52 bits as mantissa, and only those are multiplied.
/// One statement, so that the two vectors' instructions stay interleaved.
template <SquareFold fold, class Wide, class Bits>
#if ZERO_AVX2_CLONES
[[gnu::target("avx2")]]
#endif
inline void fold_eight(const float* from, Wide& first0, Wide& first1, Wide& second0, Wide& second1,
                       Bits& smallest, const Bits& mask, const Bits& minus_one, const Wide& magic) {
  const auto& four0 = *reinterpret_cast<const FourFloats*>(from);
  const auto& four1 = *reinterpret_cast<const FourFloats*>(from + 4);
  const auto& eight = *reinterpret_cast<const EightFloats*>(from);
  Wide x0, x1;
  Bits magnitude;
  if constexpr (fold == SquareFold::fused) {
    Wide before0, before1;
    asm("vcvtps2pd {%[four0], %[x0]|%[x0], %[four0]}\n\t"
        "vcvtps2pd {%[four1], %[x1]|%[x1], %[four1]}\n\t"
        "vmovapd {%[first0], %[before0]|%[before0], %[first0]}\n\t"
        "vfmadd231pd {%[x0], %[x0], %[first0]|%[first0], %[x0], %[x0]}\n\t"
        "vmovapd {%[first1], %[before1]|%[before1], %[first1]}\n\t"
        "vfmadd231pd {%[x1], %[x1], %[first1]|%[first1], %[x1], %[x1]}\n\t"
        "vpand {%[eight], %[mask], %[magnitude]|%[magnitude], %[mask], %[eight]}\n\t"
        "vpaddd {%[minus_one], %[magnitude], %[magnitude]|%[magnitude], %[magnitude], "
        "%[minus_one]}\n\t"
        "vpminud {%[magnitude], %[smallest], %[smallest]|%[smallest], %[smallest], "
        "%[magnitude]}\n\t"
        "vsubpd {%[before0], %[first0], %[before0]|%[before0], %[first0], %[before0]}\n\t"
        "vsubpd {%[before1], %[first1], %[before1]|%[before1], %[first1], %[before1]}\n\t"
        "vfmsub213pd {%[before0], %[x0], %[x0]|%[x0], %[x0], %[before0]}\n\t"
        "vfmsub213pd {%[before1], %[x1], %[x1]|%[x1], %[x1], %[before1]}\n\t"
        "vaddpd {%[x0], %[second0], %[second0]|%[second0], %[second0], %[x0]}\n\t"
        "vaddpd {%[x1], %[second1], %[second1]|%[second1], %[second1], %[x1]}"
        : [first0] "+x"(first0), [first1] "+x"(first1), [second0] "+x"(second0),
          [second1] "+x"(second1), [smallest] "+x"(smallest), [x0] "=&x"(x0), [x1] "=&x"(x1),
          [before0] "=&x"(before0), [before1] "=&x"(before1), [magnitude] "=&x"(magnitude)
        : [four0] "m"(four0), [four1] "m"(four1), [eight] "m"(eight), [mask] "x"(mask),
          [minus_one] "x"(minus_one));
  } else {
    asm("vcvtps2pd {%[four0], %[x0]|%[x0], %[four0]}\n\t"
        "vcvtps2pd {%[four1], %[x1]|%[x1], %[four1]}\n\t"
        "vpand {%[eight], %[mask], %[magnitude]|%[magnitude], %[mask], %[eight]}\n\t"
        "vpaddd {%[minus_one], %[magnitude], %[magnitude]|%[magnitude], %[magnitude], "
        "%[minus_one]}\n\t"
        "vpminud {%[magnitude], %[smallest], %[smallest]|%[smallest], %[smallest], "
        "%[magnitude]}\n\t"
        "vfmadd231pd {%[x0], %[x0], %[first0]|%[first0], %[x0], %[x0]}\n\t"
        "vaddpd {%[x0], %[magic], %[x0]|%[x0], %[magic], %[x0]}\n\t"
        "vfmadd231pd {%[x1], %[x1], %[first1]|%[first1], %[x1], %[x1]}\n\t"
        "vaddpd {%[x1], %[magic], %[x1]|%[x1], %[magic], %[x1]}\n\t"
        "vpmadd52luq {%[x0], %[x0], %[second0]|%[second0], %[x0], %[x0]}\n\t"
        "vpmadd52luq {%[x1], %[x1], %[second1]|%[second1], %[x1], %[x1]}"
        : [first0] "+x"(first0), [first1] "+x"(first1), [second0] "+x"(second0),
          [second1] "+x"(second1), [smallest] "+x"(smallest), [x0] "=&x"(x0), [x1] "=&x"(x1),
          [magnitude] "=&x"(magnitude)
        : [four0] "m"(four0), [four1] "m"(four1), [eight] "m"(eight), [mask] "x"(mask),
          [minus_one] "x"(minus_one), [magic] "x"(magic));
  }
}

/// Floats in one pass where their blocks fit the bin, the units, of the block before: their sums
/// are then exact, as those of `fold_square_block`, which allows a lane four times as many terms.
/// Whether they do is known afterwards; a block that doesn't is added by `add_square_block`.
///
/// @tparam bytes only tells apart how files are compiled
template <SquareFold fold, std::size_t bytes = square_vector_bytes>
#if ZERO_AVX2_CLONES
[[gnu::target("avx2")]]
#endif
[[gnu::flatten, gnu::noinline]] void
add_squares_at_once(SquareSum& sum, const float* values, std::size_t count) {
  using Wide = typename VectorOf<double, 32>::type;
  using WideBits = typename VectorOf<std::uint64_t, 32>::type;
  using Bits = typename VectorOf<std::uint32_t, 32>::type;
  constexpr std::size_t step = 16;
  // So many blocks' first units are below 2^63: 16 of 2^52 each. So are the second ones' sizes.
  constexpr int most_blocks = 64;
  const Bits mask = Bits{} + magnitude_mask<float>;
  const Bits minus_one = Bits{} - 1;

  // What the first bin is for, and whether it's worth a try: a guess, by the next few numbers. Not
  // by some from everywhere: they would be waited for, and spoil the order memory is read ahead in.
  const std::size_t probed = std::min(count, step);
  std::uint32_t probe = 0, low_probe = ~std::uint32_t{0};
  for (std::size_t i = 0; i < probed; ++i) {
    const std::uint32_t magnitude = std::bit_cast<std::uint32_t>(values[i]) & magnitude_mask<float>;
    probe = std::max(probe, magnitude);
    low_probe = std::min(low_probe, magnitude - 1);  // zero is the largest
  }
  // The field of the largest number that the bin is made for; 0 if none is known, or none is used.
  int wanted = exponent_field<float>(probe), field = 0;
  if (low_probe < probe && wanted - exponent_field<float>(low_probe + 1) > square_reach<float>)
    wanted = 0;
  int top = 0, blocks = 0;
  Wide start{}, magic{};
  Bits least{};
  WideBits high{}, low{};
  while (count != 0) {
    std::size_t taken = std::min(count, square_block);
    const float* block = values;
    alignas(32) float copy[step];
    if (taken < step) {
      std::memset(copy, 0, sizeof copy);
      std::memcpy(copy, values, taken * sizeof(float));
      block = copy;
    } else {
      taken -= taken % step;
    }
    const std::size_t padded = std::max(taken, step);
    values += taken;
    count -= taken;
    if (wanted != 0 && wanted < 255) {
      if (wanted != field || blocks == most_blocks) {
        if (blocks != 0)
          add_folded(sum, std::int64_t(high[0] + high[1] + high[2] + high[3]),
                     std::int64_t(low[0] + low[1] + low[2] + low[3]), top);
        blocks = 0;
        high = low = WideBits{};
        field = wanted;
        top = 2 * field + SquareTerm<float>::unit + SquareTerm<float>::bits;
        start = Wide{} + power_of_two(top + fold_sum);
        // 1.5 * 2^52 units: of second sums, or of the numbers whose squares have these.
        const int unit = top + fold_second;
        magic = Wide{} + 1.5 * power_of_two((fold == SquareFold::fused ? unit : unit / 2) + 52);
        const int least_field = field - square_reach<float>;
        std::uint32_t below = 0;
        if (least_field > 1) below = (std::uint32_t(least_field) << mantissa_bits<float>)-1;
        least = Bits{} + below;
      }
      Wide first0 = start, first1 = start, first2 = start, first3 = start;
      Wide second0{}, second1{}, second2{}, second3{};
      Bits smallest = minus_one;
      for (std::size_t i = 0; i < padded; i += step) {
        fold_eight<fold>(block + i, first0, first1, second0, second1, smallest, mask, minus_one,
                         magic);
        fold_eight<fold>(block + i + 8, first2, first3, second2, second3, smallest, mask, minus_one,
                         magic);
      }
      const auto origin = (WideBits)start;
      const WideBits high0 = (WideBits)first0 - origin, high1 = (WideBits)first1 - origin;
      const WideBits high2 = (WideBits)first2 - origin, high3 = (WideBits)first3 - origin;
      // Sums only grow: those that end below 2^53 units have stayed there, and none met a NaN.
      const WideBits bad =
          ((high0 | high1 | high2 | high3) >> 52) | (WideBits)(Bits)(smallest < least);
      if ((bad[0] | bad[1] | bad[2] | bad[3]) == 0) {
        ++blocks;
        const WideBits high01 = high0 + high1, high23 = high2 + high3;
        high += high01 + high23;
        if constexpr (fold == SquareFold::fused) {
          low += ((WideBits)(second0 + second1 + magic) - (WideBits)magic) +
                 ((WideBits)(second2 + second3 + magic) - (WideBits)magic);
        } else {
          // What a pair of lanes lost is below 2^51 units in size.
          constexpr int distance = fold_first - fold_second;
          constexpr std::uint64_t sign = std::uint64_t{1} << 51;
          const WideBits lost01 =
              (WideBits)second0 + (WideBits)second1 - (high01 << distance) + sign;
          const WideBits lost23 =
              (WideBits)second2 + (WideBits)second3 - (high23 << distance) + sign;
          low += ((lost01 & (2 * sign - 1)) - sign) + ((lost23 & (2 * sign - 1)) - sign);
        }
        continue;
      }
    }
    wanted = add_square_block<float, 32>(sum, block, padded);
  }
  if (blocks != 0)
    add_folded(sum, std::int64_t(high[0] + high[1] + high[2] + high[3]),
               std::int64_t(low[0] + low[1] + low[2] + low[3]), top);
}

/// Whether this processor can.
inline bool can_fold(SquareFold fold) noexcept {
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return false;
  return fold == SquareFold::fused ||
         (__builtin_cpu_supports("avx512ifma") && __builtin_cpu_supports("avx512vl"));
}

#endif

template <class T, std::size_t bytes>
[[gnu::flatten, gnu::noinline]] void add_squares_baseline(SquareSum& sum, const T* values,
                                                          std::size_t count) {
  add_square_blocks<T, bytes>(sum, values, count);
}

#if ZERO_AVX2_CLONES
template <class T>
[[gnu::target("avx2"), gnu::flatten, gnu::noinline]] void add_squares_avx2(SquareSum& sum,
                                                                           const T* values,
                                                                           std::size_t count) {
  add_square_blocks<T, 32>(sum, values, count);
}
#endif

#endif

/// By the widest vectors that the processor has.
template <std::size_t bytes, class T>
void add_squares(SquareSum& sum, std::span<const T> values) noexcept {
#if ZERO_VECTOR_TYPES
  if constexpr (bytes != 0) {
#if ZERO_FUSED_SQUARES
    if constexpr (std::is_same_v<T, float>) {
      if (can_fold(SquareFold::modular))
        return add_squares_at_once<SquareFold::modular, bytes>(sum, values.data(), values.size());
      if (can_fold(SquareFold::fused))
        return add_squares_at_once<SquareFold::fused, bytes>(sum, values.data(), values.size());
    }
#endif
#if ZERO_AVX2_CLONES
    if (__builtin_cpu_supports("avx2")) {
      return add_squares_avx2(sum, values.data(), values.size());
    }
#endif
    return add_squares_baseline<T, bytes>(sum, values.data(), values.size());
  }
#endif
  if constexpr (std::is_same_v<T, float>) {
    add_by_exponent(sum, values);
  } else {
    for (const T value : values) add_term(sum, value * value);
  }
}

template <std::size_t bytes>
void SquareSum::add(std::span<const float> values) noexcept {
  add_squares<bytes>(*this, values);
}
template <std::size_t bytes>
void SquareSum::add(std::span<const double> values) noexcept {
  add_squares<bytes>(*this, values);
}

}  // namespace zero::detail

#pragma GCC diagnostic pop
