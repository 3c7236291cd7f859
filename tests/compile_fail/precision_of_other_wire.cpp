// SPDX-License-Identifier: Apache-2.0
// expect: let the precision.s Wire<T> be T
#include <zero/zero.hpp>

#include <vector>

struct Precision : zero::NativePrecision {
#ifdef ZERO_COMPILE_FAIL
  template <class T>
  using Wire = zero::bfloat16;
#endif
};
using Store = std::vector<zero::ParamRef<float>>;

void construct(Store& store, zero::InProcessCommunicator& comm) {
  zero::ZeroSharded optimizer{zero::Adam{}, store, comm, Precision{}};
}
