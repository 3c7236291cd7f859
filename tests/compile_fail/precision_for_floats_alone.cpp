// SPDX-License-Identifier: Apache-2.0
// expect: must model zero::PrecisionPolicy for every element type
#include <zero/zero.hpp>

#include <concepts>
#include <vector>

struct Precision : zero::MixedPrecision {
#ifdef ZERO_COMPILE_FAIL
  template <std::same_as<float> T>
  using Master = T;
#endif
};
using Store = std::vector<zero::ParamRef<zero::bfloat16>>;

void construct(Store& store, zero::InProcessCommunicator& comm) {
  zero::ZeroSharded optimizer{zero::Adam{}, store, comm, Precision{}};
}
