// SPDX-License-Identifier: Apache-2.0
/// @file
/// A program as users compile them. It runs on a GPU, and on the fake runtime where that is found
/// first.
#include <cuda_runtime.h>

#include <cstdio>
#include <vector>

#include "fake/smoke_kernel.cuh"
#include "zero/cuda/detail/launch.cuh"
#include "zero/cuda/stream.hpp"

int main() try {
  using zero::cuda::check;
  constexpr unsigned n = 1000;
  constexpr zero_smoke::Line line{2.F, 1.F};
  const zero::cuda::Stream stream;
  const zero::cuda::Stream other;
  const zero::cuda::Event event;
  std::vector<float> host(n, 3.F);
  float* device = nullptr;
  check(cudaMalloc(&device, 2 * n * sizeof(float)), "cudaMalloc");
  check(cudaMemcpy(device, host.data(), n * sizeof(float), cudaMemcpyHostToDevice), "cudaMemcpy");
  // By the library's launch, and by the language's.
  zero::cuda::detail::launch("evaluate", zero_smoke::evaluate, {3, 64}, stream, device + n, device,
                             line, n);
  event.record(stream);
  other.view().wait(event);
  zero_smoke::evaluate<<<2, 32, 0, other.view().get()>>>(device, device + n, line, n);
  check(cudaGetLastError(), "evaluate");
  other.synchronize();
  check(cudaMemcpy(host.data(), device, n * sizeof(float), cudaMemcpyDeviceToHost), "cudaMemcpy");
  check(cudaFree(device), "cudaFree");
  for (const float value : host) {
    if (value != 15.F) {
      std::printf("%g instead of 15\n", value);
      return 1;
    }
  }
  std::puts("as expected");
  return 0;
} catch (const zero::Error& error) {
  std::puts(error.what());
  return 1;
}
