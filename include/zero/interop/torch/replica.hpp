// SPDX-License-Identifier: Apache-2.0
/// @file
/// What replicas of a module need besides an optimizer: equal buffers, and mean gradients for an
/// optimizer that knows of no ranks. The parameters' own values: `broadcast_values`.
#pragma once

// First, or clang can't read libtorch 1.13 as C++20: a vector of this type is used before it is
// defined.
#include <ATen/core/ivalue.h>

#include <ATen/MemoryOverlap.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/InferenceMode.h>
#include <torch/nn/module.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <sstream>
#include <string>
#include <vector>

#include "zero/communicator.hpp"
#include "zero/detail/agreement.hpp"
#include "zero/detail/hash.hpp"
#include "zero/error.hpp"
#include "zero/interop/torch/params.hpp"

namespace zero {

/// Collective: every buffer of the module (the running statistics of batch norms, say) becomes that
/// of rank `root`, bit by bit, in one message. PyTorch's DDP does so before each forward; where
/// only evaluation reads them, before that and before saving is enough. With groups of replicas
/// `root` counts in all ranks.
///
/// Throws `UsageError` on all ranks, and changes nothing, where a buffer of one is sparse, not in
/// host memory or has elements that share memory (after `expand`), which it names, and where
/// buffers differ in names, shapes or types.
template <class Comm>
void broadcast_buffers(const ::torch::nn::Module& module, Comm& comm, int root = 0) {
  auto& everyone = detail::all_ranks_of(comm);
  std::vector<::at::Tensor> buffers;
  detail::Hash shapes;
  std::size_t bytes = 0;
  std::string refusal;
  for (const auto& item : module.named_buffers()) {
    const ::at::Tensor& buffer = item.value();
    if (!buffer.defined()) continue;
    if (buffer.layout() != ::at::kStrided || !buffer.device().is_cpu()) {
      std::ostringstream text;
      text << "broadcast_buffers: buffer '" << item.key() << "' is on device " << buffer.device()
           << " in layout " << buffer.layout() << "; only dense ones in host memory can be sent";
      refusal = text.str();
      break;
    }
    if (::at::has_internal_overlap(buffer) == ::at::MemOverlap::Yes) {
      refusal = "broadcast_buffers: elements of buffer '" + item.key() +
                "' share memory, so that it can't be written to; register its clone()";
      break;
    }
    shapes.add(item.key().data(), item.key().size());
    shapes.add(static_cast<std::uint64_t>(buffer.scalar_type()));
    shapes.add(static_cast<std::uint64_t>(buffer.dim()));
    for (const auto extent : buffer.sizes()) shapes.add(static_cast<std::uint64_t>(extent));
    buffers.push_back(buffer);
    bytes += buffer.nbytes();
  }
  detail::require_alike(everyone, shapes.value(),
                        "broadcast_buffers: the buffers' names, shapes or types", refusal);
  // Floats are sent as they are, whatever their bits mean.
  std::vector<float> message((bytes + sizeof(float) - 1) / sizeof(float));
  const auto for_each_piece = [&](auto&& f) {
    auto* piece = reinterpret_cast<std::byte*>(message.data());
    for (const ::at::Tensor& buffer : buffers) {
      f(buffer, piece);
      piece += buffer.nbytes();
    }
  };
  if (everyone.rank() == root) {
    for_each_piece([](const ::at::Tensor& buffer, std::byte* piece) {
      if (buffer.nbytes() != 0) std::memcpy(piece, buffer.contiguous().data_ptr(), buffer.nbytes());
    });
  }
  everyone.broadcast(std::span(message), root).wait();
  if (everyone.rank() == root) return;
  for_each_piece([](const ::at::Tensor& buffer, std::byte* piece) {
    if (buffer.nbytes() == 0) return;
    buffer.detach().copy_(
        ::at::from_blob(piece, buffer.sizes(), buffer.options().requires_grad(false)));
  });
}

/// Collective: every gradient becomes the mean of all ranks', so that each may step all parameters
/// by any `torch::optim::Optimizer` of its own. This is plain data parallelism, which keeps the
/// whole state on every rank; `ZeroSharded` doesn't. A parameter without a gradient on one rank
/// counts as zeros there and gets one; without any on all ranks it stays so. Ranks are summed in
/// order where the communicator does, in the gradients' type, and the sum is multiplied by 1/K.
///
/// Throws `UsageError` on all ranks, and changes nothing, where a gradient of one can't be reduced,
/// whose parameter it names, and where ranks differ in their parameters; and what the communicator
/// throws.
/// @param bucket_bytes how much is reduced at once, at least; copies of that are made
template <class Comm, Element... T>
void average_gradients(BasicTorchParams<T...>& params, Comm& comm,
                       std::size_t bucket_bytes = std::size_t{25} << 20) {
  static_assert(!ReplicatedCommunicator<Comm>,
                "zero: average_gradients takes a communicator of all ranks, not one of groups");
  const ::c10::InferenceMode off(false);  // backward adds to the gradients that are made here
  std::vector<std::uint8_t> mine(params.size());
  std::string refusal;
  detail::Hash shapes;
  try {
    for (std::size_t i = 0; i < params.size(); ++i) {
      const ::at::Tensor& tensor = params[i].tensor();
      shapes.add(static_cast<std::uint64_t>(tensor.scalar_type()));
      shapes.add(static_cast<std::uint64_t>(tensor.numel()));
      if (params[i].attributes().frozen || params[i].attributes().alias) continue;
      shapes.add(i);
      (void)params[i].gradient();  // checked, and those of ties added
      mine[i] = tensor.grad().defined() ? 1 : 0;
    }
  } catch (const UsageError& error) {
    refusal = detail::text_of(error);
  }
  detail::require_alike(comm, shapes.value(),
                        "average_gradients: the parameters' sizes, types, ties or frozen ones",
                        refusal);
  const auto all = detail::exchange_all(comm, std::span<const std::uint8_t>(mine));
  const auto somewhere = [&](std::size_t i) {
    for (std::size_t at = i; at < all.size(); at += params.size()) {
      if (all[at] != 0) return true;
    }
    return false;
  };
  (..., [&] {
    std::vector<T> bucket;
    std::vector<::at::Tensor> gradients;
    const auto reduce = [&] {
      comm.all_reduce(std::span(bucket), ReduceOp::sum).wait();
      const T* from = bucket.data();
      for (const ::at::Tensor& gradient : gradients) {
        const auto count = static_cast<std::size_t>(gradient.numel());
        if (count != 0) std::memcpy(gradient.data_ptr(), from, count * sizeof(T));
        from += count;
        gradient.detach().mul_(1.0 / comm.size());
      }
      bucket.clear();
      gradients.clear();
    };
    for (std::size_t i = 0; i < params.size(); ++i) {
      const ::at::Tensor& tensor = params[i].tensor();
      if (tensor.scalar_type() != ::c10::CppTypeToScalarType<T>::value || !somewhere(i)) continue;
      if (mine[i] == 0) tensor.mutable_grad() = ::at::zeros_like(tensor.detach());
      gradients.push_back(tensor.grad());
      const T* const begin = static_cast<const T*>(tensor.grad().data_ptr());
      bucket.insert(bucket.end(), begin, begin + tensor.numel());
      if (bucket.size() * sizeof(T) >= bucket_bytes) reduce();
    }
    if (!gradients.empty()) reduce();
  }());
}

}  // namespace zero
