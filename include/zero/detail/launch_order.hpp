// SPDX-License-Identifier: Apache-2.0
/// @file
/// In which order buckets are reduced, and whose turn has come.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <numeric>
#include <span>
#include <vector>

#include "zero/fragment.hpp"
#include "zero/layout.hpp"

namespace zero::detail {

/// A bucket of some lane.
struct Launch {
  std::size_t lane;
  std::size_t bucket;
};

/// One order, the same on all ranks, whatever the order in which their gradients become ready:
/// launching on completion would deadlock. Last parameters first until another order is adopted.
class LaunchOrder {
 public:
  /// Where in the order that buckets were completed in one came; or never.
  using Position = std::uint32_t;
  static constexpr Position never = std::numeric_limits<Position>::max();

  /// `alone(i)` says whether parameter i has a place of its own.
  template <class Partition, class F>
  void rebuild(const Layout<Partition>& layout, const F& alone) {
    launches_.clear();
    waits_for_.clear();
    first_of_lane_.clear();
    std::vector<std::size_t> last_parameter;
    for (std::size_t lane = 0; lane < layout.lanes(); ++lane) {
      first_of_lane_.push_back(launches_.size());
      for (std::size_t b = 0; b < layout.buckets(lane); ++b) {
        std::size_t last = 0;
        for (const Fragment& f : layout.fragments(lane, layout.bucket(lane, b))) {
          last = std::max(last, f.parameter);
        }
        launches_.push_back({lane, b});
        last_parameter.push_back(last);
      }
    }
    waits_for_.resize(launches_.size(), 0);
    for (std::size_t i = 0; i < layout.parameters(); ++i) {
      if (!alone(i)) continue;
      for_each_bucket_of(layout, i, [&](std::size_t index) { ++waits_for_[index]; });
    }
    // Backward makes the last registered gradients first.
    order_.resize(launches_.size());
    std::iota(order_.begin(), order_.end(), std::size_t{0});
    std::sort(order_.begin(), order_.end(), [&](std::size_t a, std::size_t b) {
      return last_parameter[a] != last_parameter[b] ? last_parameter[a] > last_parameter[b] : a > b;
    });
    positions_.resize(launches_.size());
    begin_round();
  }

  /// No gradient is there.
  void begin_round() {
    waiting_ = waits_for_;
    next_ = 0;
    completed_ = 0;
    std::fill(positions_.begin(), positions_.end(), never);
  }

  /// A parameter's place has its whole gradient.
  template <class Partition>
  void complete(const Layout<Partition>& layout, std::size_t leader) {
    for_each_bucket_of(layout, leader, [&](std::size_t index) {
      if (--waiting_[index] == 0) positions_[index] = completed_++;
    });
  }

  /// Whether the next bucket's gradients are all there.
  [[nodiscard]] bool turn_has_come() const { return any_left() && waiting_[order_[next_]] == 0; }
  [[nodiscard]] bool any_left() const { return next_ < order_.size(); }
  /// Goes on to the next bucket.
  Launch take_next() { return launches_[order_[next_++]]; }

  [[nodiscard]] std::size_t size() const { return order_.size(); }
  [[nodiscard]] const Launch& operator[](std::size_t k) const { return launches_[order_[k]]; }

  /// In which order this rank's buckets were completed in this round: by bucket, not by launch.
  [[nodiscard]] std::span<const Position> positions() const { return positions_; }

  /// From the next round on buckets come in the order in which ranks, on average, completed them;
  /// what is never completed before a step comes last, as before. `positions` are all ranks', one
  /// after the other: the same on all ranks.
  void adopt(std::span<const Position> positions) {
    std::vector<std::uint64_t> sums(launches_.size(), 0);
    for (std::size_t k = 0; k < positions.size(); ++k) sums[k % sums.size()] += positions[k];
    std::stable_sort(order_.begin(), order_.end(),
                     [&](std::size_t a, std::size_t b) { return sums[a] < sums[b]; });
  }

 private:
  template <class Partition, class F>
  void for_each_bucket_of(const Layout<Partition>& layout, std::size_t parameter, F&& f) {
    const Interval buckets = layout.buckets_of(parameter);
    const std::size_t first = first_of_lane_[layout.place(parameter).lane];
    for (std::size_t b = buckets.begin; b < buckets.end; ++b) f(first + b);
  }

  std::vector<Launch> launches_{};            ///< lane after lane
  std::vector<std::size_t> first_of_lane_{};  ///< where a lane's begin
  std::vector<std::size_t> order_{};          ///< of `launches_`
  std::vector<std::size_t> waits_for_{};      ///< by bucket: how many parameters it has
  std::vector<std::size_t> waiting_{};        ///< by bucket: parameters to come
  std::vector<Position> positions_{};
  Position completed_ = 0;
  std::size_t next_ = 0;
};

}  // namespace zero::detail
