// SPDX-License-Identifier: Apache-2.0
// All that zero needs to know of the framework: what its parameters are, and how memory moves.
#pragma once

#include <cstddef>
#include <memory>
#include <ranges>
#include <span>
#include <string>
#include <utility>
#include <vector>
#include <zero/zero.hpp>

#include "tensor.hpp"

namespace bert {

template <class T>
struct Parameter {
  Tensor<T>* tensor;
  [[nodiscard]] const std::string& name() const { return tensor->shape.name; }
  [[nodiscard]] std::span<const std::size_t> shape() const { return tensor->shape.extents; }
  [[nodiscard]] std::span<T> values() const { return {tensor->values.get(), tensor->size}; }
  [[nodiscard]] std::span<T> gradient() const { return {tensor->gradient.get(), tensor->size}; }
  [[nodiscard]] std::size_t group() const { return tensor->shape.decays ? 0 : 1; }
  void rebind(std::span<T> values, std::shared_ptr<const void> owner) const {
    tensor->values = std::shared_ptr<T>(std::move(owner), values.data());
  }
  void rebind_gradient(std::span<T> gradient, std::shared_ptr<const void> owner) const {
    tensor->gradient = std::shared_ptr<T>(std::move(owner), gradient.data());
  }
};

template <class T>
[[nodiscard]] auto store_of(std::vector<Tensor<T>>& tensors) {
  return tensors | std::views::transform([](Tensor<T>& tensor) { return Parameter<T>{&tensor}; });
}

}  // namespace bert
