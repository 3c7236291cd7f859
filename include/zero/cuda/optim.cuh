// SPDX-License-Identifier: Apache-2.0
/// @file
/// The shipped element-wise optimizers on CUDA.
///
/// Any `UpdateRule` runs on CUDA as it is: all of a rank's fragments are stepped by one launch,
/// which reads the loss scale, the clip factor and whether to skip the step from device memory. So
/// these are names for whoever looks for a fused optimizer; options, meaning and state are those of
/// the rules that they name, and so are the bits, where neither compiler contracts products and
/// sums (nvcc: `--fmad=false`).
#pragma once

#include "zero/optim/adam.hpp"
#include "zero/optim/sgd.hpp"

namespace zero::cuda {

using FusedAdam = Adam;
using FusedAdamW = AdamW;
using FusedSgd = Sgd;

}  // namespace zero::cuda
