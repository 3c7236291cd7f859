// SPDX-License-Identifier: Apache-2.0
/// @file
/// Steps complete tensors by a whole-tensor optimizer that works in a stream, whatever types they
/// are kept in: zero/detail/tensor_step.hpp of a device.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>
#include <utility>

#include "zero/config.hpp"
#include "zero/cuda/detail/fragments.cuh"
#include "zero/cuda/detail/launch.cuh"
#include "zero/cuda/stream.hpp"
#include "zero/detail/lane.hpp"
#include "zero/detail/rounding.hpp"
#include "zero/detail/tensor_step.hpp"
#include "zero/element.hpp"
#include "zero/memory.hpp"
#include "zero/optimizer.hpp"

namespace zero::cuda::detail {

inline constexpr unsigned tensor_threads = 256;

/// One element a thread and turn.
[[nodiscard]] inline LaunchShape one_thread_each(std::size_t count) {
  return one_block_each((count + tensor_threads - 1) / tensor_threads, tensor_threads);
}

/// @param from null: zeros
template <class A, Element G>
__global__ void scale_gradient_kernel(const G* from, A* to, std::size_t count,
                                      const StepState* step) {
  const A scale = static_cast<A>(step->scale);
  const std::size_t stride = std::size_t{gridDim.x} * blockDim.x;
  for (std::size_t i = std::size_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += stride) {
    to[i] = (from == nullptr ? A(0) : zero::detail::load_element(from[i])) * scale;
  }
}

template <class A, Element T>
__global__ void widen_kernel(const T* from, A* to, std::size_t count) {
  const std::size_t stride = std::size_t{gridDim.x} * blockDim.x;
  for (std::size_t i = std::size_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += stride) {
    to[i] = zero::detail::load_element(from[i]);
  }
}

/// The numbers are the first of their parameter.
/// @tparam quantity which rounding of an element it is: 0 the value, then the slots
template <Rounding rounding, unsigned quantity, class A, Element T>
__global__ void round_kernel(const A* from, T* to, std::size_t count,
                             zero::detail::NoiseKey noise) {
  const std::size_t stride = std::size_t{gridDim.x} * blockDim.x;
  for (std::size_t i = std::size_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += stride) {
    const std::uint32_t bits =
        rounding == Rounding::stochastic
            ? zero::detail::noise_bits(noise, static_cast<std::uint32_t>(i), quantity)
            : 0;
    to[i] = zero::detail::round_to<T, rounding>(from[i], bits);
  }
}

/// Enqueues a step of one complete tensor.
/// @param t the parameter's own step count, this step included
/// @param sums of the lane's gradients; null: as the tensor's own gradient lies
/// @param step in device memory
template <class Opt, class S, std::size_t slots>
void step_tensor(const Opt& optimizer, std::int64_t t,
                 zero::detail::Lane<S, slots, MemorySpace::cuda>& lane,
                 const DeviceFragment<typename S::value>& tensor,
                 const typename S::arithmetic* sums, const StepState* step,
                 zero::detail::NoiseKey noise, std::span<const std::size_t> shape,
                 StreamView stream) {
  using A = typename S::arithmetic;
  using T = typename S::value;
  using Slot = typename S::slot;
  constexpr bool values_as_they_lie = std::is_same_v<T, A>;
  constexpr bool slots_as_they_lie = std::is_same_v<Slot, A>;
  const std::size_t n = tensor.elements;
  const std::size_t used = zero::used_slots(optimizer);
  const LaunchShape grid = one_thread_each(n);
  zero::detail::Carver<A> carver(lane.workspace.span());

  const std::span<A> gradient = carver.take(n);
  if (sums != nullptr) {
    launch("scale_gradient", &scale_gradient_kernel<A, A>, grid, stream, sums + tensor.begin,
           gradient.data(), n, step);
  } else {
    launch("scale_gradient", &scale_gradient_kernel<A, T>, grid, stream, tensor.gradient,
           gradient.data(), n, step);
  }

  std::span<A> values;
  if constexpr (S::has_master) {
    values = {lane.master.data() + tensor.begin, n};
  } else if constexpr (values_as_they_lie) {
    values = {tensor.values, n};
  } else {
    values = carver.take(n);
    launch("widen", &widen_kernel<A, T>, grid, stream, tensor.values, values.data(), n);
  }
  std::array<std::span<A>, slots> state{};
  for (std::size_t s = 0; s < used; ++s) {
    auto* const stored = lane.state[s].data() + tensor.begin;
    if constexpr (slots_as_they_lie) {
      state[s] = {stored, n};
    } else {
      state[s] = carver.take(n);
      launch("widen", &widen_kernel<A, Slot>, grid, stream, stored, state[s].data(), n);
    }
  }
  const std::span<A> workspace = carver.take(zero::workspace_elements(optimizer, shape));
  optimizer.update(TensorRef<A>{shape, values, gradient, workspace}, state, t, stream);

  if constexpr (!values_as_they_lie) {
    launch("round", &round_kernel<S::rounding, 0, A, T>, grid, stream, values.data(), tensor.values,
           n, noise);
  }
  if constexpr (!slots_as_they_lie) {
    [&]<std::size_t... I>(std::index_sequence<I...>) {
      ((I < used
            ? launch("round", &round_kernel<S::rounding, static_cast<unsigned>(I + 1), A, Slot>,
                     grid, stream, state[I].data(), lane.state[I].data() + tensor.begin, n, noise)
            : void()),
       ...);
    }(std::make_index_sequence<slots>{});
  }
}

}  // namespace zero::cuda::detail
