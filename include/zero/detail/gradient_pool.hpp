// SPDX-License-Identifier: Apache-2.0
/// @file
/// Memory of gradients between the moment that they are written and that in which they are reduced.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "zero/bucket_view.hpp"
#include "zero/detail/inspect.hpp"
#include "zero/detail/lane_room.hpp"
#include "zero/detail/units.hpp"
#include "zero/error.hpp"
#include "zero/fragment.hpp"
#include "zero/layout.hpp"
#include "zero/settings.hpp"
#include "zero/stage.hpp"

namespace zero::detail {

/// Bytes of now, and the most that they have been. Several threads count.
class PeakCounter {
 public:
  void add(std::size_t bytes) noexcept {
    const std::size_t sum = now_ += bytes;
    std::size_t most = peak_;
    while (sum > most && !peak_.compare_exchange_weak(most, sum)) {
    }
  }
  void subtract(std::size_t bytes) noexcept { now_ -= bytes; }
  void clear() noexcept { now_ = 0; }
  [[nodiscard]] std::size_t now() const noexcept { return now_; }
  [[nodiscard]] std::size_t peak() const noexcept { return peak_; }

 private:
  std::atomic<std::size_t> now_{0};
  std::atomic<std::size_t> peak_{0};
};

/// Counts what gradients take, and makes whoever needs more than there is wait, or refuses it. The
/// memory itself is `Lane::gradient_pages`.
template <class State>
class GradientPool {
  /// Parameters show where their gradients lie, so backward may add to what is there.
  static constexpr bool shows_gradients = State::View::gradients == Residency::arena;

 public:
  explicit GradientPool(State& state) : state_(state) {}

  void rebuild() {
    opened_.assign(state_.parameters.size(), 0);
    limit_ = limit_of_pool(state_.stage, *state_.layout, state_.parameters,
                           element_bytes(typename State::elements{}));
  }
  /// No gradient is there.
  void begin_round() { std::fill(opened_.begin(), opened_.end(), std::uint8_t{0}); }

  /// Makes room for a parameter's gradient, which is about to be written.
  /// @param fresh whether nothing has been written to it in this round
  /// @param wait_for_one waits until one more bucket has been let go of; false where none will be
  template <class F>
  void open(std::size_t leader, const char* verb, bool fresh, const F& wait_for_one) {
    if (opened_[leader] != 0) return;
    const ParameterInfo& info = state_.parameters[leader];
    take_room(info.elements * info.element_bytes, leader, verb, wait_for_one);
    opened_[leader] = 1;
    state_.for_each_lane([&](auto& lane) {
      if (lane.index != info.lane) return;
      const Interval buckets = state_.layout->buckets_of(leader);
      for (std::size_t b = buckets.begin; b < buckets.end; ++b) {
        if (fresh) require_unwritten(lane, b, verb);
        lane.gradient_pages->take(b, state_.layout->bucket(lane.index, b));
      }
    });
  }

  /// A bucket is about to be sent, for which what nobody has opened may need room, too. Returns
  /// what `close` is to be given. On the thread of reductions.
  template <class Lane>
  [[nodiscard]] std::size_t complete(Lane& lane, Interval whole) {
    std::size_t bytes = 0;
    for (const Fragment& f : state_.layout->fragments(lane.index, whole)) {
      const std::size_t size = f.elements * sizeof(typename Lane::element);
      bytes += size;
      if (opened_[f.parameter] == 0) bytes_.add(size);
    }
    return bytes;
  }
  /// It has been sent. On the thread of reductions.
  template <class Lane>
  void close(Lane& lane, std::size_t bucket, Interval whole, std::size_t bytes) {
    lane.gradient_pages->let_go(bucket, whole, shows_gradients);
    bytes_.subtract(bytes);
  }

  /// Of rounds that are not reduced.
  void close_all() noexcept {
    state_.for_each_lane([&](auto& lane) {
      for (std::size_t i = 0; i < opened_.size(); ++i) {
        if (opened_[i] == 0 || state_.parameters[i].lane != lane.index) continue;
        const Interval buckets = state_.layout->buckets_of(i);
        for (std::size_t b = buckets.begin; b < buckets.end; ++b) {
          lane.gradient_pages->let_go(b, state_.layout->bucket(lane.index, b), shows_gradients);
        }
      }
    });
    bytes_.clear();
  }

  [[nodiscard]] const PeakCounter& bytes() const noexcept { return bytes_; }

 private:
  template <class F>
  void take_room(std::size_t bytes, std::size_t leader, const char* verb, const F& wait_for_one) {
    const bool reduces = !state_.alone() && state_.settings.gradients == Gradients::local;
    while (reduces && bytes_.now() + bytes > limit_ && wait_for_one()) {
    }
    const std::size_t taken = bytes_.now();
    if (reduces && pool_bytes(state_.stage) != 0 && taken + bytes > limit_) {
      throw PoolExhausted(
          taken + bytes, limit_,
          std::string(verb) + ": the gradient of " + state_.name_of(leader) + " needs " +
              std::to_string(bytes) + " bytes, but of the pool's " + std::to_string(limit_) + " " +
              std::to_string(taken) +
              " hold gradients that can't be reduced yet: buckets go in one order, in the first "
              "step from the last parameter to the first. Make gradients in that order, or make "
              "pool_bytes at least " +
              std::to_string(taken + bytes) + " (or leave it out: the pool then grows as needed)");
    }
    bytes_.add(bytes);
  }

  /// Throws where a gradient in the bucket was written to since that was let go of: all of them are
  /// looked at, since from now on it is in use. Of those that were moved nobody can say.
  template <class Lane>
  void require_unwritten(Lane& lane, std::size_t bucket, const char* verb) {
    if (State::View::gradients == Residency::arena) return;
    const Interval whole = state_.layout->bucket(lane.index, bucket);
    for (const Fragment& f : state_.layout->fragments(lane.index, whole)) {
      const Interval part{f.lane_begin, f.lane_begin + f.elements};
      if (!lane.gradient_pages->written_since(bucket, part)) continue;
      throw UsageError(std::string(verb) + ": the gradient of " + state_.name_of(f.parameter) +
                       " was written after it had been marked and sent; lease it anew in each "
                       "backward, and keep no pointer to it");
    }
  }

  State& state_;
  std::vector<std::uint8_t> opened_{};  ///< by leader: whether its gradient is counted
  std::size_t limit_ = 0;
  PeakCounter bytes_{};
};

}  // namespace zero::detail
