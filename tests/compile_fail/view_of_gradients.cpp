// SPDX-License-Identifier: Apache-2.0
// expect: have no rebind_gradient
#include <zero/zero.hpp>

#include <vector>

#ifdef ZERO_COMPILE_FAIL
struct View {
  static constexpr zero::Residency values = zero::Residency::caller;
  static constexpr zero::Residency gradients = zero::Residency::arena;
  std::size_t bucket_bytes = 1024;
};
#else
using View = zero::NoView;
#endif
using Store = std::vector<zero::ParamRef<float>>;

void construct(Store& store, zero::InProcessCommunicator& comm) {
  zero::ZeroSharded optimizer{zero::Adam{}, store, comm, View{}};
}
