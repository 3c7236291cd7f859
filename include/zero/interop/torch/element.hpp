// SPDX-License-Identifier: Apache-2.0
/// @file
/// libtorch's 16-bit types as element types.
#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <string_view>

#include "zero/element.hpp"

namespace zero {

template <>
struct element_traits<::c10::Half> {
  static constexpr ElementType type = ElementType::float16;
  static constexpr std::string_view name = "float16";
  using arithmetic = float;
  static float load(::c10::Half x) { return static_cast<float>(x); }
  static ::c10::Half store(float x) { return {x}; }
};

template <>
struct element_traits<::c10::BFloat16> {
  static constexpr ElementType type = ElementType::bfloat16;
  static constexpr std::string_view name = "bfloat16";
  using arithmetic = float;
  static float load(::c10::BFloat16 x) { return static_cast<float>(x); }
  static ::c10::BFloat16 store(float x) { return {x}; }
};

static_assert(Element<::c10::Half> && detail::is_16_bit<::c10::Half>);
static_assert(Element<::c10::BFloat16> && detail::is_16_bit<::c10::BFloat16>);

}  // namespace zero
