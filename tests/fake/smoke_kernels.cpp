// SPDX-License-Identifier: Apache-2.0
/// @file
/// Loaded before smoke.cu's program, which was compiled without knowing of it.
#include "fake/cuda_runtime.hpp"
#include "fake/smoke_kernel.cuh"

namespace {

const bool provided = [] {
  zero_emulation::provide("_ZN10zero_smoke8evaluateEPfPKfNS_4LineEj", zero_smoke::evaluate);
  return true;
}();

}  // namespace
