// SPDX-License-Identifier: Apache-2.0
/// @file
/// The two models, as anyone writes them for libtorch, and the batches that they are trained on.
#pragma once

// First: libtorch 1.13's other headers lack it where the compiler is clang.
#include <ATen/core/ivalue.h>
//
#include <torch/nn/module.h>
#include <torch/types.h>

#include <cstdint>
#include <memory>
#include <string>

#include "train.hpp"

namespace example {

/// Row i of a model's logits is for `target[i]`.
struct Batch {
  torch::Tensor input, target;
};

class Model : public torch::nn::Module {
 public:
  /// @return logits: a row an item, a column a class
  virtual torch::Tensor forward(const torch::Tensor& input) = 0;
};

/// A model and its data. All is const, so that ranks that are threads share one.
class Task {
 public:
  virtual ~Task() = default;
  /// The weights are drawn from the seed.
  [[nodiscard]] virtual std::shared_ptr<Model> make_model(std::uint64_t seed) const = 0;
  /// What a rank is given in a step. It depends on nothing else, so that threads, processes and
  /// every stage see the same.
  [[nodiscard]] virtual Batch batch(std::int64_t step, int rank) const = 0;
  /// A rank's part of the data that is in no batch.
  [[nodiscard]] virtual Batch test(int rank, int ranks) const = 0;
  /// A line on the data.
  [[nodiscard]] virtual std::string describe() const = 0;
  /// How many steps are enough to see that it learns.
  [[nodiscard]] virtual std::int64_t default_steps() const = 0;
};

/// Lets torch compute each rank on its own thread only: ranks share the processors, and sums that
/// torch splits among threads have other bits for other numbers of them.
void compute_on_one_thread();

/// Reads the data. Throws `bert::InputError`.
[[nodiscard]] std::unique_ptr<Task> make_task(const Options& options);

}  // namespace example
