// SPDX-License-Identifier: Apache-2.0
/// @file
/// One `join` on one rank: what its steps tell the peers of it, and what ranks make of that.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <optional>
#include <string>
#include <tuple>

#include "zero/detail/agreement.hpp"
#include "zero/error.hpp"
#include "zero/join_options.hpp"

namespace zero::detail {

/// What a step of an engine came to.
enum class StepEnd : std::uint8_t {
  applied,
  skipped,   ///< on all ranks, for a gradient that is not finite
  no_input,  ///< no rank of the join has any: nothing was stepped, and the join is over
  raised,    ///< some rank of the join has none, and the ranks want to hear of it
};

/// What a rank tells its peers in each step.
struct JoinWord {
  std::uint64_t scope = 0;  ///< 0 outside of any join, else 1 and its options
  std::uint64_t ended = 0;  ///< 1 once this rank has no more input
};

/// Who still has input in the step under way. Outside of a join all ranks have.
struct Inputs {
  int ranks = 0;         ///< how many have
  int first_ended = -1;  ///< the lowest that has none
};

/// The same on all ranks, given what each of them said; throws where not all are in the same join.
/// @param word_of the word of a rank
template <class F>
[[nodiscard]] Inputs agree_on_inputs(int world, const F& word_of) {
  const std::uint64_t scope = word_of(0).scope;
  Inputs inputs;
  for (int r = 0; r < world; ++r) {
    const JoinWord theirs = word_of(r);
    if (theirs.scope != scope) {
      const std::string who = "rank " + std::to_string(r);
      throw AgreedRefusal(
          theirs.scope != 0 && scope != 0
              ? "step: " + who +
                    "'s JoinOptions differ from rank 0's; give all ranks the same. "
                    "Nothing has changed"
              : "step: " + who + " steps " + (scope == 0 ? "in" : "outside of") +
                    " a join, unlike rank 0; all ranks call join, around the same steps. Nothing "
                    "has changed");
    }
    if (theirs.ended == 0) {
      ++inputs.ranks;
    } else if (inputs.first_ended < 0) {
      inputs.first_ended = r;
    }
  }
  return inputs;
}

/// Shared by the engines that one `join` steps. Threads that mark gradients look at it.
class JoinScope {
 public:
  /// The options must outlive it.
  explicit JoinScope(const JoinOptions& options) noexcept : options_(&options) {}

  [[nodiscard]] const JoinOptions& options() const noexcept { return *options_; }
  [[nodiscard]] JoinWord word() const noexcept {
    const auto mean = static_cast<std::uint64_t>(options_->mean);
    const auto end = static_cast<std::uint64_t>(options_->when_first_ends);
    return {1 + mean + (end << 8U), std::uint64_t{input_ended()}};
  }

  /// This rank has no more batches, and serves.
  void end_input() noexcept { input_ended_ = true; }
  [[nodiscard]] bool input_ended() const noexcept { return input_ended_; }

  /// All ranks have heard the same refusal, or that inputs ended. Those that serve leave then, so
  /// nobody would answer another step.
  void close() noexcept { closed_ = true; }
  [[nodiscard]] bool closed() const noexcept { return closed_; }
  void require_open(const char* verb) const {
    if (!closed_) return;
    throw UsageError(std::string(verb) +
                     ": an earlier step of this join threw on all ranks, which ended the join; "
                     "leave its body");
  }

 private:
  const JoinOptions* options_;
  std::atomic<bool> input_ended_{false};
  std::atomic<bool> closed_{false};
};

/// While it lives an engine's steps are the scope's.
template <class Engine>
class JoinEntry {
 public:
  JoinEntry(Engine& engine, JoinScope& scope) : engine_(&engine) { engine.enter_join(scope); }
  JoinEntry(const JoinEntry&) = delete;
  JoinEntry& operator=(const JoinEntry&) = delete;
  ~JoinEntry() { engine_->leave_join(); }

 private:
  Engine* engine_;
};

/// `zero::join` on what stands behind the optimizers.
template <class Body, class... Engines>
void join(Body& body, const JoinOptions& options, Engines&... engines) {
  JoinScope scope(options);
  std::tuple<std::optional<JoinEntry<Engines>>...> entries;
  std::apply([&](auto&... entry) { (entry.emplace(engines, scope), ...); }, entries);
  // What all ranks threw alike they need not be told again.
  const auto tell = [&](const char* why) noexcept {
    if (!scope.closed()) (engines.abandon_join(why), ...);
  };
  try {
    body();
    scope.end_input();
    const auto serve = [&] {
      if (options.before_serving) options.before_serving();
      return (engines.serve() && ...);
    };
    while (!scope.closed() && serve()) {
    }
  } catch (const std::exception& error) {
    tell(error.what());
    throw;
  } catch (...) {
    tell("an exception that is no std::exception");
    throw;
  }
}

/// Leads from an optimizer to its engine.
struct EngineAccess {
  template <class Optimizer>
  [[nodiscard]] static decltype(auto) engine_of(Optimizer& optimizer) noexcept {
    static_assert(has_engine<Optimizer>,
                  "zero: this takes a zero::ZeroSharded that is not const; where there is a path, "
                  "too, the optimizer comes first");
    if constexpr (has_engine<Optimizer>) return (*optimizer.engine_);
  }

 private:
  template <class Optimizer>
  static constexpr bool has_engine = requires(Optimizer& optimizer) { *optimizer.engine_; };
};

}  // namespace zero::detail
