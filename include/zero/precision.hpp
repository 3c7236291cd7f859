// SPDX-License-Identifier: Apache-2.0
/// @file
/// Which element types state and traffic use.
#pragma once

#include <concepts>

#include "zero/element.hpp"

namespace zero {

/// Intent: name, for a parameter element type `T`, what its optimizer state is stored in and what
/// its gradients are sent in.
///  1. `P::template Slot<T>` and `P::template Wire<T>` are element types.
template <class P, class T = float>
concept PrecisionPolicy = std::copyable<P> && requires {
  requires Element<typename P::template Slot<T>>;
  requires Element<typename P::template Wire<T>>;
};

/// Everything in the parameter's own type.
struct NativePrecision {
  template <Element T>
  using Slot = T;
  template <Element T>
  using Wire = T;
};

static_assert(PrecisionPolicy<NativePrecision>);

}  // namespace zero
