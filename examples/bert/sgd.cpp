// SPDX-License-Identifier: Apache-2.0
#include "train.hpp"

namespace bert {

namespace {

template <class T, class Partition, class View, Over over = Over::threads>
Combination with() {
  return combination<zero::Sgd, T, Partition, View, over>("sgd");
}

}  // namespace

std::vector<Combination> sgd_combinations() {
  return {with<float, zero::ContiguousPartition, zero::ParamView, Over::processes_too>(),
          with<float, zero::ContiguousPartition, zero::NoView>()};
}

}  // namespace bert
