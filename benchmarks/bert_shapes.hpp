// SPDX-License-Identifier: Apache-2.0
// BERT-large as a framework holds it: 391 tensors, 335,141,888 parameters.
#pragma once

#include <cstddef>
#include <functional>
#include <numeric>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace bench {

/// A tensor's name and extents.
struct Shape {
  std::string name;
  std::vector<std::size_t> extents;
  [[nodiscard]] std::size_t elements() const {
    return std::accumulate(extents.begin(), extents.end(), std::size_t{1}, std::multiplies<>());
  }
};

inline std::size_t elements_of(const std::vector<Shape>& shapes) {
  std::size_t sum = 0;
  for (const Shape& shape : shapes) sum += shape.elements();
  return sum;
}

/// Devlin et al. (arXiv:1810.04805), "large", without a head, in the order of its reference model.
inline std::vector<Shape> bert_large_shapes() {
  constexpr std::size_t hidden = 1024, intermediate = 4096;
  std::vector<Shape> shapes;
  const auto weight = [&](const std::string& name, std::size_t rows, std::size_t columns) {
    shapes.push_back({name + ".weight", {rows, columns}});
  };
  const auto linear = [&](const std::string& name, std::size_t out, std::size_t in) {
    weight(name, out, in);
    shapes.push_back({name + ".bias", {out}});
  };
  const auto norm = [&](const std::string& name) {
    shapes.push_back({name + ".weight", {hidden}});
    shapes.push_back({name + ".bias", {hidden}});
  };
  weight("embeddings.word", 30522, hidden);
  weight("embeddings.position", 512, hidden);
  weight("embeddings.type", 2, hidden);
  norm("embeddings.norm");
  for (int i = 0; i < 24; ++i) {
    const std::string layer = "layer." + std::to_string(i) + ".";
    linear(layer + "query", hidden, hidden);
    linear(layer + "key", hidden, hidden);
    linear(layer + "value", hidden, hidden);
    linear(layer + "attention", hidden, hidden);
    norm(layer + "attention.norm");
    linear(layer + "intermediate", intermediate, hidden);
    linear(layer + "output", hidden, intermediate);
    norm(layer + "output.norm");
  }
  linear("pooler", hidden, hidden);
  if (shapes.size() != 391 || elements_of(shapes) != 335'141'888) {
    throw std::logic_error("these are not BERT-large's shapes");
  }
  return shapes;
}

}  // namespace bench
