// SPDX-License-Identifier: Apache-2.0
/// @file
/// The one way that kernels are launched. Kernels work with any number of blocks and of threads in
/// a block, so that tests may run them as C++ on a processor, a thread at a time (see
/// ZERO_CUDA_EMULATED in config.hpp).
#pragma once

#include <cuda_runtime_api.h>

#include <type_traits>

#include "zero/config.hpp"
#include "zero/cuda/error.hpp"
#include "zero/cuda/stream.hpp"

namespace zero::cuda::detail {

struct LaunchShape {
  unsigned blocks;
  unsigned threads;
};

/// Throws `CudaError`. An empty shape launches nothing.
/// @param name of the kernel, for messages
template <class... P>
void launch(const char* name, void (*kernel)(P...), LaunchShape shape, StreamView stream,
            std::type_identity_t<P>... arguments) {
  if (shape.blocks == 0 || shape.threads == 0) return;
#if ZERO_CUDA_EMULATED
  check(zero_emulation::launch(stream.get(), shape.blocks, shape.threads,
                               [kernel, arguments...] { kernel(arguments...); }),
        name);
#else
  void* pointers[] = {const_cast<void*>(static_cast<const void*>(&arguments))...};
  check(cudaLaunchKernel(reinterpret_cast<const void*>(kernel), dim3(shape.blocks),
                         dim3(shape.threads), pointers, 0, stream.get()),
        name);
#endif
}

}  // namespace zero::cuda::detail
