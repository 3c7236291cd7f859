// SPDX-License-Identifier: Apache-2.0
/// @file
/// What an optimizer is: an element-wise update rule, or a whole-tensor optimizer.
///
/// An optimizer is an aggregate of its options, so `Adam{.lr = 1e-3}` is both the choice of
/// algorithm and its settings, and a parameter group is one more such value.
///
/// Both kinds share:
///  1. `static constexpr std::array<std::string_view, N> slots`: the names of its state arrays, one
///     element of each for every parameter element, zero before the first step. Checkpoints use
///     these names.
///  2. optionally `std::size_t used_slots() const`: how many of the leading slots these options
///     need (amsgrad's third, SGD's momentum); the others are not allocated. Default: all.
///  3. optionally `void validate() const`: throws `UsageError` for options that make no sense. Run
///     at construction and before every step, for every group.
///  3a. optionally `static void for_each_option(Self& self, F&& f)`, `Self` being the optimizer,
///     const or not: calls `f("name", self.option)` for every option, each a number, a bool or an
///     enumeration. With it checkpoints keep the groups' options, and loading brings them back.
///  3b. optionally `static constexpr std::string_view name`: what checkpoints call it, so that its
///     state is not taken for that of another optimizer with equal slots.
///
/// Before every step ranks compare what their options do to a few made-up numbers (for whole-tensor
/// optimizers in a tensor of shape {2, 2} or {4}), so `scalars` and `update` are called for that.
///
/// **Update rule**, the usual kind. One element at a time, so it may be cut anywhere:
///  4. `scalars<Real>(t) const` gives what is constant over one step, `Real` being the arithmetic
///     type and t = 1, 2, … the parameter's own step count. Compute it in `double`.
///  5. `static update(X& value, const X& gradient, X& slot…, const Scalars& s)` is generic in X:
///     a number (on a device) or a pack of numbers (on the host), so it uses + - * / and the
///     functions of math.hpp, and branches only on `s`, never on an X: where an X decides, write
///     `zero::select(x > X(0), yes, no)`. Functions of the user's that it calls must be inline
///     and, on a device, `ZERO_HOST_DEVICE` as `scalars` and `update` themselves: where one isn't,
///     nvcc only warns (#20014-D), and may leave the kernel empty. Make that an error:
///     `-Werror=cross-execution-space-call`.
///  6. What it computes for an element depends on that element and `s` alone: neither on where the
///     element lies nor on earlier calls. Slots beyond `used_slots()` are not touched.
///
/// A minimal model, sign descent:
/// @code
/// struct SignSgd {
///   double lr = 1e-3;
///   static constexpr std::array<std::string_view, 0> slots{};
///   template <class Real> struct Scalars { Real lr; };
///   template <class Real> ZERO_HOST_DEVICE Scalars<Real> scalars(std::int64_t) const {
///     return {Real(lr)};
///   }
///   template <class X, class Real>
///   ZERO_HOST_DEVICE static void update(X& value, const X& gradient, const Scalars<Real>& s) {
///     value = value - s.lr * zero::sign(gradient);
///   }
/// };
/// @endcode
///
/// **Whole-tensor optimizer**, where norms or matrix products need complete parameters:
///  7. `update(TensorRef<T> tensor, std::array<std::span<T>, N> slots, std::int64_t t) const` for T
///     = float, double or both: one step, t = 1, 2, … being the parameter's own step count, of one
///     complete tensor, which may be empty. Changes the values and the slots. Each slot has as many
///     elements as the tensor, and none beyond `used_slots()`. Allocates nothing: memory
///     comes from `workspace`.
///  8. optionally `std::size_t workspace(std::span<const std::size_t> shape) const`: how many
///     elements of scratch memory `update` needs for a tensor of this shape. Default: none.
///  9. optionally `void validate(std::span<const std::size_t> shape) const`: throws `UsageError`
///     for a tensor that it can't take; the message says why, and what to do. The caller puts the
///     parameter's name before it. Default: takes all.
///  10. The result depends on nothing but the tensor, its gradient, its slots, the options and t,
///     to the last bit: which rank updates a tensor, where it lies in memory, what is in the
///     workspace and which tensors came before is arbitrary.
///
/// A minimal model, descent by steps of one length:
/// @code
/// struct NormalizedDescent {
///   double lr = 1e-3;
///   static constexpr std::array<std::string_view, 0> slots{};
///   template <class T>
///   void update(zero::TensorRef<T> tensor, std::array<std::span<T>, 0>, std::int64_t) const {
///     double squares = 0;
///     for (const T g : tensor.gradient) squares += double(g) * double(g);
///     const T scale = squares > 0 ? T(lr / zero::sqrt(squares)) : T(0);
///     for (std::size_t i = 0; i < tensor.values.size(); ++i) {
///       tensor.values[i] -= scale * tensor.gradient[i];
///     }
///   }
/// };
/// @endcode
#pragma once

#include <array>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <ranges>
#include <span>
#include <string_view>
#include <type_traits>
#include <utility>

#include "zero/element.hpp"

namespace zero {

/// A complete tensor as a whole-tensor optimizer sees it; row-major.
template <Element T>
struct TensorRef {
  std::span<const std::size_t> shape;
  std::span<T> values;
  std::span<const T> gradient;
  /// As many elements as `workspace_elements(optimizer, shape)`; what is in them is arbitrary.
  std::span<T> workspace;
};

/// Names its state arrays, at compile time.
template <class O>
concept NamesSlots = requires {
  typename std::integral_constant<std::size_t, O::slots.size()>;
  requires std::convertible_to<typename std::remove_cvref_t<decltype(O::slots)>::value_type,
                               std::string_view>;
};

namespace detail {

template <class O>
inline constexpr std::size_t slot_count = O::slots.size();

template <class O>
using slot_indices = std::make_index_sequence<slot_count<O>>;

/// `X&`, whatever the index: one state argument a slot.
template <class X, std::size_t>
using SlotReference = X&;

/// Some number that an update computes with: never defined, so that only a generic update takes it.
template <class T>
struct AnyNumber;

template <class O, class X, class T, std::size_t... I>
consteval bool has_update(std::index_sequence<I...>) {
  return requires(const O& rule, std::int64_t t, X& value, const X& gradient) {
    O::update(value, gradient, std::declval<SlotReference<X, I>>()..., rule.template scalars<T>(t));
  };
}

}  // namespace detail

/// An element-wise optimizer for arithmetic type `T`; see the top of this header.
template <class O, class T = float>
concept UpdateRule =
    std::copyable<O> && NamesSlots<O> && detail::has_update<O, T, T>(detail::slot_indices<O>{}) &&
    detail::has_update<O, detail::AnyNumber<T>, T>(detail::slot_indices<O>{});

/// An optimizer that sees complete tensors of `T` and may be cut nowhere.
template <class O, class T = float>
concept WholeTensorOptimizer = std::copyable<O> && NamesSlots<O> &&
                               requires(const O& optimizer, TensorRef<T> tensor,
                                        std::array<std::span<T>, detail::slot_count<O>> slots,
                                        std::int64_t t) { optimizer.update(tensor, slots, t); };

/// Either kind; never both, so that it is clear how it may be cut.
template <class O, class T = float>
concept Optimizer = UpdateRule<O, T> != WholeTensorOptimizer<O, T>;

namespace detail {

template <class O>
concept HasOptionalSlots = requires(const O& optimizer) {
  { optimizer.used_slots() } -> std::convertible_to<std::size_t>;
};

/// Tells its options by name, as item 3a says.
template <class O>
concept NamesOptions = requires(O& optimizer, const O& constant) {
  O::for_each_option(optimizer, [](const char*, auto&) {});
  O::for_each_option(constant, [](const char*, const auto&) {});
};

/// What checkpoints call an optimizer; empty where it doesn't say.
template <class O>
[[nodiscard]] constexpr std::string_view optimizer_name() {
  if constexpr (requires {
                  { O::name } -> std::convertible_to<std::string_view>;
                }) {
    return O::name;
  } else {
    return {};
  }
}

/// Has numbers for ranks to compare, where the host can't try out what they do.
template <class O>
concept HasComparableOptions = requires(const O& optimizer) {
  requires std::ranges::input_range<decltype(optimizer.options())>;
  requires std::same_as<std::ranges::range_value_t<decltype(optimizer.options())>, double>;
};

/// Of a device, whose streams are of type `Stream`: see zero/cuda/tensor_optimizer.hpp.
template <class O, class T, class Stream>
concept StepsTensorsIn =
    std::copyable<O> && NamesSlots<O> && HasComparableOptions<O> &&
    requires(const O& optimizer, TensorRef<T> tensor, std::array<std::span<T>, slot_count<O>> slots,
             std::int64_t t) { optimizer.update(tensor, slots, t, std::declval<Stream>()); };

template <class O>
concept HasWorkspace = requires(const O& optimizer, std::span<const std::size_t> shape) {
  { optimizer.workspace(shape) } -> std::convertible_to<std::size_t>;
};

}  // namespace detail

/// How many leading slots these options need.
template <NamesSlots O>
[[nodiscard]] constexpr std::size_t used_slots(const O& optimizer) {
  if constexpr (detail::HasOptionalSlots<O>) {
    return optimizer.used_slots();
  } else {
    return detail::slot_count<O>;
  }
}

/// Throws `UsageError` where the optimizer says that its options make no sense.
template <NamesSlots O>
void validate(const O& optimizer) {
  if constexpr (requires { optimizer.validate(); }) optimizer.validate();
}

/// Throws `UsageError` where the optimizer says that it can't take a tensor of this shape.
template <NamesSlots O>
void validate(const O& optimizer, std::span<const std::size_t> shape) {
  if constexpr (requires { optimizer.validate(shape); }) optimizer.validate(shape);
}

/// How many elements of scratch memory one update of a tensor of this shape needs.
template <NamesSlots O>
[[nodiscard]] constexpr std::size_t workspace_elements(const O& optimizer,
                                                       std::span<const std::size_t> shape) {
  if constexpr (detail::HasWorkspace<O>) {
    return optimizer.workspace(shape);
  } else {
    return 0;
  }
}

}  // namespace zero
