// SPDX-License-Identifier: Apache-2.0
/// @file
/// A parameter without memory of its own.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "zero/attributes.hpp"
#include "zero/element.hpp"
#include "zero/parameter.hpp"

namespace zero {

/// A name and a shape, for code that works on plain pointers: the optimizer gives it memory, where
/// `values()` then is; until it has, both spans are empty. At `Stage3` the values mean something
/// while the parameter's unit is acquired, and otherwise read as zeros or anything
/// (`Settings::poison_released`: as NaN, once they have been released). Construction needs
/// `Settings::initial_value`, which makes the first ones.
template <Element T = float>
class ShapedParam {
 public:
  ShapedParam(std::string name, std::vector<std::size_t> shape, Attributes attributes = {},
              std::size_t group = 0)
      : name_(std::move(name)), shape_(std::move(shape)), attributes_(attributes), group_(group) {}

  [[nodiscard]] const std::string& name() const noexcept { return name_; }
  [[nodiscard]] std::span<const std::size_t> shape() const noexcept { return shape_; }
  [[nodiscard]] std::span<T> values() const noexcept { return values_; }
  /// Empty unless the optimizer moves gradients (`ParamAndGradView`). At stages 2 and 3 backward
  /// may lease gradients all the same (`ZeroSharded::gradient`).
  [[nodiscard]] std::span<T> gradient() const noexcept { return gradient_; }
  [[nodiscard]] const Attributes& attributes() const noexcept { return attributes_; }
  [[nodiscard]] std::size_t group() const noexcept { return group_; }

  void rebind(std::span<T> values, std::shared_ptr<const void> owner) {
    values_ = values;
    values_owner_ = std::move(owner);
  }
  void rebind_gradient(std::span<T> gradient, std::shared_ptr<const void> owner) {
    gradient_ = gradient;
    gradient_owner_ = std::move(owner);
  }

 private:
  std::string name_;
  std::vector<std::size_t> shape_;
  std::span<T> values_{};
  std::span<T> gradient_{};
  std::shared_ptr<const void> values_owner_{};
  std::shared_ptr<const void> gradient_owner_{};
  Attributes attributes_;
  std::size_t group_;
};

static_assert(RebindableParameter<ShapedParam<float>> && RebindableGradient<ShapedParam<float>>);

}  // namespace zero
