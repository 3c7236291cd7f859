// SPDX-License-Identifier: Apache-2.0
// expect: the store and the communicator work in different memory spaces
#include <zero/zero.hpp>

#include <vector>

struct Parameter : zero::ParamRef<float> {
#ifdef ZERO_COMPILE_FAIL
  static constexpr zero::MemorySpace memory_space = zero::MemorySpace::cuda;
#else
  static constexpr zero::MemorySpace memory_space = zero::MemorySpace::host;
#endif
};
using Store = std::vector<Parameter>;

void construct(Store& store, zero::InProcessCommunicator& comm) {
  zero::ZeroSharded optimizer{zero::Adam{}, store, comm};
}
