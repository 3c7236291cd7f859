// SPDX-License-Identifier: Apache-2.0
/// @file
/// What a step must know of all gradients before it may update anything.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>

#include "zero/detail/pack.hpp"
#include "zero/detail/square_sum.hpp"
#include "zero/element.hpp"

namespace zero::detail {

/// Whether there is no NaN nor infinity among the numbers.
template <class T>
[[nodiscard]] bool all_finite(std::span<const T> numbers) noexcept {
  using X = Pack<T>;
  // A number minus itself is 0, or NaN where it is not finite, which stays in the sum.
  std::array<X, 4> sums{X(0), X(0), X(0), X(0)};
  constexpr std::size_t block = 4 * X::width;
  std::size_t i = 0;
  for (; numbers.size() - i >= block; i += block) {
    for (std::size_t k = 0; k < 4; ++k) {
      const X x = X::load(numbers.data() + i + k * X::width);
      sums[k] = sums[k] + (x - x);
    }
  }
  T rest = 0;
  for (; i < numbers.size(); ++i) rest += numbers[i] - numbers[i];
  std::array<T, X::width> lanes;
  (sums[0] + sums[1] + (sums[2] + sums[3])).store(lanes.data());
  for (const T lane : lanes) rest += lane;
  return rest == 0;
}

/// One rank's findings over its own slices, or all ranks' together. Ranks exchange it as bytes.
struct Findings {
  SquareSum squares{};
  std::uint64_t finite = 1;

  /// @param measures whether the norm is asked for, too
  template <class T>
  void look_at(std::span<const T> summed, bool measures) noexcept {
    if (measures) {
      squares.add(summed);
    } else if (!detail::all_finite(summed)) {
      finite = 0;
    }
  }
  void add(const Findings& other) noexcept {
    squares.add(other.squares);
    finite &= other.finite;
  }
  [[nodiscard]] bool all_finite() const noexcept { return finite != 0 && squares.finite(); }
};

static_assert(std::is_trivially_copyable_v<Findings>);

}  // namespace zero::detail
