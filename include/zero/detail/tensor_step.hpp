// SPDX-License-Identifier: Apache-2.0
/// @file
/// Steps complete tensors by a whole-tensor optimizer, whatever types they are kept in.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>
#include <utility>

#include "zero/detail/convert.hpp"
#include "zero/detail/lane.hpp"
#include "zero/detail/rounding.hpp"
#include "zero/element.hpp"
#include "zero/memory.hpp"
#include "zero/optimizer.hpp"

namespace zero::detail {

/// `to` = `from`, rounded as `rounding` says; the numbers are the first of their parameter.
/// @tparam quantity which rounding of an element it is: 0 the value, then the slots
template <Rounding rounding, unsigned quantity, class A, Element T>
void round_array(std::span<const A> from, T* to, NoiseKey noise) {
  using X = Pack<A>;
  std::size_t i = 0;
  for (; from.size() - i >= X::width; i += X::width) {
    store_pack<rounding, quantity>(X::load(from.data() + i), to + i,
                                   PackNoise<X>{noise, static_cast<std::uint32_t>(i)});
  }
  if (i == from.size()) return;
  alignas(32) A rest[X::width] = {};
  alignas(32) T rounded[X::width];
  std::copy(from.begin() + static_cast<std::ptrdiff_t>(i), from.end(), rest);
  store_pack<rounding, quantity>(X::load(rest), rounded,
                                 PackNoise<X>{noise, static_cast<std::uint32_t>(i)});
  std::copy_n(rounded, from.size() - i, to + i);
}

/// `to` = `from` in the type that it is computed in.
template <Element T>
void widen_array(const T* from, std::span<arithmetic_t<T>> to) {
  for (std::size_t i = 0; i < to.size(); ++i) to[i] = element_traits<T>::load(from[i]);
}

/// Carves a workspace into arrays that start on cache lines.
template <class A>
class Carver {
 public:
  explicit Carver(std::span<A> memory) : memory_(memory) {}
  [[nodiscard]] static constexpr std::size_t room(std::size_t count) {
    constexpr std::size_t line = 64 / sizeof(A);
    return (count + line - 1) / line * line;
  }
  std::span<A> take(std::size_t count) {
    const std::span<A> taken = memory_.first(count);
    memory_ = memory_.subspan(room(count));
    return taken;
  }

 private:
  std::span<A> memory_;
};

/// Elements of the lane's workspace that one tensor needs.
template <class S, class Opt>
[[nodiscard]] std::size_t tensor_workspace(const Opt& optimizer, std::size_t slots,
                                           std::span<const std::size_t> shape,
                                           std::size_t elements) {
  using A = typename S::arithmetic;
  std::size_t arrays = 1;  // the gradient
  if (!S::has_master && !std::is_same_v<typename S::value, A>) ++arrays;
  if (!std::is_same_v<typename S::slot, A>) arrays += slots;
  return arrays * Carver<A>::room(elements) +
         Carver<A>::room(zero::workspace_elements(optimizer, shape));
}

/// Steps one complete tensor; its gradient is summed and scaled first.
/// @param t the parameter's own step count, this step included
/// @param kept where the tensor's values are kept
/// @param state_begin where its slots start
template <class Opt, class S, std::size_t slots, class G>
void step_tensor(const Opt& optimizer, std::int64_t t, Lane<S, slots>& lane,
                 const Fragment& fragment, typename S::value* kept, std::size_t state_begin,
                 NoiseKey noise, const GradientSum<G>& gradient,
                 std::span<const std::size_t> shape) {
  using A = typename S::arithmetic;
  using T = typename S::value;
  constexpr bool values_as_they_lie = std::is_same_v<T, A>;
  constexpr bool slots_as_they_lie = std::is_same_v<typename S::slot, A>;
  const std::size_t n = fragment.elements;
  const std::size_t used = zero::used_slots(optimizer);
  Carver<A> carver(lane.workspace.span());

  const std::span<A> summed = carver.take(n);
  sum_sources(gradient, 0, n, summed.data());
  for (A& x : summed) x *= gradient.scale;

  std::span<A> values;
  if constexpr (S::has_master) {
    values = {lane.master.data() + state_begin, n};
  } else if constexpr (values_as_they_lie) {
    values = {kept, n};
  } else {
    values = carver.take(n);
    widen_array(kept, values);
  }
  std::array<std::span<A>, slots> state{};
  for (std::size_t s = 0; s < used; ++s) {
    auto* const stored = lane.state[s].data() + state_begin;
    if constexpr (slots_as_they_lie) {
      state[s] = {stored, n};
    } else {
      state[s] = carver.take(n);
      widen_array(stored, state[s]);
    }
  }
  const std::span<A> workspace = carver.take(zero::workspace_elements(optimizer, shape));
  optimizer.update(TensorRef<A>{shape, values, summed, workspace}, state, t);

  if constexpr (!values_as_they_lie) {
    round_array<S::rounding, 0>(std::span<const A>(values), kept, noise);
  }
  if constexpr (!slots_as_they_lie) {
    [&]<std::size_t... I>(std::index_sequence<I...>) {
      ((I < used ? round_array<S::rounding, static_cast<unsigned>(I + 1)>(
                       std::span<const A>(state[I]), lane.state[I].data() + state_begin, noise)
                 : void()),
       ...);
    }(std::make_index_sequence<slots>{});
  }
}

}  // namespace zero::detail
