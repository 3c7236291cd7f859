// SPDX-License-Identifier: Apache-2.0
/// @file
/// Where on this rank lie what it saves, and what it loads: runs of elements of arrays.
#pragma once

#include <algorithm>
#include <cstddef>
#include <string>
#include <type_traits>
#include <vector>

#include "zero/checkpoint/info.hpp"
#include "zero/detail/element_bytes.hpp"
#include "zero/detail/inspect.hpp"
#include "zero/detail/lane.hpp"
#include "zero/detail/store.hpp"
#include "zero/element.hpp"
#include "zero/error.hpp"
#include "zero/fragment.hpp"
#include "zero/optimizer.hpp"
#include "zero/rounding.hpp"

namespace zero::detail {

/// A run of elements of one array of a parameter, in the optimizer's memory space.
struct MemoryPiece {
  std::size_t parameter = 0;
  std::size_t array = 0;  ///< as `array_name` counts
  Interval elements{};    ///< counted in the parameter
  ElementType type = ElementType::float32;
  std::byte* data = nullptr;

  [[nodiscard]] std::size_t bytes() const { return elements.size() * bytes_of(type); }
};

/// Adds a run, to the one before where it goes on there.
template <Element T>
void add_piece(std::vector<MemoryPiece>& pieces, std::size_t parameter, std::size_t array,
               std::size_t begin, std::size_t elements, T* data) {
  if (elements == 0) return;
  auto* const bytes = reinterpret_cast<std::byte*>(data);
  if (!pieces.empty()) {
    MemoryPiece& last = pieces.back();
    if (last.parameter == parameter && last.array == array && last.elements.end == begin &&
        last.data + last.bytes() == bytes) {
      last.elements.end += elements;
      return;
    }
  }
  pieces.push_back({parameter, array, {begin, begin + elements}, element_traits<T>::type, bytes});
}

/// The master copies and slots that a lane keeps, of the fragments that `for_each(f)` calls
/// `f(fragment, begin)` with, `begin` being where their slots start.
template <class State, class Lane, class ForEach>
void add_state(State& state, Lane& lane, std::vector<MemoryPiece>& pieces,
               const ForEach& for_each) {
  const auto add = [&](std::size_t array, auto* data) {
    for_each([&](const Fragment& f, std::size_t begin) {
      add_piece(pieces, f.parameter, array, f.parameter_begin, f.elements, data + begin);
    });
  };
  if constexpr (Lane::storage::has_master) add(master_array, lane.master.data());
  for (std::size_t s = 0; s < state.slots_allocated; ++s) {
    add(first_slot_array + s, lane.state[s].data());
  }
}

/// `f(i, values)` for every frozen parameter with values of its own.
template <class State, class F>
void for_each_frozen(State& state, F&& f) {
  for (std::size_t i = 0; i < state.parameters.size(); ++i) {
    if (!state.parameters[i].frozen || state.parameters[i].leader != i) continue;
    visit_span(parameter_at(state.store(), i).values(), [&](auto values) { f(i, values); });
  }
}

/// One of `world` parts of `elements`, without a product that could overflow.
[[nodiscard]] inline Interval even_share(std::size_t elements, std::size_t rank,
                                         std::size_t world) {
  const auto cut = [&](std::size_t r) {
    return elements / world * r + std::min(r, elements % world);
  };
  return {cut(rank), cut(rank + 1)};
}

/// So that in a file each element lies on a multiple of its size.
inline void put_wider_first(std::vector<MemoryPiece>& pieces) {
  std::stable_sort(pieces.begin(), pieces.end(), [](const MemoryPiece& a, const MemoryPiece& b) {
    return bytes_of(a.type) > bytes_of(b.type);
  });
}

/// What this rank saves; all ranks together, everything once.
template <class State>
[[nodiscard]] std::vector<MemoryPiece> pieces_to_save(State& state) {
  std::vector<MemoryPiece> pieces;
  state.for_each_lane([&](auto& lane) {
    for (const OwnedFragment& owned : lane.owned) {
      const Fragment& f = owned.fragment;
      add_piece(pieces, f.parameter, value_array, f.parameter_begin, f.elements,
                lane.kept_values(owned));
    }
    add_state(state, lane, pieces, [&](const auto& f) {
      for (const OwnedFragment& owned : lane.owned) {
        // Without sharding everything is kept, and each rank saves what it would own.
        f(owned.fragment,
          State::Stage::shards_state ? owned.shard_begin : owned.fragment.lane_begin);
      }
    });
  });
  const auto rank = static_cast<std::size_t>(state.rank());
  const auto world = static_cast<std::size_t>(state.world());
  for_each_frozen(state, [&](std::size_t i, auto values) {
    const Interval mine = even_share(values.size(), rank, world);
    add_piece(pieces, i, value_array, mine.begin, mine.size(), values.data() + mine.begin);
  });
  put_wider_first(pieces);
  return pieces;
}

/// The values that this rank holds between steps, its share of what comes and goes or all of what
/// doesn't.
template <class State>
void add_values_to_load(State& state, std::vector<MemoryPiece>& pieces) {
  state.for_each_lane([&](auto& lane) {
    if constexpr (State::Stage::shards_values) {
      for (const OwnedFragment& owned : lane.owned) {
        if (owned.value_begin == not_in_shard) continue;
        add_piece(pieces, owned.fragment.parameter, value_array, owned.fragment.parameter_begin,
                  owned.fragment.elements, lane.kept_values(owned));
      }
      for (std::size_t b = 0; b < lane.shard_values.size(); ++b) {
        if (lane.comes_and_goes(b)) continue;
        const Interval whole = state.layout->bucket(lane.index, b);
        for (const Fragment& f : state.layout->fragments(lane.index, whole)) {
          add_piece(pieces, f.parameter, value_array, f.parameter_begin, f.elements,
                    lane.value_in_place(b, whole, f));
        }
      }
    } else {
      for (std::size_t i = 0; i < state.parameters.size(); ++i) {
        if (lane.values[i] == nullptr) continue;
        add_piece(pieces, i, value_array, 0, state.parameters[i].elements, lane.values[i]);
      }
    }
  });
  for_each_frozen(state, [&](std::size_t i, auto values) {
    add_piece(pieces, i, value_array, 0, values.size(), values.data());
  });
}

/// Where asked for, the master copies and the slots that this rank keeps.
template <class State>
void add_state_to_load(State& state, bool masters, bool slots, std::vector<MemoryPiece>& pieces) {
  state.for_each_lane([&](auto& lane) {
    add_state(state, lane, pieces,
              [&](const auto& f) { State::for_each_kept(lane, *state.layout, f); });
  });
  std::erase_if(pieces, [&](const MemoryPiece& piece) {
    return !(piece.array == master_array ? masters : slots);
  });
}

/// What a checkpoint of this state says of itself. Throws `UsageError` for what it can't say.
template <class State>
[[nodiscard]] CheckpointInfo describe_state(State& state) {
  using Opt = typename State::optimizer_type;
  CheckpointInfo info;
  info.step = state.step_number;
  info.world = state.world();
  info.optimizer = optimizer_name<Opt>();
  for (std::size_t s = 0; s < state.slots_allocated; ++s) info.slots.emplace_back(Opt::slots[s]);
  if (state.settings.loss_scale && state.settings.loss_scale->is_dynamic()) {
    info.loss_scale = {state.scaling.state().loss_scale, state.scaling.state().applied_in_a_row};
  }
  if constexpr (requires { state.precision.seed; }) {
    if (std::remove_cvref_t<decltype(state.precision)>::rounding == Rounding::stochastic) {
      info.seed = state.precision.seed;
    }
  }
  for (const Opt& group : state.groups) {
    auto& options = info.groups.emplace_back();
    if constexpr (NamesOptions<Opt>) {
      Opt::for_each_option(group, [&](const char* name, const auto& value) {
        options[name] = static_cast<double>(value);
        if (options[name] - options[name] == 0) return;
        throw UsageError(std::string("the option ") + name +
                         " is not finite, which a checkpoint can't say");
      });
    }
  }
  for (std::size_t i = 0; i < state.parameters.size(); ++i) {
    const ParameterInfo& from = state.parameters[i];
    SavedParameter& to = info.parameters.emplace_back();
    to.name = from.name;
    if (!is_utf8(to.name)) {
      throw UsageError("the name of parameter " + std::to_string(i) +
                       " is not UTF-8, which files of checkpoints are; give it another");
    }
    to.shape = from.shape;
    to.group = from.group;
    to.steps = state.step_counts[from.leader];
    to.attributes = from.attributes;
    if (from.leader != i) to.attributes.alias = from.leader;
    state.for_each_lane([&]<class Lane>(Lane& lane) {
      if (lane.index == from.lane) to.has_master = Lane::storage::has_master && to.stepped();
    });
  }
  return info;
}

}  // namespace zero::detail
