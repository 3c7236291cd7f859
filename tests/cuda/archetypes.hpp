// SPDX-License-Identifier: Apache-2.0
/// @file
/// The least that models each of the concepts of zero/cuda/. Pages of docs/concepts quote it.
#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "zero/communicator.hpp"
#include "zero/cuda/communicator.hpp"
#include "zero/cuda/stream.hpp"
#include "zero/cuda/tensor_optimizer.hpp"
#include "zero/memory.hpp"

namespace archetypes {

//! [StreamRequest]
struct StreamRequest {
  zero::cuda::StreamView stream;
  void wait() { stream.synchronize(); }
  void wait(std::chrono::nanoseconds) { wait(); }
  bool done() { return stream.query() == cudaSuccess; }
  void enqueue() {}  // it stands in the stream since it was started
};
//! [StreamRequest]
static_assert(zero::cuda::StreamRequest<StreamRequest>);

//! [StreamCommunicator]
/// A world of one rank; of its operations only one is here.
struct OneGpu {
  zero::cuda::StreamView given;
  static constexpr zero::MemorySpace memory_space = zero::MemorySpace::cuda;
  static constexpr bool supports(zero::ElementType) { return true; }
  static constexpr bool supports(zero::ReduceOp) { return true; }
  int rank() const { return 0; }
  int size() const { return 1; }

  zero::cuda::StreamView stream() const { return given; }
  void wait(const zero::cuda::Event& event) { event.synchronize(); }
  void check() const {}
  template <class T>
  StreamRequest all_reduce(std::span<T>, zero::ReduceOp) {
    return {given};
  }
};
//! [StreamCommunicator]
static_assert(zero::cuda::StreamCommunicator<OneGpu>);

//! [TensorOptimizer]
/// Values become what their gradients are: one copy in the stream.
struct Follow {
  static constexpr std::array<std::string_view, 0> slots{};
  std::array<double, 0> options() const { return {}; }
  void update(zero::TensorRef<float> tensor, std::array<std::span<float>, 0>, std::int64_t,
              zero::cuda::StreamView stream) const {
    zero::cuda::check(
        cudaMemcpyAsync(tensor.values.data(), tensor.gradient.data(), tensor.values.size_bytes(),
                        cudaMemcpyDeviceToDevice, stream.get()),
        "cudaMemcpyAsync");
  }
};
//! [TensorOptimizer]
static_assert(zero::cuda::TensorOptimizer<Follow>);

}  // namespace archetypes
