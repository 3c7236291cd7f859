// SPDX-License-Identifier: Apache-2.0
/// @file
/// Parameters become views into buckets.
#pragma once

#include <cstddef>

#include "zero/bucket_view.hpp"

namespace zero {

/// Values move into one array of the optimizer's, on huge pages, from which buckets are gathered in
/// place: no copies, and no more memory, since the parameters let go of their own.
struct ParamView {
  static constexpr Residency values = Residency::arena;
  static constexpr Residency gradients = Residency::caller;
  std::size_t bucket_bytes = 25_MiB;
};

static_assert(BucketViewPolicy<ParamView>);

}  // namespace zero
