// SPDX-License-Identifier: Apache-2.0
// expect: the store.s parameters have no rebind.values, owner., or are const
#include <zero/zero.hpp>

#include <vector>

#ifdef ZERO_COMPILE_FAIL
using View = zero::ParamView;
#else
using View = zero::NoView;
#endif
using Store = std::vector<zero::ParamRef<float>>;

void construct(Store& store, zero::InProcessCommunicator& comm) {
  zero::ZeroSharded optimizer{zero::Adam{}, store, comm, View{}};
}
