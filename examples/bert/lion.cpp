// SPDX-License-Identifier: Apache-2.0
#include "../lion.hpp"
#include "train.hpp"

namespace bert {

namespace {

template <class T, class Partition, class View, Over over = Over::threads>
Combination with() {
  return combination<Lion, T, Partition, View, over>("lion");
}

}  // namespace

std::vector<Combination> lion_combinations() {
  return {with<float, zero::ContiguousPartition, zero::ParamView, Over::processes_too>(),
          with<zero::bfloat16, zero::ContiguousPartition, zero::ParamView>()};
}

}  // namespace bert
