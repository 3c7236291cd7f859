// SPDX-License-Identifier: Apache-2.0
/// @file
/// One rank's part of the in-process operations in CUDA memory: what it enqueues once all ranks
/// have come.
///
/// An operation has the phases that it has on the host (detail/in_process_work.hpp), in each of
/// which a rank lets its stream wait for all peers' streams, enqueues its part of the work,
/// straight from its peers' memory, and records that. One more phase waits for all peers' last
/// work, so that what a rank enqueues behind an operation may overwrite what peers read in it.
///
/// A stream waits only for events that have been recorded already. So what is enqueued ends by
/// itself, whatever becomes of the ranks, and streams never wait for each other in a circle.
#pragma once

#include <algorithm>
#include <cstddef>
#include <exception>
#include <utility>

#include "zero/communicator.hpp"
#include "zero/cuda/detail/in_process_flight.hpp"
#include "zero/cuda/detail/reduce.cuh"
#include "zero/cuda/error.hpp"
#include "zero/cuda/stream.hpp"
#include "zero/detail/in_process_operation.hpp"
#include "zero/detail/in_process_work.hpp"
#include "zero/detail/in_process_world.hpp"
#include "zero/element.hpp"
#include "zero/error.hpp"

namespace zero::cuda::detail {

using zero::detail::InProcessOperation;
using zero::detail::InProcessRanks;
using zero::detail::InProcessSlot;
using zero::detail::offset_of;

[[nodiscard]] inline const InProcessFlight& flight_of(const InProcessOperation& operation) {
  return *static_cast<const InProcessFlight*>(operation.published);
}

template <class T>
void copy_elements(const T* from, std::size_t count, T* to, StreamView stream) {
  if (count == 0 || from == to) return;
  check(cudaMemcpyAsync(to, from, count * sizeof(T), cudaMemcpyDeviceToDevice, stream.get()),
        "cudaMemcpyAsync between in-process ranks");
}

/// `out[i]` becomes the reduction of element `begin + i` of every rank's input.
template <Element T>
void reduce_slice(InProcessRanks ranks, std::size_t begin, std::size_t count, T* out, ReduceOp op,
                  StreamView stream) {
  const auto source = [&](std::size_t r) { return static_cast<const T*>(ranks[r].input) + begin; };
  if (count == 0) return;
  // As on the host, whose sum of one rank keeps a NaN's bits.
  if (ranks.size() == 1 && op == ReduceOp::sum) return copy_elements(source(0), count, out, stream);
  reduce<T, T>(ranks.size(), source, count, out, op, stream);
}

// Each enqueues a rank's part of one phase.

template <Element T>
struct AllReduceWork {
  void operator()(InProcessRanks ranks, std::size_t rank, unsigned phase, StreamView stream) const {
    const InProcessOperation& own = ranks[rank];
    auto* const out = static_cast<T*>(own.output);
    const std::size_t count = own.input_count;
    const std::size_t length = zero::detail::slice_length<T>(count, ranks.size());
    const auto slice = [&](std::size_t r) {
      const std::size_t begin = std::min(count, r * length);
      return std::pair(begin, std::min(count - begin, length));
    };
    // In place: of a rank's slice of any memory, only that rank reads anything.
    if (phase == 0) {
      const auto [begin, elements] = slice(rank);
      return reduce_slice<T>(ranks, begin, elements, out + begin, own.reduce, stream);
    }
    for (std::size_t i = 1; i < ranks.size(); ++i) {
      const std::size_t peer = (rank + i) % ranks.size();
      const auto [begin, elements] = slice(peer);
      copy_elements(static_cast<const T*>(ranks[peer].input) + begin, elements, out + begin,
                    stream);
    }
  }
};

template <Element T>
struct ReduceScatterWork {
  void operator()(InProcessRanks ranks, std::size_t rank, unsigned, StreamView stream) const {
    const InProcessOperation& own = ranks[rank];
    const std::size_t begin =
        own.output_counts != nullptr ? offset_of(own.output_counts, rank) : rank * own.output_count;
    reduce_slice<T>(ranks, begin, own.output_count, static_cast<T*>(own.output), own.reduce,
                    stream);
  }
};

template <Element T>
struct AllGatherWork {
  void operator()(InProcessRanks ranks, std::size_t rank, unsigned, StreamView stream) const {
    const InProcessOperation& own = ranks[rank];
    for (std::size_t i = 0; i < ranks.size(); ++i) {
      // Everybody starts at itself, so that not all read from one rank at a time.
      const std::size_t peer = (rank + i) % ranks.size();
      const std::size_t count = ranks[peer].input_count;
      const std::size_t begin =
          own.input_counts != nullptr ? offset_of(own.input_counts, peer) : peer * count;
      copy_elements(static_cast<const T*>(ranks[peer].input), count,
                    static_cast<T*>(own.output) + begin, stream);
    }
  }
};

template <Element T>
struct AllToAllWork {
  void operator()(InProcessRanks ranks, std::size_t rank, unsigned, StreamView stream) const {
    const InProcessOperation& own = ranks[rank];
    const bool even = own.output_counts == nullptr;
    for (std::size_t i = 0; i < ranks.size(); ++i) {
      const std::size_t peer = (rank + i) % ranks.size();
      const std::size_t count = even ? own.output_count / ranks.size() : own.output_counts[peer];
      const std::size_t from = even ? rank * count : offset_of(ranks[peer].input_counts, rank);
      const std::size_t to = even ? peer * count : offset_of(own.output_counts, peer);
      copy_elements(static_cast<const T*>(ranks[peer].input) + from, count,
                    static_cast<T*>(own.output) + to, stream);
    }
  }
};

template <Element T>
struct BroadcastWork {
  void operator()(InProcessRanks ranks, std::size_t rank, unsigned, StreamView stream) const {
    const InProcessOperation& own = ranks[rank];
    copy_elements(static_cast<const T*>(ranks[static_cast<std::size_t>(own.root)].input),
                  own.input_count, static_cast<T*>(own.output), stream);
  }
};

/// A phase of an operation, as the world calls it on the rank's own thread.
template <class Work>
void enqueue_phase(InProcessRanks ranks, std::size_t rank, unsigned phase, void*) noexcept {
  // The world's ranks see each other's flights as const; this one is the caller's own.
  auto& own = const_cast<InProcessFlight&>(flight_of(ranks[rank]));
  const StreamView stream = own.owner->stream();
  const bool last = phase + 1 == ranks[rank].phases;
  try {
    for (std::size_t peer = 0; peer < ranks.size(); ++peer) {
      if (peer == rank) continue;
      const InProcessFlight& there = flight_of(ranks[peer]);
      stream.wait(phase == 0 ? there.ready : there.done[phase - 1]);
    }
    if (last) return own.owner->record_end(own);
    Work{}(ranks, rank, phase, stream);
    own.done[phase].record(stream);
  } catch (const std::exception& failure) {
    // Peers must not free what a part of the work reads, nor this rank what they read.
    if (!last) (void)cudaEventRecord(own.done[phase].get(), stream.get());
    for (std::size_t peer = 0; last && phase > 0 && peer < ranks.size(); ++peer) {
      own.owner->settle(flight_of(ranks[peer]).done[phase - 1]);
    }
    own.owner->fail(own, ranks[rank].name, failure.what());
  }
}

/// Waits for what has been enqueued of an operation that has failed.
inline void settle_flights(const InProcessSlot& slot, std::size_t rank) noexcept {
  InProcessFlights& own = *flight_of(slot.ranks[rank]).owner;
  own.settle();
  for (std::size_t peer = 0; peer < slot.ranks.size(); ++peer) {
    const InProcessSlot::Part& part = slot.parts[peer];
    const unsigned worked = std::min(part.phase, slot.phases - 1);
    if (part.arrived && worked > 0) own.settle(flight_of(slot.ranks[peer]).done[worked - 1]);
  }
}

/// `operation` as the host does it, done by devices: `flight` is the caller's.
template <class Work>
[[nodiscard]] InProcessOperation on_device(InProcessOperation operation,
                                           const InProcessFlight& flight) {
  operation.published = &flight;
  operation.phases += 1;
  operation.work = &enqueue_phase<Work>;
  operation.in_turn = true;
  operation.settle = &settle_flights;
  return operation;
}

}  // namespace zero::cuda::detail
