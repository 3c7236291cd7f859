// SPDX-License-Identifier: Apache-2.0
// Other libraries at the same job, where they are installed.
#pragma once

#include <string>
#include <vector>

#include "bert_shapes.hpp"

namespace bench {

struct PeerTimes {
  std::vector<double> seconds{};  ///< of each step; none where it can't be run
  std::string remark{};
};

/// PyTorch's ZeroRedundancyOptimizer over Gloo on two processes (peers/torch_zero.py).
PeerTimes torch_zero(const std::vector<Shape>& shapes);

}  // namespace bench
