// Lion (Chen et al., arXiv:2302.06675) as a user writes it: an aggregate of options, the names of
// its state, what is constant over a step, and the rule for one element.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>
#include <zero/zero.hpp>

struct Lion {
  double lr = 1e-4, beta1 = 0.9, beta2 = 0.99, weight_decay = 0;
  static constexpr std::string_view name = "Lion";
  static constexpr std::array<std::string_view, 1> slots{"exp_avg"};

  // So that checkpoints keep them.
  template <class Self, class F>
  static constexpr void for_each_option(Self& self, F&& f) {
    f("lr", self.lr), f("beta1", self.beta1), f("beta2", self.beta2);
    f("weight_decay", self.weight_decay);
  }

  template <class Real>
  struct Scalars {
    Real lr, beta1, beta2, keep;
  };
  template <class Real>
  ZERO_HOST_DEVICE Scalars<Real> scalars(std::int64_t) const {
    return {Real(lr), Real(beta1), Real(beta2), Real(1 - lr * weight_decay)};
  }
  template <class X, class Real>
  ZERO_HOST_DEVICE static void update(X& value, const X& gradient, X& exp_avg,
                                      const Scalars<Real>& s) {
    const X direction = exp_avg * s.beta1 + gradient * (1 - s.beta1);
    value = value * s.keep - zero::sign(direction) * s.lr;
    exp_avg = exp_avg * s.beta2 + gradient * (1 - s.beta2);
  }
};
static_assert(zero::UpdateRule<Lion>);
