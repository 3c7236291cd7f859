// SPDX-License-Identifier: Apache-2.0
// expect: the bucket view must model zero::BucketViewPolicy
#include <zero/zero.hpp>

#include <cstddef>
#include <vector>

struct View {
  static constexpr zero::Residency values = zero::Residency::caller;
  static constexpr zero::Residency gradients = zero::Residency::caller;
#ifndef ZERO_COMPILE_FAIL
  std::size_t bucket_bytes = 1024;
#endif
};
using Store = std::vector<zero::ParamRef<float>>;

void construct(Store& store, zero::InProcessCommunicator& comm) {
  zero::ZeroSharded<zero::Adam, Store&, zero::InProcessCommunicator&, zero::ContiguousPartition,
                    View>
      optimizer{zero::Adam{}, store, comm};
}
