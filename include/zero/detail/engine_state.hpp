// SPDX-License-Identifier: Apache-2.0
/// @file
/// What one rank knows and keeps: parameters sorted into lanes, their state, and how a bucket of
/// them is updated once its gradients are summed. How ranks reach each other is not known here.
#pragma once

#include <algorithm>
#include <cmath>
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
#include "zero/detail/findings.hpp"
#include "zero/detail/hash.hpp"
#include "zero/detail/inspect.hpp"
#include "zero/detail/lane.hpp"
#include "zero/detail/policies.hpp"
#include "zero/detail/rounding.hpp"
#include "zero/detail/storage.hpp"
#include "zero/detail/store.hpp"
#include "zero/detail/tensor_step.hpp"
#include "zero/element.hpp"
#include "zero/error.hpp"
#include "zero/layout.hpp"
#include "zero/observer.hpp"
#include "zero/optimizer.hpp"
#include "zero/parameter.hpp"
#include "zero/partition.hpp"
#include "zero/rounding.hpp"
#include "zero/settings.hpp"
#include "zero/stage.hpp"

namespace zero::detail {

template <class List, class Precision, std::size_t slots>
struct LanesOf;
template <class... T, class Precision, std::size_t slots>
struct LanesOf<TypeList<T...>, Precision, slots> {
  using type = std::tuple<HostLane<Storage<T, Precision>, slots>...>;
};

template <class Opt, class Store, class Comm, class PartitionType, class View, class StageType,
          class Precision, class Observe>
struct EngineState : EngineIdentity {
  using store_type = std::remove_reference_t<Store>;
  using communicator_type = std::remove_reference_t<Comm>;
  using Partition = PartitionType;
  using Stage = StageType;
  using elements = store_elements<store_type>;
  using Lanes = typename LanesOf<elements, Precision, slot_count<Opt>>::type;
  static constexpr std::size_t slots = slot_count<Opt>;
  static constexpr std::size_t lane_count = std::tuple_size_v<Lanes>;
  static constexpr bool shares_memory = SharedMemoryCommunicator<communicator_type>;
  /// Whether values and gradients of the lane are the caller's flat buffers.
  static constexpr bool flat = FlatParamStore<store_type> && View::values == Residency::caller &&
                               View::gradients == Residency::caller && CuttingPartition<Partition>;
  static constexpr bool steps_tensors = AnyWholeTensor<Opt, store_type>::value;
  static constexpr bool moves =
      View::values == Residency::arena || View::gradients == Residency::arena;

  /// Whether a gradient is there on some rank, and on all.
  struct Presence {
    bool somewhere;
    bool everywhere;
  };

  /// Collective. Throws `UsageError` on all ranks where one refuses or where they differ; then
  /// nothing of the caller's has changed.
  EngineState(std::vector<Opt> all_groups, Store&& a_store, Comm&& a_comm, Partition partition,
              View a_view, Precision a_precision, Observe an_observer, Settings all_settings)
      : store_held(std::forward<Store>(a_store)),
        comm_held(std::forward<Comm>(a_comm)),
        groups(std::move(all_groups)),
        view(a_view),
        precision(a_precision),
        observer(std::move(an_observer)),
        settings(all_settings) {
    if (settings.loss_scale) loss_scale = settings.loss_scale->scale;
    or_abort("a construction", [&] { construct(partition); });
  }
  EngineState(const EngineState&) = delete;
  EngineState& operator=(const EngineState&) = delete;

  [[nodiscard]] store_type& store() noexcept { return store_held.get(); }
  [[nodiscard]] communicator_type& comm() noexcept { return comm_held.get(); }
  [[nodiscard]] int world() { return comm().size(); }
  [[nodiscard]] int rank() { return comm().rank(); }
  [[nodiscard]] std::string name_of(std::size_t i) const { return quoted(i, parameters[i].name); }
  /// Whether parameter i has a place of its own: not frozen, not tied to another.
  [[nodiscard]] bool steps_alone(std::size_t i) const { return steps_alone(parameters, i); }
  template <class F>
  void for_each_lane(F&& f) {
    std::apply([&](auto&... lane) { (f(lane), ...); }, lanes);
  }

  // Before the update: who has which gradients, and whether they can be stepped with.

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
    findings = {};
    gradient_norm.reset();
    step_scale = unclipped_scale();
  }

  /// Whether all sums must have been looked at before the first may be used.
  [[nodiscard]] bool looks_first() const { return max_norm.has_value() || checks(); }
  /// Whether non-finite gradients skip the step.
  [[nodiscard]] bool checks() const {
    if (settings.finite_check != FiniteCheck::where_needed) {
      return settings.finite_check == FiniteCheck::always;
    }
    return max_norm.has_value() || settings.loss_scale.has_value() || has_16_bits;
  }

  /// Looks at the gradients of this rank's fragments in a bucket. `gradient` as for
  /// `update_bucket`, `begin` counted in the own slices. Where `keeps`, their sums are left in
  /// `lane.reduced`.
  template <class Lane, class F>
  void look_at_bucket(Lane& lane, std::size_t bucket, bool keeps, const F& gradient) {
    using A = typename Lane::arithmetic;
    const bool looks = looks_first();
    for (std::size_t k = lane.owned_begin[bucket]; k < lane.owned_begin[bucket + 1]; ++k) {
      const Fragment& f = lane.owned[k].fragment;
      if (stepping[f.parameter] == 0) continue;
      const auto sum = gradient(f, lane.owned[k].shard_begin);
      using G = std::remove_cvref_t<decltype(*sum.sources[0])>;
      for (std::size_t at = 0; at < f.elements; at += sum_chunk) {
        const std::size_t count = std::min(sum_chunk, f.elements - at);
        A* const kept = keeps ? lane.reduced.data() + lane.owned[k].shard_begin + at : nullptr;
        const A* summed = kept;
        alignas(64) A chunk[sum_chunk];
        if constexpr (std::is_same_v<G, A>) {
          if (!keeps && sum.sources.size() == 1 && sum.sources[0] != nullptr) {
            summed = sum.sources[0] + at;
          } else {
            summed = sum_chunk_to(lane, sum, at, count, keeps ? kept : chunk);
          }
        } else {
          summed = sum_chunk_to(lane, sum, at, count, keeps ? kept : chunk);
        }
        if (looks) findings.look_at(std::span<const A>(summed, count), max_norm.has_value());
      }
    }
  }

  /// What all ranks found decides whether the step is applied, and what gradients are scaled by.
  [[nodiscard]] bool decide(const Findings& all) {
    if (max_norm) {
      gradient_norm = std::sqrt(all.squares.value()) * std::abs(unclipped_scale());
      // PyTorch's clip_grad_norm_, term by term.
      const double clip = *max_norm / (*gradient_norm + 1e-6);
      step_scale = unclipped_scale() * (clip < 1 ? clip : 1);
      if (*gradient_norm != *gradient_norm) step_scale = *gradient_norm;
    }
    if (!checks() || all.all_finite()) return true;
    if (settings.loss_scale) {
      const LossScale& rule = *settings.loss_scale;
      applied_in_a_row = 0;
      if (rule.is_dynamic()) loss_scale = std::max(loss_scale * rule.backoff, rule.minimum);
    }
    return false;
  }

  /// Up to here a failure changes nothing; from here on it leaves the optimizer failed.
  void begin_update(bool& updating) {
    if (std::exchange(updating, true)) return;
    ++step_number;
    for (std::size_t i = 0; i < parameters.size(); ++i) step_counts[i] += stepping[i];
    if (settings.loss_scale && settings.loss_scale->is_dynamic() &&
        ++applied_in_a_row == settings.loss_scale->interval) {
      applied_in_a_row = 0;
      loss_scale = std::min(loss_scale * settings.loss_scale->growth, settings.loss_scale->maximum);
    }
  }

  /// What the sum over ranks is multiplied by, loss scale and clipping aside.
  [[nodiscard]] double gradient_scale() {
    const bool sums = settings.gradients == Gradients::local;
    return settings.gradient_scale.value_or(sums ? 1.0 / world() : 1.0);
  }
  [[nodiscard]] double unclipped_scale() { return gradient_scale() / loss_scale; }

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

  // The update.

  /// What is constant over one parameter's step: a rule's scalars, kept while group and step count
  /// stay the same, or the step count itself.
  template <class A>
  class Constants {
   public:
    explicit Constants(const EngineState& state) : state_(&state) {}
    const auto& of(std::size_t parameter) {
      const std::int64_t t = state_->step_counts[parameter];
      const std::size_t group = state_->parameters[parameter].group;
      if (!scalars_ || group != group_ || t != t_) {
        if constexpr (UpdateRule<Opt, A>) {
          scalars_.emplace(state_->groups[group].template scalars<A>(t));
        } else {
          scalars_.emplace(t);
        }
        group_ = group;
        t_ = t;
      }
      return *scalars_;
    }

   private:
    static auto type() {
      if constexpr (UpdateRule<Opt, A>) {
        return std::type_identity<decltype(std::declval<const Opt&>().template scalars<A>(1))>{};
      } else {
        return std::type_identity<std::int64_t>{};
      }
    }
    const EngineState* state_;
    std::size_t group_ = 0;
    std::int64_t t_ = 0;
    std::optional<typename decltype(type())::type> scalars_;
  };

  /// Steps one fragment whose slots start at `begin`.
  template <class Lane, class C, class G>
  void step_fragment(Lane& lane, C& constants, const Fragment& f, std::size_t begin,
                     const GradientSum<G>& gradient) {
    const Opt& optimizer = groups[parameters[f.parameter].group];
    NoiseKey noise{};
    if constexpr (Lane::storage::rounding == Rounding::stochastic) {
      noise = noise_key(precision.seed, static_cast<std::uint64_t>(step_counts[f.parameter]),
                        f.parameter);
    }
    if constexpr (UpdateRule<Opt, typename Lane::arithmetic>) {
      update_fragment(optimizer, constants.of(f.parameter), lane, f, begin, noise, gradient);
    } else {
      step_tensor(optimizer, constants.of(f.parameter), lane, f, begin, noise, gradient,
                  parameters[f.parameter].shape);
    }
  }

  /// Updates this rank's part of a bucket. `gradient(fragment, begin)` gives its gradient, where
  /// `begin` is where the fragment's slots start.
  template <class Lane, class F>
  void update_bucket(Lane& lane, std::size_t bucket, const F& gradient) {
    Constants<typename Lane::arithmetic> constants(*this);
    const auto update = [&](const Fragment& f, std::size_t begin) {
      if (stepping[f.parameter] == 0) return;
      step_fragment(lane, constants, f, begin, gradient(f, begin));
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

  template <class Lane>
  [[nodiscard]] auto own_gradient(Lane& lane) {
    return [&lane, scale = static_cast<typename Lane::arithmetic>(step_scale)](const Fragment& f,
                                                                               std::size_t) {
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

  /// From now on sums are looked at before they are used, or not; they need room.
  void clip(std::optional<double> norm) {
    const bool looks = norm.has_value() || looks_first();
    for_each_lane([&](auto& lane) {
      const std::size_t room = room_for_sums(lane, *layout, looks);
      using Sums = std::remove_cvref_t<decltype(lane.reduced)>;
      if (room > lane.reduced.size()) lane.reduced = Sums(room, settings.memory);
    });
    max_norm = norm;
  }

  /// Collective: the store shows more parameters at its end, which form `group`.
  /// @param refusal why this rank can't, or empty
  void append(Opt group, std::string refusal) {
    or_abort("an add_param_group", [&] {
      Inspection seen{.verb = "add_param_group"};
      std::optional<Layout<Partition>> grown;
      std::vector<Opt> more = groups;
      more.push_back(std::move(group));
      const std::size_t before = parameters.size();
      try {
        if (!refusal.empty()) throw UsageError(refusal);
        zero::validate(more.back());
        inspect(more, before, seen);
        require_appended(seen);
        grown.emplace(layout->appended(std::span(seen.places).subspan(before)));
        if (View::values == Residency::caller) refuse_separate_ties(store(), seen);
        require_flat(seen);
      } catch (const UsageError& error) {
        if (world() == 1) throw;
        refusal = text_of(error);
      }
      build(more, seen, std::move(grown), refusal, before);
    });
  }

  Held<Store> store_held;
  Held<Comm> comm_held;
  std::vector<Opt> groups;
  View view;
  [[no_unique_address]] Precision precision;
  [[no_unique_address]] Observe observer;
  Settings settings;
  std::optional<double> max_norm{};
  double loss_scale = 1;
  int applied_in_a_row = 0;

  std::optional<Layout<Partition>> layout{};
  std::vector<ParameterInfo> parameters{};
  std::size_t slots_allocated = 0;
  bool has_16_bits = false;  ///< some parameter
  std::int64_t step_number = 0;
  std::vector<std::int64_t> step_counts{};  ///< by leader: how often it was stepped
  std::vector<std::uint8_t> present{};      ///< by leader: whether this rank has its gradient
  std::vector<std::uint8_t> stepping{};     ///< by leader: whether this step updates it
  Findings findings{};                      ///< of this rank in this step; peers read it
  double step_scale = 1;                    ///< what this step's sums are multiplied by
  std::optional<double> gradient_norm{};    ///< of this step, where it was measured
  std::string step_refusal{};               ///< why this rank can't step; peers read it
  std::uint64_t options = 0;                ///< fingerprint of the groups' options; peers read it
  Lanes lanes{};

 private:
  static bool steps_alone(const std::vector<ParameterInfo>& of, std::size_t i) {
    return !of[i].frozen && of[i].leader == i;
  }

  /// `body` refuses on all ranks or on none; whatever else it throws the peers must learn of.
  template <class F>
  void or_abort(const char* what, F&& body) {
    try {
      body();
    } catch (const UsageError&) {  // the same on all ranks
      throw;
    } catch (const std::exception& error) {
      if (world() > 1) comm().abort(std::string(what) + " failed: " + error.what());
      throw;
    }
  }

  /// The sum of all sources' elements [at, at + count), at `out`.
  template <class Lane, class G>
  static const typename Lane::arithmetic* sum_chunk_to(Lane& lane, const GradientSum<G>& sum,
                                                       std::size_t at, std::size_t count,
                                                       typename Lane::arithmetic* out) {
    if constexpr (std::is_same_v<G, typename Lane::element>) {
      sum_chunk_of<G>(sum.sources, at, count, out, lane.scratch);
    } else {  // summed already
      std::copy_n(sum.sources[0] + at, count, out);
    }
    return out;
  }

  void construct(const Partition& partition) {
    std::string refusal;
    Inspection seen;
    std::optional<Layout<Partition>> made;
    try {
      if (groups.empty()) throw UsageError("construction: zero::Groups is empty");
      for (const Opt& group : groups) zero::validate(group);
      const double scale = gradient_scale();
      if (!(scale - scale == 0)) {
        throw UsageError("construction: Settings::gradient_scale is " + std::to_string(scale) +
                         "; it must be a finite number");
      }
      if (settings.loss_scale) {
        settings.loss_scale->validate();
        if (settings.loss_scale->is_dynamic() && settings.finite_check == FiniteCheck::never) {
          throw UsageError(
              "construction: a dynamic loss scale learns from skipped steps, but "
              "FiniteCheck::never skips none; use where_needed, or LossScale::fixed");
        }
      }
      inspect(groups, 0, seen);
      std::vector<LayoutLane> of_lanes;
      for_each_lane([&](auto& lane) {
        using T = typename std::remove_cvref_t<decltype(lane)>::element;
        lane.index = of_lanes.size();
        of_lanes.push_back({sizeof(T), view.bucket_bytes, flat});
      });
      made.emplace(seen.places, of_lanes, world(), partition);
      if (View::values == Residency::caller) refuse_separate_ties(store(), seen);
      require_flat(seen);
    } catch (const UsageError& error) {
      if (world() == 1) throw;
      refusal = text_of(error);
    }
    build(groups, seen, std::move(made), refusal, 0);
  }

  /// @param first what comes before it is known already
  void inspect(const std::vector<Opt>& all_groups, std::size_t first, Inspection& seen) {
    detail::inspect(store(), all_groups.size(), settings.check_values, first, seen);
    if constexpr (steps_tensors) {
      for (std::size_t i = first; i < seen.parameters.size(); ++i) {
        const ParameterInfo& info = seen.parameters[i];
        if (!steps_alone(seen.parameters, i)) continue;
        try {
          zero::validate(all_groups[info.group], std::span<const std::size_t>(info.shape));
        } catch (const UsageError& error) {
          refuse_parameter(seen, i, std::string("can't be stepped: ") + error.what());
        }
      }
    }
  }

  /// The store's first parameters are those of before, and what is new forms a group of its own.
  void require_appended(const Inspection& seen) const {
    const std::size_t before = parameters.size();
    if (seen.parameters.size() <= before) {
      throw UsageError("add_param_group: the store shows " +
                       std::to_string(seen.parameters.size()) + " parameters, as many as before (" +
                       std::to_string(before) + ") or fewer; append the group's to it first");
    }
    for (std::size_t i = 0; i < seen.parameters.size(); ++i) {
      const ParameterInfo& now = seen.parameters[i];
      if (i >= before) {
        if (now.group == groups.size()) continue;
        throw UsageError("add_param_group: " + quoted(i, now.name) + " is in group " +
                         std::to_string(now.group) + ", but what is added forms group " +
                         std::to_string(groups.size()));
      }
      const ParameterInfo& then = parameters[i];
      if (now.name != then.name || now.elements != then.elements || now.lane != then.lane ||
          now.group != then.group || now.frozen != then.frozen || now.leader != then.leader) {
        throw UsageError("add_param_group: " + quoted(i, now.name) +
                         " is not what the store showed there before, " + quoted(i, then.name) +
                         "; append new parameters at its end and leave the others as they were");
      }
    }
  }

  void require_flat([[maybe_unused]] const Inspection& seen) {
    if constexpr (flat) {
      const auto buffer = store().flat_values();
      std::size_t offset = 0;
      for (std::size_t i = 0; i < seen.parameters.size(); ++i) {
        if (seen.parameters[i].leader != i) continue;  // a tied one takes no room
        detail::visit_span(detail::parameter_at(store(), i).values(), [&](auto values) {
          if (!values.empty() && values.data() != buffer.data() + offset) {
            refuse_parameter(seen, i,
                             "does not lie in the flat buffer where the parameters before it end");
          }
          offset += values.size();
        });
      }
    }
  }

  /// Agrees with the peers, makes all that is new aside, and only then replaces what was there.
  /// @param before how many parameters there were
  void build(const std::vector<Opt>& all_groups, Inspection& seen,
             std::optional<Layout<Partition>> made, const std::string& refusal,
             std::size_t before) {
    std::size_t slots_wanted = slots_allocated;
    for (const Opt& group : all_groups) {
      slots_wanted = std::max(slots_wanted, zero::used_slots(group));
    }
    if (world() > 1) agree(seen, all_groups.size(), slots_wanted, refusal, before);
    const std::size_t count = seen.parameters.size();
    std::vector<std::int64_t> counts = step_counts;
    counts.resize(count, 0);
    std::vector<std::uint8_t> none(count, 0), nobody(count, 0);
    bool some_16_bits = false;
    for (const ParameterInfo& info : seen.parameters) {
      some_16_bits = some_16_bits || (info.element_bytes == 2 && !info.frozen);
    }
    const bool looks =
        looks_first() || (some_16_bits && settings.finite_check == FiniteCheck::where_needed);
    Lanes next;
    for_each_pair(next, [&](auto& lane, auto& old) {
      lane.index = old.index;
      place(lane, *made, seen.parameters);
      allocate(lane, old, *made, slots_wanted, looks, before);
      if constexpr (steps_tensors) allocate_workspace(lane, *made, seen.parameters, all_groups);
      if constexpr (moves) fill_arenas(lane, *made, seen.parameters);
    });
    std::vector<Opt> groups_to_be = all_groups;
    // Nothing of the above has changed anything; nothing of what follows fails, but for a
    // parameter's own rebind.
    std::swap(lanes, next);
    layout.reset();
    layout.emplace(std::move(*made));
    parameters = std::move(seen.parameters);
    groups = std::move(groups_to_be);
    step_counts = std::move(counts);
    present = std::move(none);
    stepping = std::move(nobody);
    slots_allocated = slots_wanted;
    has_16_bits = some_16_bits;
    if constexpr (moves) rebind_parameters();
  }

  void agree(const Inspection& seen, std::size_t group_count, std::size_t slots_wanted,
             const std::string& refusal, std::size_t before) {
    Digest mine;
    Hash program;
    const std::string type = typeid(EngineState).name();
    program.add(type.data(), type.size());
    mine.program = program.value();
    Hash set;
    set.add(view.bucket_bytes);
    set.add(static_cast<std::uint64_t>(settings.gradients));
    set.add(static_cast<std::uint64_t>(settings.finite_check));
    set.add(std::uint64_t{settings.check_values});
    set.add(group_count);
    set.add(slots_wanted);
    set.add(before);
    if constexpr (requires { precision.seed; }) {
      set.add(static_cast<std::uint64_t>(precision.seed));
    }
    const LossScale scaling = settings.loss_scale.value_or(LossScale{.scale = 0});
    for (const double number :
         {gradient_scale(), scaling.scale, scaling.growth, scaling.backoff, scaling.minimum,
          scaling.maximum, static_cast<double>(scaling.interval)}) {
      set.add(&number, sizeof number);
    }
    mine.settings = set.value();
    const auto added = std::span(seen.digests).subspan(std::min(before, seen.digests.size()));
    Hash all;
    if (!added.empty()) all.add(added.data(), added.size_bytes());
    mine.parameters = all.value();
    mine.count = added.size();
    mine.identity = identity;
    mine.address = reinterpret_cast<std::uintptr_t>(this);
    mine.refusal = to_text(refusal);
    identity = require_agreement(comm(), seen.verb, mine, added, [&](std::size_t i) {
      return quoted(before + i, seen.parameters[before + i].name);
    });
  }

  template <class F>
  void for_each_pair(Lanes& next, F&& f) {
    [&]<std::size_t... I>(std::index_sequence<I...>) {
      (f(std::get<I>(next), std::get<I>(lanes)), ...);
    }(std::make_index_sequence<lane_count>{});
  }

  /// Where everything lies, and what of it this rank owns.
  template <class Lane>
  void place(Lane& lane, const Layout<Partition>& map, const std::vector<ParameterInfo>& infos) {
    using T = typename Lane::element;
    lane.values.assign(infos.size(), nullptr);
    lane.gradients.assign(infos.size(), nullptr);
    lane.sources.assign(static_cast<std::size_t>(world()), nullptr);
    lane.scratch.reserve(static_cast<std::size_t>(world()));
    for (std::size_t i = 0; i < infos.size(); ++i) {
      if (infos[i].lane != lane.index || !steps_alone(infos, i)) continue;
      detail::visit_span(detail::parameter_at(store(), i).values(), [&](auto values) {
        if constexpr (std::is_same_v<typename decltype(values)::value_type, T>) {
          lane.values[i] = values.data();
        }
      });
    }
    map.for_each_owned(lane.index, rank(),
                       [&](const Fragment& fragment, std::size_t bucket, std::size_t begin) {
                         lane.owned.push_back({fragment, bucket, begin});
                       });
    lane.owned_begin.assign(map.buckets(lane.index) + 1, 0);
    for (const OwnedFragment& owned : lane.owned) ++lane.owned_begin[owned.bucket + 1];
    std::partial_sum(lane.owned_begin.begin(), lane.owned_begin.end(), lane.owned_begin.begin());
    if constexpr (flat) lane.base = store().flat_values().data();
  }

  /// Elements of sums that have to be stored.
  template <class Lane>
  [[nodiscard]] std::size_t room_for_sums(const Lane& lane, const Layout<Partition>& map,
                                          bool looks) {
    if (world() == 1 || settings.gradients == Gradients::reduced) return 0;
    const std::size_t shard = map.shard_elements(lane.index, rank());
    // Ranks that share memory sum while they update, unless they have to look first; without
    // sharding, where everyone needs all sums, each keeps those of its slices for the others.
    if constexpr (shares_memory) return Stage::shards_state && !looks ? 0 : shard;
    return Stage::shards_state ? shard : map.extent(lane.index);
  }

  /// Makes the lane's arrays, which begin with what `old` holds already.
  template <class Lane>
  void allocate(Lane& lane, const Lane& old, const Layout<Partition>& map, std::size_t slots_wanted,
                bool looks, std::size_t before) {
    const std::size_t kept =
        Stage::shards_state ? map.shard_elements(lane.index, rank()) : map.extent(lane.index);
    const auto grow = [&]<class U>(HostArray<U>& array, const HostArray<U>& from) {
      array = HostArray<U>(kept, settings.memory);
      if (from.size() != 0) std::memcpy(array.data(), from.data(), from.bytes());
      if (!settings.poison_padding) return;
      poison(array.span().subspan(from.size()));
      for_each_kept(lane, map, [&](const Fragment& f, std::size_t begin) {
        if (begin >= from.size()) std::fill_n(array.data() + begin, f.elements, U{});
      });
    };
    for (std::size_t s = 0; s < slots_wanted; ++s) grow(lane.state[s], old.state[s]);
    if constexpr (Lane::storage::has_master) {
      grow(lane.master, old.master);
      for_each_kept(lane, map, [&](const Fragment& f, std::size_t begin) {
        if (f.parameter < before) return;
        widen_array(lane.values_at(f), lane.master.span().subspan(begin, f.elements));
      });
    }
    lane.reduced =
        HostArray<typename Lane::arithmetic>(room_for_sums(lane, map, looks), settings.memory);
  }

  template <class Lane>
  void allocate_workspace(Lane& lane, const Layout<Partition>& map,
                          const std::vector<ParameterInfo>& infos,
                          const std::vector<Opt>& all_groups) {
    std::size_t most = 0;
    for_each_kept(lane, map, [&](const Fragment& f, std::size_t) {
      const ParameterInfo& info = infos[f.parameter];
      most = std::max(most, tensor_workspace<typename Lane::storage>(
                                all_groups[info.group], slots,
                                std::span<const std::size_t>(info.shape), f.elements));
    });
    lane.workspace = HostArray<typename Lane::arithmetic>(most, settings.memory);
  }

  /// `f(fragment, begin)` for all that slots are kept for.
  template <class Lane, class F>
  void for_each_kept(const Lane& lane, const Layout<Partition>& map, F&& f) {
    if constexpr (Stage::shards_state) {
      for (const OwnedFragment& owned : lane.owned) f(owned.fragment, owned.shard_begin);
    } else {
      for (const Fragment& fragment : map.fragments(lane.index, {0, map.extent(lane.index)})) {
        f(fragment, fragment.lane_begin);
      }
    }
  }

  template <class U>
  static void poison(std::span<U> array) {
    std::fill(array.begin(), array.end(),
              element_traits<U>::store(std::numeric_limits<arithmetic_t<U>>::quiet_NaN()));
  }

  /// Copies what is there into arenas; the parameters are handed over later, so that an allocation
  /// that fails leaves them where they are.
  template <class Lane>
  void fill_arenas(Lane& lane, const Layout<Partition>& map,
                   const std::vector<ParameterInfo>& infos) {
    using T = typename Lane::element;
    const Interval all{0, map.extent(lane.index)};
    const auto make = [&](std::shared_ptr<HostArray<T>>& arena) {
      arena = std::make_shared<HostArray<T>>(all.size(), settings.memory);
      if (!settings.poison_padding) return;
      poison(arena->span());
      for (const Fragment& f : map.fragments(lane.index, all)) {
        std::fill_n(arena->data() + f.lane_begin, f.elements, T{});
      }
    };
    if constexpr (View::values == Residency::arena) {
      make(lane.arena);
      for (const Fragment& f : map.fragments(lane.index, all)) {
        std::memcpy(lane.arena->data() + f.lane_begin, lane.values_at(f), f.elements * sizeof(T));
      }
    }
    if constexpr (View::gradients == Residency::arena) {
      make(lane.gradient_arena);
      for (std::size_t i = 0; i < infos.size(); ++i) {
        if (infos[i].lane != lane.index || !steps_alone(infos, i)) continue;
        detail::visit_span(detail::parameter_at(store(), i).gradient(), [&](auto gradient) {
          if constexpr (std::is_same_v<typename decltype(gradient)::value_type, T>) {
            if (gradient.size() != infos[i].elements || gradient.empty()) return;
            std::memcpy(lane.gradient_arena->data() + map.place(i).offset, gradient.data(),
                        gradient.size_bytes());
          }
        });
      }
    }
  }

  void rebind_parameters() {
    for_each_lane([&](auto& lane) {
      using T = typename std::remove_cvref_t<decltype(lane)>::element;
      if constexpr (View::values == Residency::arena) lane.base = lane.arena->data();
      for (std::size_t i = 0; i < parameters.size(); ++i) {
        if (parameters[i].frozen || parameters[i].lane != lane.index) continue;
        auto&& parameter = detail::parameter_at(store(), i);
        const auto place_in = [&](HostArray<T>& arena) {
          return std::span<T>(arena.data() + layout->place(i).offset, parameters[i].elements);
        };
        using Span = values_t<parameter_t<store_type>>;
        if constexpr (View::values == Residency::arena) {
          if (steps_alone(i)) lane.values[i] = place_in(*lane.arena).data();
          parameter.rebind(Span(place_in(*lane.arena)), lane.arena);
        }
        if constexpr (View::gradients == Residency::arena) {
          parameter.rebind_gradient(Span(place_in(*lane.gradient_arena)), lane.gradient_arena);
        }
      }
    });
  }
};

}  // namespace zero::detail
