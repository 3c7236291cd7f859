// SPDX-License-Identifier: Apache-2.0
// Layout against a slow model of its documentation: one record per element, cuts found by stepping
// down one element at a time.
#include <zero/bucket_view.hpp>
#include <zero/bucket_view/no_view.hpp>
#include <zero/layout.hpp>
#include <zero/partition.hpp>
#include <zero/partition/balanced.hpp>
#include <zero/partition/contiguous.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <iterator>
#include <limits>
#include <numeric>
#include <optional>
#include <random>
#include <ranges>
#include <set>
#include <span>
#include <sstream>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "catch.hpp"

namespace {

using zero::Interval;
using zero::LayoutLane;
using zero::LayoutParameter;

// ---- Partitions as a user would write them

/// Rank 0 gets twice what any other rank gets.
struct FirstRankTwice {
  static constexpr bool cuts_tensors = true;

  [[nodiscard]] constexpr std::size_t cut(std::size_t elements, std::size_t alignment, int world,
                                          int rank) const {
    if (rank == 0) return 0;
    if (rank == world) return elements;
    const std::size_t shares = static_cast<std::size_t>(world) + 1;
    const std::size_t share =
        (elements + shares * alignment - 1) / (shares * alignment) * alignment;
    return std::min(elements, share * (static_cast<std::size_t>(rank) + 1));
  }
};
static_assert(zero::CuttingPartition<FirstRankTwice>);

/// The minimal model in the documentation of `CuttingPartition`.
struct FirstRankOnly {
  static constexpr bool cuts_tensors = true;
  [[nodiscard]] constexpr std::size_t cut(std::size_t n, std::size_t, int, int rank) const {
    return rank == 0 ? 0 : n;
  }
};
static_assert(zero::CuttingPartition<FirstRankOnly>);

/// Whole tensors, a group's in registration order, each to the least loaded rank.
struct LeastLoaded {
  static constexpr bool cuts_tensors = false;

  constexpr void assign(std::span<const std::size_t> elements, std::span<std::size_t> loads,
                        std::span<int> owners) const {
    for (std::size_t i = 0; i < elements.size(); ++i) {
      const auto least = std::min_element(loads.begin(), loads.end());
      owners[i] = static_cast<int>(least - loads.begin());
      *least += elements[i];
    }
  }
};
static_assert(zero::WholeTensorPartition<LeastLoaded>);

struct OutsideTheWorld {
  static constexpr bool cuts_tensors = false;
  constexpr void assign(std::span<const std::size_t>, std::span<std::size_t> loads,
                        std::span<int> owners) const {
    for (int& owner : owners) owner = static_cast<int>(loads.size());
  }
};

// ---- Cases

struct Case {
  std::vector<std::vector<LayoutParameter>> batches;  ///< the first, then those appended
  std::vector<LayoutLane> lanes;
  int world = 1;

  [[nodiscard]] std::vector<LayoutParameter> all() const {
    std::vector<LayoutParameter> flat;
    for (const auto& batch : batches) flat.insert(flat.end(), batch.begin(), batch.end());
    return flat;
  }
};

std::string describe(const Case& c) {
  std::ostringstream out;
  out << "world " << c.world;
  for (const LayoutLane& lane : c.lanes) {
    out << "\nlane: element_bytes " << lane.element_bytes << ", bucket_bytes " << lane.bucket_bytes
        << (lane.foreign ? ", foreign" : "");
  }
  std::size_t index = 0;
  for (const auto& batch : c.batches) {
    out << "\nadded:";
    for (const LayoutParameter& p : batch) {
      out << "\n  " << index++ << ": " << p.elements << " in lane " << p.lane;
      const zero::Attributes& a = p.attributes;
      if (a.frozen) out << ", frozen";
      if (a.alias) out << ", alias of " << *a.alias;
      if (a.unsplittable) out << ", unsplittable";
      if (a.quantum != 1) out << ", quantum " << a.quantum;
      if (a.unit != 0) out << ", unit " << a.unit;
      if (p.group != 0) out << ", group " << p.group;
    }
  }
  return out.str();
}

// The distributions of the standard library differ between implementations; these don't.
class Draw {
 public:
  explicit Draw(unsigned seed) : engine_(seed) {}
  std::size_t below(std::size_t bound) { return static_cast<std::size_t>(engine_()) % bound; }
  bool one_in(std::size_t n) { return below(n) == 0; }
  template <class T, std::size_t n>
  T of(const std::array<T, n>& choices) {
    return choices[below(n)];
  }

 private:
  std::mt19937 engine_;
};

Case draw_case(Draw& draw, bool may_be_foreign) {
  Case c;
  c.world = draw.one_in(20) ? draw.of(std::array{64, 257}) : static_cast<int>(draw.below(9)) + 1;
  const std::size_t lanes = draw.below(3) + 1;
  for (std::size_t i = 0; i < lanes; ++i) {
    LayoutLane lane;
    lane.element_bytes = draw.of(std::array<std::size_t, 3>{4, 8, 2});
    lane.bucket_bytes = draw.of(std::array<std::size_t, 6>{
        0, 16, 1 + draw.below(300), 1 + draw.below(5000), 25u << 20, zero::PerTensor{}});
    lane.foreign = may_be_foreign && draw.one_in(3);
    c.lanes.push_back(lane);
  }
  std::vector<LayoutParameter> flat;
  const bool plain = draw.one_in(3);  // otherwise hardly any segment would be unconstrained
  for (std::size_t batches = draw.of(std::array<std::size_t, 4>{1, 1, 2, 3}); batches > 0;
       --batches) {
    std::vector<LayoutParameter> batch;
    int unit = 0;
    for (std::size_t n = draw.below(10); n > 0; --n) {
      LayoutParameter p;
      p.elements = draw.of(std::array<std::size_t, 6>{0, 1, draw.below(8), draw.below(64),
                                                      draw.below(64), draw.below(700)});
      p.lane = draw.below(lanes);
      unit += draw.one_in(4) ? 1 : 0;
      p.attributes.unit = unit;
      p.group = draw.below(3);
      p.attributes.frozen = draw.one_in(8);
      if (!plain) {
        p.attributes.unsplittable = draw.one_in(8);
        if (draw.one_in(5)) {
          p.attributes.quantum = draw.of(std::array<std::size_t, 8>{
              2, 3, 4, 5, 7, 12, 1 + draw.below(40), std::numeric_limits<std::size_t>::max() - 2});
        }
      }
      if (!flat.empty() && draw.one_in(8)) {
        const std::size_t target = draw.below(flat.size());
        if (!flat[target].attributes.alias) {
          p = flat[target];
          p.attributes.alias = target;
        }
      }
      batch.push_back(p);
      flat.push_back(p);
    }
    c.batches.push_back(batch);
  }
  return c;
}

// ---- The model

constexpr std::size_t nobody = std::numeric_limits<std::size_t>::max();

struct ModelElement {
  std::size_t parameter = nobody;
  std::size_t index = 0;  // in the parameter
  std::size_t bucket = nobody;
  std::size_t owner = nobody;
};

struct ModelSegment {
  std::size_t begin = 0, end = 0;
  std::size_t elements = 0;  // that belong to parameters
  std::size_t bound = 0;     // parameters that are unsplittable or have a quantum
  std::size_t first_bucket = 0, end_bucket = 0;
};

struct ModelLane {
  std::size_t alignment = 0;
  std::size_t bucket_elements = 0;
  std::vector<ModelElement> elements;
  std::vector<ModelSegment> segments;
  std::vector<std::vector<std::size_t>> cuts;  // by bucket: world + 1 of them
};

struct ModelPlace {
  std::size_t offset = 0;
  bool placed = false;
};

struct Model {
  std::vector<ModelLane> lanes;
  std::vector<ModelPlace> places;
};

bool is_bound(const LayoutParameter& p) {
  return p.attributes.unsplittable || p.attributes.quantum != 1;
}

/// Smallest multiple of `unit` that is not below `n`.
std::size_t next_multiple(std::size_t n, std::size_t unit) {
  while (n % unit != 0) ++n;
  return n;
}

/// What the documentation of `ContiguousPartition` says, without its arithmetic.
std::size_t wished_cut(const zero::ContiguousPartition&, std::size_t elements,
                       std::size_t alignment, int world, int rank) {
  std::size_t slice = 0;
  while (slice * static_cast<std::size_t>(world) < elements) slice += alignment;
  return std::min(elements, slice * static_cast<std::size_t>(rank));
}
template <class Partition>
std::size_t wished_cut(const Partition& partition, std::size_t elements, std::size_t alignment,
                       int world, int rank) {
  return partition.cut(elements, alignment, world, rank);
}

void append_parameter(ModelLane& lane, const LayoutParameter& p, std::size_t index, Model& model) {
  model.places[index] = {lane.elements.size(), true};
  for (std::size_t i = 0; i < p.elements; ++i) lane.elements.push_back({index, i, nobody, nobody});
}

bool may_cut(const ModelLane& lane, const LayoutLane& given, const ModelSegment& segment,
             const std::vector<LayoutParameter>& all, std::size_t at) {
  if (at == segment.begin || at == segment.end) return true;
  const ModelElement& element = lane.elements[at];
  if (element.parameter == nobody || element.index == 0) return true;
  const LayoutParameter& p = all[element.parameter];
  if (p.attributes.unsplittable) return false;
  if (p.attributes.quantum == 1) return true;
  return element.index % p.attributes.quantum == 0 && (given.foreign || at % lane.alignment == 0);
}

template <class Partition>
void close_segment(ModelLane& lane, const LayoutLane& given, ModelSegment segment,
                   const std::vector<LayoutParameter>& all, const Case& c,
                   const Partition& partition) {
  const auto world = static_cast<std::size_t>(c.world);
  if (!given.foreign) {
    while ((lane.elements.size() - segment.begin) % (world * lane.alignment) != 0) {
      lane.elements.emplace_back();
    }
  }
  segment.end = lane.elements.size();
  segment.first_bucket = lane.cuts.size();
  for (std::size_t begin = segment.begin; begin < segment.end; begin += lane.bucket_elements) {
    const std::size_t size = std::min(lane.bucket_elements, segment.end - begin);
    std::vector<std::size_t> cuts;
    for (int rank = 0; rank <= c.world; ++rank) {
      std::size_t at = begin + wished_cut(partition, size, lane.alignment, c.world, rank);
      while (!may_cut(lane, given, segment, all, at)) --at;
      cuts.push_back(at);
    }
    lane.cuts.push_back(cuts);
  }
  segment.end_bucket = lane.cuts.size();
  lane.segments.push_back(segment);
}

/// Cuts from the first element of every slice to the records of all.
void mark_owners(ModelLane& lane) {
  for (std::size_t bucket = 0; bucket < lane.cuts.size(); ++bucket) {
    const auto& cuts = lane.cuts[bucket];
    for (std::size_t rank = 0; rank + 1 < cuts.size(); ++rank) {
      for (std::size_t at = cuts[rank]; at < cuts[rank + 1]; ++at) {
        lane.elements[at].bucket = bucket;
        lane.elements[at].owner = rank;
      }
    }
  }
}

template <class Partition>
Model build_model(const Case& c, const Partition& partition) {
  Model model;
  const std::vector<LayoutParameter> all = c.all();
  model.places.resize(all.size());
  std::vector<std::size_t> loads(static_cast<std::size_t>(c.world), 0);
  for (const LayoutLane& given : c.lanes) {
    ModelLane lane;
    lane.alignment = 16 / given.element_bytes;
    const std::size_t unit = lane.alignment * static_cast<std::size_t>(c.world);
    lane.bucket_elements = unit;
    if (given.bucket_bytes == zero::PerTensor{}) lane.bucket_elements = 1u << 30;  // never full
    while (given.bucket_bytes != zero::PerTensor{} &&
           (lane.bucket_elements + unit) * given.element_bytes <= given.bucket_bytes) {
      lane.bucket_elements += unit;
    }
    model.lanes.push_back(lane);
  }

  std::size_t first = 0;
  for (const auto& batch : c.batches) {
    std::vector<int> owners(batch.size(), 0);
    if constexpr (zero::WholeTensorPartition<Partition>) {
      std::set<std::size_t> numbers;
      for (const LayoutParameter& p : batch) numbers.insert(p.group);
      for (const std::size_t number : numbers) {
        std::vector<std::size_t> sizes, which;
        for (std::size_t i = 0; i < batch.size(); ++i) {
          const LayoutParameter& p = batch[i];
          if (p.group != number || p.attributes.frozen || p.attributes.alias) continue;
          sizes.push_back(p.elements);
          which.push_back(i);
        }
        std::vector<int> chosen(sizes.size());
        partition.assign(sizes, loads, chosen);
        for (std::size_t i = 0; i < which.size(); ++i) owners[which[i]] = chosen[i];
      }
    }
    for (std::size_t l = 0; l < c.lanes.size(); ++l) {
      ModelLane& lane = model.lanes[l];
      std::vector<std::vector<std::size_t>> runs(1);  // of indices in the batch
      for (std::size_t i = 0; i < batch.size(); ++i) {
        const LayoutParameter& p = batch[i];
        if (p.lane != l || p.attributes.alias) continue;
        if (p.attributes.frozen) {
          if (c.lanes[l].foreign) {
            runs.push_back({i});
            runs.emplace_back();
          }
          continue;
        }
        if (!runs.back().empty() &&
            (c.lanes[l].bucket_bytes == zero::PerTensor{} ||
             batch[runs.back().back()].attributes.unit != p.attributes.unit)) {
          runs.emplace_back();
        }
        runs.back().push_back(i);
      }
      for (const auto& run : runs) {
        if (run.empty()) continue;
        if (batch[run[0]].attributes.frozen) {  // a hole in the caller's buffer
          lane.elements.resize(lane.elements.size() + batch[run[0]].elements);
          continue;
        }
        ModelSegment segment;
        segment.begin = lane.elements.size();
        for (const std::size_t i : run) {
          segment.elements += batch[i].elements;
          segment.bound += is_bound(batch[i]) ? 1 : 0;
        }
        if constexpr (zero::CuttingPartition<Partition>) {
          for (const std::size_t i : run) {
            while (is_bound(batch[i]) && !c.lanes[l].foreign &&
                   lane.elements.size() % lane.alignment != 0) {
              lane.elements.emplace_back();
            }
            append_parameter(lane, batch[i], first + i, model);
          }
          close_segment(lane, c.lanes[l], segment, all, c, partition);
        } else {
          segment.first_bucket = lane.cuts.size();
          std::vector<std::vector<std::size_t>> buckets;
          std::size_t filled = 0;
          for (const std::size_t i : run) {
            if (buckets.empty() ||
                (filled > 0 && filled + batch[i].elements > lane.bucket_elements)) {
              buckets.emplace_back();
              filled = 0;
            }
            buckets.back().push_back(i);
            filled += batch[i].elements;
          }
          for (const auto& bucket : buckets) {
            std::vector<std::size_t> cuts{lane.elements.size()};
            for (int rank = 0; rank < c.world; ++rank) {
              for (const std::size_t i : bucket) {
                if (owners[i] == rank) append_parameter(lane, batch[i], first + i, model);
              }
              lane.elements.resize(next_multiple(lane.elements.size(), lane.alignment));
              cuts.push_back(lane.elements.size());
            }
            if (cuts.front() != cuts.back()) lane.cuts.push_back(cuts);  // else all are empty
          }
          segment.end = lane.elements.size();
          segment.end_bucket = lane.cuts.size();
          lane.segments.push_back(segment);
        }
      }
    }
    first += batch.size();
  }
  for (ModelLane& lane : model.lanes) mark_owners(lane);
  for (std::size_t i = 0; i < all.size(); ++i) {
    if (all[i].attributes.alias) model.places[i] = model.places[*all[i].attributes.alias];
  }
  return model;
}

// ---- The comparison. Returns what is wrong first, or nothing: far faster than a CHECK an element.

template <class... Parts>
std::string say(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

std::string show(Interval i) { return say('[', i.begin, ", ", i.end, ')'); }

/// The fragments of an interval by looking at every element.
std::vector<zero::Fragment> slow_fragments(const ModelLane& lane, Interval interval) {
  std::vector<zero::Fragment> fragments;
  for (std::size_t at = interval.begin; at < interval.end; ++at) {
    const ModelElement& element = lane.elements[at];
    if (element.parameter == nobody) continue;
    if (fragments.empty() || fragments.back().parameter != element.parameter) {
      fragments.push_back({element.parameter, element.index, at, 0});
    }
    ++fragments.back().elements;
  }
  return fragments;
}

template <class Partition>
std::string compare_fragments(const zero::Layout<Partition>& layout, const ModelLane& model,
                              std::size_t lane, Interval interval) {
  const auto range = layout.fragments(lane, interval);
  const std::vector<zero::Fragment> expected = slow_fragments(model, interval);
  std::vector<zero::Fragment> got;
  for (const zero::Fragment& fragment : range) got.push_back(fragment);
  if (got != expected) {
    return say("fragments of ", show(interval), " in lane ", lane, ": ", got.size(),
               " of them, not ", expected.size(), ", or others");
  }
  return {};
}

template <class Partition>
std::string compare_lane(const zero::Layout<Partition>& layout, const Case& c,
                         const std::vector<LayoutParameter>& all, const Model& whole,
                         std::size_t lane, Draw& draw) {
  const ModelLane& model = whole.lanes[lane];
  const LayoutLane& given = c.lanes[lane];
  const auto world = static_cast<std::size_t>(c.world);
  const std::string here = say("lane ", lane, ": ");

  std::size_t trained = 0;
  for (const ModelSegment& segment : model.segments) trained += segment.elements;
  if (layout.extent(lane) != model.elements.size()) return here + "extent";
  if (layout.elements(lane) != trained) return here + "elements";
  if (layout.alignment(lane) != model.alignment) return here + "alignment";
  if (layout.buckets(lane) != model.cuts.size()) return here + "number of buckets";

  // Slices tile their bucket in rank order, buckets tile the lane but for holes.
  std::size_t reached = 0;
  std::vector<std::size_t> shard(world, 0);
  for (std::size_t b = 0; b < model.cuts.size(); ++b) {
    const Interval bucket = layout.bucket(lane, b);
    if (bucket.begin < reached) return here + say("bucket ", b, " overlaps the one before");
    for (std::size_t at = reached; at < bucket.begin; ++at) {
      if (!given.foreign) return here + say("a gap in front of bucket ", b);
      if (model.elements[at].parameter != nobody)
        return here + say("element ", at, " in no bucket");
    }
    reached = bucket.begin;
    bool equal = true;
    for (int rank = 0; rank < c.world; ++rank) {
      const auto r = static_cast<std::size_t>(rank);
      const Interval slice = layout.slice(lane, b, rank);
      if (slice != Interval{model.cuts[b][r], model.cuts[b][r + 1]}) {
        return here + say("slice ", show(slice), " of bucket ", b, ", rank ", rank, " is not ",
                          show({model.cuts[b][r], model.cuts[b][r + 1]}));
      }
      if (slice.begin != reached) return here + say("slices of bucket ", b, " don't tile it");
      reached = slice.end;
      if (!given.foreign &&
          (slice.begin % model.alignment != 0 || slice.end % model.alignment != 0)) {
        return here + say("misaligned slice of bucket ", b);
      }
      equal = equal && slice.size() == layout.slice(lane, b, 0).size();
      shard[r] += slice.size();
      const std::string wrong = compare_fragments(layout, model, lane, slice);
      if (!wrong.empty()) return wrong;
    }
    if (reached != bucket.end) return here + say("slices of bucket ", b, " don't fill it");
    if (layout.even(lane, b) && !equal) return here + say("bucket ", b, " isn't even");
    if (world == 1 && !layout.even(lane, b)) return here + say("bucket ", b, ": one slice is even");
  }
  for (std::size_t at = reached; at < model.elements.size(); ++at) {
    if (!given.foreign) return here + "the buckets end early";
    if (model.elements[at].parameter != nobody) return here + say("element ", at, " in no bucket");
  }

  // Little padding, and only where it is promised.
  for (const ModelSegment& segment : model.segments) {
    const std::size_t padding = segment.end - segment.begin - segment.elements;
    std::size_t limit = 0;
    if constexpr (zero::CuttingPartition<Partition>) {
      limit = world * model.alignment - 1 + segment.bound * (model.alignment - 1);
    } else {
      limit = (segment.end_bucket - segment.first_bucket) * world * (model.alignment - 1);
    }
    if (padding > (given.foreign ? 0 : limit)) return here + "too much padding";
    if constexpr (std::is_same_v<Partition, zero::ContiguousPartition>) {
      // Only a segment's last bucket can be short, so the balance is lost once a segment: whoever
      // has a full slice is less than an alignment unit above 1/K, and those behind lack together
      // less than K units, so one of them less than K - 1 units (in K-ths, to stay exact).
      if (segment.bound > 0) continue;
      std::vector<std::size_t> owned(world, 0);
      for (std::size_t at = segment.begin; at < segment.end; ++at) {
        if (model.elements[at].parameter != nobody) ++owned[model.elements[at].owner];
      }
      for (const std::size_t n : owned) {
        if (n * world >= segment.elements + world * model.alignment) return here + "too much owned";
        if (n * world + world * (world - 1) * model.alignment < segment.elements) {
          return here + "too little owned";
        }
      }
      for (std::size_t b = segment.first_bucket; b < segment.end_bucket; ++b) {
        if (!given.foreign && !layout.even(lane, b)) return here + say("bucket ", b, " is uneven");
      }
    }
  }

  // Everything is owned exactly once, counted through the other interface.
  std::size_t owned_sum = 0;
  std::vector<std::vector<int>> times(all.size());
  for (std::size_t i = 0; i < all.size(); ++i) times[i].resize(all[i].elements, 0);
  std::vector<std::vector<int>> owners_of(all.size());
  for (int rank = 0; rank < c.world; ++rank) {
    const auto r = static_cast<std::size_t>(rank);
    if (layout.shard_elements(lane, rank) != shard[r]) return here + "shard_elements";
    std::string wrong;
    std::size_t last_end = 0;
    layout.for_each_owned(
        lane, rank, [&](const zero::Fragment& f, std::size_t bucket, std::size_t shard_begin) {
          std::size_t before = 0;  // of this rank's slices in earlier buckets
          for (std::size_t b = 0; b < bucket; ++b)
            before += model.cuts[b][r + 1] - model.cuts[b][r];
          const std::size_t expected = before + f.lane_begin - model.cuts[bucket][r];
          if (shard_begin != expected) wrong = here + "shard_begin";
          if (shard_begin < last_end) wrong = here + "owned fragments out of order";
          last_end = shard_begin + f.elements;
          if (last_end > shard[r]) wrong = here + "a fragment ends behind its shard";
          if (f.elements == 0) wrong = here + "an empty fragment";
          const zero::Place& place = layout.place(f.parameter);
          if (place.offset + f.parameter_begin != f.lane_begin)
            wrong = here + "fragment off its place";
          for (std::size_t i = 0; i < f.elements; ++i) {
            if (model.elements[f.lane_begin + i].owner != r ||
                model.elements[f.lane_begin + i].bucket != bucket) {
              wrong = here + "element of another rank or bucket";
            }
            ++times[f.parameter][f.parameter_begin + i];
          }
          owned_sum += f.elements;
          owners_of[f.parameter].push_back(rank);
          const zero::Attributes& a = all[f.parameter].attributes;
          if (f.parameter_begin % a.quantum != 0)
            wrong = here + "a cut that is no multiple of quantum";
        });
    if (!wrong.empty()) return wrong;
  }
  if (owned_sum != layout.elements(lane)) return here + "owned lengths don't sum to the whole";
  for (std::size_t i = 0; i < all.size(); ++i) {
    const zero::Attributes& a = all[i].attributes;
    const bool here_once = all[i].lane == lane && !a.frozen && !a.alias;
    for (const int n : times[i]) {
      if (n != (here_once ? 1 : 0)) return here + say("parameter ", i, " owned ", n, " times");
    }
    const bool whole_only = a.unsplittable || zero::WholeTensorPartition<Partition>;
    if (whole_only && owners_of[i].size() > 1) return here + say("parameter ", i, " was cut");
  }

  for (int n = 0; n < 4; ++n) {
    const std::size_t a = draw.below(model.elements.size() + 1);
    const std::size_t b = draw.below(model.elements.size() + 1);
    const std::string wrong =
        compare_fragments(layout, model, lane, {std::min(a, b), std::max(a, b)});
    if (!wrong.empty()) return wrong;
  }
  return {};
}

template <class Partition>
std::string compare(const Case& c, const Partition& partition, Draw& draw) {
  const std::vector<LayoutParameter> all = c.all();
  const Model model = build_model(c, partition);
  std::vector<zero::Layout<Partition>> grown{{c.batches[0], c.lanes, c.world, partition}};
  for (std::size_t g = 1; g < c.batches.size(); ++g) {
    grown.push_back(grown.back().appended(c.batches[g]));
  }
  const zero::Layout<Partition>& layout = grown.back();
  if (layout.world() != c.world) return "world";
  if (layout.lanes() != c.lanes.size()) return "lanes";
  if (layout.parameters() != all.size()) return "parameters";

  for (std::size_t i = 0; i < all.size(); ++i) {
    const zero::Place& place = layout.place(i);
    if (place.placed != model.places[i].placed) return say("parameter ", i, ": placed");
    if (place.placed && place.offset != model.places[i].offset) {
      return say("parameter ", i, " at ", place.offset, ", not ", model.places[i].offset);
    }
    if (place.lane != all[i].lane || place.elements != all[i].elements) {
      return say("parameter ", i, ": lane or elements");
    }
    if (place.tied != all[i].attributes.alias.has_value()) return say("parameter ", i, ": tied");
    Interval buckets{};
    if (place.placed && place.elements > 0) {
      const auto& elements = model.lanes[place.lane].elements;
      buckets = {elements[place.offset].bucket,
                 elements[place.offset + place.elements - 1].bucket + 1};
    }
    if (layout.buckets_of(i) != buckets) {
      return say("parameter ", i, " in buckets ", show(layout.buckets_of(i)), ", not ",
                 show(buckets));
    }
  }
  for (std::size_t lane = 0; lane < c.lanes.size(); ++lane) {
    const std::string wrong = compare_lane(layout, c, all, model, lane, draw);
    if (!wrong.empty()) return wrong;
  }
  // What is appended moves nothing.
  for (std::size_t g = 0; g + 1 < grown.size(); ++g) {
    const auto& before = grown[g];
    for (std::size_t i = 0; i < before.parameters(); ++i) {
      if (before.place(i).offset != layout.place(i).offset) return say("parameter ", i, " moved");
      if (before.buckets_of(i) != layout.buckets_of(i)) return say("buckets of ", i, " changed");
    }
    for (std::size_t lane = 0; lane < c.lanes.size(); ++lane) {
      for (std::size_t b = 0; b < before.buckets(lane); ++b) {
        if (before.even(lane, b) != layout.even(lane, b)) return say("bucket ", b, " even changed");
        for (int rank = 0; rank < c.world; ++rank) {
          if (before.slice(lane, b, rank) != layout.slice(lane, b, rank)) {
            return say("slice of bucket ", b, ", rank ", rank, " moved");
          }
        }
      }
    }
  }
  return {};
}

template <class Partition>
void compare_drawn(unsigned first_seed, unsigned cases, bool may_be_foreign) {
#ifdef ZERO_TEST_EACH_ONCE  // sanitizers and a second compiler
  cases /= 5;
#endif
  for (unsigned seed = first_seed; seed < first_seed + cases; ++seed) {
    Draw draw(seed);
    const Case c = draw_case(draw, may_be_foreign);
    std::string wrong;
    try {
      wrong = compare(c, Partition{}, draw);
    } catch (const std::exception& error) {
      wrong = error.what();
    }
    if (!wrong.empty()) FAIL("seed " << seed << ": " << wrong << "\n" << describe(c));
  }
  SUCCEED();
}

std::string message_of(const std::vector<LayoutParameter>& parameters,
                       const std::vector<LayoutLane>& lanes, int world) {
  try {
    const zero::Layout<> layout(parameters, lanes, world);
  } catch (const zero::UsageError& error) {
    return error.what();
  }
  return "no UsageError";
}

// ---- At compile time

consteval bool constant_layout() {
  const std::array<LayoutParameter, 4> parameters{{
      {.elements = 10},
      {.elements = 0},
      {.elements = 7, .attributes = {.frozen = true}},
      {.elements = 9, .attributes = {.quantum = 3}},
  }};
  const std::array<LayoutLane, 1> lanes{{{.element_bytes = 4, .bucket_bytes = 48}}};
  const zero::Layout<> layout(parameters, lanes, 3);
  // 10 elements, 2 for the alignment of the quantum, 9 elements, 3 to the next multiple of 12.
  bool good = layout.extent(0) == 24 && layout.elements(0) == 19 && layout.buckets(0) == 2;
  good = good && layout.place(3).offset == 12 && !layout.place(2).placed;
  good = good && layout.slice(0, 0, 2) == Interval{8, 12};
  good = good && layout.slice(0, 1, 0) == Interval{12, 12};  // 16 and 20 are no multiples of 12
  good = good && layout.slice(0, 1, 2) == Interval{12, 24};
  good = good && layout.buckets_of(3) == Interval{1, 2} && layout.buckets_of(1).empty();
  std::size_t owned = 0;
  for (int rank = 0; rank < 3; ++rank) {
    layout.for_each_owned(
        0, rank, [&](const zero::Fragment& f, std::size_t, std::size_t) { owned += f.elements; });
  }
  good = good && owned == 19;
  std::size_t seen = 0;
  for (const zero::Fragment& f : layout.fragments(0, {5, 13})) {
    good = good && f == (seen == 0 ? zero::Fragment{0, 5, 5, 5} : zero::Fragment{3, 0, 12, 1});
    ++seen;
  }
  const std::array<LayoutParameter, 1> more{{{.elements = 1}}};
  const zero::Layout<> grown = layout.appended(more);
  return good && seen == 2 && grown.place(4).offset == 24 && grown.extent(0) == 36;
}
static_assert(constant_layout());

consteval bool constant_whole_tensors() {
  const std::array<LayoutParameter, 3> parameters{{{.elements = 3}, {.elements = 4}, {}}};
  const std::array<LayoutLane, 1> lanes{{{.element_bytes = 8}}};
  const zero::Layout<LeastLoaded> layout(parameters, lanes, 2);
  return layout.slice(0, 0, 0) == Interval{0, 4} && layout.slice(0, 0, 1) == Interval{4, 8} &&
         layout.place(1).offset == 4 && layout.place(2).offset == 3 && layout.elements(0) == 7;
}
static_assert(constant_whole_tensors());

consteval bool constant_buckets_per_tensor() {
  const std::array<LayoutParameter, 4> parameters{
      {{.elements = 9}, {}, {.elements = 1}, {.elements = 30}}};
  const std::array<LayoutLane, 1> lanes{{{.bucket_bytes = zero::PerTensor{}}}};
  const zero::Layout<> layout(parameters, lanes, 2);
  return layout.buckets(0) == 3 && layout.bucket(0, 0) == Interval{0, 16} &&
         layout.bucket(0, 1) == Interval{16, 24} && layout.bucket(0, 2) == Interval{24, 56} &&
         layout.slice(0, 2, 1) == Interval{40, 56} && layout.even(0, 2);
}
static_assert(constant_buckets_per_tensor());
static_assert(zero::NoView{zero::PerTensor{}}.bucket_bytes == zero::PerTensor{});

static_assert(std::forward_iterator<zero::Layout<>::FragmentIterator>);
static_assert(std::ranges::forward_range<zero::Layout<>::FragmentRange>);

}  // namespace

TEST_CASE("layout: drawn cases equal a slow model, contiguous partition") {
  compare_drawn<zero::ContiguousPartition>(1, 4000, true);
}

TEST_CASE("layout: drawn cases equal a slow model, weighted partition of a user") {
  compare_drawn<FirstRankTwice>(100'001, 1500, true);
}

TEST_CASE("layout: drawn cases equal a slow model, everything on one rank") {
  compare_drawn<FirstRankOnly>(200'001, 500, true);
}

TEST_CASE("layout: drawn cases equal a slow model, whole tensors") {
  compare_drawn<LeastLoaded>(300'001, 2000, false);
}

TEST_CASE("layout: drawn cases equal a slow model, balanced partition") {
  compare_drawn<zero::BalancedPartition>(400'001, 1000, false);
}

TEST_CASE("layout: a whole-tensor partition is asked group after group, in rising order") {
  const std::vector<LayoutParameter> parameters{{.elements = 1, .group = 7},
                                                {.elements = 2, .lane = 1},
                                                {.elements = 4, .group = 2},
                                                {.elements = 8, .group = 7},
                                                {.elements = 16}};
  const std::vector<LayoutLane> lanes(2);
  const zero::Layout<LeastLoaded> layout(parameters, lanes, 2);
  // 2 | 16, then 2 + 4 | 16, then 2 + 4 + 1 + 8 | 16.
  CHECK(layout.shard_elements(0, 0) == 16);  // padded
  CHECK(layout.shard_elements(0, 1) == 16);
  CHECK(layout.shard_elements(1, 0) == 4);
  const zero::Layout<LeastLoaded> grown =
      layout.appended(std::vector<LayoutParameter>{{.elements = 2}, {.elements = 40}});
  CHECK(grown.buckets_of(5) == Interval{1, 2});
  CHECK(grown.slice(0, 1, 0) == Interval{32, 36});
  CHECK(grown.slice(0, 1, 1) == Interval{36, 76});
}

TEST_CASE("layout: a weighted partition gives rank 0 twice as much") {
  const std::vector<LayoutParameter> parameters{{.elements = 1200}};
  const std::vector<LayoutLane> lanes{{.element_bytes = 4}};
  const zero::Layout<FirstRankTwice> layout(parameters, lanes, 2);
  CHECK(layout.shard_elements(0, 0) == 800);
  CHECK(layout.shard_elements(0, 1) == 400);
  CHECK_FALSE(layout.even(0, 0));
}

TEST_CASE("layout: the balance of contiguous slices is lost once a segment, not once a bucket") {
  const int world = 5;
  for (const std::size_t bucket_bytes : {std::size_t{80}, std::size_t{400}, std::size_t{1} << 20}) {
    const std::vector<LayoutParameter> parameters{{.elements = 1003}, {.elements = 18}};
    const std::vector<LayoutLane> lanes{{.element_bytes = 4, .bucket_bytes = bucket_bytes}};
    const zero::Layout<> layout(parameters, lanes, world);
    for (int rank = 0; rank < world; ++rank) {
      std::size_t owned = 0;
      layout.for_each_owned(
          0, rank, [&](const zero::Fragment& f, std::size_t, std::size_t) { owned += f.elements; });
      CAPTURE(bucket_bytes, rank, owned);
      CHECK(owned * 5 < 1021 + 5 * 4);
      CHECK(owned * 5 + 5 * 4 * 4 > 1021);
    }
  }
}

TEST_CASE("layout: an unsplittable parameter larger than many buckets is one rank's") {
  const std::vector<LayoutParameter> parameters{
      {.elements = 50}, {.elements = 333, .attributes = {.unsplittable = true}}, {.elements = 50}};
  const std::vector<LayoutLane> lanes{{.element_bytes = 4, .bucket_bytes = 64}};
  const zero::Layout<> layout(parameters, lanes, 4);
  int owners = 0;
  for (int rank = 0; rank < 4; ++rank) {
    layout.for_each_owned(0, rank, [&](const zero::Fragment& f, std::size_t, std::size_t) {
      if (f.parameter != 1) return;
      ++owners;
      CHECK(f.elements == 333);
    });
  }
  CHECK(owners == 1);
  CHECK(layout.buckets_of(1).size() == 1);
}

TEST_CASE("layout: frozen parameters are holes in a foreign lane, behind the last one too") {
  const std::vector<LayoutParameter> parameters{{.elements = 3, .attributes = {.frozen = true}},
                                                {.elements = 10},
                                                {.elements = 5, .attributes = {.frozen = true}}};
  const std::vector<LayoutLane> lanes{{.element_bytes = 4, .foreign = true}};
  const zero::Layout<> layout(parameters, lanes, 2);
  CHECK(layout.place(1).offset == 3);
  CHECK(layout.extent(0) == 18);
  const zero::Layout<> grown = layout.appended(std::vector<LayoutParameter>{{.elements = 4}});
  CHECK(grown.place(3).offset == 18);
  CHECK(grown.bucket(0, 1) == Interval{18, 22});
}

TEST_CASE("layout: element sizes that don't divide 16 still give slices on 16 bytes") {
  for (const std::size_t bytes : {1, 2, 3, 4, 6, 8, 12, 16, 24, 32}) {
    const std::vector<LayoutParameter> parameters{{.elements = 101}};
    const std::vector<LayoutLane> lanes{{.element_bytes = bytes}};
    const zero::Layout<> layout(parameters, lanes, 3);
    for (int rank = 0; rank < 3; ++rank) {
      CAPTURE(bytes, rank);
      CHECK(layout.slice(0, 0, rank).begin * bytes % 16 == 0);
      CHECK(layout.slice(0, 0, rank).end * bytes % 16 == 0);
    }
  }
}

TEST_CASE("layout: a huge quantum is no cut at all, without overflow") {
  for (const std::size_t quantum :
       {std::numeric_limits<std::size_t>::max(), (std::size_t{1} << 63) + 1}) {
    const std::vector<LayoutParameter> parameters{
        {.elements = 100, .attributes = {.quantum = quantum}}};
    const std::vector<LayoutLane> lanes{{.element_bytes = 4}};
    const zero::Layout<> layout(parameters, lanes, 3);
    std::vector<std::size_t> owned(3, 0);
    for (int rank = 0; rank < 3; ++rank) {
      layout.for_each_owned(0, rank, [&](const zero::Fragment& f, std::size_t, std::size_t) {
        owned[static_cast<std::size_t>(rank)] += f.elements;
      });
    }
    CHECK(std::ranges::count(owned, std::size_t{100}) == 1);
  }
}

namespace {

/// What `PerTensor` promises of a lane, whatever the partition: says what is wrong first.
template <class Partition>
std::string check_per_tensor(const std::vector<LayoutParameter>& parameters, const LayoutLane& lane,
                             const zero::Layout<Partition>& layout) {
  std::size_t bucket = 0;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const zero::Attributes& a = parameters[i].attributes;
    if (a.frozen || parameters[i].elements == 0) {
      if (!layout.buckets_of(i).empty()) return say("parameter ", i, " in a bucket");
      continue;
    }
    if (a.alias) {
      if (layout.buckets_of(i) != layout.buckets_of(*a.alias)) return say("parameter ", i, ": tie");
      continue;
    }
    if (bucket == layout.buckets(0)) return "too few buckets";
    if (layout.buckets_of(i) != Interval{bucket, bucket + 1})
      return say("parameter ", i, ": bucket");
    std::vector<zero::Fragment> fragments;
    for (const zero::Fragment& f : layout.fragments(0, layout.bucket(0, bucket))) {
      fragments.push_back(f);
    }
    const std::vector<zero::Fragment> whole{{i, 0, layout.place(i).offset, parameters[i].elements}};
    if (fragments != whole) return say("bucket ", bucket, " holds more or less than its tensor");
    for (int rank = 0; rank < layout.world(); ++rank) {
      const Interval slice = layout.slice(0, bucket, rank);
      if (!lane.foreign && (slice.begin * lane.element_bytes % 16 != 0 ||
                            slice.end * lane.element_bytes % 16 != 0)) {
        return say("bucket ", bucket, ", rank ", rank, ": misaligned");
      }
    }
    ++bucket;
  }
  return bucket == layout.buckets(0) ? "" : "too many buckets";
}

}  // namespace

TEST_CASE("layout: buckets per tensor") {
  const std::vector<LayoutParameter> parameters{
      {.elements = 1000},
      {},
      {.elements = 3},
      {.elements = 20'000'000},  // above the default size
      {.elements = 7, .attributes = {.frozen = true}},
      {.elements = 64, .attributes = {.unsplittable = true}},
      {.elements = 66, .attributes = {.quantum = 6}, .group = 1},
      {.elements = 3, .attributes = {.alias = 2}},
      {.elements = 1, .attributes = {.unit = 1}},
      {.elements = 17, .attributes = {.unit = 1}},
      {.attributes = {.unit = 2}},
  };
  std::vector<LayoutParameter> all = parameters;
  all.insert(all.end(), parameters.begin(), parameters.end());
  for (LayoutParameter& p : all) {
    if (p.attributes.alias) p.attributes.alias = 2;
  }
  const auto grown = [&](const auto& layout) {
    return layout.appended(std::span(all).subspan(parameters.size()));
  };
  for (int world = 1; world <= 8; ++world) {
    for (const std::size_t bytes : {2, 4, 8}) {
      CAPTURE(world, bytes);
      LayoutLane lane{.element_bytes = bytes, .bucket_bytes = zero::PerTensor{}};
      const auto lanes = std::span(&lane, 1);
      const zero::Layout<> contiguous(parameters, lanes, world);
      CHECK(check_per_tensor(parameters, lane, contiguous) == "");
      CHECK(check_per_tensor(all, lane, grown(contiguous)) == "");
      // Where nothing binds the cuts, all slices are equal.
      for (const std::size_t b : {0, 1, 2}) CHECK(contiguous.even(0, b));

      const zero::Layout<zero::BalancedPartition> balanced(parameters, lanes, world);
      CHECK(check_per_tensor(parameters, lane, balanced) == "");
      CHECK(check_per_tensor(all, lane, grown(balanced)) == "");

      const zero::Layout<FirstRankTwice> weighted(parameters, lanes, world);
      CHECK(check_per_tensor(parameters, lane, weighted) == "");

      lane.foreign = true;
      const zero::Layout<> flat(parameters, lanes, world);
      CHECK(check_per_tensor(parameters, lane, flat) == "");
      CHECK(check_per_tensor(all, lane, grown(flat)) == "");
      CHECK(flat.extent(0) == 20'001'158);
      CHECK(flat.place(9).offset == 20'001'141);
    }
  }
}

TEST_CASE("layout: the largest tensors and bucket sizes don't overflow") {
  constexpr std::size_t huge = std::numeric_limits<std::size_t>::max() / 40;
  const std::vector<LayoutParameter> parameters{{.elements = huge}, {.elements = huge}};
  for (const std::size_t bytes : {1, 4, 16}) {
    for (const std::size_t size : {std::numeric_limits<std::size_t>::max(),  // PerTensor
                                   std::numeric_limits<std::size_t>::max() - 1}) {
      CAPTURE(bytes, size);
      const std::vector<LayoutLane> lanes{{.element_bytes = bytes, .bucket_bytes = size}};
      const zero::Layout<> contiguous(parameters, lanes, 3);
      const zero::Layout<zero::BalancedPartition> balanced(parameters, lanes, 3);
      CHECK(contiguous.buckets(0) == (size == zero::PerTensor{} ? 2 : 1));
      CHECK(contiguous.elements(0) == 2 * huge);
      CHECK(contiguous.buckets_of(1).end == contiguous.buckets(0));
      CHECK(balanced.buckets(0) == contiguous.buckets(0));
      CHECK(balanced.shard_elements(0, 1) >= huge);
    }
  }
}

TEST_CASE("layout: empty tensors alone make no bucket") {
  // The second bucket would have held nothing but the last two.
  const std::vector<LayoutParameter> parameters{{.elements = 100}, {}, {}};
  for (const std::size_t size :
       {std::size_t{16}, std::size_t{1} << 20, static_cast<std::size_t>(zero::PerTensor{})}) {
    const std::vector<LayoutLane> lanes{{.element_bytes = 4, .bucket_bytes = size}};
    const zero::Layout<zero::BalancedPartition> layout(parameters, lanes, 1);
    CHECK(layout.buckets(0) == 1);
    const auto grown = layout.appended(std::vector<LayoutParameter>{{}, {}, {.elements = 8}, {}});
    CHECK(grown.buckets(0) == 2);
    CHECK(grown.buckets_of(5) == Interval{1, 2});
  }
}

TEST_CASE("layout: nothing to lay out") {
  const zero::Layout<> no_lanes({}, {}, 3);
  CHECK(no_lanes.lanes() == 0);
  CHECK(no_lanes.parameters() == 0);
  const std::vector<LayoutLane> lanes(1);
  const zero::Layout<> empty({}, lanes, 3);
  CHECK(empty.extent(0) == 0);
  CHECK(empty.buckets(0) == 0);
  CHECK(empty.shard_elements(0, 2) == 0);
  CHECK(empty.fragments(0, {0, 0}).begin() == std::default_sentinel);
  CHECK_THROWS_AS(empty.bucket(0, 0), zero::UsageError);
}

TEST_CASE("layout: its own memory does not grow with elements") {
  const std::vector<LayoutLane> lanes{{.element_bytes = 4, .bucket_bytes = 1 << 10}};
  const zero::Layout<> small({std::vector<LayoutParameter>(10, {.elements = 10})}, lanes, 4);
  const zero::Layout<> large({std::vector<LayoutParameter>(10, {.elements = 100'000})}, lanes, 4);
  CHECK(small.bytes() == large.bytes());
  CHECK(small.bytes() < 4096);
}

TEST_CASE("layout: wrong arguments are UsageErrors that name the parameter") {
  using Catch::Matchers::ContainsSubstring;
  const std::vector<LayoutLane> two(2);
  const LayoutParameter ten{.elements = 10};
  const auto alias = [](std::size_t elements, std::size_t target, std::size_t lane = 0) {
    return LayoutParameter{.elements = elements, .lane = lane, .attributes = {.alias = target}};
  };
  CHECK_THAT(message_of({ten}, two, 0), ContainsSubstring("world"));
  CHECK_THAT(message_of({ten}, two, -3), ContainsSubstring("world"));
  CHECK_THAT(message_of({ten}, {{.element_bytes = 0}}, 1), ContainsSubstring("element"));
  CHECK_THAT(message_of({ten, ten, {.elements = 4, .attributes = {.quantum = 0}}}, two, 2),
             ContainsSubstring("parameter 2") && ContainsSubstring("quantum"));
  CHECK_THAT(message_of({ten, {.elements = 4, .lane = 2}}, two, 2),
             ContainsSubstring("parameter 1") && ContainsSubstring("lane"));
  CHECK_THAT(message_of({ten, alias(10, 1)}, two, 2),  // itself
             ContainsSubstring("parameter 1") && ContainsSubstring("earlier"));
  CHECK_THAT(message_of({ten, alias(10, 7)}, two, 2),
             ContainsSubstring("parameter 1") && ContainsSubstring("earlier"));
  CHECK_THAT(message_of({ten, alias(10, 0), alias(10, 1)}, two, 2),
             ContainsSubstring("parameter 2") && ContainsSubstring("alias"));
  CHECK_THAT(message_of({ten, alias(9, 0)}, two, 2), ContainsSubstring("parameter 1"));
  CHECK_THAT(message_of({ten, alias(10, 0, 1)}, two, 2), ContainsSubstring("parameter 1"));
  CHECK_THAT(message_of({{.elements = 10, .attributes = {.frozen = true}}, alias(10, 0)}, two, 2),
             ContainsSubstring("parameter 1") && ContainsSubstring("frozen"));
  LayoutParameter frozen_alias = alias(10, 0);
  frozen_alias.attributes.frozen = true;
  CHECK_THAT(message_of({ten, frozen_alias}, two, 2),
             ContainsSubstring("parameter 1") && ContainsSubstring("frozen"));
  constexpr std::size_t huge = std::numeric_limits<std::size_t>::max() / 20;
  CHECK_THAT(message_of({{.elements = huge}, {.elements = huge}}, two, 2),
             ContainsSubstring("parameter 1") && ContainsSubstring("overflow"));

  // The index counts from the first parameter of all.
  const zero::Layout<> layout(std::vector{ten, ten}, two, 2);
  CHECK_THROWS_WITH(layout.appended(std::vector{ten, LayoutParameter{.elements = 1, .lane = 9}}),
                    ContainsSubstring("parameter 3"));
  CHECK_THROWS_AS(layout.bucket(0, 1), zero::UsageError);

  const zero::Layout<OutsideTheWorld> nothing_yet({}, two, 2);
  CHECK_THROWS_WITH(nothing_yet.appended(std::vector{ten}), ContainsSubstring("parameter 0"));
  const LayoutParameter frozen{.elements = 10, .attributes = {.frozen = true}};
  const zero::Layout<OutsideTheWorld> one_frozen(std::vector{frozen}, two, 2);
  CHECK_THROWS_WITH(one_frozen.appended(std::vector{ten}), ContainsSubstring("parameter 1"));

  const std::vector<LayoutLane> flat{{.foreign = true}};
  CHECK_THROWS_AS(zero::Layout<LeastLoaded>(std::vector{ten}, flat, 2), zero::UsageError);
}

namespace {

/// `ContiguousPartition` that breaks its word at one rank.
struct Wrong {
  static constexpr bool cuts_tensors = true;
  int where = 0;
  std::size_t instead = 0;
  std::size_t cut(std::size_t elements, std::size_t alignment, int world, int rank) const {
    return rank == where ? instead
                         : zero::ContiguousPartition{}.cut(elements, alignment, world, rank);
  }
};
struct NotEven : Wrong {
  static constexpr bool even = true;
};

template <class Partition>
std::string refusal_of(Partition partition) {
  const std::vector<LayoutParameter> parameters{{.elements = 1003}};
  const LayoutLane lane;
  try {
    const zero::Layout<Partition> layout(parameters, std::span(&lane, 1), 3, partition);
  } catch (const zero::UsageError& error) {
    return error.what();
  }
  return "";
}

}  // namespace

TEST_CASE("layout: a partition that does not keep its word is refused") {
  using Catch::Matchers::ContainsSubstring;
  CHECK(refusal_of(Wrong{.where = -1}).empty());
  CHECK_THAT(refusal_of(Wrong{.where = 0, .instead = 252}),
             ContainsSubstring("cut(1008, 4, 3, 0) is 252, but it must be 0"));
  CHECK_THAT(refusal_of(Wrong{.where = 3, .instead = 756}),
             ContainsSubstring("cut(1008, 4, 3, 3) is 756, but it must be all elements"));
  CHECK_THAT(refusal_of(Wrong{.where = 2, .instead = 8}), ContainsSubstring("no less than"));
  CHECK_THAT(refusal_of(Wrong{.where = 1, .instead = 2000}), ContainsSubstring("in the bucket"));
  CHECK_THAT(refusal_of(Wrong{.where = 1, .instead = 338}), ContainsSubstring("the alignment"));
  CHECK(refusal_of(Wrong{.where = 1, .instead = 340}).empty());
  CHECK_THAT(refusal_of(NotEven{{.where = 1, .instead = 340}}), ContainsSubstring("it is even"));
}

TEST_CASE("layout: the fingerprint tells partitions apart") {
  const std::vector<LayoutParameter> parameters{{.elements = 1003}};
  const LayoutLane lane;
  const auto fingerprint = [&](const auto& partition) {
    return zero::Layout(parameters, std::span(&lane, 1), 3, partition).fingerprint();
  };
  CHECK(fingerprint(Wrong{.where = -1}) == fingerprint(zero::ContiguousPartition{}));
  CHECK(fingerprint(Wrong{.where = 1, .instead = 340}) != fingerprint(Wrong{.where = -1}));
}
