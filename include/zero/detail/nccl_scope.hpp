// SPDX-License-Identifier: Apache-2.0
/// @file
/// The state of CUDA in the calling thread that a communicator's calls need, and put back.
#pragma once

#include <cuda_runtime_api.h>

#include "zero/cuda/error.hpp"

namespace zero::detail {

/// Makes a device current, and what was so again at its end.
class CudaDeviceScope {
 public:
  /// Throws `CudaError`.
  explicit CudaDeviceScope(int device) {
    cuda::check(cudaGetDevice(&before_), "cudaGetDevice");
    if (before_ == device) return;
    cuda::check(cudaSetDevice(device), "cudaSetDevice");
    changed_ = true;
  }
  CudaDeviceScope(const CudaDeviceScope&) = delete;
  CudaDeviceScope& operator=(const CudaDeviceScope&) = delete;
  ~CudaDeviceScope() {
    if (changed_) (void)cudaSetDevice(before_);
  }

 private:
  int before_ = 0;
  bool changed_ = false;
};

/// The device of a communicator, and leave to ask for events and to free memory while some stream
/// is being captured: other threads' captures, begun in CUDA's global mode, forbid it otherwise.
class NcclScope {
 public:
  /// Throws `CudaError`.
  explicit NcclScope(int device) : device_(device) {
    cuda::check(cudaThreadExchangeStreamCaptureMode(&mode_), "cudaThreadExchangeStreamCaptureMode");
  }
  NcclScope(const NcclScope&) = delete;
  NcclScope& operator=(const NcclScope&) = delete;
  ~NcclScope() { (void)cudaThreadExchangeStreamCaptureMode(&mode_); }

 private:
  CudaDeviceScope device_;
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

}  // namespace zero::detail
