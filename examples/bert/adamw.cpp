// SPDX-License-Identifier: Apache-2.0
#include "train.hpp"

namespace bert {

namespace {

template <class T, class Partition, class View, Over over = Over::threads>
Combination with() {
  return combination<zero::AdamW, T, Partition, View, over>("adamw");
}

}  // namespace

std::vector<Combination> adamw_combinations() {
  return {with<float, zero::ContiguousPartition, zero::ParamView, Over::processes_too>(),
          with<float, zero::BalancedPartition, zero::NoView>(),
          with<zero::bfloat16, zero::ContiguousPartition, zero::ParamView>()};
}

}  // namespace bert
