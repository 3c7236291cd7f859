// SPDX-License-Identifier: Apache-2.0
/// @file
/// Adds floats' squares to an exact sum in one pass, where an x86-64 processor has fused products.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "zero/config.hpp"
#include "zero/detail/exact_sum.hpp"
#include "zero/detail/pack.hpp"
#include "zero/detail/square_fold.hpp"

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wpsabi"

namespace zero::detail {

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
add_squares_at_once(ExactSum& sum, const float* values, std::size_t count) {
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

}  // namespace zero::detail

#pragma GCC diagnostic pop
