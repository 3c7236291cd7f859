// SPDX-License-Identifier: Apache-2.0
/// @file
/// The exact sum of squares of which a global norm is made.
#pragma once

#include <cstddef>
#include <span>
#include <type_traits>

#include "zero/config.hpp"
#include "zero/detail/exact_sum.hpp"
#include "zero/detail/fused_square_fold.hpp"
#include "zero/detail/square_fold.hpp"

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wpsabi"

namespace zero::detail {

/// The sum of squares of numbers, exact: its bytes depend on neither who summed what nor the
/// instruction set. Trivially copyable and of fixed size: ranks exchange it as bytes.
///
/// Under `-ffast-math`, which may reassociate sums, nothing of this holds. Where the processor is
/// told to take denormal numbers for zero, they may count as zero.
class SquareSum : public ExactSum {
 public:
  using ExactSum::add;
  /// Exact.
  template <std::size_t bytes = square_vector_bytes>
  void add(std::span<const float> values) noexcept;
  /// Exact sums of the squares, each rounded to double: beyond 1.3e154 it is infinite, below
  /// 1e-162 zero, and below 1.5e-154 it has fewer digits.
  template <std::size_t bytes = square_vector_bytes>
  void add(std::span<const double> values) noexcept;
};
static_assert(std::is_trivially_copyable_v<SquareSum> && sizeof(SquareSum) == 280);

#if ZERO_VECTOR_TYPES

template <class T, std::size_t bytes>
[[gnu::flatten, gnu::noinline]] void add_squares_baseline(ExactSum& sum, const T* values,
                                                          std::size_t count) {
  add_square_blocks<T, bytes>(sum, values, count);
}

#if ZERO_AVX2_CLONES
template <class T>
[[gnu::target("avx2"), gnu::flatten, gnu::noinline]] void add_squares_avx2(ExactSum& sum,
                                                                           const T* values,
                                                                           std::size_t count) {
  add_square_blocks<T, 32>(sum, values, count);
}
#endif

#endif

/// By the widest vectors that the processor has.
template <std::size_t bytes, class T>
void add_squares(ExactSum& sum, std::span<const T> values) noexcept {
#if ZERO_VECTOR_TYPES
  if constexpr (bytes != 0) {
#if ZERO_FUSED_SQUARES
    if constexpr (std::is_same_v<T, float>) {
      if (can_fold(SquareFold::modular))
        return add_squares_at_once<SquareFold::modular, bytes>(sum, values.data(), values.size());
      if (can_fold(SquareFold::fused))
        return add_squares_at_once<SquareFold::fused, bytes>(sum, values.data(), values.size());
    }
#endif
#if ZERO_AVX2_CLONES
    if (__builtin_cpu_supports("avx2")) {
      return add_squares_avx2(sum, values.data(), values.size());
    }
#endif
    return add_squares_baseline<T, bytes>(sum, values.data(), values.size());
  }
#endif
  if constexpr (std::is_same_v<T, float>) {
    add_by_exponent(sum, values);
  } else {
    for (const T value : values) add_term(sum, value * value);
  }
}

template <std::size_t bytes>
void SquareSum::add(std::span<const float> values) noexcept {
  add_squares<bytes>(*this, values);
}
template <std::size_t bytes>
void SquareSum::add(std::span<const double> values) noexcept {
  add_squares<bytes>(*this, values);
}

}  // namespace zero::detail

#pragma GCC diagnostic pop
