// SPDX-License-Identifier: Apache-2.0
/// @file
/// Where values and gradients live, and in how large buckets they travel.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace zero {

/// Who owns the memory of values or gradients.
enum class Residency : std::uint8_t {
  caller,  ///< it stays where the framework put it
  arena,   ///< one array of the optimizer's, laid out as the layout says
  pool,    ///< bucket-sized pieces, there only while needed
};

/// A size in bytes, written `25_MiB`.
inline namespace literals {
[[nodiscard]] consteval std::size_t operator""_KiB(unsigned long long n) { return n << 10; }
[[nodiscard]] consteval std::size_t operator""_MiB(unsigned long long n) { return n << 20; }
}  // namespace literals

/// Intent: one decision about memory, made at compile time.
///
///  1. `V::values` and `V::gradients` are `Residency` constants.
///  2. `view.bucket_bytes` is the size of a bucket in bytes, the same on all ranks: larger ones use
///     a network better, smaller ones start earlier and cost less staging memory. It is rounded to
///     a multiple of world * 16 bytes.
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
