// SPDX-License-Identifier: Apache-2.0
/// @file
/// Where values and gradients live, and in how large buckets they travel.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <type_traits>

namespace zero {

/// Who owns the memory of values or gradients.
enum class Residency : std::uint8_t {
  caller,  ///< it stays where the framework put it
  /// One array of the optimizer's, laid out as the layout says. Where the stage shards what is in
  /// it, there is memory only for what is needed at the moment.
  arena,
};

/// A size in bytes, written `25_MiB`.
inline namespace literals {
[[nodiscard]] consteval std::size_t operator""_KiB(unsigned long long n) { return n << 10; }
[[nodiscard]] consteval std::size_t operator""_MiB(unsigned long long n) { return n << 20; }
}  // namespace literals

/// Stands where a bucket's size stands, `NoView{PerTensor{}}`, and says: every tensor is a bucket
/// of its own, however large or small, as where peers communicate tensor by tensor.
///
/// Costs: many messages, so that a model's small tensors (norms, biases) each pay the network's
/// latency; and staging buckets as large as the largest tensor. Where a partition cuts tensors,
/// each is cut into a slice a rank and, but for flat stores, padded up to a multiple of world * 16
/// bytes. Fit for comparisons with such peers, or where all tensors are large.
struct PerTensor {
  /// The largest size there is, which no bucket has.
  constexpr operator std::size_t() const noexcept {  // implicit: it is used as a size
    return std::numeric_limits<std::size_t>::max();
  }
};

/// Intent: one decision about memory, made at compile time.
///
///  1. `V::values` and `V::gradients` are `Residency` constants.
///  2. `view.bucket_bytes` is the size of a bucket in bytes, the same on all ranks: larger ones use
///     a network better, smaller ones start earlier and cost less staging memory. It is rounded to
///     a multiple of world * 16 bytes. `PerTensor{}` makes every tensor a bucket of its own.
///
/// `values == arena` moves parameters, so their type must model `RebindableParameter`;
/// `gradients == arena` moves gradients: `RebindableGradient`.
///
/// A minimal model:
/// @code
/// struct SmallBuckets {
///   static constexpr zero::Residency values = zero::Residency::caller;
///   static constexpr zero::Residency gradients = zero::Residency::caller;
///   std::size_t bucket_bytes = 1024;
/// };
/// @endcode
template <class V>
concept BucketViewPolicy = std::copyable<V> && requires(const V& view) {
  typename std::integral_constant<Residency, V::values>;
  typename std::integral_constant<Residency, V::gradients>;
  { view.bucket_bytes } -> std::convertible_to<std::size_t>;
};

}  // namespace zero
