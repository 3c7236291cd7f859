// SPDX-License-Identifier: Apache-2.0
/// @file
/// Who owns what: policies that cut buckets into one slice a rank, or give whole tensors to ranks.
#pragma once

#include <concepts>
#include <cstddef>
#include <span>
#include <type_traits>

namespace zero {

/// Cuts anywhere. Intent: balance to within one alignment unit, whatever the shapes.
///
///  1. `P::cuts_tensors` is true.
///  2. `cut(elements, alignment, world, rank)` is where rank's slice of a bucket of `elements`
///     starts; `cut(…, world)` is where the last one ends. It starts at 0, ends at `elements`,
///     never falls as `rank` rises, and lies on multiples of `alignment` except at the end.
///  3. It is a pure function, the same on all ranks: every rank computes every rank's slice. The
///     layout refuses one that breaks 2, and construction one that differs between ranks.
///  4. optionally `P::even`: whether all slices are equal where `elements` is a multiple of
///     `world * alignment`. Even buckets use the even collectives. Default: false.
///
/// The layout moves a cut down to where a parameter's `unsplittable` and `quantum` allow one.
///
/// A minimal model, everything on rank 0:
/// @code
/// struct FirstRankOnly {
///   static constexpr bool cuts_tensors = true;
///   constexpr std::size_t cut(std::size_t n, std::size_t, int, int rank) const {
///     return rank == 0 ? 0 : n;
///   }
/// };
/// @endcode
template <class P>
concept CuttingPartition = std::copyable<P> && requires(const P& policy, std::size_t n, int rank) {
  requires std::bool_constant<P::cuts_tensors>::value;
  { policy.cut(n, n, rank, rank) } -> std::same_as<std::size_t>;
};

/// Gives whole tensors to ranks: what a whole-tensor optimizer needs.
///
///  1. `P::cuts_tensors` is false.
///  2. `assign(elements, loads, owners)`: `elements[i]` is the size of a parameter group's i-th
///     trainable tensor in registration order, `loads[r]` how many elements rank r owns already, of
///     all element types (to be added to), `owners[i]` the rank it chooses. A pure function, so
///     that every rank computes the same.
///
/// The layout calls `assign` once for every group that has trainable tensors, in rising order, and
/// again for groups added later; loads carry over from call to call.
///
/// A minimal model:
/// @code
/// struct RoundRobin {
///   static constexpr bool cuts_tensors = false;
///   constexpr void assign(std::span<const std::size_t> elements, std::span<std::size_t> loads,
///                         std::span<int> owners) const {
///     for (std::size_t i = 0; i < elements.size(); ++i) {
///       const std::size_t rank = i % loads.size();
///       loads[rank] += elements[i];
///       owners[i] = static_cast<int>(rank);
///     }
///   }
/// };
/// @endcode
template <class P>
concept WholeTensorPartition =
    std::copyable<P> && requires(const P& policy, std::span<const std::size_t> elements,
                                 std::span<std::size_t> loads, std::span<int> owners) {
      requires !std::bool_constant<P::cuts_tensors>::value;
      policy.assign(elements, loads, owners);
    };

/// Either kind.
template <class P>
concept PartitionPolicy = CuttingPartition<P> || WholeTensorPartition<P>;

}  // namespace zero
