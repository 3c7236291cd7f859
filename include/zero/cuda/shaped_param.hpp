// SPDX-License-Identifier: Apache-2.0
/// @file
/// A parameter in device memory that the optimizer makes.
#pragma once

#include "zero/element.hpp"
#include "zero/memory.hpp"
#include "zero/parameter.hpp"
#include "zero/shaped_param.hpp"

namespace zero::cuda {

/// As `zero::ShapedParam`, in device memory. At `Stage3` its values may come to another place with
/// every `acquire`: ask `values()` after it.
template <Element T = float>
class ShapedParam : public zero::ShapedParam<T> {
 public:
  static constexpr MemorySpace memory_space = MemorySpace::cuda;

  using zero::ShapedParam<T>::ShapedParam;
};

static_assert(RebindableParameter<ShapedParam<float>> &&
              memory_space_of<ShapedParam<float>> == MemorySpace::cuda);

}  // namespace zero::cuda
