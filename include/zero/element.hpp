// SPDX-License-Identifier: Apache-2.0
/// @file
/// Element types: what a parameter, a gradient or an optimizer slot may consist of.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <type_traits>

#include "zero/config.hpp"

namespace zero {

/// The element types by number: what travels between ranks and into files. The number says the bit
/// format: IEEE 754 binary32, binary64 and binary16, and bfloat16 (the upper half of a binary32).
/// So the library converts any two-byte type whose traits say `float16` or `bfloat16` by its bits,
/// be it `zero::bfloat16`, CUDA's `__nv_bfloat16` or PyTorch's `c10::BFloat16`.
enum class ElementType : std::uint8_t { float32, float64, float16, bfloat16 };

/// Describes an element type to the library. To admit another type, specialise with
///  - `type`: its `ElementType`
///  - `name`: how messages and files call it
///  - `arithmetic`: the type that update rules and sums compute in (`float` or `double`)
///  - `load(T) -> arithmetic` and `store(arithmetic) -> T`, host and device
template <class T>
struct element_traits;

template <>
struct element_traits<float> {
  static constexpr ElementType type = ElementType::float32;
  static constexpr std::string_view name = "float32";
  using arithmetic = float;
  ZERO_HOST_DEVICE static constexpr float load(float x) noexcept { return x; }
  ZERO_HOST_DEVICE static constexpr float store(float x) noexcept { return x; }
};

template <>
struct element_traits<double> {
  static constexpr ElementType type = ElementType::float64;
  static constexpr std::string_view name = "float64";
  using arithmetic = double;
  ZERO_HOST_DEVICE static constexpr double load(double x) noexcept { return x; }
  ZERO_HOST_DEVICE static constexpr double store(double x) noexcept { return x; }
};

/// A type with `element_traits`: trivially copyable, with a type to compute in.
template <class T>
concept Element = std::is_trivially_copyable_v<T> && requires(T stored) {
  { element_traits<T>::type } -> std::convertible_to<ElementType>;
  { element_traits<T>::name } -> std::convertible_to<std::string_view>;
  typename element_traits<T>::arithmetic;
  { element_traits<T>::load(stored) } -> std::same_as<typename element_traits<T>::arithmetic>;
  { element_traits<T>::store(element_traits<T>::load(stored)) } -> std::same_as<T>;
};

namespace detail {

/// The number 0 as it is stored.
template <Element T>
[[nodiscard]] ZERO_HOST_DEVICE constexpr T zero_of() {
  return element_traits<T>::store(typename element_traits<T>::arithmetic(0));
}

}  // namespace detail

/// The type that sums and update rules over `T` compute in.
template <Element T>
using arithmetic_t = typename element_traits<T>::arithmetic;

static_assert(Element<float> && Element<double>);

namespace detail {

/// Whether elements are converted by their bits, whatever their own `load` and `store` would do.
template <Element T>
inline constexpr bool is_16_bit = (element_traits<T>::type == ElementType::float16 ||
                                   element_traits<T>::type == ElementType::bfloat16) &&
                                  sizeof(T) == 2 && std::is_same_v<arithmetic_t<T>, float>;

}  // namespace detail

}  // namespace zero
