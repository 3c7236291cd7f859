// SPDX-License-Identifier: Apache-2.0
#include "train.hpp"

namespace bert {

namespace {

zero::AdamW make(const Options& options) {
  zero::AdamW optimizer{.lr = options.lr};
  if (options.weight_decay) optimizer.weight_decay = *options.weight_decay;
  return optimizer;
}

template <class T, class Partition, class View>
Combination with() {
  return combination<make, T, Partition, View>("adamw");
}

}  // namespace

std::vector<Combination> adamw_combinations() {
  return {with<float, zero::ContiguousPartition, zero::ParamView>(),
          with<float, zero::BalancedPartition, zero::NoView>(),
          with<zero::bfloat16, zero::ContiguousPartition, zero::ParamView>()};
}

}  // namespace bert
