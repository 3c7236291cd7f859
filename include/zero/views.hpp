// SPDX-License-Identifier: Apache-2.0
/// @file
/// A layout as ranges: `layout | views::buckets`, `layout | views::shard(rank)`, and of either
/// `| views::fragments`. They compose with range-v3's own views. Needs range-v3, which nvcc cannot
/// compile: for host code alone, and no part of `zero/zero.hpp`. CMake target: `zero::range_v3`.
#pragma once

#include <concepts>
#include <cstddef>
#include <iterator>
#include <range/v3/range/access.hpp>
#include <range/v3/range/concepts.hpp>
#include <range/v3/range/traits.hpp>
#include <range/v3/view/all.hpp>
#include <range/v3/view/facade.hpp>
#include <range/v3/view/view.hpp>
#include <string>
#include <utility>

#include "zero/error.hpp"
#include "zero/fragment.hpp"
#include "zero/layout.hpp"
#include "zero/partition.hpp"

/// All views are lazy: composing them searches nothing and allocates nothing, and neither does
/// iterating. They are forward ranges of values, and point into the layout, which must outlive
/// them; so a temporary layout is refused.
///
/// As with any range of values, a member pointer is fine as an algorithm's projection, but in
/// `transform` it would refer into a value that is gone: give that a lambda.
namespace zero::views {

/// One rank's slice of one bucket. It may hold padding.
template <PartitionPolicy Partition>
struct Slice {
  const Layout<Partition>* layout = nullptr;
  std::size_t lane = 0;
  std::size_t bucket = 0;  ///< index in the lane
  int rank = 0;
  Interval interval{};  ///< of the lane
  friend constexpr bool operator==(const Slice&, const Slice&) = default;
};

/// One bucket, padding included.
template <PartitionPolicy Partition>
struct Bucket {
  const Layout<Partition>* layout = nullptr;
  std::size_t lane = 0;
  std::size_t bucket = 0;  ///< index in the lane
  Interval interval{};     ///< of the lane
  friend constexpr bool operator==(const Bucket&, const Bucket&) = default;

  /// What `rank`, which must be in the world, owns of it. It may be empty.
  [[nodiscard]] constexpr Slice<Partition> slice(int rank) const {
    return {layout, lane, bucket, rank, layout->slice(lane, bucket, rank)};
  }
};

/// A fragment, and where it was met.
struct LaneFragment : Fragment {
  std::size_t lane = 0;
  std::size_t bucket = 0;  ///< index in the lane
  friend constexpr bool operator==(const LaneFragment&, const LaneFragment&) = default;
};

/// What `fragments` takes apart: `Bucket`, `Slice`, or a struct of a user's that has as much.
template <class T>
concept LaneRun = requires(const T& run) {
  { run.layout->fragments(run.lane, run.interval) } -> std::same_as<detail::FragmentRange>;
  { run.bucket } -> std::convertible_to<std::size_t>;
};

/// The buckets of some lanes, in order.
template <PartitionPolicy Partition>
class BucketsView : public ranges::view_facade<BucketsView<Partition>, ranges::finite> {
 public:
  BucketsView() = default;
  constexpr BucketsView(const Layout<Partition>& layout, std::size_t first_lane,
                        std::size_t end_lane)
      : layout_(&layout), first_lane_(first_lane), end_lane_(end_lane) {}

 private:
  friend ranges::range_access;

  class Cursor {
   public:
    Cursor() = default;
    constexpr Cursor(const Layout<Partition>* layout, std::size_t lane, std::size_t end_lane)
        : layout_(layout), lane_(lane), end_lane_(end_lane) {
      skip_finished_lanes();
    }
    [[nodiscard]] constexpr Bucket<Partition> read() const {
      return {layout_, lane_, bucket_, layout_->bucket(lane_, bucket_)};
    }
    constexpr void next() {
      ++bucket_;
      skip_finished_lanes();
    }
    [[nodiscard]] constexpr bool equal(const Cursor& other) const {
      return lane_ == other.lane_ && bucket_ == other.bucket_;
    }
    [[nodiscard]] constexpr bool equal(ranges::default_sentinel_t) const {
      return lane_ == end_lane_;
    }

   private:
    constexpr void skip_finished_lanes() {
      while (lane_ < end_lane_ && bucket_ == layout_->buckets(lane_)) {
        ++lane_;
        bucket_ = 0;
      }
    }
    const Layout<Partition>* layout_ = nullptr;
    std::size_t lane_ = 0;
    std::size_t end_lane_ = 0;
    std::size_t bucket_ = 0;
  };

  [[nodiscard]] constexpr Cursor begin_cursor() const { return {layout_, first_lane_, end_lane_}; }
  [[nodiscard]] constexpr ranges::default_sentinel_t end_cursor() const { return {}; }

  const Layout<Partition>* layout_ = nullptr;
  std::size_t first_lane_ = 0;
  std::size_t end_lane_ = 0;
};

/// The slices of one rank that aren't empty, in order.
template <PartitionPolicy Partition>
class ShardView : public ranges::view_facade<ShardView<Partition>, ranges::finite> {
 public:
  ShardView() = default;
  constexpr ShardView(const Layout<Partition>& layout, int rank) : layout_(&layout), rank_(rank) {}

 private:
  friend ranges::range_access;

  // Written out because range-v3's filter caches its begin, so that a const view is no range.
  class Cursor {
   public:
    Cursor() = default;
    constexpr Cursor(const Layout<Partition>* layout, int rank) : layout_(layout), rank_(rank) {
      find_slice();
    }
    [[nodiscard]] constexpr Slice<Partition> read() const {
      return {layout_, lane_, bucket_, rank_, interval_};
    }
    constexpr void next() {
      ++bucket_;
      find_slice();
    }
    [[nodiscard]] constexpr bool equal(const Cursor& other) const {
      return lane_ == other.lane_ && bucket_ == other.bucket_;
    }
    [[nodiscard]] constexpr bool equal(ranges::default_sentinel_t) const {
      return layout_ == nullptr || lane_ == layout_->lanes();
    }

   private:
    /// From this bucket on.
    constexpr void find_slice() {
      if (layout_ == nullptr) return;
      for (; lane_ < layout_->lanes(); ++lane_, bucket_ = 0) {
        for (; bucket_ < layout_->buckets(lane_); ++bucket_) {
          interval_ = layout_->slice(lane_, bucket_, rank_);
          if (!interval_.empty()) return;
        }
      }
    }
    const Layout<Partition>* layout_ = nullptr;
    int rank_ = 0;
    std::size_t lane_ = 0;
    std::size_t bucket_ = 0;
    Interval interval_{};
  };

  [[nodiscard]] constexpr Cursor begin_cursor() const { return {layout_, rank_}; }
  [[nodiscard]] constexpr ranges::default_sentinel_t end_cursor() const { return {}; }

  const Layout<Partition>* layout_ = nullptr;
  int rank_ = 0;
};

/// The fragments of all runs of `Base`, a view, one run after the other; padding is left out.
template <class Base>
class FragmentsView : public ranges::view_facade<FragmentsView<Base>, ranges::finite> {
  static_assert(ranges::forward_range<Base> && LaneRun<ranges::range_value_t<Base>>);

 public:
  FragmentsView() = default;
  constexpr explicit FragmentsView(Base base) : base_(std::move(base)) {}

 private:
  friend ranges::range_access;

  template <class Range>
  class Cursor {
   public:
    Cursor() = default;
    constexpr explicit Cursor(Range& runs) : run_(ranges::begin(runs)), last_(ranges::end(runs)) {
      enter_run();
      skip_finished_runs();
    }
    [[nodiscard]] constexpr LaneFragment read() const { return {*fragment_, lane_, bucket_}; }
    constexpr void next() {
      ++fragment_;
      skip_finished_runs();
    }
    [[nodiscard]] constexpr bool equal(const Cursor& other) const {
      return run_ == other.run_ && fragment_ == other.fragment_;
    }
    [[nodiscard]] constexpr bool equal(ranges::default_sentinel_t) const { return run_ == last_; }

   private:
    constexpr void enter_run() {
      if (run_ == last_) return;
      const ranges::range_value_t<Range> run = *run_;  // once: views below may compute it
      lane_ = run.lane;
      bucket_ = run.bucket;
      fragment_ = run.layout->fragments(run.lane, run.interval).begin();
    }
    constexpr void skip_finished_runs() {
      while (run_ != last_ && fragment_ == std::default_sentinel) {
        ++run_;
        enter_run();
      }
    }
    ranges::iterator_t<Range> run_{};
    ranges::sentinel_t<Range> last_{};
    std::size_t lane_ = 0;
    std::size_t bucket_ = 0;
    detail::FragmentIterator fragment_{};
  };

  // Some views (filter) are ranges only while they aren't const.
  [[nodiscard]] constexpr auto begin_cursor()
    requires(!ranges::forward_range<const Base>)
  {
    return Cursor<Base>(base_);
  }
  [[nodiscard]] constexpr auto begin_cursor() const
    requires ranges::forward_range<const Base>
  {
    return Cursor<const Base>(base_);
  }
  [[nodiscard]] constexpr ranges::default_sentinel_t end_cursor() const { return {}; }

  Base base_{};
};

}  // namespace zero::views

namespace zero::detail {

/// Throws `UsageError` naming the rank and the world.
template <PartitionPolicy Partition>
constexpr void check_rank(const Layout<Partition>& layout, int rank) {
  if (rank >= 0 && rank < layout.world()) return;
  throw UsageError("views: rank " + std::to_string(rank) + " is outside the world of " +
                   std::to_string(layout.world()) + " (ranks count from 0)");
}

// Compilers show the deleted overloads below, so their parameter's name says what is wrong.

struct BucketsOfLane {
  std::size_t lane;

  template <class Partition>
  friend constexpr views::BucketsView<Partition> operator|(const Layout<Partition>& layout,
                                                           BucketsOfLane wanted) {
    if (wanted.lane >= layout.lanes()) {
      throw UsageError("views: lane " + std::to_string(wanted.lane) +
                       " does not exist: the layout has " + std::to_string(layout.lanes()) +
                       " lanes");
    }
    return {layout, wanted.lane, wanted.lane + 1};
  }
  template <class Partition>
  friend void operator|(const Layout<Partition>&& must_outlive_its_views, BucketsOfLane) = delete;
};

struct BucketsOfAllLanes {
  [[nodiscard]] constexpr BucketsOfLane operator()(std::size_t lane) const { return {lane}; }

  template <class Partition>
  friend constexpr views::BucketsView<Partition> operator|(const Layout<Partition>& layout,
                                                           BucketsOfAllLanes) {
    return {layout, 0, layout.lanes()};
  }
  template <class Partition>
  friend void operator|(const Layout<Partition>&& must_outlive_its_views,
                        BucketsOfAllLanes) = delete;
};

struct ShardOfRank {
  int rank;

  template <class Partition>
  friend constexpr views::ShardView<Partition> operator|(const Layout<Partition>& layout,
                                                         ShardOfRank wanted) {
    check_rank(layout, wanted.rank);
    return {layout, wanted.rank};
  }
  template <class Partition>
  friend void operator|(const Layout<Partition>&& must_outlive_its_views, ShardOfRank) = delete;
};

struct FragmentsOfRuns {
  template <ranges::viewable_range Runs>
    requires ranges::forward_range<Runs> && views::LaneRun<ranges::range_value_t<Runs>>
  [[nodiscard]] constexpr auto operator()(Runs&& runs) const {
    return views::FragmentsView<ranges::views::all_t<Runs>>(
        ranges::views::all(std::forward<Runs>(runs)));
  }
};

}  // namespace zero::detail

namespace zero::views {

/// `layout | buckets`: every `Bucket`, lane after lane. `layout | buckets(lane)`: one lane's;
/// throws `UsageError` where there is no such lane.
inline constexpr detail::BucketsOfAllLanes buckets{};

/// `layout | shard(rank)`: each `Slice` that the rank owns and that isn't empty, lane after lane.
/// Piping a layout in throws `UsageError` for a rank outside the world.
[[nodiscard]] constexpr detail::ShardOfRank shard(int rank) { return {rank}; }

/// `runs | fragments`: each `LaneFragment` of a forward range of `Bucket`s or `Slice`s.
inline constexpr ranges::views::view_closure<detail::FragmentsOfRuns> fragments{};

}  // namespace zero::views

/// @cond
// Iterators point into the layout, so they may outlive the view.
template <class Partition>
inline constexpr bool ranges::enable_borrowed_range<zero::views::BucketsView<Partition>> = true;
template <class Partition>
inline constexpr bool ranges::enable_borrowed_range<zero::views::ShardView<Partition>> = true;
template <class Base>
inline constexpr bool ranges::enable_borrowed_range<zero::views::FragmentsView<Base>> =
    ranges::enable_borrowed_range<Base>;
/// @endcond
