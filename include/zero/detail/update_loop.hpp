// SPDX-License-Identifier: Apache-2.0
/// @file
/// Turns an update rule into a host loop over arrays, vectorised whatever the user's flags.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
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

/// Gradients, one pointer a rank (null: zeros), that are summed in rank order and then multiplied
/// by `scale`, on their way into the rule.
template <Element T>
struct GradientSum {
  std::span<const T* const> sources;
  arithmetic_t<T> scale;
};

/// How many elements are summed and scaled before the rule reads them: few enough that they stay in
/// the fastest cache and that the processor goes on to fetch all arrays ahead (measured: beyond
/// 2 KiB it loses track of them), enough to pay for the loops' beginnings.
template <class T>
inline constexpr std::size_t sum_block = 1024 / sizeof(T);

template <class T>
inline constexpr T zeros[sum_block<T>] = {};

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

/// `out = (sources at element `at`, summed in rank order) * scale`, for as many packs as fit into a
/// block or are left.
template <class X, class T = typename X::value_type>
[[gnu::always_inline]] inline void sum_packs(const GradientSum<T>& sum, std::size_t at,
                                             std::size_t packs, T* out) {
  const auto source = [&](std::size_t r) {
    return sum.sources[r] == nullptr ? zeros<T> : sum.sources[r] + at;
  };
  const auto for_each_pack = [&](auto&& result) {
    for (std::size_t i = 0; i < packs * X::width; i += X::width) result(i).store(out + i);
  };
  const X scale(sum.scale);
  const T* before = source(0);
  const std::size_t last = sum.sources.size() - 1;
  for (std::size_t r = 1; r < last; ++r) {
    const T* next = source(r);
    for_each_pack([&](std::size_t i) { return X::load(before + i) + X::load(next + i); });
    before = out;
  }
  if (last == 0) {
    for_each_pack([&](std::size_t i) { return X::load(before + i) * scale; });
  } else {
    const T* next = source(last);
    for_each_pack([&](std::size_t i) { return (X::load(before + i) + X::load(next + i)) * scale; });
  }
}

/// As `update_packs`, with gradients that are summed block by block.
template <class Rule, std::size_t used, class X, class Scalars>
[[gnu::always_inline]] inline void update_packs_from_sum(
    const UpdateArrays<typename X::value_type, slot_count<Rule>>& given,
    const GradientSum<typename X::value_type>& sum, const Scalars& scalars, std::size_t packs) {
  using T = typename X::value_type;
  alignas(64) T summed[sum_block<T>];
  const bool as_it_is = sum.sources.size() == 1 && sum.scale == 1 && sum.sources[0] != nullptr;
  const std::size_t block = as_it_is ? packs : sum_block<T> / X::width;
  for (std::size_t done = 0; done < packs; done += block) {
    const std::size_t count = std::min(block, packs - done);
    const std::size_t at = done * X::width;
    auto arrays = given;
    arrays.values += at;
    for (std::size_t slot = 0; slot != used; ++slot) arrays.state[slot] += at;
    if (as_it_is) {
      arrays.gradient = sum.sources[0] + at;
    } else {
      sum_packs<X>(sum, at, count, summed);
      arrays.gradient = summed;
#if ZERO_VECTOR_TYPES
      // The multiplication ends here: contracted with the rule's additions it would round once
      // less.
      asm("" : "+m"(summed));
#endif
    }
    update_packs<Rule, used, X>(arrays, scalars, count, slot_indices<Rule>{});
  }
}

// Flattened, so that the user's `update` is compiled inside, for the same instruction set.
template <class Rule, std::size_t used, class X, class Scalars>
[[gnu::flatten, gnu::noinline]] void update_packs_baseline(
    const UpdateArrays<typename X::value_type, slot_count<Rule>>& arrays,
    const GradientSum<typename X::value_type>& sum, const Scalars& scalars, std::size_t packs) {
  update_packs_from_sum<Rule, used, X>(arrays, sum, scalars, packs);
}

#if ZERO_AVX2_CLONES
// Without fma: products and sums are never contracted, so both versions give the same bits.
template <class Rule, std::size_t used, class X, class Scalars>
[[gnu::target("avx2"), gnu::flatten, gnu::noinline]] void update_packs_avx2(
    const UpdateArrays<typename X::value_type, slot_count<Rule>>& arrays,
    const GradientSum<typename X::value_type>& sum, const Scalars& scalars, std::size_t packs) {
  update_packs_from_sum<Rule, used, typename X::InAvx>(arrays, sum, scalars, packs);
}
#endif

template <class Rule, std::size_t used, class X, class Scalars>
void update_with(const UpdateArrays<typename X::value_type, slot_count<Rule>>& arrays,
                 const GradientSum<typename X::value_type>& sum, const Scalars& scalars,
                 std::size_t count) {
  using T = typename X::value_type;
  auto* run = &update_packs_baseline<Rule, used, X, Scalars>;
#if ZERO_AVX2_CLONES
  if (__builtin_cpu_supports("avx2")) run = &update_packs_avx2<Rule, used, X, Scalars>;
#endif
  run(arrays, sum, scalars, count / X::width);
  const std::size_t rest = count % X::width;
  if (rest == 0) return;
  // The last elements go through the same loop, in a padded copy: where a shard is cut must not
  // decide which code computes an element.
  const std::size_t done = count - rest;
  alignas(32) std::array<std::array<T, X::width>, slot_count<Rule> + 2> copy{};
  UpdateArrays<T, slot_count<Rule>> tail{copy[0].data(), copy[1].data(), {}};
  std::memcpy(copy[0].data(), arrays.values + done, rest * sizeof(T));
  for (std::size_t i = 0; i < rest; ++i) {
    T total = sum.sources[0] == nullptr ? T(0) : sum.sources[0][done + i];
    for (const T* source : sum.sources.subspan(1))
      total += source == nullptr ? T(0) : source[done + i];
    copy[1][i] = total * sum.scale;
  }
  const auto for_used_slots = [&](auto&& body) {
    for (std::size_t slot = 0; slot != used; ++slot) body(slot);
  };
  for_used_slots([&](std::size_t slot) {
    tail.state[slot] = copy[slot + 2].data();
    std::memcpy(tail.state[slot], arrays.state[slot] + done, rest * sizeof(T));
  });
  run(tail, {std::span<const T* const>(&tail.gradient, 1), T(1)}, scalars, 1);
  std::memcpy(arrays.values + done, tail.values, rest * sizeof(T));
  for_used_slots([&](std::size_t slot) {
    std::memcpy(arrays.state[slot] + done, tail.state[slot], rest * sizeof(T));
  });
}

/// One step of `rule` over `count` elements whose parameter is in its step `t` (from 1), with the
/// gradients `sum` (and `arrays.gradient` unused).
/// The bits of an element depend on nothing but its own values and the rule's scalars.
template <class Rule, class T, class Scalars, class X = Pack<T>>
void update_elements(const Rule& rule, const Scalars& scalars,
                     const UpdateArrays<T, slot_count<Rule>>& arrays, const GradientSum<T>& sum,
                     std::size_t count) {
  if constexpr (!HasOptionalSlots<Rule>) {
    update_with<Rule, slot_count<Rule>, X>(arrays, sum, scalars, count);
  } else {
    // One loop for each number of used slots: an unused slot must not even be loaded.
    const std::size_t used = zero::used_slots(rule);
    [&]<std::size_t... I>(std::index_sequence<I...>) {
      (void)((used == I ? (update_with<Rule, I, X>(arrays, sum, scalars, count), true) : false) ||
             ...);
    }(std::make_index_sequence<slot_count<Rule> + 1>{});
  }
}

/// The same with `arrays.gradient` as it is.
template <class Rule, class T, class Scalars, class X = Pack<T>>
void update_elements(const Rule& rule, const Scalars& scalars,
                     const UpdateArrays<T, slot_count<Rule>>& arrays, std::size_t count) {
  const GradientSum<T> own{std::span<const T* const>(&arrays.gradient, 1), arithmetic_t<T>(1)};
  update_elements<Rule, T, Scalars, X>(rule, scalars, arrays, own, count);
}

}  // namespace zero::detail

#pragma GCC diagnostic pop
