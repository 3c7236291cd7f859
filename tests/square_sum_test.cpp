// SPDX-License-Identifier: Apache-2.0
// The exact sum of squares, on all its paths, against big integers made another way.
#include <zero/detail/square_sum.hpp>

#include <algorithm>
#include <array>
#include <bit>
#include <cfenv>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "catch.hpp"

namespace {

using zero::detail::SquareSum;

/// A natural number times 2^-1088, in digits of 32 bits.
class Reference {
 public:
  template <class T>
  void add(const std::vector<T>& values) {
    for (const T value : values) add_square(value);
  }
  double value() const {
    std::size_t top = digits_.size() - 1;
    while (top > 2 && digits_[top] == 0) --top;
    // 96 bits of which at least 65 are used where there are as many; what lies below only decides
    // ties, as does the lowest bit.
    std::uint64_t high = (std::uint64_t{digits_[top]} << 32) | digits_[top - 1];
    std::uint64_t low = digits_[top - 2];
    for (std::size_t i = 0; i < top - 2; ++i) low |= std::uint64_t{digits_[i] != 0};
    int exponent = int(32 * (top - 1)) - 1088;
    while (high >> 63 == 0 && exponent > -1088 && (high | low) != 0) {
      high = (high << 1) | ((low >> 31) & 1);
      low = (low << 1) & 0xffffffff;
      --exponent;
    }
    high |= std::uint64_t{low != 0};
    return std::ldexp(double(high), exponent);
  }

 private:
  void add_square(float value) {
    int exponent = 0;
    const double fraction = std::frexp(double(value), &exponent);
    const auto number = std::int64_t(std::ldexp(fraction, 24));
    add_integer(std::uint64_t(number * number), 2 * (exponent - 24));
  }
  void add_square(double value) {
    const volatile double square = value * value;
    int exponent = 0;
    const double fraction = std::frexp(square, &exponent);
    add_integer(std::uint64_t(std::ldexp(fraction, 53)), exponent - 53);
  }
  void add_integer(std::uint64_t number, int exponent) {
    for (int bit = 0; bit < 64; ++bit) {
      if (((number >> bit) & 1) == 0) continue;
      const auto at = std::size_t(exponent + bit + 1088);
      std::size_t digit = at / 32;
      std::uint64_t carry = std::uint64_t{1} << (at % 32);
      for (; carry != 0; ++digit) {
        carry += digits_.at(digit);
        digits_[digit] = std::uint32_t(carry);
        carry >>= 32;
      }
    }
  }

  std::vector<std::uint32_t> digits_ = std::vector<std::uint32_t>(72);
};

/// The sums of all paths that this processor has.
template <class T>
std::vector<SquareSum> sums(std::span<const T> values) {
  std::vector<SquareSum> all(2);
  all[0].add(values);
  all[1].add<0>(values);
#if ZERO_VECTOR_TYPES
  zero::detail::add_squares_baseline<T, zero::detail::square_vector_bytes>(
      all.emplace_back(), values.data(), values.size());
  zero::detail::add_squares_baseline<T, 16>(all.emplace_back(), values.data(), values.size());
#if ZERO_AVX2_CLONES
  if (__builtin_cpu_supports("avx2"))
    zero::detail::add_squares_avx2(all.emplace_back(), values.data(), values.size());
#endif
#if ZERO_FUSED_SQUARES
  if constexpr (std::is_same_v<T, float>) {
    using zero::detail::SquareFold;
    if (can_fold(SquareFold::fused))
      zero::detail::add_squares_at_once<SquareFold::fused>(all.emplace_back(), values.data(),
                                                           values.size());
    if (can_fold(SquareFold::modular))
      zero::detail::add_squares_at_once<SquareFold::modular>(all.emplace_back(), values.data(),
                                                             values.size());
  }
#endif
#endif
  return all;
}

/// Requires that all paths agree, and gives their sum.
template <class T>
SquareSum sum_of(std::span<const T> values) {
  const auto all = sums(values);
  for (const auto& sum : all) {
    REQUIRE(std::memcmp(&sum, &all[0], sizeof sum) == 0);
    REQUIRE(sum == all[0]);
  }
  return all[0];
}
template <class T>
SquareSum sum_of(const std::vector<T>& values) {
  return sum_of(std::span<const T>(values));
}

template <class T>
void check(const std::vector<T>& values) {
  Reference reference;
  reference.add(values);
  const SquareSum sum = sum_of(values);
  CHECK(sum.finite());
  // As bits, so that a failure shows them.
  CHECK(std::bit_cast<std::uint64_t>(sum.value()) ==
        std::bit_cast<std::uint64_t>(reference.value()));
}

/// `count` numbers of random sign whose exponents are spread evenly over [low, high].
template <class T, class Random>
std::vector<T> random_numbers(std::size_t count, int low, int high, Random& random) {
  std::uniform_real_distribution<double> fraction(0.5, 1);
  std::uniform_int_distribution<int> exponent(low, high);
  std::vector<T> values(count);
  for (auto& value : values)
    value = T(std::ldexp(random() % 2 == 0 ? T(fraction(random)) : -T(fraction(random)),
                         exponent(random)));
  return values;
}

TEST_CASE("no numbers and zeros have the sum zero") {
  CHECK(std::bit_cast<std::uint64_t>(SquareSum().value()) == 0);
  CHECK(sum_of(std::vector<float>{}) == SquareSum());
  CHECK(sum_of(std::vector<float>(1000, -0.F)) == SquareSum());
  CHECK(sum_of(std::vector<double>(1000, -0.)) == SquareSum());
  CHECK(SquareSum().finite());
}

TEST_CASE("the norm of 1, 2, ..., 10") {
  const std::vector<float> values{1, 2, 3, 4, 5, 6, 7, 8, 9, 10};
  CHECK(sum_of(values).value() == 385);
  CHECK(std::abs(std::sqrt(sum_of(values).value()) - 19.6214169) < 5e-8);
}

TEMPLATE_TEST_CASE("sums of every size are exact", "", float, double) {
  std::mt19937 random(1);
  for (std::size_t size = 0; size <= 600; ++size) {
    check(random_numbers<TestType>(size, -12, -8, random));
    check(random_numbers<TestType>(size, -40, 20, random));
  }
}

TEST_CASE("floats of all magnitudes have exact sums") {
  std::mt19937 random(2);
  const int lowest = -148, highest = 128;  // of the smallest denormal number, of the largest float
  for (int low = lowest; low <= highest; low += 9)
    for (const int width : {0, 1, 20, 21, 22, 23, 44, 100, 276})
      check(random_numbers<float>(530, low, std::min(low + width, highest), random));
}

TEST_CASE("doubles of all magnitudes have exact sums") {
  std::mt19937 random(3);
  for (int low = -1073; low <= 511; low += 33)
    for (const int width : {0, 1, 17, 18, 19, 20, 40, 300, 1584})
      check(random_numbers<double>(530, low, std::min(low + width, 511), random));
}

TEST_CASE("extreme blocks are exact") {
  using Limits = std::numeric_limits<float>;
  const auto last = std::nextafter(1.F, 0.F);
  const auto rounded_down = std::nextafter(last, 0.F);  // its square has a remainder of half a unit
  for (const std::size_t size : {1, 8, 255, 511, 512, 513, 2048}) {
    for (const float value : {Limits::max(), Limits::min(), Limits::denorm_min(), last, 1.F, 5000.F,
                              std::nextafter(Limits::min(), 0.F), 65504.F})
      check(std::vector<float>(size, value));
    for (const float small : {Limits::denorm_min(), Limits::min(), 1e-30F, last * 0x1p-20F,
                              last * 0x1p-21F, last * 0x1p-22F, last * 0x1p-23F})
      for (const float large : {Limits::max(), 1e30F, 1.F, last, rounded_down}) {
        std::vector<float> values(size, small);
        values[size / 2] = large;
        check(values);
        std::fill(values.begin(), values.end(), large);
        values.back() = small;
        check(values);
      }
  }
}

TEST_CASE("every float with few digits is exact") {
  std::vector<float> values;  // all exponents and denormal numbers, alone and together
  for (int exponent = -149; exponent < 128; ++exponent) {
    values.push_back(std::ldexp(1.F, exponent));
    check(std::vector<float>{values.back()});
  }
  check(values);
}

TEMPLATE_TEST_CASE("the bytes depend on neither order, grouping nor alignment", "", float, double) {
  std::mt19937 random(4);
  for (int round = 0; round < 100; ++round) {
    auto values =
        random_numbers<TestType>(1 + random() % 3000, -30 - round, 10 + round / 2, random);
    const SquareSum whole = sum_of(values);
    std::shuffle(values.begin(), values.end(), random);
    std::array<SquareSum, 3> ranks{};
    for (std::size_t done = 0; done < values.size();) {
      const std::size_t count =
          std::min<std::size_t>(values.size() - done, random() % (random() % 4 == 0 ? 1000 : 10));
      ranks[random() % 3].add(std::span<const TestType>(values.data() + done, count));
      done += count;
    }
    SquareSum merged = ranks[2];
    merged.add(ranks[0]);
    merged.add(ranks[1]);
    REQUIRE(std::memcmp(&merged, &whole, sizeof whole) == 0);
  }
}

TEMPLATE_TEST_CASE("numbers that are not finite are seen wherever they are", "", float, double) {
  using Limits = std::numeric_limits<TestType>;
  std::mt19937 random(5);
  for (const std::size_t size : {1, 7, 8, 512, 515, 1100}) {
    for (const bool zeros : {false, true}) {
      auto values = random_numbers<TestType>(size, zeros ? -1060 : -50, zeros ? -1060 : 0, random);
      for (std::size_t at = 0; at < size; at += at > 16 && at + 20 < size ? 29 : 1) {
        const TestType before = values[at];
        values[at] = 0;
        const SquareSum others = sum_of(values);
        REQUIRE(others.finite());
        for (const TestType infinity : {Limits::infinity(), -Limits::infinity()}) {
          values[at] = infinity;
          const SquareSum sum = sum_of(values);
          REQUIRE_FALSE(sum.finite());
          REQUIRE(sum.value() == std::numeric_limits<double>::infinity());
        }
        for (const TestType nan : {Limits::quiet_NaN(), -Limits::quiet_NaN()}) {
          values[at] = nan;
          const SquareSum sum = sum_of(values);
          REQUIRE_FALSE(sum.finite());
          REQUIRE(std::isnan(sum.value()));
          SquareSum merged = others;
          merged.add(sum);
          REQUIRE(std::isnan(merged.value()));
        }
        values[at] = before;
      }
    }
  }
  CHECK(std::isnan(sum_of(std::vector<TestType>{Limits::infinity(), Limits::quiet_NaN()}).value()));
}

// Floats are folded in blocks, with units that are kept from block to block while they serve.

constexpr std::size_t block = 512;

TEST_CASE("blocks of different magnitudes are exact") {
  std::mt19937 random(8);
  for (int round = 0; round < 200; ++round) {
    std::vector<float> values;
    for (int part = 0; part < 8; ++part) {
      const int low = int(random() % 240) - 130;
      const auto more = random_numbers<float>(
          random() % 3 == 0 ? random() % 1500 : block, round % 2 == 0 ? -9 : low,
          round % 2 == 0 ? -9 + part : std::min(low + int(random() % 26), 128), random);
      values.insert(values.end(), more.begin(), more.end());
      if (random() % 4 == 0) values.insert(values.end(), random() % 700, 0.F);
    }
    check(values);
  }
}

TEST_CASE("one number that a block's units don't serve is exact, wherever it is") {
  const std::size_t size = 4 * block + 37;
  for (const int exponent : {-126, -110, -106, -105, -104, -60, 0, 50, 124, 127}) {
    const float one = std::ldexp(1.F, exponent);
    for (const std::size_t at : {std::size_t{1}, block - 1, block, 2 * block - 17, 2 * block - 16,
                                 3 * block - 1, 4 * block - 1, 4 * block, size - 1}) {
      std::vector<float> values(size, one);
      check(values);
      for (const int distance : {-149, -80, -24, -23, -22, -21, -20, 1, 2, 3, 4, 5, 6, 7, 40}) {
        const float other = std::ldexp(one, distance);
        for (const float number :
             {other, -other, std::nextafter(other, 0.F), std::nextafter(other, 2 * other)}) {
          if (!std::isfinite(number)) continue;
          values[at] = number;
          check(values);
        }
      }
    }
  }
}

TEST_CASE("sums that reach or just don't reach what units serve are exact") {
  const std::vector<float> first(5 * block, 1.F);
  for (const float limit : {1.F, 2.F, 4.F, 8.F})  // 32 squares of 4 are 2^9
    for (const float value : {std::nextafter(limit, 0.F), limit, std::nextafter(limit, 9.F)})
      for (const std::size_t more : {block, 130 * block + 5}) {
        auto values = first;
        values.resize(first.size() + more, value);
        check(values);
        values.back() = 0x1p-21F;
        check(values);
        values.back() = std::nextafter(0x1p-21F, 0.F);
        check(values);
      }
}

TEST_CASE("many of the largest numbers that units serve are exact") {
  std::vector<float> values(5 * block, 1.F);
  values.resize(600 * block, std::nextafter(4.F, 0.F));
  check(values);
}

TEST_CASE("many blocks in one call are exact") {
  std::mt19937 random(9);
  std::normal_distribution<float> normal;
  std::vector<float> values(300 * block + 11);
  for (auto& value : values) value = normal(random);
  check(values);
  for (std::size_t i = 0; i < values.size(); i += 1 + random() % 3) values[i] = 0;
  check(values);
  for (auto& value : values) value *= 1e-40F;  // denormal, or zero
  check(values);
}

TEST_CASE("numbers that are not finite are seen in blocks whose units are known") {
  using Limits = std::numeric_limits<float>;
  std::mt19937 random(10);
  const auto before = random_numbers<float>(5 * block + 3, -5, 0, random);
  for (std::size_t at = 0; at < before.size(); at += 1 + random() % 40)
    for (const float bad : {Limits::infinity(), -Limits::infinity(), Limits::quiet_NaN(),
                            -Limits::quiet_NaN(), std::bit_cast<float>(0x7f800001U)}) {
      auto values = before;
      values[at] = bad;
      const SquareSum sum = sum_of(values);
      REQUIRE_FALSE(sum.finite());
      REQUIRE(std::isnan(bad) == std::isnan(sum.value()));
      // Nothing is lost of the others: their sum is the same as with a zero there.
      values[at] = 0;
      SquareSum others = sum_of(values);
      std::isnan(bad) ? others.add_nan() : others.add_infinity();
      REQUIRE(others == sum);
    }
}

TEST_CASE("squares beyond the doubles are infinite or zero") {
  const SquareSum large = sum_of(std::vector<double>{1, 1e200});
  CHECK_FALSE(large.finite());
  CHECK(large.value() == std::numeric_limits<double>::infinity());
  CHECK(sum_of(std::vector<double>{1e-200}) == SquareSum());
  CHECK(sum_of(std::vector<double>{1e-160}).value() == 1e-160 * 1e-160);
  // Finite squares whose sum is beyond the doubles.
  const SquareSum many = sum_of(std::vector<double>(1000, 1.3e154));
  CHECK(many.finite());
  CHECK(many.value() == std::numeric_limits<double>::infinity());
}

TEST_CASE("sums have room for more numbers than there are") {
  SquareSum sum = sum_of(std::vector<float>(512, std::numeric_limits<float>::max()));
  const double once = sum.value();
  for (int i = 0; i < 60; ++i) sum.add(SquareSum(sum));
  CHECK(sum.value() == std::ldexp(once, 60));
  SquareSum doubled = sum;
  doubled.add(doubled);
  CHECK(doubled.value() == std::ldexp(once, 61));
  SquareSum again;
  const std::vector<float> values(8, 1.5F);
  for (int i = 0; i < 100000; ++i) again.add(values);
  CHECK(again.value() == 2.25 * 800000);
}

TEST_CASE("carries run as far as they must") {
  SquareSum sum;
  for (int i = 0; i < 20; ++i) sum.add_integer(~std::uint64_t{0}, 64 * i - 1074);
  SquareSum merged = sum;
  sum.add_integer(1, -1074);
  CHECK(sum.value() == std::ldexp(1., 64 * 20 - 1074));
  SquareSum one;
  one.add_integer(1, -1074);
  CHECK(one.value() == std::numeric_limits<double>::denorm_min());
  merged.add(one);
  CHECK(merged == sum);
}

TEST_CASE("values are rounded to nearest, ties to even") {
  for (const int exponent : {-1074, -1073, -1063, -1062, -1011, -1010, -53, 0, 37, 900}) {
    const auto value = [&](std::uint64_t high, std::uint64_t low) {
      SquareSum sum;
      sum.add_integer(high, exponent + 10);
      sum.add_integer(low, exponent);
      return std::ldexp(sum.value(), -10 - std::max(exponent, -1000)) *
             std::ldexp(1., std::max(exponent, -1000) - exponent);
    };
    const std::uint64_t even = std::uint64_t{1} << 52;
    CHECK(value(even, 0) == double(even));
    CHECK(value(even, 511) == double(even));
    CHECK(value(even, 512) == double(even));
    CHECK(value(even, 513) == double(even + 1));
    CHECK(value(even + 1, 511) == double(even + 1));
    CHECK(value(even + 1, 512) == double(even + 2));
    CHECK(value(2 * even - 1, 512) == double(2 * even));
  }
}

TEMPLATE_TEST_CASE("finite numbers raise nothing that could trap", "", float, double) {
  std::mt19937 random(7);
  for (const int width : {0, 10, 60}) {
    auto values = random_numbers<TestType>(1030, -20 - width, -20, random);
    for (std::size_t i = 0; i < values.size(); i += 1 + random() % 8) values[i] = 0;
    std::feclearexcept(FE_ALL_EXCEPT);
    const auto all = sums(std::span<const TestType>(values));
    CHECK(std::fetestexcept(FE_INVALID | FE_DIVBYZERO | FE_OVERFLOW | FE_UNDERFLOW) == 0);
    CHECK(all[0].finite());
  }
}

TEST_CASE("sums of floats don't depend on the rounding mode") {
  std::mt19937 random(6);
  for (int round = 0; round < 100; ++round) {
    auto values = random_numbers<float>(1024, round % 4 == 1 ? -10 : -21, 0, random);
    if (round % 2 == 0) std::fill(values.begin(), values.end(), std::nextafter(1.F, 0.F) / 3);
    const SquareSum nearest = sum_of(values);
    for (const int mode : {FE_UPWARD, FE_DOWNWARD, FE_TOWARDZERO}) {
      std::fesetround(mode);
      const auto all = sums(std::span<const float>(values));
      const double value = nearest.value();
      std::fesetround(FE_TONEAREST);
      CHECK(value == nearest.value());
      for (const auto& sum : all) CHECK(sum == nearest);
    }
  }
}

}  // namespace
