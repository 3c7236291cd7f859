// SPDX-License-Identifier: Apache-2.0
// expect: it is not known where this optimizer of libtorch's keeps its state
#include <zero/interop/torch/optimizer.hpp>

#include <torch/optim/lbfgs.h>

#ifdef ZERO_COMPILE_FAIL
using Theirs = torch::optim::LBFGS;
#else
using Theirs = torch::optim::Adam;
#endif

std::size_t slots_of(const zero::TorchOptimizer<Theirs>& optimizer) {
  return optimizer.used_slots();
}
