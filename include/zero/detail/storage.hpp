// SPDX-License-Identifier: Apache-2.0
/// @file
/// In which types one lane is kept.
#pragma once

#include <type_traits>

#include "zero/element.hpp"
#include "zero/precision.hpp"
#include "zero/rounding.hpp"

namespace zero::detail {

/// A parameter element type under a precision.
template <Element T, class Precision>
struct Storage {
  using value = T;
  using arithmetic = arithmetic_t<T>;
  using master = typename Precision::template Master<T>;
  using slot = typename Precision::template Slot<T>;
  using wire = typename Precision::template Wire<T>;
  static constexpr bool has_master = !std::is_same_v<master, T>;
  /// Whether anything is rounded when it is stored.
  static constexpr bool rounds = sizeof(T) == 2 || sizeof(slot) == 2;
  static constexpr Rounding rounding = rounds ? Precision::rounding : Rounding::nearest;
};

}  // namespace zero::detail
