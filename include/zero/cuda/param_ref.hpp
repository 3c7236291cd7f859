// SPDX-License-Identifier: Apache-2.0
/// @file
/// A parameter in device memory that somebody else owns.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "zero/element.hpp"
#include "zero/memory.hpp"
#include "zero/parameter.hpp"

namespace zero::cuda {

/// As `zero::ParamRef`, with pointers that the device reads and writes.
template <Element T = float>
class ParamRef : public zero::ParamRef<T> {
 public:
  static constexpr MemorySpace memory_space = MemorySpace::cuda;

  using zero::ParamRef<T>::ParamRef;
};

template <class T, class... Rest>
ParamRef(std::string, std::vector<std::size_t>, T*, T*, Rest...) -> ParamRef<T>;
template <class T, class... Rest>
ParamRef(std::string, std::vector<std::size_t>, T*, std::nullptr_t, Rest...) -> ParamRef<T>;

static_assert(Parameter<ParamRef<float>> && memory_space_of<ParamRef<float>> == MemorySpace::cuda);

}  // namespace zero::cuda
