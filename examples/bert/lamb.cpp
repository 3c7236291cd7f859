// SPDX-License-Identifier: Apache-2.0
#include "train.hpp"

namespace bert {

namespace {

template <class T, class Partition, class View, Over over = Over::threads>
Combination with() {
  return combination<zero::Lamb, T, Partition, View, over>("lamb");
}

}  // namespace

std::vector<Combination> lamb_combinations() {
  return {with<float, zero::BalancedPartition, zero::ParamView, Over::processes_too>(),
          with<zero::bfloat16, zero::BalancedPartition, zero::ParamView>()};
}

}  // namespace bert
