// SPDX-License-Identifier: Apache-2.0
/// @file
/// How an engine's state comes to be, and how it grows: reads the store, lays it out, agrees with
/// the peers, and only then allocates and moves anything.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <memory>
#include <memory_resource>
#include <numeric>
#include <optional>
#include <span>
#include <string>
#include <tuple>
#include <type_traits>
#include <typeinfo>
#include <utility>
#include <vector>

#include "zero/bucket_view.hpp"
#include "zero/detail/agreement.hpp"
#include "zero/detail/denormals.hpp"
#include "zero/detail/hash.hpp"
#include "zero/detail/inspect.hpp"
#include "zero/detail/lane.hpp"
#include "zero/detail/lane_room.hpp"
#include "zero/detail/paged_lane.hpp"
#include "zero/detail/store.hpp"
#include "zero/detail/tensor_step.hpp"
#include "zero/detail/units.hpp"
#include "zero/element.hpp"
#include "zero/error.hpp"
#include "zero/layout.hpp"
#include "zero/loss_scale.hpp"
#include "zero/memory.hpp"
#include "zero/optimizer.hpp"
#include "zero/parameter.hpp"
#include "zero/settings.hpp"

namespace zero::detail {

/// @tparam State an `EngineState`
template <class State>
class Builder {
  using Opt = typename State::optimizer_type;
  using Partition = typename State::Partition;
  using View = typename State::View;
  using Stage = typename State::Stage;
  using Lanes = typename State::Lanes;
  using store_type = typename State::store_type;
  using Memory = typename State::Memory;
  static constexpr bool flat = State::flat;
  static constexpr bool moves =
      View::values == Residency::arena || View::gradients == Residency::arena;

 public:
  explicit Builder(State& state) : state_(state) {}

  /// Collective. Throws `AgreedRefusal` on all ranks where one refuses or where they differ.
  /// Whatever it throws, nothing of the caller's has changed. To be followed by
  /// `rebind_parameters`.
  void construct(const Partition& partition) {
    std::string refusal;
    Inspection seen;
    std::optional<Layout<Partition>> made;
    try {
      if (state_.groups.empty()) throw UsageError("construction: zero::Groups is empty");
      for (const Opt& group : state_.groups) zero::validate(group);
      try {
        state_.scaling.validate(State::in_float);
      } catch (const UsageError& error) {
        throw UsageError(std::string("construction: ") + error.what());
      }
      if constexpr (State::pools_gradients) {
        if (!state_.alone() && !state_.comm().concurrent()) {
          throw UsageError(
              "construction: stages 2 and 3 need a communicator that several threads may call at "
              "once, which this one does not allow; of MPI, initialise it by MPI_Init_thread with "
              "MPI_THREAD_MULTIPLE");
        }
      }
      if (state_.settings.flush_denormals && State::on_device) {
        throw UsageError(
            "construction: Settings::flush_denormals is on, but devices step denormal numbers as "
            "they are, and as fast as others; leave it off");
      }
      if (state_.settings.flush_denormals && !can_flush_denormals) {
        throw UsageError(
            "construction: Settings::flush_denormals is on, but zero does not know how to flush "
            "them on this processor; leave it off");
      }
      inspect(state_.groups, 0, seen);
      std::size_t lanes = 0;
      state_.for_each_lane([&](auto& lane) { lane.index = lanes++; });
      made.emplace(seen.places,
                   layout_lanes(typename State::elements{}, state_.view.bucket_bytes, flat),
                   state_.world(), partition);
      if (View::values == Residency::caller) refuse_separate_ties(state_.store(), seen);
      require_flat(seen);
      require_pool(seen);
    } catch (const UsageError& error) {
      if (state_.alone()) throw;
      refusal = text_of(error);
    }
    build(state_.groups, seen, std::move(made), refusal, 0);
  }

  /// Collective: the store shows more parameters at its end, which form the group of `added`.
  /// @param refusal why this rank can't, or empty
  void append(Opt added, std::string refusal) {
    Inspection seen{.verb = "add_param_group"};
    std::optional<Layout<Partition>> grown;
    std::vector<Opt> more = state_.groups;
    more.push_back(std::move(added));
    const std::size_t before = state_.parameters.size();
    try {
      if (!refusal.empty()) throw UsageError(refusal);
      zero::validate(more.back());
      inspect(more, before, seen);
      require_appended(seen);
      grown.emplace(state_.layout->appended(std::span(seen.places).subspan(before)));
      if (View::values == Residency::caller) refuse_separate_ties(state_.store(), seen);
      require_flat(seen);
      require_pool(seen);
    } catch (const UsageError& error) {
      if (state_.alone()) throw;
      refusal = text_of(error);
    }
    build(more, seen, std::move(grown), refusal, before);
  }

  void reload_masters() {
    Memory::settle();
    state_.for_each_lane([&](auto& lane) {
      using Lane = std::remove_cvref_t<decltype(lane)>;
      if constexpr (Lane::storage::has_master) read_masters(lane, *state_.layout, 0);
    });
  }

  /// Hands parameters over to the arenas. Where one's own code throws, those before it have moved.
  void rebind_parameters() {
    if constexpr (!moves) return;
    state_.for_each_lane([&](auto& lane) {
      using T = typename std::remove_cvref_t<decltype(lane)>::element;
      for (std::size_t i = 0; i < state_.parameters.size(); ++i) {
        if (state_.parameters[i].frozen || state_.parameters[i].lane != lane.index) continue;
        auto&& parameter = detail::parameter_at(state_.store(), i);
        const auto place_in = [&](T* arena) {
          return std::span<T>(arena + state_.layout->place(i).offset,
                              state_.parameters[i].elements);
        };
        using Span = values_t<parameter_t<store_type>>;
        if constexpr (View::values == Residency::arena) {
          std::span<T> place;
          if constexpr (Stage::shards_values && State::on_device) {
            place = resident_place(lane, i);
          } else {
            place = place_in(lane.base);
          }
          if (state_.steps_alone(i)) lane.values[i] = place.data();
          parameter.rebind(Span(place), values_owner(lane));
          require_rebound(i, parameter.values(), place, "rebind", "values()");
        }
        if constexpr (View::gradients == Residency::arena) {
          const auto [begin, owner] = gradients_of(lane);
          const std::span<T> place = place_in(begin);
          parameter.rebind_gradient(Span(place), owner);
          require_rebound(i, parameter.gradient(), place, "rebind_gradient", "gradient()");
        }
      }
    });
  }

  /// From now on sums are looked at before they are used, or not; they need room.
  void clip(std::optional<double> norm) {
    const bool keeps =
        keeps_sums(state_.settings, norm.has_value() || state_.scaling.looks_first());
    state_.for_each_lane([&](auto& lane) {
      const std::size_t room = room_for_sums(lane, *state_.layout, keeps);
      using Sums = std::remove_cvref_t<decltype(lane.reduced)>;
      if (room > lane.reduced.size()) lane.reduced = Sums(room, state_.memory());
    });
    state_.scaling.max_norm = norm;
  }

 private:
  /// @param first what comes before it is known already
  void inspect(const std::vector<Opt>& all_groups, std::size_t first, Inspection& seen) {
    Memory::settle();
    const bool may_be_empty =
        View::values == Residency::arena && static_cast<bool>(state_.settings.initial_value);
    detail::inspect(state_.store(), all_groups.size(), state_.settings.check_values, first, seen,
                    may_be_empty, State::on_device && Stage::shards_values);
    if constexpr (State::steps_tensors) require_steppable(all_groups, first, seen);
  }

  /// The store's first parameters are those of before, and what is new forms a group of its own.
  void require_appended(const Inspection& seen) const {
    const std::size_t before = state_.parameters.size();
    if (seen.parameters.size() <= before) {
      throw UsageError("add_param_group: the store shows " +
                       std::to_string(seen.parameters.size()) + " parameters, as many as before (" +
                       std::to_string(before) + ") or fewer; append the group's to it first");
    }
    for (std::size_t i = 0; i < seen.parameters.size(); ++i) {
      const ParameterInfo& now = seen.parameters[i];
      if (i >= before) {
        if (now.group == state_.groups.size()) continue;
        throw UsageError("add_param_group: " + quoted(i, now.name) + " is in group " +
                         std::to_string(now.group) + ", but what is added forms group " +
                         std::to_string(state_.groups.size()) + "; give the parameter that group");
      }
      const ParameterInfo& then = state_.parameters[i];
      if (now.name != then.name || now.elements != then.elements || now.lane != then.lane ||
          now.group != then.group || now.shape != then.shape || now.attributes != then.attributes) {
        throw UsageError("add_param_group: " + quoted(i, now.name) +
                         " is not what the store showed there before, " + quoted(i, then.name) +
                         " (or has another shape, element type, group or attribute); append new "
                         "parameters at its end and leave the others as they were");
      }
    }
  }

  void require_flat([[maybe_unused]] const Inspection& seen) {
    if constexpr (flat) {
      const auto buffer = state_.store().flat_values();
      std::size_t offset = 0;
      for (std::size_t i = 0; i < seen.parameters.size(); ++i) {
        if (seen.parameters[i].leader != i) continue;  // a tied one takes no room
        detail::visit_span(detail::parameter_at(state_.store(), i).values(), [&](auto values) {
          if (!values.empty() && values.data() != buffer.data() + offset) {
            refuse_parameter(seen, i,
                             "does not lie in the flat buffer where the parameters before it end");
          }
          offset += values.size();
        });
      }
    }
  }

  /// Refuses a pool that some gradient alone has no room in.
  void require_pool([[maybe_unused]] const Inspection& seen) {
    if constexpr (State::pools_gradients) {
      const std::size_t pool = pool_bytes(state_.stage);
      const bool reduces = !state_.alone() && state_.settings.gradients == Gradients::local;
      if (pool == 0 || !reduces) return;
      for (std::size_t i = 0; i < seen.parameters.size(); ++i) {
        const std::size_t bytes = seen.parameters[i].elements * seen.parameters[i].element_bytes;
        if (!stands_alone(seen.parameters, i) || bytes <= pool) continue;
        refuse_parameter(seen, i,
                         "has a gradient of " + std::to_string(bytes) +
                             " bytes, but pool_bytes is " + std::to_string(pool) +
                             "; make it larger, or leave it out");
      }
    }
  }

  /// Agrees with the peers, makes all that is new aside, and only then replaces what was there.
  /// @param before how many parameters there were
  void build(const std::vector<Opt>& all_groups, Inspection& seen,
             std::optional<Layout<Partition>> made, const std::string& refusal,
             std::size_t before) {
    const std::size_t slots_wanted = std::max(state_.slots_allocated, slots_for(all_groups));
    if (!state_.alone())
      agree(seen, all_groups.size(), slots_wanted, refusal, before, made ? made->fingerprint() : 0);
    const std::size_t count = seen.parameters.size();
    std::vector<std::int64_t> counts = state_.step_counts;
    counts.resize(count, 0);
    std::vector<std::uint8_t> none(count, 0), nobody(count, 0);
    const bool some_16_bits = trains_16_bits(seen.parameters);
    const bool keeps = keeps_sums(state_.settings, state_.scaling.looks_first(some_16_bits));
    Lanes next;
    for_each_pair(next, [&](auto& lane, auto& old) {
      lane.index = old.index;
      place(lane, *made, seen.parameters);
      if constexpr (State::pools_gradients && !State::on_device) {
        lane.gradient_pages = pages_for(lane, *made);
      }
      if constexpr (Stage::shards_values) {
        spread_values(lane, old, *made, seen.parameters);
      }
      allocate(lane, old, *made, seen.parameters, slots_wanted, keeps, before);
      if constexpr (State::steps_tensors) {
        lane.workspace = std::remove_cvref_t<decltype(lane.workspace)>(
            room_of(lane, *made).workspace(seen.parameters, all_groups), state_.memory());
      }
      if constexpr (moves) fill_arenas(lane, *made, seen.parameters);
    });
    std::vector<Opt> groups_to_be = all_groups;
    // Nothing of the above has changed anything; nothing of what follows fails.
    std::swap(state_.lanes, next);
    state_.layout.reset();
    state_.layout.emplace(std::move(*made));
    state_.parameters = std::move(seen.parameters);
    state_.groups = std::move(groups_to_be);
    state_.step_counts = std::move(counts);
    state_.present = std::move(none);
    state_.stepping = std::move(nobody);
    state_.slots_allocated = slots_wanted;
    state_.scaling.has_16_bits = some_16_bits;
  }

  void agree(const Inspection& seen, std::size_t group_count, std::size_t slots_wanted,
             const std::string& refusal, std::size_t before, std::uint64_t layout) {
    Digest mine;
    mine.topic = before == 0 ? Topic::construction : Topic::addition;
    Hash program;
    const std::string type = typeid(State).name();
    program.add(type.data(), type.size());
    mine.program = program.value();
    Hash set;
    set.add(state_.view.bucket_bytes);
    set.add(static_cast<std::uint64_t>(state_.settings.gradients));
    set.add(static_cast<std::uint64_t>(state_.settings.finite_check));
    set.add(std::uint64_t{state_.settings.check_values});
    set.add(std::uint64_t{state_.settings.flush_denormals});
    set.add(std::uint64_t{resident_bytes(state_.stage)});  // who gathers what, and when
    set.add(std::uint64_t{prefetched_units(state_.stage)});
    set.add(group_count);
    set.add(slots_wanted);
    set.add(before);
    if constexpr (requires { state_.precision.seed; }) {
      set.add(static_cast<std::uint64_t>(state_.precision.seed));
    }
    const LossScale losses = state_.settings.loss_scale.value_or(LossScale{.scale = 0});
    for (const double number :
         {state_.scaling.of_sums(), losses.scale, losses.growth, losses.backoff, losses.minimum,
          losses.maximum, static_cast<double>(losses.interval)}) {
      set.add(&number, sizeof number);
    }
    mine.settings = set.value();
    const auto added = std::span(seen.digests).subspan(std::min(before, seen.digests.size()));
    Hash all;
    if (!added.empty()) all.add(added.data(), added.size_bytes());
    mine.parameters = all.value();
    mine.count = added.size();
    mine.layout = layout;
    mine.identity = state_.identity;
    mine.address = reinterpret_cast<std::uintptr_t>(&state_);
    mine.refusal = to_text(refusal);
    state_.identity = require_agreement(
        state_.everyone(), seen.verb, mine, added,
        [&](std::size_t i) { return quoted(before + i, seen.parameters[before + i].name); });
  }

  template <class F>
  void for_each_pair(Lanes& next, F&& f) {
    [&]<std::size_t... I>(std::index_sequence<I...>) {
      (f(std::get<I>(next), std::get<I>(state_.lanes)), ...);
    }(std::make_index_sequence<State::lane_count>{});
  }

  /// Empty where the parameter's values come and go: then they have no place before they come.
  template <class Lane>
  [[nodiscard]] auto resident_place(Lane& lane, std::size_t i) {
    using T = typename Lane::element;
    const Place& of = state_.layout->place(i);
    if (of.elements == 0) return std::span<T>();
    const std::size_t bucket = state_.layout->buckets_of(i).begin;
    T* const values = lane.bucket_values[bucket];
    if (values == nullptr) return std::span<T>();
    return std::span<T>(values + (of.offset - state_.layout->bucket(lane.index, bucket).begin),
                        of.elements);
  }

  /// Where everything lies, and what of it this rank owns.
  template <class Lane>
  void place(Lane& lane, const Layout<Partition>& map, const std::vector<ParameterInfo>& infos) {
    using T = typename Lane::element;
    lane.values.assign(infos.size(), nullptr);
    lane.gradients.assign(infos.size(), nullptr);
    lane.sources.assign(static_cast<std::size_t>(state_.world()), nullptr);
    for (std::size_t i = 0; i < infos.size(); ++i) {
      if (infos[i].lane != lane.index || !stands_alone(infos, i)) continue;
      detail::visit_span(detail::parameter_at(state_.store(), i).values(), [&](auto values) {
        if constexpr (std::is_same_v<typename decltype(values)::value_type, T>) {
          lane.values[i] = values.data();
        }
      });
    }
    map.for_each_owned(lane.index, state_.rank(),
                       [&](const Fragment& fragment, std::size_t bucket, std::size_t begin) {
                         lane.owned.push_back({fragment, bucket, begin});
                       });
    lane.owned_begin.assign(map.buckets(lane.index) + 1, 0);
    for (const OwnedFragment& owned : lane.owned) ++lane.owned_begin[owned.bucket + 1];
    std::partial_sum(lane.owned_begin.begin(), lane.owned_begin.end(), lane.owned_begin.begin());
    if constexpr (flat) lane.base = state_.store().flat_values().data();
  }

  template <class Lane>
  [[nodiscard]] auto room_of(const Lane& lane, const Layout<Partition>& map) {
    // On a device pooled gradients are packed into sums even where nobody else adds to them.
    const bool alone = state_.alone() && !(State::on_device && State::pools_gradients);
    return LaneRoom<typename Lane::storage, Stage, Partition>(map, lane.index, state_.rank(),
                                                              alone);
  }
  template <class Lane>
  [[nodiscard]] std::size_t room_for_sums(const Lane& lane, const Layout<Partition>& map,
                                          bool keeps) {
    return room_of(lane, map).sums(State::reads_peers, state_.settings, keeps);
  }

  /// Makes the lane's arrays, which begin with what `old` holds already.
  template <class Lane>
  void allocate(Lane& lane, const Lane& old, const Layout<Partition>& map,
                const std::vector<ParameterInfo>& infos, std::size_t slots_wanted, bool keeps,
                std::size_t before) {
    const std::size_t kept = room_of(lane, map).kept();
    const auto grow = [&]<class Array>(Array& array, const Array& from) {
      using U = typename Array::value_type;
      array = Array(kept, state_.memory());
      Memory::copy(from.data(), from.size(), array.data());
      if (!state_.settings.poison_padding) return;
      poison(array.span().subspan(from.size()));
      State::for_each_kept(lane, map, [&](const Fragment& f, std::size_t begin) {
        if (begin >= from.size()) fill(array.data() + begin, f.elements, zero_of<U>());
      });
    };
    for (std::size_t s = 0; s < slots_wanted; ++s) grow(lane.state[s], old.state[s]);
    if constexpr (Lane::storage::has_master) {
      grow(lane.master, old.master);
      read_masters(lane, map, before, &infos);
    }
    lane.reduced = std::remove_cvref_t<decltype(lane.reduced)>(room_for_sums(lane, map, keeps),
                                                               state_.memory());
  }

  /// Copies values into masters, from parameter `first` on.
  /// @param infos given while parameters may not have values yet
  template <class Lane>
  void read_masters(Lane& lane, const Layout<Partition>& map, std::size_t first,
                    const std::vector<ParameterInfo>* infos = nullptr) {
    using T = typename Lane::element;
    const auto read = [&](const Fragment& f, const T* values, std::size_t begin) {
      if (f.parameter < first) return;
      auto* const masters = lane.master.data() + begin;
      if (values != nullptr) {
        Memory::read(values, f.elements, [&](std::size_t at, std::span<const T> stored) {
          Memory::write(masters + at, stored.size(), [&](std::size_t part, auto master) {
            widen_array(stored.data() + part, master);
          });
        });
      } else {
        Memory::write(masters, f.elements, [&](std::size_t at, auto master) {
          for (std::size_t e = 0; e < master.size(); ++e) {
            master[e] = element_traits<T>::load(
                initial<T>((*infos)[f.parameter], f.parameter_begin + at + e));
          }
        });
      }
    };
    if constexpr (Stage::shards_state) {
      for (const OwnedFragment& owned : lane.owned) {
        read(owned.fragment, kept_or_null(lane, owned), owned.shard_begin);
      }
    } else {
      State::for_each_kept(lane, map, [&](const Fragment& f, std::size_t begin) {
        read(f, at_or_null(lane, f), begin);
      });
    }
  }

  /// Null where the parameter has no values yet.
  template <class Lane>
  static typename Lane::element* at_or_null(Lane& lane, const Fragment& f) {
    return lane.values[f.parameter] == nullptr ? nullptr : lane.values_at(f);
  }
  template <class Lane>
  static typename Lane::element* kept_or_null(Lane& lane, const OwnedFragment& owned) {
    return owned.value_begin == not_in_shard ? at_or_null(lane, owned.fragment)
                                             : lane.kept_values(owned);
  }

  /// What the user says that a parameter begins with.
  template <class T>
  [[nodiscard]] T initial(const ParameterInfo& info, std::size_t element) const {
    return element_traits<T>::store(
        static_cast<arithmetic_t<T>>(state_.settings.initial_value(info.name, element)));
  }
  /// A fragment's values as they are at construction.
  template <class Lane>
  void copy_values(Lane& lane, const Fragment& f, const ParameterInfo& info,
                   typename Lane::element* to) {
    using T = typename Lane::element;
    if (const T* const from = at_or_null(lane, f)) {
      Memory::copy(from, f.elements, to);
      return;
    }
    Memory::write(to, f.elements, [&](std::size_t at, std::span<T> values) {
      for (std::size_t e = 0; e < values.size(); ++e) {
        values[e] = initial<T>(info, f.parameter_begin + at + e);
      }
    });
  }

  // Of stages that shard gradients and values.

  template <class Lane>
  [[nodiscard]] auto pages_for(const Lane& lane, const Layout<Partition>& map) {
    return std::make_shared<PagedLane<typename Lane::element>>(
        map.extent(lane.index), map.buckets(lane.index), state_.settings.poison_released);
  }

  /// Own slices of what comes and goes into the lane's shard, and what stays into its pages.
  template <class Lane>
  void spread_values(Lane& lane, const Lane& old, const Layout<Partition>& map,
                     const std::vector<ParameterInfo>& infos) {
    using T = typename Lane::element;
    if constexpr (!State::on_device) {
      lane.value_pages = pages_for(lane, map);
      lane.base = lane.value_pages->data();
    }
    lane.shard_values.assign(map.buckets(lane.index), 0);
    for (const Unit& unit : state_.units(map, infos)) {
      if (!unit.resident) continue;
      for (const UnitBuckets& part : unit.parts) {
        if (part.lane != lane.index) continue;
        for (std::size_t b = part.buckets.begin; b < part.buckets.end; ++b) {
          lane.shard_values[b] = not_in_shard;
        }
      }
    }
    std::size_t size = 0;
    for (std::size_t b = 0; b < lane.shard_values.size(); ++b) {
      if (lane.shard_values[b] == not_in_shard) continue;
      lane.shard_values[b] = size;
      size += map.slice(lane.index, b, state_.rank()).size();
    }
    lane.shard = typename Lane::template Array<T>(size, state_.memory());
    if (state_.settings.poison_padding) poison(lane.shard.span());
    for (std::size_t k = 0; k < lane.owned.size(); ++k) {
      OwnedFragment& owned = lane.owned[k];
      const std::size_t slice = lane.shard_values[owned.bucket];
      if (slice == not_in_shard) continue;
      const Fragment& f = owned.fragment;
      const std::size_t begin =
          slice + f.lane_begin - map.slice(lane.index, owned.bucket, state_.rank()).begin;
      T* const to = lane.shard.data() + begin;
      if (k < old.owned.size()) {  // which are the first, but of a unit that may have stayed so far
        const OwnedFragment& was = old.owned[k];
        const T* const from = was.value_begin == not_in_shard ? old.values_at(was.fragment)
                                                              : old.shard.data() + was.value_begin;
        Memory::copy(from, f.elements, to);
      } else {
        copy_values(lane, f, infos[f.parameter], to);
      }
      owned.value_begin = begin;
    }
    if constexpr (State::on_device) place_resident(lane, map);
    for (std::size_t b = 0; b < lane.shard_values.size(); ++b) {
      if (lane.shard_values[b] != not_in_shard) continue;
      const Interval whole = map.bucket(lane.index, b);
      if constexpr (!State::on_device) lane.value_pages->take(b, whole);
      T* const values = lane.bucket_in_place(b, whole);
      if (state_.settings.poison_padding) poison(std::span<T>(values, whole.size()));
      for (const Fragment& f : map.fragments(lane.index, whole)) {
        copy_values(lane, f, infos[f.parameter], values + (f.lane_begin - whole.begin));
      }
    }
  }

  /// A device has no addresses without memory: what stays has an array of its own.
  template <class Lane>
  void place_resident(Lane& lane, const Layout<Partition>& map) {
    using Array = typename Lane::template Array<typename Lane::element>;
    const auto for_each_resident = [&](const auto& f) {
      for (std::size_t b = 0; b < lane.shard_values.size(); ++b) {
        if (lane.shard_values[b] == not_in_shard) f(b, map.bucket(lane.index, b).size());
      }
    };
    std::size_t size = 0;
    for_each_resident([&](std::size_t, std::size_t elements) { size += elements; });
    lane.arena = std::make_shared<Array>(size, state_.memory());
    lane.bucket_values.assign(lane.shard_values.size(), nullptr);
    std::size_t begin = 0;
    for_each_resident([&](std::size_t b, std::size_t elements) {
      lane.bucket_values[b] = lane.arena->data() + begin;
      begin += elements;
    });
  }

  template <class Lane>
  [[nodiscard]] static std::shared_ptr<const void> values_owner(const Lane& lane) {
    if constexpr (Stage::shards_values && !State::on_device) return lane.value_pages;
    return lane.arena;
  }
  template <class Lane>
  [[nodiscard]] static auto gradients_of(const Lane& lane) {
    using T = typename Lane::element;
    if constexpr (State::pools_gradients) {
      return std::pair<T*, std::shared_ptr<const void>>(lane.gradient_pages->data(),
                                                        lane.gradient_pages);
    } else {
      return std::pair<T*, std::shared_ptr<const void>>(lane.gradient_arena->data(),
                                                        lane.gradient_arena);
    }
  }

  template <class U>
  static void fill(U* to, std::size_t count, U value) {
    Memory::write(to, count, [&](std::size_t, std::span<U> part) {
      std::fill(part.begin(), part.end(), value);
    });
  }
  template <class U>
  static void poison(std::span<U> array) {
    fill(array.data(), array.size(), poison_of<U>());
  }

  /// Copies what is there into arenas; the parameters are handed over later, so that an allocation
  /// that fails leaves them where they are.
  template <class Lane>
  void fill_arenas(Lane& lane, const Layout<Partition>& map,
                   const std::vector<ParameterInfo>& infos) {
    using T = typename Lane::element;
    const Interval all{0, room_of(lane, map).arena()};
    using Array = typename Lane::template Array<T>;
    struct Kept {  // parameters may outlive the communicator
      std::shared_ptr<std::pmr::memory_resource> memory;
      Array array;
    };
    const std::shared_ptr<std::pmr::memory_resource> memory = state_.memory_for_peers();
    [[maybe_unused]] const auto make = [&](std::shared_ptr<Array>& arena) {
      auto kept = std::make_shared<Kept>(Kept{memory, Array(all.size(), memory.get())});
      Array* const array = &kept->array;
      arena = std::shared_ptr<Array>(std::move(kept), array);
      if (!state_.settings.poison_padding) return;
      poison(arena->span());
      for (const Fragment& f : map.fragments(lane.index, all)) {
        fill(arena->data() + f.lane_begin, f.elements, zero_of<T>());
      }
    };
    if constexpr (View::values == Residency::arena && !Stage::shards_values) {
      make(lane.arena);
      lane.base = lane.arena->data();
      for (const Fragment& f : map.fragments(lane.index, all)) {
        copy_values(lane, f, infos[f.parameter], lane.arena->data() + f.lane_begin);
      }
    }
    if constexpr (View::gradients == Residency::arena && !State::pools_gradients) {
      make(lane.gradient_arena);
      for (std::size_t i = 0; i < infos.size(); ++i) {
        if (infos[i].lane != lane.index || !stands_alone(infos, i)) continue;
        detail::visit_span(detail::parameter_at(state_.store(), i).gradient(), [&](auto gradient) {
          if constexpr (std::is_same_v<typename decltype(gradient)::value_type, T>) {
            if (gradient.size() != infos[i].elements || gradient.empty()) return;
            Memory::copy(static_cast<const T*>(gradient.data()), gradient.size(),
                         lane.gradient_arena->data() + map.place(i).offset);
          }
        });
      }
    }
  }

  template <class Span, class T>
  void require_rebound(std::size_t i, const Span& shown, std::span<T> place, const char* verb,
                       const char* query) {
    detail::visit_span(shown, [&](auto span) {
      if (span.empty() ? place.empty() : static_cast<const void*>(span.data()) == place.data()) {
        return;
      }
      throw UsageError(state_.name_of(i) + " doesn't use what its " + verb + " was given: " +
                       query + " still shows other memory; let it show the span given");
    });
  }

  State& state_;
};

}  // namespace zero::detail
