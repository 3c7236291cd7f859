// SPDX-License-Identifier: Apache-2.0
/// @file
/// The fused update: one launch steps all of a rank's fragments by an update rule.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "zero/config.hpp"
#include "zero/cuda/detail/fragments.cuh"
#include "zero/cuda/detail/launch.cuh"
#include "zero/cuda/detail/vectors.cuh"
#include "zero/cuda/stream.hpp"
#include "zero/detail/rounding.hpp"
#include "zero/detail/storage.hpp"
#include "zero/optimizer.hpp"

namespace zero::cuda::detail {

/// What is constant over a parameter's step.
template <class Rule, class S>
using rule_scalars =
    decltype(std::declval<const Rule&>().template scalars<typename S::arithmetic>(std::int64_t{}));

/// @tparam S a `zero::detail::Storage`
template <class Rule, class S>
struct UpdateTask {
  using value = typename S::value;
  using arithmetic = typename S::arithmetic;

  const DeviceFragment<value>* fragments;
  const Chunk* chunks;
  std::size_t chunk_count;
  typename S::master* master;  ///< null where values are stepped as they lie
  /// Null beyond the slots that some fragment's options use. Fragments whose options use fewer keep
  /// what they have in the others.
  typename S::slot* state[zero::detail::slot_count<Rule> + 1];
  const arithmetic* sums;                             ///< null: of the fragments' own gradients
  const ParameterStep<rule_scalars<Rule, S>>* steps;  ///< by parameter
  const StepState* step;
  std::uint64_t seed;  ///< of stochastic rounding
};

inline constexpr unsigned update_threads = 256;

/// What one block does with a chunk.
/// @tparam G what gradients are read in: the values' type, or its arithmetic's
/// @tparam used how many of the leading slots there are
template <class Rule, class S, class G, unsigned used>
class ChunkUpdate {
 public:
  using T = typename S::value;
  using A = typename S::arithmetic;
  using Slot = typename S::slot;

  __device__ ChunkUpdate(const UpdateTask<Rule, S>& task, const Chunk& chunk,
                         const DeviceFragment<T>& fragment,
                         const ParameterStep<rule_scalars<Rule, S>>& step)
      : values_(fragment.values + chunk.begin),
        scale_(static_cast<A>(task.step->scale)),
        scalars_(step.scalars) {
    const std::size_t at = fragment.begin + chunk.begin;
    if constexpr (S::has_master) master_ = task.master + at;
    for (unsigned s = 0; s != used; ++s) state_[s] = task.state[s] + at;
    if constexpr (std::is_same_v<G, T>) {
      if (fragment.gradient != nullptr) gradient_ = fragment.gradient + chunk.begin;
    }
    if constexpr (std::is_same_v<G, A>) {
      if (task.sums != nullptr) gradient_ = task.sums + at;
    }
    if constexpr (draws) {
      noise_ = zero::detail::noise_key(task.seed, static_cast<std::uint64_t>(step.t),
                                       fragment.parameter);
      first_ = static_cast<std::uint32_t>(fragment.parameter_begin + chunk.begin);
    }
  }

  /// In vectors from the first place that starts one in all arrays, if there is such a place; what
  /// is before and behind them one by one.
  __device__ void run(unsigned count) {
    const unsigned head = elements_to_vector<width>(values_);
    bool together = gradient_ == nullptr || elements_to_vector<width>(gradient_) == head;
    if constexpr (S::has_master) together &= elements_to_vector<width>(master_) == head;
    for (unsigned s = 0; s != used; ++s) together &= elements_to_vector<width>(state_[s]) == head;
    const unsigned begin = together && head < count ? head : count;
    const unsigned end = begin + (count - begin) / width * width;
    // One loop, so that vectors and single elements share the code of the arithmetic: it is large,
    // and even a compiler that contracts products and sums is to treat them alike.
    for (unsigned at = 0; at < count;) {
      const bool vectors = at >= begin && at < end;
      const unsigned stop = at < begin ? begin : vectors ? end : count;
      step(at, stop, vectors);
      const unsigned next = at + blockDim.x * per_thread;
      at = next < stop ? next : stop;
    }
  }

 private:
  static constexpr bool draws = S::rounding == Rounding::stochastic;
  /// As many as fill an access of the widest array; narrower ones have smaller accesses.
  static constexpr unsigned width =
      access_bytes /
      std::max({sizeof(T), sizeof(G), S::has_master ? sizeof(A) : 1, used != 0 ? sizeof(Slot) : 1});
  /// Elements that a thread has under way at a time, so that memory is kept busy.
  static constexpr unsigned per_thread = 2 * access_bytes / sizeof(A);
  static_assert(per_thread % width == 0);

  /// What a thread holds of all arrays.
  struct Held {
    T values[per_thread] = {};
    A master[per_thread] = {};
    G gradient[per_thread] = {};
    Slot state[used + 1][per_thread] = {};
  };

  /// All threads' next elements, from `at` to at most `end`.
  __device__ void step(unsigned at, unsigned end, bool vectors) {
    Held held;
    if (vectors) {
      load_all<width>(held, at, end);
    } else {
      load_all<1>(held, at, end);
    }
    ZERO_UNROLL
    for (unsigned k = 0; k < per_thread; ++k) {
      const unsigned i = vectors ? place<width>(at, k / width) + k % width : place<1>(at, k);
      step_element(held, k, i, zero::detail::slot_indices<Rule>{});
    }
    if (vectors) {
      store_all<width>(held, at, end);
    } else {
      store_all<1>(held, at, end);
    }
  }

  /// Where this thread's vector number `v` of a round from `at` on starts: neighbouring threads
  /// have neighbouring vectors.
  template <unsigned w>
  __device__ static unsigned place(unsigned at, unsigned v) {
    return at + (v * blockDim.x + threadIdx.x) * w;
  }

  template <unsigned w, class U>
  __device__ static void load(const U* from, U (&to)[per_thread], unsigned at, unsigned end) {
    ZERO_UNROLL
    for (unsigned v = 0; v < per_thread / w; ++v) {
      const unsigned i = place<w>(at, v);
      if (i >= end) continue;
      const auto vector = load_vector<w>(from + i);
      ZERO_UNROLL
      for (unsigned j = 0; j < w; ++j) to[v * w + j] = vector.at[j];
    }
  }
  template <unsigned w, class U>
  __device__ static void store(const U (&from)[per_thread], U* to, unsigned at, unsigned end) {
    ZERO_UNROLL
    for (unsigned v = 0; v < per_thread / w; ++v) {
      const unsigned i = place<w>(at, v);
      if (i >= end) continue;
      Vector<U, w> vector;
      ZERO_UNROLL
      for (unsigned j = 0; j < w; ++j) vector.at[j] = from[v * w + j];
      store_vector<w>(vector, to + i);
    }
  }

  template <unsigned w>
  __device__ void load_all(Held& held, unsigned at, unsigned end) const {
    if constexpr (S::has_master) {
      load<w>(master_, held.master, at, end);
    } else {
      load<w>(values_, held.values, at, end);
    }
    if constexpr (used != 0) {
      ZERO_UNROLL
      for (unsigned s = 0; s < used; ++s) load<w>(state_[s], held.state[s], at, end);
    }
    if (gradient_ != nullptr) load<w>(gradient_, held.gradient, at, end);
  }
  template <unsigned w>
  __device__ void store_all(const Held& held, unsigned at, unsigned end) const {
    if constexpr (S::has_master) store<w>(held.master, master_, at, end);
    store<w>(held.values, values_, at, end);
    if constexpr (used != 0) {
      ZERO_UNROLL
      for (unsigned s = 0; s < used; ++s) store<w>(held.state[s], state_[s], at, end);
    }
  }

  /// Element number `i` of the chunk, which is the thread's number `k`.
  template <std::size_t... I>
  __device__ void step_element(Held& held, unsigned k, unsigned i,
                               std::index_sequence<I...>) const {
    using zero::detail::load_element;
    A value;
    if constexpr (S::has_master) {
      value = held.master[k];
    } else {
      value = load_element(held.values[k]);
    }
    const A gradient = load_element(held.gradient[k]) * scale_;
    A slots[sizeof...(I) + 1];
    ((slots[I] = I < used ? load_element(held.state[I < used ? I : 0][k]) : A(0)), ...);
    Rule::update(value, gradient, slots[I]..., scalars_);
    if constexpr (S::has_master) held.master[k] = value;
    held.values[k] = rounded<T, 0>(value, i);
    ((void)(I < used ? (held.state[I < used ? I : 0][k] = rounded<Slot, I + 1>(slots[I], i), 0)
                     : 0),
     ...);
  }

  template <class U, unsigned quantity>
  __device__ U rounded(A x, [[maybe_unused]] unsigned i) const {
    if constexpr (draws && zero::detail::is_16_bit<U>) {
      return zero::detail::round_to<U, S::rounding>(
          x, zero::detail::noise_bits(noise_, first_ + i, quantity));
    } else {
      return zero::detail::round_to<U, Rounding::nearest>(x);
    }
  }

  T* values_;
  A* master_ = nullptr;
  Slot* state_[used + 1] = {};
  const G* gradient_ = nullptr;
  A scale_;
  rule_scalars<Rule, S> scalars_;
  zero::detail::NoiseKey noise_{};
  std::uint32_t first_ = 0;  ///< the first element, counted in the parameter
};

template <class Rule, class S, class G, unsigned used>
__global__ void __launch_bounds__(update_threads) update_kernel(UpdateTask<Rule, S> task) {
  if (task.step->skip != 0) return;
  for (std::size_t c = blockIdx.x; c < task.chunk_count; c += gridDim.x) {
    const Chunk chunk = task.chunks[c];
    const auto& fragment = task.fragments[chunk.fragment];
    const auto& step = task.steps[fragment.parameter];
    if (step.stepping == 0) continue;
    ChunkUpdate<Rule, S, G, used>(task, chunk, fragment, step).run(chunk.elements);
  }
}

/// Steps all fragments whose parameters are stepping, unless the step is skipped: with the bits
/// that the host's `update_elements` gives, provided that neither compiler contracts products and
/// sums. A fragment without a gradient, where there are no sums, has zeros.
template <class Rule, class S>
void update(const UpdateTask<Rule, S>& task, StreamView stream) {
  static_assert(std::is_trivially_copyable_v<rule_scalars<Rule, S>>,
                "what a rule's scalars() gives is copied to the device as bytes");
  constexpr std::size_t slots = zero::detail::slot_count<Rule>;
  // A kernel for each number of slots: one that is not used must not even be loaded.
  const auto run = [&]<unsigned used>(std::integral_constant<unsigned, used>) {
    const auto shape = one_block_each(task.chunk_count, update_threads);
    using A = typename S::arithmetic;
    if (task.sums != nullptr) {
      launch("update", &update_kernel<Rule, S, A, used>, shape, stream, task);
    } else {
      launch("update", &update_kernel<Rule, S, typename S::value, used>, shape, stream, task);
    }
  };
  if constexpr (!zero::detail::HasOptionalSlots<Rule>) {
    run(std::integral_constant<unsigned, slots>{});
  } else {
    std::size_t used = 0;
    while (used < slots && task.state[used] != nullptr) ++used;
    [&]<std::size_t... I>(std::index_sequence<I...>) {
      ((used == I ? run(std::integral_constant<unsigned, I>{}) : void()), ...);
    }(std::make_index_sequence<slots + 1>{});
  }
}

}  // namespace zero::cuda::detail
