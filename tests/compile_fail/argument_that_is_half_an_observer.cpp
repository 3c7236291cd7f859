// SPDX-License-Identifier: Apache-2.0
// expect: an argument after the communicator is not a policy
#include <zero/zero.hpp>

#include <vector>

struct Observer {
  void begin(const zero::Event&) {}
#ifndef ZERO_COMPILE_FAIL
  void end(const zero::Event&) {}
#endif
};
using Store = std::vector<zero::ParamRef<float>>;

void construct(Store& store, zero::InProcessCommunicator& comm) {
  zero::ZeroSharded optimizer{zero::Adam{}, store, comm, Observer{}};
}
