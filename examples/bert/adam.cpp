#include "train.hpp"

namespace bert {

namespace {

zero::Adam make(const Options& options) {
  zero::Adam optimizer{.lr = options.lr};
  if (options.weight_decay) optimizer.weight_decay = *options.weight_decay;
  return optimizer;
}

template <class T, class Partition, class View>
Combination with() {
  return combination<make, T, Partition, View>("adam");
}

}  // namespace

std::vector<Combination> adam_combinations() {
  using namespace zero;
  return {with<float, ContiguousPartition, ParamView>(),
          with<float, ContiguousPartition, NoView>(),
          with<float, ContiguousPartition, ParamAndGradView>(),
          with<float, BalancedPartition, ParamView>(),
          with<bfloat16, ContiguousPartition, ParamView>(),
          with<float16, ContiguousPartition, ParamView>()};
}

}  // namespace bert
