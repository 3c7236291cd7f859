// SPDX-License-Identifier: Apache-2.0
/// @file
/// Elements whose type is known at run time alone: what files hold.
#pragma once

#include <cstddef>
#include <cstring>
#include <optional>
#include <span>
#include <string_view>
#include <type_traits>

#include "zero/bfloat16.hpp"
#include "zero/element.hpp"
#include "zero/float16.hpp"

namespace zero::detail {

/// `f(std::type_identity<T>{})`, `T` being the library's own type of that format.
template <class F>
decltype(auto) with_element(ElementType type, F&& f) {
  switch (type) {
    case ElementType::float64: return f(std::type_identity<double>{});
    case ElementType::float16: return f(std::type_identity<float16>{});
    case ElementType::bfloat16: return f(std::type_identity<bfloat16>{});
    case ElementType::float32: break;
  }
  return f(std::type_identity<float>{});
}

[[nodiscard]] inline std::size_t bytes_of(ElementType type) {
  return with_element(type, []<class T>(std::type_identity<T>) { return sizeof(T); });
}

/// As safetensors files call it.
[[nodiscard]] constexpr std::string_view dtype_of(ElementType type) {
  switch (type) {
    case ElementType::float64: return "F64";
    case ElementType::float16: return "F16";
    case ElementType::bfloat16: return "BF16";
    case ElementType::float32: break;
  }
  return "F32";
}
[[nodiscard]] constexpr std::optional<ElementType> element_type_of(std::string_view dtype) {
  for (const ElementType type :
       {ElementType::float32, ElementType::float64, ElementType::float16, ElementType::bfloat16}) {
    if (dtype_of(type) == dtype) return type;
  }
  return std::nullopt;
}

/// To nearest; from double to 16 bits by way of float. Need not be aligned.
inline void convert_elements(std::span<const std::byte> from, ElementType type,
                             std::span<std::byte> to, ElementType wanted) {
  with_element(type, [&]<class From>(std::type_identity<From>) {
    with_element(wanted, [&]<class To>(std::type_identity<To>) {
      const std::size_t count = from.size() / sizeof(From);
      for (std::size_t e = 0; e < count; ++e) {
        From stored;
        std::memcpy(&stored, from.data() + e * sizeof(From), sizeof(From));
        const To rounded = element_traits<To>::store(
            static_cast<arithmetic_t<To>>(element_traits<From>::load(stored)));
        std::memcpy(to.data() + e * sizeof(To), &rounded, sizeof(To));
      }
    });
  });
}

}  // namespace zero::detail
