// SPDX-License-Identifier: Apache-2.0
/// @file
/// Memory of the device that is current, and arrays in it.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstddef>
#include <memory_resource>
#include <new>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "zero/cuda/error.hpp"
#include "zero/cuda/stream.hpp"
#include "zero/detail/space.hpp"
#include "zero/element.hpp"
#include "zero/memory.hpp"

namespace zero::cuda {

/// The default allocator: CUDA's pool (cudaMallocAsync) of the device that is current when it is
/// asked. What it gives may be used in any stream at once. It frees in the order of the legacy
/// default stream, so whoever used the memory in a stream that doesn't wait for that one lets it
/// wait first (`StreamView{}.wait(event)`), as `ZeroSharded` does.
///
/// Your own: any `std::pmr::memory_resource` that returns device memory, as `Settings::memory`.
class DeviceResource final : public std::pmr::memory_resource {
  void* do_allocate(std::size_t bytes, std::size_t) override {
    void* memory = nullptr;
    cudaError_t code = cudaMallocAsync(&memory, bytes, nullptr);
    if (code == cudaSuccess) {
      code = cudaStreamSynchronize(nullptr);
      if (code == cudaSuccess) return memory;
      (void)cudaFreeAsync(memory, nullptr);
    }
    (void)cudaGetLastError();  // told here, and not by the next call
    check(code, "cudaMallocAsync of " + std::to_string(bytes) + " bytes");
    return nullptr;  // not reached
  }
  void do_deallocate(void* memory, std::size_t, std::size_t) override {
    (void)cudaFreeAsync(memory, nullptr);
  }
  bool do_is_equal(const std::pmr::memory_resource& other) const noexcept override {
    return dynamic_cast<const DeviceResource*>(&other) != nullptr;
  }
};

/// It has no state: any two compare equal.
[[nodiscard]] inline std::pmr::memory_resource* device_resource() noexcept {
  static DeviceResource resource;
  return &resource;
}

namespace detail {

/// Where memory lies that kernels can't use here.
[[nodiscard]] inline std::string unusable(const void* array) {
  cudaPointerAttributes found{};
  check(cudaPointerGetAttributes(&found, array), "cudaPointerGetAttributes");
  if (found.type == cudaMemoryTypeUnregistered) {
    return "in memory of the host that no device may use; allocate it by cudaMalloc, "
           "cudaMallocAsync or cudaMallocManaged, or use a store of the host's "
           "(zero::ParamRef) with a communicator of the host's";
  }
  int current = 0;
  check(cudaGetDevice(&current), "cudaGetDevice");
  if (found.type != cudaMemoryTypeDevice || found.device == current) return {};
  return "on device " + std::to_string(found.device) + ", but device " + std::to_string(current) +
         " is current; call cudaSetDevice(" + std::to_string(found.device) +
         ") in this rank's thread first";
}

}  // namespace detail

/// One fixed run of elements in device memory, zero-filled.
/// @tparam T trivially copyable
template <class T>
class DeviceArray {
 public:
  using value_type = T;

  DeviceArray() = default;
  /// Blocks the host until it is filled. Throws what `resource` throws (`CudaError`), and
  /// `UsageError` where it gives memory that is not the device's.
  explicit DeviceArray(std::size_t count, std::pmr::memory_resource* resource = device_resource())
      : resource_(resource), count_(count) {
    if (count == 0) return;
    data_ = static_cast<T*>(resource_->allocate(bytes(), array_alignment));
    try {
      fill();
    } catch (...) {
      resource_->deallocate(data_, bytes(), array_alignment);
      throw;
    }
  }
  DeviceArray(DeviceArray&& other) noexcept
      : resource_(other.resource_),
        data_(std::exchange(other.data_, nullptr)),
        count_(std::exchange(other.count_, 0)) {}
  DeviceArray& operator=(DeviceArray&& other) noexcept {
    std::swap(resource_, other.resource_);
    std::swap(data_, other.data_);
    std::swap(count_, other.count_);
    return *this;
  }
  ~DeviceArray() {
    if (data_ != nullptr) resource_->deallocate(data_, bytes(), array_alignment);
  }

  [[nodiscard]] T* data() noexcept { return data_; }
  [[nodiscard]] const T* data() const noexcept { return data_; }
  [[nodiscard]] std::size_t size() const noexcept { return count_; }
  [[nodiscard]] std::size_t bytes() const noexcept { return count_ * sizeof(T); }
  [[nodiscard]] std::span<T> span() noexcept { return {data_, count_}; }
  [[nodiscard]] std::span<const T> span() const noexcept { return {data_, count_}; }

 private:
  void fill() {
    const std::string wrong = detail::unusable(data_);
    if (!wrong.empty()) {
      throw UsageError("the memory resource (Settings::memory) gives arrays " + wrong);
    }
    check(cudaMemset(data_, 0, bytes()), "cudaMemset of " + std::to_string(bytes()) + " bytes");
    StreamView().synchronize();
  }

  std::pmr::memory_resource* resource_ = nullptr;
  T* data_ = nullptr;
  std::size_t count_ = 0;
};

}  // namespace zero::cuda

namespace zero::detail {

/// Blocks the host. What is read nothing in any stream still writes: that is what `settle` is for.
template <>
struct Space<MemorySpace::cuda> {
  template <class T>
  using Array = cuda::DeviceArray<T>;
  using Stream = cuda::StreamView;

  [[nodiscard]] static std::pmr::memory_resource* resource(std::pmr::memory_resource* given) {
    return given == huge_page_resource() ? cuda::device_resource() : given;
  }

  static void settle() { cuda::check(cudaDeviceSynchronize(), "cudaDeviceSynchronize"); }
  /// Where memory lies that kernels can't use here.
  [[nodiscard]] static std::string unusable(const void* array) {
    return cuda::detail::unusable(array);
  }

  template <class T>
  static void copy(const T* from, std::size_t count, T* to) {
    if (count == 0) return;
    cuda::check(cudaMemcpy(to, from, count * sizeof(T), cudaMemcpyDefault), "cudaMemcpy");
    cuda::StreamView().synchronize();  // copies within a device don't
  }
  template <class T, class F>
  static void read(const T* from, std::size_t count, F&& f) {
    std::vector<T> part(std::min(count, staged_bytes / sizeof(T)));
    for (std::size_t begin = 0; begin < count; begin += part.size()) {
      const std::span<T> staged = std::span<T>(part).first(std::min(part.size(), count - begin));
      copy(from + begin, staged.size(), staged.data());
      f(begin, std::span<const T>(staged));
    }
  }
  template <class T, class F>
  static void write(T* to, std::size_t count, F&& f) {
    std::vector<T> part(std::min(count, staged_bytes / sizeof(T)));
    for (std::size_t begin = 0; begin < count; begin += part.size()) {
      const std::span<T> staged = std::span<T>(part).first(std::min(part.size(), count - begin));
      f(begin, staged);
      copy(static_cast<const T*>(staged.data()), staged.size(), to + begin);
    }
  }

  /// In stream order.
  template <class T>
  static void copy_within(const T* from, std::size_t count, T* to, Stream stream = {}) {
    if (count == 0) return;
    cuda::check(
        cudaMemcpyAsync(to, from, count * sizeof(T), cudaMemcpyDeviceToDevice, stream.get()),
        "cudaMemcpyAsync");
  }
  template <class T>
  static void clear(std::span<T> array, Stream stream = {}) {
    if (array.empty()) return;
    cuda::check(cudaMemsetAsync(array.data(), 0, array.size_bytes(), stream.get()),
                "cudaMemsetAsync");
  }

 private:
  /// Whole when hashed in parts: a multiple of what a hash takes at once.
  static constexpr std::size_t staged_bytes = std::size_t{4} << 20;
};

}  // namespace zero::detail
