// SPDX-License-Identifier: Apache-2.0
/// @file
/// Helpers over stores: element types as lanes, run-time typed spans, lvalue stores viewed.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <variant>

#include "zero/parameter.hpp"

namespace zero::detail {

template <class P>
using values_t = std::remove_cvref_t<decltype(std::declval<const P&>().values())>;

/// The element types of a store, one lane each.
template <ParamStore S>
using store_elements = typename elements_of<values_t<parameter_t<S>>>::type;

template <class T, class List>
struct lane_of;
template <class T, class... Rest>
struct lane_of<T, TypeList<T, Rest...>> : std::integral_constant<std::size_t, 0> {};
template <class T, class First, class... Rest>
struct lane_of<T, TypeList<First, Rest...>>
    : std::integral_constant<std::size_t, 1 + lane_of<T, TypeList<Rest...>>::value> {};

template <class T, class List>
inline constexpr bool has_lane = false;
template <class T, class... All>
inline constexpr bool has_lane<T, TypeList<All...>> = (std::is_same_v<T, All> || ...);

template <class List>
struct first_of;
template <class First, class... Rest>
struct first_of<TypeList<First, Rest...>> {
  using type = First;
};

/// `f(span)` for a span, or for the one that a variant holds.
template <class T, class F>
decltype(auto) visit_span(std::span<T> values, F&& f) {
  return std::forward<F>(f)(values);
}
template <class... T, class F>
decltype(auto) visit_span(const std::variant<std::span<T>...>& values, F&& f) {
  return std::visit(std::forward<F>(f), values);
}

/// "parameter 3 ('w')": how messages name a parameter.
[[nodiscard]] inline std::string quoted(std::size_t index, std::string_view name) {
  return "parameter " + std::to_string(index) + " ('" + std::string(name) + "')";
}

/// What a template parameter `X` or `X&` holds: a value, or a reference to the caller's object.
template <class X>
class Held {
 public:
  explicit Held(X value) : value_(std::move(value)) {}
  [[nodiscard]] X& get() noexcept { return value_; }

 private:
  X value_;
};
template <class X>
class Held<X&> {
 public:
  explicit Held(X& value) : value_(&value) {}
  [[nodiscard]] X& get() noexcept { return *value_; }

 private:
  X* value_;
};

}  // namespace zero::detail
