// SPDX-License-Identifier: Apache-2.0
/// @file
/// One lane's buckets on their way between ranks that work in CUDA memory.
#pragma once

#include <algorithm>
#include <cstddef>
#include <memory_resource>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include "zero/communicator.hpp"
#include "zero/cuda/detail/copy.cuh"
#include "zero/cuda/detail/fragment_table.cuh"
#include "zero/cuda/detail/reduce.cuh"
#include "zero/cuda/memory.hpp"
#include "zero/cuda/stream.hpp"
#include "zero/detail/lane.hpp"
#include "zero/detail/lane_room.hpp"
#include "zero/element.hpp"
#include "zero/layout.hpp"

namespace zero::cuda::detail {

/// @param counts becomes every rank's part of a bucket, in elements
template <class Partition>
void count_slices(const Layout<Partition>& layout, std::size_t lane, std::size_t bucket,
                  std::vector<std::size_t>& counts) {
  for (std::size_t r = 0; r < counts.size(); ++r) {
    counts[r] = layout.slice(lane, bucket, static_cast<int>(r)).size();
  }
}

/// Fetches everybody's slice of a bucket into `output`, of which `input`, this rank's, may be its
/// part.
/// @param counts room for one number a rank
template <class Partition, class Comm, class T>
void gather_slices(const Layout<Partition>& layout, std::size_t lane, std::size_t bucket,
                   Comm& comm, std::span<const T> input, std::span<T> output,
                   std::vector<std::size_t>& counts) {
  if (layout.even(lane, bucket)) {
    comm.all_gather(input, output).enqueue();
    return;
  }
  count_slices(layout, lane, bucket, counts);
  comm.all_gather_v(input, output, std::span<const std::size_t>(counts)).enqueue();
}

/// All of it runs in the communicator's stream, one bucket after the other: one buffer of each kind
/// is enough, and nobody waits but the stream. As `zero::detail::BucketTraffic`, sums are in the
/// arithmetic type, and nothing is packed where a bucket lies contiguously.
template <class Lane, class Comm, class Partition, class Stage>
class DeviceTraffic {
  using T = typename Lane::element;
  using A = typename Lane::arithmetic;
  using W = typename Lane::storage::wire;
  using Room = zero::detail::LaneRoom<typename Lane::storage, Stage, Partition>;
  static constexpr bool shards_state = Stage::shards_state;
  static constexpr bool sums_here = Room::sums_here;
  static constexpr bool rounds = Room::rounds;

 public:
  /// @param poison fills staging buffers with NaN
  DeviceTraffic(Lane& lane, const Layout<Partition>& layout, Comm& comm, bool poison,
                std::pmr::memory_resource* memory)
      : lane_(&lane),
        layout_(&layout),
        comm_(&comm),
        counts_(static_cast<std::size_t>(comm.size())),
        own_counts_(counts_.size()),
        sum_begin_(layout.buckets(lane.index)) {
    std::size_t mine = 0, largest = 0, largest_slice = 0;
    std::vector<std::vector<DeviceFragment<T>>> all(sum_begin_.size());
    std::vector<std::vector<DeviceFragment<T>>> own(sum_begin_.size());
    for (std::size_t b = 0; b < sum_begin_.size(); ++b) {
      const Interval whole = layout.bucket(lane.index, b);
      const Interval slice = layout.slice(lane.index, b, comm.rank());
      sum_begin_[b] = shards_state ? mine : whole.begin;
      mine += slice.size();
      largest = std::max(largest, whole.size());
      largest_slice = std::max(largest_slice, slice.size());
      all[b] = fragments_of(b, whole);
      if (lane.bucket_in_place(b, whole) == nullptr && shards_state && !Stage::shards_values)
        own[b] = fragments_of(b, slice);
    }
    all_ = FragmentTable<T>(all, memory);
    own_ = FragmentTable<T>(own, memory);
    // In arenas too: what is absent leaves a gap that is packed as zeros.
    if (shards_state || sums_here) buffer_ = DeviceArray<T>(largest, memory);
    if (rounds) wire_ = DeviceArray<W>(largest, memory);
    if (sums_here) received_ = DeviceArray<W>(largest_slice * counts_.size(), memory);
    if (!poison) return;
    const auto fill = [](auto& array) {
      using U = typename std::remove_cvref_t<decltype(array)>::value_type;
      zero::detail::Space<MemorySpace::cuda>::write(
          array.data(), array.size(), [](std::size_t, std::span<U> part) {
            std::fill(part.begin(), part.end(), zero::detail::poison_of<U>());
          });
    };
    fill(buffer_);
    fill(wire_);
  }
  DeviceTraffic(const DeviceTraffic&) = delete;
  DeviceTraffic& operator=(const DeviceTraffic&) = delete;

  [[nodiscard]] std::size_t staging_bytes() const {
    return buffer_.bytes() + addend_.bytes() + wire_.bytes() + received_.bytes() + all_.bytes() +
           own_.bytes();
  }

  /// Where a bucket's summed gradients start in `lane.reduced`: those of the own slice, or of the
  /// whole bucket without sharding.
  [[nodiscard]] std::size_t sum_begin(std::size_t bucket) const { return sum_begin_[bucket]; }

  /// As `FragmentTable::upload_always`.
  void upload_always() { all_.upload_always(); }

  /// From now on reductions may add to sums, which needs room.
  void prepare_to_add(std::pmr::memory_resource* memory) {
    std::size_t largest = 0;
    for (std::size_t b = 0; b < sum_begin_.size(); ++b) largest = std::max(largest, kept(b).size());
    if (addend_.size() < largest) addend_ = DeviceArray<A>(largest, memory);
  }

  /// Sums a bucket's gradients, which are there in stream order.
  /// @param adds whether to the sums of before
  void reduce(std::size_t bucket, bool adds = false) {
    const Interval whole = layout_->bucket(lane_->index, bucket);
    if (whole.empty()) return;
    A* const sums = lane_->reduced.data() + sum_begin_[bucket];
    sum(bucket, whole, adds ? addend_.data() : sums);
    if (!adds) return;
    cuda::detail::reduce<A, A>(
        2, [&](std::size_t k) -> const A* { return k == 0 ? sums : addend_.data(); },
        kept(bucket).size(), sums, ReduceOp::sum, comm_->stream());
  }

  /// Fetches everybody's slice of a bucket into this rank's values, unless the step is skipped.
  /// @param step in device memory
  void gather(std::size_t bucket, const StepState* step) {
    const Interval whole = layout_->bucket(lane_->index, bucket);
    if (whole.empty()) return;
    const Interval mine = layout_->slice(lane_->index, bucket, comm_->rank());
    T* const in_place = lane_->bucket_in_place(bucket, whole);
    const std::span<T> output(in_place != nullptr ? in_place : buffer_.data(), whole.size());
    const Interval one{bucket, bucket + 1};
    if (in_place == nullptr) {
      pack_values(copy_task(own_.of(one), buffer_.data(), step), comm_->stream());
    }
    gather_slices(*layout_, lane_->index, bucket, *comm_,
                  std::span<const T>(output.subspan(mine.begin - whole.begin, mine.size())), output,
                  counts_);
    if (in_place == nullptr) {
      unpack_values(copy_task(all_.of(one), buffer_.data(), step), comm_->stream());
    }
  }

 private:
  /// What is kept of a bucket's sums.
  [[nodiscard]] Interval kept(std::size_t bucket) const {
    return shards_state ? layout_->slice(lane_->index, bucket, comm_->rank())
                        : layout_->bucket(lane_->index, bucket);
  }

  void sum(std::size_t bucket, Interval whole, A* sums) {
    const Interval mine = layout_->slice(lane_->index, bucket, comm_->rank());
    if (comm_->size() == 1) {  // not even rounded, since it doesn't travel
      const Interval one{bucket, bucket + 1};
      all_.find_gradients(one, gradient_of(), comm_->stream());
      if constexpr (std::is_same_v<T, A>) {
        pack_gradients(copy_task(all_.of(one), sums), comm_->stream());
      } else {
        pack_gradients(copy_task(all_.of(one), buffer_.data()), comm_->stream());
        cuda::detail::reduce<T, A>(
            1, [&](std::size_t) -> const T* { return buffer_.data(); }, whole.size(), sums,
            ReduceOp::sum, comm_->stream());
      }
      return;
    }
    if constexpr (sums_here) {
      sum_received(bucket, gradients_of(bucket, whole), mine,
                   shards_state ? sums : sums + (mine.begin - whole.begin));
      if (!shards_state) {
        count_slices(bucket);
        comm_
            ->all_gather_v(std::span<const A>(sums + (mine.begin - whole.begin), mine.size()),
                           std::span<A>(sums, whole.size()), counts())
            .enqueue();
      }
    } else if constexpr (!shards_state) {
      all_.find_gradients({bucket, bucket + 1}, gradient_of(), comm_->stream());
      pack_gradients(copy_task(all_.of({bucket, bucket + 1}), sums), comm_->stream());
      comm_->all_reduce(std::span<A>(sums, whole.size()), ReduceOp::sum).enqueue();
    } else {
      const std::span<const A> input = gradients_of(bucket, whole);
      const std::span<A> output(sums, mine.size());
      if (layout_->even(lane_->index, bucket)) {
        comm_->reduce_scatter(input, output, ReduceOp::sum).enqueue();
      } else {
        count_slices(bucket);
        comm_->reduce_scatter_v(input, output, counts(), ReduceOp::sum).enqueue();
      }
    }
  }

  [[nodiscard]] std::vector<DeviceFragment<T>> fragments_of(std::size_t bucket,
                                                            Interval range) const {
    const Interval whole = layout_->bucket(lane_->index, bucket);
    std::vector<DeviceFragment<T>> found;
    for (const Fragment& f : layout_->fragments(lane_->index, range)) {
      // Where values come and go nobody asks for them here.
      T* const values = Stage::shards_values ? nullptr : lane_->value_in_place(bucket, whole, f);
      found.push_back({values, nullptr, f.lane_begin - whole.begin, f.elements, f.parameter_begin,
                       static_cast<std::uint32_t>(f.parameter)});
    }
    return found;
  }
  [[nodiscard]] auto gradient_of() const {
    return [this](std::size_t parameter) { return lane_->gradients[parameter]; };
  }
  template <class B>
  [[nodiscard]] static CopyTask<T, B> copy_task(const FragmentRange<T>& range, B* bucket,
                                                const StepState* step = nullptr) {
    return {range.fragments, range.chunks, range.chunk_count, bucket, step};
  }

  /// In one piece, packed where they don't lie so.
  [[nodiscard]] std::span<const W> gradients_of(std::size_t bucket, Interval whole) {
    if constexpr (!rounds) {
      if (const T* const there = contiguous_gradients(whole)) return {there, whole.size()};
    }
    W* staged = nullptr;
    if constexpr (rounds) {
      staged = wire_.data();
    } else {
      staged = buffer_.data();
    }
    const Interval one{bucket, bucket + 1};
    all_.find_gradients(one, gradient_of(), comm_->stream());
    pack_gradients(copy_task(all_.of(one), staged), comm_->stream());
    return {staged, whole.size()};
  }

  /// Where the bucket's gradients begin, if they lie one behind the other as in the lane.
  [[nodiscard]] const T* contiguous_gradients(Interval whole) const {
    const T* first = nullptr;
    std::size_t covered = whole.begin;
    for (const Fragment& f : layout_->fragments(lane_->index, whole)) {
      const T* const at = lane_->gradient_at(f);
      if (at == nullptr) return nullptr;
      if (first == nullptr) first = at - (f.lane_begin - whole.begin);
      if (at != first + (f.lane_begin - whole.begin)) return nullptr;
      // Padding has memory in an arena alone.
      if (f.lane_begin != covered && lane_->gradient_arena == nullptr) return nullptr;
      covered = f.lane_begin + f.elements;
    }
    if (covered != whole.end && lane_->gradient_arena == nullptr) return nullptr;
    return first;
  }

  /// Everybody's part of this rank's slice, summed here.
  void sum_received(std::size_t bucket, std::span<const W> input, Interval mine, A* sums) {
    const std::span<W> output = received_.span().first(mine.size() * counts_.size());
    if (layout_->even(lane_->index, bucket)) {
      comm_->all_to_all(input, output).enqueue();
    } else {
      count_slices(bucket);
      std::fill(own_counts_.begin(), own_counts_.end(), mine.size());
      comm_->all_to_all_v(input, counts(), output, std::span<const std::size_t>(own_counts_))
          .enqueue();
    }
    cuda::detail::reduce<W, A>(
        counts_.size(), [&](std::size_t r) { return output.data() + r * mine.size(); }, mine.size(),
        sums, ReduceOp::sum, comm_->stream());
  }

  [[nodiscard]] std::span<const std::size_t> counts() const { return counts_; }
  void count_slices(std::size_t bucket) {
    detail::count_slices(*layout_, lane_->index, bucket, counts_);
  }

  Lane* lane_;
  const Layout<Partition>* layout_;
  Comm* comm_;
  std::vector<std::size_t> counts_;
  std::vector<std::size_t> own_counts_;
  std::vector<std::size_t> sum_begin_;
  FragmentTable<T> all_{};  ///< by bucket, in the bucket
  FragmentTable<T> own_{};  ///< the own slices of them, where values are packed
  DeviceArray<T> buffer_{};
  DeviceArray<A> addend_{};  ///< what is summed to be added; empty until somebody adds
  DeviceArray<W> wire_{};
  DeviceArray<W> received_{};
};

}  // namespace zero::cuda::detail
