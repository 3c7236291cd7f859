// SPDX-License-Identifier: Apache-2.0
// expect: stage 3 takes values away while nobody uses them
#include <zero/zero.hpp>

#include <vector>

#ifdef ZERO_COMPILE_FAIL
using Stage = zero::Stage3;
#else
using Stage = zero::Stage2;
#endif
using Store = std::vector<zero::ParamRef<float>>;

void construct(Store& store, zero::InProcessCommunicator& comm) {
  zero::ZeroSharded optimizer{zero::Adam{}, store, comm, zero::NoView{}, Stage{}};
}
