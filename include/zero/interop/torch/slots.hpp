// SPDX-License-Identifier: Apache-2.0
/// @file
/// What zero must know of an optimizer of libtorch's to keep its state: `TorchSlots`.
#pragma once

// First, or clang can't read libtorch 1.13 as C++20: a vector of this type is used before it is
// defined.
#include <ATen/core/ivalue.h>

#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/optimizer.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <tuple>

namespace zero {

/// Tells where an optimizer of libtorch's keeps its state. To wrap one of your own in a
/// `TorchOptimizer`, specialise it with
///  1. `Options` and `State`: its `OptimizerOptions` and its `OptimizerParamState`. It is
///     constructed from a `std::vector<at::Tensor>`, which may be empty, and `Options`.
///  2. `static constexpr std::array<std::string_view, N> slots`: the names of the tensors in a
///     `State`. Each has as many elements as its parameter, and its type.
///  3. `static std::array<at::Tensor*, N> tensors(State&)`: where they are, in the same order.
///  4. optionally `static std::size_t used_slots(const Options&)`: how many of the leading slots
///     these options need. Default: all.
///  5. optionally `static void set_step(State&, std::int64_t)`, where it counts steps.
///  6. optionally `name` and `for_each_option(options, f)`, which checkpoints use, as items 3a and
///     3b of zero/optimizer.hpp say.
///
/// Between two steps of a parameter the optimizer may remember nothing but this: it is made anew
/// for each. On the parameter's first step it finds no `State`, and makes one as it always does.
/// @code
/// template <>
/// struct zero::TorchSlots<Lion> {
///   using Options = LionOptions;
///   using State = LionParamState;
///   static constexpr std::array<std::string_view, 1> slots{"exp_avg"};
///   static std::array<at::Tensor*, 1> tensors(State& state) { return {&state.exp_avg()}; }
/// };
/// @endcode
template <class O>
struct TorchSlots;

namespace detail {

/// Adam and AdamW, told in the words of zero's own, so that checkpoints go from one to the other.
template <class O, class TheirOptions, class TheirState>
struct TorchAdamSlots {
  using Options = TheirOptions;
  using State = TheirState;
  static constexpr std::array<std::string_view, 3> slots{"exp_avg", "exp_avg_sq", "max_exp_avg_sq"};
  static std::size_t used_slots(const Options& options) { return options.amsgrad() ? 3 : 2; }
  static std::array<at::Tensor*, 3> tensors(State& state) {
    return {&state.exp_avg(), &state.exp_avg_sq(), &state.max_exp_avg_sq()};
  }
  static void set_step(State& state, std::int64_t step) { state.step(step); }
  template <class Self, class F>
  static void for_each_option(Self& options, F&& f) {
    f("lr", options.lr());
    f("beta1", std::get<0>(options.betas()));
    f("beta2", std::get<1>(options.betas()));
    f("eps", options.eps());
    f("weight_decay", options.weight_decay());
    f("amsgrad", options.amsgrad());
  }
};

}  // namespace detail

/// In checkpoints the same as `zero::Adam`.
template <>
struct TorchSlots<::torch::optim::Adam>
    : detail::TorchAdamSlots<::torch::optim::Adam, ::torch::optim::AdamOptions,
                             ::torch::optim::AdamParamState> {
  static constexpr std::string_view name = "Adam";
};

/// In checkpoints the same as `zero::AdamW`.
template <>
struct TorchSlots<::torch::optim::AdamW>
    : detail::TorchAdamSlots<::torch::optim::AdamW, ::torch::optim::AdamWOptions,
                             ::torch::optim::AdamWParamState> {
  static constexpr std::string_view name = "AdamW";
};

/// In checkpoints the same as `zero::Sgd`. Momentum that is turned on later starts from zeros,
/// where libtorch's starts from the first gradient.
template <>
struct TorchSlots<::torch::optim::SGD> {
  using Options = ::torch::optim::SGDOptions;
  using State = ::torch::optim::SGDParamState;
  static constexpr std::string_view name = "Sgd";
  static constexpr std::array<std::string_view, 1> slots{"momentum_buffer"};
  static std::size_t used_slots(const Options& options) { return options.momentum() != 0 ? 1 : 0; }
  static std::array<at::Tensor*, 1> tensors(State& state) { return {&state.momentum_buffer()}; }
  template <class Self, class F>
  static void for_each_option(Self& options, F&& f) {
    f("lr", options.lr());
    f("momentum", options.momentum());
    f("dampening", options.dampening());
    f("weight_decay", options.weight_decay());
    f("nesterov", options.nesterov());
  }
};

/// Used slots come first, so centred without momentum there is an unused momentum buffer.
template <>
struct TorchSlots<::torch::optim::RMSprop> {
  using Options = ::torch::optim::RMSpropOptions;
  using State = ::torch::optim::RMSpropParamState;
  static constexpr std::string_view name = "RMSprop";
  static constexpr std::array<std::string_view, 3> slots{"square_avg", "momentum_buffer",
                                                         "grad_avg"};
  static std::size_t used_slots(const Options& options) {
    if (options.centered()) return 3;
    return options.momentum() > 0 ? 2 : 1;
  }
  static std::array<at::Tensor*, 3> tensors(State& state) {
    return {&state.square_avg(), &state.momentum_buffer(), &state.grad_avg()};
  }
  static void set_step(State& state, std::int64_t step) { state.step(step); }
  template <class Self, class F>
  static void for_each_option(Self& options, F&& f) {
    f("lr", options.lr());
    f("alpha", options.alpha());
    f("eps", options.eps());
    f("weight_decay", options.weight_decay());
    f("momentum", options.momentum());
    f("centered", options.centered());
  }
};

/// The sum is 0, not `initial_accumulator_value`, as long as a parameter has not been stepped. Each
/// group starts from its own value, where libtorch takes that of its defaults for all.
template <>
struct TorchSlots<::torch::optim::Adagrad> {
  using Options = ::torch::optim::AdagradOptions;
  using State = ::torch::optim::AdagradParamState;
  static constexpr std::string_view name = "Adagrad";
  static constexpr std::array<std::string_view, 1> slots{"sum"};
  static std::array<at::Tensor*, 1> tensors(State& state) { return {&state.sum()}; }
  static void set_step(State& state, std::int64_t step) { state.step(step); }
  template <class Self, class F>
  static void for_each_option(Self& options, F&& f) {
    f("lr", options.lr());
    f("lr_decay", options.lr_decay());
    f("weight_decay", options.weight_decay());
    f("initial_accumulator_value", options.initial_accumulator_value());
    f("eps", options.eps());
  }
};

}  // namespace zero
