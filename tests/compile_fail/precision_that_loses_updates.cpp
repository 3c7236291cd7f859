// SPDX-License-Identifier: Apache-2.0
// expect: rounded to nearest, lose every update smaller than half a unit
#include <zero/zero.hpp>

#include <vector>

#ifdef ZERO_COMPILE_FAIL
using Precision = zero::NativePrecision;
#else
using Precision = zero::StochasticPrecision;
#endif
using Store = std::vector<zero::ParamRef<zero::bfloat16>>;

void construct(Store& store, zero::InProcessCommunicator& comm) {
  zero::ZeroSharded optimizer{zero::Adam{}, store, comm, Precision{}};
}
