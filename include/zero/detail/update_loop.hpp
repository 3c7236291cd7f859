// SPDX-License-Identifier: Apache-2.0
/// @file
/// Turns an update rule into a host loop over arrays, vectorised whatever the user's flags.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

#include "zero/config.hpp"
#include "zero/detail/pack.hpp"
#include "zero/element.hpp"
#include "zero/optimizer.hpp"

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wpsabi"

namespace zero::detail {

/// The arrays that one update runs over; all start at the same element.
template <class T, std::size_t slots>
struct UpdateArrays {
  T* values;
  const T* gradient;
  std::array<T*, slots> state;  ///< null beyond the used slots
};

/// Updates `blocks` packs `X`. Position-independent: every element goes through this one body.
template <class Rule, std::size_t used, class X, class Scalars, std::size_t... I>
[[gnu::always_inline]] inline void update_packs(
    const UpdateArrays<typename X::value_type, slot_count<Rule>>& given, const Scalars& constants,
    std::size_t blocks, std::index_sequence<I...>) {
  const auto arrays = given;          // local copies: as far as the compiler knows, stores to the
  const Scalars scalars = constants;  // arrays could change what the references stand for
  for (std::size_t block = 0; block < blocks; ++block) {
    const std::size_t at = block * X::width;
    X value = X::load(arrays.values + at);
    const X gradient = X::load(arrays.gradient + at);
    [[maybe_unused]] std::array<X, slot_count<Rule>> slots;
    ((void)(slots[I] = I < used ? X::load(arrays.state[I] + at) : X(0)), ...);
    Rule::update(value, gradient, slots[I]..., scalars);
    value.store(arrays.values + at);
    ((void)(I < used ? slots[I].store(arrays.state[I] + at) : void()), ...);
  }
}

// Flattened, so that the user's `update` is compiled inside, for the same instruction set.
template <class Rule, std::size_t used, class X, class Scalars>
[[gnu::flatten, gnu::noinline]] void update_packs_baseline(
    const UpdateArrays<typename X::value_type, slot_count<Rule>>& arrays, const Scalars& scalars,
    std::size_t blocks) {
  update_packs<Rule, used, X>(arrays, scalars, blocks, slot_indices<Rule>{});
}

#if ZERO_AVX2_CLONES
// Without fma: products and sums are never contracted, so both versions give the same bits.
template <class Rule, std::size_t used, class X, class Scalars>
[[gnu::target("avx2"), gnu::flatten, gnu::noinline]] void update_packs_avx2(
    const UpdateArrays<typename X::value_type, slot_count<Rule>>& arrays, const Scalars& scalars,
    std::size_t blocks) {
  update_packs<Rule, used, X>(arrays, scalars, blocks, slot_indices<Rule>{});
}
#endif

template <class Rule, std::size_t used, class X, class Scalars>
void update_with(const UpdateArrays<typename X::value_type, slot_count<Rule>>& arrays,
                 const Scalars& scalars, std::size_t count) {
  using T = typename X::value_type;
  auto* run = &update_packs_baseline<Rule, used, X, Scalars>;
#if ZERO_AVX2_CLONES
  if (__builtin_cpu_supports("avx2")) run = &update_packs_avx2<Rule, used, X, Scalars>;
#endif
  run(arrays, scalars, count / X::width);
  const std::size_t rest = count % X::width;
  if (rest == 0) return;
  // The last elements go through the same loop, in a padded copy: where a shard is cut must not
  // decide which code computes an element.
  const std::size_t done = count - rest;
  alignas(32) std::array<std::array<T, X::width>, slot_count<Rule> + 2> copy{};
  UpdateArrays<T, slot_count<Rule>> tail{copy[0].data(), copy[1].data(), {}};
  std::memcpy(copy[0].data(), arrays.values + done, rest * sizeof(T));
  std::memcpy(copy[1].data(), arrays.gradient + done, rest * sizeof(T));
  const auto for_used_slots = [&](auto&& body) {
    for (std::size_t slot = 0; slot != used; ++slot) body(slot);
  };
  for_used_slots([&](std::size_t slot) {
    tail.state[slot] = copy[slot + 2].data();
    std::memcpy(tail.state[slot], arrays.state[slot] + done, rest * sizeof(T));
  });
  run(tail, scalars, 1);
  std::memcpy(arrays.values + done, tail.values, rest * sizeof(T));
  for_used_slots([&](std::size_t slot) {
    std::memcpy(arrays.state[slot] + done, tail.state[slot], rest * sizeof(T));
  });
}

/// One step of `rule` over `count` elements whose parameter is in its step `t` (from 1).
/// The bits of an element depend on nothing but its own values and the rule's scalars.
template <class Rule, class T, class Scalars, class X = Pack<T>>
void update_elements(const Rule& rule, const Scalars& scalars,
                     const UpdateArrays<T, slot_count<Rule>>& arrays, std::size_t count) {
  const std::size_t used = used_slots(rule);
  // One loop for each number of used slots: an unused slot must not even be loaded.
  [&]<std::size_t... I>(std::index_sequence<I...>) {
    (void)((used == I ? (update_with<Rule, I, X>(arrays, scalars, count), true) : false) || ...);
  }(std::make_index_sequence<slot_count<Rule> + 1>{});
}

}  // namespace zero::detail

#pragma GCC diagnostic pop
