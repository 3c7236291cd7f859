// SPDX-License-Identifier: Apache-2.0
/// @file
/// What has been said of each parameter's gradient since the last step.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "zero/detail/inspect.hpp"
#include "zero/error.hpp"

namespace zero::detail {

enum class Mark : std::uint8_t { none, ready, absent };

/// A small state machine a parameter: leased or not, marked once, whole when all its ties are.
/// Not synchronised: the engine's mutex is.
class Marks {
 public:
  explicit Marks(const std::vector<ParameterInfo>& parameters)
      : parameters_(&parameters), state_(parameters.size()) {}

  /// Whether the lease is the first on that gradient since the last step.
  bool begin_lease(std::size_t i) {
    if (state_[i].mark != Mark::none) {
      refuse("gradient", i, "was marked already; lease it before marking it, or step first");
    }
    if (state_[i].leased) refuse("gradient", i, "is leased already; end that lease first");
    for (std::size_t k = 0; k < state_.size(); ++k) {
      if (k != i && state_[k].leased && leader(k) == leader(i)) {
        refuse("gradient", i,
               "is tied to a parameter whose gradient is leased; end that lease first");
      }
    }
    state_[i].leased = true;
    return !std::exchange(state_[leader(i)].written, true);
  }
  void end_lease(std::size_t i) noexcept { state_[i].leased = false; }

  /// Throws unless parameter i may be marked now.
  void require_markable(std::size_t i, const char* verb) const {
    if (state_[i].mark != Mark::none) {
      refuse(verb, i,
             "was marked already in this step; mark each parameter once, then step; several "
             "backward passes make one step within accumulate()");
    }
    if (state_[i].leased) refuse(verb, i, "is still leased; end the lease on its gradient first");
  }

  /// Whether parameter i's mark will be the last that its place waits for.
  [[nodiscard]] bool is_last(std::size_t i) const {
    return state_[leader(i)].marked + 1 == (*parameters_)[leader(i)].ties;
  }
  /// Whether one of a leader's ties has been marked ready.
  [[nodiscard]] bool any_ready(std::size_t leader) const { return state_[leader].ready; }

  /// Whether that was the last mark that the parameter's place waits for.
  bool mark(std::size_t i, Mark mark) {
    state_[i].mark = mark;
    if (mark == Mark::ready) state_[leader(i)].ready = true;
    ++state_[leader(i)].marked;
    return whole(leader(i));
  }

  /// Whether something was written to the gradient that parameter i shares, since the last step.
  [[nodiscard]] bool written(std::size_t i) const { return state_[leader(i)].written; }

  /// Whether all of a leader's ties have been marked.
  [[nodiscard]] bool whole(std::size_t leader) const {
    return state_[leader].marked == (*parameters_)[leader].ties;
  }

  /// Whether anything was marked since the last step.
  [[nodiscard]] bool any() const {
    for (const State& state : state_) {
      if (state.mark != Mark::none) return true;
    }
    return false;
  }
  /// Whether something was leased since the last step.
  [[nodiscard]] bool any_written() const {
    for (const State& state : state_) {
      if (state.written) return true;
    }
    return false;
  }
  [[nodiscard]] bool any_lease() const {
    for (const State& state : state_) {
      if (state.leased) return true;
    }
    return false;
  }
  /// There are more parameters.
  void grow() { state_.resize(parameters_->size()); }

  /// Throws where a gradient is still leased.
  void require_no_lease() const {
    for (std::size_t i = 0; i < state_.size(); ++i) {
      if (state_[i].leased)
        refuse("step", i, "is still leased; end the lease on its gradient first");
    }
  }

  /// Forgets the marks; leases stay, and after a step that was refused so does what was written.
  void reset(bool applied) noexcept {
    for (State& state : state_) {
      state = {.leased = state.leased, .written = state.written && !applied};
    }
  }

 private:
  struct State {
    Mark mark = Mark::none;
    bool leased = false;
    bool written = false;    ///< of a leader: leased at least once since the last step
    std::size_t marked = 0;  ///< of a leader: how many ties have been marked
    bool ready = false;      ///< of a leader: one of them so
  };

  [[nodiscard]] std::size_t leader(std::size_t i) const { return (*parameters_)[i].leader; }
  [[noreturn]] void refuse(const char* verb, std::size_t i, const char* what) const {
    throw UsageError(std::string(verb) + ": " + quoted(i, (*parameters_)[i].name) + " " + what);
  }

  const std::vector<ParameterInfo>* parameters_;
  std::vector<State> state_;
};

}  // namespace zero::detail
