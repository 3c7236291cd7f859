// SPDX-License-Identifier: Apache-2.0
/// @file
/// Muon: momentum, orthogonalised, for matrices.
#pragma once

#include <algorithm>
#include <array>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "zero/detail/options.hpp"
#include "zero/error.hpp"
#include "zero/math.hpp"
#include "zero/matrix_product.hpp"
#include "zero/optimizer.hpp"

namespace zero {

/// How Muon's step grows with a matrix's size; under PyTorch's names.
enum class MuonLrAdjustment : std::uint8_t {
  original,         ///< lr * sqrt(max(1, rows / columns)): Jordan
  match_rms_adamw,  ///< lr * 0.2 sqrt(max(rows, columns)), so that AdamW's lr fits: Liu et al.
};

/// Jordan et al., "Muon" (https://kellerjordan.github.io/posts/muon/), with the weight decay of Liu
/// et al. (arXiv:2502.16982) and PyTorch's options (torch.optim.Muon) and form of momentum:
///
///     buffer = momentum buffer + (1 - momentum) g
///     u = nesterov ? momentum buffer + (1 - momentum) g : buffer
///     value = (1 - lr * weight_decay) value - adjusted lr * NewtonSchulz(u)
///
/// NewtonSchulz brings u's singular values near 1: X = u / (|u| + eps), |u| being the Frobenius
/// norm, summed in double; then `ns_steps` times, with (a, b, c) = `ns_coefficients`,
///
///     A = X X^T,   X = a X + (b A + c A A) X
///
/// on u's transpose where it has more rows than columns. Unlike the original and PyTorch, which do
/// this in bfloat16, it is computed in T; and |u| + eps is the original's, where PyTorch takes
/// max(|u|, eps).
///
/// A tensor of shape [d0, d1, ...] is taken as a matrix of d0 rows. One of fewer than two
/// dimensions is refused: biases, gains and the like, and by the authors' advice embeddings and the
/// last layer too, belong to another optimizer, such as AdamW: a second store, a second
/// `ZeroSharded` over the same communicator, stepped in the same order on all ranks. Each then
/// clips by the norm of its own gradients.
///
/// @tparam Product the matrix product, which nearly all time is spent in
template <class Product = PlainProduct>
struct BasicMuon {
  double lr = 1e-3;
  double weight_decay = 0.1;
  double momentum = 0.95;
  bool nesterov = true;
  std::array<double, 3> ns_coefficients{3.4445, -4.7750, 2.0315};
  double eps = 1e-7;
  int ns_steps = 5;
  MuonLrAdjustment adjust_lr = MuonLrAdjustment::original;
  [[no_unique_address]] Product product{};

  static constexpr std::string_view name = "Muon";
  static constexpr std::array<std::string_view, 1> slots{"momentum_buffer"};
  [[nodiscard]] constexpr std::size_t used_slots() const { return momentum != 0 ? 1 : 0; }

  template <class Self, class F>
  static constexpr void for_each_option(Self& self, F&& f) {
    f("lr", self.lr);
    f("weight_decay", self.weight_decay);
    f("momentum", self.momentum);
    f("nesterov", self.nesterov);
    f("eps", self.eps);
    f("ns_steps", self.ns_steps);
    f("adjust_lr", self.adjust_lr);
    f("ns_coefficient_0", self.ns_coefficients[0]);
    f("ns_coefficient_1", self.ns_coefficients[1]);
    f("ns_coefficient_2", self.ns_coefficients[2]);
  }

  /// Throws `UsageError` for a negative or NaN number, a momentum outside [0, 1) and, as PyTorch
  /// does, for 100 steps or more.
  void validate() const {
    detail::require_non_negative("Muon", "lr", lr);
    detail::require_non_negative("Muon", "weight_decay", weight_decay);
    detail::require_fraction("Muon", "momentum", momentum);
    for (const double coefficient : ns_coefficients) {
      if (!(coefficient - coefficient == 0)) {
        detail::refuse_option("Muon", "a number of ns_coefficients", coefficient,
                              "a finite number");
      }
    }
    detail::require_non_negative("Muon", "eps", eps);
    if (ns_steps < 0 || ns_steps >= 100) {
      detail::refuse_option("Muon", "ns_steps", ns_steps, "at least 0 and below 100");
    }
  }

  /// Throws `UsageError` for fewer than two dimensions, and for more than the matrix product takes.
  void validate(std::span<const std::size_t> shape) const {
    if (shape.size() < 2) {
      throw UsageError(
          "Muon takes tensors of at least 2 dimensions, but this one has " +
          std::to_string(shape.size()) +
          "; give it to another optimizer over the same communicator, for example AdamW, and step "
          "both in the same order on all ranks");
    }
    if constexpr (requires { Product::max_extent; }) {
      const Matrix matrix(shape);
      if (std::max(matrix.rows, matrix.columns) > Product::max_extent) {
        throw UsageError("Muon's matrix product takes at most " +
                         std::to_string(Product::max_extent) + " rows and columns, but this " +
                         "tensor has " + std::to_string(matrix.rows) + " and " +
                         std::to_string(matrix.columns) +
                         "; use another product, for example zero::PlainProduct, or optimizer");
      }
    }
  }

  /// X, a product of X's size, and one of A's.
  [[nodiscard]] constexpr std::size_t workspace(std::span<const std::size_t> shape) const {
    const Matrix matrix(shape);
    const std::size_t less = std::min(matrix.rows, matrix.columns);
    return 2 * matrix.rows * matrix.columns + less * less;
  }

  template <std::floating_point T>
    requires MatrixProduct<Product, T>
  void update(TensorRef<T> tensor, std::array<std::span<T>, 1> state, std::int64_t) const {
    const std::size_t count = tensor.values.size();
    if (count == 0) return;
    const auto [rows, columns] = Matrix(tensor.shape);
    // As long as it is wide, or wider: A is then the smaller of the two squares that it might be.
    const bool transposed = rows > columns;
    T* const x = tensor.workspace.data();
    T* const scratch = x + count;

    T* const direction = transposed ? scratch : x;
    find_direction(tensor.gradient, state[0], direction);
    if (transposed) transpose(rows, columns, scratch, x);
    orthogonalize(std::min(rows, columns), std::max(rows, columns), x, scratch, scratch + count);
    if (transposed) transpose(columns, rows, x, scratch);

    const auto keep = static_cast<T>(1 - lr * weight_decay);
    const auto step = static_cast<T>(lr * lr_factor(rows, columns));
    for (std::size_t i = 0; i < count; ++i) {
      tensor.values[i] = tensor.values[i] * keep - direction[i] * step;
    }
  }

 private:
  /// What a tensor is taken as.
  struct Matrix {
    std::size_t rows = 1, columns = 1;
    explicit constexpr Matrix(std::span<const std::size_t> shape) {
      if (shape.empty()) return;
      rows = shape[0];
      for (const std::size_t extent : shape.subspan(1)) columns *= extent;
    }
  };

  [[nodiscard]] double lr_factor(std::size_t rows, std::size_t columns) const {
    const auto r = static_cast<double>(rows), c = static_cast<double>(columns);
    if (adjust_lr == MuonLrAdjustment::match_rms_adamw) return 0.2 * zero::sqrt(std::max(r, c));
    return zero::sqrt(std::max(1., r / c));
  }

  /// Brings the momentum up to date and gives u.
  template <class T>
  void find_direction(std::span<const T> gradient, std::span<T> buffer, T* u) const {
    if (momentum == 0) {
      std::ranges::copy(gradient, u);
      return;
    }
    const auto decay = static_cast<T>(momentum), gain = static_cast<T>(1 - momentum);
    for (std::size_t i = 0; i < gradient.size(); ++i) {
      buffer[i] = buffer[i] * decay + gradient[i] * gain;
      u[i] = nesterov ? buffer[i] * decay + gradient[i] * gain : buffer[i];
    }
  }

  /// The Newton-Schulz iteration on `x`, m x n.
  /// @param product_x m x n elements of scratch memory
  /// @param polynomial m x m elements of scratch memory
  template <class T>
  void orthogonalize(std::size_t m, std::size_t n, T* x, T* product_x, T* polynomial) const {
    const std::size_t count = m * n;
    double squares = 0;
    for (std::size_t i = 0; i < count; ++i) {
      const auto number = static_cast<double>(x[i]);
      squares += number * number;
    }
    // Only nothing at all stays nothing: a NaN must be seen.
    // In double, since the inverse of a tiny norm may be more than T holds.
    const double scale = squares == 0 ? 0 : 1 / (zero::sqrt(squares) + eps);
    for (std::size_t i = 0; i < count; ++i) x[i] = static_cast<T>(x[i] * scale);

    const auto a = static_cast<T>(ns_coefficients[0]), b = static_cast<T>(ns_coefficients[1]),
               c = static_cast<T>(ns_coefficients[2]);
    T* const gram = product_x;  // read for the last time before the product with x is written
    for (int step = 0; step < ns_steps; ++step) {
      product.multiply(m, m, n, x, x, Transpose::yes, gram);
      product.multiply(m, m, m, gram, gram, Transpose::no, polynomial);
      for (std::size_t i = 0; i < m * m; ++i) polynomial[i] = gram[i] * b + polynomial[i] * c;
      product.multiply(m, n, m, polynomial, x, Transpose::no, product_x);
      for (std::size_t i = 0; i < count; ++i) x[i] = x[i] * a + product_x[i];
    }
  }

  /// In blocks, since one side always jumps by whole rows.
  template <class T>
  static void transpose(std::size_t rows, std::size_t columns, const T* from, T* to) {
    constexpr std::size_t block = 16;
    for (std::size_t i = 0; i < rows; i += block) {
      const std::size_t last_row = std::min(i + block, rows);
      for (std::size_t j = 0; j < columns; j += block) {
        const std::size_t last_column = std::min(j + block, columns);
        for (std::size_t r = i; r < last_row; ++r) {
          for (std::size_t c = j; c < last_column; ++c) to[c * rows + r] = from[r * columns + c];
        }
      }
    }
  }
};

/// With the library's own matrix product. `BasicMuon<CblasProduct>`, of zero/interop/cblas.hpp, is
/// faster.
using Muon = BasicMuon<>;

static_assert(WholeTensorOptimizer<Muon, float> && WholeTensorOptimizer<Muon, double>);

}  // namespace zero
