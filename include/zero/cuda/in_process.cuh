// SPDX-License-Identifier: Apache-2.0
/// @file
/// Ranks as threads of one process, over CUDA memory: K ranks on one GPU.
///
///     zero::cuda::run_ranks(4, [](zero::cuda::InProcessCommunicator& comm) { … });
///
/// or, where the threads and streams are yours, one `InProcessWorld` and
/// `world.communicator(rank, stream)` in each thread. Sums add in rank order, always, and have the
/// bits of the host's `zero::InProcessCommunicator`.
///
/// Ranks may be on several GPUs, if each can read the others' memory where it lies: enable that
/// with cudaDeviceEnablePeerAccess, and cudaMemPoolSetAccess for memory of cudaMallocAsync. A
/// rank's device is current whenever its communicator is called.
///
/// Operations can't be captured into a CUDA graph: they meet on the host.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "zero/bfloat16.hpp"
#include "zero/comm/in_process.hpp"
#include "zero/communicator.hpp"
#include "zero/cuda/communicator.hpp"
#include "zero/cuda/detail/in_process_flight.hpp"
#include "zero/cuda/detail/in_process_work.cuh"
#include "zero/cuda/error.hpp"
#include "zero/cuda/stream.hpp"
#include "zero/detail/checked_operation.hpp"
#include "zero/element.hpp"
#include "zero/error.hpp"
#include "zero/float16.hpp"
#include "zero/memory.hpp"

namespace zero::detail {

struct InProcessAccess {
  static InProcessRequest start(InProcessCommunicator& comm, const InProcessOperation& operation) {
    return comm.start(operation);
  }
  static InProcessState& state(const InProcessCommunicator& comm) { return *comm.endpoint_->state; }
  static std::uint64_t sequence(const InProcessRequest& request) { return request.sequence_; }
  static const char* operation(const InProcessRequest& request) { return request.operation_; }
};

}  // namespace zero::detail

namespace zero::cuda {

namespace detail {

/// One rank's place in the world, which its handles and requests share.
class InProcessRank {
 public:
  using nanoseconds = std::chrono::nanoseconds;

  InProcessRank(zero::InProcessCommunicator comm, StreamView stream)
      : host_(std::move(comm)),
        flights_(std::make_shared<InProcessFlights>(stream, state(),
                                                    static_cast<std::size_t>(host_.rank()))) {
    state().keep(flights_);
  }

  [[nodiscard]] zero::InProcessCommunicator& host() noexcept { return host_; }
  [[nodiscard]] InProcessFlights& flights() noexcept { return *flights_; }
  [[nodiscard]] zero::detail::InProcessState& state() noexcept {
    return zero::detail::InProcessAccess::state(host_);
  }

  /// Returns what `use()` does. Peers learn of a `CudaError`, which goes on.
  template <class Use>
  decltype(auto) guard(const char* operation, Use use) {
    try {
      return use();
    } catch (const CudaError& error) {
      flights_->give_up(CommunicatorFailure::transport, operation, error.what());
      throw;
    }
  }

  /// Whether `event` has happened within the timeout; poisons the world where not.
  [[nodiscard]] bool await(const Event& event, nanoseconds timeout, const char* operation) {
    return guard(operation, [&] {
      if (InProcessFlights::until(timeout, [&] { return event.done(); })) return true;
      flights_->give_up_waiting(timeout, operation);
      return false;
    });
  }

 private:
  zero::InProcessCommunicator host_;
  std::shared_ptr<InProcessFlights> flights_;
};

}  // namespace detail

/// An operation of an in-process communicator over CUDA memory. What it enqueues is enqueued in
/// `enqueue`, `wait` and `done`, on the calling thread, which also enqueue what this rank started
/// before. A request that is empty, moved from, enqueued or waited for is complete.
///
/// Where `enqueue` or `wait` throws `CommunicatorError`, and where an unfinished request is
/// destroyed, it has waited for what this rank and its peers have enqueued, at most for the
/// timeout: nobody reads this rank's memory any more, unless a stream hangs longer than that.
class InProcessRequest {
 public:
  InProcessRequest() = default;
  InProcessRequest(InProcessRequest&& other) noexcept { swap(other); }
  InProcessRequest& operator=(InProcessRequest&& other) noexcept {
    InProcessRequest(std::move(other)).swap(*this);
    return *this;
  }
  /// Poisons the world unless all ranks have enqueued the operation; waits for it where they have.
  ~InProcessRequest() {
    if (flight_ == nullptr) return;
    host_ = {};
    rank_->flights().settle(flight_->end);
    rank_->flights().give_back(*flight_);
  }

  /// Returns once the operation stands in the streams of all ranks: what this one enqueues in its
  /// own from then on comes after it. Waits for peers, not for devices. Throws `CommunicatorError`,
  /// or the `CudaError` that this rank met.
  void enqueue() {
    if (rank_ != nullptr) enqueue(rank_->host().timeout());
  }
  void enqueue(std::chrono::nanoseconds timeout) {
    on_host([&] { return host_.wait(timeout), true; });
    finish();
  }

  /// Returns when the operation is over on this rank's device too. Throws as `enqueue`.
  void wait() {
    if (rank_ != nullptr) wait(rank_->host().timeout());
  }
  /// As above. `timeout` is how long this rank waits for its peers, and then for its device.
  void wait(std::chrono::nanoseconds timeout) {
    on_host([&] { return host_.wait(timeout), true; });
    if (flight_ != nullptr && !rank_->await(flight_->end, timeout, operation_)) {
      late_ = true;
      rank_->flights().settle();
      throw_late();
    }
    finish();
  }

  /// Does what can be done without waiting and tells whether the operation is over, on this rank's
  /// device too. Throws as `wait`. Knows no timeout.
  [[nodiscard]] bool done() {
    if (!on_host([&] { return host_.done(); })) return false;
    if (flight_ != nullptr && !rank_->guard(operation_, [&] { return flight_->end.done(); })) {
      return false;
    }
    finish();
    return true;
  }

 private:
  friend class InProcessCommunicator;
  using Access = zero::detail::InProcessAccess;

  /// @param flight null where nothing is done on devices
  InProcessRequest(zero::InProcessRequest host, std::shared_ptr<detail::InProcessRank> rank,
                   detail::InProcessFlight* flight)
      : rank_(std::move(rank)),
        host_(std::move(host)),
        flight_(flight),
        operation_(Access::operation(host_)),
        sequence_(Access::sequence(host_)) {}

  void swap(InProcessRequest& other) noexcept {
    std::swap(rank_, other.rank_);
    std::swap(host_, other.host_);
    std::swap(flight_, other.flight_);
    std::swap(late_, other.late_);
    std::swap(operation_, other.operation_);
    std::swap(sequence_, other.sequence_);
  }

  // `step` is the host's part. What this rank's own device said is thrown rather than what its
  // peers made of it.
  template <class Step>
  bool on_host(Step step) {
    if (late_) throw_late();
    bool met = false;
    try {
      met = step();
    } catch (const CommunicatorError&) {
      if (rank_->flights().error()) std::rethrow_exception(rank_->flights().error());
      throw;
    }
    if (flight_ != nullptr && flight_->failed) std::rethrow_exception(rank_->flights().error());
    return met;
  }

  [[noreturn]] void throw_late() const {
    rank_->state().throw_poisoned(rank_->flights().rank(), operation_, sequence_);
  }

  void finish() noexcept {
    if (flight_ != nullptr) rank_->flights().give_back(*flight_);
    flight_ = nullptr;
    rank_.reset();
  }

  std::shared_ptr<detail::InProcessRank> rank_{};
  zero::InProcessRequest host_{};
  detail::InProcessFlight* flight_ = nullptr;
  bool late_ = false;  // its device was, and so it has failed
  const char* operation_ = "";
  std::uint64_t sequence_ = 0;
};

/// One rank's handle to an in-process world over CUDA memory. Copies are the same rank; a rank has
/// left the world when its last copy and request are gone, and peers who need it later fail at
/// once. What it has enqueued then ends by itself.
///
/// Operations run in `stream()`, in the order in which they were started. Those that were started
/// there earlier need not have been enqueued for later ones to use their outputs.
///
/// Every operation throws `UsageError` before anything is started where this rank's arguments are
/// wrong in themselves, `CommunicatorError` at once where the world is poisoned, and `CudaError`
/// where the stream can't be used; all other failures come from the request.
class InProcessCommunicator {
 public:
  using request_type = InProcessRequest;

  static constexpr MemorySpace memory_space = MemorySpace::cuda;
  [[nodiscard]] static constexpr bool supports(ElementType) noexcept { return true; }
  [[nodiscard]] static constexpr bool supports(ReduceOp) noexcept { return true; }

  [[nodiscard]] int rank() const noexcept { return rank_->host().rank(); }
  [[nodiscard]] int size() const noexcept { return rank_->host().size(); }
  [[nodiscard]] std::chrono::nanoseconds timeout() const noexcept {
    return rank_->host().timeout();
  }
  [[nodiscard]] StreamView stream() const noexcept { return rank_->flights().stream(); }

  template <Element T>
  [[nodiscard]] InProcessRequest all_reduce(std::span<T> data, ReduceOp op = ReduceOp::sum) {
    return start<detail::AllReduceWork<T>>(zero::detail::checked::all_reduce<T>(*this, data, op));
  }

  template <Element T>
  [[nodiscard]] InProcessRequest reduce_scatter(std::span<const std::type_identity_t<T>> input,
                                                std::span<T> output, ReduceOp op = ReduceOp::sum) {
    return start<detail::ReduceScatterWork<T>>(
        zero::detail::checked::reduce_scatter<T>(*this, input, output, op));
  }

  template <Element T>
  [[nodiscard]] InProcessRequest reduce_scatter_v(std::span<const std::type_identity_t<T>> input,
                                                  std::span<T> output,
                                                  std::span<const std::size_t> counts,
                                                  ReduceOp op = ReduceOp::sum) {
    return start<detail::ReduceScatterWork<T>>(
        zero::detail::checked::reduce_scatter_v<T>(*this, input, output, counts, op));
  }

  template <Element T>
  [[nodiscard]] InProcessRequest all_gather(std::span<const std::type_identity_t<T>> input,
                                            std::span<T> output) {
    return start<detail::AllGatherWork<T>>(
        zero::detail::checked::all_gather<T>(*this, input, output));
  }

  template <Element T>
  [[nodiscard]] InProcessRequest all_gather_v(std::span<const std::type_identity_t<T>> input,
                                              std::span<T> output,
                                              std::span<const std::size_t> counts) {
    return start<detail::AllGatherWork<T>>(
        zero::detail::checked::all_gather_v<T>(*this, input, output, counts));
  }

  template <Element T>
  [[nodiscard]] InProcessRequest all_to_all(std::span<const std::type_identity_t<T>> input,
                                            std::span<T> output) {
    return start<detail::AllToAllWork<T>>(
        zero::detail::checked::all_to_all<T>(*this, input, output));
  }

  template <Element T>
  [[nodiscard]] InProcessRequest all_to_all_v(std::span<const std::type_identity_t<T>> input,
                                              std::span<const std::size_t> send_counts,
                                              std::span<T> output,
                                              std::span<const std::size_t> receive_counts) {
    return start<detail::AllToAllWork<T>>(
        zero::detail::checked::all_to_all_v<T>(*this, input, send_counts, output, receive_counts));
  }

  template <Element T>
  [[nodiscard]] InProcessRequest broadcast(std::span<T> data, int root) {
    return start<detail::BroadcastWork<T>>(zero::detail::checked::broadcast<T>(*this, data, root));
  }

  /// Of the ranks' threads; says nothing about their streams.
  [[nodiscard]] InProcessRequest barrier() { return {rank_->host().barrier(), rank_, nullptr}; }

  /// `mine` may be exactly this rank's part of `all`. Both are host memory.
  [[nodiscard]] InProcessRequest exchange(std::span<const std::byte> mine,
                                          std::span<std::byte> all) {
    return {rank_->host().exchange(mine, all), rank_, nullptr};
  }

  /// Blocks the host until `event`, which was recorded behind operations that had been enqueued,
  /// has happened. Throws `CommunicatorError` where it has not within the timeout, which poisons
  /// the world; where it happened only after a peer had failed; and `CudaError`.
  void wait(const Event& event) { wait(event, timeout()); }
  void wait(const Event& event, std::chrono::nanoseconds timeout) {
    if (rank_->guard("wait", [&] { return event.done(); })) return;
    // Waits even in a poisoned world: until then peers may read this rank's memory.
    if (!rank_->await(event, timeout, "wait")) rank_->flights().settle();
    rank_->state().check_settled(rank_->flights().rank(), "wait");
  }

  /// Throws `CommunicatorError` where the world is poisoned.
  void check() const { rank_->state().check(rank_->flights().rank()); }

  /// From any thread. Ranks that wait for peers fail, with `reason` in their messages; what stands
  /// in streams already ends by itself.
  void abort(std::string_view reason) const noexcept { rank_->host().abort(reason); }

  /// This rank's part of a smaller world, in the same stream: of those that give the same `color`,
  /// in the order of `key`, then of rank. All ranks call it. Throws `UsageError` where `color` is
  /// negative, and `CommunicatorError`. A failure of the part is not one of the whole, nor the
  /// reverse.
  [[nodiscard]] InProcessCommunicator split(int color, int key) {
    return {rank_->host().split(color, key), stream()};
  }

  /// The same ranks, apart from this world, in the same stream: operations of the two may be under
  /// way at once, from different threads, and a failure of one is not one of the other. All ranks
  /// call it. Throws `CommunicatorError`.
  [[nodiscard]] InProcessCommunicator duplicate() { return {rank_->host().duplicate(), stream()}; }
  /// Any thread may call any communicator, one at a time each.
  [[nodiscard]] bool concurrent() const noexcept { return true; }

  /// Whether a stream that captures may be given operations: not where ranks meet on the host.
  static constexpr bool capturable = false;

  /// There is nothing to launch together.
  using Batch = zero::InProcessCommunicator::Batch;
  [[nodiscard]] Batch batch() noexcept { return {}; }

 private:
  friend class InProcessWorld;
  using Access = zero::detail::InProcessAccess;

  InProcessCommunicator(zero::InProcessCommunicator host, StreamView stream)
      : rank_(std::make_shared<detail::InProcessRank>(std::move(host), stream)) {}

  template <class Work>
  InProcessRequest start(const zero::detail::InProcessOperation& operation) {
    detail::InProcessFlights& flights = rank_->flights();
    detail::InProcessFlight& flight =
        rank_->guard(operation.name, [&]() -> auto& { return flights.take(); });
    try {
      rank_->guard(operation.name, [&] { flight.ready.record(stream()); });
      return {Access::start(rank_->host(), detail::on_device<Work>(operation, flight)), rank_,
              &flight};
    } catch (...) {
      flights.give_back(flight);
      throw;
    }
  }

  std::shared_ptr<detail::InProcessRank> rank_;
};

/// `size` ranks in this process. Copies are the same world, which lives as long as its ranks do.
class InProcessWorld {
 public:
  /// Throws `UsageError` unless `size` is positive and small enough for one launch to sum over all
  /// ranks.
  explicit InProcessWorld(int size, InProcessOptions options = {}) : host_(size, options) {
    if (static_cast<std::size_t>(size) > detail::max_reduce_sources) {
      throw UsageError("cuda::InProcessWorld of " + std::to_string(size) + " ranks: it can have " +
                       std::to_string(detail::max_reduce_sources) + " at most.");
    }
  }

  [[nodiscard]] int size() const noexcept { return host_.size(); }

  /// The handle of one rank, from any thread. `stream` outlives it, its copies and requests, and
  /// its operations. Throws `UsageError` where `rank` is no rank of this world, or while an earlier
  /// handle of this rank lives.
  [[nodiscard]] InProcessCommunicator communicator(int rank, StreamView stream) {
    return {host_.communicator(rank), stream};
  }

  /// The rank at which the world's failure began; -1 where nothing has failed.
  [[nodiscard]] int failed_rank() const { return host_.failed_rank(); }

 private:
  zero::InProcessWorld host_;
};

/// Calls `rank_main(comm)` on `size` threads, one a rank, each with a stream of its own on the
/// caller's current device, and returns when all have returned. An exception of one rank fails its
/// peers' operations at once; the one with which it all began is then thrown here with its own
/// type. A rank waits for what it has enqueued before it frees what that uses.
template <class F>
void run_ranks(int size, F&& rank_main, InProcessOptions options = {}) {
  InProcessWorld world(size, options);
  int device = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  std::vector<Stream> streams(static_cast<std::size_t>(size));
  std::vector<InProcessCommunicator> ranks;
  for (const Stream& stream : streams) {
    ranks.push_back(world.communicator(static_cast<int>(ranks.size()), stream));
  }
  const auto on_device = [&](InProcessCommunicator& comm) {
    check(cudaSetDevice(device), "cudaSetDevice");
    std::invoke(rank_main, comm);
  };
  zero::detail::run_ranks_of(world, std::move(ranks), on_device);
}

static_assert(Communicator<InProcessCommunicator, float>);
static_assert(Communicator<InProcessCommunicator, double>);
static_assert(Communicator<InProcessCommunicator, bfloat16>);
static_assert(Communicator<InProcessCommunicator, float16>);
static_assert(StreamCommunicator<InProcessCommunicator>);
static_assert(Duplicable<InProcessCommunicator>);
static_assert(!SharedMemoryCommunicator<InProcessCommunicator>);

}  // namespace zero::cuda
