// SPDX-License-Identifier: Apache-2.0
/// @file
/// Which element types state and traffic use, and how what is narrower is rounded.
#pragma once

#include <concepts>
#include <cstdint>
#include <type_traits>

#include "zero/bfloat16.hpp"
#include "zero/element.hpp"
#include "zero/float16.hpp"
#include "zero/rounding.hpp"

namespace zero {

/// Intent: name, for a parameter element type `T`, what the optimizer keeps of it, and in what.
///
///  1. `P::template Master<T>`: the type of the values that are stepped. `T` itself: the parameters
///     are stepped where they lie. `arithmetic_t<T>`: a copy of them is, and they are roundings of
///     it.
///  2. `P::template Slot<T>`: the type of the optimizer's slots, which has the arithmetic of `T`.
///  3. `P::template Wire<T>`: the type that gradients are sent in, `T` or, for float, one of 16
///     bits: gradients are rounded to it, to nearest, and summed in float in rank order.
///  4. `P::rounding`: how a value or slot is rounded that is stored in 16 bits. Where that is
///     `Rounding::stochastic`, `policy.seed` (a `std::uint64_t`, the same on all ranks) starts the
///     noise, which depends on it, on the parameter's step count and index, and on the element's
///     index in the parameter: neither on the world size nor on any other policy.
///
/// A minimal model:
/// @code
/// struct OwnPrecision {
///   template <class T>
///   using Master = T;
///   template <class T>
///   using Slot = T;
///   template <class T>
///   using Wire = T;
///   static constexpr zero::Rounding rounding = zero::Rounding::nearest;
/// };
/// @endcode
template <class P, class T = float>
concept PrecisionPolicy = std::copyable<P> && requires(const P& policy) {
  requires Element<typename P::template Master<T>>;
  requires Element<typename P::template Slot<T>>;
  requires Element<typename P::template Wire<T>>;
  typename std::integral_constant<Rounding, P::rounding>;
  requires P::rounding == Rounding::nearest || requires {
    { policy.seed } -> std::convertible_to<std::uint64_t>;
  };
};

/// For `BasicPrecision`: whatever type the parameter has.
struct OwnType {};

/// The shipped precisions.
/// @tparam Master16 what the stepped values of a 16-bit parameter are kept in: `float`, or
///         `OwnType`. Wider parameters are stepped where they lie.
/// @tparam SlotType what slots are kept in, or `OwnType`; those of a `double` are always double
/// @tparam how how whatever is kept in 16 bits is rounded
/// @tparam WireType what gradients of float are sent in, or `OwnType`
template <class Master16, class SlotType, Rounding how, class WireType = OwnType>
struct BasicPrecision {
  template <Element T>
  using Master =
      typename std::conditional_t<sizeof(T) == 2 && !std::is_same_v<Master16, OwnType>,
                                  std::type_identity<Master16>, std::type_identity<T>>::type;
  template <Element T>
  using Slot =
      typename std::conditional_t<std::is_same_v<SlotType, OwnType> ||
                                      std::is_same_v<arithmetic_t<T>, double>,
                                  std::type_identity<T>, std::type_identity<SlotType>>::type;
  template <Element T>
  using Wire =
      typename std::conditional_t<std::is_same_v<T, float> && !std::is_same_v<WireType, OwnType>,
                                  std::type_identity<WireType>, std::type_identity<T>>::type;
  static constexpr Rounding rounding = how;

  std::uint64_t seed = 0;  ///< of stochastic rounding; otherwise unused
};

/// The default: 16-bit parameters with a master copy and slots in float, wider ones as they are.
/// 12 bytes an Adam-stepped element of state for a 2-byte one, sharded. The masters are what is
/// stepped: a caller who changes values calls `ZeroSharded::reload_masters`.
using MixedPrecision = BasicPrecision<float, float, Rounding::nearest>;

/// As `MixedPrecision`, and gradients of float are sent in bfloat16: half the traffic, and each
/// rank's part of a sum is rounded to 8 bits.
using Bfloat16Wire = BasicPrecision<float, float, Rounding::nearest, bfloat16>;

/// The same in float16: 11 bits, but beyond 65504 gradients are infinite; use a loss scale.
using Float16Wire = BasicPrecision<float, float, Rounding::nearest, float16>;

/// As `MixedPrecision` with slots in bfloat16, those of float parameters too: 8 bytes an
/// Adam-stepped element. Stochastic, since to nearest a slow average such as Adam's second moment
/// stands still: its changes are smaller than half a unit of its last place.
using Bfloat16Slots = BasicPrecision<float, bfloat16, Rounding::stochastic>;

/// 16-bit parameters without a master copy, slots in float. Small updates survive on average.
using StochasticPrecision = BasicPrecision<OwnType, float, Rounding::stochastic>;

/// Everything in the parameter's own type; refused for 16-bit ones, which would lose updates.
using NativePrecision = BasicPrecision<OwnType, OwnType, Rounding::nearest>;

static_assert(PrecisionPolicy<MixedPrecision> && PrecisionPolicy<Bfloat16Slots, bfloat16>);
static_assert(PrecisionPolicy<StochasticPrecision, float16> && PrecisionPolicy<NativePrecision>);

}  // namespace zero
