// SPDX-License-Identifier: Apache-2.0
// expect: the store and the communicator work in different memory spaces
#include <vector>
#include <zero/cuda.cuh>

#ifdef ZERO_COMPILE_FAIL
using Parameter = zero::ParamRef<float>;
#else
using Parameter = zero::cuda::ParamRef<float>;
#endif

void construct(std::vector<Parameter>& store, zero::cuda::InProcessCommunicator& comm) {
  zero::ZeroSharded optimizer{zero::Adam{}, store, comm};
}
