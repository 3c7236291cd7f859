// SPDX-License-Identifier: Apache-2.0
/// @file
/// libtorch's optimizers with their state sharded: `TorchOptimizer`; and that state as libtorch's:
/// `torch_optimizer`.
#pragma once

// First, or clang can't read libtorch 1.13 as C++20: a vector of this type is used before it is
// defined.
#include <ATen/core/ivalue.h>

#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>
#include <c10/util/Exception.h>
#include <torch/optim/optimizer.h>

#include <algorithm>
#include <array>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <sstream>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "zero/detail/store.hpp"
#include "zero/element.hpp"
#include "zero/error.hpp"
#include "zero/fragment.hpp"
#include "zero/interop/torch/slots.hpp"
#include "zero/optimizer.hpp"
#include "zero/zero_sharded.hpp"

namespace zero {

namespace detail {

template <Element T>
[[nodiscard]] constexpr at::ScalarType torch_type() {
  switch (element_traits<T>::type) {
    case ElementType::float64: return at::kDouble;
    case ElementType::float16: return at::kHalf;
    case ElementType::bfloat16: return at::kBFloat16;
    case ElementType::float32: break;
  }
  return at::kFloat;
}

/// A tensor over somebody else's memory.
template <Element T>
[[nodiscard]] at::Tensor torch_view(std::span<const std::size_t> shape, T* elements) {
  at::DimVector sizes;
  for (const std::size_t extent : shape) sizes.push_back(static_cast<std::int64_t>(extent));
  return at::from_blob(elements, sizes,
                       at::TensorOptions().dtype(torch_type<T>()).device(at::kCPU));
}

template <class O>
concept HasTorchSlots = requires { TorchSlots<O>::slots.size(); };

template <class O>
concept CountsTorchSteps = requires(typename TorchSlots<O>::State& state) {
  TorchSlots<O>::set_step(state, std::int64_t{});
};

/// A parameter's key in `Optimizer::state()`: text in libtorch 1, an address in libtorch 2.
template <class O>
[[nodiscard]] auto torch_state_key(O& optimizer, const at::Tensor& parameter) {
  using Key = typename std::remove_cvref_t<decltype(optimizer.state())>::key_type;
  if constexpr (std::is_same_v<Key, std::string>) {
    std::ostringstream text;
    text << parameter.unsafeGetTensorImpl();
    return text.str();
  } else {
    return static_cast<void*>(parameter.unsafeGetTensorImpl());
  }
}

/// Gives a parameter the state of one that was stepped `steps` times.
/// @param slots the used ones
template <class O>
void set_torch_state(O& optimizer, const at::Tensor& parameter, std::span<const at::Tensor> slots,
                     std::int64_t steps) {
  if (slots.empty() && !CountsTorchSteps<O>) return;  // SGD takes any state for a momentum buffer
  auto state = std::make_unique<typename TorchSlots<O>::State>();
  const auto tensors = TorchSlots<O>::tensors(*state);
  for (std::size_t s = 0; s < slots.size(); ++s) *tensors[s] = slots[s];
  if constexpr (CountsTorchSteps<O>) TorchSlots<O>::set_step(*state, steps);
  optimizer.state()[torch_state_key(optimizer, parameter)] = std::move(state);
}

}  // namespace detail

/// Any `torch::optim::Optimizer` that `TorchSlots` knows, as one of zero's whole-tensor optimizers:
/// libtorch computes, zero keeps the state, sharded.
/// @code
/// zero::ZeroSharded optimizer{
///     zero::TorchOptimizer<::torch::optim::Adam>{::torch::optim::AdamOptions(1e-3)}, store, comm,
///     zero::BalancedPartition{}};
/// optimizer.groups()[0].options.lr(1e-4);
/// @endcode
///
/// The bits are those of a plain `O` that steps whole tensors with the same reduced gradients.
/// libtorch splits large tensors among its threads, so give all ranks the same number of them
/// (`at::set_num_threads`), and processors alike; all ranks agree in any case, since one rank's
/// result goes to all. A parameter without a gradient on any rank is not stepped, as by libtorch.
///
/// Adam, AdamW and SGD have the names, slots and options of `zero::Adam`, `zero::AdamW` and
/// `zero::Sgd`, so each loads the other's checkpoints, and `load_torch` and `save_torch` take them.
///
/// Each update makes an `O` for one tensor, which costs a few microseconds, and `O` allocates
/// temporaries of the tensor's size. What `O` throws while it steps (no memory, say) flies on and
/// leaves the optimizer failed on all ranks.
/// @tparam O constructible from a `std::vector<at::Tensor>` and its options
template <class O>
struct TorchOptimizer {
  static_assert(std::derived_from<O, ::torch::optim::Optimizer>,
                "zero: TorchOptimizer wraps a torch::optim::Optimizer");
  static_assert(detail::HasTorchSlots<O>,
                "zero: it is not known where this optimizer of libtorch's keeps its state; "
                "specialise zero::TorchSlots for it, as zero/interop/torch/slots.hpp says (not for "
                "LBFGS, which needs all parameters at once and a closure)");
  using Slots = TorchSlots<O>;
  using torch_type = O;

  typename Slots::Options options{};
  /// Steps up the gradient: what libtorch's C++ has no option for, and zero's and Python's have.
  bool maximize = false;

  static constexpr auto slots = Slots::slots;
  static constexpr std::string_view name = [] {
    if constexpr (requires { Slots::name; }) return std::string_view(Slots::name);
    return std::string_view();
  }();

  [[nodiscard]] std::size_t used_slots() const {
    if constexpr (requires { Slots::used_slots(options); }) return Slots::used_slots(options);
    return slots.size();
  }

  template <class Self, class F>
  static void for_each_option(Self& self, F&& f)
    requires requires { Slots::for_each_option(self.options, f); }
  {
    Slots::for_each_option(self.options, f);
    f("maximize", self.maximize);
  }

  /// Throws `UsageError` with libtorch's words for options that it refuses.
  void validate() const {
    try {
      O(std::vector<at::Tensor>{}, options);
    } catch (const c10::Error& error) {
      throw UsageError(std::string("TorchOptimizer: ") + error.what_without_backtrace());
    }
  }

  /// Throws `UsageError` where libtorch's state is not as `TorchSlots` says.
  template <class T>
    requires std::same_as<T, float> || std::same_as<T, double>
  void update(TensorRef<T> tensor, std::array<std::span<T>, Slots::slots.size()> state,
              std::int64_t t) const {
    if (tensor.values.empty()) return;
    at::Tensor parameter = detail::torch_view(tensor.shape, tensor.values.data());
    // libtorch has no const tensors; it reads gradients only.
    const at::Tensor gradient =
        detail::torch_view(tensor.shape, const_cast<T*>(tensor.gradient.data()));
    parameter.mutable_grad() = maximize ? gradient.neg() : gradient;

    // On the first step libtorch makes the state, some of it when it is constructed.
    std::vector<at::Tensor> known;
    if (t == 1) known.push_back(parameter);
    O optimizer(std::move(known), options);
    const std::size_t used = used_slots();
    std::array<at::Tensor, Slots::slots.size()> views;
    for (std::size_t s = 0; s < used; ++s) {
      views[s] = detail::torch_view(tensor.shape, state[s].data());
    }
    if (t != 1) {
      optimizer.param_groups().front().params().push_back(parameter);
      detail::set_torch_state(optimizer, parameter, std::span(views).first(used), t - 1);
    }
    optimizer.step();
    const auto made = optimizer.state().find(detail::torch_state_key(optimizer, parameter));
    if (made == optimizer.state().end()) return;
    const auto kept = Slots::tensors(static_cast<typename Slots::State&>(*made->second));
    for (std::size_t s = 0; s < used; ++s) keep(s, *kept[s], views[s]);
  }

 private:
  /// Brings state that libtorch has made to where zero keeps it.
  static void keep(std::size_t s, const at::Tensor& made, at::Tensor& kept) {
    if (!made.defined() || made.data_ptr() == kept.data_ptr()) return;
    if (made.sizes() != kept.sizes() || made.scalar_type() != kept.scalar_type()) {
      std::ostringstream text;
      text << "TorchOptimizer: the state '" << slots[s] << "' of a parameter of " << kept.sizes()
           << " " << kept.scalar_type() << " is " << made.sizes() << " " << made.scalar_type()
           << ", but zero keeps what has the parameter's shape and type; let TorchSlots name such "
              "state alone";
      throw UsageError(text.str());
    }
    kept.copy_(made);
  }
};

static_assert(WholeTensorOptimizer<TorchOptimizer<::torch::optim::Adam>, float> &&
              WholeTensorOptimizer<TorchOptimizer<::torch::optim::SGD>, double>);

/// The part of a sharded `TorchOptimizer<O>` that this rank keeps, as a plain `O`: over the
/// parameters whose state is here, in the store's order, in the same groups, with a copy of their
/// state and their step counts. So libtorch's own means read it: `state()`, `torch::save`. With one
/// rank, or `Replicated`, that is everything; from several, `zero::save` and `consolidate` write
/// one checkpoint.
///
/// Parameters are the store's tensors where its elements have a `tensor()`, else views of their
/// values, which live as long as these do. At stage 3 values are there while their unit is
/// acquired. State has the type that it is kept in, of 16-bit parameters mostly float.
///
/// To be called between steps. Throws `UsageError` for the option `maximize`, which libtorch lacks.
/// @param sharded a `ZeroSharded<TorchOptimizer<O>, …>`, O being constructible from a
///        `std::vector<torch::optim::OptimizerParamGroup>` and its options, too
template <class Sharded>
[[nodiscard]] auto torch_optimizer(Sharded& sharded) {
  using O = typename Sharded::optimizer_type::torch_type;
  using Options = typename TorchSlots<O>::Options;
  struct Kept {
    std::size_t parameter;
    at::Tensor tensor;
    std::vector<at::Tensor> slots;
  };
  auto& state = detail::EngineAccess::engine_of(sharded).usable_state();
  std::vector<Kept> all;
  state.for_each_lane([&](auto& lane) {
    state.for_each_kept(lane, *state.layout, [&](const Fragment& f, std::size_t begin) {
      const std::span<const std::size_t> shape = state.parameters[f.parameter].shape;
      auto&& parameter = detail::parameter_at(state.store(), f.parameter);
      Kept kept{f.parameter, {}, {}};
      if constexpr (requires { at::Tensor(parameter.tensor()); }) {
        kept.tensor = parameter.tensor();
      } else {
        detail::visit_span(parameter.values(), [&](auto values) {
          kept.tensor = detail::torch_view(shape, values.data());
        });
      }
      const std::size_t used = zero::used_slots(state.groups[state.parameters[f.parameter].group]);
      for (std::size_t s = 0; s < used; ++s) {
        kept.slots.push_back(detail::torch_view(shape, lane.state[s].data() + begin).clone());
      }
      all.push_back(std::move(kept));
    });
  });
  std::ranges::sort(all, {}, &Kept::parameter);

  std::vector<std::vector<at::Tensor>> tensors(state.groups.size());
  for (const Kept& kept : all) {
    tensors[state.parameters[kept.parameter].group].push_back(kept.tensor);
  }
  std::vector<::torch::optim::OptimizerParamGroup> groups;
  for (std::size_t g = 0; g < tensors.size(); ++g) {
    if (state.groups[g].maximize) {
      throw UsageError("torch_optimizer: the options of group " + std::to_string(g) +
                       " have maximize, which libtorch lacks; turn it off");
    }
    groups.emplace_back(std::move(tensors[g]));
  }
  O optimizer(groups, state.groups[0].options);
  // Not before: libtorch 2 would take what has its default value from the first group.
  for (std::size_t g = 0; g < groups.size(); ++g) {
    optimizer.param_groups()[g].set_options(std::make_unique<Options>(state.groups[g].options));
  }
  for (const Kept& kept : all) {
    const std::int64_t steps = state.step_counts[kept.parameter];
    if (steps != 0) detail::set_torch_state(optimizer, kept.tensor, kept.slots, steps);
  }
  return optimizer;
}

}  // namespace zero
