// SPDX-License-Identifier: Apache-2.0
// expect: an argument after the communicator is not a policy
#include <zero/zero.hpp>

#include <vector>

#ifdef ZERO_COMPILE_FAIL
const int extra = 42;
#else
const zero::Settings extra{};
#endif
using Store = std::vector<zero::ParamRef<float>>;

void construct(Store& store, zero::InProcessCommunicator& comm) {
  zero::ZeroSharded optimizer{zero::Adam{}, store, comm, extra};
}
