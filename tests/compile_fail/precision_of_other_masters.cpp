// SPDX-License-Identifier: Apache-2.0
// expect: master must be the parameter.s type or what that is computed
#include <zero/zero.hpp>

#include <vector>

struct Precision : zero::NativePrecision {
#ifdef ZERO_COMPILE_FAIL
  template <class T>
  using Master = zero::bfloat16;
#endif
};
using Store = std::vector<zero::ParamRef<float>>;

void construct(Store& store, zero::InProcessCommunicator& comm) {
  zero::ZeroSharded optimizer{zero::Adam{}, store, comm, Precision{}};
}
