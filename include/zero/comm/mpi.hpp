// SPDX-License-Identifier: Apache-2.0
/// @file
/// Ranks as processes, on one host or many, over MPI. Needs MPI's C interface (`zero::mpi`).
///
///     MPI_Init(&argc, &argv);
///     {
///       zero::MpiCommunicator comm(MPI_COMM_WORLD);
///       zero::ZeroSharded optimizer{zero::Adam{}, store, comm};
///       …
///     }  // before MPI_Finalize
///     MPI_Finalize();
///
/// docs/mpi.md says how to start such a program, and who notices what when ranks fail.
#pragma once

#include <mpi.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <memory_resource>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <type_traits>
#include <utility>

#include "zero/comm/mpi_options.hpp"
#include "zero/communicator.hpp"
#include "zero/detail/checked_operation.hpp"
#include "zero/detail/mpi_environment.hpp"
#include "zero/detail/mpi_operation.hpp"
#include "zero/detail/mpi_state.hpp"
#include "zero/element.hpp"
#include "zero/error.hpp"
#include "zero/memory.hpp"

namespace zero {

/// An operation over MPI. The work is done in `wait` and `done`, on the calling thread, and in
/// passing whenever another operation starts. Operations go one after the other, in the order of
/// their starts: waiting for one moves all before it. A request that is empty, moved from or waited
/// for is complete.
class MpiRequest {
 public:
  MpiRequest() = default;
  MpiRequest(MpiRequest&& other) noexcept { swap(other); }
  MpiRequest& operator=(MpiRequest&& other) noexcept {
    MpiRequest(std::move(other)).swap(*this);
    return *this;
  }
  /// Poisons the communicator where the operation is unfinished.
  ~MpiRequest() {
    if (state_ != nullptr) state_->drop(sequence_, std::uncaught_exceptions() > 0);
  }

  /// Returns when this rank's part is done, which is after every rank has started the operation.
  /// Throws `CommunicatorError`, after which nobody reads or writes this rank's buffers.
  void wait() {
    if (state_ != nullptr) wait(state_->options().timeout);
  }
  /// As above. `timeout` is how long this rank waits while nothing at all arrives.
  void wait(std::chrono::nanoseconds timeout) {
    if (state_ == nullptr) return;
    state_->wait(sequence_, timeout);
    state_.reset();
  }
  /// Does what can be done without waiting and tells whether the operation is over. Throws what
  /// `wait` throws when the operation has failed. Knows no timeout.
  [[nodiscard]] bool done() {
    if (state_ == nullptr) return true;
    if (!state_->done(sequence_)) return false;
    state_.reset();
    return true;
  }

 private:
  friend class MpiCommunicatorRef;
  MpiRequest(std::shared_ptr<detail::MpiState> state, const detail::MpiOperation& operation)
      : state_(std::move(state)), sequence_(state_->start(operation)) {}

  void swap(MpiRequest& other) noexcept {
    std::swap(state_, other.state_);
    std::swap(sequence_, other.sequence_);
  }

  std::shared_ptr<detail::MpiState> state_{};
  std::uint64_t sequence_ = 0;
};

/// One rank's handle to a communicator over MPI that it doesn't own: one made of an `MPI_Comm`, or
/// a `MpiCommunicator`'s. Copies are the same rank. Works in host memory.
///
/// Every operation throws `UsageError` before anything is started where this rank's arguments are
/// wrong in themselves or MPI may not be called from here (before MPI_Init, after MPI_Finalize,
/// from a thread other than the main one below MPI_THREAD_SERIALIZED), and `CommunicatorError`
/// where the communicator is poisoned; all other failures come from the request's `wait`.
class MpiCommunicatorRef {
 public:
  using request_type = MpiRequest;

  static constexpr MemorySpace memory_space = MemorySpace::host;
  [[nodiscard]] static constexpr bool supports(ElementType) noexcept { return true; }
  [[nodiscard]] static constexpr bool supports(ReduceOp) noexcept { return true; }

  /// Borrows `comm`, with nothing sent. Until the last copy and request are gone `comm` must not be
  /// freed and nobody else may communicate over it, nor a second such handle; errors on it are
  /// returned meanwhile (MPI_ERRORS_RETURN). Where that can't be promised, use `MpiCommunicator`.
  explicit MpiCommunicatorRef(MPI_Comm comm, const MpiOptions& options = {})
      : MpiCommunicatorRef(detail::require_comm(comm, "MpiCommunicatorRef"), false, options) {}

  [[nodiscard]] int rank() const noexcept { return static_cast<int>(state_->rank()); }
  [[nodiscard]] int size() const noexcept { return static_cast<int>(state_->size()); }
  [[nodiscard]] std::chrono::nanoseconds timeout() const noexcept {
    return state_->options().timeout;
  }
  /// MPI's own handle. Communicate over a duplicate of it, not over it.
  [[nodiscard]] MPI_Comm native_handle() const noexcept { return state_->comm(); }

  /// A resource whose memory all ranks read where it lies, rather than be sent it; null, on all
  /// ranks, where some can't: on several hosts, where the system forbids it, without
  /// `MpiOptions::share_memory`, and for a borrowed `MPI_Comm`.
  [[nodiscard]] std::shared_ptr<std::pmr::memory_resource> shared_memory() const noexcept {
    return state_->shared_memory();
  }
  /// Where `bytes` that `rank` has at `address` of such memory lie in this process; null where they
  /// are no such memory. They stay there as long as this communicator, whatever the peer does.
  [[nodiscard]] const std::byte* peer_memory(int rank, std::uint64_t address,
                                             std::size_t bytes) const noexcept {
    return state_->peer_memory(static_cast<std::size_t>(rank), address, bytes);
  }

  template <Element T>
  [[nodiscard]] MpiRequest all_reduce(std::span<T> data, ReduceOp op = ReduceOp::sum) {
    return start<T>(detail::checked::all_reduce<T>(*this, data, op));
  }

  template <Element T>
  [[nodiscard]] MpiRequest reduce_scatter(std::span<const std::type_identity_t<T>> input,
                                          std::span<T> output, ReduceOp op = ReduceOp::sum) {
    return start<T>(detail::checked::reduce_scatter<T>(*this, input, output, op));
  }

  template <Element T>
  [[nodiscard]] MpiRequest reduce_scatter_v(std::span<const std::type_identity_t<T>> input,
                                            std::span<T> output,
                                            std::span<const std::size_t> counts,
                                            ReduceOp op = ReduceOp::sum) {
    return start<T>(detail::checked::reduce_scatter_v<T>(*this, input, output, counts, op));
  }

  template <Element T>
  [[nodiscard]] MpiRequest all_gather(std::span<const std::type_identity_t<T>> input,
                                      std::span<T> output) {
    return start<void>(detail::checked::all_gather<T>(*this, input, output));
  }

  template <Element T>
  [[nodiscard]] MpiRequest all_gather_v(std::span<const std::type_identity_t<T>> input,
                                        std::span<T> output, std::span<const std::size_t> counts) {
    return start<void>(detail::checked::all_gather_v<T>(*this, input, output, counts));
  }

  template <Element T>
  [[nodiscard]] MpiRequest all_to_all(std::span<const std::type_identity_t<T>> input,
                                      std::span<T> output) {
    return start<void>(detail::checked::all_to_all<T>(*this, input, output));
  }

  template <Element T>
  [[nodiscard]] MpiRequest all_to_all_v(std::span<const std::type_identity_t<T>> input,
                                        std::span<const std::size_t> send_counts,
                                        std::span<T> output,
                                        std::span<const std::size_t> receive_counts) {
    return start<void>(
        detail::checked::all_to_all_v<T>(*this, input, send_counts, output, receive_counts));
  }

  template <Element T>
  [[nodiscard]] MpiRequest broadcast(std::span<T> data, int root) {
    return start<void>(detail::checked::broadcast<T>(*this, data, root));
  }

  [[nodiscard]] MpiRequest barrier() { return start_barrier("barrier"); }

  /// `mine` may be exactly this rank's part of `all`.
  [[nodiscard]] MpiRequest exchange(std::span<const std::byte> mine, std::span<std::byte> all) {
    return start<void>(detail::checked::exchange(*this, mine, all));
  }

  /// From any thread. Operations under way on this rank fail at once, those on its peers as soon as
  /// they look, which a waiting rank does all the time. Where the calling thread may not call MPI,
  /// the peers are told by this rank's next call; a rank that waits makes one at once.
  void abort(std::string_view reason) const noexcept { state_->abort(reason); }

  /// There is nothing to launch together.
  struct Batch {
    Batch() noexcept {}
    Batch(const Batch&) = delete;
    Batch& operator=(const Batch&) = delete;
    ~Batch() {}
  };
  [[nodiscard]] Batch batch() noexcept { return {}; }

 protected:
  MpiCommunicatorRef(MPI_Comm comm, bool owned, const MpiOptions& options)
      : state_(std::make_shared<detail::MpiState>(comm, owned, options)) {}

  MpiRequest start_barrier(const char* name) {
    return start<void>({.kind = detail::InProcessKind::barrier, .name = name});
  }
  detail::MpiState* state() const noexcept { return state_.get(); }

 private:
  [[nodiscard]] std::size_t world_size() const noexcept { return state_->size(); }
  /// @tparam T what is reduced, or void
  template <class T>
  MpiRequest start(const detail::InProcessOperation& what) {
    // Alone there is nothing to hand to MPI.
    const bool native = state_->options().reduction == MpiReduction::native && world_size() > 1;
    return MpiRequest(state_, detail::mpi_operation<T>(what, world_size(), native));
  }

  std::shared_ptr<detail::MpiState> state_;
};

/// A communicator over MPI that owns its `MPI_Comm`, and with it a context in which nobody else's
/// messages are. Destroying it is collective, as making it is: a rank waits for its peers' ends,
/// but not longer than `MpiOptions::teardown`; a peer that still needs this rank fails at once.
/// Must be destroyed before MPI_Finalize. One that is poisoned is left to MPI and not freed.
class MpiCommunicator : public MpiCommunicatorRef {
 public:
  /// Duplicates `comm`; collective over it. Throws `UsageError` where MPI may not be called, and
  /// `CommunicatorError` where a rank doesn't come within the timeout.
  explicit MpiCommunicator(MPI_Comm comm, const MpiOptions& options = {})
      : MpiCommunicatorRef(duplicate(comm, options), true, options) {
    state()->meet_peers();
  }

  MpiCommunicator(MpiCommunicator&&) noexcept = default;
  MpiCommunicator& operator=(MpiCommunicator&& other) noexcept {
    if (this != &other) {
      close();
      MpiCommunicatorRef::operator=(std::move(other));
    }
    return *this;
  }
  ~MpiCommunicator() { close(); }

  /// This rank's part of a smaller communicator: of those that give the same `color`, in the order
  /// of `key`, then of rank. Collective over this one. Throws `UsageError` where `color` is
  /// negative, and `CommunicatorError`. MPI's own split, called once all ranks have come, knows no
  /// timeout: a rank that fails at that moment leaves its peers in it.
  [[nodiscard]] MpiCommunicator split(int color, int key) {
    if (color < 0) {
      throw UsageError("rank " + std::to_string(rank()) + ": split: color is " +
                       std::to_string(color) + "; it must not be negative. Nothing was started.");
    }
    // MPI_Comm_split knows no timeout: it is called once all ranks are there.
    start_barrier("split").wait();
    MPI_Comm part = MPI_COMM_NULL;
    const int code = MPI_Comm_split(native_handle(), color, key, &part);
    if (code != MPI_SUCCESS) {
      const std::string why = detail::mpi_error("MPI_Comm_split", code);
      abort(why);
      throw CommunicatorError(CommunicatorFailure::transport, rank(), "split", 0,
                              "rank " + std::to_string(rank()) + ": split: " + why);
    }
    return MpiCommunicator(Adopted{part}, state()->options());
  }

 private:
  struct Adopted {
    MPI_Comm comm;
  };
  MpiCommunicator(Adopted adopted, const MpiOptions& options)
      : MpiCommunicatorRef(adopted.comm, true, options) {
    state()->meet_peers();
  }

  static MPI_Comm duplicate(MPI_Comm comm, const MpiOptions& options) {
    detail::require_comm(comm, "MpiCommunicator");
    (void)detail::mpi_chunk_bytes(options, detail::size_of(comm));  // before peers are involved
    // Where it fails MPI may still write the handle, so that then the memory is leaked.
    auto copy = std::make_unique<MPI_Comm>(MPI_COMM_NULL);
    MPI_Request request = MPI_REQUEST_NULL;
    const auto fail = [&](CommunicatorFailure failure, const std::string& why) {
      (void)copy.release();
      const int rank = static_cast<int>(detail::rank_in(comm));
      throw CommunicatorError(failure, rank, "duplicate", 0,
                              "rank " + std::to_string(rank) + ": MpiCommunicator of " +
                                  std::to_string(detail::size_of(comm)) + " ranks: " + why);
    };
    int code = MPI_Comm_idup(comm, copy.get(), &request);
    if (code != MPI_SUCCESS) {
      fail(CommunicatorFailure::transport, detail::mpi_error("MPI_Comm_idup", code));
    }
    const auto end =
        std::chrono::steady_clock::now() +
        std::min<std::chrono::nanoseconds>(options.timeout, std::chrono::hours(100000));
    for (int over = 0;;) {
      code = MPI_Test(&request, &over, MPI_STATUS_IGNORE);
      if (code != MPI_SUCCESS) {
        fail(CommunicatorFailure::transport, detail::mpi_error("MPI_Comm_idup", code));
      }
      if (over != 0) return *copy;
      if (std::chrono::steady_clock::now() > end) {
        fail(CommunicatorFailure::timeout,
             "not all ranks of the given communicator have come to duplicate it; make it on all "
             "of them, or allow more time (MpiOptions::timeout)");
      }
      std::this_thread::yield();
    }
  }

  void close() noexcept {
    if (state() != nullptr) state()->close();
  }
};

static_assert(Communicator<MpiCommunicatorRef, float> && Communicator<MpiCommunicatorRef, double>);
static_assert(Communicator<MpiCommunicator, float> && Communicator<MpiCommunicator, double>);

}  // namespace zero
