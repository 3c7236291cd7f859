// SPDX-License-Identifier: Apache-2.0
#include <ATen/ops/zeros.h>
#include <zero/interop/torch/param.hpp>

int main() {
  const zero::BasicTorchParam<float> param("a", at::zeros({2, 3}));
  return param.shape().size() == 2 ? 0 : 1;
}
