// SPDX-License-Identifier: Apache-2.0
/// @file
/// One lane of a layout: what lies where in it, whatever the partition.
#pragma once

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <limits>
#include <string>
#include <vector>

#include "zero/error.hpp"
#include "zero/fragment.hpp"

namespace zero::detail {

/// A quantum that no cut meets.
inline constexpr std::size_t unsplittable = std::numeric_limits<std::size_t>::max();

/// A parameter that has a place.
struct LaneEntry {
  std::size_t offset = 0;
  std::size_t elements = 0;
  std::size_t parameter = 0;
  std::size_t quantum = 1;  ///< cuts lie on multiples of it from `offset`; or `unsplittable`
  int owner = 0;            ///< with a whole-tensor partition
  [[nodiscard]] constexpr std::size_t end() const noexcept { return offset + elements; }
};

/// A run of entries that shares buckets with nothing else.
struct LaneSegment {
  std::size_t begin = 0;
  std::size_t padded_end = 0;
  std::size_t first_bucket = 0;
  std::size_t bucket_count = 0;
  bool constrained = false;  ///< some cut may have to move
  [[nodiscard]] constexpr std::size_t end_bucket() const noexcept {
    return first_bucket + bucket_count;
  }
};

/// Filled by the layout, which knows the partition; here are the searches that need not know it.
struct LaneMap {
  std::size_t alignment = 1;
  std::size_t bucket_elements = 0;
  bool foreign = false;
  bool per_tensor = false;
  std::size_t elements = 0;
  std::size_t end = 0;                ///< where the next segment may begin
  std::vector<LaneEntry> entries;     ///< by offset; none is empty
  std::vector<LaneSegment> segments;  ///< by offset
  /// Whole-tensor partitions only: each bucket's first entry.
  std::vector<std::size_t> bucket_entries;

  [[nodiscard]] constexpr std::size_t buckets() const noexcept {
    return segments.empty() ? 0 : segments.back().end_bucket();
  }

  /// Throws `UsageError` where there is no such bucket.
  [[nodiscard]] constexpr const LaneSegment& segment_of_bucket(std::size_t bucket) const {
    if (bucket >= buckets()) {
      throw UsageError("layout: bucket " + std::to_string(bucket) + " does not exist");
    }
    const auto after =
        std::upper_bound(segments.begin(), segments.end(), bucket,
                         [](std::size_t b, const LaneSegment& s) { return b < s.first_bucket; });
    return *std::prev(after);
  }

  /// The last segment that begins at `offset` or below.
  [[nodiscard]] constexpr const LaneSegment& segment_at(std::size_t offset) const {
    const auto after =
        std::upper_bound(segments.begin(), segments.end(), offset,
                         [](std::size_t at, const LaneSegment& s) { return at < s.begin; });
    return *std::prev(after);
  }

  /// A cutting partition's bucket before its ends move to where they may lie.
  [[nodiscard]] constexpr Interval raw_bucket(const LaneSegment& segment,
                                              std::size_t bucket) const {
    const std::size_t begin = segment.begin + (bucket - segment.first_bucket) * bucket_elements;
    return {begin, std::min(begin + bucket_elements, segment.padded_end)};
  }

  /// The first entry that ends behind `at`.
  [[nodiscard]] constexpr std::size_t entry_after(std::size_t at) const {
    const auto found = std::partition_point(
        entries.begin(), entries.end(), [&](const LaneEntry& entry) { return entry.end() <= at; });
    return static_cast<std::size_t>(found - entries.begin());
  }

  /// Where a cut wished for at `at` may lie: the next allowed place below.
  [[nodiscard]] constexpr std::size_t allowed(std::size_t at) const {
    const std::size_t index = entry_after(at);
    if (index == entries.size()) return at;
    const LaneEntry& entry = entries[index];
    if (at <= entry.offset || entry.quantum == 1) return at;
    if (entry.quantum == unsplittable) return entry.offset;
    return at - (at - entry.offset) % entry.quantum;
  }

  /// Bytes that this value takes, its heap memory included.
  [[nodiscard]] constexpr std::size_t bytes() const noexcept {
    return sizeof(LaneMap) + entries.capacity() * sizeof(LaneEntry) +
           segments.capacity() * sizeof(LaneSegment) +
           bucket_entries.capacity() * sizeof(std::size_t);
  }
};

/// The fragments of an interval. The lane must outlive it.
class FragmentIterator {
 public:
  using value_type = Fragment;
  using difference_type = std::ptrdiff_t;
  constexpr FragmentIterator() = default;
  /// @param entry the first that ends behind `interval.begin`
  constexpr FragmentIterator(const LaneMap& lane, std::size_t entry, Interval interval)
      : lane_(&lane), entry_(entry), interval_(interval) {}
  [[nodiscard]] constexpr Fragment operator*() const {
    const LaneEntry& entry = lane_->entries[entry_];
    const std::size_t begin = std::max(entry.offset, interval_.begin);
    return {entry.parameter, begin - entry.offset, begin,
            std::min(entry.end(), interval_.end) - begin};
  }
  constexpr FragmentIterator& operator++() {
    ++entry_;
    return *this;
  }
  constexpr FragmentIterator operator++(int) {
    FragmentIterator before = *this;
    ++*this;
    return before;
  }
  friend constexpr bool operator==(const FragmentIterator& a, const FragmentIterator& b) {
    return a.entry_ == b.entry_ && a.lane_ == b.lane_;
  }
  friend constexpr bool operator==(const FragmentIterator& a, std::default_sentinel_t) {
    return a.lane_ == nullptr || a.entry_ == a.lane_->entries.size() ||
           a.lane_->entries[a.entry_].offset >= a.interval_.end;
  }

 private:
  const LaneMap* lane_ = nullptr;
  std::size_t entry_ = 0;
  Interval interval_{};
};

class FragmentRange {
 public:
  constexpr FragmentRange(const LaneMap& lane, Interval interval)
      : lane_(&lane), interval_(interval) {}
  [[nodiscard]] constexpr FragmentIterator begin() const {
    const std::size_t first =
        interval_.empty() ? lane_->entries.size() : lane_->entry_after(interval_.begin);
    return {*lane_, first, interval_};
  }
  [[nodiscard]] constexpr std::default_sentinel_t end() const { return {}; }

 private:
  const LaneMap* lane_;
  Interval interval_;
};

}  // namespace zero::detail
