// SPDX-License-Identifier: Apache-2.0
// expect: two policies of one kind
#include <zero/zero.hpp>

#include <vector>

using Store = std::vector<zero::ParamRef<float>>;
#ifdef ZERO_COMPILE_FAIL
using Other = zero::ContiguousPartition;
#else
using Other = zero::Stage1;
#endif

void construct(Store& store, zero::InProcessCommunicator& comm) {
  zero::ZeroSharded optimizer{zero::Adam{}, store, comm, zero::ContiguousPartition{}, Other{}};
}
