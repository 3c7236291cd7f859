// SPDX-License-Identifier: Apache-2.0
// expect: and gradients with the caller
#include <zero/zero.hpp>

#include <cstddef>
#include <vector>

struct View {
  static constexpr zero::Residency values = zero::Residency::caller;
#ifdef ZERO_COMPILE_FAIL
  static constexpr zero::Residency gradients = zero::Residency::arena;
#else
  static constexpr zero::Residency gradients = zero::Residency::caller;
#endif
  std::size_t bucket_bytes = 1024;
};
using Store = std::vector<zero::ParamRef<float>>;

void construct(Store& store, zero::InProcessCommunicator& comm) {
  zero::ZeroSharded optimizer{zero::Adam{}, store, comm, View{}};
}
