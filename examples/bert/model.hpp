// SPDX-License-Identifier: Apache-2.0
// BERT with a masked-language-model head: forward, and backward written out. It knows nothing of
// ranks or of sharding.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "array.hpp"
#include "batch.hpp"
#include "config.hpp"
#include "kernels.hpp"
#include "tensor.hpp"
#include "working_copy.hpp"

namespace bert {

/// From now on a matrix product runs on the thread that asks for it: ranks are threads already.
void use_one_thread_a_product();

/// How large a batch is.
struct BatchSize {
  std::size_t sequences = 0;
  std::size_t length = 0;       ///< tokens in a sequence
  std::size_t predictions = 0;  ///< masked places in a sequence

  [[nodiscard]] std::size_t tokens() const { return sequences * length; }
  [[nodiscard]] std::size_t places() const { return sequences * predictions; }
};

/// What forward keeps for backward, and what both work in.
template <class Real>
struct Activations {
  struct Layer {
    std::shared_ptr<Real> query, key, value, probabilities, context;
    std::shared_ptr<Real> attention_normalised, attention_deviation, attention_output;
    std::shared_ptr<Real> intermediate, activated;
    std::shared_ptr<Real> output_normalised, output_deviation, output;
  };
  std::shared_ptr<Real> embedding_normalised, embedding_deviation, embedding_output;
  std::vector<Layer> layers;
  std::shared_ptr<Real> head_input, head_dense, head_activated, head_normalised, head_deviation,
      head_output, logits;
  /// Gradients that one layer after the other uses: of its output, which becomes that of its input,
  /// and what it needs on the way.
  std::shared_ptr<Real> gradient, second, context, query, key, value, intermediate, scores, dropped;
  std::shared_ptr<Real> places, head;

  Activations(const Config& config, const BatchSize& size, Memory& memory);
};

/// @tparam T what parameters and gradients are stored in; computed is in `compute_t<T>`
template <class T>
class Model {
 public:
  using Real = compute_t<T>;
  /// Told which tensors' gradients are complete: [first, last).
  using Ready = std::function<void(std::size_t first, std::size_t last)>;

  /// Weights are drawn from `seed`: near-normal of deviation 0.02, biases 0, norms 1. Activations
  /// are allocated by the first `forward`.
  Model(const Config& config, const BatchSize& size, std::uint64_t seed);
  Model(const Model&) = delete;
  Model& operator=(const Model&) = delete;

  [[nodiscard]] std::vector<Tensor<T>>& tensors() { return tensors_; }

  /// The mean cross entropy of the masked places. `batch`, of the model's size, must live until
  /// `backward` has returned.
  /// @param dropout share of activations that are dropped
  /// @param key what dropout draws from: another one for every batch
  Real forward(const Batch& batch, double dropout = 0, std::uint64_t key = 0);
  /// Writes (not adds) all gradients, times `loss_scale`.
  void backward(Real loss_scale, const Ready& ready = {});

  /// Bytes of what the first `forward` allocated.
  [[nodiscard]] std::size_t activation_bytes() const { return kept_bytes_; }
  /// What a model of this size will allocate beyond its parameters and gradients.
  [[nodiscard]] static std::size_t activation_bytes(const Config& config, const BatchSize& size);
  /// Time spent in matrix products so far.
  [[nodiscard]] double product_seconds() const { return products_.seconds(); }

 private:
  using Layer = typename Activations<Real>::Layer;

  void embed();
  void embed_backward();
  void forward_layer(std::size_t layer);
  void backward_layer(std::size_t layer);
  void attend(Layer& kept, std::size_t layer);
  void attend_backward(const Layer& kept, std::size_t layer);
  Real predict();
  void predict_backward(Real loss_scale);
  /// How many predictions count.
  [[nodiscard]] Real weights_of_batch() const;

  [[nodiscard]] const Real* input_of(std::size_t layer) const {
    return layer == 0 ? kept_->embedding_output.get() : kept_->layers[layer - 1].output.get();
  }
  [[nodiscard]] const Real* weight(std::size_t i) const { return working_->weight(tensors_, i); }
  [[nodiscard]] Real* gradient(std::size_t i) const { return working_->gradient(tensors_, i); }
  /// What a dropout draws from: it is the network's `site`-th of `layer`.
  [[nodiscard]] std::uint64_t key_of(std::size_t layer, std::size_t site) const {
    return mix(dropout_key_, 8 * layer + site);
  }

  Config config_;
  BatchSize size_;
  std::vector<Tensor<T>> tensors_;
  std::unique_ptr<WorkingCopy<T>> working_;
  std::unique_ptr<Activations<Real>> kept_;
  std::size_t kept_bytes_ = 0;
  Products<Real> products_;

  const Batch* batch_ = nullptr;
  double dropout_ = 0;
  std::uint64_t dropout_key_ = 0;
};

}  // namespace bert
