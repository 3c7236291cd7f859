// SPDX-License-Identifier: Apache-2.0
// A CUDA runtime for machines without a GPU: see cuda_runtime.hpp.
#include "fake/emulation.hpp"

namespace zero_emulation {

thread_local uint3 thread_index{};
thread_local uint3 block_index{};
thread_local dim3 block_size{};
thread_local dim3 grid_size{};

}  // namespace zero_emulation
