// SPDX-License-Identifier: Apache-2.0
// Ranks that work in CUDA memory leave the bits of the serial run.
#include <span>
#include <variant>
#include <vector>

#include "cuda/device_oracle.hpp"

namespace {

using oracle::check_on_device;
using oracle::DeviceMemory;
using oracle::DeviceTensor;
using oracle::FixedDeviceTensor;
using oracle::Flat;
using oracle::Tensors;
using zero::BalancedPartition;
using zero::ContiguousPartition;
using zero::NoView;
using zero::ParamAndGradView;
using zero::ParamView;
using zero::Replicated;
using zero::Stage1;
using Either = std::variant<std::span<float>, std::span<double>>;

const std::vector<zero::AdamW> adam{
    {.lr = 0.01}, {.lr = 0.02, .beta2 = 0.9, .weight_decay = 0.1, .amsgrad = true}};
const std::vector<zero::Sgd> sgd{
    {.lr = 0.1, .momentum = 0.9, .dampening = 0.1},
    {.lr = 0.2},
    {.lr = 0.05, .momentum = 0.8, .weight_decay = 0.1, .nesterov = true, .maximize = true}};

}  // namespace

TEST_CASE("device: same bits, parameters stay put", "[cuda]") {
  check_on_device<Tensors<FixedDeviceTensor, std::span<float>>, ContiguousPartition, NoView,
                  Stage1>(0, adam);
}
TEST_CASE("device: same bits, two lanes in ParamView, whole tensors", "[cuda]") {
  check_on_device<Tensors<DeviceTensor, Either>, BalancedPartition, ParamView, Stage1>(1000, sgd);
}
TEST_CASE("device: same bits, replicated in ParamAndGradView", "[cuda]") {
  check_on_device<Tensors<DeviceTensor, std::span<double>>, ContiguousPartition, ParamAndGradView,
                  Replicated>(2000, sgd);
}
TEST_CASE("device: same bits, flat buffer", "[cuda]") {
  check_on_device<Flat<float, DeviceMemory>, ContiguousPartition, NoView, Stage1>(3000, adam);
}
