// SPDX-License-Identifier: Apache-2.0
// LAMB and Muon against independent references in double, by hand, and in their bits. Built with
// -ffp-contract=off: the scalar evaluation here would otherwise be another computation.
#include <zero/detail/pack.hpp>
#include <zero/error.hpp>
#include <zero/math.hpp>
#include <zero/matrix_product.hpp>
#include <zero/optim/adam.hpp>
#include <zero/optim/lamb.hpp>
#include <zero/optim/muon.hpp>
#include <zero/optimizer.hpp>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <numbers>
#include <numeric>
#include <random>
#include <span>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "catch.hpp"

namespace {

using Catch::Matchers::ContainsSubstring;
using zero::Lamb;
using zero::Muon;
using Shape = std::vector<std::size_t>;

constexpr double nan_value = std::numeric_limits<double>::quiet_NaN();
constexpr double infinity = std::numeric_limits<double>::infinity();

std::size_t elements(const Shape& shape) {
  return std::accumulate(shape.begin(), shape.end(), std::size_t{1}, std::multiplies<>());
}

template <class T>
std::vector<T> draw(std::size_t n, unsigned seed, double scale = 1) {
  std::mt19937 random(seed);
  std::vector<T> numbers(n);
  for (T& x : numbers)
    x = static_cast<T>((static_cast<double>(random()) / 4294967296. - 0.5) * scale);
  return numbers;
}

/// A tensor and its state, each array at some distance from a vector's alignment.
template <class T, std::size_t slot_count>
struct Tensor {
  Shape shape;
  std::array<std::vector<T>, slot_count + 2> arrays;  ///< values, gradient, slots
  std::array<std::size_t, slot_count + 2> offset{};

  Tensor(Shape extents, const std::vector<T>& values, std::size_t first_offset = 0)
      : shape(std::move(extents)) {
    for (std::size_t i = 0; i < arrays.size(); ++i) {
      offset[i] = first_offset * (i + 1) % 8;
      arrays[i].assign(offset[i] + elements(shape) + 3, beside);
      std::ranges::fill(span(i), T(0));
    }
    std::ranges::copy(values, span(0).begin());
  }

  std::span<T> span(std::size_t i) {
    return std::span(arrays[i]).subspan(offset[i], elements(shape));
  }
  std::vector<T> values() { return {span(0).begin(), span(0).end()}; }
  std::vector<T> slot(std::size_t i) { return {span(i + 2).begin(), span(i + 2).end()}; }

  /// One step with a workspace that is full of NaN.
  template <class Opt>
  void step(const Opt& optimizer, const std::vector<T>& gradient, std::int64_t t) {
    static_assert(Opt::slots.size() == slot_count);
    std::ranges::copy(gradient, span(1).begin());
    const std::size_t needed = zero::workspace_elements(optimizer, shape);
    std::vector<T> workspace(needed + 2 * offset[0] + 1, std::numeric_limits<T>::quiet_NaN());
    std::fill_n(workspace.begin(), offset[0], beside);
    std::fill(workspace.begin() + static_cast<std::ptrdiff_t>(offset[0] + needed), workspace.end(),
              beside);
    std::array<std::span<T>, slot_count> slots;
    for (std::size_t i = 0; i < zero::used_slots(optimizer); ++i) slots[i] = span(i + 2);
    optimizer.update(zero::TensorRef<T>{shape, span(0), span(1),
                                        std::span(workspace).subspan(offset[0], needed)},
                     slots, t);
    CHECK(std::ranges::equal(gradient, span(1), [](T a, T b) { return a == b || a != a; }));
    bool kept = true;
    const auto check_beside = [&](const std::vector<T>& array, std::size_t begin,
                                  std::size_t size) {
      for (std::size_t i = 0; i < array.size(); ++i) {
        if (i < begin || i >= begin + size) kept = kept && array[i] == beside;
      }
    };
    for (std::size_t i = 0; i < arrays.size(); ++i) {
      check_beside(arrays[i], offset[i], elements(shape));
    }
    check_beside(workspace, offset[0], needed);
    CHECK(kept);
  }

  static constexpr T beside = 77;
};

/// The values after one step from `values`.
template <class T, class Opt>
std::vector<T> stepped(const Opt& optimizer, const Shape& shape, const std::vector<T>& values,
                       const std::vector<T>& gradient, std::int64_t t = 1) {
  Tensor<T, Opt::slots.size()> tensor(shape, values);
  tensor.step(optimizer, gradient, t);
  return tensor.values();
}

template <class A, class B>
double largest_difference(const std::vector<A>& a, const std::vector<B>& b) {
  REQUIRE(a.size() == b.size());
  double largest = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    const double difference = std::abs(static_cast<double>(a[i]) - static_cast<double>(b[i]));
    if (!(difference <= largest)) largest = difference;  // NaN, too
  }
  return largest;
}

// ---- LAMB

/// Algorithm 2 of arXiv:1904.00962, line by line.
struct LambReference {
  Lamb options;
  std::vector<double> x, m, v;

  void step(const std::vector<double>& gradient, int t) {
    const std::size_t n = x.size();
    m.resize(n);
    v.resize(n);
    std::vector<double> direction(n);
    double x_squares = 0, direction_squares = 0;
    for (std::size_t i = 0; i < n; ++i) {
      const double g = options.maximize ? -gradient[i] : gradient[i];
      m[i] = options.beta1 * m[i] + (1 - options.beta1) * g;
      v[i] = options.beta2 * v[i] + (1 - options.beta2) * g * g;
      double m_hat = m[i], v_hat = v[i];
      if (options.bias_correction) {
        m_hat /= 1 - std::pow(options.beta1, t);
        v_hat /= 1 - std::pow(options.beta2, t);
      }
      const double r = m_hat / (std::sqrt(v_hat) + options.eps);
      direction[i] = r + options.weight_decay * x[i];
      x_squares += x[i] * x[i];
      direction_squares += direction[i] * direction[i];
    }
    double ratio = std::sqrt(x_squares) / std::sqrt(direction_squares);
    if (x_squares == 0 || direction_squares == 0) ratio = 1;
    for (std::size_t i = 0; i < n; ++i) x[i] -= options.lr * ratio * direction[i];
  }
};

/// The formulas in T, one number after the other, and the norms as documented: in double, one sum a
/// lane of a pack.
template <class T>
void scalar_lamb(const Lamb& o, std::vector<T>& x, const std::vector<T>& gradient,
                 std::vector<T>& m, std::vector<T>& v, std::int64_t t) {
  constexpr std::size_t lanes = zero::detail::Pack<T>::width;
  std::array<double, lanes> x_sums{}, direction_sums{};
  const T correction1 = static_cast<T>(o.bias_correction ? 1 / (1 - zero::power(o.beta1, t)) : 1);
  const T correction2 =
      static_cast<T>(o.bias_correction ? 1 / std::sqrt(1 - zero::power(o.beta2, t)) : 1);
  std::vector<T> direction(x.size());
  for (std::size_t i = 0; i < x.size(); ++i) {
    const T g = o.maximize ? -gradient[i] : gradient[i];
    m[i] = m[i] * T(o.beta1) + g * T(1 - o.beta1);
    v[i] = v[i] * T(o.beta2) + g * g * T(1 - o.beta2);
    direction[i] =
        m[i] * correction1 / (std::sqrt(v[i]) * correction2 + T(o.eps)) + x[i] * T(o.weight_decay);
    x_sums[i % lanes] += double(x[i]) * double(x[i]);
    direction_sums[i % lanes] += double(direction[i]) * double(direction[i]);
  }
  const double x_norm = std::sqrt(std::accumulate(x_sums.begin(), x_sums.end(), 0.));
  const double norm = std::sqrt(std::accumulate(direction_sums.begin(), direction_sums.end(), 0.));
  const T length = static_cast<T>(o.lr * (x_norm > 0 && norm > 0 ? x_norm / norm : 1));
  for (std::size_t i = 0; i < x.size(); ++i) x[i] = x[i] - direction[i] * length;
}

std::vector<Lamb> lamb_options() {
  return {{.lr = 0.1},
          {.lr = 0.1, .weight_decay = 0},
          {.lr = 0.1, .maximize = true},
          {.lr = 0.1, .weight_decay = 0.3, .bias_correction = false},
          {.lr = 0.02, .beta1 = 0.5, .beta2 = 0.7, .eps = 1e-3},
          {.lr = 0.1, .beta1 = 0, .beta2 = 0, .eps = 0}};
}

const std::vector<Shape> lamb_shapes{{},    {1},    {3},    {4},       {7},
                                     {8},   {9},    {5, 5}, {2, 8},    {3, 4, 5},
                                     {257}, {1000}, {1, 1}, {2, 0, 3}, {31}};

std::string text(const Lamb& o, const Shape& shape) {
  std::ostringstream out;
  out << "beta1 " << o.beta1 << ", eps " << o.eps << ", weight_decay " << o.weight_decay
      << ", bias_correction " << o.bias_correction << ", maximize " << o.maximize << ", "
      << elements(shape) << " elements";
  return out.str();
}

/// Which of values and gradients are 0.
enum class Zeros { none, values, gradients, first_gradient };

}  // namespace

TEMPLATE_TEST_CASE("lamb: the paper's algorithm", "", float, double) {
  using T = TestType;
  for (const Zeros zeros : {Zeros::none, Zeros::values, Zeros::gradients, Zeros::first_gradient}) {
    for (const Lamb& options : lamb_options()) {
      if (zeros != Zeros::none && options.eps == 0) continue;  // 0 / 0
      for (const Shape& shape : lamb_shapes) {
        INFO(text(options, shape) << ", zeros " << static_cast<int>(zeros));
        const std::size_t n = elements(shape);
        std::vector<T> values = draw<T>(n, 1);
        if (zeros == Zeros::values) std::ranges::fill(values, T(0));
        Tensor<T, 2> tensor(shape, values);
        LambReference reference{options, {values.begin(), values.end()}, {}, {}};
        for (int t = 1; t <= 6; ++t) {
          std::vector<T> gradient = draw<T>(n, 10 + static_cast<unsigned>(t), 0.1);
          if (zeros == Zeros::gradients || (zeros == Zeros::first_gradient && t == 1)) {
            std::ranges::fill(gradient, T(0));
          }
          tensor.step(options, gradient, t);
          reference.step({gradient.begin(), gradient.end()}, t);
          const double bound = sizeof(T) == 4 ? 1e-5 : 1e-14;
          CHECK(largest_difference(tensor.values(), reference.x) <= bound);
          CHECK(largest_difference(tensor.slot(0), reference.m) <= bound / 10);
          CHECK(largest_difference(tensor.slot(1), reference.v) <= bound / 10);
        }
      }
    }
  }
}

TEMPLATE_TEST_CASE("lamb: the bits of the formulas, wherever arrays lie", "", float, double) {
  using T = TestType;
  for (const Lamb& options : lamb_options()) {
    for (const Shape& shape : lamb_shapes) {
      INFO(text(options, shape));
      const std::size_t n = elements(shape);
      for (std::size_t offset = 0; offset < 8; ++offset) {
        std::vector<T> x = draw<T>(n, 1), m(n), v(n);
        Tensor<T, 2> tensor(shape, x, offset);
        for (int t = 1; t <= 3; ++t) {
          const std::vector<T> gradient = draw<T>(n, 10 + static_cast<unsigned>(t), 0.1);
          tensor.step(options, gradient, t);
          scalar_lamb(options, x, gradient, m, v, t);
        }
        CHECK(tensor.values() == x);
        CHECK(tensor.slot(0) == m);
        CHECK(tensor.slot(1) == v);
      }
    }
  }
}

TEMPLATE_TEST_CASE("lamb: by hand", "", float, double) {
  using T = TestType;
  const double bound = sizeof(T) == 4 ? 1e-6 : 1e-14;
  const auto step = [](const Lamb& o, std::vector<T> w, const std::vector<T>& g) {
    return stepped<T>(o, {w.size()}, w, g);
  };
  // A first step's u is the gradient's sign, of norm sqrt(2) here, and |(3, 4)| = 5.
  const double root = std::numbers::sqrt2;
  const Lamb pure{.lr = 0.1, .eps = 0, .weight_decay = 0};
  CHECK(largest_difference(step(pure, {3, 4}, {1, -2}),
                           std::vector{3 - 0.5 / root, 4 + 0.5 / root}) <= bound);
  // With decay: u = (1, -1) + 0.1 (3, 4) = (1.3, -0.6), of norm sqrt(2.05).
  const Lamb decays{.lr = 0.1, .eps = 0, .weight_decay = 0.1};
  const double length = 0.5 / std::sqrt(2.05);
  CHECK(largest_difference(step(decays, {3, 4}, {1, -2}),
                           std::vector{3 - 1.3 * length, 4 + 0.6 * length}) <= bound);
  // Zero values: ratio 1, u = (1, -1).
  CHECK(largest_difference(step(decays, {0, 0}, {1, -2}), std::vector{-0.1, 0.1}) <= bound);
  // Zero gradient: u = 0.1 w, whose ratio is 10; without decay u = 0 and nothing moves.
  const Lamb with_eps{.lr = 0.1, .weight_decay = 0.1};
  CHECK(largest_difference(step(with_eps, {3, 4}, {0, 0}), std::vector{2.7, 3.6}) <= bound);
  CHECK(step({.lr = 0.1, .weight_decay = 0}, {3, 4}, {0, 0}) == std::vector<T>{3, 4});
  // Alone, a number moves by lr of itself, whatever u's size.
  const Lamb raw{.lr = 0.1, .weight_decay = 0, .bias_correction = false};
  CHECK(largest_difference(step(raw, {2}, {5}), std::vector{1.8}) <= bound);
  // Without bias correction and ratio: 0.1 g / sqrt(0.001 g^2).
  CHECK(largest_difference(step({.lr = 0.1, .eps = 0, .bias_correction = false}, {0}, {5}),
                           std::vector{-0.01 / std::sqrt(0.001)}) <= bound);
}

TEMPLATE_TEST_CASE("lamb: what optax 0.2.8 computed", "", float, double) {
  using T = TestType;
  const Lamb lamb{.lr = 0.1};  // optax.lamb(0.1, weight_decay=0.01), float64
  Tensor<T, 2> tensor({5}, {0.5, -0.25, 1, 0, -2});
  tensor.step(lamb, {T(0.1), T(-0.2), T(0.3), T(0.4), T(-0.05)}, 1);
  tensor.step(lamb, {T(-0.3), T(0.1), T(0.2), T(0), T(0.15)}, 2);
  tensor.step(lamb, {T(0.05), T(0.25), T(-0.1), T(0.2), T(0.3)}, 3);
  const std::vector expected{0.5195193235072703, -0.16460983104499854, 0.6497817974329223,
                             -0.3339076546892845, -2.093425947471131};
  CHECK(largest_difference(tensor.values(), expected) <= (sizeof(T) == 4 ? 1e-6 : 1e-14));
}

TEMPLATE_TEST_CASE("lamb: NaN in a gradient stays in its element", "", float, double) {
  using T = TestType;
  for (const std::size_t where : {0, 8, 10}) {
    std::vector<T> gradient(11, T(0.5));
    gradient[where] = std::numeric_limits<T>::quiet_NaN();
    const std::vector<T> values = stepped<T>(Lamb{}, {11}, std::vector<T>(11, T(1)), gradient);
    for (std::size_t i = 0; i < 11; ++i) CHECK(std::isnan(values[i]) == (i == where));
  }
}

// ---- Muon

namespace {

/// Row-major, in double.
struct Matrix {
  std::size_t rows, columns;
  std::vector<double> x;
  double& operator()(std::size_t r, std::size_t c) { return x[r * columns + c]; }
  double operator()(std::size_t r, std::size_t c) const { return x[r * columns + c]; }
};

Matrix operator*(const Matrix& a, const Matrix& b) {
  Matrix c{a.rows, b.columns, std::vector<double>(a.rows * b.columns)};
  for (std::size_t i = 0; i < a.rows; ++i) {
    for (std::size_t j = 0; j < b.columns; ++j) {
      for (std::size_t p = 0; p < a.columns; ++p) c(i, j) += a(i, p) * b(p, j);
    }
  }
  return c;
}
Matrix operator*(double factor, Matrix a) {
  for (double& x : a.x) x *= factor;
  return a;
}
Matrix operator+(Matrix a, const Matrix& b) {
  for (std::size_t i = 0; i < a.x.size(); ++i) a.x[i] += b.x[i];
  return a;
}
Matrix transposed(const Matrix& a) {
  Matrix t{a.columns, a.rows, std::vector<double>(a.x.size())};
  for (std::size_t i = 0; i < a.rows; ++i) {
    for (std::size_t j = 0; j < a.columns; ++j) t(j, i) = a(i, j);
  }
  return t;
}

/// In the shape given, tall or wide: a X + b (X X^T) X + c (X X^T)^2 X.
Matrix newton_schulz(const Muon& options, Matrix x) {
  double squares = 0;
  for (const double number : x.x) squares += number * number;
  x = (squares == 0 ? 0 : 1 / (std::sqrt(squares) + options.eps)) * x;
  const auto& [a, b, c] = options.ns_coefficients;
  for (int step = 0; step < options.ns_steps; ++step) {
    const Matrix once = x * (transposed(x) * x);
    const Matrix twice = once * (transposed(x) * x);
    x = a * x + b * once + c * twice;
  }
  return x;
}

struct MuonReference {
  Muon options;
  Matrix x, buffer;

  void step(const Matrix& g) {
    const double mu = options.momentum;
    buffer = buffer + (1 - mu) * (g + -1. * buffer);  // lerp
    const Matrix u = options.nesterov ? g + mu * (buffer + -1. * g) : buffer;
    const double rows = static_cast<double>(x.rows), columns = static_cast<double>(x.columns);
    const double factor = options.adjust_lr == zero::MuonLrAdjustment::original
                              ? std::sqrt(std::max(1., rows / columns))
                              : 0.2 * std::sqrt(std::max(rows, columns));
    x = (1 - options.lr * options.weight_decay) * x +
        (-options.lr * factor) * newton_schulz(options, u);
  }
};

std::vector<Muon> muon_options() {
  return {{.lr = 0.1},
          {.lr = 0.1, .nesterov = false},
          {.lr = 0.1, .weight_decay = 0, .momentum = 0},
          {.lr = 0.1, .momentum = 0.5, .eps = 1e-2},
          {.lr = 0.1, .adjust_lr = zero::MuonLrAdjustment::match_rms_adamw},
          {.lr = 0.1, .ns_coefficients = {2, -1.5, 0.5}, .ns_steps = 10},
          {.lr = 0.1, .ns_steps = 0}};
}

/// u, orthogonalised: what a step of length 1 from 0 subtracts.
template <class T>
std::vector<T> orthogonalized(Muon muon, const Shape& shape, const std::vector<T>& gradient) {
  muon.lr = 1;
  muon.momentum = 0;
  std::vector<T> result = stepped<T>(muon, shape, std::vector<T>(gradient.size()), gradient);
  for (T& x : result) x = -x;
  return result;
}

/// By Jacobi's rotations; of a symmetric matrix.
std::vector<double> eigenvalues(Matrix a) {
  const std::size_t n = a.rows;
  for (int sweep = 0; sweep < 30; ++sweep) {
    for (std::size_t p = 0; p < n; ++p) {
      for (std::size_t q = p + 1; q < n; ++q) {
        if (a(p, q) == 0) continue;
        const double angle = 0.5 * std::atan2(2 * a(p, q), a(q, q) - a(p, p));
        const double c = std::cos(angle), s = std::sin(angle);
        for (std::size_t i = 0; i < n; ++i) {
          const double ip = a(i, p), iq = a(i, q);
          a(i, p) = c * ip - s * iq;
          a(i, q) = s * ip + c * iq;
        }
        for (std::size_t i = 0; i < n; ++i) {
          const double pi = a(p, i), qi = a(q, i);
          a(p, i) = c * pi - s * qi;
          a(q, i) = s * pi + c * qi;
        }
      }
    }
  }
  std::vector<double> values(n);
  for (std::size_t i = 0; i < n; ++i) values[i] = a(i, i);
  return values;
}

/// What the iteration makes of one singular value.
double polynomial(double s) {
  for (int step = 0; step < 5; ++step) {
    s = 3.4445 * s - 4.7750 * s * s * s + 2.0315 * s * s * s * s * s;
  }
  return s;
}

const std::vector<Shape> muon_shapes{{1, 1}, {1, 9}, {9, 1},   {2, 2},       {5, 5},
                                     {3, 8}, {8, 3}, {17, 40}, {4, 3, 2, 2}, {20, 3, 1, 2}};

}  // namespace

TEMPLATE_TEST_CASE("muon: momentum, Newton-Schulz, decay and step as published", "", float,
                   double) {
  using T = TestType;
  for (const Muon& options : muon_options()) {
    for (const Shape& shape : muon_shapes) {
      const std::size_t n = elements(shape), rows = shape[0];
      INFO(rows << " rows of " << n / rows << ", momentum " << options.momentum << ", nesterov "
                << options.nesterov << ", steps " << options.ns_steps);
      const std::vector<T> values = draw<T>(n, 1);
      Tensor<T, 1> tensor(shape, values);
      const auto matrix = [&](const std::vector<T>& x) {
        return Matrix{rows, n / rows, {x.begin(), x.end()}};
      };
      MuonReference reference{options, matrix(values), matrix(std::vector<T>(n))};
      for (int t = 1; t <= 4; ++t) {
        const std::vector<T> gradient = draw<T>(n, 10 + static_cast<unsigned>(t), 0.1);
        tensor.step(options, gradient, t);
        reference.step(matrix(gradient));
        // The iteration magnifies small singular values, and their rounding errors, 3.4445^5 times.
        CHECK(largest_difference(tensor.values(), reference.x.x) <=
              (sizeof(T) == 4 ? 2e-5 : 4e-14));
        if (options.momentum != 0) {
          CHECK(largest_difference(tensor.slot(0), reference.buffer.x) <=
                (sizeof(T) == 4 ? 1e-8 : 1e-16));
        }
      }
    }
  }
}

TEMPLATE_TEST_CASE("muon: by hand", "", float, double) {
  using T = TestType;
  const double bound = sizeof(T) == 4 ? 2e-5 : 1e-13;
  // A diagonal matrix's singular values are on its diagonal; |(3, 4)| = 5.
  const std::vector<T> diagonal{3, 0, 0, 0, -4, 0};
  CHECK(largest_difference(orthogonalized<T>({.eps = 0}, {2, 3}, diagonal),
                           std::vector{polynomial(0.6), 0., 0., 0., -polynomial(0.8), 0.}) <=
        bound);
  // A row or column has one, 1 after the normalisation.
  const double one = polynomial(1);
  const std::vector<double> row{0.6 * one, 0.8 * one};
  CHECK(largest_difference(orthogonalized<T>({.eps = 0}, {1, 2}, {3, 4}), row) <= bound);
  const std::vector<double> column{0.6 * one * std::numbers::sqrt2,
                                   0.8 * one * std::numbers::sqrt2};
  CHECK(largest_difference(orthogonalized<T>({.eps = 0}, {2, 1}, {3, 4}), column) <= bound);
  // No iteration: the normalised gradient. eps stands beside the norm.
  CHECK(largest_difference(orthogonalized<T>({.eps = 5, .ns_steps = 0}, {1, 2}, {3, 4}),
                           std::vector{0.3, 0.4}) <= bound);
  // First step, nesterov: buffer = 0.1 g, u = 0.9 * 0.1 g + 0.1 g = 0.19 g; 2 decays by 0.1 * 0.5.
  const Muon muon{.lr = 0.1, .weight_decay = 0.5, .momentum = 0.9, .eps = 0.19 * 5, .ns_steps = 0};
  Tensor<T, 1> tensor({1, 2}, {2, 2});
  tensor.step(muon, {3, 4}, 1);
  CHECK(largest_difference(tensor.slot(0), std::vector{0.3, 0.4}) <= bound);
  CHECK(largest_difference(tensor.values(), std::vector{1.9 - 0.03, 1.9 - 0.04}) <= bound);
}

TEMPLATE_TEST_CASE("muon: what optax 0.2.8 computed", "", float, double) {
  using T = TestType;
  // optax.contrib._muon.orthogonalize_via_newton_schulz, eps 1e-7, float64
  const std::vector expected{0.40978081824304974, 0.9094132694140973,  -0.18789170537601166,
                             0.4304242411804642,  0.34720329700462194, -0.19731360321468194,
                             0.9317074037416452,  0.508248987911429,   -0.9728803014390156,
                             0.1938632645644743,  0.19304318711379964, 0.4023357174844395};
  const std::vector<T> gradient{1, 2, -1, 0.5, 0.25, -1, 3, 1.5, -2, 0, 1, 1};
  CHECK(largest_difference(orthogonalized<T>({}, {3, 4}, gradient), expected) <=
        (sizeof(T) == 4 ? 2e-6 : 1e-14));
}

TEMPLATE_TEST_CASE("muon: singular values come near 1", "", float, double) {
  using T = TestType;
  for (const Shape& shape : {Shape{12, 40}, Shape{40, 12}, Shape{16, 16}}) {
    const std::size_t rows = shape[0], columns = shape[1], less = std::min(rows, columns);
    // Well-conditioned: random numbers beside 1s.
    std::vector<T> gradient = draw<T>(rows * columns, 5, 0.4);
    for (std::size_t i = 0; i < less; ++i) gradient[i * columns + i] += T(1);
    const std::vector<T> got =
        orthogonalized<T>({.adjust_lr = zero::MuonLrAdjustment::match_rms_adamw}, shape, gradient);
    Matrix x{rows, columns, {got.begin(), got.end()}};
    x = (1 / (0.2 * std::sqrt(static_cast<double>(std::max(rows, columns))))) * x;
    if (rows > columns) x = transposed(x);
    for (const double square : eigenvalues(x * transposed(x))) {
      CHECK(std::sqrt(square) > 0.68);
      CHECK(std::sqrt(square) < 1.2);
    }
  }
}

TEMPLATE_TEST_CASE("muon: a transposed tensor takes the transposed step", "", float, double) {
  using T = TestType;
  const auto flip = [](std::size_t rows, std::size_t columns, const std::vector<T>& x) {
    std::vector<T> t(x.size());
    for (std::size_t i = 0; i < rows; ++i) {
      for (std::size_t j = 0; j < columns; ++j) t[j * rows + i] = x[i * columns + j];
    }
    return t;
  };
  const Muon muon{.lr = 0.1, .adjust_lr = zero::MuonLrAdjustment::match_rms_adamw};
  for (const auto& [rows, columns] :
       {std::pair<std::size_t, std::size_t>{3, 7}, {20, 37}, {9, 9}}) {
    const std::vector<T> values = draw<T>(rows * columns, 1), gradient = draw<T>(rows * columns, 2);
    const std::vector<T> wide = stepped<T>(muon, {rows, columns}, values, gradient);
    const std::vector<T> tall = stepped<T>(muon, {columns, rows}, flip(rows, columns, values),
                                           flip(rows, columns, gradient));
    if (rows != columns) {
      CHECK(flip(rows, columns, wide) == tall);
    } else {
      CHECK(largest_difference(flip(rows, columns, wide), tall) <= (sizeof(T) == 4 ? 2e-5 : 4e-14));
    }
  }
}

TEMPLATE_TEST_CASE("muon: lr adjustments", "", float, double) {
  using T = TestType;
  using enum zero::MuonLrAdjustment;
  // What the same direction is scaled by.
  const auto factor = [](zero::MuonLrAdjustment adjustment, const Shape& shape) {
    const std::vector<T> gradient(elements(shape), T(1));  // one singular value, 1
    const std::vector<T> got =
        orthogonalized<T>({.eps = 0, .adjust_lr = adjustment}, shape, gradient);
    return static_cast<double>(got[0]) * std::sqrt(static_cast<double>(elements(shape))) /
           polynomial(1);
  };
  const double bound = sizeof(T) == 4 ? 1e-4 : 1e-12;
  CHECK(std::abs(factor(original, {8, 2}) - 2) < bound);
  CHECK(std::abs(factor(original, {2, 8}) - 1) < bound);
  CHECK(std::abs(factor(original, {18, 2, 1, 1}) - 3) < bound);
  CHECK(std::abs(factor(match_rms_adamw, {9, 2}) - 0.6) < bound);
  CHECK(std::abs(factor(match_rms_adamw, {2, 9}) - 0.6) < bound);
  CHECK(std::abs(factor(match_rms_adamw, {2, 5, 5}) - 1) < bound);
}

TEMPLATE_TEST_CASE("muon: the same bits wherever arrays lie, and in any shape of as many rows", "",
                   float, double) {
  using T = TestType;
  for (const Muon& options : muon_options()) {
    for (const Shape& shape : muon_shapes) {
      const std::size_t n = elements(shape);
      const auto run = [&](const Shape& as, std::size_t offset) {
        Tensor<T, 1> tensor(as, draw<T>(n, 1), offset);
        for (int t = 1; t <= 3; ++t) {
          tensor.step(options, draw<T>(n, 10 + static_cast<unsigned>(t)), t);
        }
        return std::pair(tensor.values(), tensor.slot(0));
      };
      const auto expected = run(shape, 0);
      for (std::size_t offset = 1; offset < 8; ++offset) CHECK(run(shape, offset) == expected);
      CHECK(run({shape[0], n / shape[0]}, 3) == expected);
    }
  }
}

TEMPLATE_TEST_CASE("muon: no gradient, no numbers, no number", "", float, double) {
  using T = TestType;
  for (const double eps : {0., 1e-7}) {
    const Muon muon{.lr = 0.5, .weight_decay = 0.5, .eps = eps};
    CHECK(stepped<T>(muon, {2, 2}, {4, 8, 12, 16}, {0, 0, 0, 0}) == std::vector<T>{3, 6, 9, 12});
  }
  for (const Shape& empty : {Shape{0, 5}, Shape{5, 0}, Shape{0, 0}, Shape{3, 0, 2}}) {
    CHECK(zero::workspace_elements(Muon{}, empty) == 0);
    CHECK(stepped<T>(Muon{}, empty, {}, {}).empty());
  }
  // Every number of the result depends on every gradient: nothing hides one that is none.
  for (const T bad : {std::numeric_limits<T>::quiet_NaN(), std::numeric_limits<T>::infinity()}) {
    const std::vector<T> gradient{1, 1, 1, 1, bad, 1};
    for (const T x : stepped<T>(Muon{}, {2, 3}, std::vector<T>(6), gradient)) CHECK(std::isnan(x));
  }
}

// ---- What an optimizer may ask for

namespace {

/// Counts its calls and refuses what is large.
struct CountingProduct {
  int* calls;
  static constexpr std::size_t max_extent = 100;
  template <class T>
  void multiply(std::size_t m, std::size_t n, std::size_t k, const T* a, const T* b,
                zero::Transpose transpose_b, T* c) const {
    ++*calls;
    zero::PlainProduct().multiply(m, n, k, a, b, transpose_b, c);
  }
};
static_assert(zero::MatrixProduct<CountingProduct>);
static_assert(zero::WholeTensorOptimizer<zero::BasicMuon<CountingProduct>, double>);
static_assert(zero::Optimizer<Lamb> && zero::Optimizer<Muon>);
static_assert(!zero::UpdateRule<Lamb> && !zero::UpdateRule<Muon>);

template <class Opt>
void check_option(const char* optimizer, const char* name, double Opt::* member,
                  const std::vector<double>& bad) {
  for (const double value : bad) {
    Opt options;
    options.*member = value;
    std::ostringstream text;
    text << optimizer << ": " << name << " is " << value;
    CHECK_THROWS_AS(options.validate(), zero::UsageError);
    CHECK_THROWS_WITH(zero::validate(options), ContainsSubstring(text.str()));
  }
}

}  // namespace

TEST_CASE("whole-tensor optimizers: an option that makes no sense is named, with its value") {
  const std::vector<double> negative{nan_value, -1e-3, -infinity, infinity};
  const std::vector<double> no_fraction{nan_value, -0.1, 1, 1.5, infinity};
  check_option("Lamb", "lr", &Lamb::lr, negative);
  check_option("Lamb", "beta1", &Lamb::beta1, no_fraction);
  check_option("Lamb", "beta2", &Lamb::beta2, no_fraction);
  check_option("Lamb", "eps", &Lamb::eps, negative);
  check_option("Lamb", "weight_decay", &Lamb::weight_decay, negative);
  check_option("Muon", "lr", &Muon::lr, negative);
  check_option("Muon", "momentum", &Muon::momentum, no_fraction);
  check_option("Muon", "eps", &Muon::eps, negative);
  check_option("Muon", "weight_decay", &Muon::weight_decay, negative);
  CHECK_NOTHROW(zero::validate(Lamb{}));
  CHECK_NOTHROW(zero::validate(Muon{}));
  CHECK_NOTHROW((Muon{.momentum = 0, .ns_coefficients = {-1, 0, 1}, .eps = 0}.validate()));
  for (const double bad : {nan_value, infinity, -infinity}) {
    CHECK_THROWS_WITH((Muon{.ns_coefficients = {1, bad, 1}}.validate()),
                      ContainsSubstring("ns_coefficients"));
  }
  for (const int bad : {-1, 100}) {
    CHECK_THROWS_WITH(Muon{.ns_steps = bad}.validate(),
                      ContainsSubstring("Muon: ns_steps is " + std::to_string(bad)));
  }
}

TEST_CASE("whole-tensor optimizers: what they ask for a tensor") {
  CHECK(zero::used_slots(Lamb{}) == 2);
  CHECK(zero::workspace_elements(Lamb{}, Shape{4, 6}) == 0);
  CHECK_NOTHROW(zero::validate(Lamb{}, Shape{}));
  CHECK(zero::used_slots(Muon{}) == 1);
  CHECK(zero::used_slots(Muon{.momentum = 0}) == 0);
  CHECK(zero::workspace_elements(Muon{}, Shape{4, 6}) == 2 * 24 + 16);
  CHECK(zero::workspace_elements(Muon{}, Shape{6, 2, 2}) == 2 * 24 + 16);
  CHECK_NOTHROW(zero::validate(Muon{}, Shape{4, 6}));
  CHECK_NOTHROW(zero::validate(Muon{}, Shape{4, 0, 6, 1}));
  for (const Shape& shape : {Shape{}, Shape{7}}) {
    CHECK_THROWS_AS(zero::validate(Muon{}, shape), zero::UsageError);
    CHECK_THROWS_WITH(zero::validate(Muon{}, shape),
                      ContainsSubstring("this one has " + std::to_string(shape.size())) &&
                          ContainsSubstring("AdamW"));
  }
  // Update rules take every tensor.
  CHECK_NOTHROW(zero::validate(zero::Adam{}, Shape{7}));
  CHECK(zero::workspace_elements(zero::Adam{}, Shape{7}) == 0);
}

TEST_CASE("muon: works with the product that it is given") {
  int calls = 0;
  const zero::BasicMuon<CountingProduct> muon{.ns_steps = 4, .product = {&calls}};
  const std::vector<float> values = draw<float>(12, 1), gradient = draw<float>(12, 2);
  CHECK(stepped(muon, {4, 3}, values, gradient) ==
        stepped(Muon{.ns_steps = 4}, {4, 3}, values, gradient));
  CHECK(calls == 3 * 4);
  stepped<float>(muon, {0, 4}, {}, {});
  CHECK(calls == 3 * 4);  // a product need not take matrices without elements
  CHECK_NOTHROW(zero::validate(muon, Shape{100, 10, 10}));
  CHECK_THROWS_WITH(
      zero::validate(muon, Shape{101, 3}),
      ContainsSubstring("at most 100 rows and columns") && ContainsSubstring("101 and 3"));
}
