// SPDX-License-Identifier: Apache-2.0
// expect: no layout of more can be estimated; use zero::Stage1, or estimate by count
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

zero::ExactEstimate of(const std::vector<zero::ParamShape>& shapes) {
  return zero::estimate<float>(zero::Adam{}, shapes, {.world = 4}, Stage{});
}
