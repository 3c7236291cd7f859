// SPDX-License-Identifier: Apache-2.0
/// @file
/// What a step's summed gradients are multiplied by, and whether they are stepped with at all.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>

#include "zero/detail/findings.hpp"
#include "zero/detail/options.hpp"
#include "zero/detail/scale_state.hpp"
#include "zero/error.hpp"
#include "zero/join_options.hpp"
#include "zero/loss_scale.hpp"
#include "zero/settings.hpp"

namespace zero::detail {

/// The mean, the loss scale and clipping are one factor, which sums are multiplied by once. All
/// ranks compute the same from the same findings.
class Scaling {
 public:
  /// @param ranks whose gradients are summed
  Scaling(const Settings& settings, double ranks) : settings_(&settings), ranks_(ranks) {
    if (settings.loss_scale) state_.loss_scale = settings.loss_scale->scale;
  }

  /// Throws `UsageError` for settings that make no sense.
  /// @param in_float whether some gradient is multiplied in float
  void validate(bool in_float) const {
    const double scale = of_sums();
    if (!std::isfinite(scale)) {
      throw UsageError("Settings::gradient_scale is " + number_text(scale) +
                       "; it must be a finite number");
    }
    if (settings_->loss_scale) validate_loss_scale();
    if (in_float) require_in_float(scale);
  }

  /// Throws `UsageError` where a join's options make no sense with the settings.
  void validate_join(const JoinOptions& join, bool in_float) const {
    if (join.when_first_ends == JoinEnd::serve && settings_->gradients == Gradients::reduced) {
      throw UsageError(
          "join: a rank without input has no reduced gradients (Settings::gradients) to serve "
          "with; "
          "take JoinEnd::raise, or Gradients::local");
    }
    if (join.mean == JoinMean::all_ranks) return;
    if (settings_->gradient_scale) {
      throw UsageError(
          "join: JoinMean::ranks_with_input scales by 1/n, but Settings::gradient_scale says "
          "otherwise; leave it out, or take JoinMean::all_ranks");
    }
    if (in_float) require_in_float(1);  // n may be 1
  }

  std::optional<double> max_norm{};  ///< gradients are clipped to it
  bool has_16_bits = false;          ///< some parameter

  /// What the sum over ranks is multiplied by, loss scale and clipping aside.
  [[nodiscard]] double of_sums() const {
    const bool sums = settings_->gradients == Gradients::local;
    return settings_->gradient_scale.value_or(sums ? 1.0 / ranks_ : 1.0);
  }
  /// Of the step under way.
  [[nodiscard]] double of_step() const noexcept { return state_.of_step; }
  [[nodiscard]] double loss_scale() const noexcept { return state_.loss_scale; }
  /// Of the last step, where it was measured.
  [[nodiscard]] std::optional<double> gradient_norm() const noexcept {
    return measured_ ? std::optional(state_.norm) : std::nullopt;
  }

  /// Whether all sums must have been looked at before the first may be used.
  [[nodiscard]] bool looks_first() const { return looks_first(has_16_bits); }
  [[nodiscard]] bool looks_first(bool some_16_bits) const {
    return max_norm.has_value() || checks(some_16_bits);
  }

  /// What a step on a device goes by.
  [[nodiscard]] ScaleRule rule() const {
    ScaleRule rule{.measures = max_norm.has_value(),
                   .checks = checks(has_16_bits),
                   .max_norm = max_norm.value_or(0)};
    if (is_dynamic()) {
      const LossScale& losses = *settings_->loss_scale;
      rule.is_dynamic = true;
      rule.growth = losses.growth;
      rule.backoff = losses.backoff;
      rule.minimum = losses.minimum;
      rule.maximum = losses.maximum;
      rule.interval = losses.interval;
    }
    return rule;
  }
  [[nodiscard]] const ScaleState& state() const noexcept { return state_; }
  /// What a device has come to.
  /// @param measured whether its last step measured the norm
  void adopt(const ScaleState& state, bool measured) noexcept {
    state_ = state;
    measured_ = measured;
  }

  /// Goes on as a dynamic loss scale was saved, within the bounds of now. One that is not stays as
  /// the settings say.
  void resume(double loss_scale, std::int32_t applied_in_a_row) noexcept {
    if (!is_dynamic()) return;
    const LossScale& bounds = *settings_->loss_scale;
    state_.loss_scale = std::clamp(loss_scale, bounds.minimum, bounds.maximum);
    state_.applied_in_a_row = applied_in_a_row;
  }

  /// @param ranks how many the mean is taken over: all, or those of a join that have input
  void begin_step(double ranks) {
    measured_ = false;
    state_.begin_step(ranks == ranks_ ? of_sums() : 1.0 / ranks);
  }

  /// From what all ranks found: whether the step is applied, and what it multiplies by.
  [[nodiscard]] bool decide(const Findings& all) {
    const ScaleRule now = rule();
    measured_ = now.measures;
    return state_.decide(now, now.measures ? all.squares.value() : 0, all.all_finite());
  }

  /// The step under way is applied: what comes after it may be scaled otherwise.
  void applied() { state_.applied(rule()); }

 private:
  void validate_loss_scale() const {
    settings_->loss_scale->validate();
    if (is_dynamic() && settings_->finite_check == FiniteCheck::never) {
      throw UsageError(
          "a dynamic loss scale learns from skipped steps, but FiniteCheck::never skips none; use "
          "where_needed, or LossScale::fixed");
    }
  }

  /// With all loss scales that there may be.
  void require_in_float(double scale) const {
    require_in_float(scale, 1);
    if (!settings_->loss_scale) return;
    const LossScale& loss = *settings_->loss_scale;
    require_in_float(scale, loss.scale);
    if (!is_dynamic()) return;
    require_in_float(scale, loss.minimum);
    require_in_float(scale, loss.maximum);
  }
  static void require_in_float(double scale, double divisor) {
    const double factor = std::abs(scale / divisor);
    const bool fits = factor <= double{std::numeric_limits<float>::max()} &&
                      factor >= double{std::numeric_limits<float>::min()};
    if (fits || scale == 0) return;
    std::string text = "gradients can't be multiplied by " + number_text(scale);
    if (divisor != 1) text = "loss scale: " + text + " / " + number_text(divisor);
    throw UsageError(text + " in float; use a scale nearer to 1");
  }

  /// Whether non-finite gradients skip the step.
  [[nodiscard]] bool checks(bool some_16_bits) const {
    if (settings_->finite_check != FiniteCheck::where_needed) {
      return settings_->finite_check == FiniteCheck::always;
    }
    return max_norm.has_value() || settings_->loss_scale.has_value() || some_16_bits;
  }
  [[nodiscard]] bool is_dynamic() const {
    return settings_->loss_scale && settings_->loss_scale->is_dynamic();
  }

  const Settings* settings_;
  double ranks_;
  ScaleState state_{};
  bool measured_ = false;  ///< `ScaleState::norm`
};

}  // namespace zero::detail
