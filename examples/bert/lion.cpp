// SPDX-License-Identifier: Apache-2.0
#include "../lion.hpp"
#include "train.hpp"

namespace bert {

namespace {

Lion make(const Options& options) {
  Lion optimizer{.lr = options.lr};
  if (options.weight_decay) optimizer.weight_decay = *options.weight_decay;
  return optimizer;
}

template <class T, class Partition, class View>
Combination with() {
  return combination<make, T, Partition, View>("lion");
}

}  // namespace

std::vector<Combination> lion_combinations() {
  return {with<float, zero::ContiguousPartition, zero::ParamView>(),
          with<zero::bfloat16, zero::ContiguousPartition, zero::ParamView>()};
}

}  // namespace bert
