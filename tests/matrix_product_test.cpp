// SPDX-License-Identifier: Apache-2.0
// PlainProduct gives the bits of three loops, wherever matrices lie. Built with -ffp-contract=off.
#include <zero/detail/blocked_product.hpp>
#include <zero/detail/with_packs.hpp>
#include <zero/matrix_product.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <limits>
#include <random>
#include <type_traits>
#include <vector>

#include "catch.hpp"

namespace {

using zero::Transpose;

template <class T>
std::vector<T> draw(std::size_t n, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<T> numbers(n);
  for (T& x : numbers) x = static_cast<T>(random()) / T(4294967296.) - T(0.5);
  return numbers;
}

template <class T>
std::vector<T> three_loops(std::size_t m, std::size_t n, std::size_t k, const std::vector<T>& a,
                           const std::vector<T>& b, Transpose transpose_b) {
  std::vector<T> c(m * n);
  for (std::size_t i = 0; i < m; ++i) {
    for (std::size_t j = 0; j < n; ++j) {
      for (std::size_t p = 0; p < k; ++p) {
        c[i * n + j] +=
            a[i * k + p] * (transpose_b == Transpose::yes ? b[j * k + p] : b[p * n + j]);
      }
    }
  }
  return c;
}

// Around the sizes of tiles and blocks.
constexpr std::array<std::array<std::size_t, 3>, 14> extents{{{1, 1, 1},
                                                              {1, 40, 3},
                                                              {40, 1, 3},
                                                              {3, 3, 300},
                                                              {4, 16, 256},
                                                              {5, 17, 257},
                                                              {8, 8, 8},
                                                              {7, 15, 255},
                                                              {9, 31, 513},
                                                              {13, 33, 12},
                                                              {16, 64, 5},
                                                              {1, 1, 1000},
                                                              {2, 50, 50},
                                                              {66, 67, 68}}};

}  // namespace

TEMPLATE_TEST_CASE("plain product: the bits of three loops, wherever matrices lie", "", float,
                   double) {
  using T = TestType;
  for (const auto& [m, n, k] : extents) {
    for (const Transpose transpose_b : {Transpose::no, Transpose::yes}) {
      CAPTURE(m, n, k, transpose_b == Transpose::yes);
      const std::vector<T> a = draw<T>(m * k, 1), b = draw<T>(k * n, 2);
      const std::vector<T> expected = three_loops(m, n, k, a, b, transpose_b);
      for (std::size_t at = 0; at < 9; ++at) {
        const T beside = 77;
        std::vector<T> a_at(at, beside), b_at((at * 5) % 8, beside);
        std::vector<T> c_at(m * n + 2 * at + 1, std::numeric_limits<T>::quiet_NaN());
        const auto past = c_at.begin() + static_cast<std::ptrdiff_t>(at + m * n);
        std::fill(past, c_at.end(), beside);
        a_at.insert(a_at.end(), a.begin(), a.end());
        b_at.insert(b_at.end(), b.begin(), b.end());
        zero::PlainProduct().multiply(m, n, k, a_at.data() + at, b_at.data() + (at * 5) % 8,
                                      transpose_b, c_at.data() + at);
        CHECK(std::equal(expected.begin(), expected.end(),
                         c_at.begin() + static_cast<std::ptrdiff_t>(at)));
        CHECK(std::all_of(past, c_at.end(), [&](T x) { return x == beside; }));
      }
    }
  }
}

TEMPLATE_TEST_CASE("plain product: the same bits without AVX2", "", float, double) {
  using T = TestType;
  for (const auto& [m, n, k] : extents) {
    CAPTURE(m, n, k);
    const std::vector<T> a = draw<T>(m * k, 3), b = draw<T>(k * n, 4);
    std::vector<T> best(m * n), baseline(m * n);
    zero::PlainProduct().multiply(m, n, k, a.data(), b.data(), Transpose::no, best.data());
    zero::detail::with_packs_baseline<zero::detail::Pack<T>>([&]<class X>(std::type_identity<X>) {
      zero::detail::blocked_product_with<X>(m, n, k, a.data(), b.data(), n, 1, baseline.data());
    });
    CHECK(best == baseline);
  }
}

TEMPLATE_TEST_CASE("plain product: a matrix with itself", "", float, double) {
  using T = TestType;
  const std::vector<T> a = draw<T>(20 * 20, 5);
  std::vector<T> c(400);
  for (const Transpose transpose_b : {Transpose::no, Transpose::yes}) {
    zero::PlainProduct().multiply(20, 20, 20, a.data(), a.data(), transpose_b, c.data());
    CHECK(c == three_loops(20, 20, 20, a, a, transpose_b));
  }
}
