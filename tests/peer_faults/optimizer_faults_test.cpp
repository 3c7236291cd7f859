// SPDX-License-Identifier: Apache-2.0
// Faults in optimizers that other projects shipped, with their inputs and the right values. PT is
// pytorch/pytorch.
#include <zero/detail/update_loop.hpp>
#include <zero/optim/adam.hpp>
#include <zero/optim/sgd.hpp>
#include <zero/optimizer.hpp>

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "../plain_update.hpp"
#include "catch.hpp"

namespace {

/// The value after every step, all elements of an array being alike. Eleven of them, so that full
/// packs and the rest both run; all must agree.
template <class T, class Rule>
std::vector<double> trajectory(const Rule& rule, double start,
                               const std::vector<double>& gradients) {
  constexpr std::size_t n = 11;
  constexpr std::size_t slot_count = Rule::slots.size();
  std::vector<T> values(n, static_cast<T>(start));
  std::array<std::vector<T>, slot_count> state;
  plain::Arrays<T, slot_count> arrays{values.data(), nullptr, {}};
  for (std::size_t slot = 0; slot < zero::used_slots(rule); ++slot) {
    state[slot].assign(n, T(0));
    arrays.state[slot] = state[slot].data();
  }
  std::vector<double> out;
  std::int64_t t = 0;
  for (const double g : gradients) {
    const std::vector<T> gradient(n, static_cast<T>(g));
    arrays.gradient = gradient.data();
    ++t;
    plain::update(rule, rule.template scalars<T>(t), arrays, n);
    for (const T value : values) CHECK(value == values[0]);
    out.push_back(static_cast<double>(values[0]));
  }
  return out;
}

/// The right values are given to ten decimals; float adds its own rounding.
template <class T>
void check_near(const std::vector<double>& got, const std::vector<double>& right) {
  REQUIRE(got.size() == right.size());
  for (std::size_t i = 0; i < got.size(); ++i) {
    INFO("step " << i + 1);
    CHECK(std::abs(got[i] - right[i]) <= (std::is_same_v<T, float> ? 3e-7 : 5.1e-11));
  }
}

/// Adam as the paper writes it: bias-corrected moments, epsilon beside the corrected root.
std::vector<double> textbook_adam(const zero::Adam& options, bool decoupled, double start,
                                  const std::vector<double>& gradients) {
  double value = start;
  double m = 0;
  double v = 0;
  double t = 0;
  std::vector<double> out;
  for (double g : gradients) {
    ++t;
    if (decoupled) {
      value -= options.lr * options.weight_decay * value;
    } else {
      g += options.weight_decay * value;
    }
    m = options.beta1 * m + (1 - options.beta1) * g;
    v = options.beta2 * v + (1 - options.beta2) * g * g;
    const double m_hat = m / (1 - std::pow(options.beta1, t));
    const double v_hat = v / (1 - std::pow(options.beta2, t));
    value -= options.lr * m_hat / (std::sqrt(v_hat) + options.eps);
    out.push_back(value);
  }
  return out;
}

/// The fault: both corrections in the step size, so that epsilon and decoupled decay are scaled.
std::vector<double> folded_adam(const zero::Adam& options, bool decoupled, double start,
                                const std::vector<double>& gradients) {
  double value = start;
  double m = 0;
  double v = 0;
  double t = 0;
  std::vector<double> out;
  for (double g : gradients) {
    ++t;
    const double lr =
        options.lr * std::sqrt(1 - std::pow(options.beta2, t)) / (1 - std::pow(options.beta1, t));
    if (decoupled) {
      value -= lr * options.weight_decay * value;
    } else {
      g += options.weight_decay * value;
    }
    m = options.beta1 * m + (1 - options.beta1) * g;
    v = options.beta2 * v + (1 - options.beta2) * g * g;
    value -= lr * m / (std::sqrt(v) + options.eps);
    out.push_back(value);
  }
  return out;
}

}  // namespace

TEMPLATE_TEST_CASE("PT fused and plain Adam: reference values", "", float, double) {
  using T = TestType;
  const std::vector<double> gradients{0.5, -0.25};
  check_near<T>(trajectory<T>(zero::Adam{.lr = 0.1}, 1, gradients), {0.9000000020, 0.8733662987});
  check_near<T>(trajectory<T>(zero::Adam{.lr = 0.1, .weight_decay = 0.1}, 1, gradients),
                {0.9000000017, 0.8544413675});
  check_near<T>(trajectory<T>(zero::AdamW{.lr = 0.1, .weight_decay = 0.1}, 1, gradients),
                {0.8900000020, 0.8544662987});
  // AdamW without decay is Adam.
  check_near<T>(trajectory<T>(zero::AdamW{.lr = 0.1, .weight_decay = 0}, 1, gradients),
                {0.9000000020, 0.8733662987});
}

TEMPLATE_TEST_CASE("PT AMSGrad: the maximum is of the uncorrected second moment", "", float,
                   double) {
  using T = TestType;
  const zero::Adam rule{.lr = 0.1, .beta2 = 0.5, .amsgrad = true};
  const std::vector<double> got = trajectory<T>(rule, 1, {1, 0.1, 0.1});
  check_near<T>({got[1], got[2]}, {0.8355397454, 0.7867251462});
}

TEMPLATE_TEST_CASE("PT old CUDA SGD: maximize turns the gradient, not the decay", "", float,
                   double) {
  const zero::Sgd rule{.lr = 0.1, .weight_decay = 0.5, .maximize = true};
  CHECK(trajectory<TestType>(rule, 2, {1}) == std::vector<double>{2});
}

TEMPLATE_TEST_CASE("maximize in Adam turns the gradient, not the decay", "", float, double) {
  // The whole kind of fault: maximizing with g is minimizing with -g, whatever the decay.
  using T = TestType;
  const std::vector<double> up{1, -0.3, 0.7, 2}, down{-1, 0.3, -0.7, -2};
  for (const double decay : {0., 0.5}) {
    CHECK(trajectory<T>(zero::Adam{.lr = 0.1, .weight_decay = decay, .maximize = true}, 2, up) ==
          trajectory<T>(zero::Adam{.lr = 0.1, .weight_decay = decay}, 2, down));
    CHECK(trajectory<T>(zero::AdamW{.lr = 0.1, .weight_decay = decay, .maximize = true}, 2, up) ==
          trajectory<T>(zero::AdamW{.lr = 0.1, .weight_decay = decay}, 2, down));
    const zero::Sgd sgd{.lr = 0.1, .momentum = 0.9, .dampening = 0.2, .weight_decay = decay};
    zero::Sgd maximizing = sgd;
    maximizing.maximize = true;
    CHECK(trajectory<T>(maximizing, 2, up) == trajectory<T>(sgd, 2, down));
  }
}

TEMPLATE_TEST_CASE("PT SGD: reference values", "", float, double) {
  using T = TestType;
  const zero::Sgd rule{
      .lr = 0.1, .momentum = 0.9, .weight_decay = 0.1, .nesterov = true, .maximize = true};
  check_near<T>(trajectory<T>(rule, 1, {1, 2}), {1.171, 1.601651});
}

TEMPLATE_TEST_CASE("oneflow #5960: bias correction scales neither epsilon nor decay", "", float,
                   double) {
  using T = TestType;
  std::vector<double> gradients{0.5, -0.25};
  for (int t = 3; t <= 30; ++t) gradients.push_back(0.5 * std::sin(t) + 0.1);
  const double allowed = std::is_same_v<T, float> ? 2e-6 : 1e-14;
  for (const double eps : {1e-8, 1e-3, 1e-1, 1.}) {
    for (const double decay : {0., 0.1}) {
      const zero::Adam adam{.lr = 0.1, .eps = eps, .weight_decay = decay};
      const zero::AdamW adam_w{.lr = 0.1, .eps = eps, .weight_decay = decay};
      for (const bool decoupled : {false, true}) {
        const std::vector<double> got =
            decoupled ? trajectory<T>(adam_w, 1, gradients) : trajectory<T>(adam, 1, gradients);
        const std::vector<double> right = textbook_adam(adam, decoupled, 1, gradients);
        for (std::size_t i = 0; i < got.size(); ++i) {
          CAPTURE(eps, decay, decoupled, i);
          CHECK(std::abs(got[i] - right[i]) <= allowed);
        }
        if (eps < 0.1) continue;
        // The fault is far outside what is allowed, so this test would see it.
        const std::vector<double> fault = folded_adam(adam, decoupled, 1, gradients);
        CHECK(std::abs(fault[1] - right[1]) > 1e-2);
      }
    }
  }
}
