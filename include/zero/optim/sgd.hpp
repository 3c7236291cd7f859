// SPDX-License-Identifier: Apache-2.0
/// @file
/// Stochastic gradient descent with PyTorch's options and meaning.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "zero/config.hpp"
#include "zero/detail/options.hpp"
#include "zero/optimizer.hpp"

namespace zero {

/// With momentum (Sutskever et al., ICML 2013, in PyTorch's form), which on a parameter's first
/// step takes the gradient undampened:
///
///     buffer = momentum buffer + (1 - dampening) g
///     value -= lr * (nesterov ? g + momentum buffer : buffer)
///
/// Without momentum no state is kept.
struct Sgd {
  double lr = 1e-3;
  double momentum = 0;
  double dampening = 0;
  double weight_decay = 0;
  bool nesterov = false;
  bool maximize = false;

  static constexpr std::string_view name = "Sgd";
  static constexpr std::array<std::string_view, 1> slots{"momentum_buffer"};
  [[nodiscard]] constexpr std::size_t used_slots() const { return momentum != 0 ? 1 : 0; }

  template <class Self, class F>
  static constexpr void for_each_option(Self& self, F&& f) {
    f("lr", self.lr);
    f("momentum", self.momentum);
    f("dampening", self.dampening);
    f("weight_decay", self.weight_decay);
    f("nesterov", self.nesterov);
    f("maximize", self.maximize);
  }

  /// Throws `UsageError` for a negative or NaN number, and for Nesterov momentum without momentum
  /// or with dampening, as PyTorch does.
  void validate() const {
    detail::require_non_negative("Sgd", "lr", lr);
    detail::require_non_negative("Sgd", "momentum", momentum);
    detail::require_non_negative("Sgd", "weight_decay", weight_decay);
    if (!(dampening - dampening == 0)) {
      detail::refuse_option("Sgd", "dampening", dampening, "a finite number");
    }
    if (nesterov && momentum == 0) {
      detail::refuse_option("Sgd", "momentum", momentum, "positive where nesterov is on");
    }
    if (nesterov && dampening != 0) {
      detail::refuse_option("Sgd", "dampening", dampening, "0 where nesterov is on");
    }
  }

  template <class Real>
  struct Scalars {
    Real lr, momentum, gain, decay;  ///< gain = 1 - dampening, on the first step 1
    bool has_momentum, nesterov, maximize, decays;
  };

  template <class Real>
  [[nodiscard]] ZERO_HOST_DEVICE Scalars<Real> scalars(std::int64_t t) const {
    return {.lr = static_cast<Real>(lr),
            .momentum = static_cast<Real>(momentum),
            .gain = static_cast<Real>(t == 1 ? 1 : 1 - dampening),
            .decay = static_cast<Real>(weight_decay),
            .has_momentum = momentum != 0,
            .nesterov = nesterov,
            .maximize = maximize,
            .decays = weight_decay != 0};
  }

  template <class X, class Real>
  ZERO_HOST_DEVICE static void update(X& value, const X& gradient, X& momentum_buffer,
                                      const Scalars<Real>& s) {
    X g = gradient;
    if (s.maximize) g = -g;
    if (s.decays) g = g + value * s.decay;
    if (s.has_momentum) {
      momentum_buffer = momentum_buffer * s.momentum + g * s.gain;
      g = s.nesterov ? g + momentum_buffer * s.momentum : momentum_buffer;
    }
    value = value - g * s.lr;
  }
};

static_assert(UpdateRule<Sgd, float> && UpdateRule<Sgd, double>);

}  // namespace zero
