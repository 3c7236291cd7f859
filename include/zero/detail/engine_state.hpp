// SPDX-License-Identifier: Apache-2.0
/// @file
/// What one rank knows and keeps: parameters sorted into lanes, their state, and how a bucket of
/// them is updated once its gradients are summed. How ranks reach each other is not known here.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <limits>
#include <memory>
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
#include "zero/communicator.hpp"
#include "zero/detail/agreement.hpp"
#include "zero/detail/hash.hpp"
#include "zero/detail/inspect.hpp"
#include "zero/detail/lane.hpp"
#include "zero/detail/store.hpp"
#include "zero/error.hpp"
#include "zero/layout.hpp"
#include "zero/observer.hpp"
#include "zero/optimizer.hpp"
#include "zero/parameter.hpp"
#include "zero/partition.hpp"
#include "zero/settings.hpp"
#include "zero/stage.hpp"

namespace zero::detail {

template <class List, std::size_t slots>
struct LanesOf;
template <class... T, std::size_t slots>
struct LanesOf<TypeList<T...>, slots> {
  using type = std::tuple<HostLane<T, slots>...>;
};

template <class Opt, class Store, class Comm, class PartitionType, class View, class StageType,
          class Observe>
struct EngineState : EngineIdentity {
  using store_type = std::remove_reference_t<Store>;
  using communicator_type = std::remove_reference_t<Comm>;
  using Partition = PartitionType;
  using Stage = StageType;
  using elements = store_elements<store_type>;
  using Lanes = typename LanesOf<elements, slot_count<Opt>>::type;
  static constexpr std::size_t slots = slot_count<Opt>;
  static constexpr std::size_t lane_count = std::tuple_size_v<Lanes>;
  static constexpr bool shares_memory = SharedMemoryCommunicator<communicator_type>;
  /// Whether values and gradients of the lane are the caller's flat buffers.
  static constexpr bool flat = FlatParamStore<store_type> && View::values == Residency::caller &&
                               CuttingPartition<Partition>;

  /// Whether a gradient is there on some rank, and on all.
  struct Presence {
    bool somewhere;
    bool everywhere;
  };

  /// Collective. Throws `UsageError` on all ranks where one refuses or where they differ; then
  /// nothing of the caller's has changed.
  EngineState(std::vector<Opt> all_groups, Store&& a_store, Comm&& a_comm, Partition partition,
              View a_view, Observe an_observer, Settings all_settings)
      : store_held(std::forward<Store>(a_store)),
        comm_held(std::forward<Comm>(a_comm)),
        groups(std::move(all_groups)),
        view(a_view),
        observer(std::move(an_observer)),
        settings(all_settings) {
    try {
      construct(partition);
    } catch (const UsageError&) {  // the same on all ranks
      throw;
    } catch (const std::exception& error) {
      if (world() > 1) comm().abort("a construction failed: " + std::string(error.what()));
      throw;
    }
  }
  EngineState(const EngineState&) = delete;
  EngineState& operator=(const EngineState&) = delete;

  [[nodiscard]] store_type& store() noexcept { return store_held.get(); }
  [[nodiscard]] communicator_type& comm() noexcept { return comm_held.get(); }
  [[nodiscard]] int world() { return comm().size(); }
  [[nodiscard]] int rank() { return comm().rank(); }
  [[nodiscard]] std::string name_of(std::size_t i) const { return quoted(i, parameters[i].name); }
  /// Whether parameter i has a place of its own: not frozen, not tied to another.
  [[nodiscard]] bool steps_alone(std::size_t i) const {
    return !parameters[i].frozen && parameters[i].leader == i;
  }
  template <class F>
  void for_each_lane(F&& f) {
    std::apply([&](auto&... lane) { (f(lane), ...); }, lanes);
  }

  /// Decides, from what all ranks have, which parameters are stepped: those with a gradient on any.
  template <class F>
  void agree_on_presence(F&& presence_of) {
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      stepping[i] = 0;
      if (!steps_alone(i) || parameters[i].elements == 0) continue;
      const Presence presence = presence_of(i);
      if (settings.gradients == Gradients::reduced && presence.somewhere != presence.everywhere) {
        throw UsageError("step: " + name_of(i) +
                         " has a gradient on some ranks only; reduced gradients must be the same "
                         "on all");
      }
      stepping[i] = presence.somewhere ? 1 : 0;
    }
  }

  /// Up to here a failure changes nothing; from here on it leaves the optimizer failed.
  void begin_update(bool& updating) {
    if (std::exchange(updating, true)) return;
    ++step_number;
    for (std::size_t i = 0; i < parameters.size(); ++i) step_counts[i] += stepping[i];
  }

  [[nodiscard]] double gradient_scale() {
    const bool sums = settings.gradients == Gradients::local;
    return settings.gradient_scale.value_or(sums ? 1.0 / world() : 1.0);
  }
  template <class F>
  void observe([[maybe_unused]] Phase phase, [[maybe_unused]] std::size_t lane,
               [[maybe_unused]] std::size_t bucket, F&& body) {
    if constexpr (std::is_same_v<Observe, NoObserver>) {
      body();
    } else {
      const bool all = phase == Phase::update && !Stage::shards_state;
      const Interval handled =
          all ? layout->bucket(lane, bucket) : layout->slice(lane, bucket, rank());
      const Event event{phase, lane, bucket, handled.size()};
      observer.begin(event);
      body();
      observer.end(event);
    }
  }

  /// A rule's scalars for one parameter: kept while group and step count stay the same.
  template <class T>
  class Constants {
   public:
    using Scalars = decltype(std::declval<const Opt&>().template scalars<arithmetic_t<T>>(1));
    explicit Constants(const EngineState& state) : state_(&state) {}
    const Scalars& of(std::size_t parameter) {
      const std::size_t group = state_->parameters[parameter].group;
      const std::int64_t t = state_->step_counts[parameter];
      if (!scalars_ || group != group_ || t != t_) {
        scalars_.emplace(state_->groups[group].template scalars<arithmetic_t<T>>(t));
        group_ = group;
        t_ = t;
      }
      return *scalars_;
    }

   private:
    const EngineState* state_;
    std::size_t group_ = 0;
    std::int64_t t_ = 0;
    std::optional<Scalars> scalars_;
  };

  /// Updates this rank's part of a bucket. `gradient(fragment, begin)` gives its gradient, where
  /// `begin` is where the fragment's slots start.
  template <class T, class F>
  void update_bucket(HostLane<T, slots>& lane, std::size_t bucket, const F& gradient) {
    Constants<T> constants(*this);
    const auto update = [&](const Fragment& f, std::size_t begin) {
      if (stepping[f.parameter] == 0) return;
      const Opt& rule = groups[parameters[f.parameter].group];
      update_fragment(rule, constants.of(f.parameter), lane, f, begin, gradient(f, begin));
    };
    observe(Phase::update, lane.index, bucket, [&] {
      if constexpr (Stage::shards_state) {
        for (std::size_t k = lane.owned_begin[bucket]; k < lane.owned_begin[bucket + 1]; ++k) {
          update(lane.owned[k].fragment, lane.owned[k].shard_begin);
        }
      } else {
        for (const Fragment& f :
             layout->fragments(lane.index, layout->bucket(lane.index, bucket))) {
          update(f, f.lane_begin);
        }
      }
    });
  }

  template <class T>
  [[nodiscard]] auto own_gradient(HostLane<T, slots>& lane) {
    return [&lane, scale = static_cast<arithmetic_t<T>>(gradient_scale())](const Fragment& f,
                                                                           std::size_t) {
      lane.sources[0] = lane.gradient_at(f);
      return GradientSum<T>{std::span<const T* const>(lane.sources.data(), 1), scale};
    };
  }

  void update_from_own_gradients() {
    for_each_lane([&](auto& lane) {
      const auto gradient = own_gradient(lane);
      for (std::size_t b = 0; b < layout->buckets(lane.index); ++b)
        update_bucket(lane, b, gradient);
    });
  }

  Held<Store> store_held;
  Held<Comm> comm_held;
  std::vector<Opt> groups;
  View view;
  [[no_unique_address]] Observe observer;
  Settings settings;

  std::optional<Layout<Partition>> layout{};
  std::vector<ParameterInfo> parameters{};
  std::size_t slots_allocated = 0;
  std::int64_t step_number = 0;
  std::vector<std::int64_t> step_counts{};  ///< by leader: how often it was stepped
  std::vector<std::uint8_t> present{};      ///< by leader: whether this rank has its gradient
  std::vector<std::uint8_t> stepping{};     ///< by leader: whether this step updates it
  std::string step_refusal{};               ///< why this rank can't step; peers read it
  std::uint64_t options = 0;                ///< fingerprint of the groups' options; peers read it
  Lanes lanes{};

 private:
  void construct(const Partition& partition) {
    std::string refusal;
    Inspection seen;
    try {
      if (groups.empty()) throw UsageError("construction: zero::Groups is empty");
      for (const Opt& group : groups) zero::validate(group);
      const double scale = gradient_scale();
      if (!(scale - scale == 0)) {
        throw UsageError("construction: Settings::gradient_scale is " + std::to_string(scale) +
                         "; it must be a finite number");
      }
      detail::inspect(store(), groups.size(), settings.check_values, seen);
      make_layout(seen, partition);
      if (View::values == Residency::caller) refuse_separate_ties(store(), seen.parameters);
    } catch (const UsageError& error) {
      if (world() == 1) throw;
      refusal = text_of(error);
    }
    for (const Opt& group : groups) {
      slots_allocated = std::max(slots_allocated, zero::used_slots(group));
    }
    if (world() > 1) agree(seen, refusal);
    parameters = std::move(seen.parameters);
    step_counts.assign(parameters.size(), 0);
    present.assign(parameters.size(), 0);
    stepping.assign(parameters.size(), 0);
    for_each_lane([&](auto& lane) { allocate(lane); });
    if constexpr (View::values == Residency::arena) move_values();
  }

  void make_layout(const Inspection& seen, const Partition& partition) {
    std::vector<LayoutLane> of_lanes;
    for_each_lane([&]<class T>(HostLane<T, slots>& lane) {
      lane.index = of_lanes.size();
      of_lanes.push_back({sizeof(T), view.bucket_bytes, flat});
    });
    layout.emplace(seen.places, of_lanes, world(), partition);
    if constexpr (flat) {
      const auto buffer = store().flat_values();
      std::size_t offset = 0;
      for (std::size_t i = 0; i < seen.parameters.size(); ++i) {
        if (seen.parameters[i].leader != i) continue;  // a tied one takes no room
        detail::visit_span(detail::parameter_at(store(), i).values(), [&](auto values) {
          if (!values.empty() && values.data() != buffer.data() + offset) {
            refuse_parameter(i, seen.parameters[i].name,
                             "does not lie in the flat buffer where the parameters before it end");
          }
          offset += values.size();
        });
      }
    }
  }

  void agree(const Inspection& seen, const std::string& refusal) {
    Digest mine;
    Hash program;
    const std::string type = typeid(EngineState).name();
    program.add(type.data(), type.size());
    mine.program = program.value();
    Hash set;
    set.add(view.bucket_bytes);
    set.add(static_cast<std::uint64_t>(settings.gradients));
    set.add(std::uint64_t{settings.check_values});
    set.add(groups.size());
    set.add(slots_allocated);
    const double scale = gradient_scale();
    set.add(&scale, sizeof scale);
    mine.settings = set.value();
    Hash all;
    if (!seen.digests.empty()) {
      all.add(seen.digests.data(), seen.digests.size() * sizeof(ParameterDigest));
    }
    mine.parameters = all.value();
    mine.count = seen.digests.size();
    mine.address = reinterpret_cast<std::uintptr_t>(this);
    mine.refusal = to_text(refusal);
    identity = require_agreement(comm(), mine, seen.digests,
                                 [&](std::size_t i) { return quoted(i, seen.parameters[i].name); });
  }

  template <class T>
  void allocate(HostLane<T, slots>& lane) {
    lane.values.assign(parameters.size(), nullptr);
    lane.gradients.assign(parameters.size(), nullptr);
    lane.sources.assign(static_cast<std::size_t>(world()), nullptr);
    lane.scratch.reserve(static_cast<std::size_t>(world()));
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      if (parameters[i].lane != lane.index || !steps_alone(i)) continue;
      detail::visit_span(detail::parameter_at(store(), i).values(), [&](auto values) {
        if constexpr (std::is_same_v<typename decltype(values)::value_type, T>) {
          lane.values[i] = values.data();
        }
      });
    }
    layout->for_each_owned(lane.index, rank(),
                           [&](const Fragment& fragment, std::size_t bucket, std::size_t begin) {
                             lane.owned.push_back({fragment, bucket, begin});
                           });
    lane.owned_begin.assign(layout->buckets(lane.index) + 1, 0);
    for (const OwnedFragment& owned : lane.owned) ++lane.owned_begin[owned.bucket + 1];
    std::partial_sum(lane.owned_begin.begin(), lane.owned_begin.end(), lane.owned_begin.begin());
    const std::size_t extent = layout->extent(lane.index);
    const std::size_t shard = layout->shard_elements(lane.index, rank());
    for (std::size_t s = 0; s < slots_allocated; ++s) {
      lane.state[s] = HostArray<T>(Stage::shards_state ? shard : extent, settings.memory);
      if (settings.poison_padding) poison_padding(lane, lane.state[s].span(), Stage::shards_state);
    }
    if (world() > 1 && settings.gradients == Gradients::local) {
      // Ranks that share memory sum while they update; only without sharding, where everyone
      // needs all sums, does each keep those of its slices for the others to read.
      const std::size_t sums = shares_memory ? (Stage::shards_state ? 0 : shard)
                                             : (Stage::shards_state ? shard : extent);
      lane.reduced = HostArray<T>(sums, settings.memory);
    }
    if constexpr (flat) lane.base = store().flat_values().data();
  }

  /// NaN wherever no parameter's element lies.
  template <class T>
  void poison_padding(const HostLane<T, slots>& lane, std::span<T> array, bool by_shard) {
    std::fill(array.begin(), array.end(), std::numeric_limits<T>::quiet_NaN());
    if (by_shard) {
      for (const OwnedFragment& owned : lane.owned) {
        std::fill_n(array.data() + owned.shard_begin, owned.fragment.elements, T(0));
      }
    } else {
      for (const Fragment& f : layout->fragments(lane.index, {0, array.size()})) {
        std::fill_n(array.data() + f.lane_begin, f.elements, T(0));
      }
    }
  }

  /// Copies all values into arenas first, then hands the parameters over: an allocation that fails
  /// leaves them where they were.
  void move_values() {
    for_each_lane([&]<class T>(HostLane<T, slots>& lane) {
      lane.arena = std::make_shared<HostArray<T>>(layout->extent(lane.index), settings.memory);
      if (settings.poison_padding) poison_padding(lane, lane.arena->span(), false);
      for (const Fragment& f : layout->fragments(lane.index, {0, lane.arena->size()})) {
        std::memcpy(lane.arena->data() + f.lane_begin, lane.values_at(f), f.elements * sizeof(T));
      }
      lane.base = lane.arena->data();
    });
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      if (parameters[i].frozen) continue;
      auto&& parameter = detail::parameter_at(store(), i);
      for_each_lane([&]<class T>(HostLane<T, slots>& lane) {
        if (lane.index != parameters[i].lane) return;
        const std::span<T> place(lane.base + layout->place(i).offset, parameters[i].elements);
        if (steps_alone(i)) lane.values[i] = place.data();
        parameter.rebind(values_t<parameter_t<store_type>>(place), lane.arena);
      });
    }
  }
};

}  // namespace zero::detail
