// SPDX-License-Identifier: Apache-2.0
/// @file
/// Runs host code over packs of numbers, compiled for the best instruction set at hand.
#pragma once

#include <type_traits>

#include "zero/config.hpp"
#include "zero/detail/pack.hpp"

namespace zero::detail {

// Flattened, so that the body is compiled inside, for the same instruction set. What the body calls
// with packs must be always inlined.
template <class X, class Body>
[[gnu::flatten, gnu::noinline]] void with_packs_baseline(const Body& body) {
  body(std::type_identity<X>{});
}

#if ZERO_AVX2_CLONES
// Without fma: products and sums are never contracted, so both versions give the same bits.
template <class X, class Body>
[[gnu::target("avx2"), gnu::flatten, gnu::noinline]] void with_packs_avx2(const Body& body) {
  body(std::type_identity<typename X::InAvx>{});
}
#endif

/// Calls `body(std::type_identity<X>)`, X being a pack of `T`; which of two, of one width and with
/// the same bits, depends on the processor.
template <class T, class Body>
void with_packs(const Body& body) {
#if ZERO_AVX2_CLONES
  if (__builtin_cpu_supports("avx2")) return with_packs_avx2<Pack<T>>(body);
#endif
  with_packs_baseline<Pack<T>>(body);
}

}  // namespace zero::detail
