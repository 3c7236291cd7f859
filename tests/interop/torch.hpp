// SPDX-License-Identifier: Apache-2.0
// What tests on libtorch share. To be included before other headers.
#pragma once

// First, or clang can't read libtorch 1.13 as C++20.
#include <ATen/core/ivalue.h>

#include <ATen/Parallel.h>
#include <torch/csrc/autograd/generated/variable_factories.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/linear.h>
#include <torch/types.h>
// What glog, which some libtorch use, and Catch define both.
#undef CHECK
#undef LOG

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "catch.hpp"
#include "ranks.hpp"
#include "zero/interop/torch.hpp"

namespace on_torch {

/// Numbers that depend on nothing but `seed`: multiples of 1/64 within 1 of zero. (torch's own
/// generator is one for all ranks of a process.)
inline void fill(const at::Tensor& tensor, unsigned seed) {
  torch::NoGradGuard guard;
  const auto count = tensor.numel();
  std::vector<float> numbers(static_cast<std::size_t>(count));
  std::uint32_t state = seed * 747796405U + 2891336453U;
  for (float& x : numbers) {
    state = state * 747796405U + 2891336453U;
    x = static_cast<float>(state >> 25) / 64 - 1;
  }
  tensor.copy_(torch::from_blob(numbers.data(), {count}).view(tensor.sizes()));
}

/// Two layers, with a parameter that only a backward through `unused` would reach.
struct Net : torch::nn::Module {
  torch::nn::Linear first{nullptr}, second{nullptr};
  torch::Tensor scale, unused;

  Net() {
    first = register_module("first", torch::nn::Linear(3, 7));
    second = register_module("second", torch::nn::Linear(7, 2));
    scale = register_parameter("scale", torch::ones({}));
    unused = register_parameter("unused", torch::ones({5}));
    unsigned seed = 0;
    for (auto& parameter : parameters()) fill(parameter, ++seed);
  }
  torch::Tensor forward(const torch::Tensor& x) {
    return second->forward(torch::tanh(first->forward(x))) * scale;
  }
};

/// A batch that depends on the rank and the step alone.
inline torch::Tensor batch(int rank, int step) {
  torch::Tensor x = torch::empty({4, 3});
  fill(x, 1000 + 17 * static_cast<unsigned>(step) + static_cast<unsigned>(rank));
  return x;
}

/// The bytes of all tensors, one after the other.
inline std::string bytes_of(const std::vector<torch::Tensor>& tensors) {
  std::string all;
  for (const torch::Tensor& tensor : tensors) {
    const torch::Tensor dense = tensor.detach().contiguous();
    all.append(static_cast<const char*>(dense.data_ptr()), dense.nbytes());
  }
  return all;
}

/// As `ranks::run` and `rethrow_any`, one thread of libtorch's a rank.
template <class F>
void on_ranks(int world, F&& body) {
  at::set_num_threads(1);
  ranks::rethrow_any(ranks::run(world, [&](zero::InProcessCommunicator& comm) {
    at::set_num_threads(1);
    body(comm);
  }));
}

inline void require(bool holds, const std::string& what) {
  if (!holds) throw std::runtime_error("not so: " + what);
}

}  // namespace on_torch
