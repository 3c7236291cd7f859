// SPDX-License-Identifier: Apache-2.0
/// @file
/// What the library must know of a parameter beyond its shape and memory.
#pragma once

#include <cstddef>
#include <optional>

namespace zero {

/// Every field has the default that an ordinary parameter wants.
struct Attributes {
  /// Never stepped and never communicated; costs no optimizer state.
  bool frozen = false;
  /// Tied to the parameter at this earlier index of the store: one set of values, one gradient (the
  /// sum of both uses), one set of slots. Both show the same memory for their values, unless the
  /// view moves them; the alias's gradient is not read.
  std::optional<std::size_t> alias = std::nullopt;
  /// Owned by one rank as a whole, whatever the partition.
  bool unsplittable = false;
  /// Cut only at multiples of this many elements from the parameter's start (say, whole rows).
  std::size_t quantum = 1;
  /// What stage 3 gathers and lets go of together (`ZeroSharded::acquire`): a layer, say; any
  /// number. A parameter whose unit differs from its predecessor's starts a new bucket, so let
  /// units be neighbours. By default all of a model is one unit.
  int unit = 0;

  friend bool operator==(const Attributes&, const Attributes&) = default;
};

}  // namespace zero
