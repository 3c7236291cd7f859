// SPDX-License-Identifier: Apache-2.0
// expect: the partition must model zero::PartitionPolicy
#include <zero/zero.hpp>

#include <cstddef>
#include <vector>

struct EverythingOnFirst {
  static constexpr bool cuts_tensors = true;
#ifndef ZERO_COMPILE_FAIL
  std::size_t cut(std::size_t elements, std::size_t, int, int rank) const {
    return rank == 0 ? 0 : elements;
  }
#endif
};
using Store = std::vector<zero::ParamRef<float>>;

void construct(Store& store, zero::InProcessCommunicator& comm) {
  zero::ZeroSharded<zero::Adam, Store&, zero::InProcessCommunicator&, EverythingOnFirst> optimizer{
      zero::Adam{}, store, comm};
}
