// SPDX-License-Identifier: Apache-2.0
// A user of the component cuda: headers without kernels, which need no nvcc, and the runtime. What
// nvcc makes of the others is tests/cuda/nvcc.
#include <zero/cuda/error.hpp>

int main() {
  int version = 0;
  zero::cuda::check(cudaRuntimeGetVersion(&version), "cudaRuntimeGetVersion");
  return version == CUDART_VERSION ? 0 : 1;
}
