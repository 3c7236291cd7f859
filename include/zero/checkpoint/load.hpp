// SPDX-License-Identifier: Apache-2.0
/// @file
/// Loads what was saved, at any world size and under any policies.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "zero/checkpoint/checkpoint.hpp"
#include "zero/checkpoint/info.hpp"
#include "zero/detail/checkpoint_agreement.hpp"
#include "zero/detail/checkpoint_pieces.hpp"
#include "zero/detail/element_bytes.hpp"
#include "zero/detail/inspect.hpp"
#include "zero/detail/join_scope.hpp"
#include "zero/error.hpp"
#include "zero/optimizer.hpp"

namespace zero {

/// Given to `load`; by default everything comes back.
struct LoadOptions {
  /// The parameters' values, and master copies of them. Without it they stay as they are.
  bool values = true;
  /// The optimizer's state: slots, step counts, loss scale, seed. Without it only values are loaded
  /// (and master copies, made from them or as they were saved); what the optimizer keeps stays as
  /// it is, and so do options.
  bool state = true;
  /// The groups' options, such as learning rates. Without it they stay as they are.
  bool options = true;
};

namespace detail {

/// How a saved state becomes that of an optimizer, found out before anything is changed.
template <class State>
class LoadPlan {
  using Opt = typename State::optimizer_type;

 public:
  /// Throws `CheckpointError` naming the parameter and what to do for what does not fit.
  LoadPlan(State& state, const Checkpoint& from, const LoadOptions& options)
      : state_(state), from_(from), options_(options), groups_(state.groups) {
    match_parameters();
    if (options_.state) require_optimizer();
    if (options_.state && options_.options) read_options();
    if (options_.values) add_values_to_load(state_, pieces_);
    std::vector<MemoryPiece> kept;
    add_state_to_load(state_, options_.values, options_.state, kept);
    pieces_.insert(pieces_.end(), kept.begin(), kept.end());
    for (const MemoryPiece& piece : pieces_) sources_.push_back(source_of(piece));
  }

  /// From here on a failure leaves the optimizer with half of it.
  void carry_out() {
    for (std::size_t k = 0; k < pieces_.size(); ++k) {
      const MemoryPiece& piece = pieces_[k];
      const std::size_t width = bytes_of(piece.type);
      State::Memory::write(piece.data, piece.bytes(), [&](std::size_t at, auto to) {
        from_.read(sources_[k].parameter, sources_[k].array, piece.elements.begin + at / width,
                   piece.type, std::span<std::byte>(to));
      });
    }
    if (!options_.state) return;
    const CheckpointInfo& info = from_.info();
    state_.step_number = info.step;
    for (std::size_t i = 0; i < state_.parameters.size(); ++i) {
      state_.step_counts[state_.parameters[i].leader] = info.parameters[saved_[i]].steps;
    }
    state_.groups.assign(groups_.begin(), groups_.end());
    if (info.loss_scale) {
      state_.scaling.resume(info.loss_scale->scale, info.loss_scale->applied_in_a_row);
    }
    if constexpr (requires { state_.precision.seed; }) {
      if (info.seed) state_.precision.seed = *info.seed;
    }
  }

 private:
  struct Source {
    std::size_t parameter, array;
  };

  [[noreturn]] void refuse(const std::string& what) const {
    throw CheckpointError(from_.path().string() + ": " + what);
  }
  [[noreturn]] void refuse(std::size_t i, const std::string& what) const {
    refuse(state_.name_of(i) + " " + what);
  }
  [[nodiscard]] static std::string text_of_shape(const std::vector<std::size_t>& shape) {
    std::string text = "[";
    for (const std::size_t n : shape) text += (text.size() > 1 ? ", " : "") + std::to_string(n);
    return text + "]";
  }

  /// By name, in whatever order. Construction has refused a store in which two have one name.
  void match_parameters() {
    const std::vector<SavedParameter>& saved = from_.info().parameters;
    std::unordered_map<std::string, std::size_t> by_name;
    for (std::size_t j = 0; j < saved.size(); ++j) by_name[saved[j].name] = j;
    std::vector<bool> used(saved.size());
    for (std::size_t i = 0; i < state_.parameters.size(); ++i) {
      const auto found = by_name.find(state_.parameters[i].name);
      if (found == by_name.end()) {
        refuse(i, "is not in it; load into the same parameters, by name, as were saved");
      }
      used[found->second] = true;
      saved_.push_back(found->second);
      match(i, saved[found->second]);
    }
    for (std::size_t j = 0; j < saved.size(); ++j) {
      if (used[j]) continue;
      refuse("its parameter " + in_quotes(saved[j].name) +
             " is not in the store; load into the same parameters, by name, as were saved");
    }
  }

  void match(std::size_t i, const SavedParameter& saved) const {
    const ParameterInfo& mine = state_.parameters[i];
    if (mine.shape != saved.shape) {
      refuse(i, "has the shape " + text_of_shape(mine.shape) + ", but was saved with " +
                    text_of_shape(saved.shape) + "; load into parameters of the same shapes");
    }
    const bool tied = mine.leader != i;
    if (tied && !saved.tied()) {
      refuse(i, "is tied to another, but was saved with values of its own; untie it");
    }
    if (!options_.state) return;
    if (tied != saved.tied()) {
      refuse(i,
             "was saved tied to another, so it has no state of its own there; tie it, or load "
             "values alone (LoadOptions::state)");
    }
    if (mine.frozen != saved.attributes.frozen) {
      refuse(i, std::string(mine.frozen ? "is frozen, but was not" : "is not frozen, but was") +
                    " when it was saved, so its state does not fit; freeze the same, or load "
                    "values alone (LoadOptions::state)");
    }
    if (options_.options && mine.group != saved.group) {
      refuse(i, "is in group " + std::to_string(mine.group) + ", but was saved in group " +
                    std::to_string(saved.group) +
                    "; form the same groups, or leave options as they are "
                    "(LoadOptions::options)");
    }
  }

  void require_optimizer() const {
    const std::string& name = from_.info().optimizer;
    constexpr std::string_view mine = optimizer_name<Opt>();
    if (!name.empty() && !mine.empty() && name != mine) {
      refuse("it holds the state of " + in_quotes(name) + ", but this optimizer is " +
             in_quotes(mine) +
             "; construct with the one that was saved, or load values alone "
             "(LoadOptions::state)");
    }
    const auto list = [](const auto& names, std::size_t count) {
      std::string text;
      for (std::size_t s = 0; s < count; ++s) {
        text += (s == 0 ? "'" : ", '") + std::string(names[s]) + "'";
      }
      return text.empty() ? std::string("none") : text;
    };
    const std::vector<std::string>& saved = from_.info().slots;
    bool same = saved.size() == state_.slots_allocated;
    for (std::size_t s = 0; same && s < saved.size(); ++s) same = saved[s] == Opt::slots[s];
    if (same) return;
    refuse("it has the slots " + list(saved, saved.size()) + ", but the optimizer keeps " +
           list(Opt::slots, state_.slots_allocated) +
           "; construct with the optimizer that was saved and what it kept state for (momentum, "
           "amsgrad), or load values alone (LoadOptions::state)");
  }

  void read_options() {
    if constexpr (NamesOptions<Opt>) {
      const auto& saved = from_.info().groups;
      if (saved.size() != groups_.size()) {
        refuse("it has " + std::to_string(saved.size()) + " groups, but the optimizer " +
               std::to_string(groups_.size()) +
               "; form the same groups, or leave options as they are (LoadOptions::options)");
      }
      for (std::size_t g = 0; g < groups_.size(); ++g) read_group(g, saved[g]);
    }
  }
  void read_group(std::size_t g, const std::map<std::string, double>& saved) {
    if (saved.empty()) return;  // of an optimizer that didn't name them
    const std::string group = "group " + std::to_string(g);
    std::size_t read = 0;
    Opt::for_each_option(groups_[g], [&]<class T>(const char* name, T& option) {
      const auto found = saved.find(name);
      if (found == saved.end()) {
        refuse("its " + group + " lacks the option '" + name +
               "'; load with the optimizer that was saved, or leave options as they are "
               "(LoadOptions::options)");
      }
      option = static_cast<T>(found->second);
      ++read;
    });
    if (read != saved.size()) {
      refuse("its " + group + " has options that the optimizer lacks; load with the optimizer " +
             "that was saved, or leave options as they are (LoadOptions::options)");
    }
    try {
      zero::validate(groups_[g]);
    } catch (const UsageError& error) {
      refuse("the options of its " + group + ": " + error.what());
    }
    if (zero::used_slots(groups_[g]) > state_.slots_allocated) {
      refuse("the options of its " + group + " need more state than is in it");
    }
  }

  /// Where a piece is read from: what is not stored in the wanted way is made of what is.
  [[nodiscard]] Source source_of(const MemoryPiece& piece) const {
    std::size_t parameter = saved_[piece.parameter];
    const SavedParameter* saved = &from_.info().parameters[parameter];
    if (saved->tied()) {
      parameter = *saved->attributes.alias;
      saved = &from_.info().parameters[parameter];
    }
    const bool has_master = has_array(*saved, master_array);
    std::size_t array = piece.array;
    if (array == master_array && !has_master) array = value_array;
    // Values of another type are rounded anew, from the most that is known of them.
    if (array == value_array && has_master &&
        from_.array(parameter, value_array).type != piece.type) {
      array = master_array;
    }
    return {parameter, array};
  }

  State& state_;
  const Checkpoint& from_;
  LoadOptions options_;
  std::vector<Opt> groups_;
  std::vector<std::size_t> saved_{};  ///< by parameter: which one of the checkpoint it is
  std::vector<MemoryPiece> pieces_{};
  std::vector<Source> sources_{};  ///< by piece
};

/// Collective: loads what `open(state)` returns on each rank, which must be the same.
template <class Optimizer, class Open>
void load_with(Optimizer& optimizer, const char* verb, const LoadOptions& options,
               const Open& open) {
  std::string error;
  EngineAccess::engine_of(optimizer).between_steps(
      Topic::load, verb, [&]<class State>(State& state, bool& changing) {
        std::optional<Checkpoint> from;
        std::optional<LoadPlan<State>> plan;
        const std::string mine = error_of([&] {
          from.emplace(open(state));
          plan.emplace(state, *from, options);
          from->verify(static_cast<std::size_t>(state.everyone().rank()),
                       static_cast<std::size_t>(state.all_ranks()));
        });
        const auto words = exchange_words(state, mine, {from ? from->fingerprint() : 0});
        error = first_error(words);
        for (std::size_t r = 0; error.empty() && r < words.size(); ++r) {
          if (words[r].numbers[0] == words[0].numbers[0]) continue;
          error = "rank " + std::to_string(r) +
                  " was given another checkpoint than rank 0; give all ranks the same";
        }
        if (!error.empty()) return;
        changing = true;
        plan->carry_out();
        // Nobody reads a peer's values before they are there.
        (void)exchange_words(state, {});
      });
  if (!error.empty()) throw CheckpointError(std::string(verb) + ": " + error);
}

}  // namespace detail

/// Collective, between steps: loads what `save` or `consolidate` has written, a folder or a single
/// file, which all ranks must be able to read. World size, partition, bucket view, stage and memory
/// space may be others than when it was saved. Parameters are found by name; names, shapes, ties,
/// frozen ones, groups and slots must be the same. Where the element types are too, so is every
/// bit, and the next step is what it would have been; that of stochastic rounding needs the
/// parameters in the same order, too. Elsewhere what is stored is rounded to nearest; 16-bit values
/// are rounded from master copies, and master copies are made from values, where the other is not
/// there. Not brought back: `clip_grad_norm`, settings, gradients.
///
/// Ranks first read everything once, each a share, and compare checksums. Throws `CheckpointError`
/// on all ranks, with nothing changed, where one can't read, finds other bytes than were written,
/// or is given another checkpoint, and where it doesn't fit; `UsageError` on all ranks where
/// gradients were marked or leased, a unit is acquired, or within a `join`. A file that can't be
/// read any more after that leaves the optimizer failed; then load into a new one.
template <class Optimizer>
void load(Optimizer& optimizer, const std::filesystem::path& path,
          const LoadOptions& options = {}) {
  detail::load_with(optimizer, "load", options, [&](const auto&) { return Checkpoint(path); });
}

}  // namespace zero
