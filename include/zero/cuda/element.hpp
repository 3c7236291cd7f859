// SPDX-License-Identifier: Apache-2.0
/// @file
/// CUDA's own 16-bit types as element types, with the bits and the rounding of the library's.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <string_view>

#include "zero/bfloat16.hpp"
#include "zero/config.hpp"
#include "zero/element.hpp"
#include "zero/float16.hpp"

namespace zero {

template <>
struct element_traits<__nv_bfloat16> {
  static constexpr ElementType type = ElementType::bfloat16;
  static constexpr std::string_view name = "bfloat16";
  using arithmetic = float;
  ZERO_HOST_DEVICE static float load(__nv_bfloat16 x) noexcept {
    return detail::bfloat16_value(__builtin_bit_cast(std::uint16_t, x));
  }
  ZERO_HOST_DEVICE static __nv_bfloat16 store(float x) noexcept {
    return __builtin_bit_cast(__nv_bfloat16, detail::nearest_bfloat16(x));
  }
};

template <>
struct element_traits<__half> {
  static constexpr ElementType type = ElementType::float16;
  static constexpr std::string_view name = "float16";
  using arithmetic = float;
  ZERO_HOST_DEVICE static float load(__half x) noexcept {
    return detail::float16_value(__builtin_bit_cast(std::uint16_t, x));
  }
  ZERO_HOST_DEVICE static __half store(float x) noexcept {
    return __builtin_bit_cast(__half, detail::nearest_float16(x));
  }
};

static_assert(Element<__nv_bfloat16> && detail::is_16_bit<__nv_bfloat16>);
static_assert(Element<__half> && detail::is_16_bit<__half>);

}  // namespace zero
