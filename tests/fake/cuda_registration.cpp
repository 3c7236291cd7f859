// SPDX-License-Identifier: Apache-2.0
/// @file
/// The fake CUDA runtime: what nvcc's own code calls to register and to launch kernels, so that a
/// program that nvcc compiled runs them as C++ functions.
#include <algorithm>
#include <cstring>
#include <utility>

#include "fake/cuda_state.hpp"

namespace zero_emulation {

using namespace detail;

void provide(const char* mangled_name, Trampoline trampoline) {
  const HostGuard guard;
  runtime().trampolines[mangled_name] = std::move(trampoline);
}

namespace detail {

namespace {

struct Configuration {
  dim3 blocks;
  dim3 threads;
  std::size_t shared_bytes;
  cudaStream_t stream;
};

std::vector<Configuration>& configurations() {
  thread_local std::vector<Configuration> pushed;
  return pushed;
}

cudaError_t launch_registered(const void* function, dim3 blocks, dim3 threads, void** arguments,
                              cudaStream_t stream) {
  const auto name = runtime().kernels.find(function);
  if (name == runtime().kernels.end()) return cudaErrorInvalidDeviceFunction;
  const auto trampoline = runtime().trampolines.find(name->second);
  if (trampoline == runtime().trampolines.end()) return cudaErrorNoKernelImageForDevice;
  return launch_grid(stream, blocks, threads, trampoline->second(arguments));
}

}  // namespace

}  // namespace detail

}  // namespace zero_emulation

using namespace zero_emulation::detail;

cudaError_t cudaLaunchKernel(const void* function, dim3 blocks, dim3 threads, void** arguments,
                             std::size_t, cudaStream_t stream) {
  return call("cudaLaunchKernel",
              [&] { return launch_registered(function, blocks, threads, arguments, stream); });
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* function) {
  return call("cudaFuncGetAttributes", [&] {
    if (function == nullptr) return cudaErrorInvalidDeviceFunction;
    *attributes = {};
    attributes->maxThreadsPerBlock = 1024;
    attributes->numRegs = 32;
    attributes->ptxVersion = 90;
    attributes->binaryVersion = 90;
    return cudaSuccess;
  });
}

cudaError_t cudaFuncSetAttribute(const void* function, cudaFuncAttribute, int) {
  return call("cudaFuncSetAttribute",
              [&] { return function == nullptr ? cudaErrorInvalidDeviceFunction : cudaSuccess; });
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks,
                                                                   const void* function,
                                                                   int block_size, std::size_t,
                                                                   unsigned) {
  return call("cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags", [&] {
    if (function == nullptr) return cudaErrorInvalidDeviceFunction;
    if (block_size < 1) return cudaErrorInvalidValue;
    *blocks = block_size > 1024 ? 0 : std::min(32, 2048 / block_size);
    return cudaSuccess;
  });
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void* function,
                                                          int block_size,
                                                          std::size_t shared_bytes) {
  return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, function, block_size,
                                                                shared_bytes, cudaOccupancyDefault);
}

// Declared nowhere that a C++ compiler sees.
extern "C" {

void** __cudaRegisterFatBinary(void* binary);
void __cudaRegisterFatBinaryEnd(void** handle);
void __cudaUnregisterFatBinary(void** handle);
char __cudaInitModule(void** handle);
void __cudaRegisterFunction(void** handle, const char* stub, char* device_function,
                            const char* device_name, int thread_limit, uint3* thread, uint3* block,
                            dim3* block_dim, dim3* grid_dim, int* warp_size);
void __cudaRegisterVar(void** handle, char* host_variable, char* device_address,
                       const char* device_name, int external, std::size_t size, int constant,
                       int global);
unsigned __cudaPushCallConfiguration(dim3 blocks, dim3 threads, std::size_t shared_bytes,
                                     cudaStream_t stream);
cudaError_t __cudaPopCallConfiguration(dim3* blocks, dim3* threads, std::size_t* shared_bytes,
                                       void* stream);
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function);
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 blocks, dim3 threads, void** arguments,
                               std::size_t shared_bytes, cudaStream_t stream);

void** __cudaRegisterFatBinary(void* binary) {
  // A handle is compared and given back, nothing more.
  return static_cast<void**>(binary);
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
char __cudaInitModule(void**) { return 1; }

void __cudaRegisterFunction(void**, const char* stub, char*, const char* device_name, int, uint3*,
                            uint3*, dim3*, dim3*, int*) {
  const HostGuard guard;
  runtime().kernels[stub] = device_name;
}

// A variable of the device's lies where the host's shadow of it does.
void __cudaRegisterVar(void**, char*, char*, const char*, int, std::size_t, int, int) {}

unsigned __cudaPushCallConfiguration(dim3 blocks, dim3 threads, std::size_t shared_bytes,
                                     cudaStream_t stream) {
  configurations().push_back({blocks, threads, shared_bytes, stream});
  return 0;
}

cudaError_t __cudaPopCallConfiguration(dim3* blocks, dim3* threads, std::size_t* shared_bytes,
                                       void* stream) {
  if (configurations().empty()) return note(cudaErrorInvalidConfiguration);
  const Configuration popped = configurations().back();
  configurations().pop_back();
  *blocks = popped.blocks;
  *threads = popped.threads;
  *shared_bytes = popped.shared_bytes;
  std::memcpy(stream, &popped.stream, sizeof(popped.stream));
  return cudaSuccess;
}

cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = static_cast<cudaKernel_t>(const_cast<void*>(function));
  return cudaSuccess;
}

cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 blocks, dim3 threads, void** arguments,
                               std::size_t shared_bytes, cudaStream_t stream) {
  return cudaLaunchKernel(static_cast<const void*>(kernel), blocks, threads, arguments,
                          shared_bytes, stream);
}

}  // extern "C"
