// SPDX-License-Identifier: Apache-2.0
#include <zero/interop/torch/params.hpp>

int main() {
  const zero::BasicTorchParams<float> params{std::vector<at::Tensor>{at::zeros({2, 3})}};
  return params.size() == 1 && params[0].shape().size() == 2 ? 0 : 1;
}
