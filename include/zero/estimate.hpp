// SPDX-License-Identifier: Apache-2.0
/// @file
/// Memory of one rank before anything is allocated: exactly, from a store or from shapes. By the
/// formulas of ZeRO, from a count: `zero/estimate_by_count.hpp`, which this includes.
#pragma once

#include <algorithm>
#include <cstddef>
#include <limits>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "zero/attributes.hpp"
#include "zero/bucket_view.hpp"
#include "zero/communicator.hpp"
#include "zero/detail/inspect.hpp"
#include "zero/detail/lane_room.hpp"
#include "zero/detail/policies.hpp"
#include "zero/detail/scaling.hpp"
#include "zero/detail/storage.hpp"
#include "zero/detail/store.hpp"
#include "zero/detail/units.hpp"
#include "zero/element.hpp"
#include "zero/error.hpp"
#include "zero/estimate_by_count.hpp"  // IWYU pragma: export
#include "zero/layout.hpp"
#include "zero/memory_report.hpp"  // IWYU pragma: export
#include "zero/model_sizes.hpp"    // IWYU pragma: export
#include "zero/optimizer.hpp"
#include "zero/parameter.hpp"
#include "zero/partition/contiguous.hpp"
#include "zero/precision.hpp"
#include "zero/settings.hpp"
#include "zero/stage.hpp"

namespace zero {

/// A parameter that has no memory yet.
struct ParamShape {
  std::vector<std::size_t> shape;  ///< extents; empty: a scalar
  std::string name{};              ///< for messages only
  Attributes attributes{};
  std::size_t group = 0;
};

/// Which rank an estimate is of.
struct EstimateFor {
  int world = 1;  ///< the ranks that state is spread over: of a `HybridCommunicator`, one group
  int rank = 0;
  /// Whether ranks read each other's memory (`SharedMemoryCommunicator`), as in-process ones do;
  /// others have buckets on their way, which need staging.
  bool share_memory = true;
  bool clips = false;  ///< whether `clip_grad_norm` is called: sums then need room
  /// How many groups of `world` ranks there are (`HybridCommunicator`). Where there are several,
  /// ranks read no other's memory, whatever `share_memory` says.
  int replicas = 1;

  /// This rank of a communicator.
  template <class Comm>
  [[nodiscard]] static EstimateFor member(const Comm& comm) {
    EstimateFor of{comm.size(), comm.rank(), SharedMemoryCommunicator<Comm>};
    if constexpr (ReplicatedCommunicator<Comm>) of.replicas = comm.replicas().size();
    return of;
  }
};

/// Bytes of one rank. Element arrays, exactly; activations and bookkeeping are not counted.
struct ExactEstimate {
  /// The caller's: values, each tied one once. With a view that moves them only frozen ones stay.
  std::size_t parameters = 0;
  /// The caller's, of trainable parameters, likewise. None at stages 2 and 3, where backward writes
  /// to what it leases: a framework that has memory of its own for them needs that, too.
  std::size_t gradients = 0;
  /// To the byte what `ZeroSharded::memory` reports once it is constructed (and, with
  /// `EstimateFor::clips`, `clip_grad_norm` called). The peaks are what will be used in steps:
  /// at most `pooled_peak` once the order of gradients has been learned, and at most
  /// `gathered_peak` where one unit is acquired at a time.
  MemoryReport optimizer{};
  std::size_t padding = 0;  ///< of `optimizer`, staging aside: bytes that hold no parameter's
  /// What is there besides while an optimizer is constructed: the caller's memory that it moves
  /// into arenas, until each parameter has let go of its own.
  std::size_t moved = 0;
  [[nodiscard]] constexpr std::size_t total() const noexcept {
    return parameters + gradients + optimizer.total();
  }
};

namespace detail {

/// As `inspect`, of what has no memory.
template <Element T>
[[nodiscard]] Inspection inspect_shapes(std::span<const ParamShape> shapes, std::size_t groups) {
  Inspection seen{.verb = "estimate"};
  if (shapes.empty()) throw UsageError("estimate: there are no shapes; give at least one");
  seen.parameters.resize(shapes.size());
  for (std::size_t i = 0; i < shapes.size(); ++i) {
    ParameterInfo& info = seen.parameters[i];
    info.name = shapes[i].name;
    info.group = shapes[i].group;
    info.shape = shapes[i].shape;
    info.attributes = shapes[i].attributes;
    info.frozen = info.attributes.frozen;
    info.leader = info.attributes.alias.value_or(i);
    info.element_bytes = sizeof(T);
    info.elements = 1;
    for (const std::size_t extent : info.shape) {
      if (extent != 0 && info.elements > std::numeric_limits<std::size_t>::max() / extent) {
        refuse_parameter(seen, i, "has a shape whose element count overflows");
      }
      info.elements *= extent;
    }
    if (info.group >= groups) {
      refuse_parameter(seen, i,
                       "is in group " + std::to_string(info.group) + ", but there are only " +
                           std::to_string(groups));
    }
  }
  require_ties_in_group(seen);
  // Above, sums of bytes could overflow; no machine has as much.
  constexpr std::size_t most = std::size_t{1} << 50;
  std::size_t elements = 0;
  for (std::size_t i = 0; i < shapes.size(); ++i) {
    elements += std::min(seen.parameters[i].elements, most + 1);
    if (elements > most) {
      refuse_parameter(seen, i, "brings the elements above 2^50, the most that is estimated");
    }
  }
  for (const ParameterInfo& info : seen.parameters) {
    seen.places.push_back({info.elements, 0, info.attributes, info.name, info.group});
  }
  return seen;
}

template <class First>
[[nodiscard]] auto groups_of(const First& options) {
  if constexpr (std::is_same_v<First, optimizer_of<First>>) {
    return std::vector<First>{options};
  } else {
    return options.options;
  }
}

/// What ZeroSharded would say of policies; of what concerns a communicator it says nothing.
template <class Opt, class Store, class Partition, class View, class Stage, class Precision,
          class... P>
struct EstimatePolicies {
  static_assert(((families<P> == 1) && ...),
                "zero: an argument behind EstimateFor is not a policy (partition, bucket view, "
                "stage, precision, observer) nor zero::Settings, or is two of them at once");
  static_assert(one_of_each<P...>,
                "zero: two policies of one kind, or two zero::Settings, were given; give at most "
                "one of each");
  static_assert(AllElements<Store, IsStored>::value,
                "zero: an element type must be float or double, or 16 bits of a format that zero "
                "knows (float16, bfloat16); see zero/element.hpp");
  static_assert(AllElements<Store, IsOptimizer<Opt, space_of<Store>()>>::value,
                "zero: the optimizer must be an update rule or a whole-tensor optimizer for every "
                "element type of the store; see zero/optimizer.hpp");
  static_assert(!AnyWholeTensor<Opt, Store>::value || !CuttingPartition<Partition>,
                "zero: a whole-tensor optimizer needs complete tensors, but this partition cuts "
                "them; use zero::BalancedPartition");
  static_assert(!shards_values<Stage> || moves_values<View>,
                "zero: stage 3 needs a view that moves values; use zero::ParamView");
  static_assert(AllElements<Store, IsPrecision<Precision>>::value,
                "zero: the precision must model zero::PrecisionPolicy for every element type of "
                "the store; see zero/precision.hpp");
  static constexpr bool tensors = AnyWholeTensor<Opt, Store>::value;
};

/// Adds one lane's arrays of one rank up.
/// @param flat whether values lie in the caller's flat buffer
/// @param reads_peers whether ranks read each other's gradients where they lie
template <class S, bool tensors, class View, class Stage, class Opt, class Partition>
void add_lane(ExactEstimate& sum, const Layout<Partition>& map, std::size_t lane,
              const Inspection& seen, const std::vector<Opt>& groups, const EstimateFor& of,
              const Settings& settings, bool keeps, bool flat, bool reads_peers,
              const std::vector<Unit>& units) {
  constexpr std::size_t value = sizeof(typename S::value);
  constexpr std::size_t arithmetic = sizeof(typename S::arithmetic);
  const LaneRoom<S, Stage, Partition> room(map, lane, of.rank, of.world == 1 && of.replicas == 1);
  MemoryReport& report = sum.optimizer;
  const std::size_t state = slots_for(groups) * sizeof(typename S::slot);
  const std::size_t master = S::has_master ? sizeof(typename S::master) : 0;
  report.state += room.kept() * state;
  report.master += room.kept() * master;
  sum.padding += (room.kept() - room.kept_of_parameters()) * (state + master);
  const auto add_arena = [&](std::size_t& bytes) {
    bytes += room.arena() * value;
    sum.padding += (room.arena() - map.elements(lane)) * value;
  };
  if constexpr (Stage::shards_values) {
    const auto [elements, of_parameters] = room.values_kept(units);
    report.values += elements * value;
    sum.padding += (elements - of_parameters) * value;
  } else if constexpr (View::values == Residency::arena) {
    add_arena(report.values);
  }
  if constexpr (View::gradients == Residency::arena && !Stage::shards_gradients) {
    add_arena(report.gradients);
  }
  const std::size_t sums = room.sums(reads_peers, settings, keeps);
  report.gradients += sums * arithmetic;
  if (sums > 0) {
    const bool of_everything = !Stage::shards_state && !reads_peers;
    sum.padding += (sums - (of_everything ? map.elements(lane) : room.owned())) * arithmetic;
  }
  if constexpr (tensors) report.staging += room.workspace(seen.parameters, groups) * arithmetic;
  if (!reads_peers) {
    report.staging += room.staging_bytes(flat || View::values == Residency::arena);
  }
}

template <class Checks, class View, class Stage, class Precision, class Opt, class Partition,
          class... T>
[[nodiscard]] ExactEstimate estimate_of(TypeList<T...> elements, const std::vector<Opt>& groups,
                                        const Inspection& seen, bool flat, EstimateFor of,
                                        const Partition& partition, const View& view,
                                        const Stage& stage, const Settings& settings) {
  for (const Opt& group : groups) zero::validate(group);
  if constexpr (Checks::tensors) require_steppable(groups, 0, seen);
  const Layout<Partition> map(seen.places, layout_lanes(elements, view.bucket_bytes, flat),
                              of.world, partition);
  if (of.rank < 0 || of.rank >= of.world) {
    throw UsageError("estimate: there is no rank " + std::to_string(of.rank) + " of " +
                     std::to_string(of.world));
  }
  if (of.replicas < 1) {
    throw UsageError("estimate: there are " + std::to_string(of.replicas) +
                     " replicas; there must be at least one");
  }
  if (of.replicas > 1) of.share_memory = false;
  Scaling scaling(settings, static_cast<double>(of.world) * static_cast<double>(of.replicas));
  scaling.validate((std::is_same_v<arithmetic_t<T>, float> || ...));
  if (of.clips) scaling.max_norm = 1;
  const bool keeps = keeps_sums(settings, scaling.looks_first(trains_16_bits(seen.parameters)));
  ExactEstimate sum;
  for (std::size_t i = 0; i < seen.parameters.size(); ++i) {
    const ParameterInfo& info = seen.parameters[i];
    if (info.leader != i) continue;
    const std::size_t bytes = info.elements * info.element_bytes;
    const auto add = [&](Residency where, std::size_t& stays) {
      (info.frozen || where == Residency::caller ? stays : sum.moved) += bytes;
    };
    add(View::values, sum.parameters);
    if (!info.frozen && !Stage::shards_gradients) add(View::gradients, sum.gradients);
  }
  const bool alone = of.world == 1 && of.replicas == 1;
  const bool reads_peers = of.share_memory && may_read_peers<Stage, Precision, TypeList<T...>>;
  const std::vector<Unit> units = units_of(
      map, [&](std::size_t i) { return seen.parameters[i].attributes.unit; },
      element_bytes(elements), resident_limit<Stage>(stage, alone));
  std::size_t lane = 0;
  (add_lane<Storage<T, Precision>, Checks::tensors, View, Stage>(
       sum, map, lane++, seen, groups, of, settings, keeps, flat, reads_peers, units),
   ...);
  if (Stage::shards_gradients && !alone) {
    sum.optimizer.pooled_peak = limit_of_pool(stage, map, seen.parameters, element_bytes(elements));
  }
  std::vector<std::size_t> sizes;
  for (const Unit& unit : units) sizes.push_back(unit.resident ? 0 : unit.bytes);
  std::sort(sizes.rbegin(), sizes.rend());
  for (std::size_t k = 0; k < std::min(sizes.size(), 1 + prefetched_units(stage)); ++k) {
    sum.optimizer.gathered_peak += sizes[k];
  }
  return sum;
}

/// Sorts policies as ZeroSharded does.
template <class Store, class View, class First, class... P>
[[nodiscard]] ExactEstimate estimate_policies(const First& options, const Inspection& seen,
                                              bool may_lie_flat, const EstimateFor& of,
                                              P... policies) {
  using Opt = optimizer_of<First>;
  using Partition = choose<PartitionFamily, ContiguousPartition, P...>;
  using Stage = choose<StageFamily, Stage1, P...>;
  using Precision = choose<PrecisionFamily, MixedPrecision, P...>;
  using Checks = EstimatePolicies<Opt, Store, Partition, View, Stage, Precision, P...>;
  const bool flat = may_lie_flat && lies_flat<Store, View, Partition>;
  return estimate_of<Checks, View, Stage, Precision>(
      store_elements<Store>{}, groups_of(options), seen, flat, of, pick<Partition>(policies...),
      pick<View>(policies...), pick<Stage>(policies...), pick<Settings>(policies...));
}

}  // namespace detail

/// What one rank of a `ZeroSharded{options, store, comm, policies...}` would keep, to the byte:
///
///     zero::estimate(zero::Adam{}, store, {.world = 8, .rank = 3}, zero::ParamView{})
///
/// Options may be `Groups`; policies, `Settings` among them, stand in any order and have
/// ZeroSharded's defaults. Looks at the store's shapes and types, allocates nothing of their size
/// and talks to nobody. Throws `UsageError` for a world below 1, a rank that is not in it, and for
/// options and parameters that make no sense.
template <class First, class Store, class... P>
[[nodiscard]] ExactEstimate estimate(const First& options, Store&& store, const EstimateFor& of,
                                     P... policies) {
  using store_type = std::remove_reference_t<Store>;
  static_assert(ParamStore<store_type>,
                "zero: the store must be a sized random-access range whose elements model "
                "zero::Parameter; of zero::ParamShapes name the element type, "
                "zero::estimate<float>(options, shapes, ...)");
  if constexpr (ParamStore<store_type>) {
    using View = detail::choose<detail::BucketViewFamily, detail::DefaultView<store_type>, P...>;
    detail::Inspection seen{.verb = "estimate"};
    detail::inspect(store, detail::groups_of(options).size(), false, 0, seen, true);
    return detail::estimate_policies<store_type, View>(options, seen, true, of,
                                                       std::move(policies)...);
  }
}

/// The same of parameters that don't exist yet, all of element type `T`, each to lie in memory of
/// its own. Nobody knows yet whether they can be moved, so that the view is `NoView` unless one is
/// given:
///
///     zero::estimate<float>(zero::Adam{}, shapes, {.world = 8}, zero::Stage1{})
template <Element T, class First, class... P>
[[nodiscard]] ExactEstimate estimate(const First& options, std::span<const ParamShape> shapes,
                                     const EstimateFor& of, P... policies) {
  using Store = std::vector<ParamRef<T>>;
  using View = detail::choose<detail::BucketViewFamily, NoView, P...>;
  const detail::Inspection seen =
      detail::inspect_shapes<T>(shapes, detail::groups_of(options).size());
  return detail::estimate_policies<Store, View>(options, seen, false, of, std::move(policies)...);
}

}  // namespace zero
