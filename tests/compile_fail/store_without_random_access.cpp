// SPDX-License-Identifier: Apache-2.0
// expect: the store must be a sized random-access range
#include <zero/zero.hpp>

#include <deque>
#include <list>

#ifdef ZERO_COMPILE_FAIL
using Store = std::list<zero::ParamRef<float>>;
#else
using Store = std::deque<zero::ParamRef<float>>;
#endif

void construct(Store& store, zero::InProcessCommunicator& comm) {
  zero::ZeroSharded optimizer{zero::Adam{}, store, comm};
}
