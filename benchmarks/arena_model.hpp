// SPDX-License-Identifier: Apache-2.0
// One rank's parameters and gradients in a framework that lets them be moved into buckets.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>
#include <zero/zero.hpp>

#include "bert_shapes.hpp"

namespace bench {

/// Begins with pages that nobody has written to, so that moving them needs no memory twice, and
/// without gradients.
class ArenaModel {
 public:
  struct Tensor {
    std::string label;
    std::vector<std::size_t> extents;
    std::span<float> held;
    std::shared_ptr<const void> owner;
    std::span<float> gradient_held{};
    std::shared_ptr<const void> gradient_owner{};

    [[nodiscard]] const std::string& name() const { return label; }
    [[nodiscard]] std::span<const std::size_t> shape() const { return extents; }
    [[nodiscard]] std::span<float> values() const { return held; }
    [[nodiscard]] std::span<float> gradient() const { return gradient_held; }
    void rebind(std::span<float> values, std::shared_ptr<const void> by) {
      held = values;
      owner = std::move(by);
    }
    void rebind_gradient(std::span<float> gradient, std::shared_ptr<const void> by) {
      gradient_held = gradient;
      gradient_owner = std::move(by);
    }
  };

  explicit ArenaModel(const std::vector<Shape>& shapes) {
    for (const Shape& shape : shapes) {
      const std::shared_ptr<void> pages(std::calloc(shape.elements(), sizeof(float)), std::free);
      if (pages == nullptr) throw std::bad_alloc();
      tensors_.push_back({shape.name, shape.extents,
                          std::span(static_cast<float*>(pages.get()), shape.elements()), pages});
    }
  }

  [[nodiscard]] std::vector<Tensor>& store() { return tensors_; }

  /// To be called when they have been moved: numbers of the size that training has.
  void fill() {
    for (Tensor& tensor : tensors_) {
      for (std::size_t i = 0; i < tensor.held.size(); ++i) {
        tensor.held[i] = 1e-2F * (1 + static_cast<float>(i % 7));
        tensor.gradient_held[i] = 1e-3F * (1 + static_cast<float>(i % 7));
      }
    }
  }

 private:
  std::vector<Tensor> tensors_{};
};

}  // namespace bench
