// SPDX-License-Identifier: Apache-2.0
#include "models.hpp"

#include "../bert_shapes.hpp"

namespace bench {

Model bert_large() {
  Model model{"BERT-large", {}};
  for (const Shape& shape : bert_large_shapes()) model.tensors.push_back(shape.elements());
  return model;
}

std::vector<Model> update_models(bool tiny) {
  if (tiny) return {{"tiny", {1000}}, {"tiny list", {100, 7, 333}}};
  constexpr std::size_t mebi = std::size_t{1} << 20;
  return {{"64Mi", {64 * mebi}}, {"256Mi", {256 * mebi}}, bert_large()};
}

std::vector<Model> memory_models(bool tiny) {
  if (tiny) return {{"Linear(10,10)", {100, 10}}};
  return {{"Linear(10000,10000)", {100'000'000, 10'000}}, bert_large()};
}

}  // namespace bench
