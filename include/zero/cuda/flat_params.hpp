// SPDX-License-Identifier: Apache-2.0
/// @file
/// Parameters that lie one behind the other in device memory.
#pragma once

#include "zero/cuda/param_ref.hpp"
#include "zero/element.hpp"
#include "zero/flat_params.hpp"
#include "zero/memory.hpp"
#include "zero/parameter.hpp"

namespace zero::cuda {

/// As `zero::FlatParams`, of buffers that the device reads and writes.
template <Element T = float>
using FlatParams = zero::FlatParams<T, ParamRef<T>>;

static_assert(FlatParamStore<FlatParams<float>> &&
              memory_space_of<parameter_t<FlatParams<float>>> == MemorySpace::cuda);

}  // namespace zero::cuda
