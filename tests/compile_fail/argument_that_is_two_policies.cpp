// SPDX-License-Identifier: Apache-2.0
// expect: or is two of them at once
#include <zero/zero.hpp>

#include <vector>

struct Both : zero::NoView {
#ifdef ZERO_COMPILE_FAIL
  void begin(const zero::Event&) {}
  void end(const zero::Event&) {}
#endif
};
using Store = std::vector<zero::ParamRef<float>>;

void construct(Store& store, zero::InProcessCommunicator& comm) {
  zero::ZeroSharded optimizer{zero::Adam{}, store, comm, Both{}};
}
