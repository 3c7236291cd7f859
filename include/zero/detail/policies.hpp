// SPDX-License-Identifier: Apache-2.0
/// @file
/// Sorts construction arguments into policy families, at compile time.
#pragma once

#include <concepts>
#include <cstddef>
#include <ranges>
#include <type_traits>
#include <utility>
#include <vector>

#include "zero/bucket_view.hpp"
#include "zero/bucket_view/no_view.hpp"
#include "zero/bucket_view/param_view.hpp"
#include "zero/communicator.hpp"
#include "zero/detail/space.hpp"
#include "zero/detail/store.hpp"
#include "zero/element.hpp"
#include "zero/observer.hpp"
#include "zero/optimizer.hpp"
#include "zero/parameter.hpp"
#include "zero/partition.hpp"
#include "zero/precision.hpp"
#include "zero/settings.hpp"
#include "zero/stage.hpp"

namespace zero {

/// One set of options for each parameter group: `zero::Groups{AdamW{}, AdamW{.weight_decay = 0}}`.
template <class Opt>
struct Groups {
  template <class... Same>
    requires(std::same_as<Same, Opt> && ...)
  explicit Groups(Opt first, Same... rest) : options{std::move(first), std::move(rest)...} {}
  explicit Groups(std::vector<Opt> all) : options(std::move(all)) {}
  std::vector<Opt> options;
};
template <class Opt, class... Same>
Groups(Opt, Same...) -> Groups<Opt>;
template <class Opt>
Groups(std::vector<Opt>) -> Groups<Opt>;

namespace detail {

template <class First>
struct OptimizerOf {
  using type = First;
};
template <class Opt>
struct OptimizerOf<Groups<Opt>> {
  using type = Opt;
};
template <class First>
using optimizer_of = typename OptimizerOf<First>::type;

// Which family an argument belongs to.
struct PartitionFamily {
  template <class P>
  static constexpr bool has = PartitionPolicy<P>;
};
struct BucketViewFamily {
  template <class P>
  static constexpr bool has = BucketViewPolicy<P>;
};
struct StageFamily {
  template <class P>
  static constexpr bool has = StagePolicy<P>;
};
struct PrecisionFamily {
  template <class P>
  static constexpr bool has = PrecisionPolicy<P>;
};
struct ObserverFamily {
  template <class P>
  static constexpr bool has = Observer<P>;
};

template <class P>
inline constexpr int families =
    int{PartitionFamily::has<P>} + int{BucketViewFamily::has<P>} + int{StageFamily::has<P>} +
    int{PrecisionFamily::has<P>} + int{ObserverFamily::has<P>} + int{std::same_as<P, Settings>};

template <class Family, class Default, class... P>
struct Choose {
  using type = Default;
};
template <class Family, class Default, class First, class... Rest>
struct Choose<Family, Default, First, Rest...> {
  using type = typename std::conditional_t<Family::template has<First>, std::type_identity<First>,
                                           Choose<Family, Default, Rest...>>::type;
};

/// The argument of a family, or the family's default.
template <class Family, class Default, class... P>
using choose = typename Choose<Family, Default, P...>::type;

/// The given policy of type `Wanted`, or a default one.
template <class Wanted, class... P>
Wanted pick([[maybe_unused]] P&... policies) {
  if constexpr ((std::same_as<P, Wanted> || ...)) {
    Wanted* found = nullptr;
    const auto look = [&](auto& policy) {
      if constexpr (std::same_as<std::remove_cvref_t<decltype(policy)>, Wanted>) found = &policy;
    };
    (look(policies), ...);
    return std::move(*found);
  } else {
    return Wanted{};
  }
}

/// Whether `P` is one of `T...`.
template <class P, class... T>
using OneOf = std::bool_constant<(std::same_as<P, T> || ...)>;

/// Whether no family has two of `P...`, nor are there two `Settings`.
template <class... P>
inline constexpr bool one_of_each =
    (int{PartitionFamily::has<P>} + ... + 0) <= 1 &&
    (int{BucketViewFamily::has<P>} + ... + 0) <= 1 && (int{StageFamily::has<P>} + ... + 0) <= 1 &&
    (int{PrecisionFamily::has<P>} + ... + 0) <= 1 && (int{ObserverFamily::has<P>} + ... + 0) <= 1 &&
    (int{std::same_as<P, Settings>} + ... + 0) <= 1;

/// Whether each of `Wanted...` is among `Given...` or can be made from nothing.
template <class... Given>
struct Obtainable {
  template <class... Wanted>
  static constexpr bool all =
      ((OneOf<Wanted, Given...>::value || std::default_initializable<Wanted>) && ...);
};

/// A store that hands its parameters out so that they can be moved: not a const one.
template <class Store>
concept RebindableStore =
    ParamStore<Store> &&
    RebindableParameter<std::remove_reference_t<std::ranges::range_reference_t<Store>>>;

/// The same for their gradients.
template <class Store>
concept GradientRebindableStore =
    ParamStore<Store> &&
    RebindableGradient<std::remove_reference_t<std::ranges::range_reference_t<Store>>>;

template <class Store>
struct DefaultViewOf {
  using type = NoView;
};
template <RebindableStore Store>
struct DefaultViewOf<Store> {
  using type = ParamView;
};
/// Parameters that can be moved are moved into buckets, others stay.
template <class Store>
using DefaultView = typename DefaultViewOf<std::remove_reference_t<Store>>::type;

// Questions about each element type of a store, as one type a question, so that the static_asserts
// of ZeroSharded stay sentences. Where something models no concept at all, its own sentence says so
// and all further questions about it hold: one mistake, one sentence.
template <class Store, class Question>
struct AllElements : std::true_type {};
template <ParamStore Store, class Question>
struct AllElements<Store, Question> {
  static constexpr bool value = []<class... T>(TypeList<T...>) {
    return (Question::template holds<T> && ...);
  }(store_elements<Store>{});
};
template <class Store, class Question>
struct AnyElement : std::false_type {};
template <ParamStore Store, class Question>
struct AnyElement<Store, Question> {
  static constexpr bool value = []<class... T>(TypeList<T...>) {
    return (Question::template holds<T> || ...);
  }(store_elements<Store>{});
};

struct IsStored {
  template <class T>
  static constexpr bool holds = std::same_as<arithmetic_t<T>, T> || is_16_bit<T>;
};
template <ParamStore S>
consteval MemorySpace space_of() {
  return memory_space_of<parameter_t<S>>;
}
template <class S>
consteval MemorySpace space_of() {
  return MemorySpace::host;
}
/// Of a space that zero doesn't know here, no stream.
template <MemorySpace space>
struct StreamOf {
  using type = void;
};
template <MemorySpace space>
  requires KnownSpace<space>
struct StreamOf<space> {
  using type = typename Space<space>::Stream;
};
/// Whether `Opt` steps complete tensors that lie in this memory.
template <class Opt, MemorySpace space>
struct IsWholeTensor {
  template <class T>
  static constexpr bool holds = [] {
    if constexpr (space == MemorySpace::host) {
      return WholeTensorOptimizer<Opt, arithmetic_t<T>>;
    } else {
      return StepsTensorsIn<Opt, arithmetic_t<T>, typename StreamOf<space>::type>;
    }
  }();
};
template <class Opt, class Store>
using AnyWholeTensor = AnyElement<Store, IsWholeTensor<Opt, space_of<Store>()>>;
/// Either kind, wherever it steps tensors.
template <class Opt, MemorySpace space>
struct IsOptimizer {
  template <class T>
  static constexpr bool holds =
      Optimizer<Opt, arithmetic_t<T>> || IsWholeTensor<Opt, space>::template holds<T>;
};
/// Not of complete tensors in other memory.
template <class Opt, MemorySpace space>
struct ReachesTensors {
  template <class T>
  static constexpr bool holds =
      !WholeTensorOptimizer<Opt, arithmetic_t<T>> || IsWholeTensor<Opt, space>::template holds<T>;
};
template <class Precision>
struct IsPrecision {
  template <class T>
  static constexpr bool holds = PrecisionPolicy<Precision, T>;
};
template <class Precision>
struct KeepsArithmetic {
  template <class T>
  static constexpr bool holds = [] {
    if constexpr (PrecisionPolicy<Precision, T>) {
      using Master = typename Precision::template Master<T>;
      return (std::same_as<Master, T> || std::same_as<Master, arithmetic_t<T>>) &&
             std::same_as<arithmetic_t<typename Precision::template Slot<T>>, arithmetic_t<T>>;
    } else {
      return true;
    }
  }();
};
template <class Precision>
struct SendsNoMore {
  template <class T>
  static constexpr bool holds = [] {
    if constexpr (PrecisionPolicy<Precision, T>) {
      using Wire = typename Precision::template Wire<T>;
      return std::same_as<Wire, T> || (std::same_as<T, float> && is_16_bit<Wire>);
    } else {
      return true;
    }
  }();
};
template <class Precision>
struct KeepsUpdates {
  template <class T>
  static constexpr bool holds = [] {
    if constexpr (PrecisionPolicy<Precision, T>) {
      return sizeof(typename Precision::template Master<T>) > 2 ||
             Precision::rounding == Rounding::stochastic;
    } else {
      return true;
    }
  }();
};
template <class Comm>
struct IsCommunicator {
  template <class T>
  static constexpr bool holds = Communicator<Comm, T>;
};

template <class View>
inline constexpr bool moves_values = false;
template <BucketViewPolicy View>
inline constexpr bool moves_values<View> = View::values != Residency::caller;

template <class View>
inline constexpr bool moves_gradients = false;
template <BucketViewPolicy View>
inline constexpr bool moves_gradients<View> = View::gradients != Residency::caller;

template <class Stage>
inline constexpr bool shards_gradients = false;
template <StagePolicy Stage>
inline constexpr bool shards_gradients<Stage> = Stage::shards_gradients;

template <class Stage>
inline constexpr bool shards_values = false;
template <StagePolicy Stage>
inline constexpr bool shards_values<Stage> = Stage::shards_values;

template <class Comm>
inline constexpr bool is_communicator = Ranked<Comm> && Capable<Comm>;

template <class Store>
inline constexpr bool known_space = true;
template <ParamStore Store>
inline constexpr bool known_space<Store> = KnownSpace<memory_space_of<parameter_t<Store>>>;

template <class Store>
inline constexpr bool is_on_device = false;
template <ParamStore Store>
inline constexpr bool is_on_device<Store> =
    memory_space_of<parameter_t<Store>> == MemorySpace::cuda;

template <class Store, class Comm>
inline constexpr bool same_memory_space = true;
template <ParamStore Store, Capable Comm>
inline constexpr bool same_memory_space<Store, Comm> =
    Comm::memory_space == memory_space_of<parameter_t<Store>>;

}  // namespace detail
}  // namespace zero
