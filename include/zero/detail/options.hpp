// SPDX-License-Identifier: Apache-2.0
/// @file
/// How optimizers refuse options: one sentence with the name, the value and the rule.
#pragma once

#include <limits>
#include <sstream>
#include <string>

#include "zero/error.hpp"

namespace zero::detail {

[[noreturn]] inline void refuse_option(const char* optimizer, const char* option, double value,
                                       const char* rule) {
  std::ostringstream text;
  text << optimizer << ": " << option << " is " << value << ", but it must be " << rule;
  throw UsageError(text.str());
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
