// SPDX-License-Identifier: Apache-2.0
/// @file
/// What an example for nvcc is compiled with where there is no GPU: emulated_example.cmake writes
/// its launches and Thrust's streams and vectors in terms of what is here.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <new>
#include <type_traits>

#include "fake/cuda_runtime.hpp"
#include "zero/cuda/detail/launch.cuh"
#include "zero/cuda/stream.hpp"

namespace zero_example {

/// For examples that use all devices.
inline const bool has_three_devices = [] {
  zero_emulation::set_devices(3);
  return true;
}();

/// kernel<<<blocks, threads, 0, stream>>>(arguments)
template <class... P>
auto launcher(void (*kernel)(P...), unsigned blocks, unsigned threads, cudaStream_t stream) {
  return [=](std::type_identity_t<P>... arguments) {
    zero::cuda::detail::launch("an example's kernel", kernel, {blocks, threads},
                               zero::cuda::StreamView(stream), arguments...);
  };
}

/// Where Thrust runs on the host, its vectors still lie in the device's memory.
template <class T>
struct ManagedAllocator {
  using value_type = T;
  ManagedAllocator() = default;
  template <class U>
  explicit ManagedAllocator(const ManagedAllocator<U>&) {}
  T* allocate(std::size_t count) {
    void* memory = nullptr;
    zero::cuda::check(cudaMallocManaged(&memory, count * sizeof(T)), "cudaMallocManaged");
    return static_cast<T*>(memory);
  }
  void deallocate(T* memory, std::size_t) { (void)cudaFree(memory); }
  friend bool operator==(const ManagedAllocator&, const ManagedAllocator&) { return true; }
};

}  // namespace zero_example
