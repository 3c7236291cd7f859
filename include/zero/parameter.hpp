// SPDX-License-Identifier: Apache-2.0
/// @file
/// What a parameter is, and what a store of parameters is: how a framework hands its tensors over.
#pragma once

#include <concepts>
#include <cstddef>
#include <memory>
#include <ranges>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "zero/attributes.hpp"
#include "zero/element.hpp"
#include "zero/memory.hpp"

namespace zero {

namespace detail {

template <class... T>
struct TypeList {};

/// The element types behind what `values()` returns: a span of one type, or a variant of spans
/// where a framework types its tensors at run time.
template <class Values>
struct elements_of;
template <Element T>
struct elements_of<std::span<T>> {
  using type = TypeList<T>;
};
template <Element... T>
struct elements_of<std::variant<std::span<T>...>> {
  using type = TypeList<T...>;
};

template <class V>
concept ElementSpans = requires { typename elements_of<V>::type; };

/// A span of one element type.
template <class V>
concept ElementSpan = ElementSpans<V> && requires { typename V::element_type; };

}  // namespace detail

/// A named tensor. Intent: the least that a framework must tell of one.
///
///  1. `name()`, unique within a store, the same on every rank; `shape()` as a span of extents
///     (empty: a scalar), whose product is `values().size()`; or there are no values yet
///     (`Settings::initial_value`).
///  2. `values()` is a `std::span<T>` of contiguous elements, or a `std::variant` of such spans.
///  3. `gradient()` is the same type; its span is empty where there is none this step. It is asked
///     for again in every step, so a framework may allocate gradients anew.
///  4. optionally `group()` (a `std::size_t`, default 0) and `attributes()` (an `Attributes`,
///     default `Attributes{}`).
///  5. optionally `P::memory_space` (default `MemorySpace::host`).
///  6. optionally `release_gradient()`: lets go of the gradient's memory, which stages that shard
///     gradients have copied then.
///
/// What the compiler can't see: different parameters' values don't overlap (tie them with
/// `Attributes::alias`), and values stay where they are while an optimizer uses them.
///
/// `zero::ParamRef` is the model for plain pointers. A minimal one:
/// @code
/// struct Scalar {
///   float* value;
///   float* slope;
///   std::string_view name() const { return "scalar"; }
///   std::span<const std::size_t> shape() const { return {}; }
///   std::span<float> values() const { return {value, 1}; }
///   std::span<float> gradient() const { return {slope, 1}; }
/// };
/// @endcode
template <class P>
concept Parameter = requires(const P& parameter) {
  { parameter.name() } -> std::convertible_to<std::string_view>;
  { parameter.shape() } -> std::convertible_to<std::span<const std::size_t>>;
  { parameter.values() } -> detail::ElementSpans;
  { parameter.gradient() } -> std::same_as<decltype(parameter.values())>;
};

/// A parameter whose values may be moved into memory of the library's: `rebind(values, owner)`
/// makes it use `values`, which hold the same numbers already and live as long as `owner` does. The
/// parameter lets go of its old memory and keeps a copy of `owner` while it uses the new.
template <class P>
concept RebindableParameter =
    Parameter<P> && requires(P& parameter, std::shared_ptr<const void> owner) {
      parameter.rebind(parameter.values(), std::move(owner));
    };

/// A parameter whose gradient may be moved, too: `rebind_gradient(gradient, owner)` makes backward
/// write to `gradient`, which holds the same numbers already (zeros where there was no gradient),
/// and `gradient()` return it.
template <class P>
concept RebindableGradient =
    Parameter<P> && requires(P& parameter, std::shared_ptr<const void> owner) {
      parameter.rebind_gradient(parameter.gradient(), std::move(owner));
    };

/// A sized random-access range of parameters. A `std::vector<ParamRef<float>>` is one, and so is
/// any container transformed element by element into parameters.
///
/// Optionally it has a `before_step()`, which `step` calls on every rank before it reads anything.
/// What it throws as `UsageError` refuses the step, on all ranks.
template <class S>
concept ParamStore = std::ranges::random_access_range<S> && std::ranges::sized_range<S> &&
                     Parameter<std::remove_cvref_t<std::ranges::range_reference_t<S>>>;

/// A store whose unfrozen parameters lie one behind the other, in order, in one buffer, and so do
/// their gradients (llm.c, Marian): whole buckets are communicated in place.
///
///  1. `flat_values()` and `flat_gradient()` are spans of the type that parameters' `values()` are.
///  2. parameter i's values start in `flat_values()` at the sum of the sizes before it, frozen ones
///     included and tied ones not, and its gradient likewise.
template <class S>
concept FlatParamStore = ParamStore<S> && requires(S& store) {
  { store.flat_values() } -> detail::ElementSpan;
  { store.flat_gradient() } -> std::same_as<decltype(store.flat_values())>;
  { (*std::ranges::begin(store)).values() } -> std::same_as<decltype(store.flat_values())>;
};

/// A parameter in plain memory that somebody else owns.
template <Element T = float>
class ParamRef {
 public:
  /// @param gradient null where the parameter never gets one, and at stages 2 and 3, where backward
  ///        writes to leases
  ParamRef(std::string name, std::vector<std::size_t> shape, T* values, T* gradient,
           Attributes attributes = {}, std::size_t group = 0)
      : name_(std::move(name)),
        shape_(std::move(shape)),
        values_(values),
        gradient_(gradient),
        attributes_(attributes),
        group_(group) {
    for (const std::size_t extent : shape_) elements_ *= extent;
  }

  /// One-dimensional, over two containers of equal size.
  template <std::ranges::contiguous_range R>
    requires std::same_as<std::ranges::range_value_t<R>, T>
  ParamRef(std::string name, R& values, R& gradient, Attributes attributes = {},
           std::size_t group = 0)
      : ParamRef(std::move(name), {std::ranges::size(values)}, std::ranges::data(values),
                 std::ranges::data(gradient), attributes, group) {
    gradient_elements_ = std::ranges::size(gradient);
    sized_ = true;
  }

  [[nodiscard]] const std::string& name() const noexcept { return name_; }
  [[nodiscard]] std::span<const std::size_t> shape() const noexcept { return shape_; }
  [[nodiscard]] std::span<T> values() const noexcept { return {values_, elements_}; }
  [[nodiscard]] std::span<T> gradient() const noexcept {
    if (gradient_ == nullptr) return {};
    return {gradient_, sized_ ? gradient_elements_ : elements_};
  }
  [[nodiscard]] const Attributes& attributes() const noexcept { return attributes_; }
  [[nodiscard]] std::size_t group() const noexcept { return group_; }

 private:
  std::string name_;
  std::vector<std::size_t> shape_;
  T* values_;
  T* gradient_;
  std::size_t elements_ = 1;
  std::size_t gradient_elements_ = 0;
  bool sized_ = false;
  Attributes attributes_;
  std::size_t group_;
};

template <class T, class... Rest>
ParamRef(std::string, std::vector<std::size_t>, T*, std::nullptr_t, Rest...) -> ParamRef<T>;
template <class R>
ParamRef(std::string, R&, R&) -> ParamRef<std::ranges::range_value_t<R>>;
template <class R>
ParamRef(std::string, R&, R&, Attributes) -> ParamRef<std::ranges::range_value_t<R>>;
template <class R>
ParamRef(std::string, R&, R&, Attributes, std::size_t) -> ParamRef<std::ranges::range_value_t<R>>;

static_assert(Parameter<ParamRef<float>> && ParamStore<std::vector<ParamRef<double>>>);

/// The parameter's group, 0 where it names none.
template <Parameter P>
[[nodiscard]] std::size_t group_of(const P& parameter) {
  if constexpr (requires {
                  { parameter.group() } -> std::convertible_to<std::size_t>;
                }) {
    return parameter.group();
  } else {
    return 0;
  }
}

/// The parameter's attributes, the defaults where it names none.
template <Parameter P>
[[nodiscard]] Attributes attributes_of(const P& parameter) {
  if constexpr (requires {
                  { parameter.attributes() } -> std::convertible_to<Attributes>;
                }) {
    return parameter.attributes();
  } else {
    return {};
  }
}

/// Which memory a parameter type lies in.
template <Parameter P>
inline constexpr MemorySpace memory_space_of = MemorySpace::host;
template <Parameter P>
  requires requires { typename std::integral_constant<MemorySpace, P::memory_space>; }
inline constexpr MemorySpace memory_space_of<P> = P::memory_space;

/// The parameter type of a store.
template <ParamStore S>
using parameter_t = std::remove_cvref_t<std::ranges::range_reference_t<S>>;

}  // namespace zero
