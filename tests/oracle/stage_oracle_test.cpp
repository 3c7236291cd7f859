// SPDX-License-Identifier: Apache-2.0
#include <span>
#include <variant>
#include <vector>

#include "check.hpp"

namespace {

using oracle::CollectivesOnly;
using oracle::FixedTensor;
using oracle::SharedMemory;
using oracle::Tensor;
using oracle::Tensors;
using Either = std::variant<std::span<float>, std::span<double>>;
using Sixteen = std::variant<std::span<zero::bfloat16>, std::span<float>>;

// Sanitizers and a second compiler take each way, type of number and partition once, here or in
// another test (ZERO_TEST_EACH_ONCE).
const std::vector<zero::Adam> groups{{.lr = 0.1}, {.lr = 0.01, .weight_decay = 0.1}};

/// Worlds of 1 to 6, all ways to accumulate, pools that are tight; what is let go of is poisoned.
template <class Path, class Model, class Partition, class View, class Stage,
          class Precision = zero::MixedPrecision>
void check(std::uint32_t first_seed) {
#ifdef ZERO_TEST_EACH_ONCE  // each world with each number of backward passes
  constexpr std::uint32_t seeds = 18;
#else
  constexpr std::uint32_t seeds = 60;
#endif
  for (std::uint32_t seed = first_seed; seed < first_seed + seeds; ++seed) {
    oracle::Case c = oracle::draw(seed, groups.size());
    c.world = 1 + static_cast<int>(seed % 6);
    c.backwards = 1 + static_cast<int>(seed / 6 % 3);
    if (seed / 2 % 2 == 0) c.accumulation = zero::Accumulation::sharded;
    if (c.settings.gradients == zero::Gradients::reduced) {
      c.backwards = 1;
      c.accumulation = zero::Accumulation::local;
    }
    c.settings.poison_released = seed % 3 != 0;
    Stage stage;
    if constexpr (Stage::shards_values) {
      stage.prefetch = seed % 4;
      stage.resident_bytes = seed % 5 == 0 ? 4000 : 0;
    }
    std::string found;
    try {
      found = oracle::run<Path, Model, Partition, View, Stage, Precision>(c, groups, stage);
    } catch (const std::exception& error) {
      found = error.what();
    }
    INFO("seed " << seed);
    REQUIRE(found == "");
  }
}

}  // namespace

#ifndef ZERO_TEST_EACH_ONCE
TEST_CASE("stage 2: same bits, parameters stay put") {
  check<SharedMemory, Tensors<FixedTensor, std::span<float>>, zero::ContiguousPartition,
        zero::NoView, zero::Stage2>(0);
}
#endif
TEST_CASE("stage 2: same bits, two lanes in ParamView") {
  check<CollectivesOnly, Tensors<Tensor, Either>, zero::ContiguousPartition, zero::ParamView,
        zero::Stage2>(1000);
}
#ifndef ZERO_TEST_EACH_ONCE
TEST_CASE("stage 2: same bits, whole tensors of 16 bits in ParamAndGradView") {
  check<SharedMemory, Tensors<Tensor, Sixteen>, zero::BalancedPartition, zero::ParamAndGradView,
        zero::Stage2>(2000);
}
#endif
TEST_CASE("stage 2: same bits, float gradients sent in bfloat16") {
  check<SharedMemory, Tensors<Tensor, std::span<float>>, zero::ContiguousPartition, zero::ParamView,
        zero::Stage2, zero::Bfloat16Wire>(3000);
}
#ifndef ZERO_TEST_EACH_ONCE
TEST_CASE("stage 1: same bits, float gradients sent in float16") {
  oracle::check<SharedMemory, Tensors<FixedTensor, std::span<float>>, zero::ContiguousPartition,
                zero::NoView, zero::Stage1, zero::Float16Wire>(3500, groups);
}
#endif
TEST_CASE("stage 3: same bits, two lanes in ParamView") {
  check<SharedMemory, Tensors<Tensor, Either>, zero::ContiguousPartition, zero::ParamView,
        zero::Stage3>(4000);
}
TEST_CASE("stage 3: same bits, 16 bits in ParamAndGradView") {
  check<CollectivesOnly, Tensors<Tensor, Sixteen>, zero::ContiguousPartition,
        zero::ParamAndGradView, zero::Stage3>(5000);
}
#ifndef ZERO_TEST_EACH_ONCE
TEST_CASE("stage 3: same bits, whole tensors") {
  check<SharedMemory, Tensors<Tensor, std::span<float>>, zero::BalancedPartition, zero::ParamView,
        zero::Stage3>(6000);
}
#endif
