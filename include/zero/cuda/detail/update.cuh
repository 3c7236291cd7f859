// SPDX-License-Identifier: Apache-2.0
/// @file
/// The fused update: one launch steps all of a rank's fragments by an update rule.
#pragma once

#include <cstddef>
#include <cstdint>

#include "zero/config.hpp"
#include "zero/cuda/detail/fragments.cuh"
#include "zero/cuda/stream.hpp"
#include "zero/detail/storage.hpp"
#include "zero/optimizer.hpp"

namespace zero::cuda::detail {

template <class Rule, class S>
using rule_scalars = typename Rule::template Scalars<typename S::arithmetic>;

/// @tparam S a `zero::detail::Storage`
template <class Rule, class S>
struct UpdateTask {
  using value = typename S::value;
  using arithmetic = typename S::arithmetic;

  const DeviceFragment<value>* fragments;
  const Chunk* chunks;
  std::size_t chunk_count;
  typename S::master* master;  ///< null where values are stepped as they lie
  /// Null beyond the slots that some fragment's options use.
  typename S::slot* state[zero::detail::slot_count<Rule> + 1];
  const arithmetic* sums;                             ///< null: of the fragments' own gradients
  const ParameterStep<rule_scalars<Rule, S>>* steps;  ///< by parameter
  const StepState* step;
  std::uint64_t seed;  ///< of stochastic rounding
};

/// Steps all fragments whose parameters are stepping, unless the step is skipped: with the bits
/// that the host's `update_elements` gives, provided that neither compiler contracts products and
/// sums. A fragment without a gradient, where there are no sums, has zeros.
template <class Rule, class S>
void update(const UpdateTask<Rule, S>& task, StreamView stream);

}  // namespace zero::cuda::detail
