// SPDX-License-Identifier: Apache-2.0
/// @file
/// How optimizers refuse options: one sentence with the name, the value and the rule.
#pragma once

#include <limits>
#include <sstream>
#include <string>

#include "zero/error.hpp"

namespace zero::detail {

/// As short as it reads well, however large or small.
[[nodiscard]] inline std::string number_text(double value) {
  std::ostringstream text;
  text << value;
  return text.str();
}

[[noreturn]] inline void refuse_option(const char* optimizer, const char* option, double value,
                                       const char* rule) {
  throw UsageError(std::string(optimizer) + ": " + option + " is " + number_text(value) +
                   ", but it must be " + rule);
}

/// Refuses NaN, infinity and negative numbers.
inline void require_non_negative(const char* optimizer, const char* option, double value) {
  if (!(value >= 0 && value <= std::numeric_limits<double>::max())) {
    refuse_option(optimizer, option, value, "a finite number that is not negative");
  }
}

/// Refuses what is not in [0, 1).
inline void require_fraction(const char* optimizer, const char* option, double value) {
  if (!(value >= 0 && value < 1)) {
    refuse_option(optimizer, option, value, "at least 0 and below 1");
  }
}

}  // namespace zero::detail
