// SPDX-License-Identifier: Apache-2.0
/// @file
/// The numbers of scaling that change from step to step, and how they do: host and device alike, so
/// that a step on a device decides without the host.
#pragma once

#include <cstdint>

#include "zero/config.hpp"
#include "zero/math.hpp"

namespace zero::detail {

/// What does not change while a step runs.
struct ScaleRule {
  bool measures = false;  ///< the norm
  bool checks = false;    ///< non-finite gradients skip the step
  double max_norm = 0;    ///< where it measures; infinity doesn't clip
  bool is_dynamic = false;
  double growth = 1, backoff = 1, minimum = 1, maximum = 1;  ///< where the loss scale is dynamic
  std::int32_t interval = 1;
};

/// All ranks compute the same from the same findings.
struct ScaleState {
  double loss_scale = 1;
  double of_sums = 1;  ///< what the sums over ranks are multiplied by in the step under way
  double of_step = 1;  ///< the same with loss scale and clipping
  double norm = 0;     ///< of the step under way, where it is measured
  std::int32_t applied_in_a_row = 0;

  [[nodiscard]] ZERO_HOST_DEVICE double unclipped() const { return of_sums / loss_scale; }

  ZERO_HOST_DEVICE void begin_step(double scale_of_sums) {
    of_sums = scale_of_sums;
    of_step = unclipped();
  }

  /// From what all ranks found: whether the step is applied, and what it multiplies by.
  /// @param squares the sum of the squares of all summed gradients, where it is measured
  [[nodiscard]] ZERO_HOST_DEVICE bool decide(const ScaleRule& rule, double squares,
                                             bool all_finite) {
    if (rule.measures) {
      norm = zero::sqrt(squares) * zero::abs(unclipped());
      // PyTorch's clip_grad_norm_, term by term.
      const double clip = rule.max_norm / (norm + 1e-6);
      of_step = unclipped() * (clip < 1 ? clip : 1);
      if (norm != norm) of_step = norm;
    }
    if (!rule.checks || all_finite) return true;
    applied_in_a_row = 0;
    if (rule.is_dynamic) {
      const double lower = loss_scale * rule.backoff;
      loss_scale = lower < rule.minimum ? rule.minimum : lower;
    }
    return false;
  }

  /// The step under way is applied: what comes after it may be scaled otherwise.
  ZERO_HOST_DEVICE void applied(const ScaleRule& rule) {
    if (!rule.is_dynamic) return;
    if (++applied_in_a_row < rule.interval) return;
    applied_in_a_row = 0;
    const double higher = loss_scale * rule.growth;
    loss_scale = rule.maximum < higher ? rule.maximum : higher;
  }
};

}  // namespace zero::detail
