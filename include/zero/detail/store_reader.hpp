// SPDX-License-Identifier: Apache-2.0
/// @file
/// What a rank reads of the caller's store after construction: gradients, and whether everything is
/// still what and where it was.
#pragma once

#include <cstddef>
#include <ranges>
#include <span>
#include <string>
#include <tuple>
#include <type_traits>
#include <vector>

#include "zero/detail/inspect.hpp"
#include "zero/detail/store.hpp"
#include "zero/error.hpp"
#include "zero/memory.hpp"

namespace zero::detail {

/// Throws `UsageError` that names the verb and the parameter.
/// @tparam State an `EngineState`
template <class State>
class StoreReader {
  using elements = typename State::elements;

 public:
  explicit StoreReader(State& state) : state_(state) {}

  /// Where there is no parameter i.
  void require(std::size_t i, const char* verb) const {
    if (i >= state_.parameters.size()) {
      throw UsageError(std::string(verb) + ": there is no parameter " + std::to_string(i) +
                       "; the store has " + std::to_string(state_.parameters.size()));
    }
  }
  /// The caller's container may have changed behind the optimizer's back. One that has grown is on
  /// its way to add_param_group, unless it is stepped.
  void require_size(const char* verb, bool may_have_grown = true) {
    const std::size_t shown = std::ranges::size(state_.store());
    if (shown == state_.parameters.size()) return;
    if (may_have_grown && shown > state_.parameters.size()) return;
    throw UsageError(std::string(verb) + ": the store shows " + std::to_string(shown) +
                     " parameters, but this optimizer has " +
                     std::to_string(state_.parameters.size()) +
                     "; call add_param_group where it has grown, and take none away");
  }
  /// A store may have a word to say.
  void before_step() {
    if constexpr (requires { state_.store().before_step(); }) {
      try {
        state_.store().before_step();
      } catch (const UsageError& error) {
        throw UsageError(std::string("step: ") + error.what());
      }
    }
  }
  /// Where values lie elsewhere than when they were laid out.
  void require_unmoved(std::size_t i) {
    detail::visit_span(detail::parameter_at(state_.store(), i).values(), [&]<class T>(
                                                                             std::span<T> values) {
      const auto& lane = std::get<lane_of<T, elements>::value>(state_.lanes);
      if (values.size() == state_.parameters[i].elements &&
          (values.empty() || values.data() == lane.values[i])) {
        return;
      }
      throw UsageError("step: " + state_.name_of(i) +
                       "'s values are no longer where they were; they must stay in place while an "
                       "optimizer uses them: copy new numbers to them, or make the optimizer anew");
    });
  }
  /// Where parameter i has no gradient to be asked for.
  void require_trainable(std::size_t i, const char* verb) {
    require_size(verb);
    require(i, verb);
    if (state_.parameters[i].frozen) {
      throw UsageError(std::string(verb) + ": " + state_.name_of(i) +
                       " is frozen and has no gradient");
    }
  }

  /// Where backward writes a gradient of type `T`.
  template <class T>
  std::span<T> gradient_memory(std::size_t leader, const char* verb) {
    std::span<T> memory;
    bool right_type = false;
    detail::visit_span(detail::parameter_at(state_.store(), leader).gradient(), [&](auto span) {
      if constexpr (std::is_same_v<decltype(span), std::span<T>>) {
        memory = span;
        right_type = true;
      }
    });
    if (!right_type) {
      throw UsageError(std::string(verb) + ": " + state_.name_of(leader) +
                       " has another element type than the one asked for");
    }
    const std::size_t wanted = state_.parameters[leader].elements;
    if (memory.size() != wanted || (memory.data() == nullptr && wanted != 0)) {
      throw UsageError(std::string(verb) + ": " + gradient_size(leader, memory.size()));
    }
    if (wanted != 0) require_usable(leader, memory.data(), verb);
    return memory;
  }

  /// Checks a gradient and `notes` where it lies; false where there is none.
  bool record_gradient(std::size_t leader, const char* verb, bool notes = true) {
    return detail::visit_span(
        detail::parameter_at(state_.store(), leader).gradient(), [&](auto span) {
          using T = typename decltype(span)::value_type;
          if (span.empty() && state_.parameters[leader].elements != 0) return false;
          if (span.size() != state_.parameters[leader].elements) {
            throw UsageError(std::string(verb) + ": " + gradient_size(leader, span.size()));
          }
          if (lane_of<T, elements>::value != state_.parameters[leader].lane) {
            throw UsageError(
                std::string(verb) + ": " + state_.name_of(leader) +
                "'s gradient has another element type than its values; make them alike");
          }
          if (!span.empty()) require_usable(leader, span.data(), verb);
          if (!notes) return true;
          std::get<lane_of<T, elements>::value>(state_.lanes).gradients[leader] = span.data();
          state_.present[leader] = 1;
          return true;
        });
  }
  /// Of a gradient that was recorded: the framework may have replaced it, or let go of it.
  void require_gradient_unmoved(std::size_t leader, const char* verb) {
    detail::visit_span(detail::parameter_at(state_.store(), leader).gradient(),
                       [&]<class T>(std::span<T> now) {
                         const auto& lane = std::get<lane_of<T, elements>::value>(state_.lanes);
                         if (state_.parameters[leader].elements == 0) return;
                         if (now.data() != lane.gradients[leader])
                           refuse_moved_gradient(leader, verb);
                       });
  }
  [[noreturn]] void refuse_moved_gradient(std::size_t leader, const char* verb) const {
    throw UsageError(std::string(verb) + ": " + state_.name_of(leader) +
                     "'s gradient is no longer where it was when it was marked ready; leave it "
                     "alone from then until the step, or don't mark it (clip by clip_grad_norm)");
  }

 private:
  [[nodiscard]] std::string gradient_size(std::size_t leader, std::size_t found) const {
    if (found == 0)
      return state_.name_of(leader) +
             " has a null gradient; give it memory first, or use zero::ParamAndGradView or "
             "zero::Stage2";
    return state_.name_of(leader) + "'s gradient has " + std::to_string(found) +
           " elements, but the parameter has " + std::to_string(state_.parameters[leader].elements);
  }

  /// Throws where a gradient lies where it can't be read. Looks at places that are new only.
  void require_usable(std::size_t leader, const void* gradient, const char* verb) {
    if constexpr (State::space != MemorySpace::host) {
      if (leader >= seen_.size()) seen_.resize(state_.parameters.size(), nullptr);
      if (seen_[leader] == gradient) return;
      const std::string wrong = State::Memory::unusable(gradient);
      if (!wrong.empty()) {
        throw UsageError(std::string(verb) + ": " + state_.name_of(leader) + " has a gradient " +
                         wrong);
      }
      seen_[leader] = gradient;
    }
  }

  State& state_;
  std::vector<const void*> seen_{};  ///< by leader, the gradient that was there last
};

}  // namespace zero::detail
