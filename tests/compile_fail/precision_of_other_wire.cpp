// SPDX-License-Identifier: Apache-2.0
// expect: let the precision.s Wire<T> be one of these
#include <zero/zero.hpp>

#include <vector>

struct Precision : zero::NativePrecision {
#ifdef ZERO_COMPILE_FAIL
  template <class T>
  using Wire = double;
#endif
};
using Store = std::vector<zero::ParamRef<float>>;

void construct(Store& store, zero::InProcessCommunicator& comm) {
  zero::ZeroSharded optimizer{zero::Adam{}, store, comm, Precision{}};
}
