// SPDX-License-Identifier: Apache-2.0
#include "train.hpp"

namespace bert {

namespace {

template <class T, class Partition, class View, Over over = Over::threads>
Combination with() {
  return combination<zero::Adam, T, Partition, View, over>("adam");
}

}  // namespace

std::vector<Combination> adam_combinations() {
  return {with<float, zero::ContiguousPartition, zero::ParamView, Over::processes_too>(),
          with<float, zero::ContiguousPartition, zero::NoView>(),
          with<float, zero::ContiguousPartition, zero::ParamAndGradView>(),
          with<float, zero::BalancedPartition, zero::ParamView>(),
          with<zero::bfloat16, zero::ContiguousPartition, zero::ParamView, Over::processes_too>(),
          with<zero::float16, zero::ContiguousPartition, zero::ParamView>()};
}

}  // namespace bert
