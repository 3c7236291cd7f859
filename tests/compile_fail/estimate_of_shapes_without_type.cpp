// SPDX-License-Identifier: Apache-2.0
// expect: of zero::ParamShapes name the element type
#include <zero/zero.hpp>

#include <vector>

zero::ExactEstimate of(const std::vector<zero::ParamShape>& shapes) {
#ifdef ZERO_COMPILE_FAIL
  return zero::estimate(zero::Adam{}, shapes, {.world = 4});
#else
  return zero::estimate<float>(zero::Adam{}, shapes, {.world = 4});
#endif
}
