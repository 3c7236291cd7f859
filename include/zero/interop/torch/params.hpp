// SPDX-License-Identifier: Apache-2.0
/// @file
/// A libtorch module's parameters, or any list of tensors, as a store.
#pragma once

// First, or clang can't read libtorch 1.13 as C++20: a vector of this type is used before it is
// defined.
#include <ATen/core/ivalue.h>

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <concepts>
#include <cstddef>
#include <memory>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "zero/element.hpp"
#include "zero/error.hpp"
#include "zero/interop/torch/element.hpp"
#include "zero/interop/torch/param.hpp"
#include "zero/parameter.hpp"

namespace zero {

/// The parameters of a `torch::nn::Module`, in the order of `named_parameters()`, or tensors with
/// names. Tensors that share their storage are tied: stepped once, by the sum of their gradients.
///
/// @code
/// zero::TorchParams params{*model};
/// for (auto& p : params) {
///   if (p.tensor().dim() < 2) p.set_group(1);  // biases and norms: no weight decay
/// }
/// zero::ZeroSharded optimizer{
///     zero::Groups{zero::AdamW{.lr = 1e-3}, zero::AdamW{.lr = 1e-3, .weight_decay = 0}}, params,
///     comm};
/// @endcode
///
/// `torch::load` and `Module::to` give a module other memory: call them before the optimizer is
/// made, or `copy_` from another module within a `NoGradGuard`. Before every step the module must
/// still have the same parameters; otherwise `step` throws `UsageError` naming one, on all ranks.
/// What it gets later is stepped after `append_new` and `ZeroSharded::add_param_group`.
/// @tparam T the element types that tensors may have. Fewer compile faster:
/// `BasicTorchParams<float>`.
template <Element... T>
class BasicTorchParams {
 public:
  using Param = BasicTorchParam<T...>;
  using Named = std::vector<std::pair<std::string, ::at::Tensor>>;

  /// Throws `UsageError` as `BasicTorchParam` does. A module that no `std::shared_ptr` owns must
  /// outlive this.
  explicit BasicTorchParams(::torch::nn::Module& module)
      : module_(&module), keeps_module_(module.weak_from_this().lock()) {
    (void)append_new(0);
  }
  /// Of a module's holder or pointer.
  template <class Pointer>
    requires requires(Pointer& pointer) {
      { *pointer } -> std::convertible_to<::torch::nn::Module&>;
    }
  explicit BasicTorchParams(Pointer& module) : BasicTorchParams(*module) {}
  explicit BasicTorchParams(const Named& tensors) { append(tensors, 0); }
  /// Their names are their indices.
  explicit BasicTorchParams(const std::vector<::at::Tensor>& tensors) {
    Named named;
    for (const ::at::Tensor& tensor : tensors) {
      named.emplace_back(std::to_string(named.size()), tensor);
    }
    append(named, 0);
  }

  [[nodiscard]] auto begin() noexcept { return params_.begin(); }
  [[nodiscard]] auto end() noexcept { return params_.end(); }
  [[nodiscard]] auto begin() const noexcept { return params_.begin(); }
  [[nodiscard]] auto end() const noexcept { return params_.end(); }
  [[nodiscard]] std::size_t size() const noexcept { return params_.size(); }
  [[nodiscard]] Param& operator[](std::size_t i) noexcept { return params_[i]; }
  [[nodiscard]] const Param& operator[](std::size_t i) const noexcept { return params_[i]; }

  /// More tensors; `ZeroSharded::add_param_group` makes them known to an optimizer that is there
  /// already. Where this throws `UsageError`, as `BasicTorchParam` does, nothing is appended.
  void append(const Named& tensors, std::size_t group) {
    std::unordered_map<const void*, std::size_t> by_storage;
    std::vector<Param> all = params_;
    const auto note = [&](std::size_t i) {
      const ::at::Tensor& tensor = all[i].tensor();
      return tensor.numel() == 0 ? i : by_storage.try_emplace(tensor.data_ptr(), i).first->second;
    };
    for (std::size_t i = 0; i < all.size(); ++i) (void)note(i);
    for (const auto& [name, tensor] : tensors) {
      all.emplace_back(name, tensor, group);
      const std::size_t leader = note(all.size() - 1);
      if (leader != all.size() - 1) tie(all[leader], all.back(), leader);
    }
    params_ = std::move(all);
  }

  /// Appends those of the module's parameters that are not here yet, in its order; returns how
  /// many. Throws as `append`.
  std::size_t append_new(std::size_t group) {
    Named added;
    if (module_ != nullptr) {
      std::unordered_set<const void*> known;
      for (const Param& param : params_) known.insert(identity_of(param.tensor()));
      for (const auto& item : module_->named_parameters()) {
        if (!known.contains(identity_of(item.value())))
          added.emplace_back(item.key(), item.value());
      }
      append(added, group);
      in_module_ = identities();
    }
    return added.size();
  }

  /// What every step begins with. Throws `UsageError` where the module's parameters are no longer
  /// those that are here, where one has been unfrozen, or where a gradient has been changed since a
  /// hook marked it. Tells autograd that values are about to change, so that a graph of before the
  /// step can't be used after it.
  void before_step() {
    if (module_ != nullptr && identities() != in_module_) refuse_change();
    for (const Param& param : params_) {
      if (param.attributes().frozen && param.tensor().requires_grad()) {
        throw UsageError("parameter '" + param.name() +
                         "' requires gradients now, but did not when its optimizer was made, which "
                         "has no state for it; make the optimizer anew");
      }
    }
    std::string written;
    for (const Param& param : params_) {
      if (param.watch()->end(param.tensor().grad()) && written.empty()) written = param.name();
    }
    if (!written.empty()) {
      throw UsageError(
          "parameter '" + written +
          "' had its gradient changed after backward, when it may have been sent; leave "
          "gradients alone between backward and step: clip by the optimizer's "
          "clip_grad_norm, and scale the loss instead");
    }
    for (const Param& param : params_) {
      if (!param.attributes().frozen) param.tensor().unsafeGetTensorImpl()->bump_version();
    }
  }

 private:
  /// What copies of a handle have in common.
  [[nodiscard]] static const void* identity_of(const ::at::Tensor& tensor) {
    return tensor.unsafeGetTensorImpl();
  }
  [[nodiscard]] std::vector<const void*> identities() const {
    std::vector<const void*> all;
    for (const ::at::Tensor& tensor : module_->parameters()) all.push_back(identity_of(tensor));
    return all;
  }

  void tie(Param& leader, Param& other, std::size_t index) {
    if (leader.tensor().numel() != other.tensor().numel() ||
        leader.tensor().scalar_type() != other.tensor().scalar_type()) {
      return;  // they overlap, which the optimizer refuses
    }
    if (leader.attributes().frozen != other.attributes().frozen) {
      throw UsageError("parameters '" + leader.name() + "' and '" + other.name() +
                       "' share their storage, but only one of them requires gradients; let both "
                       "require them, or neither");
    }
    other.attributes().alias = index;
    if (identity_of(leader.tensor()) != identity_of(other.tensor())) leader.tie(other.tensor());
  }

  [[noreturn]] void refuse_change() const {
    std::unordered_set<const void*> then(in_module_.begin(), in_module_.end());
    std::size_t common = 0;
    for (const auto& item : module_->named_parameters()) {
      if (then.contains(identity_of(item.value()))) {
        ++common;
        continue;
      }
      throw UsageError("the module has a parameter '" + item.key() +
                       "' that it did not have when its optimizer was made; call append_new of the "
                       "store and then add_param_group, or make the optimizer anew");
    }
    throw UsageError("the module has " + std::to_string(common) + " parameters, but had " +
                     std::to_string(then.size()) +
                     " when its optimizer was made (or has them in another order); make the "
                     "optimizer anew");
  }

  ::torch::nn::Module* module_ = nullptr;
  std::shared_ptr<::torch::nn::Module> keeps_module_{};
  std::vector<const void*> in_module_{};  ///< what the module had, in its order
  std::vector<Param> params_{};
};

/// For all element types that libtorch shares with zero.
using TorchParams = BasicTorchParams<float, double, ::c10::Half, ::c10::BFloat16>;
using TorchParam = TorchParams::Param;

static_assert(ParamStore<TorchParams> && ParamStore<BasicTorchParams<float>>);

}  // namespace zero
