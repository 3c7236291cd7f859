// SPDX-License-Identifier: Apache-2.0
// expect: this takes a zero::ZeroSharded that is not const
#include <zero/zero.hpp>

#include <vector>

#ifdef ZERO_COMPILE_FAIL
using Argument = std::vector<zero::ParamRef<float>>;
#else
using Argument = zero::ZeroSharded<zero::Adam>;
#endif

void serve(Argument& argument) {
  zero::join([] {}, argument);
}
