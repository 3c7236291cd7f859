// SPDX-License-Identifier: Apache-2.0
/// @file
/// A libtorch tensor as a parameter.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/ScalarType.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <sstream>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "zero/attributes.hpp"
#include "zero/element.hpp"
#include "zero/error.hpp"
#include "zero/interop/torch/element.hpp"
#include "zero/parameter.hpp"

namespace zero {

namespace detail {

/// Notices writes to a gradient that has been marked: by what the framework counts, so not those
/// to plain memory.
class TorchWatch {
 public:
  void begin(const ::at::Tensor& gradient) {
    version_ = gradient.defined() && !gradient.is_inference() ? gradient._version() : none;
  }
  /// Ends it. Whether the gradient was written to since it began.
  [[nodiscard]] bool end(const ::at::Tensor& gradient) {
    const std::int64_t then = std::exchange(version_, none);
    return then != none && gradient.defined() && gradient._version() != then;
  }

 private:
  static constexpr std::int64_t none = -1;
  std::int64_t version_ = none;
};

}  // namespace detail

/// A leaf tensor in host memory, with a name. It is a handle: copies mean the same tensor. The
/// optimizer moves its values by `set_data`, so the tensor stays the one that modules, graphs and
/// other handles know.
///
/// Frozen is what doesn't require gradients. What autograd leaves in `grad()` is the gradient: none
/// where that is undefined, as after a `zero_grad` that sets gradients to none.
/// @tparam T the element types that tensors may have at run time
template <Element... T>
class BasicTorchParam {
 public:
  using Values = std::variant<std::span<T>...>;

  /// Throws `UsageError` naming the parameter for a tensor that is undefined, not in host memory,
  /// not dense and row-major, not a leaf, of another element type, or made in inference mode.
  BasicTorchParam(std::string name, ::at::Tensor tensor, std::size_t group = 0)
      : name_(std::move(name)), tensor_(std::move(tensor)), group_(group) {
    if (!tensor_.defined()) refuse("is undefined; give it a tensor");
    require_dense(tensor_, "lies", "move it by to(torch::kCPU)");
    if (!tensor_.is_contiguous()) {
      refuse("is not contiguous (strides " + text_of(tensor_.strides()) + " of shape " +
             text_of(tensor_.sizes()) + "); make it so by tensor.set_data(tensor.contiguous())");
    }
    if (!tensor_.is_leaf()) {
      refuse("is no leaf, but computed from other tensors, so that it gets no gradient; detach it");
    }
    if (!has_type(tensor_)) {
      refuse(std::string("is of type ") + ::c10::toString(tensor_.scalar_type()) + ", not one of" +
             ((' ' + std::string(element_traits<T>::name)) + ...));
    }
    if (tensor_.is_inference() && tensor_.requires_grad()) {
      refuse("was made in inference mode, so that it can't be trained; make it outside");
    }
    for (const auto extent : tensor_.sizes()) shape_.push_back(static_cast<std::size_t>(extent));
    attributes_.frozen = !tensor_.requires_grad();
  }

  [[nodiscard]] const ::at::Tensor& tensor() const noexcept { return tensor_; }

  [[nodiscard]] const std::string& name() const noexcept { return name_; }
  [[nodiscard]] std::span<const std::size_t> shape() const noexcept { return shape_; }
  [[nodiscard]] Values values() const { return span_of(tensor_); }

  /// Throws `UsageError` naming the parameter for a gradient that is sparse, of another type or not
  /// in host memory. One that isn't row-major is replaced by a copy that is.
  [[nodiscard]] Values gradient() const {
    const ::c10::InferenceMode off(false);  // what is made here, backward adds to
    gather_ties();
    const ::at::Tensor& gradient = tensor_.grad();
    if (!gradient.defined()) return none();
    require_gradient(gradient);
    if (bound_.defined() && !is_bound(gradient)) {
      // zero_grad() had let go of it, and backward made another, perhaps with a graph of its own.
      bound_.copy_(gradient.detach().reshape(bound_.sizes()));
      tensor_.mutable_grad() = bound_;
    } else if (!gradient.is_contiguous()) {
      tensor_.mutable_grad() = gradient.contiguous();
    }
    return span_of(tensor_.grad());
  }

  [[nodiscard]] std::size_t group() const noexcept { return group_; }
  /// Which of the optimizer's options apply. To be set before the optimizer is made.
  void set_group(std::size_t group) noexcept { group_ = group; }

  [[nodiscard]] const Attributes& attributes() const noexcept { return attributes_; }
  /// To be set before the optimizer is made. `frozen` and `alias` are known already: leave them.
  [[nodiscard]] Attributes& attributes() noexcept { return attributes_; }

  void rebind(Values values, std::shared_ptr<const void> owner) {
    tensor_.set_data(tensor_over(values, std::move(owner)));
  }
  void rebind_gradient(Values gradient, std::shared_ptr<const void> owner) {
    bound_ = tensor_over(gradient, std::move(owner));
    tensor_.mutable_grad() = bound_;
  }
  void release_gradient() { tensor_.mutable_grad().reset(); }

  /// For hooks, which may outlive this handle.
  [[nodiscard]] const std::shared_ptr<detail::TorchWatch>& watch() const noexcept { return watch_; }

  /// Another tensor with the same storage, which gets a gradient of its own: it is added to this
  /// one's. `BasicTorchParams` finds these.
  void tie(::at::Tensor other) { ties_.push_back(std::move(other)); }
  [[nodiscard]] bool is_tied_by_storage() const noexcept { return !ties_.empty(); }

 private:
  [[noreturn]] void refuse(const std::string& what) const {
    throw UsageError("parameter '" + name_ + "' " + what);
  }
  template <class X>
  [[nodiscard]] static std::string text_of(const X& x) {
    std::ostringstream text;
    text << x;
    return text.str();
  }
  [[nodiscard]] static bool has_type(const ::at::Tensor& tensor) {
    return ((tensor.scalar_type() == ::c10::CppTypeToScalarType<T>::value) || ...);
  }

  void require_dense(const ::at::Tensor& tensor, const char* lies, const char* advice) const {
    if (tensor.layout() != ::at::kStrided) {
      refuse(std::string(lies) + " in a sparse layout (" + text_of(tensor.layout()) +
             "), but only dense tensors can be stepped; use dense ones (of an embedding: "
             "EmbeddingOptions::sparse(false))");
    }
    if (!tensor.device().is_cpu()) {
      refuse(std::string(lies) + " on device " + text_of(tensor.device()) +
             ", not in host memory; " + advice);
    }
  }
  void require_gradient(const ::at::Tensor& gradient) const {
    require_dense(gradient, "has a gradient that lies", "make it on the parameter's device");
    if (gradient.scalar_type() != tensor_.scalar_type()) {
      refuse(std::string("has a gradient of type ") + ::c10::toString(gradient.scalar_type()) +
             ", but is itself of type " + ::c10::toString(tensor_.scalar_type()));
    }
    if (gradient.numel() != tensor_.numel()) {
      refuse("has a gradient of shape " + text_of(gradient.sizes()) + ", but is itself of shape " +
             text_of(tensor_.sizes()));
    }
  }

  template <class F>
  Values with_type(F&& f) const {
    Values result;
    const auto type = tensor_.scalar_type();
    (void)((type == ::c10::CppTypeToScalarType<T>::value &&
            (result = f.template operator()<T>(), true)) ||
           ...);
    return result;
  }
  [[nodiscard]] Values span_of(const ::at::Tensor& tensor) const {
    return with_type([&]<class X> {
      return std::span<X>(static_cast<X*>(tensor.data_ptr()),
                          static_cast<std::size_t>(tensor.numel()));
    });
  }
  [[nodiscard]] Values none() const {
    return with_type([]<class X> { return std::span<X>(); });
  }

  /// This tensor's shape and type over memory that lives as long as `owner`.
  [[nodiscard]] ::at::Tensor tensor_over(const Values& memory,
                                         std::shared_ptr<const void> owner) const {
    const ::c10::InferenceMode off(false);  // or it could never be trained
    void* const data = std::visit([](auto span) -> void* { return span.data(); }, memory);
    return ::at::from_blob(
        data, tensor_.sizes(), [owner = std::move(owner)](void*) {},
        ::at::TensorOptions().dtype(tensor_.scalar_type()));
  }

  [[nodiscard]] bool is_bound(const ::at::Tensor& gradient) const {
    return bound_.defined() && gradient.defined() && gradient.data_ptr() == bound_.data_ptr();
  }

  /// The gradients of all uses become one.
  void gather_ties() const {
    for (const ::at::Tensor& other : ties_) {
      const ::at::Tensor theirs = other.grad();
      if (!theirs.defined()) continue;
      require_gradient(theirs);
      ::at::Tensor& mine = tensor_.mutable_grad();
      // One for both, to which backward has added both. (Autograd may also give two tensors one
      // memory each of which is a gradient of its own: that of a.view(…) + b.view(…).)
      if (mine.is_same(theirs) || (is_bound(mine) && is_bound(theirs))) continue;
      if (mine.defined()) {
        require_gradient(mine);
        mine = mine.detach().add(theirs.detach().reshape(mine.sizes()));
      } else {
        mine = theirs.detach().reshape(tensor_.sizes());
      }
      other.mutable_grad().reset();
    }
  }

  std::string name_;
  ::at::Tensor tensor_;
  std::vector<std::size_t> shape_{};
  std::vector<::at::Tensor> ties_{};
  std::shared_ptr<detail::TorchWatch> watch_ = std::make_shared<detail::TorchWatch>();
  mutable ::at::Tensor bound_{};  ///< where `rebind_gradient` put the gradient
  std::size_t group_;
  Attributes attributes_{};
};

static_assert(RebindableParameter<BasicTorchParam<float>> &&
              RebindableGradient<BasicTorchParam<float, double>>);

}  // namespace zero
