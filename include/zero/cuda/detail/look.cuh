// SPDX-License-Identifier: Apache-2.0
/// @file
/// One pass over gradients: their exact sum of squares, and whether all are finite.
#pragma once

#include <cstddef>
#include <cstdint>

#include "zero/config.hpp"
#include "zero/cuda/detail/fragments.cuh"
#include "zero/cuda/stream.hpp"
#include "zero/detail/exact_sum.hpp"
#include "zero/element.hpp"

namespace zero::cuda::detail {

/// A sum that blocks add to, without rounding: digit d counts multiples of 2^(32 d - 1074). Digits
/// may grow to 64 bits and hand over what is more, so any number of additions is safe. Zeros before
/// the first.
struct DeviceDigits {
  static constexpr unsigned count = 68;
  static constexpr unsigned long long infinite = 1;
  static constexpr unsigned long long nan = 2;

  unsigned long long digit[count];
  unsigned long long flags;  ///< which of the above were among the terms
};

/// @tparam T the elements' type; sums have its arithmetic type
template <Element T>
struct LookTask {
  const DeviceFragment<T>* fragments;
  const Chunk* chunks;
  std::size_t chunk_count;
  const arithmetic_t<T>* sums;  ///< null: the fragments' own gradients, those that have one
  DeviceDigits* digits;         ///< what is found is added
};

/// Adds the squares as the host's `SquareSum` does, to the bit.
template <Element T>
void add_squares(const LookTask<T>& task, StreamView stream);

/// Sets flags alone. Of numbers as they are: doubles whose square is infinite are finite.
template <Element T>
void find_not_finite(const LookTask<T>& task, StreamView stream);

/// The sum in the form that ranks exchange.
ZERO_HOST_DEVICE inline zero::detail::ExactSum to_exact_sum(const DeviceDigits& digits);

}  // namespace zero::cuda::detail
