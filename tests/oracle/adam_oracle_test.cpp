// SPDX-License-Identifier: Apache-2.0
// Adam in float and double. Under ZERO_TEST_EACH_ONCE each communicator, view, stage and store
// once.
#include <span>
#include <variant>
#include <vector>

#include "check.hpp"

namespace {

using oracle::CollectivesOnly;
using oracle::FixedTensor;
using oracle::Flat;
using oracle::SharedMemory;
using oracle::Tensor;
using oracle::Tensors;
using Either = std::variant<std::span<float>, std::span<double>>;

const std::vector<zero::Adam> groups{
    {.lr = 0.1},
    {.lr = 0.01, .beta1 = 0.8, .weight_decay = 0.1, .amsgrad = true, .maximize = true}};

template <class Path, class Model, class View, class Stage>
void check(std::uint32_t first_seed) {
  oracle::check<Path, Model, zero::ContiguousPartition, View, Stage>(first_seed, groups);
}

}  // namespace

#ifndef ZERO_TEST_EACH_ONCE
TEST_CASE("Adam: same bits, shared memory, NoView") {
  check<SharedMemory, Tensors<FixedTensor, std::span<float>>, zero::NoView, zero::Stage1>(0);
}
#endif
TEST_CASE("Adam: same bits, shared memory, two lanes in ParamView") {
  check<SharedMemory, Tensors<Tensor, Either>, zero::ParamView, zero::Stage1>(1000);
}
TEST_CASE("Adam: same bits, shared memory, replicated, two lanes") {
  check<SharedMemory, Tensors<FixedTensor, Either>, zero::NoView, zero::Replicated>(2000);
}
#ifndef ZERO_TEST_EACH_ONCE
TEST_CASE("Adam: same bits, collectives only, NoView") {
  check<CollectivesOnly, Tensors<FixedTensor, std::span<double>>, zero::NoView, zero::Stage1>(3000);
}
#endif
TEST_CASE("Adam: same bits, collectives only, two lanes in ParamAndGradView") {
  check<CollectivesOnly, Tensors<Tensor, Either>, zero::ParamAndGradView, zero::Stage1>(4000);
}
#ifndef ZERO_TEST_EACH_ONCE
TEST_CASE("Adam: same bits, collectives only, replicated in ParamView") {
  check<CollectivesOnly, Tensors<Tensor, std::span<float>>, zero::ParamView, zero::Replicated>(
      5000);
}
#endif
TEST_CASE("Adam: same bits, collectives only, flat buffer") {
  check<CollectivesOnly, Flat<float>, zero::NoView, zero::Stage1>(6000);
}
