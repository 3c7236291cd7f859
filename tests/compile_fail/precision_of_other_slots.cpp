// SPDX-License-Identifier: Apache-2.0
// expect: its slots must be computed in the same
#include <zero/zero.hpp>

#include <vector>

struct Precision : zero::NativePrecision {
#ifdef ZERO_COMPILE_FAIL
  template <class T>
  using Slot = double;
#endif
};
using Store = std::vector<zero::ParamRef<float>>;

void construct(Store& store, zero::InProcessCommunicator& comm) {
  zero::ZeroSharded optimizer{zero::Adam{}, store, comm, Precision{}};
}
