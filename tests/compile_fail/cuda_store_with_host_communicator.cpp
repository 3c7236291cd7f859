// SPDX-License-Identifier: Apache-2.0
// expect: the store and the communicator work in different memory spaces
#include <vector>
#include <zero/cuda.cuh>

#ifdef ZERO_COMPILE_FAIL
using Comm = zero::InProcessCommunicator;
#else
using Comm = zero::cuda::InProcessCommunicator;
#endif

void construct(std::vector<zero::cuda::ParamRef<float>>& store, Comm& comm) {
  zero::ZeroSharded optimizer{zero::Adam{}, store, comm};
}
