// SPDX-License-Identifier: Apache-2.0
// Time and memory on the device that is current.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <zero/cuda/error.hpp>
#include <zero/cuda/memory.hpp>
#include <zero/cuda/stream.hpp>

#include "../pairs.hpp"

namespace bench {

/// Seconds of the device's own clock.
class Clock {
 public:
  Clock() {
    zero::cuda::check(cudaEventCreate(&begin_), "cudaEventCreate");
    zero::cuda::check(cudaEventCreate(&end_), "cudaEventCreate");
  }
  Clock(const Clock&) = delete;
  Clock& operator=(const Clock&) = delete;
  ~Clock() {
    (void)cudaEventDestroy(begin_);
    (void)cudaEventDestroy(end_);
  }

  /// From the first thing that `enqueue` enqueues in the stream to the last. The stream is idle.
  template <class F>
  double seconds(zero::cuda::StreamView stream, F&& enqueue) {
    zero::cuda::check(cudaEventRecord(begin_, stream.get()), "cudaEventRecord");
    enqueue();
    zero::cuda::check(cudaEventRecord(end_, stream.get()), "cudaEventRecord");
    zero::cuda::check(cudaEventSynchronize(end_), "cudaEventSynchronize");
    float milliseconds = 0;
    zero::cuda::check(cudaEventElapsedTime(&milliseconds, begin_, end_), "cudaEventElapsedTime");
    return static_cast<double>(milliseconds) * 1e-3;
  }

 private:
  cudaEvent_t begin_ = nullptr;
  cudaEvent_t end_ = nullptr;
};

/// As `run_pairs`, of work that is enqueued in the stream.
template <class Subject, class Reference>
Pairs run_device_pairs(zero::cuda::StreamView stream, Subject&& subject, Reference&& reference,
                       int count) {
  Clock clock;
  const auto time = [&](auto& work) { return clock.seconds(stream, work); };
  for (int k = 0; k < 2; ++k) {  // the second time nothing is done for the first time
    (void)time(subject);
    (void)time(reference);
  }
  Pairs pairs;
  for (int i = 0; i < count; ++i) {
    if (i % 2 == 0) pairs.subject.push_back(time(subject));
    pairs.reference.push_back(time(reference));
    if (i % 2 == 1) pairs.subject.push_back(time(subject));
  }
  return pairs;
}

/// What a kernel is held against: a copy within the device that moves so many bytes in all, half of
/// them read and half written.
class DeviceCopy {
 public:
  explicit DeviceCopy(std::size_t moved_bytes) : from_(moved_bytes / 2), to_(moved_bytes / 2) {}

  void operator()(zero::cuda::StreamView stream) {
    zero::cuda::check(cudaMemcpyAsync(to_.data(), from_.data(), from_.size(),
                                      cudaMemcpyDeviceToDevice, stream.get()),
                      "cudaMemcpyAsync");
  }

 private:
  zero::cuda::DeviceArray<unsigned char> from_, to_;
};

struct DeviceMemory {
  std::size_t free = 0;
  std::size_t total = 0;
};
inline DeviceMemory device_memory() {
  DeviceMemory memory;
  zero::cuda::check(cudaMemGetInfo(&memory.free, &memory.total), "cudaMemGetInfo");
  return memory;
}

/// Gives what CUDA's pool keeps back to the device, so that `device_memory` counts what is in use.
inline void trim_pool() {
  int device = 0;
  cudaMemPool_t pool = nullptr;
  zero::cuda::check(cudaGetDevice(&device), "cudaGetDevice");
  zero::cuda::check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  zero::cuda::check(cudaDeviceGetDefaultMemPool(&pool, device), "cudaDeviceGetDefaultMemPool");
  zero::cuda::check(cudaMemPoolTrimTo(pool, 0), "cudaMemPoolTrimTo");
}

}  // namespace bench
