// SPDX-License-Identifier: Apache-2.0
/// @file
/// What a caller may set of a `ZeroSharded` at run time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory_resource>
#include <optional>
#include <string_view>

#include "zero/loss_scale.hpp"
#include "zero/memory.hpp"

namespace zero {

/// Whose gradients a step finds in the caller's memory.
enum class Gradients : std::uint8_t {
  local,    ///< each rank's own: the optimizer sums them in rank order and scales the sum
  reduced,  ///< already reduced by the caller, the same on every rank
};

/// Whether a step looks for NaN and infinities among the summed gradients before it updates
/// anything. If any rank finds one, all ranks skip the step: nothing changes but the loss scale.
enum class FiniteCheck : std::uint8_t {
  where_needed,  ///< with 16-bit gradients, with a loss scale, and while gradients are clipped
  always,
  never,  ///< non-finite gradients are stepped with
};

/// Given among the policies; a field left out has the default that most callers want.
struct Settings {
  Gradients gradients = Gradients::local;
  /// What the summed gradient is multiplied by, once. Default: 1/K for local gradients (their
  /// mean; K counts the ranks of all groups), 1 for reduced ones.
  std::optional<double> gradient_scale = std::nullopt;
  FiniteCheck finite_check = FiniteCheck::where_needed;
  /// What the caller multiplies the loss by; none: 1, and gradients are not checked for its sake.
  std::optional<LossScale> loss_scale = std::nullopt;
  /// Whether updates count denormal numbers as 0. Moments that decay for long get there, and many
  /// processors then compute several times slower, though not slower than memory is where a shard
  /// is far larger than the caches (measured: see the row update/denormal). It changes bits, and is
  /// refused where zero does not know how (not x86-64).
  bool flush_denormals = false;
  /// Whether construction compares the parameters' values between ranks. Layouts always are.
  bool check_values = true;
  /// Fills padding with NaN, so that any use of it shows in the results. For tests.
  bool poison_padding = false;
  /// Fills with NaN, and keeps, what stages 2 and 3 would give back to the system: a gradient's
  /// memory once it is reduced, and a unit's once it is released. Whatever is read there shows, and
  /// what is written is reported when the memory is used again, after which the optimizer can't go
  /// on (not on devices, where it is only filled). For tests and debugging.
  bool poison_released = false;
  /// The initial values of parameters that have a shape but no values yet (`ShapedParam`), which a
  /// view that moves values gives them: element by element, counted in the parameter, rounded to
  /// its type. Each rank asks for what it keeps, so at stage 3 nobody needs memory for the whole
  /// model. Must depend on nothing but its arguments, and bear calls from several ranks at once.
  std::function<double(std::string_view parameter, std::size_t element)> initial_value = {};
  /// Where slots, arenas and staging come from. Must outlive the optimizer and, with a view that
  /// moves parameters, the parameters too. With the default, what peers in other processes read is
  /// where they can read it in place, if the communicator offers that. On a device it is device
  /// memory, by default from CUDA's pool (`zero::cuda::DeviceResource`); what the device can't use,
  /// such as host memory, is refused.
  std::pmr::memory_resource* memory = huge_page_resource();
};

}  // namespace zero
