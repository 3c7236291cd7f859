// SPDX-License-Identifier: Apache-2.0
// The same of 16-bit numbers: parameters, slots, and what is sent.
#include <span>
#include <variant>
#include <vector>

#include "cuda/device_oracle.hpp"

namespace {

using oracle::check_on_device;
using oracle::DeviceTensor;
using oracle::FixedDeviceTensor;
using oracle::Tensors;
using zero::BalancedPartition;
using zero::ContiguousPartition;
using zero::NoView;
using zero::ParamAndGradView;
using zero::ParamView;
using zero::Replicated;
using zero::Stage1;
using Mix = std::variant<std::span<zero::bfloat16>, std::span<float>>;

const std::vector<zero::AdamW> groups{
    {.lr = 0.01}, {.lr = 0.02, .beta2 = 0.9, .weight_decay = 0.1, .amsgrad = true}};

}  // namespace

TEST_CASE("device: same bits, bfloat16 and float in ParamAndGradView", "[cuda]") {
  check_on_device<Tensors<DeviceTensor, Mix>, ContiguousPartition, ParamAndGradView, Stage1>(
      10000, groups);
}
TEST_CASE("device: same bits, float16 without masters, rounded stochastically", "[cuda]") {
  check_on_device<Tensors<FixedDeviceTensor, std::span<zero::float16>>, BalancedPartition, NoView,
                  Stage1, zero::StochasticPrecision>(11000, groups);
}
TEST_CASE("device: same bits, float gradients sent in bfloat16", "[cuda]") {
  check_on_device<Tensors<FixedDeviceTensor, std::span<float>>, ContiguousPartition, NoView, Stage1,
                  zero::Bfloat16Wire>(12000, groups);
}
TEST_CASE("device: same bits, replicated, slots in bfloat16", "[cuda]") {
  check_on_device<Tensors<DeviceTensor, Mix>, ContiguousPartition, ParamView, Replicated,
                  zero::Bfloat16Slots>(13000, groups);
}
