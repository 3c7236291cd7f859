// SPDX-License-Identifier: Apache-2.0
// expect: a policy type of this optimizer has no default
#include <zero/zero.hpp>

#include <cstddef>
#include <vector>

struct View : zero::NoView {
  explicit View(std::size_t bytes) { bucket_bytes = bytes; }
};
using Store = std::vector<zero::ParamRef<float>>;

void construct(Store& store, zero::InProcessCommunicator& comm) {
  using Optimizer = zero::ZeroSharded<zero::Adam, Store&, zero::InProcessCommunicator&,
                                      zero::ContiguousPartition, View>;
#ifdef ZERO_COMPILE_FAIL
  Optimizer optimizer{zero::Adam{}, store, comm};
#else
  Optimizer optimizer{zero::Adam{}, store, comm, View(1024)};
#endif
}
