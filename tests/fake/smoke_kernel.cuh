// SPDX-License-Identifier: Apache-2.0
/// @file
/// A kernel that nvcc compiles into smoke.cu's program, and a C++ compiler into what stands in for
/// it.
#pragma once

namespace zero_smoke {

struct Line {
  float slope;
  float offset;
};

__global__ void evaluate(float* out, const float* in, Line line, unsigned n) {
  for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
    out[i] = line.slope * in[i] + line.offset;
}

}  // namespace zero_smoke
