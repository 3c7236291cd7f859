// SPDX-License-Identifier: Apache-2.0
/// @file
/// What a step came to.
#pragma once

#include <cstdint>
#include <optional>

namespace zero {

struct Outcome {
  bool applied = false;   ///< false: skipped on all ranks; nothing but the loss scale has changed
  std::int64_t step = 0;  ///< how many steps have been applied, this one included
  /// The 2-norm, over all parameters, of the gradient that is stepped with, before it was clipped:
  /// summed over ranks and multiplied by `Settings::gradient_scale`, loss scale taken out. The same
  /// bits whatever the layout. Only where `clip_grad_norm` asked for it.
  std::optional<double> gradient_norm = std::nullopt;
};

}  // namespace zero
