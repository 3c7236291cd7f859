// What policies.cpp and schedule.cpp train: a framework's tensor, whose memory may be moved, and a
// two-layer perceptron with its backward written out.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>
#include <zero/zero.hpp>

class Tensor {
 public:
  Tensor(std::string name, std::vector<std::size_t> shape, std::size_t group)
      : name_(std::move(name)), shape_(std::move(shape)), group_(group) {
    std::size_t elements = 1;
    for (const std::size_t extent : shape_) elements *= extent;
    for (const bool gradient : {false, true}) {
      const auto memory = std::make_shared<std::vector<float>>(elements);
      (gradient ? gradient_ : values_) = *memory;
      (gradient ? gradient_owner_ : owner_) = memory;
    }
  }

  // What zero::Parameter asks for.
  [[nodiscard]] const std::string& name() const { return name_; }
  [[nodiscard]] std::span<const std::size_t> shape() const { return shape_; }
  [[nodiscard]] std::span<float> values() const { return values_; }
  [[nodiscard]] std::span<float> gradient() const { return gradient_; }
  [[nodiscard]] std::size_t group() const { return group_; }

  // And what lets a bucket view move its memory.
  void rebind(std::span<float> values, std::shared_ptr<const void> owner) {
    values_ = values;
    owner_ = std::move(owner);
  }
  void rebind_gradient(std::span<float> gradient, std::shared_ptr<const void> owner) {
    gradient_ = gradient;
    gradient_owner_ = std::move(owner);
  }

 private:
  std::string name_;
  std::vector<std::size_t> shape_;
  std::size_t group_;
  std::span<float> values_{}, gradient_{};
  std::shared_ptr<const void> owner_{}, gradient_owner_{};
};
static_assert(zero::RebindableParameter<Tensor> && zero::RebindableGradient<Tensor>);

/// output = relu(input * weight1 + bias1) * weight2 + bias2, row by row. Biases are group 1.
class Perceptron {
 public:
  static constexpr std::size_t inputs = 32, hidden = 256, outputs = 8;

  explicit Perceptron(unsigned seed) {
    tensors.emplace_back("weight1", std::vector{inputs, hidden}, 0);
    tensors.emplace_back("bias1", std::vector{hidden}, 1);
    tensors.emplace_back("weight2", std::vector{hidden, outputs}, 0);
    tensors.emplace_back("bias2", std::vector{outputs}, 1);
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    for (const std::size_t layer : {0, 2}) {
      const float scale = std::sqrt(2.0F / static_cast<float>(layer == 0 ? inputs : hidden));
      for (float& w : tensors[layer].values()) w = scale * normal(random);
    }
  }

  std::vector<float> forward(std::span<const float> input) {
    const std::size_t rows = input.size() / inputs;
    hidden_ = times(input, tensors[0].values(), tensors[1].values(), rows);
    for (float& h : hidden_) h = std::max(h, 0.0F);
    return times(hidden_, tensors[2].values(), tensors[3].values(), rows);
  }

  /// Adds to the gradients those of the mean squared error, which it returns, and calls `ready(i)`
  /// once tensor i's is complete.
  template <class Ready>
  float backward(std::span<const float> input, std::span<const float> target, Ready&& ready) {
    const std::vector<float> output = forward(input);
    std::vector<float> to_output(output.size());
    const auto count = static_cast<float>(output.size());
    float loss = 0;
    for (std::size_t i = 0; i < output.size(); ++i) {
      const float error = output[i] - target[i];
      loss += error * error / count;
      to_output[i] = 2 * error / count;
    }
    std::vector<float> to_hidden(hidden_.size());
    add_gradients(hidden_, to_output, 2, to_hidden);
    ready(std::size_t{2});
    ready(std::size_t{3});
    for (std::size_t i = 0; i < hidden_.size(); ++i) {
      if (hidden_[i] <= 0) to_hidden[i] = 0;  // nothing flows back through a closed relu
    }
    add_gradients(input, to_hidden, 0, {});
    ready(std::size_t{0});
    ready(std::size_t{1});
    return loss;
  }

  std::vector<Tensor> tensors;

 private:
  static std::vector<float> times(std::span<const float> in, std::span<const float> weight,
                                  std::span<const float> bias, std::size_t rows) {
    const std::size_t width = bias.size(), depth = weight.size() / width;
    std::vector<float> out(rows * width);
    for (std::size_t row = 0; row < rows; ++row) {
      float* const y = out.data() + row * width;
      std::copy(bias.begin(), bias.end(), y);
      for (std::size_t i = 0; i < depth; ++i) {
        const float x = in[row * depth + i];
        for (std::size_t o = 0; o < width; ++o) y[o] += x * weight[i * width + o];
      }
    }
    return out;
  }

  /// Of the layer whose weight is tensors[at]; `to_input` may be empty.
  void add_gradients(std::span<const float> in, std::span<const float> to_out, std::size_t at,
                     std::span<float> to_input) {
    const std::span<const float> weight = tensors[at].values();
    const std::span<float> to_weight = tensors[at].gradient(), to_bias = tensors[at + 1].gradient();
    const std::size_t width = to_bias.size(), depth = weight.size() / width;
    for (std::size_t row = 0; row < to_out.size() / width; ++row) {
      const float* const g = to_out.data() + row * width;
      for (std::size_t o = 0; o < width; ++o) to_bias[o] += g[o];
      for (std::size_t i = 0; i < depth; ++i) {
        const float x = in[row * depth + i];
        float sum = 0;
        for (std::size_t o = 0; o < width; ++o) {
          to_weight[i * width + o] += x * g[o];
          sum += weight[i * width + o] * g[o];
        }
        if (!to_input.empty()) to_input[row * depth + i] = sum;
      }
    }
  }

  std::vector<float> hidden_{};
};
