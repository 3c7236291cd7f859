// SPDX-License-Identifier: Apache-2.0
// A user's rule, as the example writes it, and AdamW.
#include <span>
#include <vector>

#include "../../examples/lion.hpp"
#include "check.hpp"

namespace {

using oracle::CollectivesOnly;
using oracle::FixedTensor;
using oracle::SharedMemory;
using oracle::Tensor;
using oracle::Tensors;

}  // namespace

TEST_CASE("Lion: same bits, shared memory") {
  oracle::check<SharedMemory, Tensors<Tensor, std::span<float>>, zero::ContiguousPartition,
                zero::ParamView, zero::Stage1, zero::MixedPrecision, Lion>(
      20000, {{.lr = 0.01, .weight_decay = 0.1}});
}
TEST_CASE("Lion: same bits, collectives only") {
  oracle::check<CollectivesOnly, Tensors<FixedTensor, std::span<double>>, zero::ContiguousPartition,
                zero::NoView, zero::Stage1, zero::MixedPrecision, Lion>(21000, {{}});
}
TEST_CASE("AdamW: same bits, shared memory") {
  oracle::check<SharedMemory, Tensors<FixedTensor, std::span<float>>, zero::ContiguousPartition,
                zero::NoView, zero::Stage1, zero::MixedPrecision, zero::AdamW>(
      22000, {{.lr = 0.1, .weight_decay = 0.2, .amsgrad = true}, {}});
}
