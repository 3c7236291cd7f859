// SPDX-License-Identifier: Apache-2.0
/// @file
/// What stands behind `ZeroSharded`: its verbs, and what they refuse.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <ranges>
#include <span>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "zero/detail/agreement.hpp"
#include "zero/detail/bucket_step.hpp"
#include "zero/detail/engine_state.hpp"
#include "zero/detail/fingerprint.hpp"
#include "zero/detail/hash.hpp"
#include "zero/detail/join_scope.hpp"
#include "zero/detail/marks.hpp"
#include "zero/detail/overlapped_step.hpp"
#include "zero/detail/shared_memory_step.hpp"
#include "zero/detail/store.hpp"
#include "zero/detail/store_reader.hpp"
#include "zero/error.hpp"
#include "zero/join_options.hpp"
#include "zero/layout.hpp"
#include "zero/optimizer.hpp"
#include "zero/settings.hpp"
#include "zero/stage.hpp"

namespace zero::detail {

/// The way of ranks that work in CUDA memory; defined in zero/cuda/.
template <class State>
class DeviceStep;

template <class Opt, class Store, class Comm, class Partition, class View, class Stage,
          class Precision, class Observe>
class Engine {
 public:
  using State = EngineState<Opt, Store, Comm, Partition, View, Stage, Precision, Observe>;
  using elements = typename State::elements;

  /// As `EngineState`.
  Engine(std::vector<Opt> groups, Store&& store, Comm&& comm, Partition partition, View view,
         Stage stage, Precision precision, Observe observer, Settings settings)
      : state_(std::move(groups), std::forward<Store>(store), std::forward<Comm>(comm),
               std::move(partition), std::move(view), std::move(stage), std::move(precision),
               std::move(observer), std::move(settings)),
        reader_(state_),
        marks_(state_.parameters),
        way_(state_) {
    state_.construct_or_abort([&] {
      way_.rebuild();
      Builder<State>(state_).rebind_parameters();
    });
  }

  // Verbs. ZeroSharded documents them.

  /// @param on where `Space` has streams, the one that will write to it
  template <class T, class... On>
  std::span<T> begin_lease(std::size_t i, bool& adds, On... on) {
    const std::scoped_lock lock(mutex_);
    require_usable();
    require_open_join("gradient");
    if constexpr (State::on_device) way_.require_device("gradient", on...);
    reader_.require_trainable(i, "gradient");
    const std::size_t leader = state_.parameters[i].leader;
    if constexpr (State::pools_gradients) {
      require_element<T>(leader, "gradient");
      const bool first = marks_.begin_lease(i);
      adds = !first;
      try {
        or_give_up(false, [&] { way_.open(leader, "gradient", first, on...); });
      } catch (...) {
        marks_.end_lease(i);
        throw;
      }
      return pooled_gradient<T>(leader);
    } else {
      const std::span<T> memory = reader_.template gradient_memory<T>(leader, "gradient");
      adds = !marks_.begin_lease(i);  // not the first on it
      return memory;
    }
  }

  void end_lease(std::size_t i) noexcept {
    const std::scoped_lock lock(mutex_);
    marks_.end_lease(i);
  }

  /// @param on where `Space` has streams, the one that writes the gradient
  template <class... On>
  void mark(std::size_t i, Mark mark, On... on) {
    const char* verb = mark == Mark::ready ? "mark_ready" : "mark_absent";
    const std::scoped_lock lock(mutex_);
    require_usable();
    require_open_join(verb);
    if constexpr (State::space == MemorySpace::cuda) way_.require_device(verb, on...);
    reader_.require_trainable(i, verb);
    marks_.require_markable(i, verb);
    const std::size_t leader = state_.parameters[i].leader;
    const bool counts = accumulating_ != Accumulation::local;
    // Without a stream it is not there yet, so that nothing can be copied: the step will.
    constexpr bool late = State::on_device && State::pools_gradients && sizeof...(On) == 0;
    // What will be let go of is taken when all ties have added to it.
    constexpr bool takes_whole = State::pools_gradients && !State::on_device;
    const bool notes = counts && !late && (!takes_whole || marks_.is_last(i));
    if (mark == Mark::ready && !note_gradient(leader, verb, notes, on...)) {
      throw UsageError(std::string(verb) + ": " + state_.name_of(leader) +
                       (State::pools_gradients
                            ? " has no gradient: none was leased, and it shows none itself; write "
                              "to gradient(i).values(), or call mark_absent"
                            : " has a null gradient; give it memory, or call mark_absent"));
    }
    if (!counts) return;
    if (takes_whole && mark == Mark::absent && notes && marks_.any_ready(leader)) {
      note_gradient(leader, verb, true, on...);
    }
    if constexpr (State::space == MemorySpace::cuda) {
      if (mark == Mark::ready) or_give_up(false, [&] { way_.note_mark(i, on...); });
    }
    if (!marks_.mark(i, mark)) return;
    or_give_up(false, [&] { way_.complete(leader); });
  }

  /// Whether it was applied; on a device, enqueued.
  /// @param on where `Space` has streams, the one that it is enqueued in
  template <class... On>
  bool step(On... on) {
    const StepEnd end = take_step(on...);
    if constexpr (State::on_device) {
      const std::scoped_lock lock(mutex_);
      way_.require_told();
    }
    return end == StepEnd::applied;
  }

  // The verbs of `detail::join`.

  void enter_join(JoinScope& scope) {
    const std::scoped_lock lock(mutex_);
    require_usable();
    if constexpr (State::on_device) {
      throw UsageError(
          "join: on a device ranks step without waiting for each other on the host, so they can't "
          "agree there on who has input; give all ranks as many batches");
    }
    if constexpr (Stage::shards_values) {
      throw UsageError(
          "join: at stage 3 every forward gathers from all ranks, so a rank without input can't "
          "stand aside; give all ranks as many batches, or use zero::Stage2");
    }
    if (state_.join != nullptr) {
      throw UsageError(
          "join: this optimizer is in a join already; name each optimizer once, and "
          "don't nest joins");
    }
    state_.join = &scope;
  }
  void leave_join() noexcept {
    const std::scoped_lock lock(mutex_);
    state_.join = nullptr;
  }
  /// A step without input. Returns false where no rank has any, and nothing was stepped.
  bool serve() {
    if constexpr (State::on_device) {
      return false;  // nothing enters a join
    } else {
      return take_step() != StepEnd::no_input;
    }
  }
  /// This rank can't go on, and the peers must learn why.
  void abandon_join(const char* why) noexcept {
    const std::scoped_lock lock(mutex_);
    give_up("a join", why, false);
  }

  void begin_accumulating(Accumulation mode) {
    const std::scoped_lock lock(mutex_);
    require_usable();
    if (accumulating_) {
      throw UsageError("accumulate: already accumulating; end the earlier scope first");
    }
    if (marks_.any()) {
      throw UsageError(
          "accumulate: gradients were marked already in this step; accumulate first, and mark in "
          "the last backward");
    }
    if (accumulated_ && *accumulated_ != mode) {
      throw UsageError(
          "accumulate: this step has accumulated in the other mode before; use one mode in a step");
    }
    if constexpr (State::pools_gradients) {
      if (mode == Accumulation::sharded) {
        if (state_.join != nullptr) {
          throw UsageError(
              "accumulate: in a join ranks may differ in their backward passes, which sharded "
              "accumulation reduces one by one; use Accumulation::local");
        }
        if (state_.settings.gradients == Gradients::reduced) {
          throw UsageError(
              "accumulate: gradients that the caller has reduced (Settings::gradients) are added "
              "up before that; use Accumulation::local");
        }
        if (marks_.any_written()) {
          throw UsageError(
              "accumulate: gradients were leased in this step outside of a scope of sharded "
              "accumulation; begin it before the backward");
        }
        way_.prepare_to_add();
      }
    } else if (mode == Accumulation::sharded) {
      throw UsageError(
          "accumulate: Accumulation::sharded needs a stage that shards gradients; use zero::Stage2 "
          "or Stage3, or Accumulation::local");
    }
    accumulating_ = accumulated_ = mode;
  }
  /// What goes wrong here is told by the next step.
  void end_accumulating() noexcept {
    const std::scoped_lock lock(mutex_);
    const auto mode = std::exchange(accumulating_, std::nullopt);
    if constexpr (State::pools_gradients) {
      if (mode != Accumulation::sharded || failed_) return;
      try {
        or_give_up(false, [&] {
          try {
            marks_.require_no_lease();
            take_unmarked("accumulate");
          } catch (const UsageError& error) {
            if (gave_up_) throw;
            postponed_ = text_of(error);
          }
          way_.end_round();
        });
        marks_.reset(true);
      } catch (...) {
        lost_ = std::current_exception();
      }
    }
  }

  template <class... On>
  void acquire(int unit, On... on) {
    with_unit("acquire", unit, [&](auto& way) { way.values().acquire(unit, on...); }, on...);
  }
  template <class... On>
  void release(int unit, On... on) {
    with_unit("release", unit, [&](auto& way) { way.values().release(unit, on...); }, on...);
  }

  void clip(std::optional<double> max_norm) {
    const std::scoped_lock lock(mutex_);
    require_usable();
    if (max_norm && !(*max_norm > 0)) {
      throw UsageError("clip_grad_norm: the norm is " + std::to_string(*max_norm) +
                       ", but it must be above 0 (infinity: only measure)");
    }
    Builder<State>(state_).clip(max_norm);
  }

  void reload_masters() {
    const std::scoped_lock lock(mutex_);
    require_usable();
    if constexpr (State::on_device) way_.refresh();
    Builder<State>(state_).reload_masters();
  }

  void append(Opt options) {
    const std::scoped_lock lock(mutex_);
    require_usable();
    std::string refusal = why_not_between_steps("add_param_group");
    or_give_up(false, [&] {
      way_.drain();
      if constexpr (State::on_device) way_.refresh();  // what is made anew begins with that
    });
    try {
      or_give_up(false,
                 [&] { Builder<State>(state_).append(std::move(options), std::move(refusal)); });
    } catch (const AgreedRefusal&) {
      close_join();
      forget_round(false);
      throw;
    }
    or_give_up(true, [&] {
      marks_.grow();
      way_.rebuild();
      Builder<State>(state_).rebind_parameters();
    });
  }

  /// Collective, and between steps: `body(state, changing)` when nothing is under way. Where a rank
  /// refuses, or calls another verb, all throw `UsageError` before that. What `body` throws is this
  /// rank's alone; once it has set `changing`, the optimizer can't go on after that.
  template <class F>
  void between_steps(Topic topic, const char* verb, F&& body) {
    const std::scoped_lock lock(mutex_);
    require_usable();
    const std::string refusal = why_not_between_steps(verb);
    if (state_.alone() && !refusal.empty()) throw UsageError(refusal);
    try {
      or_give_up(false, [&] {
        // What was marked is on its way over the communicator, or over one that is apart from it.
        if constexpr (!State::pools_gradients) way_.drain();
        if (!state_.alone()) {
          try {
            require_same_verb(state_.everyone(), verb, {topic, state_.identity, to_text(refusal)});
          } catch (const AgreedRefusal&) {
            if constexpr (State::pools_gradients) way_.drain();
            throw;
          }
        }
        way_.settle();
      });
    } catch (const AgreedRefusal&) {
      close_join();
      forget_round(false);
      throw;
    }
    // The next step reduces all buckets again.
    if constexpr (!State::pools_gradients) way_.forget();
    bool changing = false;
    or_tell([&] { body(state_, changing); },
            [&](const char* why) { give_up(verb, why, changing); });
    if constexpr (State::on_device) {
      if (changing) way_.restate();
    }
  }

  template <class... On>
  void zero_gradients(On... on) {
    const std::scoped_lock lock(mutex_);
    require_usable();
    reader_.require_size("zero_grad");
    for (std::size_t i = 0; i < state_.parameters.size(); ++i) {
      if (!state_.steps_alone(i)) continue;
      if constexpr (State::pools_gradients && View::gradients == Residency::arena) {
        if (!state_.settings.poison_released) {
          clear_pooled(i);
          continue;
        }
      }
      detail::visit_span(detail::parameter_at(state_.store(), i).gradient(),
                         [&](auto memory) { State::Memory::clear(memory, on...); });
    }
  }

  /// For who marks out of a backward pass: throws where that can't have read parameter i's values.
  void require_values(std::size_t i, const char* verb) {
    if constexpr (Stage::shards_values && !State::on_device) {
      const std::scoped_lock lock(mutex_);
      const int unit = state_.parameters[state_.parameters[i].leader].attributes.unit;
      if (way_.values().is_there(unit)) return;
      throw UsageError(std::string(verb) + ": " + state_.name_of(i) +
                       " has a gradient, but its unit " + std::to_string(unit) +
                       " is not acquired, so that its values were not there; at stage 3 call "
                       "acquire(unit) before forward and release(unit) after backward");
    }
  }

  // Queries.

  /// Expires with this, for who may be called after it.
  [[nodiscard]] std::weak_ptr<const void> life() const noexcept { return life_; }
  [[nodiscard]] State& state() noexcept { return state_; }
  /// `f(state)` while no verb runs.
  template <class F>
  decltype(auto) locked(F&& f) {
    const std::scoped_lock lock(mutex_);
    if constexpr (State::on_device) way_.refresh();
    return std::forward<F>(f)(state_);
  }
  /// The same, for what a failed optimizer must not show: half of its shards are a step ahead.
  [[nodiscard]] State& usable_state() {
    const std::scoped_lock lock(mutex_);
    require_usable();
    return state_;
  }
  [[nodiscard]] std::size_t staging_bytes() const { return way_.staging_bytes(); }
  /// How ranks reach each other.
  [[nodiscard]] auto& way() noexcept { return way_; }
  void require(std::size_t i, const char* verb) const { reader_.require(i, verb); }

 private:
  void require_usable() const {
    if (failed_) {
      throw UsageError("this optimizer failed in step " + std::to_string(state_.step_number) +
                       " with parameters half updated, and can't go on; reload a checkpoint into a "
                       "new one. The failure: " +
                       (failure_.empty() ? "an exception without a text" : failure_));
    }
  }
  void require_open_join(const char* verb) const {
    if (state_.join != nullptr) state_.join->require_open(verb);
  }
  void close_join() noexcept {
    if (state_.join != nullptr) state_.join->close();
  }
  /// Why a verb that belongs between steps can't run, or nothing.
  std::string why_not_between_steps(const std::string& verb) {
    if (state_.join != nullptr) {
      return verb + ": this optimizer is in a join; call it outside of the join";
    }
    bool begun = marks_.any() || marks_.any_lease() || accumulating_;
    // Their memory, and that of their sums, is the optimizer's.
    if constexpr (State::pools_gradients) begun = begun || marks_.any_written() || accumulated_;
    if (begun) {
      return verb +
             ": gradients were marked or leased, or accumulated, in this step; call it between "
             "steps";
    }
    if constexpr (Stage::shards_values) {
      try {
        way_.values().require_none_held(verb.c_str());
      } catch (const UsageError& error) {
        return text_of(error);
      }
    }
    return {};
  }
  /// After what `body` throws nobody can go on, or where `halfway` not this optimizer either.
  template <class F>
  void or_give_up(bool halfway, F&& body) {
    or_tell(body, [&](const char* why) { give_up("a step", why, halfway); });
  }

  template <class... On>
  StepEnd take_step(On... on) {
    const std::scoped_lock lock(mutex_);
    require_usable();
    require_open_join("step");
    if constexpr (State::space == MemorySpace::cuda) way_.require_device("step", on...);
    bool updating = false;
    StepEnd end = StepEnd::applied;
    try {
      or_tell(
          [&] {
            const std::string refusal = finish_marks(on...);
            if constexpr (State::on_device) {
              end = way_.step(refusal, updating, on...);
            } else {
              end = state_.alone() ? step_alone(refusal, updating) : way_.step(refusal, updating);
            }
          },
          [&](const char* why) { give_up("a step", why, updating); });
    } catch (const AgreedRefusal&) {
      close_join();
      forget_round(false);
      throw;
    }
    forget_round(end == StepEnd::applied || end == StepEnd::skipped);
    if (end == StepEnd::raised) {
      close_join();
      throw InputsEnded(state_.inputs.first_ended,
                        "step: rank " + std::to_string(state_.inputs.first_ended) +
                            " has no more input, and JoinEnd::raise ends the join there. Step " +
                            std::to_string(state_.step_number + 1) +
                            " was not taken on any rank, and nothing has changed");
    }
    return end;
  }

  // Of gradients.

  /// A gradient that was not marked counts as ready where there is one.
  /// @param on where `Space` has streams, the one in whose order it is there
  template <class... On>
  void take_unmarked(const char* verb, On... on) {
    for (std::size_t i = 0; i < state_.parameters.size(); ++i) {
      if (!state_.steps_alone(i)) continue;
      bool late = false;
      if constexpr (State::on_device) late = way_.is_late(i);
      // Where gradients stay with the caller a step reads them where they were marked.
      bool marked = false;
      if constexpr (!State::on_device && !State::pools_gradients) marked = state_.present[i] != 0;
      if (late || !marks_.whole(i)) {
        if (!note_gradient(i, verb, true, on...) && marked) reader_.refuse_moved_gradient(i, verb);
      } else if (marked) {
        reader_.require_gradient_unmoved(i, verb);
      }
    }
  }

  /// Checks where a leader's gradient is and, where `notes`, keeps it; false where there is none.
  template <class... On>
  bool note_gradient(std::size_t leader, const char* verb, bool notes, On... on) {
    if constexpr (State::pools_gradients) {
      if (notes) or_give_up(false, [&] { way_.begin_round(); });
      if (marks_.written(leader)) {
        if (notes) note_pooled(leader);
        return true;
      }
      if (!reader_.record_gradient(leader, verb, notes)) return false;
      if (notes) or_give_up(false, [&] { take_over(leader, verb, on...); });
      return true;
    } else {
      return reader_.record_gradient(leader, verb, notes);
    }
  }

  template <class T>
  void require_element(std::size_t leader, const char* verb) const {
    if (state_.parameters[leader].lane == lane_of<T, elements>::value) return;
    throw UsageError(std::string(verb) + ": " + state_.name_of(leader) +
                     " has another element type than the one asked for");
  }
  /// Of stages that pool gradients: where a leader's lies, in memory of the optimizer's.
  template <class T>
  std::span<T> pooled_gradient(std::size_t leader) {
    auto& lane = std::get<lane_of<T, elements>::value>(state_.lanes);
    T* memory = nullptr;
    if constexpr (State::on_device) {
      memory = reinterpret_cast<T*>(way_.pooled_gradient(leader));
    } else {
      memory = lane.gradient_pages->data() + state_.layout->place(leader).offset;
    }
    return {memory, state_.parameters[leader].elements};
  }
  void note_pooled(std::size_t leader) {
    state_.for_each_lane([&]<class Lane>(Lane& lane) {
      if (lane.index != state_.parameters[leader].lane) return;
      lane.gradients[leader] = pooled_gradient<typename Lane::element>(leader).data();
    });
    state_.present[leader] = 1;
  }

  /// To fill it would take memory. What is marked is on its way, and let go of after that.
  void clear_pooled(std::size_t leader) {
    if (marks_.whole(leader)) return;
    state_.for_each_lane([&](auto& lane) {
      if (lane.index != state_.parameters[leader].lane) return;
      const Place& place = state_.layout->place(leader);
      lane.gradient_pages->clear({place.offset, place.offset + place.elements});
    });
  }

  /// A gradient in memory of the framework's stays there until it is sent, unless the framework
  /// would let go of it. One that was moved counts as pooled.
  template <class... On>
  void take_over(std::size_t leader, const char* verb, On... on) {
    auto&& parameter = detail::parameter_at(state_.store(), leader);
    if constexpr (View::gradients == Residency::arena) {
      way_.open(leader, verb, false);
    } else if constexpr (requires { parameter.release_gradient(); }) {
      way_.open(leader, verb, true, on...);
      detail::visit_span(parameter.gradient(), [&]<class T>(std::span<T> from) {
        const std::span<T> to = pooled_gradient<T>(leader);
        State::Memory::copy_within(static_cast<const T*>(from.data()), from.size(), to.data(),
                                   on...);
      });
      note_pooled(leader);
      parameter.release_gradient();
    } else {
      way_.borrow();
    }
  }

  /// Does `body(way)` where units come and go.
  template <class F, class... On>
  void with_unit(const char* verb, int unit, F&& body, On... on) {
    {
      const std::scoped_lock lock(mutex_);
      require_usable();
      if constexpr (State::on_device) way_.require_device(verb, on...);
      const auto has = [&](const ParameterInfo& info) { return info.attributes.unit == unit; };
      if (std::none_of(state_.parameters.begin(), state_.parameters.end(), has)) {
        throw UsageError(std::string(verb) + ": there is no unit " + std::to_string(unit) +
                         "; units are those that parameters' Attributes::unit names");
      }
    }
    if constexpr (Stage::shards_values) {
      // Not under the lock: gradients may be marked while a unit is waited for.
      or_tell([&] { body(way_); },
              [&](const char* why) {
                const std::scoped_lock lock(mutex_);
                give_up(verb, why, false);
              });
    }
  }

  StepEnd step_alone(const std::string& refusal, bool& updating) {
    if (!refusal.empty()) throw AgreedRefusal(refusal);
    if (const auto end = state_.agree_to_go_on([&](int) { return state_.join_word; })) return *end;
    state_.agree_on_presence([&](std::size_t i) {
      const bool here = state_.present[i] != 0;
      return typename State::Presence{here, here};
    });
    bool sums = false;  // of several backward passes
    if constexpr (State::pools_gradients) {
      sums = way_.accumulates();
      if (sums) way_.add_own_round();
    }
    if (state_.scaling.looks_first()) {
      if (sums) {
        state_.look_at_own_sums();
      } else {
        state_.look_at_own_gradients();
      }
      if (!state_.scaling.decide(state_.findings)) return StepEnd::skipped;
    }
    state_.begin_update(updating);
    if (sums) {
      state_.update_from_own_sums();
    } else {
      state_.update_from_own_gradients();
    }
    return StepEnd::applied;
  }

  /// Whether this step has input on this rank. Throws where its join makes no sense.
  bool has_input() {
    if (state_.join == nullptr) return true;
    state_.scaling.validate_join(state_.join->options(), State::in_float);
    if (!state_.join->input_ended()) return true;
    if (marks_.any()) {
      throw UsageError(
          "join: the body ended with gradients marked for a step that it did not take; step each "
          "batch that it begins");
    }
    return false;
  }

  /// Takes what was not marked as it lies in the caller's memory, unless this rank has no input.
  /// Returns why this rank can't step, or nothing.
  template <class... On>
  std::string finish_marks(On... on) {
    const bool had_given_up = gave_up_;
    if (lost_ != nullptr) std::rethrow_exception(std::exchange(lost_, nullptr));
    state_.join_word = state_.join == nullptr ? JoinWord{} : state_.join->word();
    try {
      if (accumulating_) {
        throw UsageError(
            "step: still accumulating; end the scope that accumulate() returned first");
      }
      marks_.require_no_lease();
      const bool takes = has_input();
      for (std::size_t g = 0; g < state_.groups.size(); ++g) {
        try {
          zero::validate(state_.groups[g]);
        } catch (const UsageError& error) {
          throw UsageError("step: the options of group " + std::to_string(g) + ": " + error.what());
        }
        if (zero::used_slots(state_.groups[g]) > state_.slots_allocated) {
          throw UsageError("step: the options of group " + std::to_string(g) + " need the state '" +
                           std::string(Opt::slots[zero::used_slots(state_.groups[g]) - 1]) +
                           "', which was not asked for at construction; construct with it on");
        }
      }
      reader_.before_step();
      reader_.require_size("step", false);
      if constexpr (State::on_device) way_.require_marks_alike(on...);
      if (!postponed_.empty()) throw UsageError(std::exchange(postponed_, {}));
      if constexpr (Stage::shards_values) way_.values().require_none_held("step");
      for (std::size_t i = 0; i < state_.parameters.size(); ++i) {
        if (!state_.steps_alone(i)) continue;
        if (State::on_device && Stage::shards_values) continue;  // they come and go
        reader_.require_unmoved(i);
      }
      if (takes) take_unmarked("step", on...);
      if constexpr (State::steps_tensors) state_.require_tensors_fit();
      Hash options;
      for (const Opt& group : state_.groups) {
        // A device counts steps on its own: some number that all ranks take.
        const std::int64_t t = State::on_device ? 1'000'003 : state_.step_number + 1;
        options.add(fingerprint_(group, t));
      }
      const double norm = state_.scaling.max_norm.value_or(0);
      options.add(&norm, sizeof norm);
      state_.options = options.value();
    } catch (const UsageError& error) {
      if (gave_up_ && !had_given_up) throw;  // as the pool's: the peers know already
      return text_of(error);
    }
    return {};
  }

  /// After a failure that the peers don't share: they learn of it at once, and none of them reads
  /// this rank's memory any more.
  void give_up(const char* what, const char* why, bool halfway) noexcept {
    gave_up_ = true;
    if (halfway) failed_ = true;
    if (!state_.alone()) {
      std::string reason;
      try {
        reason = what + (" failed: " + std::string(why));
      } catch (...) {  // no memory for words
      }
      // In this order: unfinished requests give a reason of their own when they are dropped.
      try {
        state_.comm().abort(reason);
      } catch (...) {
        state_.comm().abort("");
      }
      way_.give_up(reason);
    }
    // Not before: until then traffic may read where gradients are.
    if (!halfway) forget_round(false);
    try {
      if (halfway) failure_ = why;
    } catch (...) {
    }
  }

  /// After a step, applied or refused. What was leased from a pool is gone either way: it has been
  /// reduced, or let go of.
  void forget_round(bool applied) noexcept {
    marks_.reset(applied || State::pools_gradients);
    accumulated_.reset();
    postponed_.clear();
    std::fill(state_.present.begin(), state_.present.end(), std::uint8_t{0});
    state_.for_each_lane(
        [](auto& lane) { std::fill(lane.gradients.begin(), lane.gradients.end(), nullptr); });
    way_.forget();
  }

  std::mutex mutex_{};
  std::optional<Accumulation> accumulating_{};
  std::optional<Accumulation> accumulated_{};  ///< how this step has accumulated so far
  std::string postponed_{};    ///< why this rank can't step, found where nothing could be thrown
  std::exception_ptr lost_{};  ///< what failed there for good
  Fingerprint<Opt> fingerprint_{};
  State state_;
  StoreReader<State> reader_;
  Marks marks_;
  bool gave_up_ = false;   ///< the peers have been told
  bool failed_ = false;    ///< no rank can go on
  std::string failure_{};  ///< why
  std::shared_ptr<const char> life_ = std::make_shared<const char>();
  static auto way_of() {
    if constexpr (State::on_device) {
      return std::type_identity<DeviceStep<State>>{};
    } else if constexpr (State::pools_gradients) {
      return std::type_identity<OverlappedStep<State>>{};
    } else if constexpr (State::reads_peers) {
      return std::type_identity<SharedMemoryStep<State>>{};
    } else {
      return std::type_identity<BucketStep<State>>{};
    }
  }
  typename decltype(way_of())::type way_;
};

}  // namespace zero::detail
