// SPDX-License-Identifier: Apache-2.0
// expect: the communicator must model zero::Communicator for every element type
#include <zero/zero.hpp>

#include <vector>

struct Communicator : zero::InProcessCommunicator {
#ifdef ZERO_COMPILE_FAIL
  void all_gather_v() = delete;
#endif
};
using Store = std::vector<zero::ParamRef<float>>;

void construct(Store& store, Communicator& comm) {
  zero::ZeroSharded optimizer{zero::Adam{}, store, comm};
}
