// SPDX-License-Identifier: Apache-2.0
// expect: this version keeps slots and traffic in the parameters. own element types
#include <zero/zero.hpp>

#include <vector>

struct Precision {
  template <class T>
#ifdef ZERO_COMPILE_FAIL
  using Slot = double;
#else
  using Slot = T;
#endif
  template <class T>
  using Wire = T;
};
using Store = std::vector<zero::ParamRef<float>>;

void construct(Store& store, zero::InProcessCommunicator& comm) {
  zero::ZeroSharded optimizer{zero::Adam{}, store, comm, Precision{}};
}
