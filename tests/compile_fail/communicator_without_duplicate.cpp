// SPDX-License-Identifier: Apache-2.0
// expect: the communicator must have duplicate
#include <zero/zero.hpp>

#include <vector>

struct Communicator : zero::InProcessCommunicator {
#ifdef ZERO_COMPILE_FAIL
  void duplicate() = delete;
#endif
};
using Store = std::vector<zero::ParamRef<float>>;

void construct(Store& store, Communicator& comm) {
  zero::ZeroSharded optimizer{zero::Adam{}, store, comm, zero::Stage2{}};
}
