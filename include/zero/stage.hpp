// SPDX-License-Identifier: Apache-2.0
/// @file
/// How much is sharded (ZeRO, Rajbhandari et al., arXiv:1910.02054).
#pragma once

#include <concepts>
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

static_assert(StagePolicy<Replicated> && StagePolicy<Stage1>);

}  // namespace zero
