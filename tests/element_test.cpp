// SPDX-License-Identifier: Apache-2.0
// Elements of 16 bits: their values, both roundings, the noise, packs against single numbers, and
// sums over ranks.
#include <zero/bfloat16.hpp>
#include <zero/detail/convert.hpp>
#include <zero/detail/pack.hpp>
#include <zero/detail/rank_order_sum.hpp>
#include <zero/detail/rounding.hpp>
#include <zero/detail/update_loop.hpp>
#include <zero/element.hpp>
#include <zero/float16.hpp>
#include <zero/rounding.hpp>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <random>
#include <span>
#include <string_view>
#include <type_traits>
#include <vector>

#include "catch.hpp"

#if ZERO_SSE2
#include <xmmintrin.h>
#endif

namespace {

using zero::bfloat16;
using zero::float16;
using zero::Rounding;
using zero::detail::load_element;
using zero::detail::noise_bits;
using zero::detail::noise_key;
using zero::detail::NoiseKey;
using zero::detail::round_to;

/// A bfloat16 of somebody else, whose own conversions must not be used.
struct ForeignBfloat16 {
  std::uint16_t raw;
};

}  // namespace

template <>
struct zero::element_traits<ForeignBfloat16> {
  static constexpr ElementType type = ElementType::bfloat16;
  static constexpr std::string_view name = "bfloat16";
  using arithmetic = float;
  static float load(ForeignBfloat16) { throw "used"; }
  static ForeignBfloat16 store(float) { throw "used"; }
};

namespace {

static_assert(zero::detail::is_16_bit<ForeignBfloat16> && !zero::detail::is_16_bit<float>);
static_assert(static_cast<float>(bfloat16(1.5F)) == 1.5F && float16(-2) == float16(-2));
static_assert(bfloat16::from_bits(0x3f80) == bfloat16(1) &&
              float16::from_bits(0x3c00).bits == 0x3c00);
static_assert(bfloat16(0.F) == bfloat16(-0.F) && !(float16(0.F) == float16(1)));
static_assert(round_to<float16, Rounding::stochastic>(0x1p-25F, 0x8000).bits == 1);
static_assert(round_to<float, Rounding::stochastic>(0.1F, 0xffff) == 0.1F);
static_assert(noise_key(0, 0, 0).a != noise_key(0, 0, 1).a);

// ---- An independent reading of the formats

template <class T>
struct Format;
template <>
struct Format<bfloat16> {
  static constexpr int exponent_bits = 8, mantissa_bits = 7;
};
template <>
struct Format<float16> {
  static constexpr int exponent_bits = 5, mantissa_bits = 10;
};

template <class T>
constexpr std::uint16_t infinity_bits =
    ((1 << Format<T>::exponent_bits) - 1) << Format<T>::mantissa_bits;

/// The value; what follows the largest finite number counts as the next power of two.
template <class T>
double value_of(std::uint32_t bits) {
  using F = Format<T>;
  const int mantissa = static_cast<int>(bits & ((1U << F::mantissa_bits) - 1));
  const int exponent = static_cast<int>((bits & 0x7fffU) >> F::mantissa_bits);
  const int bias = (1 << (F::exponent_bits - 1)) - 1;
  const double magnitude = exponent == 0 ? std::ldexp(mantissa, 1 - bias - F::mantissa_bits)
                                         : std::ldexp(mantissa + (1 << F::mantissa_bits),
                                                      exponent - bias - F::mantissa_bits);
  return (bits & 0x8000U) != 0 ? -magnitude : magnitude;
}

/// The bits of the magnitude at or below |x|, or of infinity from where it is certain.
template <class T>
std::uint16_t lower_neighbour(double x) {
  std::uint32_t low = 0,
                high = infinity_bits<T>;  // value(low) <= |x|, and less than value(high + 1)
  while (low < high) {
    const std::uint32_t middle = (low + high + 1) / 2;
    if (value_of<T>(middle) <= std::abs(x)) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return static_cast<std::uint16_t>(low);
}

/// How far |x| is from its lower neighbour to the upper one.
template <class T>
double fraction_of(double x) {
  const std::uint16_t lower = lower_neighbour<T>(x);
  if (lower == infinity_bits<T>) return 0;
  const double below = value_of<T>(lower);
  return (std::abs(x) - below) / (value_of<T>(lower + 1U) - below);
}

template <class T>
std::uint16_t nearest(float x) {
  const double fraction = fraction_of<T>(x);
  std::uint32_t bits = lower_neighbour<T>(x);
  if (fraction > 0.5 || (fraction == 0.5 && bits % 2 == 1)) ++bits;
  return static_cast<std::uint16_t>(std::signbit(x) ? bits | 0x8000U : bits);
}

template <class T>
bool is_nan(std::uint16_t bits) {
  return (bits & 0x7fffU) > infinity_bits<T>;
}

std::uint32_t bits_of(float x) { return std::bit_cast<std::uint32_t>(x); }

#ifdef ZERO_TEST_EACH_ONCE  // sanitizers: a sample; optimised, all are taken with them too
constexpr std::uint32_t pattern_step = 13;
constexpr int random_floats = 8'000;
constexpr std::size_t noise_count = 1 << 15;
#else
constexpr std::uint32_t pattern_step = 1;
constexpr int random_floats = 100'000;
constexpr std::size_t noise_count = 1 << 18;
#endif

/// All values of `T`, those between two of them, what is just beside either, and random floats.
template <class T>
std::vector<float> many_floats() {
  std::vector<float> all;
  const float infinity = std::numeric_limits<float>::infinity();
  const auto add = [&](float x) {
    for (const float y : {x, std::nextafter(x, -infinity), std::nextafter(x, infinity)}) {
      all.push_back(y);
      all.push_back(-y);
    }
  };
  for (std::uint32_t bits = 0; bits < infinity_bits<T>; bits += pattern_step) {
    const double here = value_of<T>(bits), next = value_of<T>(bits + 1);
    add(static_cast<float>(here));
    add(static_cast<float>((here + next) / 2));
  }
  for (const float x :
       {65504.F, 65519.99F, 65520.F, 65535.99F, 65536.F, 1e9F, 0x1p-24F, 0x1p-25F, 0x1p-26F,
        0x1p-40F, 0x1p-41F, 0x1p-126F, 0x1p-149F, std::numeric_limits<float>::max()}) {
    add(x);
  }
  std::mt19937 random(1);
  for (int i = 0; i < random_floats; ++i) {
    const auto x = std::bit_cast<float>(static_cast<std::uint32_t>(random()));
    if (std::isfinite(x)) all.push_back(x);
    // Few random exponents are those of binary16.
    all.push_back(
        std::bit_cast<float>(0x2f800000U + static_cast<std::uint32_t>(random()) % 0x18800000U));
  }
  return all;
}

std::vector<float> not_finite() {
  std::vector<float> all;
  for (const std::uint32_t bits :
       {0x7f800000U, 0x7f800001U, 0x7fa00000U, 0x7fbfffffU, 0x7fc00000U, 0x7fffffffU}) {
    all.push_back(std::bit_cast<float>(bits));
    all.push_back(std::bit_cast<float>(bits | 0x80000000U));
  }
  return all;
}

/// Compares arrays, saying no more than where they differ first.
template <class Got, class Want>
void check_same(std::size_t count, Got&& got, Want&& want) {
  for (std::size_t i = 0; i < count; ++i) {
    if (got(i) == want(i)) continue;
    CAPTURE(i, got(i), want(i));
    FAIL_CHECK("differs");
    return;
  }
}

/// Runs `body` as it is and with subnormal floats flushed to zero.
template <class Body>
void in_all_modes(Body body) {
  body();
#if ZERO_SSE2
  const unsigned before = _mm_getcsr();
  _mm_setcsr(before | 0x8040U);  // flush results to zero, read operands as zero
  body();
  _mm_setcsr(before);
#endif
}

}  // namespace

TEMPLATE_TEST_CASE("elements: values of all patterns", "[element]", bfloat16, float16) {
  using Traits = zero::element_traits<TestType>;
  const auto from_bits = [](std::size_t bits) {
    return TestType::from_bits(static_cast<std::uint16_t>(bits));
  };
  std::vector<std::uint32_t> want(0x10000);
  for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
    if ((bits & 0x7fffU) < infinity_bits<TestType>) {
      want[bits] = bits_of(static_cast<float>(value_of<TestType>(bits)));
    } else {  // infinities and NaNs keep their mantissas' bits, but that float16's become quiet
      want[bits] = (bits & 0x8000U) << 16 | 0x7f800000U |
                   (bits & ((1U << Format<TestType>::mantissa_bits) - 1))
                       << (23 - Format<TestType>::mantissa_bits);
      if (std::is_same_v<TestType, float16> && is_nan<float16>(static_cast<std::uint16_t>(bits))) {
        want[bits] |= 0x400000U;
      }
    }
  }
  std::vector<std::uint32_t> got(0x10000);
  std::vector<std::uint16_t> back(0x10000), drawn(0x10000);
  in_all_modes([&] {
    for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
      const float value = Traits::load(from_bits(bits));
      got[bits] = bits_of(value);
      back[bits] = Traits::store(value).bits;
      drawn[bits] = back[bits];
      for (const std::uint32_t noise : {0U, 1U, 0x7fffU, 0x8000U, 0xffffU}) {
        const auto again = round_to<TestType, Rounding::stochastic>(value, noise).bits;
        if (again != back[bits]) drawn[bits] = again;
      }
    }
    check_same(want.size(), [&](auto i) { return got[i]; }, [&](auto i) { return want[i]; });
    // What is already of the type stays as it is, but for NaNs, which become quiet.
    const auto quiet = [&](std::size_t i) {
      const auto bits = static_cast<std::uint16_t>(i);
      if (!is_nan<TestType>(bits)) return static_cast<int>(bits);
      return std::is_same_v<TestType, bfloat16> ? 0xffff : bits | 0x200;
    };
    check_same(want.size(), [&](auto i) { return back[i]; }, quiet);
    check_same(want.size(), [&](auto i) { return drawn[i]; }, quiet);
  });
}

TEMPLATE_TEST_CASE("elements: rounding to nearest", "[element]", bfloat16, float16) {
  const std::vector<float> floats = many_floats<TestType>();
  std::vector<std::uint16_t> want(floats.size());
  std::transform(floats.begin(), floats.end(), want.begin(), nearest<TestType>);
  std::vector<std::uint16_t> got(floats.size());
  in_all_modes([&] {
    std::transform(floats.begin(), floats.end(), got.begin(),
                   [](float x) { return TestType(x).bits; });
    check_same(floats.size(), [&](auto i) { return got[i]; }, [&](auto i) { return want[i]; });
  });
  for (const float x : not_finite()) {
    const auto bits = TestType(x).bits;
    // A bfloat16's NaN has all bits set, whatever the sign was.
    if (!(std::isnan(x) && std::is_same_v<TestType, bfloat16>)) {
      CHECK((bits >= 0x8000) == std::signbit(x));
    }
    CHECK(is_nan<TestType>(bits) == std::isnan(x));
    if (!std::isnan(x)) CHECK((bits & 0x7fff) == infinity_bits<TestType>);
  }
}

#if defined(__FLT16_MAX__) && ZERO_SSE2
TEST_CASE("elements: float16 is the compiler's", "[element]") {
  __extension__ using Native = _Float16;
  for (std::uint32_t i = 0; i < 0x10000; ++i) {
    const auto bits = static_cast<std::uint16_t>(i);
    const auto want = static_cast<float>(std::bit_cast<Native>(bits));
    const auto got = static_cast<float>(float16::from_bits(bits));
    if (std::isnan(want) ? !std::isnan(got) : bits_of(got) != bits_of(want))
      FAIL("pattern " << bits);
  }
  const std::vector<float> floats = many_floats<float16>();
  check_same(
      floats.size(), [&](auto i) { return float16(floats[i]).bits; },
      [&](auto i) { return std::bit_cast<std::uint16_t>(static_cast<Native>(floats[i])); });
}
#endif

TEMPLATE_TEST_CASE("elements: stochastic rounding gives a neighbour", "[element]", bfloat16,
                   float16) {
  const std::vector<float> floats = many_floats<TestType>();
  struct Bounds {
    std::uint32_t lower, upper;
  };
  std::vector<Bounds> bounds;  // outside the modes, in which the reference would read zeros
  for (const float x : floats) {
    const std::uint32_t lower = lower_neighbour<TestType>(x);
    bounds.push_back({lower, fraction_of<TestType>(x) == 0 ? lower : lower + 1});
  }
  std::mt19937 random(2);
  std::size_t wrong = 0;
  in_all_modes([&] {
    for (std::size_t i = 0; i < floats.size(); ++i) {
      for (const std::uint32_t noise :
           {0U, 0xffffU, static_cast<std::uint32_t>(random()) & 0xffffU}) {
        const auto bits = round_to<TestType, Rounding::stochastic>(floats[i], noise).bits;
        const std::uint32_t magnitude = bits & 0x7fffU;
        if (magnitude != bounds[i].lower && (magnitude != bounds[i].upper || noise == 0)) ++wrong;
        if ((bits >= 0x8000) != std::signbit(floats[i])) ++wrong;
      }
    }
  });
  CHECK(wrong == 0);
  for (const float x : not_finite()) {
    for (const std::uint32_t noise : {0U, 0xffffU}) {
      CHECK(round_to<TestType, Rounding::stochastic>(x, noise).bits == TestType(x).bits);
    }
  }
}

TEMPLATE_TEST_CASE("elements: stochastic rounding is right on average", "[element]", bfloat16,
                   float16) {
  std::mt19937 random(3);
  std::vector<float> floats{
      1 + 0x1p-9F, -1 - 0x1p-14F, 0.1F,      -3.3F,         65520.F,
      6e-8F,       2.3e-6F,       6.0e-5F,   0x1.8p-25F,    1e-20F,
      0x1p-14F,    65504.5F,      0x1p-130F, 0x1.fffffep3F, 511.77F * 0x1p-24F};
  for (int i = 0; i < 40; ++i) {
    floats.push_back(
        std::bit_cast<float>(0x2f800000U + static_cast<std::uint32_t>(random()) % 0x18800000U));
  }
  for (const float x : floats) {
    const std::uint16_t lower = lower_neighbour<TestType>(x);
    std::size_t up = 0;
    for (std::uint32_t noise = 0; noise < 0x10000; ++noise) {
      up += (round_to<TestType, Rounding::stochastic>(x, noise).bits & 0x7fff) != lower ? 1 : 0;
    }
    CAPTURE(x);
    // Exact, but for subnormal halves, whose probabilities are cut to a multiple of 2^-16.
    CHECK(static_cast<double>(up) == std::floor(fraction_of<TestType>(x) * 0x1p16));
  }
}

// ---- Noise

namespace {

/// What the correlation of two independent sequences exceeds with a probability of 1e-6.
const double significant = 5 / std::sqrt(static_cast<double>(noise_count));

template <class A, class B>
double correlation(A a, B b) {
  double sum = 0;
  for (std::size_t i = 0; i < noise_count; ++i) {
    const auto element = static_cast<std::uint32_t>(i);
    sum += (a(element) - 32767.5) * (b(element) - 32767.5);
  }
  return sum / static_cast<double>(noise_count) * 12 / 0x1p32;
}

}  // namespace

TEST_CASE("noise: uniform", "[element]") {
  const NoiseKey key = noise_key(1, 2, 3);
  for (std::uint32_t quantity = 0; quantity < 4; ++quantity) {
    std::array<double, 256> upper{}, lower{};
    for (std::uint32_t i = 0; i < noise_count; ++i) {
      const std::uint32_t noise = noise_bits(key, i, quantity);
      ++upper.at(noise >> 8);
      ++lower[noise & 0xff];
    }
    for (const auto& counts : {upper, lower}) {
      double chi_square = 0;  // of 255 degrees of freedom: 255 with a deviation of 22.6
      for (const double count : counts) {
        chi_square += (count - noise_count / 256.) * (count - noise_count / 256.);
      }
      chi_square /= noise_count / 256.;
      CHECK(chi_square > 255 - 5 * 22.6);
      CHECK(chi_square < 255 + 5 * 22.6);
    }
  }
}

TEST_CASE("noise: nothing is correlated", "[element]") {
  const auto sequence = [](NoiseKey key, std::uint32_t quantity, std::uint32_t shift = 0) {
    return [=](std::uint32_t i) { return noise_bits(key, i + shift, quantity); };
  };
  for (const std::uint64_t seed : {0U, 1U, 77U}) {
    const NoiseKey key = noise_key(seed, 5, 6);
    for (const std::uint32_t quantity : {0U, 1U}) {
      const auto own = sequence(key, quantity);
      for (const std::uint32_t shift :
           {1U, 2U, 4U, 8U, 64U, 1024U, 12288U, 0x10000U, 0x80000000U}) {
        CAPTURE(shift);
        CHECK(std::abs(correlation(own, sequence(key, quantity, shift))) < significant);
      }
      CHECK(std::abs(correlation(own, sequence(noise_key(seed, 6, 6), quantity))) < significant);
      CHECK(std::abs(correlation(own, sequence(noise_key(seed, 6, 5), quantity))) < significant);
      CHECK(std::abs(correlation(own, sequence(noise_key(seed, 5, 7), quantity))) < significant);
      CHECK(std::abs(correlation(own, sequence(noise_key(seed + 1, 5, 6), quantity))) <
            significant);
    }
    for (std::uint32_t a = 0; a < 6; ++a) {
      for (std::uint32_t b = 0; b < a; ++b) {
        CAPTURE(a, b);
        CHECK(std::abs(correlation(sequence(key, a), sequence(key, b))) < significant);
      }
    }
  }
}

TEST_CASE("noise: small steps add up", "[element]") {
  // To nearest, 1 + 2^-10 would stay 1 in bfloat16 for ever.
  double total = 0;
  constexpr std::uint32_t elements = 4096, steps = 128;
  for (std::uint32_t element = 0; element < elements; ++element) {
    bfloat16 x(1);
    for (std::uint32_t step = 0; step < steps; ++step) {
      x = round_to<bfloat16, Rounding::stochastic>(static_cast<float>(x) + 0x1p-10F,
                                                   noise_bits(noise_key(9, step, 0), element, 0));
    }
    total += static_cast<double>(static_cast<float>(x));
  }
  // One element's deviation is that of 128 draws of 1/8 in steps of 2^-7: 0.03.
  CHECK(total / elements == Catch::Approx(1.125).margin(5 * 0.03 / 64));
}

// ---- Packs

namespace {

constexpr std::uint32_t first_element = 0xffffff00U;  // so that numbers wrap

template <class X, class T>
[[gnu::always_inline]] inline void load_all(const T* from, std::size_t count, float* to) {
  for (std::size_t i = 0; i < count; i += X::width)
    zero::detail::load_pack<X>(from + i).store(to + i);
}

/// `to[q]` is rounded as quantity q.
template <class X, Rounding rounding, class T>
[[gnu::always_inline]] inline void store_all(const float* from, std::size_t count, NoiseKey key,
                                             T* const* to) {
  using zero::detail::store_pack;
  for (std::size_t i = 0; i < count; i += X::width) {
    const X x = X::load(from + i);
    const zero::detail::PackNoise<X> noise{key, first_element + static_cast<std::uint32_t>(i)};
    store_pack<rounding, 0>(x, to[0] + i, noise);
    store_pack<rounding, 1>(x, to[1] + i, noise);
    store_pack<rounding, 2>(x, to[2] + i, noise);
    store_pack<rounding, 3>(x, to[3] + i, noise);
  }
}

using X = zero::detail::Pack<float>;

struct Baseline {
  template <class T>
  [[gnu::noinline]] static void load(const T* from, std::size_t count, float* to) {
    load_all<X>(from, count, to);
  }
  template <Rounding rounding, class T>
  [[gnu::noinline]] static void store(const float* from, std::size_t count, NoiseKey key,
                                      T* const* to) {
    store_all<X, rounding>(from, count, key, to);
  }
};

#if ZERO_AVX2_CLONES
struct Avx2 {
  template <class T>
  [[gnu::target("avx2"), gnu::flatten, gnu::noinline]] static void load(const T* from,
                                                                        std::size_t count,
                                                                        float* to) {
    load_all<X::InAvx>(from, count, to);
  }
  template <Rounding rounding, class T>
  [[gnu::target("avx2"), gnu::flatten, gnu::noinline]] static void store(const float* from,
                                                                         std::size_t count,
                                                                         NoiseKey key,
                                                                         T* const* to) {
    store_all<X::InAvx, rounding>(from, count, key, to);
  }
};
#endif

template <class Version, Rounding rounding, class T>
void check_stores(const std::vector<float>& floats, NoiseKey key) {
  std::vector<std::vector<T>> got(4, std::vector<T>(floats.size()));
  std::array<T*, 4> to{};
  for (std::size_t q = 0; q < 4; ++q) to[q] = got[q].data();
  Version::template store<rounding>(floats.data(), floats.size(), key, to.data());
  for (std::uint32_t q = 0; q < 4; ++q) {
    CAPTURE(q);
    check_same(
        floats.size(), [&](auto i) { return std::bit_cast<std::uint16_t>(got[q][i]); },
        [&](auto i) {
          const auto element = first_element + static_cast<std::uint32_t>(i);
          return std::bit_cast<std::uint16_t>(
              round_to<T, rounding>(floats[i], noise_bits(key, element, q)));
        });
  }
}

template <class Version, class T>
void check_packs() {
  std::vector<T> patterns(0x10000);
  for (std::size_t i = 0; i < patterns.size(); ++i) {
    patterns[i] = std::bit_cast<T>(static_cast<std::uint16_t>(i));
  }
  std::vector<float> values(patterns.size());
  Version::load(patterns.data(), patterns.size(), values.data());
  check_same(
      patterns.size(), [&](auto i) { return bits_of(values[i]); },
      [&](auto i) { return bits_of(load_element(patterns[i])); });

  using Own = std::conditional_t<std::is_same_v<T, float16>, float16, bfloat16>;
  std::vector<float> floats = many_floats<Own>();
  const std::vector<float> special = not_finite();
  floats.insert(floats.end(), special.begin(), special.end());
  floats.resize(floats.size() / 8 * 8 + 8);
  check_stores<Version, Rounding::nearest, T>(floats, noise_key(0, 0, 0));
  for (const std::uint64_t step : {1U, 2U}) {
    check_stores<Version, Rounding::stochastic, T>(floats, noise_key(3, step, 0));
  }
}

}  // namespace

TEMPLATE_TEST_CASE("packs: the bits of single numbers", "[element]", bfloat16, float16,
                   ForeignBfloat16) {
  in_all_modes([] {
    check_packs<Baseline, TestType>();
#if ZERO_AVX2_CLONES
    if (__builtin_cpu_supports("avx2")) check_packs<Avx2, TestType>();
#endif
  });
}

TEST_CASE("packs: their own type is stored as it is", "[element]") {
  const std::array<float, 8> from{0.1F, -0.F, 1e-40F, 1e30F, 5, 6, 7, 8};
  std::array<float, 8> to{};
  const X x = zero::detail::load_pack<X>(from.data());
  zero::detail::store_pack<Rounding::stochastic, 0>(x, to.data(),
                                                    {.key = {.a = 1, .b = 2}, .first = 3});
  CHECK(std::equal(from.begin(), from.end(), to.begin(),
                   [](float a, float b) { return bits_of(a) == bits_of(b); }));
  using Doubles = zero::detail::Pack<double>;
  std::array<double, 4> copy{};
  const std::array<double, 4> doubles{0.1, 2, 3, 4};
  zero::detail::store_pack(zero::detail::load_pack<Doubles>(doubles.data()), copy.data());
  CHECK(copy == doubles);
}

// ---- Sums

namespace {

/// Arrays of summands, each of which starts at an alignment of its own.
template <class T>
struct Summands {
  std::vector<std::vector<T>> arrays;
  std::vector<const T*> pointers;

  Summands(std::size_t ranks, std::size_t n) {
    std::mt19937 random(static_cast<std::uint32_t>(ranks * 1000 + n));
    std::normal_distribution<float> normal(0, 3);
    for (std::size_t r = 0; r < ranks; ++r) {
      std::vector<T>& array = arrays.emplace_back(n + r % 9);
      for (T& x : array) x = round_to<T, Rounding::nearest>(normal(random));
    }
    for (std::size_t r = 0; r < ranks; ++r) pointers.push_back(arrays[r].data() + r % 9);
  }

  [[nodiscard]] float sum(std::size_t i) const {
    float sum = load_element(pointers[0][i]);
    for (std::size_t r = 1; r < pointers.size(); ++r) sum += load_element(pointers[r][i]);
    return sum;
  }
};

template <class T>
void check_sums(const Summands<T>& summands, std::size_t n, std::size_t misaligned) {
  std::vector<T> rounded(n + misaligned + 1, T(77.F));
  std::vector<float> exact(n + misaligned + 1, 77.F);
  zero::detail::sum_in_rank_order<T>(summands.pointers, n, rounded.data() + misaligned);
  zero::detail::sum_sources(zero::detail::GradientSum<T>{summands.pointers, 1}, 0, n,
                            exact.data() + misaligned);
  CAPTURE(n, misaligned, summands.pointers.size());
  check_same(
      n, [&](auto i) { return bits_of(exact[misaligned + i]); },
      [&](auto i) { return bits_of(summands.sum(i)); });
  check_same(
      n, [&](auto i) { return rounded[misaligned + i].bits; },
      [&](auto i) { return T(summands.sum(i)).bits; });
  CHECK(rounded.back() == T(77.F));
  CHECK(exact.back() == 77);
}

}  // namespace

TEMPLATE_TEST_CASE("sums: in float, in rank order, rounded once", "[element]", bfloat16, float16) {
  for (const std::size_t ranks : {1U, 2U, 3U, 5U, 9U}) {
    const Summands<TestType> summands(ranks, 300);
    for (std::size_t n = 0; n < 100; ++n) check_sums(summands, n, n % 5);
    for (std::size_t misaligned = 0; misaligned < 9; ++misaligned) {
      check_sums(summands, 300, misaligned);
    }
  }
}

TEMPLATE_TEST_CASE("sums: past the caches", "[element]", bfloat16, float16) {
  const std::size_t n = zero::detail::streamed_bytes / 2 + 1234;
  const Summands<TestType> summands(2, n);
  check_sums(summands, n, 0);
  check_sums(summands, n, 3);
}

TEMPLATE_TEST_CASE("sums: into one of the summands", "[element]", bfloat16, float16) {
  for (const std::size_t n : {77U, 5000U}) {
    for (std::size_t target = 0; target < 3; ++target) {
      Summands<TestType> summands(3, n);
      std::vector<std::uint16_t> want(n);
      for (std::size_t i = 0; i < n; ++i) want[i] = TestType(summands.sum(i)).bits;
      TestType* const out = summands.arrays[target].data() + target;
      zero::detail::sum_in_rank_order<TestType>(summands.pointers, n, out);
      check_same(n, [&](auto i) { return out[i].bits; }, [&](auto i) { return want[i]; });
    }
  }
}

TEST_CASE("sums: rounding every partial sum would lose all summands", "[element]") {
  constexpr std::size_t n = 40;
  const std::vector<bfloat16> one(n, bfloat16(1)), small(n, bfloat16(0x1p-9F));
  std::vector<const bfloat16*> sources(257, small.data());
  sources[0] = one.data();
  std::vector<bfloat16> sum(n);
  zero::detail::sum_in_rank_order<bfloat16>(sources, n, sum.data());
  std::vector<float> exact(n);
  zero::detail::sum_sources(zero::detail::GradientSum<bfloat16>{sources, 1}, 0, n, exact.data());
  for (std::size_t i = 0; i < n; ++i) {
    CHECK(static_cast<float>(sum[i]) == 1.5F);
    CHECK(exact[i] == 1.5F);
  }
}

TEST_CASE("sums: unrounded ones of float and double are their sums", "[element]") {
  const std::vector<double> a{1, 0.1, 3}, b{4, 0.2, 6};
  const std::vector<const double*> sources{a.data(), b.data()};
  std::vector<double> sum(3);
  zero::detail::sum_sources(zero::detail::GradientSum<double>{sources, 1}, 0, 3, sum.data());
  CHECK(sum == std::vector<double>{5, 0.1 + 0.2, 9});
}
