// SPDX-License-Identifier: Apache-2.0
#include "train.hpp"

namespace bert {

namespace {

zero::Lamb make(const Options& options) {
  zero::Lamb optimizer{.lr = options.lr};
  if (options.weight_decay) optimizer.weight_decay = *options.weight_decay;
  return optimizer;
}

template <class T, class Partition, class View>
Combination with() {
  return combination<make, T, Partition, View>("lamb");
}

}  // namespace

std::vector<Combination> lamb_combinations() {
  return {with<float, zero::BalancedPartition, zero::ParamView>(),
          with<zero::bfloat16, zero::BalancedPartition, zero::ParamView>()};
}

}  // namespace bert
