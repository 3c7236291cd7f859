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
#include <type_traits>
#include <utility>

#include "zero/config.hpp"
#include "zero/detail/convert.hpp"
#include "zero/detail/pack.hpp"
#include "zero/detail/rounding.hpp"
#include "zero/element.hpp"
#include "zero/optimizer.hpp"

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wpsabi"

namespace zero::detail {

/// The arrays that one update runs over; all start at the same element.
/// @tparam S a `Storage`
template <class S, std::size_t slots>
struct UpdateArrays {
  typename S::value* values;
  typename S::master* master;                  ///< null where values are stepped as they lie
  std::array<typename S::slot*, slots> state;  ///< null beyond the used slots
  /// Of the parameter in this step, and the index in it of the arrays' first element.
  NoiseKey noise{};
  std::uint32_t first = 0;

  [[nodiscard]] UpdateArrays from(std::size_t at, std::size_t used) const {
    UpdateArrays later = *this;
    later.values += at;
    if constexpr (S::has_master) later.master += at;
    for (std::size_t slot = 0; slot != used; ++slot) later.state[slot] += at;
    later.first += static_cast<std::uint32_t>(at);
    return later;
  }
};

/// Gradients, one pointer a rank (null: zeros), that are summed in rank order and then multiplied
/// by `scale`, on their way into the rule.
template <Element G>
struct GradientSum {
  std::span<const G* const> sources;
  arithmetic_t<G> scale;
};

/// How many elements are summed and scaled before the rule reads them: few enough that they stay in
/// the fastest cache and that the processor goes on to fetch all arrays ahead (measured: beyond
/// 2 KiB it loses track of them), enough to pay for the loops' beginnings.
template <class T>
inline constexpr std::size_t sum_block = 1024 / sizeof(T);

/// Elements that are 0, as many as are summed in one go; as bytes, so that an element type needs no
/// constant of its own.
inline constexpr std::size_t zeros_count = 2048;
template <class G>
alignas(64) inline constexpr unsigned char zero_bytes[zeros_count * sizeof(G)] = {};
template <class G>
inline const G* const zeros = reinterpret_cast<const G*>(zero_bytes<G>);

/// Updates `blocks` packs `X` by `gradients`, which are multiplied by `scale` here and nowhere
/// else. Position-independent: every element goes through this one body.
template <class S, class Rule, std::size_t used, class X, class Scalars, std::size_t... I>
[[gnu::always_inline]] inline void update_packs(const UpdateArrays<S, slot_count<Rule>>& given,
                                                const typename S::arithmetic* gradients,
                                                typename S::arithmetic by, const Scalars& constants,
                                                std::size_t blocks, std::index_sequence<I...>) {
  const X scale(by);
  const auto arrays = given;          // local copies: as far as the compiler knows, stores to the
  const Scalars scalars = constants;  // arrays could change what the references stand for
  for (std::size_t block = 0; block < blocks; ++block) {
    const std::size_t at = block * X::width;
    X value;
    if constexpr (S::has_master) {
      value = X::load(arrays.master + at);
    } else {
      value = load_pack<X>(arrays.values + at);
    }
    const X gradient = X::load(gradients + at) * scale;
    [[maybe_unused]] std::array<X, slot_count<Rule>> slots;
    ((void)(slots[I] = I < used ? load_pack<X>(arrays.state[I] + at) : X(0)), ...);
    Rule::update(value, gradient, slots[I]..., scalars);
    const PackNoise<X> noise{arrays.noise, arrays.first + static_cast<std::uint32_t>(at)};
    if constexpr (S::has_master) value.store(arrays.master + at);
    store_pack<S::rounding, 0>(value, arrays.values + at, noise);
    ((void)(I < used ? store_pack<S::rounding, I + 1>(slots[I], arrays.state[I] + at, noise)
                     : void()),
     ...);
  }
}

/// `out = sources at element `at`, summed in rank order`, for `packs` packs and two sources or
/// more, or one that must be converted.
template <class X, class G, class T = typename X::value_type>
[[gnu::always_inline]] inline void sum_packs(const GradientSum<G>& sum, std::size_t at,
                                             std::size_t packs, T* out) {
  const auto source = [&](std::size_t r) {
    return sum.sources[r] == nullptr ? zeros<G> : sum.sources[r] + at;
  };
  const std::size_t end = packs * X::width;
  // Plain loops: g++ 12 doesn't flatten what lambdas call.
  const G* const first = source(0);
  if (sum.sources.size() == 1) {
    for (std::size_t i = 0; i < end; i += X::width) load_pack<X>(first + i).store(out + i);
    return;
  }
  const G* const second = source(1);
  for (std::size_t i = 0; i < end; i += X::width) {
    (load_pack<X>(first + i) + load_pack<X>(second + i)).store(out + i);
  }
  for (std::size_t r = 2; r < sum.sources.size(); ++r) {
    const G* const next = source(r);
    for (std::size_t i = 0; i < end; i += X::width) {
      (X::load(out + i) + load_pack<X>(next + i)).store(out + i);
    }
  }
}

// Each loop is compiled once for the baseline and once for AVX2, without fma: products and sums are
// never contracted, so both give the same bits. Sums and updates are functions of their own, a sum
// shared by all rules. Flattened, so that the user's `update` is compiled inside, for the same
// instruction set.
template <class S, class Rule, std::size_t used, class X, class Scalars>
[[gnu::flatten, gnu::noinline]] void update_packs_baseline(
    const UpdateArrays<S, slot_count<Rule>>& arrays, const typename S::arithmetic* gradient,
    typename S::arithmetic scale, const Scalars& scalars, std::size_t packs) {
  update_packs<S, Rule, used, X>(arrays, gradient, scale, scalars, packs, slot_indices<Rule>{});
}
template <class X, class G>
[[gnu::flatten, gnu::noinline]] void sum_packs_baseline(const GradientSum<G>& sum, std::size_t at,
                                                        std::size_t packs,
                                                        typename X::value_type* out) {
  sum_packs<X>(sum, at, packs, out);
}

#if ZERO_AVX2_CLONES
template <class S, class Rule, std::size_t used, class X, class Scalars>
[[gnu::target("avx2"), gnu::flatten, gnu::noinline]] void update_packs_avx2(
    const UpdateArrays<S, slot_count<Rule>>& arrays, const typename S::arithmetic* gradient,
    typename S::arithmetic scale, const Scalars& scalars, std::size_t packs) {
  update_packs<S, Rule, used, typename X::InAvx>(arrays, gradient, scale, scalars, packs,
                                                 slot_indices<Rule>{});
}
template <class X, class G>
[[gnu::target("avx2"), gnu::flatten, gnu::noinline]] void sum_packs_avx2(
    const GradientSum<G>& sum, std::size_t at, std::size_t packs, typename X::value_type* out) {
  sum_packs<typename X::InAvx>(sum, at, packs, out);
}
#endif

/// `out` = elements [at, at + count) of the sum, not multiplied.
template <class G>
void sum_sources(const GradientSum<G>& sum, std::size_t at, std::size_t count,
                 arithmetic_t<G>* out) {
  using T = arithmetic_t<G>;
  using X = Pack<T>;
  auto* add = &sum_packs_baseline<X, G>;
#if ZERO_AVX2_CLONES
  if (__builtin_cpu_supports("avx2")) add = &sum_packs_avx2<X, G>;
#endif
  const std::size_t whole = count - count % X::width;
  for (std::size_t done = 0; done < whole; done += zeros_count) {
    add(sum, at + done, std::min(zeros_count, whole - done) / X::width, out + done);
  }
  for (std::size_t i = whole; i < count; ++i) {
    const auto from = [&](const G* source) {
      return source == nullptr ? T(0) : element_traits<G>::load(source[at + i]);
    };
    T total = from(sum.sources[0]);
    for (const G* source : sum.sources.subspan(1)) total += from(source);
    out[i] = total;
  }
}

template <class S, class Rule, std::size_t used, class X, class G, class Scalars>
void update_with(const UpdateArrays<S, slot_count<Rule>>& arrays, const GradientSum<G>& sum,
                 const Scalars& scalars, std::size_t count) {
  using T = typename S::arithmetic;
  auto* update = &update_packs_baseline<S, Rule, used, X, Scalars>;
#if ZERO_AVX2_CLONES
  if (__builtin_cpu_supports("avx2")) update = &update_packs_avx2<S, Rule, used, X, Scalars>;
#endif
  const std::size_t packs = count / X::width;
  const T* as_it_is = nullptr;
  if constexpr (std::is_same_v<G, T>) {
    if (sum.sources.size() == 1) as_it_is = sum.sources[0];
  }
  if (as_it_is != nullptr) {
    update(arrays, as_it_is, sum.scale, scalars, packs);
  } else {
    alignas(64) T summed[sum_block<T>];
    constexpr std::size_t block = sum_block<T> / X::width;
    for (std::size_t done = 0; done < packs; done += block) {
      const std::size_t some = std::min(block, packs - done);
      sum_sources(sum, done * X::width, some * X::width, summed);
      update(arrays.from(done * X::width, used), summed, sum.scale, scalars, some);
    }
  }
  const std::size_t rest = count % X::width;
  if (rest == 0) return;
  // The last elements go through the same loop, in a padded copy: where a shard is cut must not
  // decide which code computes an element.
  const std::size_t done = count - rest;
  const auto last = arrays.from(done, used);
  alignas(32) T gradient[X::width] = {};
  alignas(32) typename S::value values[X::width] = {};
  alignas(32) typename S::master master[X::width] = {};
  alignas(32) typename S::slot state[slot_count<Rule> + 1][X::width] = {};
  sum_sources(sum, done, rest, gradient);
  UpdateArrays<S, slot_count<Rule>> tail{values, master, {}, last.noise, last.first};
  const auto for_each_array = [&](auto&& body) {
    body(values, last.values);
    if constexpr (S::has_master) body(master, last.master);
    for (std::size_t slot = 0; slot != used; ++slot) body(state[slot], last.state[slot]);
  };
  for (std::size_t slot = 0; slot != used; ++slot) tail.state[slot] = state[slot];
  for_each_array([&](auto* copy, auto* array) { std::memcpy(copy, array, rest * sizeof *array); });
  update(tail, gradient, sum.scale, scalars, 1);
  for_each_array([&](auto* copy, auto* array) { std::memcpy(array, copy, rest * sizeof *array); });
}

/// One step of `rule` over `count` elements, with the scalars of their parameter's step.
/// The bits of an element depend on nothing but its own values and the rule's scalars.
template <class S, class Rule, class G, class Scalars, class X = Pack<typename S::arithmetic>>
void update_elements(const Rule& rule, const Scalars& scalars,
                     const UpdateArrays<S, slot_count<Rule>>& arrays, const GradientSum<G>& sum,
                     std::size_t count) {
  if constexpr (!HasOptionalSlots<Rule>) {
    update_with<S, Rule, slot_count<Rule>, X>(arrays, sum, scalars, count);
  } else {
    // One loop for each number of used slots: an unused slot must not even be loaded.
    const std::size_t used = zero::used_slots(rule);
    [&]<std::size_t... I>(std::index_sequence<I...>) {
      (void)((used == I ? (update_with<S, Rule, I, X>(arrays, sum, scalars, count), true)
                        : false) ||
             ...);
    }(std::make_index_sequence<slot_count<Rule> + 1>{});
  }
}

/// The same with one gradient as it is.
template <class S, class Rule, class Scalars, class X = Pack<typename S::arithmetic>>
void update_elements(const Rule& rule, const Scalars& scalars,
                     const UpdateArrays<S, slot_count<Rule>>& arrays,
                     const typename S::arithmetic* gradient, std::size_t count) {
  using T = typename S::arithmetic;
  update_elements<S, Rule, T, Scalars, X>(
      rule, scalars, arrays, GradientSum<T>{std::span<const T* const>(&gradient, 1), T(1)}, count);
}

}  // namespace zero::detail

#pragma GCC diagnostic pop
