// SPDX-License-Identifier: Apache-2.0
#include "model.hpp"

#include <algorithm>
#include <cmath>
#include <zero/bfloat16.hpp>
#include <zero/float16.hpp>

#include "input_error.hpp"

// OpenBLAS's own; another BLAS has no such function.
extern "C" [[gnu::weak]] void openblas_set_num_threads(int threads);

namespace bert {

void use_one_thread_a_product() {
  if (&openblas_set_num_threads != nullptr) openblas_set_num_threads(1);
}

namespace {

// Tensors of the embeddings after the word embedding, of a layer, and of the head, from its first.
enum Embedding : std::size_t { position = 1, segment, embedding_scale, embedding_shift };
enum LayerTensor : std::size_t {
  query,
  query_bias,
  key,
  key_bias,
  value,
  value_bias,
  attention_dense,
  attention_bias,
  attention_scale,
  attention_shift,
  intermediate,
  intermediate_bias,
  output,
  output_bias,
  output_scale,
  output_shift
};
enum HeadTensor : std::size_t { decoder_bias, dense, dense_bias, head_scale, head_shift };
// Where a layer drops out; the embeddings are layer 0's, and layer l's are l + 1's.
enum Site : std::size_t { of_embedding, of_probabilities, of_attention, of_output };

}  // namespace

template <class Real>
Activations<Real>::Activations(const Config& config, const BatchSize& size, Memory& memory) {
  const std::size_t tokens = size.tokens(), rows = size.places();
  const std::size_t all = tokens * config.hidden;
  const std::size_t wide = tokens * config.intermediate;
  const std::size_t scores_of_head = size.length * size.length;
  const auto take = [&](std::size_t count) { return memory.take<Real>(count); };
  embedding_normalised = take(all);
  embedding_deviation = take(tokens);
  embedding_output = take(all);
  for (std::size_t l = 0; l < config.layers; ++l) {
    layers.push_back({take(all), take(all), take(all),
                      take(size.sequences * config.heads * scores_of_head), take(all), take(all),
                      take(tokens), take(all), take(wide), take(wide), take(all), take(tokens),
                      take(all)});
  }
  const std::size_t picked = rows * config.hidden;
  for (auto* array : {&head_input, &head_dense, &head_activated, &head_normalised, &head_output,
                      &places, &head}) {
    *array = take(picked);
  }
  head_deviation = take(rows);
  logits = take(rows * config.vocabulary);
  for (auto* array : {&gradient, &second, &context, &query, &key, &value}) *array = take(all);
  intermediate = take(wide);
  scores = take(scores_of_head);
  dropped = take(scores_of_head);
}

template <class T>
InitialValues<T>::InitialValues(const std::vector<Shape>& shapes, std::uint64_t seed) {
  starts_.reserve(shapes.size());
  for (const Shape& shape : shapes) {
    Start& start =
        starts_.emplace_back(shape.name, Real(shape.name.ends_with("LayerNorm.weight") ? 1 : 0));
    if (shape.decays) start.drawn.emplace(Real(0.02), mix(seed, starts_.size()));
  }
}

template <class T>
double InitialValues<T>::operator()(std::string_view name, std::size_t element) const {
  if (starts_[last_].name != name) {
    const auto found = std::find_if(starts_.begin(), starts_.end(),
                                    [&](const Start& start) { return start.name == name; });
    if (found == starts_.end()) {
      throw InputError("the model has no parameter " + std::string(name));
    }
    last_ = static_cast<std::size_t>(found - starts_.begin());
  }
  return static_cast<double>(static_cast<Real>(starts_[last_].at(element)));
}

template <class T>
void InitialValues<T>::fill(std::size_t i, T* values, std::size_t count) const {
  for (std::size_t e = 0; e < count; ++e) values[e] = starts_[i].at(e);
}

template <class T>
Model<T>::Model(const Config& config, const BatchSize& size, std::uint64_t seed, Owned owned)
    : config_(config), size_(size) {
  const std::vector<Shape> shapes = shapes_of(config);
  const InitialValues<T> initial(shapes, seed);
  tensors_.reserve(shapes.size());
  for (const Shape& shape : shapes) {
    Tensor<T>& tensor = tensors_.emplace_back(shape, owned);
    if (owned.values) initial.fill(tensors_.size() - 1, tensor.values.get(), tensor.size);
  }
}

template <class T>
std::size_t Model<T>::activation_bytes(const Config& config, const BatchSize& size) {
  Memory memory(Memory::Mode::count);
  (void)WorkingCopy<T>(shapes_of(config), memory);
  (void)Activations<Real>(config, size, memory);
  return memory.bytes();
}

template <class T>
auto Model<T>::forward(const Batch& batch, double dropout, std::uint64_t key) -> Real {
  if (!kept_) {
    Memory memory(Memory::Mode::allocate);
    working_ = std::make_unique<WorkingCopy<T>>(shapes_of(config_), memory);
    kept_ = std::make_unique<Activations<Real>>(config_, size_, memory);
    kept_bytes_ = memory.bytes();
  }
  leave_head();  // where no backward followed
  batch_ = &batch;
  dropout_ = dropout;
  dropout_key_ = key;
  embed();
  for (std::size_t l = 0; l < config_.layers; ++l) forward_layer(l);
  return predict();
}

template <class T>
void Model<T>::backward(Real loss_scale) {
  predict_backward(loss_scale);
  leave_head();
  for (std::size_t l = config_.layers; l-- > 0;) backward_layer(l);
  embed_backward();
}

template <class T>
void Model<T>::enter(std::size_t unit) {
  if (keeper_ != nullptr) keeper_->acquire(static_cast<int>(unit));
  working_->load(tensors_, unit);
  if (WorkingCopy<T>::converts && keeper_ != nullptr) keeper_->release(static_cast<int>(unit));
}

template <class T>
void Model<T>::leave(std::size_t unit) {
  if (!WorkingCopy<T>::converts && keeper_ != nullptr) keeper_->release(static_cast<int>(unit));
}

template <class T>
void Model<T>::leave_head() {
  if (!head_in_use_) return;
  head_in_use_ = false;
  leave(head_unit());
  leave(0);
}

template <class T>
auto Model<T>::gradient(std::size_t i) -> Real* {
  if constexpr (WorkingCopy<T>::converts) {
    return working_->gradient(i);
  } else {
    return keeper_ != nullptr ? keeper_->gradient(i) : tensors_[i].gradient.get();
  }
}

template <class T>
void Model<T>::done(std::size_t i) {
  if constexpr (WorkingCopy<T>::converts) {
    const Real* from = working_->gradient(i);
    T* to = keeper_ != nullptr ? keeper_->gradient(i) : tensors_[i].gradient.get();
    std::transform(from, from + tensors_[i].size, to, [](Real x) { return static_cast<T>(x); });
  }
  if (keeper_ != nullptr) keeper_->complete(i);
}

template <class T>
void Model<T>::embed() {
  enter(0);
  enter(1);
  const std::size_t hidden = config_.hidden;
  const Real *words = weight(0), *positions = weight(position), *segments = weight(segment);
  for (std::size_t t = 0; t < size_.tokens(); ++t) {
    const Real* word = words + static_cast<std::size_t>(batch_->tokens[t]) * hidden;
    const Real* place = positions + t % size_.length * hidden;
    const Real* part = segments + static_cast<std::size_t>(batch_->segments[t]) * hidden;
    Real* sum = kept_->embedding_normalised.get() + t * hidden;
    for (std::size_t i = 0; i < hidden; ++i) sum[i] = word[i] + place[i] + part[i];
  }
  Real* rows = kept_->embedding_normalised.get();
  layer_norm(rows, size_.tokens(), hidden, weight(embedding_scale), weight(embedding_shift), rows,
             kept_->embedding_deviation.get(), kept_->embedding_output.get());
  leave(1);
  leave(0);
  bert::dropout(kept_->embedding_output.get(), size_.tokens() * hidden, dropout_,
                key_of(0, of_embedding));
}

template <class T>
void Model<T>::embed_backward() {
  enter(1);
  const std::size_t hidden = config_.hidden;
  Real* rows = kept_->gradient.get();
  bert::dropout(rows, size_.tokens() * hidden, dropout_, key_of(0, of_embedding));
  layer_norm_backward(kept_->embedding_normalised.get(), kept_->embedding_deviation.get(),
                      size_.tokens(), hidden, weight(embedding_scale), gradient(embedding_scale),
                      gradient(embedding_shift), rows);
  leave(1);
  done(embedding_shift);
  done(embedding_scale);
  Real *words = word_gradient_, *positions = gradient(position), *segments = gradient(segment);
  std::fill_n(positions, config_.positions * hidden, Real(0));
  std::fill_n(segments, config_.segments * hidden, Real(0));
  // The word embedding's gradient is added to: the decoder, which is tied to it, has written it.
  for (std::size_t t = 0; t < size_.tokens(); ++t) {
    const Real* row = rows + t * hidden;
    Real* word = words + static_cast<std::size_t>(batch_->tokens[t]) * hidden;
    Real* place = positions + t % size_.length * hidden;
    Real* part = segments + static_cast<std::size_t>(batch_->segments[t]) * hidden;
    for (std::size_t i = 0; i < hidden; ++i) {
      word[i] += row[i];
      place[i] += row[i];
      part[i] += row[i];
    }
  }
  done(segment);
  done(position);
  done(0);
}

template <class T>
void Model<T>::forward_layer(std::size_t layer) {
  enter(2 + layer);
  const std::size_t first = working_->first(2 + layer);
  const std::size_t tokens = size_.tokens(), hidden = config_.hidden, all = tokens * hidden;
  const auto of = [&](std::size_t tensor) { return weight(first + tensor); };
  const Real* input = input_of(layer);
  Layer& kept = kept_->layers[layer];
  const auto project = [&](std::size_t tensor, std::shared_ptr<Real>& result) {
    products_.linear(tokens, hidden, hidden, input, of(tensor), of(tensor + 1), result.get());
  };
  project(query, kept.query);
  project(key, kept.key);
  project(value, kept.value);
  attend(kept, layer);

  Real* sum = kept.attention_normalised.get();
  products_.linear(tokens, hidden, hidden, kept.context.get(), of(attention_dense),
                   of(attention_bias), sum);
  bert::dropout(sum, all, dropout_, key_of(layer + 1, of_attention));
  for (std::size_t i = 0; i < all; ++i) sum[i] += input[i];
  layer_norm(sum, tokens, hidden, of(attention_scale), of(attention_shift), sum,
             kept.attention_deviation.get(), kept.attention_output.get());

  const Real* middle = kept.attention_output.get();
  products_.linear(tokens, hidden, config_.intermediate, middle, of(intermediate),
                   of(intermediate_bias), kept.intermediate.get());
  gelu(kept.intermediate.get(), tokens * config_.intermediate, kept.activated.get());
  sum = kept.output_normalised.get();
  products_.linear(tokens, config_.intermediate, hidden, kept.activated.get(), of(output),
                   of(output_bias), sum);
  bert::dropout(sum, all, dropout_, key_of(layer + 1, of_output));
  for (std::size_t i = 0; i < all; ++i) sum[i] += middle[i];
  layer_norm(sum, tokens, hidden, of(output_scale), of(output_shift), sum,
             kept.output_deviation.get(), kept.output.get());
  leave(2 + layer);
}

template <class T>
void Model<T>::backward_layer(std::size_t layer) {
  enter(2 + layer);
  const std::size_t first = working_->first(2 + layer);
  const std::size_t tokens = size_.tokens(), hidden = config_.hidden, all = tokens * hidden;
  const auto of = [&](std::size_t tensor) { return weight(first + tensor); };
  const auto to = [&](std::size_t tensor) { return gradient(first + tensor); };
  const auto pair_done = [&](std::size_t tensor) {  // a weight and its bias, or scale and shift
    done(first + tensor + 1);
    done(first + tensor);
  };
  const Layer& kept = kept_->layers[layer];
  // A sum's gradient goes two ways: `straight` past the branch, and `branch` back through it.
  Real* branch = kept_->gradient.get();
  Real* straight = kept_->second.get();

  layer_norm_backward(kept.output_normalised.get(), kept.output_deviation.get(), tokens, hidden,
                      of(output_scale), to(output_scale), to(output_shift), branch);
  pair_done(output_scale);
  std::copy_n(branch, all, straight);
  bert::dropout(branch, all, dropout_, key_of(layer + 1, of_output));
  Real* wide = kept_->intermediate.get();
  products_.linear_backward(tokens, config_.intermediate, hidden, kept.activated.get(), of(output),
                            branch, to(output), to(output_bias), wide, false);
  pair_done(output);
  gelu_backward(kept.intermediate.get(), tokens * config_.intermediate, wide);
  products_.linear_backward(tokens, hidden, config_.intermediate, kept.attention_output.get(),
                            of(intermediate), wide, to(intermediate), to(intermediate_bias),
                            straight, true);
  pair_done(intermediate);

  std::swap(branch, straight);
  layer_norm_backward(kept.attention_normalised.get(), kept.attention_deviation.get(), tokens,
                      hidden, of(attention_scale), to(attention_scale), to(attention_shift),
                      branch);
  pair_done(attention_scale);
  std::copy_n(branch, all, straight);
  bert::dropout(branch, all, dropout_, key_of(layer + 1, of_attention));
  products_.linear_backward(tokens, hidden, hidden, kept.context.get(), of(attention_dense), branch,
                            to(attention_dense), to(attention_bias), kept_->context.get(), false);
  pair_done(attention_dense);
  attend_backward(kept, layer);
  const Real* input = input_of(layer);
  const auto project = [&](std::size_t tensor, const std::shared_ptr<Real>& from) {
    products_.linear_backward(tokens, hidden, hidden, input, of(tensor), from.get(), to(tensor),
                              to(tensor + 1), straight, true);
    pair_done(tensor);
  };
  project(query, kept_->query);
  project(key, kept_->key);
  project(value, kept_->value);
  leave(2 + layer);
  // `straight` is the first array again, where the layer below looks for its gradient.
}

template <class T>
void Model<T>::attend(Layer& kept, std::size_t layer) {
  const std::size_t length = size_.length, hidden = config_.hidden, width = config_.head_size();
  const Real scale = 1 / std::sqrt(static_cast<Real>(width));
  for (std::size_t s = 0; s < size_.sequences; ++s) {
    for (std::size_t h = 0; h < config_.heads; ++h) {
      const std::size_t at = s * length * hidden + h * width, head = s * config_.heads + h;
      Real* scores = kept.probabilities.get() + head * length * length;
      products_.multiply(false, true, length, length, width, scale, kept.query.get() + at, hidden,
                         kept.key.get() + at, hidden, 0, scores, length);
      softmax(scores, length, length);
      const Real* used = scores;
      if (dropout_ > 0) {
        used = kept_->dropped.get();
        std::copy_n(scores, length * length, kept_->dropped.get());
        bert::dropout(kept_->dropped.get(), length * length, dropout_,
                      mix(key_of(layer + 1, of_probabilities), head));
      }
      products_.multiply(false, false, length, width, length, 1, used, length,
                         kept.value.get() + at, hidden, 0, kept.context.get() + at, hidden);
    }
  }
}

template <class T>
void Model<T>::attend_backward(const Layer& kept, std::size_t layer) {
  const std::size_t length = size_.length, hidden = config_.hidden, width = config_.head_size();
  const Real scale = 1 / std::sqrt(static_cast<Real>(width));
  Real* scores = kept_->scores.get();
  for (std::size_t s = 0; s < size_.sequences; ++s) {
    for (std::size_t h = 0; h < config_.heads; ++h) {
      const std::size_t at = s * length * hidden + h * width, head = s * config_.heads + h;
      const std::uint64_t dropout_key = mix(key_of(layer + 1, of_probabilities), head);
      const Real* probabilities = kept.probabilities.get() + head * length * length;
      const Real* context = kept_->context.get() + at;
      const Real* used = probabilities;
      if (dropout_ > 0) {
        used = kept_->dropped.get();
        std::copy_n(probabilities, length * length, kept_->dropped.get());
        bert::dropout(kept_->dropped.get(), length * length, dropout_, dropout_key);
      }
      products_.multiply(true, false, length, width, length, 1, used, length, context, hidden, 0,
                         kept_->value.get() + at, hidden);
      products_.multiply(false, true, length, length, width, 1, context, hidden,
                         kept.value.get() + at, hidden, 0, scores, length);
      bert::dropout(scores, length * length, dropout_, dropout_key);
      softmax_backward(probabilities, length, length, scores);
      products_.multiply(false, false, length, width, length, scale, scores, length,
                         kept.key.get() + at, hidden, 0, kept_->query.get() + at, hidden);
      products_.multiply(true, false, length, width, length, scale, scores, length,
                         kept.query.get() + at, hidden, 0, kept_->key.get() + at, hidden);
    }
  }
}

template <class T>
auto Model<T>::predict() -> Real {
  const std::size_t unit = head_unit(), first = working_->first(unit);
  // The decoder is the word embedding, of which a copy is still loaded. Both stay until backward
  // has used them, which comes next.
  if (!WorkingCopy<T>::converts) enter(0);
  enter(unit);
  head_in_use_ = true;
  const std::size_t rows = size_.places(), hidden = config_.hidden;
  const std::size_t vocabulary = config_.vocabulary;
  Real* input = kept_->head_input.get();
  for (std::size_t r = 0; r < rows; ++r) {
    const std::size_t token =
        r / size_.predictions * size_.length + static_cast<std::size_t>(batch_->positions[r]);
    std::copy_n(input_of(config_.layers) + token * hidden, hidden, input + r * hidden);
  }
  products_.linear(rows, hidden, hidden, input, weight(first + dense), weight(first + dense_bias),
                   kept_->head_dense.get());
  gelu(kept_->head_dense.get(), rows * hidden, kept_->head_activated.get());
  layer_norm(kept_->head_activated.get(), rows, hidden, weight(first + head_scale),
             weight(first + head_shift), kept_->head_normalised.get(), kept_->head_deviation.get(),
             kept_->head_output.get());
  Real* logits = kept_->logits.get();
  products_.linear(rows, hidden, vocabulary, kept_->head_output.get(), weight(0),
                   weight(first + decoder_bias), logits);
  Real loss = 0;
  for (std::size_t r = 0; r < rows; ++r) {
    // Of the logits, since what diverges has probabilities of 0.
    Real* row = logits + r * vocabulary;
    const Real label = row[batch_->labels[r]];
    loss += static_cast<Real>(batch_->weights[r]) * (softmax(row, vocabulary) - label);
  }
  return loss / weights_of_batch();
}

template <class T>
void Model<T>::predict_backward(Real loss_scale) {
  const std::size_t first = working_->first(head_unit());
  const std::size_t rows = size_.places(), hidden = config_.hidden;
  const std::size_t vocabulary = config_.vocabulary;
  Real* logits = kept_->logits.get();
  const Real each = loss_scale / weights_of_batch();
  for (std::size_t r = 0; r < rows; ++r) {
    Real* row = logits + r * vocabulary;
    const Real factor = each * static_cast<Real>(batch_->weights[r]);
    row[batch_->labels[r]] -= 1;
    for (std::size_t i = 0; i < vocabulary; ++i) row[i] *= factor;
  }
  Real* rows_gradient = kept_->head.get();
  word_gradient_ = gradient(0);
  products_.linear_backward(rows, hidden, vocabulary, kept_->head_output.get(), weight(0), logits,
                            word_gradient_, gradient(first + decoder_bias), rows_gradient, false);
  done(first + decoder_bias);
  layer_norm_backward(kept_->head_normalised.get(), kept_->head_deviation.get(), rows, hidden,
                      weight(first + head_scale), gradient(first + head_scale),
                      gradient(first + head_shift), rows_gradient);
  done(first + head_shift);
  done(first + head_scale);
  gelu_backward(kept_->head_dense.get(), rows * hidden, rows_gradient);
  products_.linear_backward(rows, hidden, hidden, kept_->head_input.get(), weight(first + dense),
                            rows_gradient, gradient(first + dense), gradient(first + dense_bias),
                            kept_->places.get(), false);
  done(first + dense_bias);
  done(first + dense);
  Real* all = kept_->gradient.get();
  std::fill_n(all, size_.tokens() * hidden, Real(0));
  for (std::size_t r = 0; r < rows; ++r) {
    const std::size_t token =
        r / size_.predictions * size_.length + static_cast<std::size_t>(batch_->positions[r]);
    for (std::size_t i = 0; i < hidden; ++i) {
      all[token * hidden + i] += kept_->places.get()[r * hidden + i];
    }
  }
}

template <class T>
auto Model<T>::weights_of_batch() const -> Real {
  Real sum = 0;
  for (const float weight : batch_->weights) sum += static_cast<Real>(weight);
  return sum;
}

template class InitialValues<float>;
template class InitialValues<double>;
template class InitialValues<zero::bfloat16>;
template class InitialValues<zero::float16>;
template class Model<float>;
template class Model<double>;
template class Model<zero::bfloat16>;
template class Model<zero::float16>;

}  // namespace bert
