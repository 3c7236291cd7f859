// SPDX-License-Identifier: Apache-2.0
#include "train.hpp"

namespace bert {

namespace {

template <class T, class Partition, class View>
Combination with() {
  return combination<zero::Sgd, T, Partition, View>("sgd");
}

}  // namespace

std::vector<Combination> sgd_combinations() {
  return {with<float, zero::ContiguousPartition, zero::ParamView>(),
          with<float, zero::ContiguousPartition, zero::NoView>()};
}

}  // namespace bert
