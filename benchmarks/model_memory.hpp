// SPDX-License-Identifier: Apache-2.0
// One rank's parameters and gradients, each tensor in memory of its own as frameworks have it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <string>
#include <utility>
#include <vector>
#include <zero/zero.hpp>

#include "bert_shapes.hpp"

namespace bench {

/// Numbers of the size that training has, none of them so small that arithmetic gets slow.
inline void fill(zero::HostArray<float>& array, float size) {
  for (std::size_t i = 0; i < array.size(); ++i) {
    array.data()[i] = size * (1 + static_cast<float>(i % 7));
  }
}

/// On huge pages where a tensor is large enough; touched by the thread that makes it.
class ModelMemory {
 public:
  explicit ModelMemory(const std::vector<Shape>& shapes) {
    values_.reserve(shapes.size());
    gradients_.reserve(shapes.size());
    for (const Shape& shape : shapes) {
      values_.emplace_back(shape.elements());
      gradients_.emplace_back(shape.elements());
      fill(values_.back(), 1e-2F);
      fill(gradients_.back(), 1e-3F);
      store_.emplace_back(shape.name, shape.extents, values_.back().data(),
                          gradients_.back().data());
    }
  }

  [[nodiscard]] std::vector<zero::ParamRef<float>>& store() { return store_; }
  [[nodiscard]] std::size_t tensors() const { return values_.size(); }
  [[nodiscard]] std::size_t elements(std::size_t tensor) const { return values_[tensor].size(); }
  [[nodiscard]] float* values(std::size_t tensor) { return values_[tensor].data(); }
  [[nodiscard]] float* gradient(std::size_t tensor) { return gradients_[tensor].data(); }

 private:
  std::vector<zero::HostArray<float>> values_{};
  std::vector<zero::HostArray<float>> gradients_{};
  std::vector<zero::ParamRef<float>> store_{};
};

}  // namespace bench
