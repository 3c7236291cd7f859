// SPDX-License-Identifier: Apache-2.0
#include "task.hpp"

#include <ATen/Parallel.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/functional.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/transformercoder.h>
#include <torch/nn/modules/transformerlayer.h>

#include <algorithm>
#include <limits>
#include <mutex>
#include <utility>
#include <vector>

#include "../bert/input_error.hpp"
#include "../bert/random.hpp"
#include "data.hpp"

// OpenBLAS's own; another BLAS has no such function.
extern "C" [[gnu::weak]] void openblas_set_num_threads(int threads);

namespace example {

namespace {

namespace nn = torch::nn;

/// Predicts each next character from those before it: input [context, batch] of ids, logits
/// [context x batch, characters]. Without dropout, whose random numbers torch draws from one
/// generator a process: ranks that are threads would draw in an order that no one knows.
class Transformer : public Model {
 public:
  Transformer(const Options& options, std::int64_t characters)
      : embedding_(register_module("embedding", nn::Embedding(characters, options.width))),
        positions_(register_parameter("positions",
                                      0.02 * torch::randn({options.context, 1, options.width}))),
        encoder_(register_module(
            "encoder", nn::TransformerEncoder(nn::TransformerEncoderOptions(
                           nn::TransformerEncoderLayerOptions(options.width, options.width / 32)
                               .dim_feedforward(4 * options.width)
                               .dropout(0),
                           options.layers)))),
        head_(register_module("head", nn::Linear(options.width, characters))),
        mask_(register_buffer("mask", torch::full({options.context, options.context},
                                                  -std::numeric_limits<float>::infinity())
                                          .triu(1))) {}

  torch::Tensor forward(const torch::Tensor& input) override {
    const torch::Tensor x = encoder_(embedding_(input) + positions_, mask_);
    return head_(x).flatten(0, 1);
  }

 private:
  nn::Embedding embedding_;
  torch::Tensor positions_;
  nn::TransformerEncoder encoder_;
  nn::Linear head_;
  torch::Tensor mask_;
};

/// Tells digits: input [batch, 1, 8, 8], logits [batch, 10]. Its batch norms have buffers, which
/// each rank computes from its own images.
class ConvNet : public Model {
 public:
  ConvNet() {
    const auto convolution = [](std::int64_t from, std::int64_t to) {
      return nn::Conv2d(nn::Conv2dOptions(from, to, 3).padding(1).bias(false));
    };
    const auto half = [](const torch::Tensor& x) { return torch::max_pool2d(x, 2); };
    layers_->push_back(convolution(1, 16));
    layers_->push_back(nn::BatchNorm2d(16));
    layers_->push_back(nn::Functional(torch::relu));
    layers_->push_back(convolution(16, 32));
    layers_->push_back(nn::BatchNorm2d(32));
    layers_->push_back(nn::Functional(torch::relu));
    layers_->push_back(nn::Functional(half));
    layers_->push_back(convolution(32, 64));
    layers_->push_back(nn::BatchNorm2d(64));
    layers_->push_back(nn::Functional(torch::relu));
    layers_->push_back(nn::Functional(half));
    layers_->push_back(nn::Functional([](const torch::Tensor& x) { return x.flatten(1); }));
    layers_->push_back(nn::Linear(64 * 2 * 2, 10));
    register_module("layers", layers_);
  }

  torch::Tensor forward(const torch::Tensor& input) override { return layers_->forward(input); }

 private:
  nn::Sequential layers_;
};

/// Torch draws weights from one generator a process, so ranks that are threads take turns.
template <class Make>
std::shared_ptr<Model> draw(std::uint64_t seed, Make make) {
  static std::mutex turn;
  const std::lock_guard lock(turn);
  torch::manual_seed(seed);
  return make();
}

/// A copy, which keeps nothing of `numbers`.
template <class T>
torch::Tensor tensor_of(std::vector<T>& numbers) {
  return torch::from_blob(numbers.data(), {static_cast<std::int64_t>(numbers.size())},
                          torch::CppTypeToScalarType<T>::value)
      .clone();
}

/// The last tenth is for the test.
std::int64_t share_to_train(std::int64_t count) { return count - count / 10; }

class TextTask : public Task {
 public:
  explicit TextTask(const Options& options)
      : options_(options), characters_(read_characters(options.text)) {
    if (options.width % 32 != 0) {
      throw bert::InputError("--width " + std::to_string(options.width) +
                             ": give a multiple of 32, which is the width of a head");
    }
    ids_ = tensor_of(characters_.ids);
    train_ = share_to_train(ids_.numel());
    // Of a longer test one would wait more than one learns.
    tests_ = std::min<std::int64_t>(64, (ids_.numel() - train_ - 1) / options.context);
    if (tests_ < 1) {
      throw bert::InputError("--context " + std::to_string(options.context) +
                             ": the tenth of the text that is for the test is shorter; give less, "
                             "or more text");
    }
  }

  std::shared_ptr<Model> make_model(std::uint64_t seed) const override {
    return draw(seed, [&] { return std::make_shared<Transformer>(options_, classes()); });
  }
  Batch batch(std::int64_t step, int rank) const override {
    bert::Random random(options_.seed, static_cast<std::uint64_t>(rank),
                        static_cast<std::uint64_t>(step));
    std::vector<std::int64_t> begins;
    const auto places = static_cast<std::uint64_t>(train_ - options_.context - 1);
    for (std::int64_t i = 0; i < options_.batch; ++i) {
      begins.push_back(static_cast<std::int64_t>(random.below(places)));
    }
    return windows(begins);
  }
  Batch test(int rank, int ranks) const override {
    std::vector<std::int64_t> begins;
    for (std::int64_t i = rank; i < tests_; i += ranks) {
      begins.push_back(train_ + i * options_.context);
    }
    return windows(begins);
  }
  std::string describe() const override {
    return "text of " + std::to_string(ids_.numel()) + " characters, " + std::to_string(classes()) +
           " different ones; a batch has " + std::to_string(options_.batch) + " pieces of " +
           std::to_string(options_.context);
  }
  std::int64_t default_steps() const override { return 150; }

 private:
  std::int64_t classes() const { return static_cast<std::int64_t>(characters_.known.size()); }

  /// The pieces of the text that begin there, and each character's next.
  Batch windows(std::vector<std::int64_t>& begins) const {
    const torch::Tensor at =
        torch::arange(options_.context).unsqueeze(1) + tensor_of(begins).unsqueeze(0);
    return {ids_.take(at), ids_.take(at + 1).flatten()};
  }

  Options options_;
  Characters characters_;
  torch::Tensor ids_;
  std::int64_t train_ = 0, tests_ = 0;
};

class DigitsTask : public Task {
 public:
  explicit DigitsTask(const Options& options) : options_(options) {
    Digits digits = read_digits(options.digits);
    labels_ = tensor_of(digits.labels);
    images_ = tensor_of(digits.pixels).view({-1, 1, Digits::side, Digits::side});
    train_ = share_to_train(labels_.numel());
  }

  std::shared_ptr<Model> make_model(std::uint64_t seed) const override {
    return draw(seed, [] { return std::make_shared<ConvNet>(); });
  }
  Batch batch(std::int64_t step, int rank) const override {
    bert::Random random(options_.seed, static_cast<std::uint64_t>(rank),
                        static_cast<std::uint64_t>(step));
    std::vector<std::int64_t> chosen;
    for (std::int64_t i = 0; i < options_.batch; ++i) {
      chosen.push_back(static_cast<std::int64_t>(random.below(static_cast<std::uint64_t>(train_))));
    }
    return these(chosen);
  }
  Batch test(int rank, int ranks) const override {
    std::vector<std::int64_t> chosen;
    for (std::int64_t i = train_ + rank; i < labels_.numel(); i += ranks) chosen.push_back(i);
    return these(chosen);
  }
  std::string describe() const override {
    return std::to_string(labels_.numel()) + " images of digits; a batch has " +
           std::to_string(options_.batch);
  }
  std::int64_t default_steps() const override { return 200; }

 private:
  Batch these(std::vector<std::int64_t>& chosen) const {
    const torch::Tensor at = tensor_of(chosen);
    return {images_.index_select(0, at), labels_.index_select(0, at)};
  }

  Options options_;
  torch::Tensor images_, labels_;
  std::int64_t train_ = 0;
};

}  // namespace

void compute_on_one_thread() {
  at::set_num_threads(1);
  if (&openblas_set_num_threads != nullptr) openblas_set_num_threads(1);
}

std::unique_ptr<Task> make_task(const Options& options) {
  if (options.model == "conv") return std::make_unique<DigitsTask>(options);
  return std::make_unique<TextTask>(options);
}

}  // namespace example
