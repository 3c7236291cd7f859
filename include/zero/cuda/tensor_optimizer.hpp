// SPDX-License-Identifier: Apache-2.0
/// @file
/// What a whole-tensor optimizer is on a device.
#pragma once

#include "zero/cuda/stream.hpp"
#include "zero/optimizer.hpp"

namespace zero::cuda {

/// A `WholeTensorOptimizer` whose tensors lie in device memory; `ZeroSharded` takes it where the
/// store does, with a partition that cuts no tensor. An aggregate of its options, trivially
/// copyable, that names its slots and may have `used_slots`, `validate`, `validate(shape)` and
/// `workspace(shape)`, all as zero/optimizer.hpp says; and:
///
///  1. `update(TensorRef<T> tensor, std::array<std::span<T>, N> slots, std::int64_t t,
///     StreamView stream) const`: one step of one complete tensor, enqueued in `stream`. All spans
///     are of device memory, aligned to 64 bytes but for values of the caller's; the gradient has
///     been summed, scaled and clipped. It may block the host for its own results (a norm that
///     decides), which costs what it costs. Tensors that are empty or not stepped don't come.
///  2. `options() const`: a range of `double`, all that decides what `update` does. Ranks compare
///     it before every step.
///  3. the result depends on nothing but the tensor, its gradient, its slots, the options and t.
///
/// Since `update` is called by the host, which has to know whether the step is skipped and how
/// often each tensor was stepped, **a step waits for the device once**, after gradients have been
/// summed and looked at; and it can't be captured into a graph.
///
/// A minimal model, descent by steps of one length:
/// @code
/// struct NormalizedDescent {
///   double lr = 1e-3;
///   static constexpr std::array<std::string_view, 0> slots{};
///   std::array<double, 1> options() const { return {lr}; }
///   void update(zero::TensorRef<float> tensor, std::array<std::span<float>, 0>, std::int64_t,
///               zero::cuda::StreamView stream) const {
///     const auto policy = thrust::cuda::par_nosync.on(stream.get());
///     const float* g = tensor.gradient.data();
///     const double squares = thrust::transform_reduce(policy, g, g + tensor.gradient.size(),
///                                                     Square{}, 0.0, thrust::plus<double>{});
///     const float scale = squares > 0 ? float(lr / zero::sqrt(squares)) : 0.0F;
///     thrust::transform(policy, g, g + tensor.gradient.size(), tensor.values.data(),
///                       tensor.values.data(), Axpy{-scale});
///   }
/// };
/// @endcode
template <class O, class T = float>
concept TensorOptimizer = zero::detail::StepsTensorsIn<O, T, StreamView>;

}  // namespace zero::cuda
