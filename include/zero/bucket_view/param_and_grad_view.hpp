// SPDX-License-Identifier: Apache-2.0
/// @file
/// Parameters and gradients become views into buckets.
#pragma once

#include <cstddef>

#include "zero/bucket_view.hpp"

namespace zero {

/// As `ParamView`, and gradients move into such an array too: backward writes where buckets are
/// sent from, so that nothing is packed either. Parameters must model `RebindableGradient`. A
/// gradient that has moved is there from then on, zeros at first: a parameter that gets none in a
/// step must be marked absent (`mark_absent`), or it is stepped by what lies there.
struct ParamAndGradView {
  static constexpr Residency values = Residency::arena;
  static constexpr Residency gradients = Residency::arena;
  std::size_t bucket_bytes = 25_MiB;
};

static_assert(BucketViewPolicy<ParamAndGradView>);

}  // namespace zero
