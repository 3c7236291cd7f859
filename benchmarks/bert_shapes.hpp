// SPDX-License-Identifier: Apache-2.0
// BERT-large as a framework holds it, without a head: 391 tensors, 335,141,888 parameters.
#pragma once

#include <cstddef>
#include <vector>

#include "../examples/bert/config.hpp"

namespace bench {

using bert::Shape;

inline std::size_t elements_of(const std::vector<Shape>& shapes) {
  std::size_t sum = 0;
  for (const Shape& shape : shapes) sum += shape.elements();
  return sum;
}

inline std::vector<Shape> bert_large_shapes() {
  return bert::shapes_of(bert::config_of("large"), bert::Head::pooler);
}

}  // namespace bench
