// SPDX-License-Identifier: Apache-2.0
/// @file
/// How much is sharded (ZeRO, Rajbhandari et al., arXiv:1910.02054).
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace zero {

/// Intent: name what each rank keeps only its own 1/K of, as three constants.
///  1. `S::shards_state`: the optimizer's slots.
///  2. `S::shards_gradients`, only together with the state.
///  3. `S::shards_values`, only together with the gradients.
///
/// A minimal model:
/// @code
/// struct StateAlone {  // what zero::Stage1 is
///   static constexpr bool shards_state = true;
///   static constexpr bool shards_gradients = false;
///   static constexpr bool shards_values = false;
/// };
/// @endcode
template <class S>
concept StagePolicy = std::copyable<S> && requires {
  typename std::bool_constant<S::shards_state>;
  typename std::bool_constant<S::shards_gradients>;
  typename std::bool_constant<S::shards_values>;
  requires std::bool_constant<S::shards_state>::value ||
               !std::bool_constant<S::shards_gradients>::value;
  requires std::bool_constant<S::shards_gradients>::value ||
               !std::bool_constant<S::shards_values>::value;
};

/// No sharding, what plain data parallelism does: every rank keeps and steps everything. The
/// baseline, with the same bits.
struct Replicated {
  static constexpr bool shards_state = false;
  static constexpr bool shards_gradients = false;
  static constexpr bool shards_values = false;
};

/// Each rank keeps the optimizer state of its shard, steps it, and gathers the others' parameters.
struct Stage1 {
  static constexpr bool shards_state = true;
  static constexpr bool shards_gradients = false;
  static constexpr bool shards_values = false;
};

/// How the gradients of several backward passes become those of one step.
enum class Accumulation : std::uint8_t {
  /// Each rank adds up its own, whole; they are reduced once, in the last backward. No traffic
  /// before that, but memory for all gradients. The default of `Replicated` and `Stage1`.
  local,
  /// Each backward's are reduced, and added to the sums that a rank keeps of its own part. Traffic
  /// in each backward, and memory for a few buckets. Only `Stage2` and `Stage3` have it, as their
  /// default.
  sharded,
};

/// As `Stage1`, and gradients live only until they are reduced: backward writes them to memory that
/// the optimizer leases (`ZeroSharded::gradient`), and a communication thread reduces each bucket
/// as soon as its turn comes and gives its memory back. What stays is the sum of the own part.
/// The pool is about two buckets, and without a view that moves values staging is another: a model
/// that is not many times as large saves nothing, so give it smaller buckets (or units).
///
/// Buckets are reduced in one order on all ranks: last parameters first in the first step, and from
/// then on as they became ready in that. Needs a communicator that can be used from several threads
/// (`Duplicable`).
struct Stage2 {
  static constexpr bool shards_state = true;
  static constexpr bool shards_gradients = true;
  static constexpr bool shards_values = false;
  /// Bytes that gradients may take before they are reduced. 0: room for two buckets and for tied
  /// parameters, and more where the order of gradients needs it. A number is kept: whoever needs
  /// more waits until buckets on their way have been reduced, and makes the peers wait; where none
  /// is, the order in which gradients are made needs more than there is (`PoolExhausted`).
  std::size_t pool_bytes = 0;
};

/// As `Stage2`, and a rank keeps of the values only its own part: `ZeroSharded::acquire` gathers a
/// unit (`Attributes::unit`), `release` lets go of it. Values must be the optimizer's to place, so
/// parameters must be rebindable (`ShapedParam`, where there is no framework that could be).
struct Stage3 {
  static constexpr bool shards_state = true;
  static constexpr bool shards_gradients = true;
  static constexpr bool shards_values = true;
  std::size_t pool_bytes = 0;  ///< as `Stage2::pool_bytes`
  /// Units of at most so many bytes stay whole on every rank, as at stage 2.
  std::size_t resident_bytes = 0;
  /// How many units are gathered ahead of the one that is acquired, in the order of the step
  /// before. They stay until they are acquired, or until the next step.
  std::size_t prefetch = 1;
};

static_assert(StagePolicy<Replicated> && StagePolicy<Stage1>);
static_assert(StagePolicy<Stage2> && StagePolicy<Stage3>);

namespace detail {

/// A policy may name only the three constants: then it has the defaults of the rest.
template <class Stage>
[[nodiscard]] constexpr std::size_t pool_bytes(const Stage& stage) {
  if constexpr (requires { stage.pool_bytes; }) return stage.pool_bytes;
  return 0;
}
template <class Stage>
[[nodiscard]] constexpr std::size_t resident_bytes(const Stage& stage) {
  if constexpr (requires { stage.resident_bytes; }) return stage.resident_bytes;
  return 0;
}
template <class Stage>
[[nodiscard]] constexpr std::size_t prefetched_units(const Stage& stage) {
  if constexpr (requires { stage.prefetch; }) return stage.prefetch;
  return 1;
}

template <class Stage>
inline constexpr Accumulation default_accumulation =
    Stage::shards_gradients ? Accumulation::sharded : Accumulation::local;

}  // namespace detail

}  // namespace zero
