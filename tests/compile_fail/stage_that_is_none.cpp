// SPDX-License-Identifier: Apache-2.0
// expect: the stage must model zero::StagePolicy
#include <zero/zero.hpp>

#include <vector>

struct Stage {
  static constexpr bool shards_state = true;
  static constexpr bool shards_gradients = false;
#ifdef ZERO_COMPILE_FAIL
  static constexpr bool shards_values = true;  // without the gradients
#else
  static constexpr bool shards_values = false;
#endif
};
using Store = std::vector<zero::ParamRef<float>>;

void construct(Store& store, zero::InProcessCommunicator& comm) {
  zero::ZeroSharded<zero::Adam, Store&, zero::InProcessCommunicator&, zero::ContiguousPartition,
                    zero::NoView, Stage>
      optimizer{zero::Adam{}, store, comm};
}
