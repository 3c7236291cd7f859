// SPDX-License-Identifier: Apache-2.0
// expect: differs from this type.s template argument of its kind
#include <zero/zero.hpp>

#include <vector>

struct SmallBuckets : zero::NoView {};
#ifdef ZERO_COMPILE_FAIL
using View = SmallBuckets;
#else
using View = zero::NoView;
#endif
using Store = std::vector<zero::ParamRef<float>>;

void construct(Store& store, zero::InProcessCommunicator& comm) {
  zero::ZeroSharded<zero::Adam, Store&, zero::InProcessCommunicator&> optimizer{zero::Adam{}, store,
                                                                                comm, View{}};
}
