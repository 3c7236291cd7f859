// SPDX-License-Identifier: Apache-2.0
// BERT with a masked-language-model head: forward, and backward written out. It knows nothing of
// ranks or of sharding.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "array.hpp"
#include "batch.hpp"
#include "config.hpp"
#include "keeper.hpp"
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

/// What a parameter starts with: near-normal numbers of deviation 0.02, biases 0, norms 1. A
/// function of seed, name and element, so that nobody needs the whole of a tensor for a part.
template <class T>
class InitialValues {
 public:
  InitialValues(const std::vector<Shape>& shapes, std::uint64_t seed);
  /// Exactly a `T`. A name that the model hasn't is an `InputError`.
  [[nodiscard]] double operator()(std::string_view name, std::size_t element) const;
  /// All of the i-th tensor.
  void fill(std::size_t i, T* values, std::size_t count) const;

 private:
  using Real = compute_t<T>;
  struct Start {
    std::string name;
    Real constant;
    std::optional<NearNormal<Real>> drawn{};
    [[nodiscard]] T at(std::size_t element) const {
      return static_cast<T>(drawn ? (*drawn)[element] : constant);
    }
  };
  std::vector<Start> starts_;
  mutable std::size_t last_ = 0;  ///< that was asked for: the next one is likely the same
};

/// @tparam T what parameters and gradients are stored in; computed is in `compute_t<T>`
template <class T>
class Model {
 public:
  using Real = compute_t<T>;

  /// Weights start with the `InitialValues` of `seed`. Activations are allocated by the first
  /// `forward`. Where tensors own less than all, there must be a keeper.
  Model(const Config& config, const BatchSize& size, std::uint64_t seed, Owned owned = {});
  Model(const Model&) = delete;
  Model& operator=(const Model&) = delete;

  [[nodiscard]] std::vector<Tensor<T>>& tensors() { return tensors_; }
  /// From now on asked for weights and gradients; null: the tensors have them. It must outlive the
  /// model's use.
  void keep_by(Keeper<T>* keeper) { keeper_ = keeper; }

  /// The mean cross entropy of the masked places. `batch`, of the model's size, must live until
  /// `backward` has returned.
  /// @param dropout share of activations that are dropped
  /// @param key what dropout draws from: another one for every batch
  Real forward(const Batch& batch, double dropout = 0, std::uint64_t key = 0);
  /// Writes (not adds) all gradients, times `loss_scale`.
  void backward(Real loss_scale);

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
  /// From here to `leave` a unit's weights may be used.
  void enter(std::size_t unit);
  void leave(std::size_t unit);
  void leave_head();
  /// Where to write tensor i's gradient, until it is `done`.
  [[nodiscard]] Real* gradient(std::size_t i);
  void done(std::size_t i);
  [[nodiscard]] std::size_t head_unit() const { return 2 + config_.layers; }
  /// What a dropout draws from: it is the network's `site`-th of `layer`.
  [[nodiscard]] std::uint64_t key_of(std::size_t layer, std::size_t site) const {
    return mix(dropout_key_, 8 * layer + site);
  }

  Config config_;
  BatchSize size_;
  std::vector<Tensor<T>> tensors_;
  Keeper<T>* keeper_ = nullptr;
  std::unique_ptr<WorkingCopy<T>> working_;
  std::unique_ptr<Activations<Real>> kept_;
  std::size_t kept_bytes_ = 0;
  Products<Real> products_;

  const Batch* batch_ = nullptr;
  bool head_in_use_ = false;       ///< from forward's end to backward's begin
  Real* word_gradient_ = nullptr;  ///< which both ends of the network write
  double dropout_ = 0;
  std::uint64_t dropout_key_ = 0;
};

}  // namespace bert
