// SPDX-License-Identifier: Apache-2.0
// expect: this version shards the optimizer state only
#include <zero/zero.hpp>

#include <vector>

struct Stage {
  static constexpr bool shards_state = true;
#ifdef ZERO_COMPILE_FAIL
  static constexpr bool shards_gradients = true;
#else
  static constexpr bool shards_gradients = false;
#endif
  static constexpr bool shards_values = false;
};
using Store = std::vector<zero::ParamRef<float>>;

void construct(Store& store, zero::InProcessCommunicator& comm) {
  zero::ZeroSharded optimizer{zero::Adam{}, store, comm, Stage{}};
}
