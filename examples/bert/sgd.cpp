// SPDX-License-Identifier: Apache-2.0
#include "train.hpp"

namespace bert {

namespace {

zero::Sgd make(const Options& options) {
  zero::Sgd optimizer{.lr = options.lr, .momentum = 0.9};
  if (options.weight_decay) optimizer.weight_decay = *options.weight_decay;
  return optimizer;
}

template <class T, class Partition, class View>
Combination with() {
  return combination<make, T, Partition, View>("sgd");
}

}  // namespace

std::vector<Combination> sgd_combinations() {
  return {with<float, zero::ContiguousPartition, zero::ParamView>(),
          with<float, zero::ContiguousPartition, zero::NoView>()};
}

}  // namespace bert
