// SPDX-License-Identifier: Apache-2.0
// 16-bit parameters and slots, with and without masters, rounded to nearest and stochastically.
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
using zero::bfloat16;
using zero::float16;
using zero::Rounding;
using Bfloat16s = std::span<bfloat16>;
using Float16s = std::span<float16>;
/// Matrices in 16 bits, norms in 32.
using Bfloat16Mix = std::variant<Bfloat16s, std::span<float>>;
using Float16Mix = std::variant<Float16s, std::span<float>>;

const std::vector<zero::AdamW> groups{
    {.lr = 0.01}, {.lr = 0.02, .beta2 = 0.9, .weight_decay = 0.1, .amsgrad = true}};

template <class Path, class Model, class Partition, class View, class Stage, class Precision>
void check(std::uint32_t first_seed) {
  oracle::check<Path, Model, Partition, View, Stage, Precision>(first_seed, groups);
}

}  // namespace

TEST_CASE("16 bits: same bits, shared memory, bfloat16 and float") {
  check<SharedMemory, Tensors<FixedTensor, Bfloat16Mix>, zero::ContiguousPartition, zero::NoView,
        zero::Stage1, zero::MixedPrecision>(30000);
}
TEST_CASE("16 bits: same bits, shared memory, replicated, slots in bfloat16") {
  check<SharedMemory, Tensors<Tensor, Bfloat16Mix>, zero::ContiguousPartition, zero::ParamView,
        zero::Replicated, zero::Bfloat16Slots>(32000);
}
TEST_CASE("16 bits: same bits, collectives only, float16, values rounded stochastically") {
  check<CollectivesOnly, Tensors<FixedTensor, Float16s>, zero::ContiguousPartition, zero::NoView,
        zero::Stage1, zero::BasicPrecision<float, float, Rounding::stochastic>>(33000);
}
TEST_CASE("16 bits: same bits, collectives only, replicated, no masters") {
  check<CollectivesOnly, Tensors<FixedTensor, Float16Mix>, zero::BalancedPartition, zero::NoView,
        zero::Replicated, zero::StochasticPrecision>(34000);
}
TEST_CASE("16 bits: same bits, collectives only, balanced, slots in bfloat16 to nearest") {
  check<CollectivesOnly, Tensors<Tensor, Bfloat16s>, zero::BalancedPartition,
        zero::ParamAndGradView, zero::Stage1,
        zero::BasicPrecision<float, bfloat16, Rounding::nearest>>(35000);
}
