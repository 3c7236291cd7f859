// SPDX-License-Identifier: Apache-2.0
/// @file
/// The arithmetic vocabulary of update rules, beyond + - * /: `sqrt`, `abs`, `sign`, `maximum`,
/// `minimum`, `select`. Each works on one number, host and device, and on a pack of numbers on the
/// host, with the same bits a lane.
#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "zero/config.hpp"
#include "zero/detail/pack.hpp"
#include "zero/detail/power.hpp"  // IWYU pragma: export

namespace zero {

/// `condition ? yes : no`, element by element. Comparing two packs gives the condition.
template <class T>
ZERO_HOST_DEVICE constexpr T select(bool condition, const T& yes, const T& no) {
  return condition ? yes : no;
}

/// The same for packs, so that a rule outside this namespace may write `zero::select`; the pack's
/// own one, found by its argument, wins in overload resolution.
template <class X>
ZERO_HOST_DEVICE inline X select(const typename X::Mask& mask, const X& yes, const X& no) {
  return select(mask, yes, no);
}

ZERO_HOST_DEVICE inline float sqrt(float x) { return ::sqrtf(x); }
ZERO_HOST_DEVICE inline double sqrt(double x) { return ::sqrt(x); }
/// The same for packs, as above.
template <class X>
  requires requires { typename X::Mask; }
ZERO_HOST_DEVICE inline X sqrt(const X& x) {
  return sqrt(x);
}

/// The larger of two, the second of which may be a rule's scalar; NaN if either is NaN (as
/// PyTorch's `maximum`).
template <class X>
ZERO_HOST_DEVICE inline X maximum(const X& a, const std::type_identity_t<X>& b) {
  const X larger = select(a < b, b, a);
  return select(b != b, b, larger);
}

/// The smaller of two; NaN if either is NaN.
template <class X>
ZERO_HOST_DEVICE inline X minimum(const X& a, const std::type_identity_t<X>& b) {
  const X smaller = select(a > b, b, a);
  return select(b != b, b, smaller);
}

/// The magnitude; -0 becomes +0, NaN stays NaN.
template <class X>
ZERO_HOST_DEVICE inline X abs(const X& x) {
  const X zero_value(0);
  return select(x > zero_value, x, zero_value - x);
}

/// -1, 0 or 1; NaN stays NaN.
template <class X>
ZERO_HOST_DEVICE inline X sign(const X& x) {
  const X zero_value(0);
  const X positive = select(x > zero_value, X(1), x);
  return select(x < zero_value, X(-1), positive);
}

}  // namespace zero
