// SPDX-License-Identifier: Apache-2.0
// Faults in partitioning that other projects shipped, with their inputs and the right values. PT is
// pytorch/pytorch, DS DeepSpeed, MC Megatron-LM, LC llm.c.
#include <zero/layout.hpp>
#include <zero/partition/balanced.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <span>
#include <utility>
#include <vector>

#include "catch.hpp"

namespace {

using zero::Interval;
using zero::LayoutLane;
using zero::LayoutParameter;
using Sizes = std::vector<std::size_t>;

std::vector<LayoutParameter> parameters_of(const Sizes& sizes, zero::Attributes attributes = {}) {
  std::vector<LayoutParameter> parameters;
  for (const std::size_t n : sizes) {
    parameters.push_back({.elements = n, .attributes = attributes});
  }
  return parameters;
}

zero::Layout<> layout_of(const std::vector<LayoutParameter>& parameters, int world,
                         LayoutLane lane = {}) {
  return {parameters, std::span(&lane, 1), world};
}

template <class Partition>
Sizes owned_by_rank(const zero::Layout<Partition>& layout) {
  Sizes owned;
  for (int rank = 0; rank < layout.world(); ++rank) {
    std::size_t sum = 0;
    layout.for_each_owned(0, rank, [&](const zero::Fragment& fragment, std::size_t, std::size_t) {
      sum += fragment.elements;
    });
    owned.push_back(sum);
  }
  return owned;
}

std::size_t sum_of(const Sizes& sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), std::size_t{0});
}

Sizes balanced_loads(const std::vector<LayoutParameter>& parameters, int world) {
  const LayoutLane lane;
  return owned_by_rank(
      zero::Layout<zero::BalancedPartition>(parameters, std::span(&lane, 1), world));
}

/// wte, wpe, twelve blocks, the last norm.
Sizes gpt2_124m() {
  constexpr std::size_t width = 768;
  Sizes sizes{50257 * width, 1024 * width};
  for (int block = 0; block < 12; ++block) {
    const Sizes one{width,
                    width,  // ln_1
                    width * 3 * width,
                    3 * width,  // attn.c_attn
                    width * width,
                    width,  // attn.c_proj
                    width,
                    width,  // ln_2
                    width * 4 * width,
                    4 * width,  // mlp.c_fc
                    4 * width * width,
                    width};  // mlp.c_proj
    sizes.insert(sizes.end(), one.begin(), one.end());
  }
  sizes.insert(sizes.end(), {width, width});
  return sizes;
}

constexpr std::size_t tiny_bucket = 256;  // bytes, so that small cases have several buckets

}  // namespace

TEST_CASE("PT #60556: balanced by element count, not by first extent") {
  CHECK(balanced_loads(parameters_of({4 * 1, 3 * 1, 1 * 5}), 2) == Sizes{5, 7});
}

TEST_CASE("PT #59548, #53322: sorted before it is greedy") {
  for (int world = 1; world <= 8; ++world) {
    Sizes sizes;
    for (int i = 0; i < world; ++i) sizes.insert(sizes.end(), {9, 7, 5, 3});
    CAPTURE(world);
    CHECK(balanced_loads(parameters_of(sizes), world) ==
          Sizes(static_cast<std::size_t>(world), 24));
  }
}

TEST_CASE("PT (reading): frozen parameters don't weigh in the balance") {
  std::vector<LayoutParameter> parameters = parameters_of({100, 3, 5, 2, 6, 4});
  parameters[0].attributes.frozen = true;
  CHECK(balanced_loads(parameters, 2) == Sizes{11, 9});
  // Nor do aliases: their target does.
  parameters.push_back({.elements = 6, .attributes = {.alias = 4}});
  CHECK(balanced_loads(parameters, 2) == Sizes{11, 9});
  // With a partition that cuts, they take no room either.
  CHECK(layout_of(parameters, 2).extent(0) == 24);
  CHECK(layout_of(parameters, 2).elements(0) == 20);
}

TEST_CASE("MC #659: padding depends on K, but is never anyone's data") {
  for (const int world : {16, 24, 32}) {
    for (const std::size_t quantum : {1, 2, 3, 4, 8, 10, 64, 100, 999, 1000, 4096}) {
      for (const std::size_t element_bytes : {2, 4, 8}) {
        for (const std::size_t bucket_bytes : {tiny_bucket, std::size_t{25} << 20}) {
          const zero::Layout<> layout =
              layout_of(parameters_of({1000}, {.quantum = quantum}), world,
                        {.element_bytes = element_bytes, .bucket_bytes = bucket_bytes});
          CAPTURE(world, quantum, element_bytes, bucket_bytes);
          CHECK(layout.elements(0) == 1000);
          CHECK(sum_of(owned_by_rank(layout)) == 1000);
          CHECK(layout.extent(0) - 1000 < static_cast<std::size_t>(world) * layout.alignment(0));
          // All that a checkpoint could walk over ends where the parameter does.
          std::size_t stored = 0;
          for (const zero::Fragment& fragment : layout.fragments(0, {0, layout.extent(0)})) {
            stored += fragment.elements;
          }
          CHECK(stored == 1000);
        }
      }
    }
  }
  // Without a quantum: 1000 fp32 in K equal slices of whole 16 bytes.
  for (const auto& [world, slice] : {std::pair{16, 64}, {24, 44}, {32, 32}}) {
    const zero::Layout<> layout = layout_of(parameters_of({1000}), world);
    CAPTURE(world);
    CHECK(layout.extent(0) == static_cast<std::size_t>(world * slice));
    for (int rank = 0; rank < world; ++rank) {
      CHECK(layout.slice(0, 0, rank).size() == static_cast<std::size_t>(slice));
    }
  }
}

TEST_CASE("MC PR 6048: no tail is owned by nobody, whatever the world") {
  const Sizes sizes{1000, 1, 0, 77, 4096, 13};
  for (int world = 1; world <= 40; ++world) {
    for (const std::size_t quantum : {1, 3, 16}) {
      const zero::Layout<> layout = layout_of(parameters_of(sizes, {.quantum = quantum}), world,
                                              {.element_bytes = 4, .bucket_bytes = 1024});
      CAPTURE(world, quantum);
      CHECK(sum_of(owned_by_rank(layout)) == sum_of(sizes));
      // The last slice ends where the lane does.
      CHECK(layout.slice(0, layout.buckets(0) - 1, world - 1).end == layout.extent(0));
    }
  }
  // For another world there is no layout to misuse: each is computed for its own.
  CHECK_THROWS_AS(layout_of(parameters_of(sizes), 0), zero::UsageError);
}

TEST_CASE("DS #129, #8297: fewer elements than ranks; empty tensors") {
  const zero::Layout<> few = layout_of(parameters_of({3}), 8);
  CHECK(owned_by_rank(few) == Sizes{3, 0, 0, 0, 0, 0, 0, 0});
  CHECK(few.extent(0) == 32);
  CHECK(few.even(0, 0));
  for (int rank = 0; rank < 8; ++rank) CHECK(few.slice(0, 0, rank).size() == 4);

  const zero::Layout<> empty = layout_of(parameters_of({8, 0, 24}), 2);
  REQUIRE(empty.buckets(0) == 1);
  CHECK(empty.slice(0, 0, 0) == Interval{0, 16});
  CHECK(empty.slice(0, 0, 1) == Interval{16, 32});
  for (const zero::Fragment& fragment : empty.fragments(0, {0, 32})) CHECK(fragment.parameter != 1);
  CHECK(empty.buckets_of(1).empty());
  CHECK(owned_by_rank(empty) == Sizes{16, 16});

  for (int world = 1; world <= 9; ++world) {
    const zero::Layout<> nothing = layout_of(parameters_of({0, 0}), world);
    CHECK(nothing.extent(0) == 0);
    CHECK(nothing.buckets(0) == 0);
    CHECK(sum_of(owned_by_rank(nothing)) == 0);
  }
}

TEST_CASE("LC (reading): GPT-2 124M at K=7 is sharded, evenly") {
  const Sizes sizes = gpt2_124m();
  REQUIRE(sum_of(sizes) == 124'439'808);  // = 7 * 17'777'115 + 3
  for (const std::size_t bucket_bytes : {std::size_t{25} << 20, std::size_t{1} << 40}) {
    for (const std::size_t element_bytes : {4, 8}) {
      const zero::Layout<> layout = layout_of(
          parameters_of(sizes), 7, {.element_bytes = element_bytes, .bucket_bytes = bucket_bytes});
      const Sizes owned = owned_by_rank(layout);
      CHECK(sum_of(owned) == 124'439'808);
      const std::size_t off = 6 * layout.alignment(0);
      for (const std::size_t n : owned) {
        CAPTURE(bucket_bytes, element_bytes, n);
        CHECK(n * 7 <= 124'439'808 + 7 * off);
        CHECK(n * 7 + 7 * off >= 124'439'808);
      }
      for (std::size_t b = 0; b < layout.buckets(0); ++b) CHECK(layout.even(0, b));
    }
  }
}

TEST_CASE(
    "LC (reading): a total that divides by K, of tensors that don't, and the other way round") {
  CHECK(owned_by_rank(layout_of(parameters_of({13, 19}), 4)) == Sizes{8, 8, 8, 8});
  CHECK(owned_by_rank(layout_of(parameters_of({16, 17}), 4)) == Sizes{12, 12, 9, 0});
}

TEST_CASE("Muon PR 28: padded to the next multiple of K times alignment, not by the remainder") {
  const zero::Layout<> layout = layout_of(parameters_of({19}), 8);
  CHECK(layout.extent(0) == 32);
  for (int rank = 0; rank < 8; ++rank) CHECK(layout.slice(0, 0, rank).size() == 4);
  for (const int world : {1, 2, 3, 5, 8, 11}) {
    for (std::size_t n = 0; n < 200; ++n) {
      const std::size_t extent = layout_of(parameters_of({n}), world).extent(0);
      const std::size_t unit = 4 * static_cast<std::size_t>(world);
      if (extent % unit != 0 || extent < n || extent >= n + unit) {
        FAIL("n " << n << ", world " << world << ": padded to " << extent);
      }
    }
  }
}

TEST_CASE("NCCL #413, PT #195450, Horovod PR 3727: shards start and end on 16 bytes") {
  const std::vector<Sizes> all_sizes{{1}, {3}, {17}, {101, 7, 33}, {1, 1, 1, 1, 1}, {999, 0, 1001}};
  for (const Sizes& sizes : all_sizes) {
    for (int world = 1; world <= 16; ++world) {
      for (const std::size_t bytes : {2, 4, 8}) {
        for (const std::size_t bucket_bytes : {tiny_bucket, std::size_t{25} << 20}) {
          for (const zero::Attributes& attributes :
               {zero::Attributes{}, {.unsplittable = true}, {.quantum = 3}}) {
            const zero::Layout<> layout =
                layout_of(parameters_of(sizes, attributes), world,
                          {.element_bytes = bytes, .bucket_bytes = bucket_bytes});
            CAPTURE(sizes, world, bytes, bucket_bytes, attributes.quantum);
            bool aligned = true;
            for (std::size_t b = 0; b < layout.buckets(0); ++b) {
              for (int rank = 0; rank < world; ++rank) {
                const Interval slice = layout.slice(0, b, rank);
                aligned =
                    aligned && slice.begin * bytes % 16 == 0 && slice.size() * bytes % 16 == 0;
              }
            }
            CHECK(aligned);
            // In an array of all of a rank's slices, one after the other, too.
            bool shard_aligned = true;
            std::size_t shard = 0;
            for (int rank = 0; rank < world; ++rank) {
              shard_aligned = shard_aligned && layout.shard_elements(0, rank) * bytes % 16 == 0;
              shard += layout.shard_elements(0, rank);
            }
            CHECK(shard_aligned);
            CHECK(shard == layout.extent(0));
          }
        }
      }
    }
  }
}
