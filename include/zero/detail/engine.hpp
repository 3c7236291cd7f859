// SPDX-License-Identifier: Apache-2.0
/// @file
/// What stands behind `ZeroSharded`: parameters sorted into lanes, and one step over them.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <mutex>
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
#include "zero/detail/bucket_traffic.hpp"
#include "zero/detail/hash.hpp"
#include "zero/detail/inspect.hpp"
#include "zero/detail/lane.hpp"
#include "zero/detail/marks.hpp"
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

/// What a rule makes of a few numbers: ranks whose options differ differ in it.
template <class T, class Rule>
std::uint64_t fingerprint(const Rule& rule) {
  Hash hash;
  T value = T(0.7);
  std::array<T, slot_count<Rule>> slots{};
  std::int64_t t = 0;
  for (const double gradient : {0.3, -0.2, 0.001}) {
    [&]<std::size_t... I>(std::index_sequence<I...>) {
      Rule::update(value, static_cast<T>(gradient), slots[I]..., rule.template scalars<T>(++t));
    }(slot_indices<Rule>{});
    hash.add(&value, sizeof value);
  }
  return hash.value();
}

/// What ranks that don't share memory tell each other in a step, followed by one bit a parameter:
/// whether its gradient is there.
struct StepMessage {
  Text refusal;           ///< why the rank can't step, or empty
  std::uint64_t options;  ///< fingerprint of all groups
};

/// A bucket of some lane, in the order in which all ranks send them.
struct Launch {
  std::size_t lane;
  std::size_t bucket;
  std::size_t last_parameter;
};

template <class Opt, class Store, class Comm, class Partition, class View, class Stage,
          class Observe>
class Engine {
 public:
  using store_type = std::remove_reference_t<Store>;
  using communicator_type = std::remove_reference_t<Comm>;
  using elements = store_elements<store_type>;
  static constexpr std::size_t slots = slot_count<Opt>;
  static constexpr bool shares_memory = SharedMemoryCommunicator<communicator_type>;

  template <class List>
  struct Per;
  template <class... T>
  struct Per<TypeList<T...>> {
    using lanes = std::tuple<HostLane<T, slots>...>;
    using traffic =
        std::tuple<std::optional<BucketTraffic<T, communicator_type, Partition, slots>>...>;
  };
  static constexpr std::size_t lane_count = std::tuple_size_v<typename Per<elements>::lanes>;

  /// Collective. Throws `UsageError` on all ranks where one refuses or where they differ; then
  /// nothing of the caller's has changed.
  Engine(std::vector<Opt> groups, Store&& store, Comm&& comm, Partition partition, View view,
         Observe observer, Settings settings)
      : store_(std::forward<Store>(store)),
        comm_(std::forward<Comm>(comm)),
        groups_(std::move(groups)),
        view_(view),
        observer_(std::move(observer)),
        settings_(settings) {
    std::string refusal;
    Inspection seen;
    try {
      if (groups_.empty()) throw UsageError("construction: zero::Groups is empty");
      for (const Opt& group : groups_) validate(group);
      inspect(store_.get(), groups_.size(), settings_.check_values, seen);
      make_layout(seen, partition);
    } catch (const UsageError& error) {
      if (world() == 1) throw;
      refusal = error.what();
    }
    for (const Opt& group : groups_) slots_allocated_ = std::max(slots_allocated_, used_slots(group));
    if (world() > 1) agree(seen, refusal);
    parameters_ = std::move(seen.parameters);
    marks_.emplace(parameters_);
    steps_.assign(parameters_.size(), 0);
    present_.assign(parameters_.size(), 0);
    stepping_.assign(parameters_.size(), 0);
    for_each_lane([&](auto& lane) { allocate(lane); });
    if constexpr (View::values == Residency::arena) move_values();
    if constexpr (!shares_memory) {
      if (world() > 1) prepare_traffic();
    }
  }
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Verbs. ZeroSharded documents them.

  template <class T>
  std::span<T> begin_lease(std::size_t i, bool& adds) {
    const std::scoped_lock lock(mutex_);
    require_usable();
    require_trainable(i, "gradient");
    const std::span<T> memory = gradient_memory<T>(parameters_[i].leader, "gradient");
    adds = !marks_->begin_lease(i);  // not the first on it
    return memory;
  }

  void end_lease(std::size_t i) noexcept {
    const std::scoped_lock lock(mutex_);
    marks_->end_lease(i);
  }

  void mark(std::size_t i, Mark mark) {
    const char* verb = mark == Mark::ready ? "mark_ready" : "mark_absent";
    const std::scoped_lock lock(mutex_);
    require_usable();
    require_trainable(i, verb);
    marks_->require_markable(i, verb);
    const std::size_t leader = parameters_[i].leader;
    if (mark == Mark::ready && !record_gradient(leader, verb)) {
      throw UsageError(std::string(verb) + ": " + name_of(leader) +
                       " has a null gradient; give it memory, or call mark_absent");
    }
    if (!marks_->mark(i, mark)) return;
    try {
      complete(leader);
    } catch (const std::exception& error) {
      give_up(error.what(), false);
      throw;
    }
  }

  std::int64_t step() {
    const std::scoped_lock lock(mutex_);
    require_usable();
    bool updating = false;
    try {
      const std::string refusal = finish_marks();
      if (world() == 1) {
        if (!refusal.empty()) throw UsageError(refusal);
        agree_on_presence([&](std::size_t i) {
          const bool here = present_[i] != 0;
          return Presence{here, here};
        });
        updating = true;
        count_step();
        update_from_own_gradients();
      } else if constexpr (shares_memory) {
        step_in_shared_memory(refusal, updating);
      } else {
        step_through_buckets(refusal, updating);
      }
    } catch (const UsageError& error) {
      forget_round(false);
      if (updating) fail(error.what());
      throw;
    } catch (const std::exception& error) {
      give_up(error.what(), updating);
      throw;
    } catch (...) {
      give_up("an exception that is no std::exception", updating);
      throw;
    }
    forget_round(true);
    return step_;
  }

  void zero_gradients() {
    const std::scoped_lock lock(mutex_);
    require_usable();
    for (std::size_t i = 0; i < parameters_.size(); ++i) {
      if (!steps_alone(i)) continue;
      visit_span(parameter_at(store_.get(), i).gradient(), [](auto memory) {
        std::fill(memory.begin(), memory.end(), typename decltype(memory)::value_type(0));
      });
    }
  }

  // Queries.

  [[nodiscard]] std::vector<Opt>& groups() noexcept { return groups_; }
  [[nodiscard]] const Layout<Partition>& layout() const noexcept { return *layout_; }
  [[nodiscard]] const std::vector<ParameterInfo>& parameters() const noexcept {
    return parameters_;
  }
  [[nodiscard]] std::int64_t steps() const noexcept { return step_; }
  [[nodiscard]] std::int64_t steps(std::size_t i) const { return steps_[parameters_[i].leader]; }
  [[nodiscard]] Observe& observer() noexcept { return observer_; }
  [[nodiscard]] const std::string& failure() const noexcept { return failure_; }
  [[nodiscard]] std::size_t slots_allocated() const noexcept { return slots_allocated_; }
  template <std::size_t index>
  [[nodiscard]] const auto& lane() const noexcept {
    return std::get<index>(lanes_);
  }
  [[nodiscard]] std::size_t staging_bytes() const {
    std::size_t sum = 0;
    std::apply([&](const auto&... t) { ((sum += t ? t->staging_bytes() : 0), ...); }, traffic_);
    return sum;
  }
  /// Where an owned fragment's slots start.
  [[nodiscard]] static constexpr std::size_t state_begin(const OwnedFragment& owned) {
    return Stage::shards_state ? owned.shard_begin : owned.fragment.lane_begin;
  }
  void require(std::size_t i, const char* verb) const {
    if (i >= parameters_.size()) {
      throw UsageError(std::string(verb) + ": there is no parameter " + std::to_string(i) +
                       "; the store has " + std::to_string(parameters_.size()));
    }
  }
  template <class F>
  void for_each_lane(F&& f) {
    std::apply([&](auto&... lane) { (f(lane), ...); }, lanes_);
  }

 private:
  struct Presence {
    bool somewhere;
    bool everywhere;
  };

  [[nodiscard]] communicator_type& comm() noexcept { return comm_.get(); }
  [[nodiscard]] int world() { return comm().size(); }
  [[nodiscard]] int rank() { return comm().rank(); }
  [[nodiscard]] std::string name_of(std::size_t i) const { return quoted(i, parameters_[i].name); }
  /// Whether parameter i has a place of its own: not frozen, not tied to another.
  [[nodiscard]] bool steps_alone(std::size_t i) const {
    return !parameters_[i].frozen && parameters_[i].leader == i;
  }
  /// Whether values and gradients of the lane are the caller's flat buffers.
  static constexpr bool flat = FlatParamStore<store_type> && View::values == Residency::caller &&
                               CuttingPartition<Partition>;

  void require_usable() const {
    if (!failure_.empty()) {
      throw UsageError("this optimizer failed in step " + std::to_string(step_) +
                       " with parameters half updated, and can't go on; reload a checkpoint into a "
                       "new one. The failure: " + failure_);
    }
  }
  void require_trainable(std::size_t i, const char* verb) const {
    require(i, verb);
    if (parameters_[i].frozen) {
      throw UsageError(std::string(verb) + ": " + name_of(i) + " is frozen and has no gradient");
    }
  }

  // Construction.

  void make_layout(const Inspection& seen, const Partition& partition) {
    std::vector<LayoutLane> lanes;
    for_each_lane([&]<class T>(HostLane<T, slots>& lane) {
      lane.index = lanes.size();
      lanes.push_back({sizeof(T), view_.bucket_bytes, flat});
    });
    layout_.emplace(seen.places, lanes, world(), partition);
    if constexpr (flat) {
      const auto buffer = store_.get().flat_values();
      std::size_t offset = 0;
      for (std::size_t i = 0; i < seen.parameters.size(); ++i) {
        visit_span(parameter_at(store_.get(), i).values(), [&](auto values) {
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
    const std::string type = typeid(Engine).name();
    program.add(type.data(), type.size());
    mine.program = program.value();
    Hash settings;
    settings.add(view_.bucket_bytes);
    settings.add(static_cast<std::uint64_t>(settings_.gradients));
    settings.add(std::uint64_t{settings_.check_values});
    settings.add(groups_.size());
    settings.add(slots_allocated_);
    const double scale = gradient_scale();
    settings.add(&scale, sizeof scale);
    mine.settings = settings.value();
    Hash all;
    all.add(seen.digests.data(), seen.digests.size() * sizeof(ParameterDigest));
    mine.parameters = all.value();
    mine.count = seen.digests.size();
    mine.refusal = to_text(refusal);
    require_agreement(comm(), mine, seen.digests,
                      [&](std::size_t i) { return quoted(i, seen.parameters[i].name); });
  }

  template <class T>
  void allocate(HostLane<T, slots>& lane) {
    lane.values.assign(parameters_.size(), nullptr);
    lane.gradients.assign(parameters_.size(), nullptr);
    lane.sources.assign(static_cast<std::size_t>(world()), nullptr);
    lane.scratch.reserve(static_cast<std::size_t>(world()));
    for (std::size_t i = 0; i < parameters_.size(); ++i) {
      if (parameters_[i].lane != lane.index || !steps_alone(i)) continue;
      visit_span(parameter_at(store_.get(), i).values(), [&](auto values) {
        if constexpr (std::is_same_v<typename decltype(values)::value_type, T>) {
          lane.values[i] = values.data();
        }
      });
    }
    layout_->for_each_owned(lane.index, rank(),
                            [&](const Fragment& fragment, std::size_t bucket, std::size_t begin) {
                              lane.owned.push_back({fragment, bucket, begin});
                            });
    lane.owned_begin.assign(layout_->buckets(lane.index) + 1, 0);
    for (const OwnedFragment& owned : lane.owned) ++lane.owned_begin[owned.bucket + 1];
    std::partial_sum(lane.owned_begin.begin(), lane.owned_begin.end(), lane.owned_begin.begin());
    const std::size_t extent = layout_->extent(lane.index);
    const std::size_t shard = layout_->shard_elements(lane.index, rank());
    for (std::size_t s = 0; s < slots_allocated_; ++s) {
      lane.state[s] = HostArray<T>(Stage::shards_state ? shard : extent, settings_.memory);
      if (settings_.poison_padding) poison_padding(lane, lane.state[s].span(), Stage::shards_state);
    }
    if (world() > 1 && settings_.gradients == Gradients::local) {
      // Ranks that share memory sum while they update; only without sharding, where everyone
      // needs all sums, does each keep those of its slices for the others to read.
      const std::size_t sums = shares_memory ? (Stage::shards_state ? 0 : shard)
                                             : (Stage::shards_state ? shard : extent);
      lane.reduced = HostArray<T>(sums, settings_.memory);
    }
    if constexpr (flat) lane.base = store_.get().flat_values().data();
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
      for (const Fragment& f : layout_->fragments(lane.index, {0, array.size()})) {
        std::fill_n(array.data() + f.lane_begin, f.elements, T(0));
      }
    }
  }

  /// Copies all values into arenas first, then hands the parameters over: an allocation that fails
  /// leaves them where they were.
  void move_values() {
    for_each_lane([&]<class T>(HostLane<T, slots>& lane) {
      lane.arena = std::make_shared<HostArray<T>>(layout_->extent(lane.index), settings_.memory);
      if (settings_.poison_padding) poison_padding(lane, lane.arena->span(), false);
      for (const Fragment& f : layout_->fragments(lane.index, {0, lane.arena->size()})) {
        std::memcpy(lane.arena->data() + f.lane_begin, lane.values_at(f), f.elements * sizeof(T));
      }
      lane.base = lane.arena->data();
    });
    for (std::size_t i = 0; i < parameters_.size(); ++i) {
      if (parameters_[i].frozen) continue;
      auto&& parameter = parameter_at(store_.get(), i);
      for_each_lane([&]<class T>(HostLane<T, slots>& lane) {
        if (lane.index != parameters_[i].lane) return;
        const std::span<T> place(lane.base + layout_->place(i).offset, parameters_[i].elements);
        if (steps_alone(i)) lane.values[i] = place.data();
        parameter.rebind(values_t<parameter_t<store_type>>(place), lane.arena);
      });
    }
  }

  /// Also ends what was on its way.
  template <class Lane, class Traffic>
  void make_traffic(Lane& lane, std::optional<Traffic>& traffic) {
    traffic.emplace(lane, *layout_, comm(), Stage::shards_state, settings_.poison_padding,
                    settings_.memory);
  }

  void prepare_traffic() {
    for_each_lane_and_traffic([&](auto& lane, auto& traffic) {
      make_traffic(lane, traffic);
      for (std::size_t b = 0; b < layout_->buckets(lane.index); ++b) {
        std::size_t last = 0;
        for (const Fragment& f : layout_->fragments(lane.index, layout_->bucket(lane.index, b))) {
          last = std::max(last, f.parameter);
        }
        launches_.push_back({lane.index, b, last});
      }
      waiting_[lane.index].assign(layout_->buckets(lane.index), 0);
    });
    // Backward makes the last registered gradients first.
    std::stable_sort(launches_.begin(), launches_.end(), [](const Launch& a, const Launch& b) {
      if (a.last_parameter != b.last_parameter) return a.last_parameter > b.last_parameter;
      return a.bucket > b.bucket;
    });
    message_.resize(sizeof(StepMessage) + (parameters_.size() + 7) / 8);
    messages_.resize(message_.size() * static_cast<std::size_t>(world()));
    expect_all();
  }

  // Marks and gradients.

  template <class T>
  std::span<T> gradient_memory(std::size_t leader, const char* verb) {
    std::span<T> memory;
    bool right_type = false;
    visit_span(parameter_at(store_.get(), leader).gradient(), [&](auto span) {
      if constexpr (std::is_same_v<decltype(span), std::span<T>>) {
        memory = span;
        right_type = true;
      }
    });
    if (!right_type) {
      throw UsageError(std::string(verb) + ": " + name_of(leader) +
                       " has another element type than the one asked for");
    }
    const std::size_t wanted = parameters_[leader].elements;
    if (memory.size() != wanted || (memory.data() == nullptr && wanted != 0)) {
      throw UsageError(std::string(verb) + ": " + gradient_size(leader, memory.size()));
    }
    return memory;
  }

  [[nodiscard]] std::string gradient_size(std::size_t leader, std::size_t found) const {
    if (found == 0) return name_of(leader) + " has a null gradient; give it memory first";
    return name_of(leader) + "'s gradient has " + std::to_string(found) +
           " elements, but the parameter has " + std::to_string(parameters_[leader].elements);
  }

  /// Notes where a gradient lies; false where there is none.
  bool record_gradient(std::size_t leader, const char* verb) {
    return visit_span(parameter_at(store_.get(), leader).gradient(), [&](auto span) {
      using T = typename decltype(span)::value_type;
      if (span.empty() && parameters_[leader].elements != 0) return false;
      if (span.size() != parameters_[leader].elements) {
        throw UsageError(std::string(verb) + ": " + gradient_size(leader, span.size()));
      }
      if (lane_of<T, elements>::value != parameters_[leader].lane) {
        throw UsageError(std::string(verb) + ": " + name_of(leader) +
                         "'s gradient has another element type than its values; make them alike");
      }
      std::get<lane_of<T, elements>::value>(lanes_).gradients[leader] = span.data();
      present_[leader] = 1;
      return true;
    });
  }

  /// A parameter's place has its whole gradient: sends every bucket whose turn has come.
  void complete(std::size_t leader) {
    if constexpr (!shares_memory) {
      if (!reduces_buckets()) return;
      const Interval buckets = layout_->buckets_of(leader);
      auto& waiting = waiting_[parameters_[leader].lane];
      for (std::size_t b = buckets.begin; b < buckets.end; ++b) --waiting[b];
      while (next_launch_ < launches_.size()) {
        const Launch& next = launches_[next_launch_];
        if (waiting_[next.lane][next.bucket] > 0) return;
        start_next_reduce();
      }
    }
  }

  /// Sets each bucket to wait for all its parameters.
  void expect_all() {
    next_launch_ = 0;
    for (auto& waiting : waiting_) std::fill(waiting.begin(), waiting.end(), 0);
    for (std::size_t i = 0; i < parameters_.size(); ++i) {
      if (!steps_alone(i)) continue;
      const Interval buckets = layout_->buckets_of(i);
      for (std::size_t b = buckets.begin; b < buckets.end; ++b) {
        ++waiting_[parameters_[i].lane][b];
      }
    }
  }

  /// Takes what was not marked as it lies in the caller's memory. Returns why this rank can't step,
  /// or nothing.
  std::string finish_marks() {
    try {
      marks_->require_no_lease();
      for (std::size_t g = 0; g < groups_.size(); ++g) {
        try {
          validate(groups_[g]);
        } catch (const UsageError& error) {
          throw UsageError("step: the options of group " + std::to_string(g) + ": " + error.what());
        }
        if (used_slots(groups_[g]) > slots_allocated_) {
          throw UsageError("step: the options of group " + std::to_string(g) + " need the state '" +
                           std::string(Opt::slots[used_slots(groups_[g]) - 1]) +
                           "', which was not asked for at construction; construct with it on");
        }
      }
      for (std::size_t i = 0; i < parameters_.size(); ++i) {
        if (steps_alone(i) && !marks_->whole(i)) record_gradient(i, "step");
      }
      Hash options;
      for (const Opt& group : groups_) {
        options.add(fingerprint<arithmetic_t<typename first_of<elements>::type>>(group));
      }
      options_ = options.value();
    } catch (const UsageError& error) {
      return error.what();
    }
    return {};
  }

  void fail(const char* why) {
    failure_ = *why == '\0' ? "an exception without a text" : why;
  }

  /// After a failure that the peers don't share: they learn of it at once, and none of them reads
  /// this rank's memory any more.
  void give_up(const char* why, bool updating) {
    forget_round(false);
    if (updating) fail(why);
    if (world() == 1) return;
    comm().abort("a step failed: " + std::string(why));
    if constexpr (!shares_memory) for_each_lane_and_traffic([&](auto& lane, auto& traffic) {
      make_traffic(lane, traffic);
    });
  }

  /// After a step, applied or refused.
  void forget_round(bool applied) noexcept {
    marks_->reset(applied);
    std::fill(present_.begin(), present_.end(), std::uint8_t{0});
    for_each_lane([](auto& lane) {
      std::fill(lane.gradients.begin(), lane.gradients.end(), nullptr);
    });
    if constexpr (!shares_memory) {
      if (world() > 1) expect_all();
    }
  }

  /// Decides, from what all ranks have, which parameters are stepped: those with a gradient on any.
  template <class F>
  void agree_on_presence(F&& presence_of) {
    for (std::size_t i = 0; i < parameters_.size(); ++i) {
      stepping_[i] = 0;
      if (!steps_alone(i) || parameters_[i].elements == 0) continue;
      const Presence presence = presence_of(i);
      if (settings_.gradients == Gradients::reduced && presence.somewhere != presence.everywhere) {
        throw UsageError("step: " + name_of(i) +
                         " has a gradient on some ranks only; reduced gradients must be the same "
                         "on all");
      }
      stepping_[i] = presence.somewhere ? 1 : 0;
    }
  }

  void count_step() {
    ++step_;
    for (std::size_t i = 0; i < parameters_.size(); ++i) steps_[i] += stepping_[i];
  }

  // One step.

  [[nodiscard]] double gradient_scale() {
    const bool sums = settings_.gradients == Gradients::local;
    return settings_.gradient_scale.value_or(sums ? 1.0 / world() : 1.0);
  }
  [[nodiscard]] bool reduces_buckets() {
    return !shares_memory && world() > 1 && settings_.gradients == Gradients::local;
  }

  template <class F>
  void observe([[maybe_unused]] Phase phase, [[maybe_unused]] std::size_t lane,
               [[maybe_unused]] std::size_t bucket, F&& body) {
    if constexpr (std::is_same_v<Observe, NoObserver>) {
      body();
    } else {
      const Event event{phase, lane, bucket, layout_->slice(lane, bucket, rank()).size()};
      observer_.begin(event);
      body();
      observer_.end(event);
    }
  }

  /// A rule's scalars for one parameter: kept while group and step count stay the same.
  template <class T>
  class Constants {
   public:
    using Scalars = decltype(std::declval<const Opt&>().template scalars<arithmetic_t<T>>(1));
    explicit Constants(const Engine& engine) : engine_(&engine) {}
    const Scalars& of(std::size_t parameter) {
      const std::size_t group = engine_->parameters_[parameter].group;
      const std::int64_t t = engine_->steps_[parameter];
      if (!scalars_ || group != group_ || t != t_) {
        scalars_.emplace(engine_->groups_[group].template scalars<arithmetic_t<T>>(t));
        group_ = group;
        t_ = t;
      }
      return *scalars_;
    }

   private:
    const Engine* engine_;
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
      if (stepping_[f.parameter] == 0) return;
      const Opt& rule = groups_[parameters_[f.parameter].group];
      update_fragment(rule, constants.of(f.parameter), lane, f, begin, gradient(f, begin));
    };
    observe(Phase::update, lane.index, bucket, [&] {
      if constexpr (Stage::shards_state) {
        for (std::size_t k = lane.owned_begin[bucket]; k < lane.owned_begin[bucket + 1]; ++k) {
          update(lane.owned[k].fragment, lane.owned[k].shard_begin);
        }
      } else {
        for (const Fragment& f :
             layout_->fragments(lane.index, layout_->bucket(lane.index, bucket))) {
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
      for (std::size_t b = 0; b < layout_->buckets(lane.index); ++b) update_bucket(lane, b, gradient);
    });
  }

  /// The same on all ranks, given what each of them said.
  static void require_agreement_to_step(int rank, const char* text, std::uint64_t options,
                                        std::uint64_t options_of_rank_0) {
    if (*text == '\0') {
      if (options == options_of_rank_0) return;
      text = "its groups' options differ from rank 0's; set the same on all ranks";
    }
    throw UsageError("rank " + std::to_string(rank) +
                     " refused the step, so no rank took it and nothing has changed: " + text);
  }

  /// Every rank reads its peers' gradients, sums and updates its own slices in one pass, and copies
  /// the others' slices from where they were updated.
  void step_in_shared_memory(const std::string& refusal, bool& updating) {
    refusal_ = refusal;
    auto entered = comm().meet("step", this);
    const std::span<const void* const> published = entered.peers();
    const auto peer = [&](std::size_t r) -> const Engine& {
      return *static_cast<const Engine*>(published[r]);
    };
    try {
      for (std::size_t r = 0; r < published.size(); ++r) {
        require_agreement_to_step(static_cast<int>(r), peer(r).refusal_.c_str(),
                                  peer(r).options_, peer(0).options_);
      }
      agree_on_presence([&](std::size_t i) {
        Presence presence{false, true};
        for (std::size_t r = 0; r < published.size(); ++r) {
          const bool there = peer(r).present_[i] != 0;
          presence.somewhere = presence.somewhere || there;
          presence.everywhere = presence.everywhere && there;
        }
        return presence;
      });
    } catch (const UsageError&) {  // the same on all ranks
      entered.leave();
      entered.wait();
      throw;
    }
    updating = true;
    count_step();
    if (settings_.gradients == Gradients::reduced) {
      update_from_own_gradients();
    } else if constexpr (Stage::shards_state) {
      for_each_lane([&]<class T>(HostLane<T, slots>& lane) {
        const auto gradient = peers_gradients(lane, published);
        for (std::size_t b = 0; b < layout_->buckets(lane.index); ++b) {
          update_bucket(lane, b, gradient);
        }
      });
    } else {
      sum_own_slices(published);
    }
    entered.leave();
    if constexpr (Stage::shards_state) {
      auto updated = comm().meet("gather", this);
      gather_from(updated.peers());
      updated.leave();
      updated.wait();
    } else if (settings_.gradients == Gradients::local) {
      auto summed = comm().meet("sums", this);
      update_from_sums(summed.peers());
      summed.leave();
      summed.wait();
    }
    entered.wait();
  }

  template <class T>
  static const HostLane<T, slots>& lane_of_peer(const void* published) {
    return std::get<HostLane<T, slots>>(static_cast<const Engine*>(published)->lanes_);
  }

  template <class T>
  [[nodiscard]] auto peers_gradients(HostLane<T, slots>& lane,
                                     std::span<const void* const> published) {
    return [&lane, published, scale = static_cast<arithmetic_t<T>>(gradient_scale())](
               const Fragment& f, std::size_t) {
      for (std::size_t r = 0; r < published.size(); ++r) {
        lane.sources[r] = lane_of_peer<T>(published[r]).gradient_at(f);
      }
      return GradientSum<T>{lane.sources, scale};
    };
  }

  /// Copies every peer's slices, starting behind the own ones so that ranks read different peers.
  void gather_from(std::span<const void* const> published) {
    for_each_lane([&]<class T>(HostLane<T, slots>& lane) {
      for (std::size_t b = 0; b < layout_->buckets(lane.index); ++b) {
        observe(Phase::gather, lane.index, b, [&] {
          for (std::size_t k = 1; k < published.size(); ++k) {
            const std::size_t r = (static_cast<std::size_t>(rank()) + k) % published.size();
            const HostLane<T, slots>& theirs = lane_of_peer<T>(published[r]);
            for (std::size_t o = theirs.owned_begin[b]; o < theirs.owned_begin[b + 1]; ++o) {
              const Fragment& f = theirs.owned[o].fragment;
              if (stepping_[f.parameter] == 0) continue;
              std::memcpy(lane.values_at(f), theirs.values_at(f), f.elements * sizeof(T));
            }
          }
        });
      }
    });
  }

  void sum_own_slices(std::span<const void* const> published) {
    for_each_lane([&]<class T>(HostLane<T, slots>& lane) {
      const auto gradient = peers_gradients(lane, published);
      for (std::size_t b = 0; b < layout_->buckets(lane.index); ++b) {
        observe(Phase::reduce, lane.index, b, [&] {
          for (std::size_t o = lane.owned_begin[b]; o < lane.owned_begin[b + 1]; ++o) {
            const OwnedFragment& owned = lane.owned[o];
            if (stepping_[owned.fragment.parameter] == 0) continue;
            const GradientSum<T> sum = gradient(owned.fragment, 0);
            for (std::size_t at = 0; at < owned.fragment.elements; at += sum_chunk) {
              scaled_sum<T>(sum.sources, at, std::min(sum_chunk, owned.fragment.elements - at),
                            arithmetic_t<T>(1), lane.reduced.data() + owned.shard_begin + at,
                            lane.scratch);
            }
          }
        });
      }
    });
  }

  void update_from_sums(std::span<const void* const> published) {
    for_each_lane([&]<class T>(HostLane<T, slots>& lane) {
      const auto scale = static_cast<arithmetic_t<T>>(gradient_scale());
      Constants<T> constants(*this);
      for (std::size_t b = 0; b < layout_->buckets(lane.index); ++b) {
        observe(Phase::update, lane.index, b, [&] {
          for (const void* of : published) {
            const HostLane<T, slots>& theirs = lane_of_peer<T>(of);
            for (std::size_t o = theirs.owned_begin[b]; o < theirs.owned_begin[b + 1]; ++o) {
              const Fragment& f = theirs.owned[o].fragment;
              if (stepping_[f.parameter] == 0) continue;
              lane.sources[0] = theirs.reduced.data() + theirs.owned[o].shard_begin;
              update_fragment(groups_[parameters_[f.parameter].group], constants.of(f.parameter),
                              lane, f, f.lane_begin,
                              GradientSum<T>{{lane.sources.data(), 1}, scale});
            }
          }
        });
      }
    });
  }

  template <class F>
  void for_each_lane_and_traffic(F&& f) {
    [&]<std::size_t... I>(std::index_sequence<I...>) {
      (f(std::get<I>(lanes_), std::get<I>(traffic_)), ...);
    }(std::make_index_sequence<lane_count>{});
  }
  template <class F>
  void with_lane_and_traffic(std::size_t lane, F&& f) {
    for_each_lane_and_traffic([&](auto& l, auto& traffic) {
      if (l.index == lane) f(l, *traffic);
    });
  }

  void start_next_reduce() {
    const Launch& next = launches_[next_launch_++];
    with_lane_and_traffic(next.lane,
                          [&](auto&, auto& traffic) { traffic.start_reduce(next.bucket); });
  }

  /// Buckets go through the communicator: reductions were started as gradients became ready, each
  /// bucket is updated once its sum is there, and gathered while the next is updated.
  void step_through_buckets(const std::string& refusal, bool& updating) {
    const bool reduces = reduces_buckets();
    while (reduces && next_launch_ < launches_.size()) start_next_reduce();
    try {
      exchange_presence(refusal);
    } catch (const UsageError&) {  // the same on all ranks
      for_each_lane_and_traffic([](auto&, auto& traffic) { traffic->finish_all(); });
      throw;
    }
    updating = true;
    count_step();
    std::array<std::size_t, lane_count> reduced{};
    for (const Launch& launch : launches_) {
      with_lane_and_traffic(launch.lane, [&]<class T>(HostLane<T, slots>& lane, auto& traffic) {
        if (reduces) {
          observe(Phase::reduce, lane.index, launch.bucket,
                  [&] { traffic.finish_reduces(++reduced[lane.index]); });
          const std::size_t sum_begin = traffic.sum_begin(launch.bucket);
          const std::size_t slot_begin = Stage::shards_state
                                             ? sum_begin
                                             : layout_->bucket(lane.index, launch.bucket).begin;
          const auto scale = static_cast<arithmetic_t<T>>(gradient_scale());
          update_bucket(lane, launch.bucket, [&](const Fragment&, std::size_t begin) {
            lane.sources[0] = lane.reduced.data() + sum_begin + (begin - slot_begin);
            return GradientSum<T>{{lane.sources.data(), 1}, scale};
          });
        } else {
          update_bucket(lane, launch.bucket, own_gradient(lane));
        }
        if constexpr (Stage::shards_state) {
          observe(Phase::gather, lane.index, launch.bucket,
                  [&] { traffic.start_gather(launch.bucket); });
        }
      });
    }
    for_each_lane_and_traffic([](auto&, auto& traffic) { traffic->finish_all(); });
  }

  /// Tells the others what this rank has, or why it refuses.
  void exchange_presence(const std::string& refusal) {
    const StepMessage mine{to_text(refusal), options_};
    std::memcpy(message_.data(), &mine, sizeof mine);
    std::fill(message_.begin() + sizeof mine, message_.end(), std::byte{0});
    for (std::size_t i = 0; i < present_.size(); ++i) {
      if (present_[i] != 0) message_[sizeof mine + i / 8] |= std::byte{1} << (i % 8);
    }
    comm().exchange(std::span<const std::byte>(message_), std::span<std::byte>(messages_)).wait();
    const auto from = [&](int r) {
      return std::span<const std::byte>(messages_)
          .subspan(static_cast<std::size_t>(r) * message_.size(), message_.size());
    };
    const auto head = [&](int r) {
      StepMessage theirs;
      std::memcpy(&theirs, from(r).data(), sizeof theirs);
      return theirs;
    };
    const std::uint64_t options_of_rank_0 = head(0).options;
    for (int r = 0; r < world(); ++r) {
      const StepMessage theirs = head(r);
      require_agreement_to_step(r, theirs.refusal.data(), theirs.options, options_of_rank_0);
    }
    agree_on_presence([&](std::size_t i) {
      Presence presence{false, true};
      for (int r = 0; r < world(); ++r) {
        const bool there =
            (from(r)[sizeof(StepMessage) + i / 8] >> (i % 8) & std::byte{1}) != std::byte{0};
        presence.somewhere = presence.somewhere || there;
        presence.everywhere = presence.everywhere && there;
      }
      return presence;
    });
  }

  Held<Store> store_;
  Held<Comm> comm_;
  std::vector<Opt> groups_;
  View view_;
  [[no_unique_address]] Observe observer_;
  Settings settings_;

  mutable std::mutex mutex_;
  std::optional<Layout<Partition>> layout_;
  std::vector<ParameterInfo> parameters_;
  std::optional<Marks> marks_;
  std::size_t slots_allocated_ = 0;
  std::int64_t step_ = 0;
  std::vector<std::int64_t> steps_;       ///< by leader: how often it was stepped
  std::vector<std::uint8_t> present_;     ///< by leader: whether this rank has its gradient
  std::vector<std::uint8_t> stepping_;    ///< by leader: whether this step updates it
  std::string refusal_;                   ///< why this rank can't step; peers read it
  std::uint64_t options_ = 0;             ///< fingerprint of the groups' options; peers read it
  std::string failure_;                   ///< why no rank can go on

  typename Per<elements>::lanes lanes_;

  // Only where ranks don't share memory.
  std::vector<Launch> launches_;
  std::size_t next_launch_ = 0;
  std::array<std::vector<std::size_t>, lane_count> waiting_;  ///< by bucket: parameters to come
  std::vector<std::byte> message_;
  std::vector<std::byte> messages_;
  typename Per<elements>::traffic traffic_;
};

}  // namespace zero::detail
