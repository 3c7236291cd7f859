// SPDX-License-Identifier: Apache-2.0
/// @file
/// The one map: where every element lies, and who owns it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <limits>
#include <numeric>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "zero/attributes.hpp"
#include "zero/bucket_view.hpp"
#include "zero/detail/lane_map.hpp"
#include "zero/error.hpp"
#include "zero/fragment.hpp"  // IWYU pragma: export
#include "zero/memory.hpp"
#include "zero/partition.hpp"
#include "zero/partition/contiguous.hpp"

namespace zero {

/// Where one parameter lies. A frozen parameter lies nowhere: `placed` is false.
struct Place {
  std::size_t lane = 0;
  std::size_t offset = 0;    ///< of its first element in the lane
  std::size_t elements = 0;  ///< its element count
  bool placed = false;
  bool tied = false;  ///< an alias: the place is that of the parameter it is tied to
};

/// What a layout needs to know of a parameter.
struct LayoutParameter {
  std::size_t elements = 0;
  std::size_t lane = 0;
  Attributes attributes{};
  std::string_view name{};  ///< for messages only
  std::size_t group = 0;    ///< a whole-tensor partition balances group after group
};

/// How a lane is laid out.
struct LayoutLane {
  std::size_t element_bytes = 4;
  std::size_t bucket_bytes = 25_MiB;  ///< or `PerTensor{}`
  /// The lane is the caller's own buffer, parameter after parameter in registration order: nothing
  /// may be padded, so the last slice of a bucket may be short or misaligned.
  bool foreign = false;
};

/// An immutable value computed from shapes, attributes and world size alone, so that every rank
/// has the same. Lanes are cut into buckets, buckets into one slice a rank.
///
/// A lane is a sequence of segments. A segment starts where the unit changes, where appended
/// parameters begin, and (in a foreign lane) after a frozen parameter. Padding belongs to nobody.
/// With a cutting partition a segment's end is padded up to the next multiple of world * alignment,
/// and in front of a parameter with a quantum or that is unsplittable up to alignment, so that a
/// cut may lie there; its buckets have one size (the last a shorter one) and everything is
/// arithmetic. With a whole-tensor partition a bucket is a run of parameters of about that size,
/// ordered by owner, and each owner's part is padded up to alignment. A foreign lane is never
/// padded. With `PerTensor` buckets every parameter is a segment of one bucket. Empty parameters
/// alone make no bucket.
///
/// Stores O(parameters + buckets); slices and fragments are computed when asked for.
template <PartitionPolicy Partition = ContiguousPartition>
class Layout {
 public:
  /// Throws `UsageError` naming the parameter for a quantum of 0, a lane that does not
  /// exist, or an alias that does not name an earlier, unaliased parameter of the same lane and
  /// size, frozen like itself; for a world below 1; and where the partition does not do what its
  /// concept promises.
  constexpr Layout(std::span<const LayoutParameter> parameters, std::span<const LayoutLane> lanes,
                   int world, Partition partition = {})
      : partition_(partition), world_(world) {
    if (world < 1) throw UsageError("layout: the world size must be at least 1");
    loads_.resize(static_cast<std::size_t>(world), 0);
    lanes_.reserve(lanes.size());
    for (const LayoutLane& lane : lanes) lanes_.push_back(make_lane(lane));
    add(parameters);
  }

  /// The same with more parameters behind: existing places, buckets and cuts don't move.
  [[nodiscard]] constexpr Layout appended(std::span<const LayoutParameter> parameters) const {
    Layout grown = *this;
    grown.add(parameters);
    return grown;
  }

  [[nodiscard]] constexpr int world() const noexcept { return world_; }
  /// Differs, almost surely, from that of a layout of the same parameters whose partition divides
  /// them otherwise. Not for files.
  [[nodiscard]] constexpr std::uint64_t fingerprint() const noexcept { return fingerprint_; }
  [[nodiscard]] constexpr std::size_t lanes() const noexcept { return lanes_.size(); }
  [[nodiscard]] constexpr std::size_t parameters() const noexcept { return places_.size(); }
  [[nodiscard]] constexpr const Place& place(std::size_t parameter) const {
    return places_.at(parameter);
  }

  /// Elements of a lane including padding: the size of an arena that holds it. Of a foreign lane:
  /// the size of the caller's buffer, frozen parameters included.
  [[nodiscard]] constexpr std::size_t extent(std::size_t lane) const { return lanes_.at(lane).end; }
  /// Elements of a lane that belong to parameters.
  [[nodiscard]] constexpr std::size_t elements(std::size_t lane) const {
    return lanes_.at(lane).elements;
  }
  /// Slices begin on multiples of this many elements.
  [[nodiscard]] constexpr std::size_t alignment(std::size_t lane) const {
    return lanes_.at(lane).alignment;
  }
  [[nodiscard]] constexpr std::size_t buckets(std::size_t lane) const {
    return lanes_.at(lane).buckets();
  }

  /// All of a bucket, padding included.
  [[nodiscard]] constexpr Interval bucket(std::size_t lane, std::size_t bucket) const {
    return {cut(lane, bucket, 0), cut(lane, bucket, world_)};
  }
  /// Rank's slice of a bucket. It may hold padding, and may be empty.
  [[nodiscard]] constexpr Interval slice(std::size_t lane, std::size_t bucket, int rank) const {
    return {cut(lane, bucket, rank), cut(lane, bucket, rank + 1)};
  }
  /// Whether all slices of a bucket are known to have one size (so that even collectives serve).
  /// Says no without looking where a quantum or an unsplittable parameter may have moved a cut.
  [[nodiscard]] constexpr bool even(std::size_t lane, std::size_t bucket) const {
    if constexpr (CuttingPartition<Partition> && requires { requires Partition::even; }) {
      const Lane& l = lanes_.at(lane);
      const Segment& segment = l.segment_of_bucket(bucket);
      const std::size_t unit = l.alignment * static_cast<std::size_t>(world_);
      return world_ == 1 ||
             (!segment.constrained && l.raw_bucket(segment, bucket).size() % unit == 0);
    } else {
      return world_ == 1;
    }
  }

  /// The buckets that a parameter lies in, as [first, last).
  [[nodiscard]] constexpr Interval buckets_of(std::size_t parameter) const {
    const Place& where = place(parameter);
    if (!where.placed || where.elements == 0) return {};
    return {bucket_at(where.lane, where.offset),
            bucket_at(where.lane, where.offset + where.elements - 1) + 1};
  }

  using FragmentIterator = detail::FragmentIterator;
  using FragmentRange = detail::FragmentRange;
  /// The fragments that an interval of a lane consists of, in lane order; without padding.
  /// The layout must outlive the range.
  [[nodiscard]] constexpr FragmentRange fragments(std::size_t lane, Interval interval) const {
    return FragmentRange(lanes_.at(lane), interval);
  }

  /// Elements of rank's shard of a lane: the sum of its slices, which slots are sized by.
  [[nodiscard]] constexpr std::size_t shard_elements(std::size_t lane, int rank) const {
    const Lane& l = lanes_.at(lane);
    std::size_t sum = 0;
    for (const Segment& segment : l.segments) {
      for (std::size_t b = segment.first_bucket; b < segment.end_bucket(); ++b) {
        sum += cut(l, segment, b, rank + 1) - cut(l, segment, b, rank);
      }
    }
    return sum;
  }

  /// Calls `f(fragment, bucket, shard_begin)` for everything rank owns in a lane, in order, where
  /// `shard_begin` counts the rank's slices one after the other.
  template <class F>
  constexpr void for_each_owned(std::size_t lane, int rank, F&& f) const {
    const Lane& l = lanes_.at(lane);
    std::size_t base = 0;
    std::size_t entry = 0;  // slices only move up, so no search is needed
    for (const Segment& segment : l.segments) {
      for (std::size_t b = segment.first_bucket; b < segment.end_bucket(); ++b) {
        const Interval mine{cut(l, segment, b, rank), cut(l, segment, b, rank + 1)};
        if (mine.empty()) continue;
        while (entry < l.entries.size() && l.entries[entry].end() <= mine.begin) ++entry;
        for (FragmentIterator at{l, entry, mine}; at != std::default_sentinel; ++at) {
          const Fragment fragment = *at;
          f(fragment, b, base + (fragment.lane_begin - mine.begin));
        }
        base += mine.size();
      }
    }
  }

  /// Bytes that this value keeps on the heap.
  [[nodiscard]] constexpr std::size_t bytes() const noexcept {
    std::size_t sum = places_.capacity() * sizeof(Place) + loads_.capacity() * sizeof(std::size_t);
    for (const Lane& lane : lanes_) sum += lane.bytes();
    return sum;
  }

 private:
  using Lane = detail::LaneMap;
  using Segment = detail::LaneSegment;
  using Entry = detail::LaneEntry;

  /// Elements that a lane may have, so that sums of offsets, and bytes, don't overflow.
  static constexpr std::size_t lane_limit = std::numeric_limits<std::size_t>::max() / 16;

  static constexpr std::size_t round_up(std::size_t n, std::size_t unit) {
    return (n + unit - 1) / unit * unit;
  }

  constexpr Lane make_lane(const LayoutLane& from) const {
    if (from.element_bytes == 0) throw UsageError("layout: an element must have a size");
    Lane lane;
    lane.foreign = from.foreign;
    lane.alignment = slice_alignment / std::gcd(slice_alignment, from.element_bytes);
    const std::size_t unit = lane.alignment * static_cast<std::size_t>(world_);
    lane.per_tensor = from.bucket_bytes == PerTensor{};
    // A larger bucket than this holds any segment, as one of a single tensor must.
    const std::size_t most = 2 * lane_limit;
    const std::size_t wanted =
        lane.per_tensor ? most : std::min(most, from.bucket_bytes / from.element_bytes);
    lane.bucket_elements = std::max(unit, wanted / unit * unit);
    return lane;
  }

  static constexpr void refuse(std::size_t index, const LayoutParameter& p,
                               const std::string& what) {
    throw UsageError("layout: parameter " + std::to_string(index) + " ('" + std::string(p.name) +
                     "'): " + what);
  }

  constexpr void check(const LayoutParameter& p, std::size_t index) const {
    if (p.lane >= lanes_.size()) refuse(index, p, "its lane does not exist");
    if (p.attributes.quantum == 0) {
      refuse(index, p, "quantum is 0; use 1 for a parameter that may be cut anywhere");
    }
    if (!p.attributes.alias) return;
    const std::size_t target = *p.attributes.alias;
    if (target >= index) refuse(index, p, "alias must name an earlier parameter");
    if (places_[target].tied) {
      refuse(index, p, "alias names an alias; name the first of the tied ones");
    }
    if (places_[target].lane != p.lane || places_[target].elements != p.elements) {
      refuse(index, p, "alias differs from what it is tied to in element type or count");
    }
    if (p.attributes.frozen == places_[target].placed) {
      refuse(index, p, "alias is frozen where what it is tied to is not, or the other way round");
    }
  }

  constexpr void add(std::span<const LayoutParameter> added) {
    const std::size_t first = places_.size();
    for (std::size_t i = 0; i < added.size(); ++i) {
      const LayoutParameter& p = added[i];
      check(p, first + i);
      const Place nowhere{.lane = p.lane, .elements = p.elements, .placed = !p.attributes.frozen};
      places_.push_back(nowhere);
      places_.back().tied = p.attributes.alias.has_value();
    }
    const std::vector<int> owners = assign(added, first);
    for (std::size_t lane = 0; lane < lanes_.size(); ++lane)
      add_to_lane(lane, added, first, owners);
    for (std::size_t i = 0; i < added.size(); ++i) {  // aliases of what was just placed
      const auto& target = added[i].attributes.alias;
      if (target) places_[first + i].offset = places_[*target].offset;
    }
  }

  /// The owner of each added parameter; all 0 where the partition cuts tensors.
  constexpr std::vector<int> assign(std::span<const LayoutParameter> added, std::size_t first) {
    std::vector<int> owners(added.size(), 0);
    if constexpr (WholeTensorPartition<Partition>) {
      std::vector<std::size_t> order;  // group after group, each in registration order
      for (std::size_t i = 0; i < added.size(); ++i) {
        if (owns_memory(added[i])) order.push_back(i);
      }
      std::sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
        return added[a].group != added[b].group ? added[a].group < added[b].group : a < b;
      });
      for (auto from = order.begin(); from != order.end();) {
        const auto to = std::find_if(
            from, order.end(), [&](std::size_t i) { return added[i].group != added[*from].group; });
        std::vector<std::size_t> sizes;
        for (auto at = from; at != to; ++at) sizes.push_back(added[*at].elements);
        std::vector<int> chosen(sizes.size(), 0);
        partition_.assign(std::span<const std::size_t>(sizes), std::span(loads_),
                          std::span(chosen));
        for (const int owner : chosen) {
          if (owner < 0 || owner >= world_) {
            refuse(first + *from, added[*from],
                   "the partition gave it to a rank outside the world");
          }
          owners[*from++] = owner;
          note(static_cast<std::size_t>(owner));
        }
      }
    }
    return owners;
  }

  /// Holds a cutting partition to its word for one bucket, and notes where it cuts it.
  constexpr void check_cuts(std::size_t alignment, std::size_t elements) {
    const Interval size{alignment, elements};
    if (checked_ == size) return;  // neighbours are often alike
    checked_ = size;
    std::size_t before = 0;
    for (int rank = 0; rank <= world_; ++rank) {
      const std::size_t at = partition_.cut(elements, alignment, world_, rank);
      const auto require = [&](bool holds, const char* rule) {
        if (holds) return;
        throw UsageError("layout: the partition's cut(" + std::to_string(elements) + ", " +
                         std::to_string(alignment) + ", " + std::to_string(world_) + ", " +
                         std::to_string(rank) + ") is " + std::to_string(at) + ", but it must be " +
                         rule + "; see zero/partition.hpp");
      };
      require(rank != 0 || at == 0, "0, where the first slice starts");
      require(rank != world_ || at == elements, "all elements, where the last slice ends");
      require(at >= before && at <= elements,
              "no less than for the rank before, and in the bucket");
      require(at % alignment == 0 || at == elements, "a multiple of the alignment");
      if constexpr (requires { requires Partition::even; }) {
        const auto ranks = static_cast<std::size_t>(world_);
        require(elements % (alignment * ranks) != 0 ||
                    at == elements / ranks * static_cast<std::size_t>(rank),
                "an equal share, since the partition says that it is even");
      }
      before = at;
      note(at);
    }
  }
  constexpr void note(std::size_t choice) {
    fingerprint_ = (fingerprint_ ^ choice) * 0x9e3779b97f4a7c15U;
    fingerprint_ ^= fingerprint_ >> 29;
  }

  static constexpr bool owns_memory(const LayoutParameter& p) {
    return !p.attributes.frozen && !p.attributes.alias;
  }

  /// Appends the lane's share of `added`, one segment a run of equal units.
  constexpr void add_to_lane(std::size_t lane_index, std::span<const LayoutParameter> added,
                             std::size_t first, const std::vector<int>& owners) {
    Lane& lane = lanes_[lane_index];
    std::vector<Entry> run;
    std::size_t offset = lane.end;
    std::size_t total = lane.end;
    int unit = 0;
    const auto close = [&] {
      if (!run.empty()) add_segment(lane, run, offset);
      run.clear();
    };
    for (std::size_t i = 0; i < added.size(); ++i) {
      const LayoutParameter& p = added[i];
      if (p.lane != lane_index || p.attributes.alias) continue;
      if (total > lane_limit || p.elements > lane_limit - total) {
        refuse(first + i, p, "the lane's element count overflows");
      }
      total += p.elements;
      if (p.attributes.frozen) {
        if (!lane.foreign) continue;
        close();  // a hole in the caller's buffer
        offset += p.elements;
        continue;
      }
      if (lane.per_tensor || p.attributes.unit != unit) close();
      unit = p.attributes.unit;
      Entry entry;
      entry.elements = p.elements;
      entry.parameter = first + i;
      entry.owner = owners[i];
      if (p.attributes.unsplittable) {
        entry.quantum = detail::unsplittable;
      } else if (p.attributes.quantum > 1) {
        // A cut must also lie on an aligned element. (A quantum above the size leaves no cut, and
        // its common multiple could overflow.)
        const std::size_t step = lane.foreign ? std::size_t{1} : lane.alignment;
        entry.quantum = p.attributes.quantum >= p.elements ? detail::unsplittable
                                                           : std::lcm(p.attributes.quantum, step);
      }
      lane.elements += p.elements;
      run.push_back(entry);
    }
    close();
    lane.end = offset;
  }

  /// Places a run of entries from `offset` on, which moves to the segment's end.
  constexpr void add_segment(Lane& lane, std::vector<Entry>& run, std::size_t& offset) {
    const std::size_t unit = lane.alignment * static_cast<std::size_t>(world_);
    Segment segment;
    segment.begin = offset;
    segment.first_bucket = lane.buckets();
    if constexpr (CuttingPartition<Partition>) {
      for (Entry& entry : run) {
        segment.constrained |= entry.quantum != 1;
        if (entry.quantum != 1 && !lane.foreign) offset = round_up(offset, lane.alignment);
        entry.offset = offset;
        offset += entry.elements;
      }
      if (!lane.foreign) offset = segment.begin + round_up(offset - segment.begin, unit);
      segment.bucket_count =
          (offset - segment.begin + lane.bucket_elements - 1) / lane.bucket_elements;
      if (segment.bucket_count > 0) {
        const std::size_t whole = (segment.bucket_count - 1) * lane.bucket_elements;
        if (whole > 0) check_cuts(lane.alignment, lane.bucket_elements);
        check_cuts(lane.alignment, offset - segment.begin - whole);
      }
      keep(lane, run);
    } else {
      if (lane.foreign)
        throw UsageError("layout: whole tensors can't be reordered in a flat store");
      segment.constrained = true;
      for (std::size_t from = 0; from < run.size();) {
        std::size_t to = from;
        std::size_t sum = 0;
        while (to < run.size() && (sum == 0 || sum + run[to].elements <= lane.bucket_elements)) {
          sum += run[to++].elements;
        }
        if (sum > 0) {
          lane.bucket_entries.push_back(lane.entries.size());
          ++segment.bucket_count;
        }
        const auto bucket = std::span(run).subspan(from, to - from);
        sort_by_owner(bucket);
        for (std::size_t i = 0; i < bucket.size(); ++i) {
          const bool new_owner = i == 0 || bucket[i].owner != bucket[i - 1].owner;
          if (new_owner) offset = round_up(offset, lane.alignment);
          bucket[i].offset = offset;
          offset += bucket[i].elements;
        }
        offset = round_up(offset, lane.alignment);
        keep(lane, bucket);
        from = to;
      }
    }
    segment.padded_end = offset;
    if (segment.bucket_count > 0) lane.segments.push_back(segment);
  }

  /// Records where entries lie. Empty ones have a place, but nothing that could be found there.
  constexpr void keep(Lane& lane, std::span<const Entry> placed) {
    for (const Entry& entry : placed) {
      places_[entry.parameter].offset = entry.offset;
      if (entry.elements > 0) lane.entries.push_back(entry);
    }
  }

  /// Stable insertion sort: `std::stable_sort` is not constexpr, and buckets are short.
  static constexpr void sort_by_owner(std::span<Entry> bucket) {
    for (std::size_t i = 1; i < bucket.size(); ++i) {
      for (std::size_t j = i; j > 0 && bucket[j].owner < bucket[j - 1].owner; --j) {
        std::swap(bucket[j], bucket[j - 1]);
      }
    }
  }

  /// Where rank's slice of a bucket begins; for rank == world, where the bucket ends.
  [[nodiscard]] constexpr std::size_t cut(std::size_t lane_index, std::size_t bucket,
                                          int rank) const {
    const Lane& lane = lanes_.at(lane_index);
    return cut(lane, lane.segment_of_bucket(bucket), bucket, rank);
  }
  [[nodiscard]] constexpr std::size_t cut(const Lane& lane, const Segment& segment,
                                          std::size_t bucket, int rank) const {
    if constexpr (CuttingPartition<Partition>) {
      const Interval raw = lane.raw_bucket(segment, bucket);
      const std::size_t at = raw.begin + partition_.cut(raw.size(), lane.alignment, world_, rank);
      const bool at_segment_end = at == segment.begin || at == segment.padded_end;
      return segment.constrained && !at_segment_end ? lane.allowed(at) : at;
    } else {
      const std::size_t first = lane.bucket_entries[bucket];
      const std::size_t last = bucket + 1 < lane.bucket_entries.size()
                                   ? lane.bucket_entries[bucket + 1]
                                   : lane.entries.size();
      const auto owned =
          std::partition_point(lane.entries.begin() + static_cast<std::ptrdiff_t>(first),
                               lane.entries.begin() + static_cast<std::ptrdiff_t>(last),
                               [&](const Entry& entry) { return entry.owner < rank; });
      const auto index = static_cast<std::size_t>(owned - lane.entries.begin());
      if (index < last) return lane.entries[index].offset;
      if (last < lane.entries.size()) return lane.entries[last].offset;
      return segment.padded_end;
    }
  }

  [[nodiscard]] constexpr std::size_t bucket_at(std::size_t lane_index, std::size_t offset) const {
    const Lane& lane = lanes_.at(lane_index);
    const Segment& segment = lane.segment_at(offset);
    if constexpr (CuttingPartition<Partition>) {
      // A moved cut lies at most one parameter below the wished-for one, so the bucket that
      // arithmetic names, or a later one whose begin moved down, holds the offset.
      std::size_t b = segment.first_bucket + (offset - segment.begin) / lane.bucket_elements;
      while (b + 1 < segment.end_bucket() && cut(lane_index, b + 1, 0) <= offset) ++b;
      return b;
    } else {
      const std::size_t entry = lane.entry_after(offset);
      const auto after_bucket =
          std::upper_bound(lane.bucket_entries.begin(), lane.bucket_entries.end(), entry);
      return static_cast<std::size_t>(after_bucket - lane.bucket_entries.begin()) - 1;
    }
  }

  Partition partition_;
  int world_;
  std::uint64_t fingerprint_ = 0;
  Interval checked_{};              ///< alignment and size that `check_cuts` has seen last
  std::vector<std::size_t> loads_;  ///< per rank, for whole-tensor partitions
  std::vector<Lane> lanes_;
  std::vector<Place> places_;  ///< by parameter index
};

}  // namespace zero
