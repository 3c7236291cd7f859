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

[[nodiscard]] inline std::size_t group_of(const Shape& shape) { return shape.decays ? 0 : 1; }
[[nodiscard]] inline zero::Attributes attributes_of(const Shape& shape, bool in_units) {
  return {.unit = in_units ? shape.unit : 0};
}

/// One tensor, as zero asks for it. An adapter is a pointer: it is made anew whenever it is asked
/// for.
/// @tparam in_units whether units come and go, so that a bucket must not hold parts of two
template <class T, bool in_units>
struct Parameter {
  Tensor<T>* tensor;
  [[nodiscard]] const std::string& name() const { return tensor->shape.name; }
  [[nodiscard]] std::span<const std::size_t> shape() const { return tensor->shape.extents; }
  [[nodiscard]] std::span<T> values() const { return span_of(tensor->values); }
  [[nodiscard]] std::span<T> gradient() const { return span_of(tensor->gradient); }
  /// Which of the optimizer's options apply: those with weight decay, or those without.
  [[nodiscard]] std::size_t group() const { return group_of(tensor->shape); }
  [[nodiscard]] zero::Attributes attributes() const {
    return attributes_of(tensor->shape, in_units);
  }
  /// From now on the memory is a part of a bucket, which lives as long as somebody holds `owner`.
  void rebind(std::span<T> values, std::shared_ptr<const void> owner) const {
    tensor->values = std::shared_ptr<T>(std::move(owner), values.data());
  }
  void rebind_gradient(std::span<T> gradient, std::shared_ptr<const void> owner) const {
    tensor->gradient = std::shared_ptr<T>(std::move(owner), gradient.data());
  }

 private:
  /// Empty where a tensor has no memory.
  [[nodiscard]] std::span<T> span_of(const std::shared_ptr<T>& memory) const {
    return {memory.get(), memory ? tensor->size : 0};
  }
};

/// The optimizer that gets it keeps a reference: it must outlive that, as the tensors must.
template <bool in_units, class T>
[[nodiscard]] auto store_of(std::vector<Tensor<T>>& tensors) {
  return tensors |
         std::views::transform([](Tensor<T>& tensor) { return Parameter<T, in_units>{&tensor}; });
}

}  // namespace bert
