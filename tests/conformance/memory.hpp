// SPDX-License-Identifier: Apache-2.0
/// @file
/// Arrays that the communicator under test may work on, and the host may read: the heap's, or
/// CUDA's managed memory where the suite is compiled for a device.
#pragma once

#include <cstddef>
#include <map>
#include <mutex>
#include <new>
#include <vector>

#include "zero/config.hpp"

#if ZERO_CUDA_KERNELS
#include <cuda_runtime_api.h>
#endif

namespace zero_test {

#if ZERO_CUDA_KERNELS

/// Gives the same memory out again rather than free it, for which CUDA would wait until the device
/// is idle: a rank would wait for operations that wait for that rank. Blocks are of exactly the
/// size asked for, so that ASan sees what is past them.
class ManagedPool {
 public:
  static ManagedPool& instance() {
    static auto* const pool = new ManagedPool;  // outlives whatever static objects hold
    return *pool;
  }
  void* take(std::size_t bytes) {
    {
      const std::lock_guard lock(mutex_);
      std::vector<void*>& unused = unused_[bytes];
      if (!unused.empty()) {
        void* const memory = unused.back();
        unused.pop_back();
        return memory;
      }
    }
    void* memory = nullptr;
    if (cudaMallocManaged(&memory, bytes, cudaMemAttachGlobal) != cudaSuccess) {
      throw std::bad_alloc();
    }
    return memory;
  }
  void give_back(void* memory, std::size_t bytes) {
    const std::lock_guard lock(mutex_);
    unused_[bytes].push_back(memory);
  }

 private:
  std::mutex mutex_{};
  std::map<std::size_t, std::vector<void*>> unused_{};
};

template <class T>
struct ManagedAllocator {
  using value_type = T;
  ManagedAllocator() = default;
  template <class U>
  ManagedAllocator(const ManagedAllocator<U>&) noexcept {}
  T* allocate(std::size_t count) {
    return static_cast<T*>(ManagedPool::instance().take(count * sizeof(T)));
  }
  void deallocate(T* memory, std::size_t count) noexcept {
    ManagedPool::instance().give_back(memory, count * sizeof(T));
  }
  friend bool operator==(ManagedAllocator, ManagedAllocator) noexcept { return true; }
};

template <class T>
using Vector = std::vector<T, ManagedAllocator<T>>;

#else

template <class T>
using Vector = std::vector<T>;

#endif

}  // namespace zero_test
