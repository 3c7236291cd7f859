// SPDX-License-Identifier: Apache-2.0
// A parameter of the framework.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "array.hpp"
#include "config.hpp"

namespace bert {

/// What a stored type is computed in.
template <class T>
using compute_t = std::conditional_t<std::is_same_v<T, double>, double, float>;

/// What tensors are allocated with; of the rest others take care.
struct Owned {
  bool values = true;
  bool gradients = true;
};

/// A parameter and its gradient, stored as `T`. It counts references to its memory, which may be
/// anyone's, or nobody's yet.
template <class T>
struct Tensor {
  explicit Tensor(Shape described, Owned owned = {})
      : shape(std::move(described)),
        size(shape.elements()),
        values(owned.values ? make_array<T>(size) : nullptr),
        gradient(owned.gradients ? make_array<T>(size) : nullptr) {}

  Shape shape;
  std::size_t size;
  std::shared_ptr<T> values;
  std::shared_ptr<T> gradient;
};

}  // namespace bert
