// SPDX-License-Identifier: Apache-2.0
/// @file
/// Gradients marked ready as autograd makes them.
#pragma once

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "zero/detail/join_scope.hpp"
#include "zero/detail/marks.hpp"
#include "zero/error.hpp"
#include "zero/interop/torch/params.hpp"

namespace zero {

/// While it lives, every `backward()` marks the optimizer's parameters ready, each as soon as its
/// gradient is complete, so that buckets are reduced while backward goes on (at stages 2 and 3;
/// their gradients' memory is let go of, too). A parameter that a backward doesn't reach is left to
/// `step`, and so are tensors that are tied by storage alone.
///
/// @code
/// zero::TorchHooks hooks{optimizer};
/// …
/// loss.backward();
/// optimizer.step();
/// @endcode
///
/// One `backward()` a step: for more, `ZeroSharded::accumulate`. After it gradients may have been
/// sent, so leave them alone until the step, which refuses where one was changed, replaced or set
/// to none; clip by `ZeroSharded::clip_grad_norm`. At stage 3 a parameter's unit is acquired while
/// backward makes its gradient. What a mark throws comes out of `backward()`. Ends before
/// its optimizer does, whose store is a `BasicTorchParams`; parameters that `add_param_group` adds
/// need new hooks. Not to be made or destroyed during a `backward()`.
class TorchHooks {
 public:
  template <class Sharded>
  explicit TorchHooks(Sharded& optimizer) {
    auto& engine = detail::EngineAccess::engine_of(optimizer);
    auto& params = optimizer.store();
    const auto hook = [&](std::size_t i, std::vector<std::size_t> marks) {
      auto accumulator = ::torch::autograd::impl::grad_accumulator(params[i].tensor());
      auto mark = std::make_unique<MarkReady<std::remove_reference_t<decltype(engine)>>>(
          engine, params[i], std::move(marks));
      const std::uintptr_t key = accumulator->add_post_hook(std::move(mark));
      hooks_.push_back({std::move(accumulator), key});
    };
    for (std::size_t i = 0; i < params.size(); ++i) {
      const Attributes& attributes = params[i].attributes();
      if (attributes.frozen || attributes.alias || params[i].is_tied_by_storage()) continue;
      std::vector<std::size_t> marks{i};
      for (std::size_t k = i + 1; k < params.size(); ++k) {
        if (params[k].attributes().alias == i) marks.push_back(k);
      }
      hook(i, std::move(marks));
    }
  }
  TorchHooks(const TorchHooks&) = delete;
  TorchHooks& operator=(const TorchHooks&) = delete;
  ~TorchHooks() {
    for (const Hook& hook : hooks_) hook.accumulator->del_post_hook(hook.key);
  }

 private:
  /// Runs when the gradient has been added to `grad()`.
  template <class Engine>
  class MarkReady : public ::torch::autograd::FunctionPostHook {
   public:
    template <class Param>
    MarkReady(Engine& engine, const Param& param, std::vector<std::size_t> marks)
        : engine_(&engine),
          life_(engine.life()),
          tensor_(param.tensor().unsafeGetTensorImpl()),
          watch_(param.watch()),
          marks_(std::move(marks)) {}
    ::torch::autograd::variable_list operator()(const ::torch::autograd::variable_list& outputs,
                                                const ::torch::autograd::variable_list&) override {
      if (life_.expired()) {
        throw UsageError(
            "backward: the optimizer whose gradients these zero::TorchHooks mark is gone; let "
            "hooks "
            "end before their optimizer does (declare them after it)");
      }
      // A function's backward may return no tensor at all.
      if (!tensor_->grad().defined()) return outputs;
      engine_->require_values(marks_.front(), "backward");
      for (const std::size_t i : marks_) engine_->mark(i, detail::Mark::ready);
      watch_->begin(tensor_->grad());
      return outputs;
    }

   private:
    Engine* engine_;
    std::weak_ptr<const void> life_;
    ::at::TensorImpl* tensor_;  ///< its accumulator, and so this hook, keeps it alive
    std::shared_ptr<detail::TorchWatch> watch_;
    std::vector<std::size_t> marks_;  ///< the parameter, and others that are the same tensor
  };

  struct Hook {
    decltype(::torch::autograd::impl::grad_accumulator(
        {})) accumulator;  ///< autograd itself would let go of it
    std::uintptr_t key;
  };
  std::vector<Hook> hooks_{};
};

}  // namespace zero
