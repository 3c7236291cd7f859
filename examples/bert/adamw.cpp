#include "train.hpp"

namespace bert {

namespace {

zero::AdamW make(const Options& options) {
  zero::AdamW optimizer{.lr = options.lr};
  if (options.weight_decay) optimizer.weight_decay = *options.weight_decay;
  return optimizer;
}

template <class T, class Partition, class View>
Combination with() {
  return combination<make, T, Partition, View>("adamw");
}

}  // namespace

std::vector<Combination> adamw_combinations() {
  using namespace zero;
  return {with<float, ContiguousPartition, ParamView>(), with<float, BalancedPartition, NoView>(),
          with<bfloat16, ContiguousPartition, ParamView>()};
}

}  // namespace bert
