// SPDX-License-Identifier: Apache-2.0
// expect: the store's parameters lie in CUDA memory; include zero/cuda.cuh
#include <vector>
#include <zero/cuda/param_ref.hpp>
#include <zero/zero.hpp>
#ifndef ZERO_COMPILE_FAIL
#include <zero/cuda.cuh>
#endif

#ifdef ZERO_COMPILE_FAIL
using Comm = zero::InProcessCommunicator;
#else
using Comm = zero::cuda::InProcessCommunicator;
#endif

void construct(std::vector<zero::cuda::ParamRef<float>>& store, Comm& comm) {
  zero::ZeroSharded optimizer{zero::Adam{}, store, comm};
}
