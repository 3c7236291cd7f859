// SPDX-License-Identifier: Apache-2.0
/// @file
/// One lane's buckets on their way through any communicator: pack, reduce, gather, unpack.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>
#include <memory>
#include <memory_resource>
#include <optional>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include "zero/communicator.hpp"
#include "zero/detail/lane.hpp"
#include "zero/detail/lane_room.hpp"
#include "zero/detail/paged_lane.hpp"
#include "zero/detail/rounding.hpp"
#include "zero/detail/tensor_step.hpp"
#include "zero/detail/update_loop.hpp"
#include "zero/element.hpp"
#include "zero/layout.hpp"
#include "zero/memory.hpp"
#include "zero/rounding.hpp"

namespace zero::detail {

/// Buckets travel through a ring of staging buffers, started and finished in one order, so that
/// memory is a few buckets whatever the model. Nothing is packed where a bucket lies contiguously
/// in the caller's memory, nor gathered anywhere but in place where the lane has one base.
///
/// Where ranks are one of several groups, the sums of a group are then summed over all groups.
///
/// Sums are in the arithmetic type. Gradients that travel in 16 bits therefore do so all to all and
/// are summed here, in rank order: a reduction would round the sum, and a model that adds in 16
/// bits each partial sum.
template <class Lane, class Comm, class Partition, class Stage>
class BucketTraffic {
  using T = typename Lane::element;
  using A = typename Lane::arithmetic;
  using W = typename Lane::storage::wire;
  using Room = LaneRoom<typename Lane::storage, Stage, Partition>;
  static constexpr bool shards_state = Stage::shards_state;
  static constexpr bool sums_here = Room::sums_here;
  static constexpr bool rounds = Room::rounds;

 public:
  /// @param sent where what peers read is allocated
  /// @param memory for what they don't
  BucketTraffic(Lane& lane, const Layout<Partition>& layout, Comm& comm, Journey journey,
                bool poison, std::shared_ptr<std::pmr::memory_resource> sent,
                std::pmr::memory_resource* memory)
      : lane_(&lane),
        layout_(&layout),
        comm_(&comm),
        poison_(poison),
        sent_(std::move(sent)),
        memory_(memory),
        sum_begin_(layout.buckets(lane.index)) {
    std::size_t mine = 0;
    for (std::size_t b = 0; b < sum_begin_.size(); ++b) {
      sum_begin_[b] = shards_state ? mine : layout.bucket(lane.index, b).begin;
      mine += layout.slice(lane.index, b, comm.rank()).size();
    }
    const StagingRoom room =
        Room(layout, lane.index, comm.rank(), false).staging(journey, lane.base != nullptr);
    ring_.resize(room.flights);
    const auto ranks = static_cast<std::size_t>(comm.size());
    for (Flight& flight : ring_) {
      flight.buffer = HostArray<T>(room.buffer, sent_.get());
      flight.wire = HostArray<W>(room.wire, sent_.get());
      flight.received = HostArray<W>(room.received, memory);
      flight.counts.resize(ranks);
      if (sums_here) flight.own_counts.resize(ranks);
    }
    sources_.resize(sums_here ? ranks : 0);
  }
  BucketTraffic(const BucketTraffic&) = delete;
  BucketTraffic& operator=(const BucketTraffic&) = delete;

  /// Bytes of the staging buffers.
  [[nodiscard]] std::size_t staging_bytes() const noexcept {
    std::size_t sum = 0;
    for (const Flight& flight : ring_) {
      sum += flight.buffer.bytes() + flight.wire.bytes() + flight.received.bytes();
    }
    return sum + addend_.bytes();
  }

  /// Where a bucket's summed gradients start in `lane.reduced`: those of the own slice, or of the
  /// whole bucket without sharding.
  [[nodiscard]] std::size_t sum_begin(std::size_t bucket) const { return sum_begin_[bucket]; }

  /// From now on reductions may add to sums, which needs room. One bucket may be in flight.
  void prepare_to_add() {
    std::size_t largest = 0;
    for (std::size_t b = 0; b < sum_begin_.size(); ++b) {
      largest = std::max(largest, sums_of(b).size());
    }
    if (addend_.size() < largest) addend_ = HostArray<A>(largest, memory_);
  }

  /// Starts to sum a bucket's gradients. Waits for the oldest flight where all buffers are taken.
  /// @param adds whether to what is there
  void start_reduce(std::size_t bucket, bool adds = false) {
    const Interval whole = layout_->bucket(lane_->index, bucket);
    Flight& flight = take_off(Kind::reduce, bucket);
    flight.adds = adds;
    if (whole.empty()) return;
    if constexpr (sums_here) {
      start_all_to_all(bucket, flight, gradients_of(whole, flight));
    } else {
      start_reduction(bucket, flight, target_of(flight));
    }
  }

  /// Returns once the first `count` started reductions of this round are finished.
  void finish_reduces(std::size_t count) {
    while (reduces_landed_ < count) land_oldest();
  }

  /// Starts to fetch everybody's slice of a bucket into this rank's values.
  void start_gather(std::size_t bucket) {
    const Interval whole = layout_->bucket(lane_->index, bucket);
    Flight& flight = take_off(Kind::gather, bucket);
    if (whole.empty()) return;
    const Interval mine = layout_->slice(lane_->index, bucket, comm_->rank());
    T* const target = lane_->base != nullptr ? lane_->base + whole.begin : flight.buffer.data();
    const std::span<T> output(target, whole.size());
    std::span<T> input = output.subspan(mine.begin - whole.begin, mine.size());
    if (lane_->comes_and_goes(bucket)) {
      input = lane_->shard.span().subspan(lane_->shard_values[bucket], mine.size());
    } else if (lane_->base == nullptr) {
      if (poison_) poison_padding(whole, output);
      for (const Fragment& f : layout_->fragments(lane_->index, mine)) {
        std::memcpy(target + (f.lane_begin - whole.begin), lane_->values_at(f),
                    f.elements * sizeof(T));
      }
    }
    if (layout_->even(lane_->index, bucket)) {
      flight.all_gather.emplace(comm_->all_gather(std::span<const T>(input), output));
    } else {
      count_slices(bucket, flight);
      flight.all_gather_v.emplace(comm_->all_gather_v(std::span<const T>(input), output,
                                                      std::span<const std::size_t>(flight.counts)));
    }
  }

  /// Gives up what is on its way, and frees its memory for the peers' part.
  void abandon() noexcept {
    for (Flight& flight : ring_) {
      flight.all_to_all.reset();
      flight.all_to_all_v.reset();
      flight.all_reduce.reset();
      flight.reduce_scatter.reset();
      flight.reduce_scatter_v.reset();
      flight.all_gather.reset();
      flight.all_gather_v.reset();
    }
    oldest_ = in_flight_ = reduces_landed_ = 0;
  }

  /// Lands everything and forgets the round.
  void finish_all() {
    while (in_flight_ > 0) land_oldest();
    reduces_landed_ = 0;
  }

 private:
  enum class Kind { reduce, gather };

  struct Flight {
    // Requests come last: an unfinished one must be given up before its memory is.
    HostArray<T> buffer;
    HostArray<W> wire{};
    HostArray<W> received{};
    std::vector<std::size_t> counts;
    std::vector<std::size_t> own_counts{};
    Kind kind = Kind::reduce;
    std::size_t bucket = 0;
    bool adds = false;
    using In = std::span<const T>;
    using Out = std::span<T>;
    using Sent = std::span<const W>;
    using Received = std::span<W>;
    using Summed = std::span<A>;
    using Addends = std::span<const A>;
    using Counts = std::span<const std::size_t>;
    std::optional<decltype(std::declval<Comm&>().all_to_all(Sent{}, Received{}))> all_to_all;
    std::optional<decltype(std::declval<Comm&>().all_to_all_v(Sent{}, Counts{}, Received{},
                                                              Counts{}))>
        all_to_all_v;
    std::optional<decltype(std::declval<Comm&>().all_reduce(Summed{}, ReduceOp::sum))> all_reduce;
    std::optional<decltype(std::declval<Comm&>().reduce_scatter(Addends{}, Summed{},
                                                                ReduceOp::sum))>
        reduce_scatter;
    std::optional<decltype(std::declval<Comm&>().reduce_scatter_v(Addends{}, Summed{}, Counts{},
                                                                  ReduceOp::sum))>
        reduce_scatter_v;
    std::optional<decltype(std::declval<Comm&>().all_gather(In{}, Out{}))> all_gather;
    std::optional<decltype(std::declval<Comm&>().all_gather_v(In{}, Out{}, Counts{}))> all_gather_v;
  };

  /// In one piece, packed where they don't lie so.
  std::span<const W> gradients_of(Interval whole, Flight& flight) {
    if constexpr (rounds) {
      const std::span<W> sent = flight.wire.span().first(whole.size());
      round_gradients(whole, sent);
      return sent;
    } else {
      const std::span<const T> there = contiguous_gradients(whole);
      if (!there.empty()) return there;
      const std::span<T> staged =
          lane_->gradient_pages == nullptr
              ? flight.buffer.span().first(whole.size())
              : std::span<T>(lane_->gradient_pages->data() + whole.begin, whole.size());
      pack_gradients(whole, staged);
      return staged;
    }
  }

  /// Where a reduction leaves what it sums.
  [[nodiscard]] std::span<A> target_of(const Flight& flight) {
    const std::span<A> sums = sums_of(flight.bucket);
    return flight.adds ? addend_.span().first(sums.size()) : sums;
  }

  void start_reduction(std::size_t bucket, Flight& flight, std::span<A> sums) {
    const Interval whole = layout_->bucket(lane_->index, bucket);
    const Interval mine = layout_->slice(lane_->index, bucket, comm_->rank());
    if (!shards_state) {
      pack_gradients(whole, sums.first(whole.size()));
      flight.all_reduce.emplace(comm_->all_reduce(sums.first(whole.size()), ReduceOp::sum));
      return;
    }
    const std::span<const A> input = gradients_of(whole, flight);
    if (layout_->even(lane_->index, bucket)) {
      flight.reduce_scatter.emplace(
          comm_->reduce_scatter(input, sums.first(mine.size()), ReduceOp::sum));
    } else {
      count_slices(bucket, flight);
      flight.reduce_scatter_v.emplace(
          comm_->reduce_scatter_v(input, sums.first(mine.size()),
                                  std::span<const std::size_t>(flight.counts), ReduceOp::sum));
    }
  }

  /// Everybody's part of this rank's slice.
  void start_all_to_all(std::size_t bucket, Flight& flight, std::span<const W> input) {
    const std::size_t mine = layout_->slice(lane_->index, bucket, comm_->rank()).size();
    const std::span<W> output =
        flight.received.span().first(mine * static_cast<std::size_t>(comm_->size()));
    if (layout_->even(lane_->index, bucket)) {
      flight.all_to_all.emplace(comm_->all_to_all(input, output));
    } else {
      count_slices(bucket, flight);
      std::fill(flight.own_counts.begin(), flight.own_counts.end(), mine);
      flight.all_to_all_v.emplace(
          comm_->all_to_all_v(input, std::span<const std::size_t>(flight.counts), output,
                              std::span<const std::size_t>(flight.own_counts)));
    }
  }

  /// Sums what an all-to-all brought; without sharding everybody gets everybody's sums.
  void sum_received(Flight& flight) {
    const Interval whole = layout_->bucket(lane_->index, flight.bucket);
    const Interval mine = layout_->slice(lane_->index, flight.bucket, comm_->rank());
    const std::span<A> sums = target_of(flight);
    const std::span<A> own =
        shards_state ? sums : sums.subspan(mine.begin - whole.begin, mine.size());
    for (std::size_t r = 0; r < sources_.size(); ++r) {
      sources_[r] = flight.received.data() + r * mine.size();
    }
    sum_sources(GradientSum<W>{sources_, 1}, 0, own.size(), own.data());
    if (shards_state) return;
    count_slices(flight.bucket, flight);
    comm_->all_gather_v(std::span<const A>(own), sums, std::span<const std::size_t>(flight.counts))
        .wait();
  }

  /// What is kept of a bucket's sums.
  [[nodiscard]] std::span<A> sums_of(std::size_t bucket) {
    const Interval kept = shards_state ? layout_->slice(lane_->index, bucket, comm_->rank())
                                       : layout_->bucket(lane_->index, bucket);
    return lane_->reduced.span().subspan(sum_begin_[bucket], kept.size());
  }

  /// The group's sums become all groups'. All ranks land buckets in the same order, so that waiting
  /// here for the other groups' ranks, who wait for theirs, ends.
  void sum_over_replicas(std::span<A> sums) {
    if (sums.empty() || comm_->replicas().size() == 1) return;
    comm_->replicas().all_reduce(sums, ReduceOp::sum).wait();
  }

  /// What has been summed apart joins the sums of before.
  void add(std::size_t bucket) {
    const std::span<A> sums = sums_of(bucket);
    const std::array<const A*, 2> both{sums.data(), addend_.data()};
    sum_sources(GradientSum<A>{both, 1}, 0, sums.size(), sums.data());
  }

  template <class R>
  static void finish(std::optional<R>& request) {
    if (!request) return;
    request->wait();
    request.reset();
  }

  Flight& take_off(Kind kind, std::size_t bucket) {
    if (in_flight_ == ring_.size()) land_oldest();
    Flight& flight = ring_[(oldest_ + in_flight_) % ring_.size()];
    ++in_flight_;
    flight.kind = kind;
    flight.bucket = bucket;
    return flight;
  }

  void land_oldest() {
    Flight& flight = ring_[oldest_];
    finish(flight.all_to_all);
    finish(flight.all_to_all_v);
    finish(flight.all_reduce);
    finish(flight.reduce_scatter);
    finish(flight.reduce_scatter_v);
    finish(flight.all_gather);
    finish(flight.all_gather_v);
    if (flight.kind == Kind::reduce) {
      ++reduces_landed_;
      if constexpr (sums_here) {
        if (!layout_->bucket(lane_->index, flight.bucket).empty()) sum_received(flight);
      }
      if constexpr (ReplicatedCommunicator<Comm>) sum_over_replicas(target_of(flight));
      if (flight.adds) add(flight.bucket);
    }
    if (flight.kind == Kind::gather && lane_->base == nullptr) unpack(flight);
    oldest_ = (oldest_ + 1) % ring_.size();
    --in_flight_;
  }

  void unpack(const Flight& flight) {
    const Interval whole = layout_->bucket(lane_->index, flight.bucket);
    const Interval mine = layout_->slice(lane_->index, flight.bucket, comm_->rank());
    for (const Interval others :
         {Interval{whole.begin, mine.begin}, Interval{mine.end, whole.end}}) {
      for (const Fragment& f : layout_->fragments(lane_->index, others)) {
        std::memcpy(lane_->values_at(f), flight.buffer.data() + (f.lane_begin - whole.begin),
                    f.elements * sizeof(T));
      }
    }
  }

  /// The bucket's gradients where they lie one behind the other in the caller's memory; or empty.
  [[nodiscard]] std::span<const T> contiguous_gradients(Interval whole) const {
    const T* first = nullptr;
    std::size_t covered = 0;
    for (const Fragment& f : layout_->fragments(lane_->index, whole)) {
      const T* at = lane_->gradient_at(f);
      if (at == nullptr || (covered != 0 && at != first + covered)) return {};
      if (covered == 0) first = at;
      covered += f.elements;
    }
    if (covered != whole.size()) return {};
    return {first, covered};
  }

  /// Absent gradients are zeros to their peers.
  void pack_gradients(Interval whole, std::span<T> staged) const {
    if (poison_) poison_padding(whole, staged);
    for (const Fragment& f : layout_->fragments(lane_->index, whole)) {
      T* const to = staged.data() + (f.lane_begin - whole.begin);
      if (const T* from = lane_->gradient_at(f)) {
        if (from != to) std::memcpy(to, from, f.elements * sizeof(T));
      } else {
        std::fill_n(to, f.elements, zero_of<T>());
      }
    }
  }

  /// The same in the type that travels, rounded to nearest.
  void round_gradients(Interval whole, std::span<W> sent) const {
    if (poison_) poison_padding(whole, sent);
    for (const Fragment& f : layout_->fragments(lane_->index, whole)) {
      W* const to = sent.data() + (f.lane_begin - whole.begin);
      if (const T* from = lane_->gradient_at(f)) {
        if constexpr (std::is_same_v<T, A>) {
          round_array<Rounding::nearest, 0>(std::span<const A>(from, f.elements), to, NoiseKey{});
        }
      } else {
        std::fill_n(to, f.elements, zero_of<W>());
      }
    }
  }

  /// What lies between a bucket's fragments: gradients may be in their place already.
  template <class U>
  void poison_padding(Interval whole, std::span<U> bucket) const {
    std::size_t at = whole.begin;
    const auto poison_up_to = [&](std::size_t end) {
      std::fill(bucket.begin() + static_cast<std::ptrdiff_t>(at - whole.begin),
                bucket.begin() + static_cast<std::ptrdiff_t>(end - whole.begin), poison_of<U>());
    };
    for (const Fragment& f : layout_->fragments(lane_->index, whole)) {
      poison_up_to(f.lane_begin);
      at = f.lane_begin + f.elements;
    }
    poison_up_to(whole.end);
  }

  void count_slices(std::size_t bucket, Flight& flight) const {
    for (int r = 0; r < comm_->size(); ++r) {
      flight.counts[static_cast<std::size_t>(r)] = layout_->slice(lane_->index, bucket, r).size();
    }
  }

  Lane* lane_;
  const Layout<Partition>* layout_;
  Comm* comm_;
  bool poison_;
  std::shared_ptr<std::pmr::memory_resource> sent_;
  std::pmr::memory_resource* memory_;
  std::vector<std::size_t> sum_begin_;
  HostArray<A> addend_{};  ///< what is summed to be added; empty until somebody adds
  std::vector<Flight> ring_;
  std::vector<const W*> sources_{};
  std::size_t oldest_ = 0;
  std::size_t in_flight_ = 0;
  std::size_t reduces_landed_ = 0;
};

}  // namespace zero::detail
