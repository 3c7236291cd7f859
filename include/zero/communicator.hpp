// SPDX-License-Identifier: Apache-2.0
/// @file
/// How ranks talk: one small concept an operation, and `Communicator`, their conjunction.
///
/// Requirements that no compiler sees, the same for every operation:
///  1. All ranks of a communicator start the same operations in the same order, with sizes that
///     agree. A model reports a difference as `CommunicatorError` (mismatch) where it can see it.
///  2. Starting never blocks. The returned request is complete after `wait`; until then
///     the caller neither reads the output nor writes the input, nor frees either.
///  3. Input and output are disjoint, or alias exactly as the operation's comment says.
///     Anything else is a `UsageError` before anything is sent.
///  4. Floating-point sums add in rank order, (((x0 + x1) + x2) + …), in `arithmetic_t<T>`,
///     wherever the model promises determinism; the result is the same bits on every rank.
///  5. `wait` throws `CommunicatorError` within the timeout when a peer is missing, failed or did
///     something else; the communicator is then poisoned, and every later start or wait throws.
///     By the time `wait` has thrown, this rank's memory may be freed: no peer reads it any more,
///     or none that minds what it finds.
///  6. Destroying an unfinished request neither throws nor hangs; it poisons the communicator.
///  7. Calls on one rank's communicator come from one thread at a time; `abort` from any.
///
/// A minimal model for one rank is a few lines: see tests/archetypes.hpp.
#pragma once

#include <chrono>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <memory_resource>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

#include "zero/element.hpp"
#include "zero/memory.hpp"

namespace zero {

/// How `all_reduce` and `reduce_scatter` combine the ranks' values.
enum class ReduceOp : std::uint8_t { sum, min, max };

/// A started operation. `wait()` uses the communicator's own timeout.
template <class R>
concept Request = std::movable<R> && requires(R& request, std::chrono::nanoseconds timeout) {
  request.wait();
  request.wait(timeout);
  static_cast<R&&>(request).wait();
  { request.done() } -> std::same_as<bool>;
};

/// Knows its place: `0 <= rank() < size()`, both constant.
template <class C>
concept Ranked = requires(const C& comm) {
  { comm.rank() } -> std::same_as<int>;
  { comm.size() } -> std::same_as<int>;
};

/// Every rank's `data` becomes the element-wise reduction of all ranks' `data`. In place.
template <class C, class T>
concept AllReduce = requires(C& comm, std::span<T> data, ReduceOp op) {
  { comm.all_reduce(data, op) } -> Request;
};

/// Rank r's `output` becomes the reduction of everybody's r-th slice of `input`;
/// `input.size() == size() * output.size()`. `output` may be exactly the own slice of `input`.
template <class C, class T>
concept ReduceScatter =
    requires(C& comm, std::span<const T> input, std::span<T> output, ReduceOp op) {
      { comm.reduce_scatter(input, output, op) } -> Request;
    };

/// As `reduce_scatter` with slice r of length `counts[r]`, one after the other. `counts` is the
/// same on all ranks and outlives the request.
template <class C, class T>
concept ReduceScatterV = requires(C& comm, std::span<const T> input, std::span<T> output,
                                  std::span<const std::size_t> counts, ReduceOp op) {
  { comm.reduce_scatter_v(input, output, counts, op) } -> Request;
};

/// Every rank's `output` becomes all ranks' `input`, one after the other in rank order.
/// `input` may be exactly the own slice of `output`.
template <class C, class T>
concept AllGather = requires(C& comm, std::span<const T> input, std::span<T> output) {
  { comm.all_gather(input, output) } -> Request;
};

/// As `all_gather` with rank r contributing `counts[r]` elements.
template <class C, class T>
concept AllGatherV = requires(C& comm, std::span<const T> input, std::span<T> output,
                              std::span<const std::size_t> counts) {
  { comm.all_gather_v(input, output, counts) } -> Request;
};

/// Slice s of rank r's `input` becomes slice r of rank s's `output`. Input and output disjoint.
template <class C, class T>
concept AllToAll = requires(C& comm, std::span<const T> input, std::span<T> output) {
  { comm.all_to_all(input, output) } -> Request;
};

/// As `all_to_all`; `send_counts[s]` elements go to rank s, `receive_counts[s]` come from it.
template <class C, class T>
concept AllToAllV =
    requires(C& comm, std::span<const T> input, std::span<const std::size_t> send_counts,
             std::span<T> output, std::span<const std::size_t> receive_counts) {
      { comm.all_to_all_v(input, send_counts, output, receive_counts) } -> Request;
    };

/// Every rank's `data` becomes rank `root`'s.
template <class C, class T>
concept Broadcast = requires(C& comm, std::span<T> data, int root) {
  { comm.broadcast(data, root) } -> Request;
};

/// Complete when all ranks have started it.
template <class C>
concept Barrier = requires(C& comm) {
  { comm.barrier() } -> Request;
};

/// Host bytes among ranks, whatever the communicator's memory space: `mine` has the same size on
/// all ranks, `all` is that times `size()`. For hashes, flags and handles, not for tensors.
template <class C>
concept HostExchange =
    requires(C& comm, std::span<const std::byte> mine, std::span<std::byte> all) {
      { comm.exchange(mine, all) } -> Request;
    };

/// `abort(reason)` fails every operation under way and to come, on all ranks, from any thread.
template <class C>
concept Abortable = requires(C& comm, std::string reason) { comm.abort(std::move(reason)); };

/// `batch()` returns a scope: operations started within it may be launched together when it ends
/// (an NCCL group). A model without such a thing returns an empty object.
template <class C>
concept Batching = requires(C& comm) {
  { comm.batch() } -> std::destructible;
};

/// States at compile time which memory it works in, and which elements and reductions it knows.
template <class C>
concept Capable = requires {
  typename std::integral_constant<MemorySpace, C::memory_space>;
  typename std::bool_constant<C::supports(ElementType::float32)>;
  typename std::bool_constant<C::supports(ReduceOp::sum)>;
};

/// Everything that `ZeroSharded` asks of a communicator for parameters of element type `T`.
template <class C, class T = float>
concept Communicator = Ranked<C> && Capable<C> && Element<T> && AllReduce<C, T> &&
                       ReduceScatter<C, T> && ReduceScatterV<C, T> && AllGather<C, T> &&
                       AllGatherV<C, T> && AllToAll<C, T> && AllToAllV<C, T> && Broadcast<C, T> &&
                       Barrier<C> && HostExchange<C> && Abortable<C> && Batching<C>;

/// `duplicate()` is a communicator of the same ranks in the same order, which has the operations of
/// this one and is apart from it: operations of the two may be under way at once, each started in
/// an order of its own, and a failure of one is not one of the other.
///  1. All ranks call it, as an operation that is started and waited for; it throws what these do.
///  2. Each of the two is used by one thread at a time, which may be another one for each where
///     `concurrent()` says so: where any thread of this process may call this communicator, or a
///     duplicate, while other threads call others. `concurrent()` is the same for all duplicates.
///  3. Either may be destroyed first; ranks destroy several in the same order.
template <class C>
concept Duplicable = Ranked<C> && requires(C& comm, const C& constant) {
  { comm.duplicate() } -> Ranked;
  { constant.concurrent() } -> std::same_as<bool>;
};

/// A communicator whose ranks are processes of one host may offer memory that all of them read
/// where it lies: `shared_memory()` is then where buckets are allocated, which makes its
/// collectives over them cheaper; null where there is none.
template <class C>
concept SharedMemoryProvider = requires(const C& comm) {
  { comm.shared_memory() } -> std::same_as<std::shared_ptr<std::pmr::memory_resource>>;
};

/// One meeting of all ranks in one address space:
///  - `peers()` waits until all ranks have come and returns what each of them published, in rank
///    order; the pointers stay valid until the meeting's `wait` has returned on this rank
///  - `leave()` says that this rank reads its peers' memory no more (nor writes it)
///  - `wait()` returns when all ranks have left: what this rank published may change again
/// Destroying a meeting in which this rank has not left poisons the communicator, as a request
/// does. While a rank is between `peers` and `leave`, no peer's failing `wait` returns.
template <class M>
concept Meeting = Request<M> && requires(M& meeting, std::chrono::nanoseconds timeout) {
  { meeting.peers() } -> std::same_as<std::span<const void* const>>;
  { meeting.peers(timeout) } -> std::same_as<std::span<const void* const>>;
  meeting.leave();
};

/// A communicator whose ranks share an address space. `ZeroSharded` then sums straight from its
/// peers' gradients and copies straight from their parameters: no packing, no staging.
/// `operation` must be a string that outlives the meeting (a literal); ranks must agree on it.
template <class C>
concept SharedMemoryCommunicator =
    Ranked<C> && requires(C& comm, const char* operation, const void* published) {
      { comm.meet(operation, published) } -> Meeting;
    };

/// A communicator whose ranks are one of several groups of equal size, each of which trains a
/// replica of the model ("hybrid sharding"). Its operations are the group's.
///  1. `replicas()`: the ranks in the same place of all groups, in an order of groups that is the
///     same for every place. It has `all_reduce` for what gradients are summed in.
///  2. `world()`: all ranks of all groups, who must agree on what they train.
///  3. `abort` aborts all three.
///  4. Where it is `Duplicable`, a duplicate has duplicates of all three.
template <class C>
concept ReplicatedCommunicator = Ranked<C> && requires(C& comm) {
  { comm.replicas() } -> Ranked;
  { comm.world() } -> Ranked;
  { comm.world() } -> HostExchange;
};

}  // namespace zero
