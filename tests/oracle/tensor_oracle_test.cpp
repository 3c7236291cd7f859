// SPDX-License-Identifier: Apache-2.0
// Optimizers that see whole tensors. Under ZERO_TEST_EACH_ONCE each of them, communicator
// and view once.
#include <cstdint>
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
using Mix = std::variant<std::span<zero::bfloat16>, std::span<float>>;

constexpr std::uint32_t muon_seeds = 48;  // unoptimised, its products of matrices take long
const std::vector<zero::Lamb> groups{{.lr = 0.01}, {.lr = 0.02, .weight_decay = 0.1}};

}  // namespace

TEST_CASE("Lamb: same bits, shared memory, NoView") {
  oracle::check<SharedMemory, Tensors<FixedTensor, std::span<float>>, zero::BalancedPartition,
                zero::NoView, zero::Stage1>(40000, groups);
}
TEST_CASE("Lamb: same bits, collectives only, bfloat16 and float in ParamAndGradView") {
  oracle::check<CollectivesOnly, Tensors<Tensor, Mix>, zero::BalancedPartition,
                zero::ParamAndGradView, zero::Stage1>(41000, groups);
}
#ifndef ZERO_TEST_EACH_ONCE
TEST_CASE("Lamb: same bits, shared memory, replicated, slots in bfloat16") {
  oracle::check<SharedMemory, Tensors<FixedTensor, Mix>, zero::BalancedPartition, zero::NoView,
                zero::Replicated, zero::Bfloat16Slots>(42000, groups);
}
TEST_CASE("Lamb: same bits, collectives only, replicated, no masters") {
  oracle::check<CollectivesOnly, Tensors<Tensor, Mix>, zero::BalancedPartition, zero::ParamView,
                zero::Replicated, zero::StochasticPrecision>(43000, groups);
}
TEST_CASE("Muon: same bits, collectives only") {
  oracle::check<CollectivesOnly, Tensors<FixedTensor, std::span<float>>, zero::BalancedPartition,
                zero::NoView, zero::Stage1>(44000, std::vector<zero::Muon>{{.lr = 0.1}, {}},
                                            muon_seeds);
}
#endif
TEST_CASE("Muon: same bits, shared memory, double") {
  oracle::check<SharedMemory, Tensors<Tensor, std::span<double>>, zero::BalancedPartition,
                zero::ParamView, zero::Stage1>(
      45000, std::vector<zero::Muon>{{.lr = 0.1}, {.nesterov = false}}, muon_seeds);
}
