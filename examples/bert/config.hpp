// SPDX-License-Identifier: Apache-2.0
// The published sizes of BERT, and the parameters that a size stands for.
#pragma once

#include <array>
#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace bert {

/// What a BERT is made of (Devlin et al., arXiv:1810.04805; tiny and mini: Turc et al.,
/// arXiv:1908.08962).
struct Config {
  std::string name;
  std::size_t layers = 0;
  std::size_t hidden = 0;
  std::size_t heads = 0;
  std::size_t intermediate = 0;
  std::size_t vocabulary = 30522;
  std::size_t positions = 512;  ///< the longest sequence
  std::size_t segments = 2;

  [[nodiscard]] std::size_t head_size() const { return hidden / heads; }
};

/// What stands on the encoder: the masked-language-model head, whose decoder is tied to the word
/// embedding, or the pooler that classifiers use.
enum class Head { masked_lm, pooler };

/// A parameter as PyTorch's `named_parameters` would show it.
struct Shape {
  std::string name;
  std::vector<std::size_t> extents;
  bool decays;  ///< whether weight decay applies: to matrices, not to biases and norms
  int unit;     ///< of tensors that are used together

  [[nodiscard]] std::size_t elements() const {
    std::size_t product = 1;
    for (const std::size_t extent : extents) product *= extent;
    return product;
  }
};

/// tiny, mini, base, large.
[[nodiscard]] const std::array<Config, 4>& published();
/// Throws `InputError` that lists what there is.
[[nodiscard]] Config config_of(std::string_view name);
/// In registration order: embeddings, layer after layer, head. Unit 0 is the word embedding, which
/// both ends of the network use, 1 the other embeddings, 2 + l layer l, and the last one the head.
[[nodiscard]] std::vector<Shape> shapes_of(const Config& config, Head head = Head::masked_lm);
/// How many parameters and tensors each part has, as a table.
[[nodiscard]] std::string describe(const Config& config, Head head);

}  // namespace bert
