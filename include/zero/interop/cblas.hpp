// SPDX-License-Identifier: Apache-2.0
/// @file
/// Matrix products by a BLAS. Needs its <cblas.h> and linking with it, such as by -lopenblas.
#pragma once

#include <cblas.h>

#include <cstddef>
#include <limits>

#include "zero/matrix_product.hpp"

namespace zero {

/// `cblas_sgemm` and `cblas_dgemm`: `BasicMuon<CblasProduct>`.
///
/// Which bits they give is up to the library. OpenBLAS and MKL pick kernels by processor and number
/// of threads, so that a tensor updated by another rank may differ in the last places where ranks'
/// machines or thread counts do. All ranks still agree, since one rank's result goes to all.
struct CblasProduct {
  /// The interface's int.
  static constexpr std::size_t max_extent = std::numeric_limits<int>::max();

  void multiply(std::size_t m, std::size_t n, std::size_t k, const float* a, const float* b,
                Transpose transpose_b, float* c) const {
    call(cblas_sgemm, m, n, k, a, b, transpose_b, c);
  }
  void multiply(std::size_t m, std::size_t n, std::size_t k, const double* a, const double* b,
                Transpose transpose_b, double* c) const {
    call(cblas_dgemm, m, n, k, a, b, transpose_b, c);
  }

 private:
  template <class Gemm, class T>
  static void call(Gemm gemm, std::size_t m, std::size_t n, std::size_t k, const T* a, const T* b,
                   Transpose transpose_b, T* c) {
    const bool transposed = transpose_b == Transpose::yes;
    const auto extent = [](std::size_t x) { return static_cast<int>(x); };
    gemm(CblasRowMajor, CblasNoTrans, transposed ? CblasTrans : CblasNoTrans, extent(m), extent(n),
         extent(k), T(1), a, extent(k), b, extent(transposed ? k : n), T(0), c, extent(n));
  }
};

static_assert(MatrixProduct<CblasProduct, float> && MatrixProduct<CblasProduct, double>);

}  // namespace zero
