// SPDX-License-Identifier: Apache-2.0
#include "train.hpp"

namespace bert {

namespace {

template <class T, class Partition, class View, Over over = Over::threads>
Combination with(const std::vector<Trainer>& further = {}) {
  return combination<zero::Adam, T, Partition, View, over>("adam", further);
}

}  // namespace

std::vector<Combination> adam_combinations() {
  return {with<float, zero::ContiguousPartition, zero::ParamView, Over::processes_too>(
              adam_stages_fp32()),
          with<float, zero::ContiguousPartition, zero::NoView>(),
          with<float, zero::ContiguousPartition, zero::ParamAndGradView>(),
          with<float, zero::BalancedPartition, zero::ParamView>(),
          with<zero::bfloat16, zero::ContiguousPartition, zero::ParamView, Over::processes_too>(
              adam_stages_bf16()),
          with<zero::float16, zero::ContiguousPartition, zero::ParamView>()};
}

}  // namespace bert
