// SPDX-License-Identifier: Apache-2.0
// The loops of a transformer, forward and backward. Every sum has one order, whatever the memory's
// alignment: wide ones run in 8 lanes that are added at the end. Matrices are row-major.
#pragma once

#include <cblas.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "random.hpp"

namespace bert {

/// Matrix products, by the BLAS, and the time that they took.
template <class Real>
class Products {
 public:
  /// c = alpha * op(a) * op(b) + beta * c; op(a) is m x k, op(b) is k x n; ld* are row strides.
  void multiply(bool transpose_a, bool transpose_b, std::size_t m, std::size_t n, std::size_t k,
                Real alpha, const Real* a, std::size_t lda, const Real* b, std::size_t ldb,
                Real beta, Real* c, std::size_t ldc) {
    const auto begin = std::chrono::steady_clock::now();
    const auto size = [](std::size_t x) { return static_cast<blasint>(x); };
    const auto op = [](bool transpose) { return transpose ? CblasTrans : CblasNoTrans; };
    if constexpr (std::is_same_v<Real, double>) {
      cblas_dgemm(CblasRowMajor, op(transpose_a), op(transpose_b), size(m), size(n), size(k), alpha,
                  a, size(lda), b, size(ldb), beta, c, size(ldc));
    } else {
      cblas_sgemm(CblasRowMajor, op(transpose_a), op(transpose_b), size(m), size(n), size(k), alpha,
                  a, size(lda), b, size(ldb), beta, c, size(ldc));
    }
    seconds_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  }

  /// y (rows x outputs) = x (rows x inputs) * weight^T + bias, as PyTorch's Linear.
  void linear(std::size_t rows, std::size_t inputs, std::size_t outputs, const Real* x,
              const Real* weight, const Real* bias, Real* y) {
    for (std::size_t r = 0; r < rows; ++r) std::copy_n(bias, outputs, y + r * outputs);
    multiply(false, true, rows, outputs, inputs, 1, x, inputs, weight, inputs, 1, y, outputs);
  }

  /// Its backward: weight and bias gradients are written; the input's too, or added to it.
  void linear_backward(std::size_t rows, std::size_t inputs, std::size_t outputs, const Real* x,
                       const Real* weight, const Real* y_gradient, Real* weight_gradient,
                       Real* bias_gradient, Real* x_gradient, bool adds) {
    multiply(true, false, outputs, inputs, rows, 1, y_gradient, outputs, x, inputs, 0,
             weight_gradient, inputs);
    std::fill_n(bias_gradient, outputs, Real(0));
    for (std::size_t r = 0; r < rows; ++r) {
      const Real* row = y_gradient + r * outputs;
      for (std::size_t o = 0; o < outputs; ++o) bias_gradient[o] += row[o];
    }
    multiply(false, false, rows, inputs, outputs, 1, y_gradient, outputs, weight, inputs,
             adds ? Real(1) : Real(0), x_gradient, inputs);
  }

  [[nodiscard]] double seconds() const { return seconds_; }

 private:
  double seconds_ = 0;
};

/// The sum of f(0) + ... + f(n - 1).
template <class Real, class F>
Real sum_of(std::size_t n, F&& f) {
  constexpr std::size_t lanes = 8;
  Real sums[lanes] = {};
  std::size_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    for (std::size_t lane = 0; lane < lanes; ++lane) sums[lane] += f(i + lane);
  }
  Real sum =
      ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
  for (; i < n; ++i) sum += f(i);
  return sum;
}

template <class Real>
Real largest(const Real* x, std::size_t n) {
  constexpr std::size_t lanes = 8;
  Real most[lanes];
  std::fill_n(most, lanes, x[0]);
  std::size_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    for (std::size_t lane = 0; lane < lanes; ++lane) {
      most[lane] = most[lane] < x[i + lane] ? x[i + lane] : most[lane];
    }
  }
  for (; i < n; ++i) most[0] = std::max(most[0], x[i]);
  return *std::max_element(most, most + lanes);
}

inline double exponential(double x) { return std::exp(x); }

/// exp to about 2 units in the last place, in operations that a compiler makes vectors of:
/// 2^n e^r with n = round(x / ln 2), and Cephes' polynomial (expf.c) for e^r.
inline float exponential(float x) {
  x = std::min(std::max(x, -87.0F), 88.0F);
  // Adding 1.5 * 2^23 leaves the rounded number in the lowest bits.
  const float shifted = x * 1.44269504F + 12582912.0F;
  const float n = shifted - 12582912.0F;
  const float r = (x - n * 0.693359375F) - n * -2.12194440e-4F;
  float p = 1.9875691500e-4F;
  p = p * r + 1.3981999507e-3F;
  p = p * r + 8.3334519073e-3F;
  p = p * r + 4.1665795894e-2F;
  p = p * r + 1.6666665459e-1F;
  p = p * r + 5.0000001201e-1F;
  const auto exponent = (std::bit_cast<std::uint32_t>(shifted) - 0x4b400000U + 127U) << 23;
  return (p * (r * r) + r + 1.0F) * std::bit_cast<float>(exponent);
}

/// x * cdf(x) of the normal distribution in BERT's approximation by tanh, which is
/// x / (1 + exp(-2 sqrt(2/pi) (x + 0.044715 x^3))).
template <class Real>
void gelu(const Real* x, std::size_t n, Real* y) {
  constexpr Real c = Real(1.5957691216057308), cubic = Real(0.044715);
  for (std::size_t i = 0; i < n; ++i) {
    const Real v = x[i];
    y[i] = v / (1 + exponential(-c * (v + cubic * v * v * v)));
  }
}

/// gradient *= gelu'(x)
template <class Real>
void gelu_backward(const Real* x, std::size_t n, Real* gradient) {
  constexpr Real c = Real(1.5957691216057308), cubic = Real(0.044715);
  for (std::size_t i = 0; i < n; ++i) {
    const Real v = x[i];
    const Real s = 1 / (1 + exponential(-c * (v + cubic * v * v * v)));
    gradient[i] *= s + v * s * (1 - s) * c * (1 + 3 * cubic * v * v);
  }
}

/// Numbers to probabilities. Returns log(sum(exp(x))) of the numbers.
template <class Real>
Real softmax(Real* x, std::size_t n) {
  const Real most = largest(x, n);
  for (std::size_t i = 0; i < n; ++i) x[i] = exponential(x[i] - most);
  const Real sum = sum_of<Real>(n, [x](std::size_t i) { return x[i]; });
  const Real inverse = 1 / sum;
  for (std::size_t i = 0; i < n; ++i) x[i] *= inverse;
  return most + std::log(sum);
}

/// Each row's.
template <class Real>
void softmax(Real* x, std::size_t rows, std::size_t columns) {
  for (std::size_t r = 0; r < rows; ++r) (void)softmax(x + r * columns, columns);
}

/// gradient of the probabilities p -> gradient of what softmax made them of, in place
template <class Real>
void softmax_backward(const Real* p, std::size_t rows, std::size_t columns, Real* gradient) {
  for (std::size_t r = 0; r < rows; ++r, p += columns, gradient += columns) {
    const Real mean =
        sum_of<Real>(columns, [p, gradient](std::size_t i) { return p[i] * gradient[i]; });
    for (std::size_t i = 0; i < columns; ++i) gradient[i] = p[i] * (gradient[i] - mean);
  }
}

/// y = scale * normalised(x) + shift, row by row; keeps the normalised rows and their 1/deviation.
/// `normalised` may be x itself.
template <class Real>
void layer_norm(const Real* x, std::size_t rows, std::size_t columns, const Real* scale,
                const Real* shift, Real* normalised, Real* inverse_deviation, Real* y) {
  const Real each = 1 / static_cast<Real>(columns);
  for (std::size_t r = 0; r < rows; ++r, x += columns, normalised += columns, y += columns) {
    const Real mean = each * sum_of<Real>(columns, [x](std::size_t i) { return x[i]; });
    const Real variance = each * sum_of<Real>(columns, [x, mean](std::size_t i) {
                            const Real d = x[i] - mean;
                            return d * d;
                          });
    const Real inverse = 1 / std::sqrt(variance + Real(1e-12));
    inverse_deviation[r] = inverse;
    for (std::size_t i = 0; i < columns; ++i) {
      const Real n = (x[i] - mean) * inverse;
      normalised[i] = n;
      y[i] = n * scale[i] + shift[i];
    }
  }
}

/// gradient of y -> gradient of x, in place; the parameters' gradients are written.
template <class Real>
void layer_norm_backward(const Real* normalised, const Real* inverse_deviation, std::size_t rows,
                         std::size_t columns, const Real* scale, Real* scale_gradient,
                         Real* shift_gradient, Real* gradient) {
  std::fill_n(scale_gradient, columns, Real(0));
  std::fill_n(shift_gradient, columns, Real(0));
  const Real each = 1 / static_cast<Real>(columns);
  for (std::size_t r = 0; r < rows; ++r, normalised += columns, gradient += columns) {
    for (std::size_t i = 0; i < columns; ++i) {
      scale_gradient[i] += gradient[i] * normalised[i];
      shift_gradient[i] += gradient[i];
      gradient[i] *= scale[i];
    }
    const Real mean = each * sum_of<Real>(columns, [=](std::size_t i) { return gradient[i]; });
    const Real along =
        each * sum_of<Real>(columns, [=](std::size_t i) { return gradient[i] * normalised[i]; });
    for (std::size_t i = 0; i < columns; ++i) {
      gradient[i] = inverse_deviation[r] * (gradient[i] - mean - normalised[i] * along);
    }
  }
}

/// Zeroes a share `rate` of x and scales up the rest. Which, the key alone decides: backward
/// applies the same to the gradient, and nothing is stored.
template <class Real>
void dropout(Real* x, std::size_t n, double rate, std::uint64_t key) {
  if (rate == 0) return;
  const auto dropped = static_cast<std::uint64_t>(rate * 4294967296.0);
  const auto scale = static_cast<Real>(1 / (1 - rate));
  for (std::size_t i = 0; i < n; ++i) {
    x[i] = (mix(key, i) >> 32) < dropped ? Real(0) : x[i] * scale;
  }
}

/// Near-normal numbers of this deviation within 3.5 deviations: sums of four uniform ones. Each is
/// a function of key and index.
template <class Real>
class NearNormal {
 public:
  NearNormal(Real deviation, std::uint64_t key)
      // A uniform number of 16 bits has the variance (2^32 - 1) / 12.
      : scale_(deviation / std::sqrt(Real(4) * Real(4294967295.0) / 12)), key_(key) {}

  [[nodiscard]] Real operator[](std::size_t i) const {
    const std::uint64_t bits = mix(key_, i);
    const auto sum = static_cast<std::int32_t>((bits & 0xffffU) + (bits >> 16 & 0xffffU) +
                                               (bits >> 32 & 0xffffU) + (bits >> 48));
    return static_cast<Real>(sum - 131070) * scale_;
  }

 private:
  Real scale_;
  std::uint64_t key_;
};

template <class T, class Real>
void fill_normal(T* x, std::size_t n, Real deviation, std::uint64_t key) {
  const NearNormal<Real> numbers(deviation, key);
  for (std::size_t i = 0; i < n; ++i) x[i] = static_cast<T>(numbers[i]);
}

}  // namespace bert
