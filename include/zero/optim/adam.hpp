// SPDX-License-Identifier: Apache-2.0
/// @file
/// Adam and AdamW with PyTorch's options and meaning.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "zero/config.hpp"
#include "zero/detail/options.hpp"
#include "zero/math.hpp"
#include "zero/optimizer.hpp"

namespace zero {

/// Kingma and Ba, "Adam" (arXiv:1412.6980), algorithm 1. AMSGrad: Reddi et al.
/// (arXiv:1904.09237), with the maximum taken of the uncorrected second moment, as PyTorch does.
/// Decoupled decay: Loshchilov and Hutter, "Decoupled weight decay" (arXiv:1711.05101).
///
///     m = beta1 m + (1 - beta1) g,   v = beta2 v + (1 - beta2) g^2
///     value -= lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)
///
/// @tparam decoupled whether weight decay shrinks the value by lr * weight_decay (AdamW) or is
///         added to the gradient (Adam)
template <bool decoupled>
struct BasicAdam {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = decoupled ? 1e-2 : 0;
  bool amsgrad = false;
  bool maximize = false;

  static constexpr std::string_view name = decoupled ? "AdamW" : "Adam";
  static constexpr std::array<std::string_view, 3> slots{"exp_avg", "exp_avg_sq", "max_exp_avg_sq"};
  [[nodiscard]] constexpr std::size_t used_slots() const { return amsgrad ? 3 : 2; }

  template <class Self, class F>
  static constexpr void for_each_option(Self& self, F&& f) {
    f("lr", self.lr);
    f("beta1", self.beta1);
    f("beta2", self.beta2);
    f("eps", self.eps);
    f("weight_decay", self.weight_decay);
    f("amsgrad", self.amsgrad);
    f("maximize", self.maximize);
  }

  /// Throws `UsageError` as PyTorch does for a negative or NaN number and a beta outside [0, 1).
  void validate() const {
    constexpr const char* self = decoupled ? "AdamW" : "Adam";
    detail::require_non_negative(self, "lr", lr);
    detail::require_fraction(self, "beta1", beta1);
    detail::require_fraction(self, "beta2", beta2);
    detail::require_non_negative(self, "eps", eps);
    detail::require_non_negative(self, "weight_decay", weight_decay);
  }

  template <class Real>
  struct Scalars {
    Real beta1, beta2, gain1, gain2;  ///< gain = 1 - beta
    Real step_size;                   ///< lr / (1 - beta1^t)
    Real correction2;                 ///< 1 / sqrt(1 - beta2^t)
    Real eps;
    Real decay;  ///< coupled: weight_decay; decoupled: 1 - lr * weight_decay
    bool decays, amsgrad, maximize;
  };

  template <class Real>
  [[nodiscard]] ZERO_HOST_DEVICE Scalars<Real> scalars(std::int64_t t) const {
    return {.beta1 = static_cast<Real>(beta1),
            .beta2 = static_cast<Real>(beta2),
            .gain1 = static_cast<Real>(1 - beta1),
            .gain2 = static_cast<Real>(1 - beta2),
            .step_size = static_cast<Real>(lr / (1 - power(beta1, t))),
            .correction2 = static_cast<Real>(1 / zero::sqrt(1 - power(beta2, t))),
            .eps = static_cast<Real>(eps),
            .decay = static_cast<Real>(decoupled ? 1 - lr * weight_decay : weight_decay),
            .decays = weight_decay != 0,
            .amsgrad = amsgrad,
            .maximize = maximize};
  }

  template <class X, class Real>
  ZERO_HOST_DEVICE static void update(X& value, const X& gradient, X& exp_avg, X& exp_avg_sq,
                                      X& max_exp_avg_sq, const Scalars<Real>& s) {
    X g = gradient;
    if (s.maximize) g = -g;
    if (s.decays) {
      if constexpr (decoupled) {
        value = value * s.decay;
      } else {
        g = g + value * s.decay;
      }
    }
    exp_avg = exp_avg * s.beta1 + g * s.gain1;
    exp_avg_sq = exp_avg_sq * s.beta2 + g * g * s.gain2;
    X second = exp_avg_sq;
    if (s.amsgrad) second = max_exp_avg_sq = maximum(max_exp_avg_sq, exp_avg_sq);
    value = value - exp_avg * s.step_size / (sqrt(second) * s.correction2 + s.eps);
  }
};

/// Adam with weight decay as part of the gradient, by default none.
using Adam = BasicAdam<false>;
/// Adam with decoupled weight decay, by default 0.01.
using AdamW = BasicAdam<true>;

static_assert(UpdateRule<Adam, float> && UpdateRule<Adam, double>);
static_assert(UpdateRule<AdamW, float> && UpdateRule<AdamW, double>);

}  // namespace zero
