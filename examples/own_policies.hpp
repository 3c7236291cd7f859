// Policies of a user's own: a partition that cuts by speed, one that gives away whole tensors, and
// a bucket view. Each is a few lines; the concept's header says what it asks.
#pragma once

#include <cstddef>
#include <span>
#include <zero/zero.hpp>

/// For a rank 0 that has other work to do: it takes half as much as each of the others.
struct HalfOnRankZero {
  static constexpr bool cuts_tensors = true;

  [[nodiscard]] constexpr std::size_t cut(std::size_t elements, std::size_t alignment, int world,
                                          int rank) const {
    if (rank == world) return elements;  // not rounded: all of the bucket has an owner
    const auto halves = static_cast<std::size_t>(2 * world - 1);
    const auto before = static_cast<std::size_t>(rank == 0 ? 0 : 2 * rank - 1);
    return elements / alignment * before / halves * alignment;
  }
};
static_assert(zero::CuttingPartition<HalfOnRankZero>);

/// One tensor after the other to the next rank: fair where all have about one size.
struct RoundRobin {
  static constexpr bool cuts_tensors = false;

  constexpr void assign(std::span<const std::size_t> elements, std::span<std::size_t> loads,
                        std::span<int> owners) const {
    for (std::size_t i = 0; i < elements.size(); ++i) {
      const std::size_t rank = i % loads.size();
      owners[i] = static_cast<int>(rank);
      loads[rank] += elements[i];
    }
  }
};
static_assert(zero::WholeTensorPartition<RoundRobin>);

/// Gradients move into buckets, so that none is packed; values stay where the framework has them.
struct GradView {
  static constexpr zero::Residency values = zero::Residency::caller;
  static constexpr zero::Residency gradients = zero::Residency::arena;
  std::size_t bucket_bytes = 25 << 20;
};
static_assert(zero::BucketViewPolicy<GradView>);
