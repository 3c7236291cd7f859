// SPDX-License-Identifier: Apache-2.0
// expect: elements model zero::Parameter .name, shape, values, gradient.
#include <zero/zero.hpp>

#include <cstddef>
#include <span>
#include <vector>

struct Tensor {
  const char* name() const;
  std::span<const std::size_t> shape() const;
  std::span<float> values() const;
#ifndef ZERO_COMPILE_FAIL
  std::span<float> gradient() const;
#endif
};
using Store = std::vector<Tensor>;

void construct(Store& store, zero::InProcessCommunicator& comm) {
  zero::ZeroSharded optimizer{zero::Adam{}, store, comm};
}
