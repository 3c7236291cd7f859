// SPDX-License-Identifier: Apache-2.0
/// @file
/// Parameters stay put.
#pragma once

#include <cstddef>

#include "zero/bucket_view.hpp"

namespace zero {

/// Values and gradients stay in the caller's memory. Between ranks that share memory nothing else
/// is needed; elsewhere they are copied through a few staging buckets.
struct NoView {
  static constexpr Residency values = Residency::caller;
  static constexpr Residency gradients = Residency::caller;
  std::size_t bucket_bytes = 25_MiB;
};

static_assert(BucketViewPolicy<NoView>);

}  // namespace zero
