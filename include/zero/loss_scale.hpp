// SPDX-License-Identifier: Apache-2.0
/// @file
/// What a loss is multiplied by, so that 16-bit gradients don't vanish.
#pragma once

#include <string>

#include "zero/detail/options.hpp"
#include "zero/error.hpp"

namespace zero {

/// The caller multiplies the loss by `ZeroSharded::loss_scale()`; the step divides the summed
/// gradients by it, in the one multiplication that it makes anyway, and skips where one of them is
/// not finite. (The sums are checked, not what they become: a factor above 1 may still overflow.)
/// With powers of two no bit is lost.
///
/// Dynamic (Micikevicius et al., "Mixed precision training", arXiv:1710.03740, section 3.3): a
/// skipped step multiplies the scale by `backoff`, `interval` applied ones in a row by `growth`.
struct LossScale {
  double scale = 1;    ///< the first, or where both factors are 1 the only one
  double growth = 1;   ///< at least 1
  double backoff = 1;  ///< above 0, at most 1
  int interval = 2000;
  double minimum = 1;        ///< a dynamic scale never falls below
  double maximum = 0x1p+24;  ///< nor rises above

  /// Doubles and halves, as PyTorch's `GradScaler`.
  [[nodiscard]] static constexpr LossScale dynamic(double first = 65536) {
    return {.scale = first, .growth = 2, .backoff = 0.5};
  }
  /// Stays.
  [[nodiscard]] static constexpr LossScale fixed(double scale) { return {.scale = scale}; }

  [[nodiscard]] constexpr bool is_dynamic() const noexcept { return growth != 1 || backoff != 1; }

  /// Throws `UsageError` naming the field that makes no sense.
  void validate() const {
    const auto refuse = [](const char* field, double value, const char* rule) {
      throw UsageError("loss scale: " + std::string(field) + " is " + detail::number_text(value) +
                       ", but it must be " + rule);
    };
    const auto positive = [](double x) { return x > 0 && x - x == 0; };
    if (!positive(scale)) refuse("scale", scale, "a finite number above 0");
    if (!(growth >= 1) || !positive(growth)) refuse("growth", growth, "finite and at least 1");
    if (!positive(backoff) || backoff > 1) refuse("backoff", backoff, "above 0 and at most 1");
    if (interval < 1) refuse("interval", interval, "at least 1");
    if (!is_dynamic()) return;
    if (!positive(minimum) || minimum > scale)
      refuse("minimum", minimum, "above 0 and at most the scale");
    if (!positive(maximum) || maximum < scale)
      refuse("maximum", maximum, "finite and at least the scale");
  }
};

}  // namespace zero
