// SPDX-License-Identifier: Apache-2.0
#include "../lion.hpp"
#include "train.hpp"

namespace bert {

namespace {

template <class T, class Partition, class View>
Combination with() {
  return combination<Lion, T, Partition, View>("lion");
}

}  // namespace

std::vector<Combination> lion_combinations() {
  return {with<float, zero::ContiguousPartition, zero::ParamView>(),
          with<zero::bfloat16, zero::ContiguousPartition, zero::ParamView>()};
}

}  // namespace bert
