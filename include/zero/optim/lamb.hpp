// SPDX-License-Identifier: Apache-2.0
/// @file
/// LAMB: Adam with a step length of its own for each tensor.
#pragma once

#include <algorithm>
#include <array>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <type_traits>

#include "zero/detail/options.hpp"
#include "zero/detail/pack.hpp"
#include "zero/detail/packed_square_sum.hpp"
#include "zero/detail/with_packs.hpp"
#include "zero/math.hpp"
#include "zero/optimizer.hpp"

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wpsabi"

namespace zero {

/// You et al., "Large batch optimization for deep learning" (arXiv:1904.00962), algorithm 2, phi
/// being the identity:
///
///     m = beta1 m + (1 - beta1) g,   v = beta2 v + (1 - beta2) g^2
///     u = m / (1 - beta1^t) / (sqrt(v) / sqrt(1 - beta2^t) + eps) + weight_decay * value
///     value -= lr * ratio * u,   ratio = |value| / |u|, or 1 where either norm is 0
///
/// As in NVIDIA's FusedLAMB and timm's Lamb, bias correction can be left out. Other than there, the
/// ratio is also taken where weight_decay is 0, as in the paper (FusedLAMB's `use_nvlamb`, timm's
/// `always_adapt`), and gradients are not clipped.
///
/// Norms are Euclidean and summed in double. A NaN in a gradient stays in its element.
///
/// u is computed twice, for its norm and for the step, instead of kept: a second sqrt and division
/// while memory is the bottleneck, against a workspace as large as the tensor and one more array to
/// write and fetch.
struct Lamb {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-6;
  double weight_decay = 1e-2;
  bool bias_correction = true;
  bool maximize = false;

  static constexpr std::string_view name = "Lamb";
  static constexpr std::array<std::string_view, 2> slots{"exp_avg", "exp_avg_sq"};

  template <class Self, class F>
  static constexpr void for_each_option(Self& self, F&& f) {
    f("lr", self.lr);
    f("beta1", self.beta1);
    f("beta2", self.beta2);
    f("eps", self.eps);
    f("weight_decay", self.weight_decay);
    f("bias_correction", self.bias_correction);
    f("maximize", self.maximize);
  }

  /// Throws `UsageError` for a negative or NaN number and a beta outside [0, 1).
  void validate() const {
    detail::require_non_negative("Lamb", "lr", lr);
    detail::require_fraction("Lamb", "beta1", beta1);
    detail::require_fraction("Lamb", "beta2", beta2);
    detail::require_non_negative("Lamb", "eps", eps);
    detail::require_non_negative("Lamb", "weight_decay", weight_decay);
  }

  template <std::floating_point T>
  void update(TensorRef<T> tensor, std::array<std::span<T>, 2> state, std::int64_t t) const {
    const Scalars<T> s{
        .beta1 = static_cast<T>(beta1),
        .beta2 = static_cast<T>(beta2),
        .gain1 = static_cast<T>(maximize ? beta1 - 1 : 1 - beta1),
        .gain2 = static_cast<T>(1 - beta2),
        .correction1 = static_cast<T>(bias_correction ? 1 / (1 - power(beta1, t)) : 1),
        .correction2 = static_cast<T>(bias_correction ? 1 / zero::sqrt(1 - power(beta2, t)) : 1),
        .eps = static_cast<T>(eps),
        .decay = static_cast<T>(weight_decay)};
    const Arrays<T> arrays{tensor.values.data(), tensor.gradient.data(), state[0].data(),
                           state[1].data()};
    const std::size_t count = tensor.values.size();
    detail::with_packs<T>([&]<class X>(std::type_identity<X>) {
      const Norms norms = advance<X>(arrays, s, count);
      const bool scales = norms.values > 0 && norms.direction > 0;
      const double ratio = scales ? norms.values / norms.direction : 1;
      step<X>(arrays, s, static_cast<T>(lr * ratio), count);
    });
  }

 private:
  template <class T>
  struct Scalars {
    T beta1, beta2, gain1, gain2;  ///< gain = 1 - beta; gain1 with the gradient's sign
    T correction1, correction2;    ///< 1 / (1 - beta1^t), 1 / sqrt(1 - beta2^t)
    T eps, decay;
  };

  template <class T>
  struct Arrays {
    T* values;
    const T* gradient;
    T* exp_avg;
    T* exp_avg_sq;
  };

  struct Norms {
    double values, direction;
  };

  template <class X, class T>
  [[gnu::always_inline]] static X direction(const X& value, const X& exp_avg, const X& exp_avg_sq,
                                            const Scalars<T>& s) {
    return exp_avg * s.correction1 / (sqrt(exp_avg_sq) * s.correction2 + s.eps) + value * s.decay;
  }

  /// Brings one pack's moments up to date and gives its u.
  template <class X, class T>
  [[gnu::always_inline]] static X advance_pack(const X& value, const T* gradient, T* exp_avg,
                                               T* exp_avg_sq, const Scalars<T>& s) {
    const X g = X::load(gradient);
    const X first = X::load(exp_avg) * s.beta1 + g * s.gain1;
    const X second = X::load(exp_avg_sq) * s.beta2 + g * g * s.gain2;
    first.store(exp_avg);
    second.store(exp_avg_sq);
    return direction(value, first, second, s);
  }

  /// Brings all moments up to date and gives the norms of the values and of u. The last elements,
  /// fewer than a pack, are computed in a copy.
  template <class X, class T>
  [[gnu::always_inline]] static Norms advance(const Arrays<T>& given, const Scalars<T>& constants,
                                              std::size_t count) {
    const Arrays<T> arrays = given;        // local copies: as far as the compiler knows, stores to
    const Scalars<T> scalars = constants;  // the arrays could change what the references stand for
    detail::PackedSquareSum<X> value_squares, direction_squares;
    const std::size_t whole = count - count % X::width;
    for (std::size_t at = 0; at < whole; at += X::width) {
      const X value = X::load(arrays.values + at);
      value_squares.add(value);
      direction_squares.add(advance_pack<X>(value, arrays.gradient + at, arrays.exp_avg + at,
                                            arrays.exp_avg_sq + at, scalars));
    }
    if (const std::size_t rest = count - whole; rest != 0) {
      T values[X::width] = {}, gradient[X::width] = {}, exp_avg[X::width] = {},
        exp_avg_sq[X::width] = {}, u[X::width];
      std::copy_n(arrays.values + whole, rest, values);
      std::copy_n(arrays.gradient + whole, rest, gradient);
      std::copy_n(arrays.exp_avg + whole, rest, exp_avg);
      std::copy_n(arrays.exp_avg_sq + whole, rest, exp_avg_sq);
      const X value = X::load(values);
      value_squares.add(value);
      advance_pack<X>(value, gradient, exp_avg, exp_avg_sq, scalars).store(u);
      std::fill(u + rest, u + X::width, T(0));  // 0 / 0 where eps is 0
      direction_squares.add(X::load(u));
      std::copy_n(exp_avg, rest, arrays.exp_avg + whole);
      std::copy_n(exp_avg_sq, rest, arrays.exp_avg_sq + whole);
    }
    return {zero::sqrt(value_squares.total()), zero::sqrt(direction_squares.total())};
  }

  /// The step along u.
  template <class X, class T>
  [[gnu::always_inline]] static void step(const Arrays<T>& given, const Scalars<T>& constants,
                                          T length, std::size_t count) {
    const Arrays<T> arrays = given;
    const Scalars<T> scalars = constants;
    const auto stepped = [&](const T* values, const T* exp_avg, const T* exp_avg_sq, T* out) {
      const X value = X::load(values);
      const X u = direction(value, X::load(exp_avg), X::load(exp_avg_sq), scalars);
      (value - u * length).store(out);
    };
    const std::size_t whole = count - count % X::width;
    for (std::size_t at = 0; at < whole; at += X::width) {
      stepped(arrays.values + at, arrays.exp_avg + at, arrays.exp_avg_sq + at, arrays.values + at);
    }
    if (const std::size_t rest = count - whole; rest != 0) {
      T values[X::width] = {}, exp_avg[X::width] = {}, exp_avg_sq[X::width] = {};
      std::copy_n(arrays.values + whole, rest, values);
      std::copy_n(arrays.exp_avg + whole, rest, exp_avg);
      std::copy_n(arrays.exp_avg_sq + whole, rest, exp_avg_sq);
      stepped(values, exp_avg, exp_avg_sq, values);
      std::copy_n(values, rest, arrays.values + whole);
    }
  }
};

static_assert(WholeTensorOptimizer<Lamb, float> && WholeTensorOptimizer<Lamb, double>);

}  // namespace zero

#pragma GCC diagnostic pop
