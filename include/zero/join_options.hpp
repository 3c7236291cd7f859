// SPDX-License-Identifier: Apache-2.0
/// @file
/// What a caller may choose where ranks have unlike numbers of batches.
#pragma once

#include <cstdint>

namespace zero {

/// What the sum of the gradients of the ranks that still have input is multiplied by.
enum class JoinMean : std::uint8_t {
  /// What every step multiplies by: 1/K, or `Settings::gradient_scale`. Each batch weighs the same,
  /// whenever it comes; steps with fewer ranks are shorter. PyTorch's default.
  all_ranks,
  /// 1/n, n being how many ranks have input in that step: the mean of what there is. Refused where
  /// `Settings::gradient_scale` says otherwise.
  ranks_with_input,
};

/// What happens once the first rank has no more input.
enum class JoinEnd : std::uint8_t {
  serve,  ///< it takes part in the others' steps until all have ended
  raise,  ///< all ranks throw `InputsEnded` in the first step in which some rank has none
};

/// The same on all ranks; what `join` was given is compared in each step.
struct JoinOptions {
  JoinMean mean = JoinMean::all_ranks;
  JoinEnd when_first_ends = JoinEnd::serve;
};

}  // namespace zero
