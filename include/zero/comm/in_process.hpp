// SPDX-License-Identifier: Apache-2.0
/// @file
/// Ranks as threads of one process: the communicator that needs nothing but C++.
///
///     zero::run_ranks(4, [](zero::InProcessCommunicator& comm) { … });
///
/// or, where the threads are yours, one `InProcessWorld` and `world.communicator(rank)` in each.
/// Sums add in rank order, always, so every result has the same bits in every run.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <functional>
#include <memory>
#include <numeric>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "zero/communicator.hpp"
#include "zero/detail/checked_operation.hpp"
#include "zero/detail/in_process_world.hpp"
#include "zero/element.hpp"
#include "zero/error.hpp"
#include "zero/memory.hpp"

namespace zero {

/// How an in-process world waits.
struct InProcessOptions {
  /// How long a rank waits for its peers in one operation before it gives up.
  std::chrono::nanoseconds timeout = std::chrono::seconds(60);
  /// How long a rank watches before it sleeps, since waking it takes longer than most operations.
  /// Unused where there are more ranks than processors.
  std::chrono::nanoseconds spin = std::chrono::microseconds(30);
};

namespace detail {

/// One rank's place in the world; it has left when the last of its handles and requests is gone.
struct InProcessEndpoint {
  InProcessEndpoint(std::shared_ptr<InProcessState> shared, std::size_t place)
      : state(std::move(shared)), rank(place) {
    state->take(rank);
  }
  InProcessEndpoint(const InProcessEndpoint&) = delete;
  InProcessEndpoint& operator=(const InProcessEndpoint&) = delete;
  ~InProcessEndpoint() { state->depart(rank); }

  std::shared_ptr<InProcessState> state;
  std::size_t rank;
};

/// What communicators that are made of this one's ranks may see of it.
struct InProcessAccess;

}  // namespace detail

/// An operation of an in-process communicator. The work is done in `wait` and `done`, on the
/// calling thread; while one waits, the rank's other requests go on too, so any order of waiting
/// is right. A request that is empty, moved from or waited for is complete.
class InProcessRequest {
 public:
  InProcessRequest() = default;
  InProcessRequest(InProcessRequest&& other) noexcept { swap(other); }
  InProcessRequest& operator=(InProcessRequest&& other) noexcept {
    InProcessRequest(std::move(other)).swap(*this);
    return *this;
  }
  /// Poisons the world where the operation is unfinished; returns once no peer reads the buffers.
  ~InProcessRequest() {
    if (slot_ != nullptr) {
      endpoint_->state->drop(endpoint_->rank, *slot_, std::uncaught_exceptions() > 0);
    }
  }

  /// Returns when all ranks have done their parts, so that all buffers are the caller's again.
  /// Throws `CommunicatorError`, after which no peer reads this rank's memory.
  void wait() {
    if (endpoint_ != nullptr) wait(endpoint_->state->timeout());
  }
  /// As above. `timeout` is how long this rank waits for its peers while it has no work of its own.
  void wait(std::chrono::nanoseconds timeout) {
    advance([&](auto& state, std::size_t rank, auto& slot) {
      state.wait(rank, slot, timeout);
      return true;
    });
  }
  /// Does what can be done without waiting and tells whether the operation is over. Throws what
  /// `wait` throws when the operation has failed. Knows no timeout.
  [[nodiscard]] bool done() {
    return advance(
        [](auto& state, std::size_t rank, auto& slot) { return state.done(rank, slot); });
  }

 private:
  friend class InProcessCommunicator;
  friend class InProcessMeeting;
  friend struct detail::InProcessAccess;

  InProcessRequest(std::shared_ptr<detail::InProcessEndpoint> endpoint,
                   const detail::InProcessOperation& operation)
      : endpoint_(std::move(endpoint)), operation_(operation.name) {
    slot_ = &endpoint_->state->start(endpoint_->rank, operation);
    sequence_ = slot_->sequence;
  }

  void swap(InProcessRequest& other) noexcept {
    std::swap(endpoint_, other.endpoint_);
    std::swap(slot_, other.slot_);
    std::swap(operation_, other.operation_);
    std::swap(sequence_, other.sequence_);
  }

  // `step` returns whether the operation is over. One that has failed keeps its endpoint without
  // a slot, so that it goes on failing.
  template <class Step>
  bool advance(Step step) {
    if (endpoint_ == nullptr) return true;
    detail::InProcessState& state = *endpoint_->state;
    if (slot_ == nullptr) state.throw_poisoned(endpoint_->rank, operation_, sequence_);
    try {
      if (!step(state, endpoint_->rank, *slot_)) return false;
    } catch (const CommunicatorError&) {
      slot_ = nullptr;
      throw;
    }
    slot_ = nullptr;
    endpoint_.reset();
    return true;
  }

  std::shared_ptr<detail::InProcessEndpoint> endpoint_{};
  detail::InProcessSlot* slot_ = nullptr;
  const char* operation_ = "";
  std::uint64_t sequence_ = 0;
};

/// A meeting (see the concept): ranks look at each other's memory themselves. `wait` and
/// destruction leave first. When a call of this rank's communicator has thrown
/// `CommunicatorError`, its meetings have been left too: read no peer's memory from then on.
class InProcessMeeting {
 public:
  InProcessMeeting() = default;

  /// Waits until all ranks have come; what each of them published, in rank order. Throws
  /// `CommunicatorError`, or `UsageError` after `leave`.
  [[nodiscard]] std::span<const void* const> peers() {
    if (request_.endpoint_ == nullptr) return {};
    return peers(request_.endpoint_->state->timeout());
  }
  [[nodiscard]] std::span<const void* const> peers(std::chrono::nanoseconds timeout) {
    std::span<const void* const> published;
    if (request_.endpoint_ == nullptr) return published;
    detail::InProcessState& state = *request_.endpoint_->state;
    if (request_.slot_ == nullptr) {
      state.throw_poisoned(request_.endpoint_->rank, request_.operation_, request_.sequence_);
    }
    try {
      published = state.enter(request_.endpoint_->rank, *request_.slot_, timeout);
    } catch (const CommunicatorError&) {
      request_.slot_ = nullptr;
      throw;
    }
    return published;
  }

  /// This rank is done with its peers' memory. Never throws; the second time does nothing.
  void leave() noexcept {
    if (request_.slot_ == nullptr) return;
    request_.endpoint_->state->leave(request_.endpoint_->rank, *request_.slot_);
  }

  /// Leaves, and returns when all ranks have left. Throws `CommunicatorError`.
  void wait() { request_.wait(); }
  void wait(std::chrono::nanoseconds timeout) { request_.wait(timeout); }
  /// Whether all ranks have left. Throws what `wait` throws when the meeting has failed.
  [[nodiscard]] bool done() { return request_.done(); }

 private:
  friend class InProcessCommunicator;
  explicit InProcessMeeting(InProcessRequest request) : request_(std::move(request)) {}

  InProcessRequest request_{};
};

/// One rank's handle to an in-process world. Copies are the same rank; a rank has left the world
/// when its last copy and request are gone, and peers who need it later fail at once.
///
/// Every operation throws `UsageError` before anything is started where this rank's arguments are
/// wrong in themselves, and `CommunicatorError` at once where the world is poisoned; all other
/// failures come from the request's `wait`.
class InProcessCommunicator {
 public:
  using request_type = InProcessRequest;
  using meeting_type = InProcessMeeting;

  static constexpr MemorySpace memory_space = MemorySpace::host;
  [[nodiscard]] static constexpr bool supports(ElementType) noexcept { return true; }
  [[nodiscard]] static constexpr bool supports(ReduceOp) noexcept { return true; }

  [[nodiscard]] int rank() const noexcept { return static_cast<int>(endpoint_->rank); }
  [[nodiscard]] int size() const noexcept { return static_cast<int>(world_size()); }
  [[nodiscard]] std::chrono::nanoseconds timeout() const noexcept {
    return endpoint_->state->timeout();
  }

  template <Element T>
  [[nodiscard]] InProcessRequest all_reduce(std::span<T> data, ReduceOp op = ReduceOp::sum) {
    return start(detail::checked::all_reduce<T>(*this, data, op));
  }

  template <Element T>
  [[nodiscard]] InProcessRequest reduce_scatter(std::span<const std::type_identity_t<T>> input,
                                                std::span<T> output, ReduceOp op = ReduceOp::sum) {
    return start(detail::checked::reduce_scatter<T>(*this, input, output, op));
  }

  template <Element T>
  [[nodiscard]] InProcessRequest reduce_scatter_v(std::span<const std::type_identity_t<T>> input,
                                                  std::span<T> output,
                                                  std::span<const std::size_t> counts,
                                                  ReduceOp op = ReduceOp::sum) {
    return start(detail::checked::reduce_scatter_v<T>(*this, input, output, counts, op));
  }

  template <Element T>
  [[nodiscard]] InProcessRequest all_gather(std::span<const std::type_identity_t<T>> input,
                                            std::span<T> output) {
    return start(detail::checked::all_gather<T>(*this, input, output));
  }

  template <Element T>
  [[nodiscard]] InProcessRequest all_gather_v(std::span<const std::type_identity_t<T>> input,
                                              std::span<T> output,
                                              std::span<const std::size_t> counts) {
    return start(detail::checked::all_gather_v<T>(*this, input, output, counts));
  }

  template <Element T>
  [[nodiscard]] InProcessRequest all_to_all(std::span<const std::type_identity_t<T>> input,
                                            std::span<T> output) {
    return start(detail::checked::all_to_all<T>(*this, input, output));
  }

  template <Element T>
  [[nodiscard]] InProcessRequest all_to_all_v(std::span<const std::type_identity_t<T>> input,
                                              std::span<const std::size_t> send_counts,
                                              std::span<T> output,
                                              std::span<const std::size_t> receive_counts) {
    return start(
        detail::checked::all_to_all_v<T>(*this, input, send_counts, output, receive_counts));
  }

  template <Element T>
  [[nodiscard]] InProcessRequest broadcast(std::span<T> data, int root) {
    return start(detail::checked::broadcast<T>(*this, data, root));
  }

  [[nodiscard]] InProcessRequest barrier() {
    return start({.kind = detail::InProcessKind::barrier, .name = "barrier"});
  }

  /// `mine` may be exactly this rank's part of `all`.
  [[nodiscard]] InProcessRequest exchange(std::span<const std::byte> mine,
                                          std::span<std::byte> all) {
    return start(detail::checked::exchange(*this, mine, all));
  }

  [[nodiscard]] InProcessMeeting meet(const char* operation, const void* published) {
    return InProcessMeeting(start({.kind = detail::InProcessKind::meeting,
                                   .name = operation,
                                   .published = published,
                                   .phases = 1}));
  }

  /// From any thread. Ranks that wait fail at once, with `reason` in their messages.
  void abort(std::string_view reason) const noexcept {
    endpoint_->state->abort(endpoint_->rank, reason);
  }

  /// This rank's part of a smaller world: of those that give the same `color`, in the order of
  /// `key`, then of rank. All ranks call it. Throws `UsageError` where `color` is negative, and
  /// `CommunicatorError`. A failure of the part is not one of the whole, nor the reverse.
  [[nodiscard]] InProcessCommunicator split(int color, int key);

  /// The same ranks, apart from this world: operations of the two may be under way at once, from
  /// different threads, and a failure of one is not one of the other. All ranks call it. Throws
  /// `CommunicatorError`.
  [[nodiscard]] InProcessCommunicator duplicate();
  /// Any thread may call any communicator, one at a time each.
  [[nodiscard]] bool concurrent() const noexcept { return true; }

  /// There is nothing to launch together.
  struct Batch {
    Batch() noexcept {}
    Batch(const Batch&) = delete;
    Batch& operator=(const Batch&) = delete;
    ~Batch() {}
  };
  [[nodiscard]] Batch batch() noexcept { return {}; }

 private:
  friend class InProcessWorld;
  friend struct detail::InProcessAccess;
  explicit InProcessCommunicator(std::shared_ptr<detail::InProcessEndpoint> endpoint)
      : endpoint_(std::move(endpoint)) {}

  [[nodiscard]] std::size_t own() const noexcept { return endpoint_->rank; }
  [[nodiscard]] std::size_t world_size() const noexcept { return endpoint_->state->size(); }
  InProcessRequest start(const detail::InProcessOperation& operation) {
    return InProcessRequest(endpoint_, operation);
  }

  /// Rank `place` of a world that the rank `maker` makes by `make()`. All ranks call it, but they
  /// may name several makers.
  template <class Make>
  InProcessCommunicator join_new(const char* operation, std::size_t maker, std::size_t place,
                                 Make make) {
    std::shared_ptr<detail::InProcessState> world;
    if (maker == own()) world = make();
    InProcessMeeting meeting = meet(operation, &world);
    const void* const made = meeting.peers()[maker];
    if (maker != own()) {
      world = *static_cast<const std::shared_ptr<detail::InProcessState>*>(made);
    }
    meeting.wait();
    return InProcessCommunicator(
        std::make_shared<detail::InProcessEndpoint>(std::move(world), place));
  }

  std::shared_ptr<detail::InProcessEndpoint> endpoint_;
};

inline InProcessCommunicator InProcessCommunicator::split(int color, int key) {
  if (color < 0) {
    detail::ArgumentCheck(*this, "split")
        .reject("color is " + std::to_string(color) + "; it must not be negative");
  }
  struct Wish {
    int color, key;
  };
  const Wish mine{color, key};
  std::vector<Wish> all(world_size());
  exchange(std::as_bytes(std::span(&mine, 1)), std::as_writable_bytes(std::span(all))).wait();
  std::vector<std::size_t> members;
  for (std::size_t r = 0; r < all.size(); ++r) {
    if (all[r].color == color) members.push_back(r);
  }
  std::stable_sort(members.begin(), members.end(),
                   [&](std::size_t a, std::size_t b) { return all[a].key < all[b].key; });

  // The first member makes the world, and the others take it from the first one's memory.
  const auto place = std::find(members.begin(), members.end(), own()) - members.begin();
  return join_new("split", members[0], static_cast<std::size_t>(place), [&] {
    return std::make_shared<detail::InProcessState>(members.size(), endpoint_->state->timeout(),
                                                    endpoint_->state->spin(),
                                                    detail::part_note(members));
  });
}

inline InProcessCommunicator InProcessCommunicator::duplicate() {
  return join_new("duplicate", 0, own(), [&] {
    const detail::InProcessState& state = *endpoint_->state;
    return std::make_shared<detail::InProcessState>(state.size(), state.timeout(), state.spin(),
                                                    state.part());
  });
}

/// `size` ranks in this process. Copies are the same world, which lives as long as its ranks do.
class InProcessWorld {
 public:
  /// Throws `UsageError` unless `size` is positive.
  explicit InProcessWorld(int size, InProcessOptions options = {}) {
    if (size < 1) {
      throw UsageError("InProcessWorld of " + std::to_string(size) +
                       " ranks: give it at least one.");
    }
    state_ = std::make_shared<detail::InProcessState>(static_cast<std::size_t>(size),
                                                      options.timeout, options.spin);
  }

  [[nodiscard]] int size() const noexcept { return static_cast<int>(state_->size()); }

  /// The handle of one rank, from any thread. Throws `UsageError` where `rank` is no rank of this
  /// world, or while an earlier handle of this rank lives.
  [[nodiscard]] InProcessCommunicator communicator(int rank) {
    if (rank < 0 || rank >= size()) {
      throw UsageError("InProcessWorld::communicator(" + std::to_string(rank) + "): a world of " +
                       std::to_string(size()) + " has ranks 0 to " + std::to_string(size() - 1) +
                       ".");
    }
    return InProcessCommunicator(
        std::make_shared<detail::InProcessEndpoint>(state_, static_cast<std::size_t>(rank)));
  }

  /// The rank at which the world's failure began; -1 where nothing has failed.
  [[nodiscard]] int failed_rank() const {
    const std::size_t origin = state_->origin();
    return origin == state_->size() ? -1 : static_cast<int>(origin);
  }

 private:
  std::shared_ptr<detail::InProcessState> state_;
};

namespace detail {

/// `run_ranks`, of the ranks of any in-process world.
template <class World, class Comm, class F>
void run_ranks_of(const World& world, std::vector<Comm> ranks, F& rank_main) {
  std::vector<std::exception_ptr> failures(ranks.size());
  std::atomic<int> first{-1};
  const auto run = [&](Comm comm) {
    const int rank = comm.rank();
    const auto failed = [&](std::string_view reason) {
      failures[static_cast<std::size_t>(rank)] = std::current_exception();
      int none = -1;
      first.compare_exchange_strong(none, rank);
      comm.abort(reason);
    };
    try {
      std::invoke(rank_main, comm);
    } catch (const std::exception& exception) {
      failed(exception.what());
    } catch (...) {
      failed("an exception that is no std::exception");
    }
  };

  std::vector<std::thread> threads;
  std::exception_ptr no_thread;
  try {
    threads.reserve(ranks.size());
    for (Comm& comm : ranks) threads.emplace_back(run, comm);
  } catch (...) {
    no_thread = std::current_exception();
    ranks.front().abort("not all ranks' threads could be started");
  }
  ranks.clear();  // from here on a rank that returns has left
  for (std::thread& thread : threads) thread.join();

  if (no_thread) std::rethrow_exception(no_thread);
  if (first < 0) return;
  const int origin = world.failed_rank();
  const auto failure_of = [&](int rank) { return failures[static_cast<std::size_t>(rank)]; };
  std::rethrow_exception(origin >= 0 && failure_of(origin) ? failure_of(origin)
                                                           : failure_of(first));
}

}  // namespace detail

/// Calls `rank_main(comm)` on `size` threads, one a rank, and returns when all have returned.
/// An exception of one rank fails its peers' operations at once; the one with which it all began,
/// rather than what the peers made of it, is then thrown here with its own type.
template <class F>
void run_ranks(int size, F&& rank_main, InProcessOptions options = {}) {
  InProcessWorld world(size, options);
  std::vector<InProcessCommunicator> ranks;
  for (int rank = 0; rank < size; ++rank) ranks.push_back(world.communicator(rank));
  detail::run_ranks_of(world, std::move(ranks), rank_main);
}

static_assert(Communicator<InProcessCommunicator, float>);
static_assert(Communicator<InProcessCommunicator, double>);
static_assert(SharedMemoryCommunicator<InProcessCommunicator>);
static_assert(Duplicable<InProcessCommunicator>);

}  // namespace zero
