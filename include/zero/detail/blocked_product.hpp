// SPDX-License-Identifier: Apache-2.0
/// @file
/// A matrix product in blocks that stay in cache, on one thread.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <type_traits>
#include <utility>

#include "zero/config.hpp"
#include "zero/detail/pack.hpp"
#include "zero/detail/with_packs.hpp"

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wpsabi"

namespace zero::detail {

/// A tile of c, that many rows by two packs, is summed in registers. It takes `product_depth`
/// products an element before the next one, so that the part of b that it needs, 16 KiB of floats,
/// stays in the fastest cache for the tiles below.
inline constexpr std::size_t tile_rows = 4;
inline constexpr std::size_t product_depth = 256;

/// Adds `depth` products to each element of a tile of c, in order.
/// @param a `rows` rows, of which `depth` elements are used, `a_stride` apart
/// @param strip of b: `depth` rows of two packs
/// @param c `rows` rows of two packs, `c_stride` apart
template <class X, std::size_t... row, class T = typename X::value_type>
[[gnu::always_inline]] inline void add_tile(const T* a, std::size_t a_stride, const T* strip,
                                            std::size_t depth, T* c, std::size_t c_stride,
                                            std::index_sequence<row...>) {
  X left[] = {X::load(c + row * c_stride)...};
  X right[] = {X::load(c + row * c_stride + X::width)...};
  for (std::size_t p = 0; p < depth; ++p) {
    const X b_left = X::load(strip + p * 2 * X::width);
    const X b_right = X::load(strip + p * 2 * X::width + X::width);
    const auto add = [&](X& to_left, X& to_right, T factor) {
      const X broadcast(factor);
      to_left += broadcast * b_left;
      to_right += broadcast * b_right;
    };
    (add(left[row], right[row], a[row * a_stride + p]), ...);
  }
  (left[row].store(c + row * c_stride), ...);
  (right[row].store(c + row * c_stride + X::width), ...);
}

/// Copies `depth` rows of `used` columns to where they lie together, zeros in the other columns.
template <std::size_t columns, class T>
[[gnu::always_inline]] inline void pack_strip(const T* b, std::size_t row, std::size_t column,
                                              std::size_t depth, std::size_t used, T* strip) {
  if (used < columns) std::fill_n(strip, depth * columns, T(0));
  if (column == 1) {
    for (std::size_t q = 0; q < depth; ++q) std::copy_n(b + q * row, used, strip + q * columns);
  } else {
    for (std::size_t l = 0; l < used; ++l) {
      for (std::size_t q = 0; q < depth; ++q) strip[q * columns + l] = b[q * row + l * column];
    }
  }
}

/// c = a b, c being m x n, a m x k, both row-major; element p, j of b lies at p * row + j * column.
/// Every element is summed in order of p, whatever the blocks: the bits are those of three loops.
template <class X, class T = typename X::value_type>
[[gnu::always_inline]] inline void blocked_product_with(std::size_t m, std::size_t n, std::size_t k,
                                                        const T* a, const T* b, std::size_t row,
                                                        std::size_t column, T* c) {
  constexpr std::size_t columns = 2 * X::width;
  alignas(64) T strip[product_depth * columns];
  alignas(64) T edge[tile_rows * columns] = {};
  std::fill_n(c, m * n, T(0));
  for (std::size_t p = 0; p < k; p += product_depth) {
    const std::size_t depth = std::min(product_depth, k - p);
    for (std::size_t j = 0; j < n; j += columns) {
      const std::size_t used = std::min(columns, n - j);
      pack_strip<columns>(b + p * row + j * column, row, column, depth, used, strip);
      const auto add_rows = [&]<std::size_t rows>(std::size_t i,
                                                  std::integral_constant<std::size_t, rows>) {
        constexpr std::make_index_sequence<rows> all_rows;
        const T* from = a + i * k + p;
        T* to = c + i * n + j;
        if (used == columns) return add_tile<X>(from, k, strip, depth, to, n, all_rows);
        // At the right edge a tile is wider than what is left of c.
        for (std::size_t r = 0; r < rows; ++r) std::copy_n(to + r * n, used, edge + r * columns);
        add_tile<X>(from, k, strip, depth, edge, columns, all_rows);
        for (std::size_t r = 0; r < rows; ++r) std::copy_n(edge + r * columns, used, to + r * n);
      };
      std::size_t i = 0;
      for (; i + tile_rows <= m; i += tile_rows)
        add_rows(i, std::integral_constant<std::size_t, tile_rows>{});
      for (; i < m; ++i) add_rows(i, std::integral_constant<std::size_t, 1>{});
    }
  }
}

template <class T>
void blocked_product(std::size_t m, std::size_t n, std::size_t k, const T* a, const T* b,
                     std::size_t row, std::size_t column, T* c) {
  with_packs<T>([&]<class X>(std::type_identity<X>) {
    blocked_product_with<X>(m, n, k, a, b, row, column, c);
  });
}

}  // namespace zero::detail

#pragma GCC diagnostic pop
