// SPDX-License-Identifier: Apache-2.0
// expect: this whole-tensor optimizer steps tensors in host memory, but the store's lie in CUDA
// memory
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
  zero::ZeroSharded optimizer{zero::Lamb{}, store, comm, zero::BalancedPartition{}};
}
