// SPDX-License-Identifier: Apache-2.0
/// @file
/// What one rank knows and keeps: parameters sorted into lanes, their state, and how a bucket of
/// them is updated once its gradients are summed. How ranks reach each other is not known here.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <memory_resource>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "zero/bucket_view.hpp"
#include "zero/communicator.hpp"
#include "zero/detail/agreement.hpp"
#include "zero/detail/build.hpp"
#include "zero/detail/denormals.hpp"
#include "zero/detail/findings.hpp"
#include "zero/detail/inspect.hpp"
#include "zero/detail/join_scope.hpp"
#include "zero/detail/lane.hpp"
#include "zero/detail/lane_room.hpp"
#include "zero/detail/policies.hpp"
#include "zero/detail/rounding.hpp"
#include "zero/detail/scaling.hpp"
#include "zero/detail/space.hpp"
#include "zero/detail/storage.hpp"
#include "zero/detail/store.hpp"
#include "zero/detail/tensor_step.hpp"
#include "zero/detail/units.hpp"
#include "zero/element.hpp"
#include "zero/error.hpp"
#include "zero/join_options.hpp"
#include "zero/layout.hpp"
#include "zero/memory.hpp"
#include "zero/observer.hpp"
#include "zero/optimizer.hpp"
#include "zero/parameter.hpp"
#include "zero/partition.hpp"
#include "zero/rounding.hpp"
#include "zero/settings.hpp"
#include "zero/stage.hpp"

namespace zero::detail {

template <class List, class Precision, std::size_t slots, MemorySpace space>
struct LanesOf;
template <class... T, class Precision, std::size_t slots, MemorySpace space>
struct LanesOf<TypeList<T...>, Precision, slots, space> {
  using type = std::tuple<Lane<Storage<T, Precision>, slots, space>...>;
};

template <class Opt, class Store, class Comm, class PartitionType, class ViewType, class StageType,
          class Precision, class Observe>
struct EngineState : EngineIdentity {
  using store_type = std::remove_reference_t<Store>;
  using communicator_type = std::remove_reference_t<Comm>;
  using optimizer_type = Opt;
  using Partition = PartitionType;
  using View = ViewType;
  using Stage = StageType;
  using elements = store_elements<store_type>;
  static constexpr MemorySpace space = memory_space_of<parameter_t<store_type>>;
  static constexpr bool on_device = space == MemorySpace::cuda;
  using Memory = Space<space>;
  using Lanes = typename LanesOf<elements, Precision, slot_count<Opt>, space>::type;
  static constexpr std::size_t slots = slot_count<Opt>;
  static constexpr std::size_t lane_count = std::tuple_size_v<Lanes>;
  static constexpr bool shares_memory = SharedMemoryCommunicator<communicator_type>;
  static constexpr bool has_replicas = ReplicatedCommunicator<communicator_type>;
  static_assert(
      !shares_memory || !has_replicas,
      "zero: a communicator of one of several groups must have no `meet`, since gradients "
      "are summed over the other groups too");
  /// Whether gradients live in memory of the optimizer's until they are reduced.
  static constexpr bool pools_gradients = Stage::shards_gradients;
  /// Whether ranks read each other's gradients where they lie.
  static constexpr bool reads_peers = shares_memory && may_read_peers<Stage, Precision, elements>;
  /// Whether values and gradients of the lane are the caller's flat buffers.
  static constexpr bool flat = lies_flat<store_type, View, Partition>;
  /// Whether some element type is computed in float.
  static constexpr bool in_float = []<class... T>(TypeList<T...>) {
    return (std::is_same_v<arithmetic_t<T>, float> || ...);
  }(elements{});
  static constexpr bool steps_tensors = AnyWholeTensor<Opt, store_type>::value;

  /// Whether a gradient is there on some rank, and on all.
  struct Presence {
    bool somewhere;
    bool everywhere;
  };

  /// Collective. Throws `UsageError` on all ranks where one refuses or where they differ; then
  /// nothing of the caller's has changed.
  EngineState(std::vector<Opt> all_groups, Store&& a_store, Comm&& a_comm, Partition partition,
              View a_view, Stage a_stage, Precision a_precision, Observe an_observer,
              Settings all_settings)
      : store_held(std::forward<Store>(a_store)),
        comm_held(std::forward<Comm>(a_comm)),
        groups(std::move(all_groups)),
        view(a_view),
        stage(a_stage),
        precision(a_precision),
        observer(std::move(an_observer)),
        settings(std::move(all_settings)),
        scaling(settings, all_ranks()) {
    construct_or_abort([&] { Builder<EngineState>(*this).construct(partition); });
  }
  EngineState(const EngineState&) = delete;
  EngineState& operator=(const EngineState&) = delete;

  [[nodiscard]] store_type& store() noexcept { return store_held.get(); }
  [[nodiscard]] communicator_type& comm() noexcept { return comm_held.get(); }
  /// The ranks that state is spread over, and this one's place among them.
  [[nodiscard]] int world() { return comm().size(); }
  [[nodiscard]] int rank() { return comm().rank(); }
  /// Those who must agree and whose gradients are summed: the ranks of all groups.
  [[nodiscard]] auto& everyone() noexcept { return all_ranks_of(comm()); }
  [[nodiscard]] int all_ranks() { return everyone().size(); }
  [[nodiscard]] bool alone() { return all_ranks() == 1; }
  [[nodiscard]] std::string name_of(std::size_t i) const { return quoted(i, parameters[i].name); }
  /// Where what only this rank reads is allocated.
  [[nodiscard]] std::pmr::memory_resource* memory() const {
    return Memory::resource(settings.memory);
  }
  /// Where what peers read is allocated: where they can read it without being sent it, if the
  /// communicator offers such memory and the user asked for no other.
  [[nodiscard]] std::shared_ptr<std::pmr::memory_resource> memory_for_peers() {
    if constexpr (SharedMemoryProvider<communicator_type>) {
      if (settings.memory == huge_page_resource()) {
        if (auto memory = comm().shared_memory()) return memory;
      }
    }
    return {std::shared_ptr<void>(), memory()};  // which is the user's to keep
  }
  /// What only this rank throws its peers must learn of.
  template <class F>
  void construct_or_abort(F&& body) {
    or_tell(body, [&](const char* why) {
      if (!alone()) comm().abort("a construction failed: " + std::string(why));
    });
  }
  /// What is gathered and let go together. Where values aren't sharded everything is resident.
  [[nodiscard]] std::vector<Unit> units() { return units(*layout, parameters); }
  [[nodiscard]] std::vector<Unit> units(const Layout<Partition>& map,
                                        const std::vector<ParameterInfo>& infos) {
    return units_of(
        map, [&](std::size_t i) { return infos[i].attributes.unit; }, element_bytes(elements{}),
        resident_limit(stage, alone()));
  }
  /// Of values that stay although others come and go.
  [[nodiscard]] std::size_t resident_value_bytes() {
    if (!Stage::shards_values) return 0;
    std::size_t sum = 0;
    for (const Unit& unit : units()) sum += unit.resident ? unit.bytes : 0;
    return sum;
  }
  /// Whether parameter i has a place of its own: not frozen, not tied to another.
  [[nodiscard]] bool steps_alone(std::size_t i) const { return stands_alone(parameters, i); }
  template <class F>
  void for_each_lane(F&& f) {
    std::apply([&](auto&... lane) { (f(lane), ...); }, lanes);
  }

  /// `f(fragment, begin)` for all that this rank keeps state for, `begin` being where its slots
  /// start: its own, or everything without sharding.
  template <class Lane, class F>
  static void for_each_kept(const Lane& lane, const Layout<Partition>& map, F&& f) {
    if constexpr (Stage::shards_state) {
      for (const OwnedFragment& owned : lane.owned) f(owned.fragment, owned.shard_begin);
    } else {
      for (const Fragment& fragment : map.fragments(lane.index, {0, map.extent(lane.index)})) {
        f(fragment, fragment.lane_begin);
      }
    }
  }

  /// Options may have changed: throws `UsageError` where a tensor can't be stepped with them any
  /// more, or needs more room than there is.
  void require_tensors_fit() {
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      if (!steps_alone(i)) continue;
      try {
        zero::validate(groups[parameters[i].group],
                       std::span<const std::size_t>(parameters[i].shape));
      } catch (const UsageError& error) {
        throw UsageError("step: " + name_of(i) + " can't be stepped: " + error.what());
      }
    }
    for_each_lane([&](auto& lane) {
      for_each_kept(lane, *layout, [&](const Fragment& f, std::size_t) {
        const ParameterInfo& info = parameters[f.parameter];
        using S = typename std::remove_cvref_t<decltype(lane)>::storage;
        const std::size_t needed = tensor_workspace<S>(
            groups[info.group], slots, std::span<const std::size_t>(info.shape), f.elements);
        if (needed <= lane.workspace.size()) return;
        throw UsageError("step: " + name_of(f.parameter) +
                         " needs more workspace with the options of now than with those that it "
                         "was constructed with; construct with the larger ones");
      });
    });
  }

  /// Whether some ranks take part in the step under way without input.
  [[nodiscard]] bool some_serve() { return inputs.ranks < all_ranks(); }

  // Before the update: who has which gradients, and whether they can be stepped with.

  /// Decides, from what all ranks say of their joins, whether there is a step to take; throws where
  /// they are not in the same one. Without a value there is.
  /// @param word_of the `JoinWord` of a rank
  template <class F>
  [[nodiscard]] std::optional<StepEnd> agree_to_go_on(const F& word_of) {
    inputs = agree_on_inputs(all_ranks(), word_of);
    if (inputs.ranks == all_ranks()) return std::nullopt;
    if (inputs.ranks == 0) return StepEnd::no_input;
    if (join->options().when_first_ends == JoinEnd::raise) return StepEnd::raised;
    return std::nullopt;
  }

  /// Decides, from what all ranks have, which parameters are stepped: those with a gradient on any.
  template <class F>
  void agree_on_presence(F&& presence_of) {
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      stepping[i] = 0;
      if (!steps_alone(i) || parameters[i].elements == 0) continue;
      const Presence presence = presence_of(i);
      if (settings.gradients == Gradients::reduced && presence.somewhere != presence.everywhere) {
        throw AgreedRefusal(
            "step: " + name_of(i) +
            " has a gradient on some ranks only; reduced gradients must be the same "
            "on all");
      }
      stepping[i] = presence.somewhere ? 1 : 0;
    }
    findings = {};
    const bool of_fewer = join != nullptr && join->options().mean == JoinMean::ranks_with_input;
    scaling.begin_step(of_fewer ? inputs.ranks : all_ranks());
  }

  /// Looks at the gradients of this rank's fragments in a bucket. `gradient` as for
  /// `update_bucket`, `begin` counted in the own slices. Where `keeps`, their sums are left in
  /// `lane.reduced`.
  template <class Lane, class F>
  void look_at_bucket(Lane& lane, std::size_t bucket, bool keeps, const F& gradient) {
    using A = typename Lane::arithmetic;
    const bool looks = scaling.looks_first();
    for (std::size_t k = lane.owned_begin[bucket]; k < lane.owned_begin[bucket + 1]; ++k) {
      const Fragment& f = lane.owned[k].fragment;
      if (stepping[f.parameter] == 0) continue;
      const auto sum = gradient(f, lane.owned[k].shard_begin);
      using G = std::remove_cvref_t<decltype(*sum.sources[0])>;
      if constexpr (std::is_same_v<G, A>) {
        if (!keeps && sum.sources.size() == 1 && sum.sources[0] != nullptr) {
          if (looks) look_at(std::span<const A>(sum.sources[0], f.elements));
          continue;
        }
      }
      // In chunks that are still in the fastest cache when they are looked at, and so short that
      // the processor goes on to fetch the sources ahead meanwhile (measured: 512 elements take 3/4
      // of the time of 2048).
      for (std::size_t at = 0; at < f.elements; at += look_chunk) {
        const std::size_t count = std::min(look_chunk, f.elements - at);
        alignas(64) A chunk[look_chunk];
        A* const summed = keeps ? lane.reduced.data() + lane.owned[k].shard_begin + at : chunk;
        sum_sources(sum, at, count, summed);
        if (looks) look_at(std::span<const A>(summed, count));
      }
    }
  }

  /// Up to here a failure changes nothing; from here on it leaves the optimizer failed.
  void begin_update(bool& updating) {
    if (std::exchange(updating, true)) return;
    ++step_number;
    for (std::size_t i = 0; i < parameters.size(); ++i) step_counts[i] += stepping[i];
    scaling.applied();
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
      const auto tell = [&](auto&& told) {
        if constexpr (pools_gradients) {  // threads of traffic tell, too
          const std::scoped_lock lock(observing);
          told();
        } else {
          told();
        }
      };
      tell([&] { observer.begin(event); });
      body();
      tell([&] { observer.end(event); });
    }
  }

  // The update.

  /// What is constant over one parameter's step: a rule's scalars, kept while group and step count
  /// stay the same, or the step count itself.
  template <class A>
  class Constants {
   public:
    explicit Constants(const EngineState& state) : state_(&state) {}
    decltype(auto) of(std::size_t parameter) {
      const std::int64_t t = state_->step_counts[parameter];
      if constexpr (UpdateRule<Opt, A>) {
        const std::size_t group = state_->parameters[parameter].group;
        if (!scalars_ || group != group_ || t != t_) {
          scalars_.emplace(state_->groups[group].template scalars<A>(t));
          group_ = group;
          t_ = t;
        }
        return std::as_const(*scalars_);
      } else {
        return t;
      }
    }

   private:
    static auto type() {
      if constexpr (UpdateRule<Opt, A>) {
        return std::type_identity<decltype(std::declval<const Opt&>().template scalars<A>(1))>{};
      } else {
        return std::type_identity<std::int64_t>{};  // not used
      }
    }
    const EngineState* state_;
    std::size_t group_ = 0;
    std::int64_t t_ = 0;
    std::optional<typename decltype(type())::type> scalars_;
  };

  /// Steps one fragment whose values are kept at `values` and whose slots start at `begin`.
  template <class Lane, class C, class G>
  void step_fragment(Lane& lane, C& constants, const Fragment& f, typename Lane::element* values,
                     std::size_t begin, const GradientSum<G>& gradient) {
    const Opt& optimizer = groups[parameters[f.parameter].group];
    NoiseKey noise{};
    if constexpr (Lane::storage::rounding == Rounding::stochastic) {
      noise = noise_key(precision.seed, static_cast<std::uint64_t>(step_counts[f.parameter]),
                        f.parameter);
    }
    if constexpr (UpdateRule<Opt, typename Lane::arithmetic>) {
      update_fragment(optimizer, constants.of(f.parameter), lane, f, values, begin, noise,
                      gradient);
    } else {
      step_tensor(optimizer, constants.of(f.parameter), lane, f, values, begin, noise, gradient,
                  parameters[f.parameter].shape);
    }
  }

  /// Updates this rank's part of a bucket. `gradient(fragment, begin)` gives its gradient, where
  /// `begin` is where the fragment's slots start.
  template <class Lane, class F>
  void update_bucket(Lane& lane, std::size_t bucket, const F& gradient) {
    Constants<typename Lane::arithmetic> constants(*this);
    const auto update = [&](const Fragment& f, auto* values, std::size_t begin) {
      if (stepping[f.parameter] == 0) return;
      step_fragment(lane, constants, f, values, begin, gradient(f, begin));
    };
    observe(Phase::update, lane.index, bucket, [&] {
      const FlushDenormals flush(settings.flush_denormals);
      if constexpr (Stage::shards_state) {
        for (std::size_t k = lane.owned_begin[bucket]; k < lane.owned_begin[bucket + 1]; ++k) {
          const OwnedFragment& owned = lane.owned[k];
          update(owned.fragment, lane.kept_values(owned), owned.shard_begin);
        }
      } else {
        for (const Fragment& f :
             layout->fragments(lane.index, layout->bucket(lane.index, bucket))) {
          update(f, lane.values_at(f), f.lane_begin);
        }
      }
    });
  }

  template <class Lane>
  [[nodiscard]] auto own_gradient(Lane& lane) {
    return [&lane, scale = static_cast<typename Lane::arithmetic>(scaling.of_step())](
               const Fragment& f, std::size_t) {
      lane.sources[0] = lane.gradient_at(f);
      return GradientSum<typename Lane::element>{
          std::span<const typename Lane::element* const>(lane.sources.data(), 1), scale};
    };
  }

  void look_at_own_gradients() {
    for_each_lane([&](auto& lane) {
      const auto gradient = own_gradient(lane);
      for (std::size_t b = 0; b < layout->buckets(lane.index); ++b) {
        observe(Phase::reduce, lane.index, b, [&] { look_at_bucket(lane, b, false, gradient); });
      }
    });
  }
  void update_from_own_gradients() {
    for_each_lane([&](auto& lane) {
      const auto gradient = own_gradient(lane);
      for (std::size_t b = 0; b < layout->buckets(lane.index); ++b)
        update_bucket(lane, b, gradient);
    });
  }

  /// The same of sums that lie in `lane.reduced`.
  template <class Lane>
  [[nodiscard]] auto own_sums(Lane& lane) {
    return [&lane, scale = static_cast<typename Lane::arithmetic>(scaling.of_step())](
               const Fragment&, std::size_t begin) {
      return lane.summed(lane.reduced.data() + begin, scale);
    };
  }
  void look_at_own_sums() {
    for_each_lane([&](auto& lane) {
      for (std::size_t b = 0; b < layout->buckets(lane.index); ++b) {
        observe(Phase::reduce, lane.index, b,
                [&] { look_at_bucket(lane, b, false, own_sums(lane)); });
      }
    });
  }
  void update_from_own_sums() {
    for_each_lane([&](auto& lane) {
      for (std::size_t b = 0; b < layout->buckets(lane.index); ++b) {
        update_bucket(lane, b, own_sums(lane));
      }
    });
  }

  Held<Store> store_held;
  Held<Comm> comm_held;
  std::vector<Opt> groups;
  View view;
  [[no_unique_address]] Stage stage;
  [[no_unique_address]] Precision precision;
  [[no_unique_address]] Observe observer;
  std::mutex observing{};  ///< of `observer`, where several threads tell it
  Settings settings;
  Scaling scaling;

  std::optional<Layout<Partition>> layout{};
  std::vector<ParameterInfo> parameters{};
  std::size_t slots_allocated = 0;
  std::int64_t step_number = 0;
  std::vector<std::int64_t> step_counts{};  ///< by leader: how often it was stepped
  std::vector<std::uint8_t> present{};      ///< by leader: whether this rank has its gradient
  std::vector<std::uint8_t> stepping{};     ///< by leader: whether this step updates it
  Findings findings{};                      ///< of this rank in this step; peers read it
  std::string step_refusal{};               ///< why this rank can't step; peers read it
  std::uint64_t options = 0;                ///< fingerprint of the groups' options; peers read it
  JoinWord join_word{};                     ///< of this rank in this step; peers read it
  JoinScope* join = nullptr;                ///< that this rank's steps are in, or none
  Inputs inputs{};                          ///< of the step under way
  Lanes lanes{};

 private:
  template <class A>
  void look_at(std::span<const A> sums) {
    findings.look_at(sums, scaling.max_norm.has_value());
  }
};

}  // namespace zero::detail
