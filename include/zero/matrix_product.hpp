// SPDX-License-Identifier: Apache-2.0
/// @file
/// The matrix product that optimizers such as Muon are built on: what it must offer, and a plain
/// one.
#pragma once

#include <concepts>
#include <cstddef>

#include "zero/detail/blocked_product.hpp"

namespace zero {

/// Whether an operand is taken as it lies in memory or transposed.
enum class Transpose : bool { no, yes };

/// Multiplies matrices of `T` on the host. All are row-major without gaps.
///
/// `multiply(m, n, k, a, b, transpose_b, c) const` sets c = a b, or a b^T where `transpose_b` says
/// so: c is m x n, a is m x k, and b lies in memory as k x n, or as n x k where it is transposed.
/// No extent is 0. c overlaps neither a nor b, which may be the same; what c held is arbitrary, NaN
/// included. Nothing throws. The bits of c depend on the numbers and extents alone, not on where
/// the matrices lie, since any rank may be the one that computes them.
///
/// Optionally `static constexpr std::size_t max_extent`: larger ones it can't take.
///
/// A minimal model:
/// @code
/// struct NaiveProduct {
///   template <class T>
///   void multiply(std::size_t m, std::size_t n, std::size_t k, const T* a, const T* b,
///                 zero::Transpose transpose_b, T* c) const {
///     const bool transposed = transpose_b == zero::Transpose::yes;
///     for (std::size_t i = 0; i < m; ++i) {
///       for (std::size_t j = 0; j < n; ++j) {
///         T sum = 0;
///         for (std::size_t p = 0; p < k; ++p) {
///           sum += a[i * k + p] * (transposed ? b[j * k + p] : b[p * n + j]);
///         }
///         c[i * n + j] = sum;
///       }
///     }
///   }
/// };
/// @endcode
template <class P, class T = float>
concept MatrixProduct = std::copyable<P> && requires(const P& product, std::size_t extent,
                                                     const T* operand, T* result) {
  product.multiply(extent, extent, extent, operand, operand, Transpose::yes, result);
};

/// Needs no library. Each element of the product is summed in order, with a rounding after each
/// multiplication and each addition: the same bits on every processor (without contraction into
/// fused multiply-adds, which a user's flags may allow), which also costs half of a BLAS's peak.
struct PlainProduct {
  template <std::floating_point T>
  void multiply(std::size_t m, std::size_t n, std::size_t k, const T* a, const T* b,
                Transpose transpose_b, T* c) const {
    if (transpose_b == Transpose::yes) {
      detail::blocked_product(m, n, k, a, b, 1, k, c);
    } else {
      detail::blocked_product(m, n, k, a, b, n, 1, c);
    }
  }
};

static_assert(MatrixProduct<PlainProduct, float> && MatrixProduct<PlainProduct, double>);

}  // namespace zero
