// SPDX-License-Identifier: Apache-2.0
/// @file
/// What a caller may choose where ranks have unlike numbers of batches.
#pragma once

#include <cstdint>
#include <functional>

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

/// `mean` and `when_first_ends` are compared between ranks in each step.
struct JoinOptions {
  JoinMean mean = JoinMean::all_ranks;
  JoinEnd when_first_ends = JoinEnd::serve;
  /// Called on a rank without input before each step that it serves, and before the one that finds
  /// nobody has any. Where a body changes options from step to step (a schedule), this must change
  /// them alike, by `steps()` for example, since a rank updates its part of the state with its own.
  /// What it throws leaves `join` as from a body.
  std::function<void()> before_serving{};
};

}  // namespace zero
