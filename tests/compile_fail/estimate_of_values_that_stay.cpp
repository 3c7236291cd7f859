// SPDX-License-Identifier: Apache-2.0
// expect: stage 3 needs a view that moves values
#include <zero/zero.hpp>

#include <vector>

#ifdef ZERO_COMPILE_FAIL
using View = zero::NoView;
#else
using View = zero::ParamView;
#endif

zero::ExactEstimate of(const std::vector<zero::ParamShape>& shapes) {
  return zero::estimate<float>(zero::Adam{}, shapes, {.world = 4}, zero::Stage3{}, View{});
}
