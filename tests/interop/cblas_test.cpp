// SPDX-License-Identifier: Apache-2.0
// The BLAS product against the plain one, and Muon with it.
#include <zero/interop/cblas.hpp>
#include <zero/optim/muon.hpp>

#include <array>
#include <cmath>
#include <cstddef>
#include <limits>
#include <random>
#include <span>
#include <vector>

#include "catch.hpp"

namespace {

template <class T>
std::vector<T> draw(std::size_t n, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<T> numbers(n);
  for (T& x : numbers) x = static_cast<T>(random()) / T(4294967296.) - T(0.5);
  return numbers;
}

template <class T>
bool close(const std::vector<T>& a, const std::vector<T>& b, T bound) {
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (!(std::abs(a[i] - b[i]) <= bound)) return false;
  }
  return a.size() == b.size();
}

}  // namespace

TEMPLATE_TEST_CASE("cblas: the product of the plain one", "", float, double) {
  using T = TestType;
  constexpr std::array<std::array<std::size_t, 3>, 4> extents{
      {{1, 1, 1}, {3, 50, 7}, {20, 4, 33}, {64, 65, 66}}};
  for (const auto& [m, n, k] : extents) {
    for (const auto transpose_b : {zero::Transpose::no, zero::Transpose::yes}) {
      CAPTURE(m, n, k);
      const std::vector<T> a = draw<T>(m * k, 1), b = draw<T>(k * n, 2);
      std::vector<T> plain(m * n), blas(m * n, std::numeric_limits<T>::quiet_NaN());
      zero::PlainProduct().multiply(m, n, k, a.data(), b.data(), transpose_b, plain.data());
      zero::CblasProduct().multiply(m, n, k, a.data(), b.data(), transpose_b, blas.data());
      CHECK(close(plain, blas, 100 * std::numeric_limits<T>::epsilon()));
    }
  }
}

TEMPLATE_TEST_CASE("cblas: Muon goes the same way", "", float, double) {
  using T = TestType;
  const std::array<std::size_t, 2> shape{24, 10};
  const std::vector<T> gradient = draw<T>(240, 3);
  const auto stepped = [&](const auto& muon) {
    std::vector<T> values = draw<T>(240, 4), buffer(240);
    std::vector<T> workspace(zero::workspace_elements(muon, shape));
    for (int t = 1; t <= 3; ++t) {
      muon.update(zero::TensorRef<T>{shape, values, gradient, workspace},
                  std::array{std::span<T>(buffer)}, t);
    }
    return values;
  };
  const std::vector<T> plain = stepped(zero::Muon{.lr = 0.1});
  const std::vector<T> blas = stepped(zero::BasicMuon<zero::CblasProduct>{.lr = 0.1});
  CHECK(close(plain, blas, 10'000 * std::numeric_limits<T>::epsilon()));
}

TEST_CASE("cblas: extents beyond int are refused") {
  using Catch::Matchers::ContainsSubstring;
  const zero::BasicMuon<zero::CblasProduct> muon;
  const std::size_t most = std::numeric_limits<int>::max();
  CHECK_NOTHROW(muon.validate(std::array<std::size_t, 2>{2, most}));
  const std::array<std::size_t, 2> shape{2, most + 1};
  CHECK_THROWS_AS(muon.validate(shape), zero::UsageError);
  CHECK_THROWS_WITH(zero::validate(muon, shape), ContainsSubstring("at most 2147483647 rows") &&
                                                     ContainsSubstring("PlainProduct"));
}
