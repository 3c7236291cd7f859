// SPDX-License-Identifier: Apache-2.0
/// @file
/// What a caller may set of a `ZeroSharded` at run time.
#pragma once

#include <cstdint>
#include <memory_resource>
#include <optional>

#include "zero/memory.hpp"

namespace zero {

/// Whose gradients a step finds in the caller's memory.
enum class Gradients : std::uint8_t {
  local,    ///< each rank's own: the optimizer sums them in rank order and scales the sum
  reduced,  ///< already reduced by the caller, the same on every rank
};

struct Settings {
  Gradients gradients = Gradients::local;
  /// What the summed gradient is multiplied by, once. Default: 1/K for local gradients (their
  /// mean), 1 for reduced ones.
  std::optional<double> gradient_scale = std::nullopt;
  /// Whether construction compares the parameters' values between ranks. Layouts always are.
  bool check_values = true;
  /// Fills padding with NaN, so that any use of it shows in the results. For tests.
  bool poison_padding = false;
  /// Where slots, arenas and staging come from. Must outlive the optimizer and, with a view that
  /// moves parameters, the parameters too.
  std::pmr::memory_resource* memory = huge_page_resource();
};

}  // namespace zero
