// SPDX-License-Identifier: Apache-2.0
/// @file
/// What the CUDA runtime reports, as an exception.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "zero/error.hpp"

namespace zero {

/// A call to the CUDA runtime failed. The message names the call, CUDA's own name and words for the
/// error, and what to do where that is known.
class CudaError : public Error {
 public:
  CudaError(cudaError_t code, const std::string& what) : Error(what), code_(code) {}

  [[nodiscard]] cudaError_t code() const noexcept { return code_; }

 private:
  cudaError_t code_;
};

namespace cuda {

/// Throws `CudaError` unless `code` is `cudaSuccess`.
/// @param call what was tried, e.g. "cudaMallocAsync of 4096 bytes"
inline void check(cudaError_t code, const char* call);
inline void check(cudaError_t code, const std::string& call);

namespace detail {

/// What a user can do about it; empty where nobody knows.
[[nodiscard]] inline const char* remedy(cudaError_t code) {
  switch (code) {
    case cudaErrorNoDevice:
      return "; there is no GPU that this process may use: see nvidia-smi and CUDA_VISIBLE_DEVICES";
    case cudaErrorInsufficientDriver:
      return "; there is no NVIDIA driver, or one that is older than this program's CUDA runtime: "
             "install or update it (nvidia-smi shows it), or build with an older toolkit";
    case cudaErrorMemoryAllocation:
      return "; the device has too little memory left: use more ranks, smaller buckets or 16-bit "
             "types, or free what else is there";
    case cudaErrorNoKernelImageForDevice:
      return "; the program was not compiled for this GPU: add its architecture to "
             "CMAKE_CUDA_ARCHITECTURES";
    case cudaErrorInvalidDevice: return "; there are fewer devices: see cudaGetDeviceCount";
    case cudaErrorIllegalAddress:
      return "; a kernel used memory that is not the device's (a host pointer, or one freed): the "
             "device can't be used any more by this process; run it under compute-sanitizer";
    default: return "";
  }
}

}  // namespace detail

inline void check(cudaError_t code, const std::string& call) {
  if (code == cudaSuccess) return;
  throw CudaError(code, call + " failed: " + cudaGetErrorName(code) + " (" +
                            cudaGetErrorString(code) + ")" + detail::remedy(code));
}
inline void check(cudaError_t code, const char* call) {
  if (code != cudaSuccess) check(code, std::string(call));
}

}  // namespace cuda
}  // namespace zero
