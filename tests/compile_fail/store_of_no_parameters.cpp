// SPDX-License-Identifier: Apache-2.0
// expect: the store must be a sized random-access range whose elements model zero::Parameter
#include <zero/zero.hpp>

#include <vector>

#ifdef ZERO_COMPILE_FAIL
using Store = std::vector<float>;
#else
using Store = std::vector<zero::ParamRef<float>>;
#endif

void construct(Store& store, zero::InProcessCommunicator& comm) {
  zero::ZeroSharded optimizer{zero::Adam{}, store, comm};
}
