// SPDX-License-Identifier: Apache-2.0
#include <cstddef>
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

const std::vector<zero::Sgd> groups{
    {.lr = 0.1, .momentum = 0.9, .dampening = 0.1},
    {.lr = 0.2},
    {.lr = 0.05, .momentum = 0.8, .weight_decay = 0.1, .nesterov = true, .maximize = true}};

/// A user's partition of whole tensors: each to the next rank.
struct RoundRobin {
  static constexpr bool cuts_tensors = false;
  constexpr void assign(std::span<const std::size_t> elements, std::span<std::size_t> loads,
                        std::span<int> owners) const {
    for (std::size_t i = 0; i < elements.size(); ++i) {
      owners[i] = static_cast<int>(i % loads.size());
      loads[i % loads.size()] += elements[i];
    }
  }
};
static_assert(zero::WholeTensorPartition<RoundRobin>);

/// A user's partition for unequal ranks: rank 0 takes twice what the others take.
struct DoubleFirst {
  static constexpr bool cuts_tensors = true;
  constexpr std::size_t cut(std::size_t elements, std::size_t alignment, int world,
                            int rank) const {
    if (rank == world) return elements;
    const auto parts = static_cast<std::size_t>(rank == 0 ? 0 : rank + 1);
    return elements * parts / static_cast<std::size_t>(world + 1) / alignment * alignment;
  }
};
static_assert(zero::CuttingPartition<DoubleFirst>);

}  // namespace

TEST_CASE("Sgd: same bits, shared memory, flat buffer") {
  oracle::check<SharedMemory, Flat<double>, zero::ContiguousPartition, zero::NoView, zero::Stage1>(
      10000, groups);
}
TEST_CASE("Sgd: same bits, collectives only, replicated flat buffer") {
  oracle::check<CollectivesOnly, Flat<float>, zero::ContiguousPartition, zero::NoView,
                zero::Replicated>(11000, groups);
}
TEST_CASE("Sgd: same bits, shared memory, whole tensors") {
  oracle::check<SharedMemory, Tensors<FixedTensor, Either>, RoundRobin, zero::NoView, zero::Stage1>(
      12000, groups);
}
TEST_CASE("Sgd: same bits, collectives only, whole tensors in ParamView") {
  oracle::check<CollectivesOnly, Tensors<Tensor, Either>, RoundRobin, zero::ParamView,
                zero::Stage1>(13000, groups);
}
TEST_CASE("Sgd: same bits, collectives only, whole tensors, NoView") {
  oracle::check<CollectivesOnly, Tensors<FixedTensor, std::span<float>>, RoundRobin, zero::NoView,
                zero::Stage1>(14000, groups);
}
TEST_CASE("Sgd: same bits, collectives only, unequal slices") {
  oracle::check<CollectivesOnly, Tensors<Tensor, std::span<double>>, DoubleFirst, zero::ParamView,
                zero::Stage1>(15000, groups);
}
TEST_CASE("Sgd: same bits, shared memory, unequal slices, replicated") {
  oracle::check<SharedMemory, Tensors<FixedTensor, std::span<float>>, DoubleFirst, zero::NoView,
                zero::Replicated>(16000, groups);
}
