// SPDX-License-Identifier: Apache-2.0
// Faults in optimizers that other projects shipped, with their inputs and the right values. LC is
// llm.c, PT pytorch/pytorch.
#include <zero/bfloat16.hpp>
#include <zero/detail/rounding.hpp>
#include <zero/detail/storage.hpp>
#include <zero/detail/update_loop.hpp>
#include <zero/element.hpp>
#include <zero/float16.hpp>
#include <zero/optim/adam.hpp>
#include <zero/optim/sgd.hpp>
#include <zero/optimizer.hpp>
#include <zero/precision.hpp>

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

namespace {

/// Steps `n` elements that start at 1 with a gradient of 1, and gives them after each `every`
/// steps.
template <class Storage, class Rule>
std::vector<std::vector<float>> drift(const Rule& rule, std::size_t n, int steps, int every) {
  using T = typename Storage::value;
  constexpr std::size_t slot_count = Rule::slots.size();
  std::vector<T> values(n, zero::element_traits<T>::store(1));
  std::vector<typename Storage::master> masters(
      n, zero::element_traits<typename Storage::master>::store(1));
  std::array<std::vector<typename Storage::slot>, slot_count> state;
  zero::detail::UpdateArrays<Storage, slot_count> arrays{values.data(), nullptr, {}};
  if constexpr (Storage::has_master) arrays.master = masters.data();
  for (std::size_t slot = 0; slot < zero::used_slots(rule); ++slot) {
    state[slot].resize(n, zero::element_traits<typename Storage::slot>::store(0));
    arrays.state[slot] = state[slot].data();
  }
  const std::vector<float> gradient(n, 1.0F);
  std::vector<std::vector<float>> seen;
  for (int t = 1; t <= steps; ++t) {
    arrays.noise = zero::detail::noise_key(7, static_cast<std::uint64_t>(t), 0);
    zero::detail::update_elements(rule, rule.template scalars<float>(t), arrays, gradient.data(),
                                  n);
    if (t % every != 0) continue;
    seen.emplace_back();
    for (const T value : values) seen.back().push_back(zero::element_traits<T>::load(value));
  }
  return seen;
}

template <class T, class Rule>
void check_small_updates(const Rule& rule) {
  using zero::detail::Storage;
  constexpr int steps = 10000;
  const auto in_float = drift<Storage<float, zero::MixedPrecision>>(rule, 11, steps, 100);
  CHECK(std::abs(in_float.back()[0] - 0.99F) < 1e-3F);
  // With a float master: float's drift, rounded, all the way.
  const auto mixed = drift<Storage<T, zero::MixedPrecision>>(rule, 11, steps, 100);
  REQUIRE(mixed.size() == in_float.size());
  for (std::size_t k = 0; k < mixed.size(); ++k) {
    for (std::size_t i = 0; i < 11; ++i) {
      CHECK(mixed[k][i] == static_cast<float>(T(in_float[k][i])));
    }
  }
  // Rounded stochastically: the same on average. One element's drift is some steps of its last
  // place, 2^-8 or 2^-11, with a deviation below 0.0065, so that of the mean is below 0.0003.
  const auto stochastic = drift<Storage<T, zero::StochasticPrecision>>(rule, 512, steps, 1000);
  for (std::size_t k = 0; k < stochastic.size(); ++k) {
    double mean = 0;
    for (const float value : stochastic[k]) mean += static_cast<double>(value) / 512;
    CHECK(std::abs(mean - static_cast<double>(in_float[10 * k + 9][0])) < 0.0012);
  }
  CHECK(stochastic.back() != std::vector<float>(512, stochastic.back()[0]));
  // The fault: to nearest without a master nothing moves.
  const auto native = drift<Storage<T, zero::NativePrecision>>(rule, 11, steps, steps);
  CHECK(native.back() == std::vector<float>(11, 1.0F));
}

}  // namespace

TEMPLATE_TEST_CASE("torchao #1124, LC #772: small updates of 16-bit values don't vanish", "",
                   zero::bfloat16, zero::float16) {
  check_small_updates<TestType>(zero::Sgd{.lr = 1e-6});
  check_small_updates<TestType>(zero::AdamW{.lr = 1e-6, .weight_decay = 0});
}
