#include "train.hpp"

namespace bert {

namespace {

zero::Lamb make(const Options& options) {
  zero::Lamb optimizer{.lr = options.lr};
  if (options.weight_decay) optimizer.weight_decay = *options.weight_decay;
  return optimizer;
}

template <class T, class Partition, class View>
Combination with() {
  return combination<make, T, Partition, View>("lamb");
}

}  // namespace

std::vector<Combination> lamb_combinations() {
  using namespace zero;
  return {with<float, BalancedPartition, ParamView>(),
          with<bfloat16, BalancedPartition, ParamView>()};
}

}  // namespace bert
