// SPDX-License-Identifier: Apache-2.0
// expect: the observer must model zero::Observer
#include <zero/zero.hpp>

#include <vector>

struct Observer {
  void begin(const zero::Event&) {}
#ifndef ZERO_COMPILE_FAIL
  void end(const zero::Event&) {}
#endif
};
using Store = std::vector<zero::ParamRef<float>>;

void construct(Store& store, zero::InProcessCommunicator& comm) {
  zero::ZeroSharded<zero::Adam, Store&, zero::InProcessCommunicator&, zero::ContiguousPartition,
                    zero::NoView, zero::Stage1, zero::NativePrecision, Observer>
      optimizer{zero::Adam{}, store, comm};
}
