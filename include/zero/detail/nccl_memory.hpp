// SPDX-License-Identifier: Apache-2.0
/// @file
/// The memory of a communicator over NCCL: room for what peers send to be summed, and for host
/// bytes on their way through the device.
#pragma once

#include <nccl.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <string>
#include <vector>

#include "zero/cuda/error.hpp"
#include "zero/cuda/stream.hpp"

namespace zero::detail {

// From cudaMalloc, not from a stream's pool: NCCL lets the GPUs of one process write to each
// other's buffers, which a pool's are not open to. And nothing is freed before the end, since
// cudaFree waits for the device, and so perhaps for peers.

/// Device memory that grows; what stands in a stream keeps what it was given.
class NcclWorkspace {
 public:
  NcclWorkspace() = default;
  NcclWorkspace(const NcclWorkspace&) = delete;
  NcclWorkspace& operator=(const NcclWorkspace&) = delete;
  ~NcclWorkspace() { release(); }

  [[nodiscard]] std::byte* data() const noexcept { return data_; }
  [[nodiscard]] std::size_t bytes() const noexcept { return bytes_; }

  /// At least `bytes`. Throws `CudaError`.
  void reserve(std::size_t bytes) {
    if (bytes <= bytes_) return;
    blocks_.reserve(blocks_.size() + 1);
    void* data = nullptr;
    cuda::check(
        cudaMalloc(&data, bytes),
        "cudaMalloc of " + std::to_string(bytes) +
            " bytes, the workspace of sums in rank order (NcclReduction::native needs none)");
    blocks_.push_back(data);
    data_ = static_cast<std::byte*>(data);
    bytes_ = bytes;
  }
  /// It is in use still, and leaked.
  void abandon() noexcept { blocks_.clear(); }
  /// Nothing of it is in use any more.
  void release() noexcept {
    for (void* block : blocks_) (void)cudaFree(block);
    blocks_.clear();
    data_ = nullptr;
    bytes_ = 0;
  }

 private:
  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
  std::vector<void*> blocks_{};  // the last one is in use, those before were too small
};

/// One piece of every rank's host bytes, in page-locked memory and on the device, and a number for
/// barriers.
class NcclStaging {
 public:
  /// Throws `CudaError`.
  NcclStaging(int size, cuda::StreamView stream)
      : size_(static_cast<std::size_t>(size)),
        piece_(std::clamp<std::size_t>((std::size_t{256} << 10) / size_, 1024, 16384)) {
    void* memory = nullptr;
    cuda::check(cudaMallocHost(&memory, piece_ * size_), "cudaMallocHost");
    host_ = static_cast<std::byte*>(memory);
    try {
      cuda::check(cudaMalloc(&memory, number_bytes + piece_ * size_), "cudaMalloc");
      device_ = static_cast<std::byte*>(memory);
      cuda::check(cudaMemsetAsync(device_, 0, number_bytes, stream.get()), "cudaMemsetAsync");
    } catch (...) {
      release();
      throw;
    }
  }
  NcclStaging(const NcclStaging&) = delete;
  NcclStaging& operator=(const NcclStaging&) = delete;
  ~NcclStaging() { release(); }

  /// Of one rank.
  [[nodiscard]] std::size_t piece_bytes() const noexcept { return piece_; }
  /// One float on the device.
  [[nodiscard]] void* barrier_number() const noexcept { return device_; }

  void up(int rank, const std::byte* from, std::size_t bytes, cuda::StreamView stream) {
    const std::size_t at = static_cast<std::size_t>(rank) * bytes;
    std::memcpy(host_ + at, from, bytes);
    cuda::check(
        cudaMemcpyAsync(pieces() + at, host_ + at, bytes, cudaMemcpyHostToDevice, stream.get()),
        "cudaMemcpyAsync");
    copied_.record(stream);
  }
  ncclResult_t gather(int rank, std::size_t bytes, ncclComm_t comm, cuda::StreamView stream) const {
    return ncclAllGather(pieces() + static_cast<std::size_t>(rank) * bytes, pieces(), bytes,
                         ncclUint8, comm, stream.get());
  }
  void down(std::size_t bytes, cuda::StreamView stream) {
    cuda::check(
        cudaMemcpyAsync(host_, pieces(), bytes * size_, cudaMemcpyDeviceToHost, stream.get()),
        "cudaMemcpyAsync");
    copied_.record(stream);
  }
  /// Whether the last copy is over.
  [[nodiscard]] bool arrived() const { return copied_.done(); }
  void out(int rank, std::size_t bytes, std::byte* to) const {
    std::memcpy(to, host_ + static_cast<std::size_t>(rank) * bytes, bytes);
  }

  /// It is in use still, and leaked.
  void abandon() noexcept { device_ = host_ = nullptr; }
  /// Nothing of it is in use any more.
  void release() noexcept {
    if (device_ != nullptr) (void)cudaFree(device_);
    if (host_ != nullptr) (void)cudaFreeHost(host_);
    device_ = nullptr;
    host_ = nullptr;
  }

 private:
  static constexpr std::size_t number_bytes = 256;  // so that pieces are aligned
  [[nodiscard]] std::byte* pieces() const noexcept { return device_ + number_bytes; }

  std::size_t size_;
  std::size_t piece_;
  std::byte* host_ = nullptr;
  std::byte* device_ = nullptr;
  cuda::Event copied_{};
};

}  // namespace zero::detail
