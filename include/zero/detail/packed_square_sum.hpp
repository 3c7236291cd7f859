// SPDX-License-Identifier: Apache-2.0
/// @file
/// A sum of squares in double, over packs.
#pragma once

#include <cstddef>
#include <type_traits>

#include "zero/config.hpp"
#include "zero/detail/pack.hpp"

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wpsabi"

namespace zero::detail {

#if ZERO_SSE2 && ZERO_VECTOR_TYPES

/// Four floats as doubles, in one instruction: what the compiler makes of `__builtin_convertvector`
/// in a function that is later inlined into an AVX2 clone takes four. By reference, see `sqrt_avx`.
#if ZERO_AVX2_CLONES
[[gnu::target("avx2")]]
#endif
inline void widen_avx(const VectorOf<float, 16>::type& x, VectorOf<double, 32>::type& wide) {
  asm("vcvtps2pd {%1, %0|%0, %1}" : "=x"(wide) : "x"(x));
}

#endif

/// Sums squares in double, one sum a lane, so that number i of an array goes to sum i % width: the
/// order, and with it the bits, is fixed by the array's length.
/// @tparam X a pack of float or double
template <class X>
class PackedSquareSum {
 public:
  [[gnu::always_inline]] void add(const X& x) {
#if ZERO_VECTOR_TYPES
    if constexpr (std::is_same_v<typename X::value_type, float>) {
      Doubles low, high;
      widen(__builtin_shufflevector(x.lanes, x.lanes, 0, 1, 2, 3), low);
      widen(__builtin_shufflevector(x.lanes, x.lanes, 4, 5, 6, 7), high);
      sums_[0] += low * low;
      sums_[1] += high * high;
    } else {
      sums_[0] += x.lanes * x.lanes;
    }
#else
    for (std::size_t i = 0; i < X::width; ++i) {
      const auto number = static_cast<double>(x.lanes[i]);
      sums_[i / 4][i % 4] += number * number;
    }
#endif
  }

  [[nodiscard, gnu::always_inline]] double total() const {
    double total = 0;
    for (std::size_t i = 0; i < X::width; ++i) total += sums_[i / 4][i % 4];
    return total;
  }

 private:
#if ZERO_VECTOR_TYPES
  using Doubles = typename VectorOf<double, 32>::type;

  [[gnu::always_inline]] static void widen(const typename VectorOf<float, 16>::type& x,
                                           Doubles& wide) {
#if ZERO_SSE2
    if constexpr (std::is_same_v<X, typename X::InAvx>) return widen_avx(x, wide);
#endif
    wide = __builtin_convertvector(x, Doubles);
  }
#else
  using Doubles = double[4];
#endif
  static_assert(X::width % 4 == 0);
  Doubles sums_[X::width / 4] = {};
};

}  // namespace zero::detail

#pragma GCC diagnostic pop
