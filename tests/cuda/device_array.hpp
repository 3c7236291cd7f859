// SPDX-License-Identifier: Apache-2.0
/// @file
/// Arrays in device memory for tests of kernels, of exactly their size and placed off vectors'
/// boundaries at will.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstring>
#include <utility>
#include <vector>

#include "zero/config.hpp"
#include "zero/cuda/error.hpp"

#if ZERO_CUDA_EMULATED
#include "fake/cuda_runtime.hpp"
#endif

/// Emulated blocks run in an order drawn from the seed (0: in order); a device's in its own.
inline void scramble_blocks([[maybe_unused]] unsigned seed) {
#if ZERO_CUDA_EMULATED
  zero_emulation::scramble_blocks(seed);
#endif
}

template <class T>
class DeviceArray {
 public:
  /// @param offset elements that the array starts behind what is aligned to 256 bytes
  explicit DeviceArray(const std::vector<T>& contents, std::size_t offset = 0)
      : count_(contents.size()), offset_(offset) {
    zero::cuda::check(cudaMalloc(&memory_, (offset_ + count_) * sizeof(T) + (count_ == 0)),
                      "cudaMalloc");
    if (count_ == 0) return;
    zero::cuda::check(
        cudaMemcpy(data(), contents.data(), count_ * sizeof(T), cudaMemcpyHostToDevice),
        "cudaMemcpy");
  }
  DeviceArray(DeviceArray&& other) noexcept
      : memory_(std::exchange(other.memory_, nullptr)),
        count_(other.count_),
        offset_(other.offset_) {}
  DeviceArray& operator=(DeviceArray&&) = delete;
  ~DeviceArray() { (void)cudaFree(memory_); }

  [[nodiscard]] T* data() const { return static_cast<T*>(memory_) + offset_; }
  [[nodiscard]] std::size_t size() const { return count_; }

  /// What is in it once the device is idle.
  [[nodiscard]] std::vector<T> host() const {
    zero::cuda::check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    std::vector<T> contents(count_);
    if (count_ == 0) return contents;
    zero::cuda::check(
        cudaMemcpy(contents.data(), data(), count_ * sizeof(T), cudaMemcpyDeviceToHost),
        "cudaMemcpy");
    return contents;
  }

 private:
  void* memory_ = nullptr;
  std::size_t count_;
  std::size_t offset_;
};

template <class T>
bool same_bytes(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() &&
         (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0);
}
