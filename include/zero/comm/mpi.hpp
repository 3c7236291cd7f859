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
#include <functional>
#include <memory>
#include <memory_resource>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "zero/comm/mpi_options.hpp"
#include "zero/communicator.hpp"
#include "zero/detail/checked_operation.hpp"
#include "zero/detail/mpi_context.hpp"
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
  /// Throws `CommunicatorError`, after which nobody writes this rank's buffers and they may be
  /// freed (a peer of the same host that has not heard may read one, and throws away what it
  /// finds).
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
  /// returned meanwhile (MPI_ERRORS_RETURN), and a receive is pending, which MPI wants over before
  /// MPI_Finalize. Where that can't be promised, use `MpiCommunicator`.
  explicit MpiCommunicatorRef(MPI_Comm comm, const MpiOptions& options = {})
      : MpiCommunicatorRef(
            detail::MpiMembers::all(detail::require_comm(comm, "MpiCommunicatorRef"), false),
            options) {}

  [[nodiscard]] int rank() const noexcept { return static_cast<int>(state_->rank()); }
  [[nodiscard]] int size() const noexcept { return static_cast<int>(state_->size()); }
  [[nodiscard]] std::chrono::nanoseconds timeout() const noexcept {
    return state_->options().timeout;
  }
  /// MPI's own handle; MPI_COMM_NULL for a part made by `split`, which has none of its own.
  /// Communicate over a duplicate of it, not over it.
  [[nodiscard]] MPI_Comm native_handle() const noexcept { return state_->members().own_comm(); }

  /// A resource whose memory all ranks read where it lies, rather than be sent it; null, on all
  /// ranks, where some can't: on several hosts, where the system forbids it, without
  /// `MpiOptions::share_memory`, and for a borrowed `MPI_Comm`. To be kept as long as anything is
  /// allocated from it; it may outlive the communicator. Not collective. Where it is full, ordinary
  /// memory is given, which peers are sent.
  [[nodiscard]] std::shared_ptr<std::pmr::memory_resource> shared_memory() const noexcept {
    return state_->shared_memory();
  }
  /// Where `bytes` that `rank` has at `address` of such memory lie in this process; null where they
  /// are no such memory. They stay there as long as this communicator, whatever the peer does.
  [[nodiscard]] const std::byte* peer_memory(int rank, std::uint64_t address,
                                             std::size_t bytes) const noexcept {
    return state_->peer_memory(static_cast<std::size_t>(rank), address, bytes);
  }

  // The operations, what they do and how spans may alias: zero/communicator.hpp.

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

  [[nodiscard]] MpiRequest barrier() {
    return start<void>({.kind = detail::InProcessKind::barrier, .name = "barrier"});
  }

  /// `mine` may be exactly this rank's part of `all`.
  [[nodiscard]] MpiRequest exchange(std::span<const std::byte> mine, std::span<std::byte> all) {
    return start<void>(detail::checked::exchange(*this, mine, all));
  }

  /// From any thread. Operations under way on this rank fail at once, those on its peers as soon as
  /// they look, which a waiting rank does all the time. Where the calling thread may not call MPI,
  /// the peers are told by this rank's next call; a rank that waits makes one at once.
  void abort(std::string_view reason) const noexcept { state_->abort(reason); }

  /// Whether another thread may call this communicator, or a duplicate, while this one calls MPI:
  /// with MPI_THREAD_MULTIPLE. The same from MPI_Init_thread to MPI_Finalize.
  [[nodiscard]] bool concurrent() const noexcept {
    return detail::mpi_is_up() && detail::mpi_thread_level() == MPI_THREAD_MULTIPLE;
  }

  /// There is nothing to launch together.
  struct Batch {
    Batch() noexcept {}
    Batch(const Batch&) = delete;
    Batch& operator=(const Batch&) = delete;
    ~Batch() {}
  };
  [[nodiscard]] Batch batch() noexcept { return {}; }

 protected:
  MpiCommunicatorRef(detail::MpiMembers members, const MpiOptions& options)
      : state_(std::make_shared<detail::MpiState>(std::move(members), options)) {}

  /// Every rank's `mine`, in rank order, in an operation of this name.
  template <class T>
  std::vector<T> exchange_all(const char* name, const T& mine) {
    std::vector<T> all(world_size());
    detail::InProcessOperation what = detail::checked::exchange(
        *this, std::as_bytes(std::span(&mine, 1)), std::as_writable_bytes(std::span(all)));
    what.name = name;
    start<void>(what).wait();
    return all;
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
/// Must be destroyed before MPI_Finalize; after it nothing is done any more. One that is poisoned
/// is left to MPI and not freed.
class MpiCommunicator : public MpiCommunicatorRef {
 public:
  /// Duplicates `comm`; collective over it, on which errors are returned meanwhile
  /// (MPI_ERRORS_RETURN). Throws `UsageError` where MPI may not be called, and `CommunicatorError`
  /// where a rank doesn't come within the timeout or the ranks' options differ.
  explicit MpiCommunicator(MPI_Comm comm, const MpiOptions& options = {})
      : MpiCommunicatorRef(members_of_duplicate(comm, options), options) {
    agree_on_reduction();
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
  /// of `key`, then of rank. Collective over this one; one at a time on a rank, its parts' splits
  /// included. Throws `UsageError` where `color` is negative or MPI has no tags left, and
  /// `CommunicatorError`. A failure of the part is not one of the whole, nor the reverse. A part
  /// shares the whole's `MPI_Comm`, may outlive it, and sums in rank order, for MPI's own
  /// reductions need an `MPI_Comm` of the members alone, which MPI makes without a timeout.
  [[nodiscard]] MpiCommunicator split(int color, int key) {
    if (color < 0) {
      throw UsageError("rank " + std::to_string(rank()) + ": split: color is " +
                       std::to_string(color) + "; it must not be negative. Nothing was started.");
    }
    return part("split", color, key);
  }

  /// The same ranks, apart from this communicator: operations of the two may be under way at once,
  /// with MPI_THREAD_MULTIPLE from two threads, and a failure of one is not one of the other. A
  /// part of all ranks, with what `split` says of parts: collective, one at a time, in rank order.
  [[nodiscard]] MpiCommunicator duplicate() { return part("duplicate", 0, rank()); }

 private:
  MpiCommunicator(detail::MpiMembers part, const MpiOptions& options)
      : MpiCommunicatorRef(std::move(part), options) {
    state()->meet_peers();
  }

  /// `name`: of the operation, for messages.
  MpiCommunicator part(const char* name, int color, int key) {
    struct Wish {
      int color, key, tag;
    };
    const detail::MpiMembers& whole = state()->members();
    const std::vector<Wish> all = exchange_all(name, Wish{color, key, whole.context->unused_tag()});
    // Each rank's tags only rise, so that no two have ever met under this one.
    int tag = 0;
    for (const Wish& wish : all) tag = std::max(tag, wish.tag);
    if (tag > detail::MpiContext::last_tag() - 3) {
      throw UsageError("rank " + std::to_string(rank()) + ": " + name +
                       ": this communicator and its parts have used all of MPI's tags; split and "
                       "duplicate less often, or make a new MpiCommunicator.");
    }
    whole.context->use_up_to(tag + 2);

    std::vector<std::size_t> ranks;
    for (std::size_t r = 0; r < all.size(); ++r) {
      if (all[r].color == color) ranks.push_back(r);
    }
    std::stable_sort(ranks.begin(), ranks.end(),
                     [&](std::size_t a, std::size_t b) { return all[a].key < all[b].key; });
    detail::MpiMembers members{.context = whole.context, .tag = tag};
    for (const std::size_t r : ranks) {
      if (r == whole.rank) members.rank = members.mpi_ranks.size();
      members.mpi_ranks.push_back(whole.mpi_ranks[r]);
    }
    members.are_all = whole.are_all && members.mpi_ranks == whole.mpi_ranks;
    MpiOptions options = state()->options();
    options.reduction = MpiReduction::rank_order;
    return MpiCommunicator(std::move(members), options);
  }

  static detail::MpiMembers members_of_duplicate(MPI_Comm comm, const MpiOptions& options) {
    detail::require_comm(comm, "MpiCommunicator");
    (void)detail::mpi_chunk_bytes(options, detail::size_of(comm));  // before peers are involved
    return detail::MpiMembers::all(detail::mpi_duplicate(comm, options), true);
  }

  /// By the header of each message ranks see whether their `chunk_bytes` differ.
  void agree_on_reduction() {
    const std::vector<MpiReduction> all =
        exchange_all("MpiCommunicator", state()->options().reduction);
    const auto other = std::adjacent_find(all.begin(), all.end(), std::not_equal_to<>());
    if (other == all.end()) return;
    const auto words = [&](std::ptrdiff_t r) {
      const bool native = all[static_cast<std::size_t>(r)] == MpiReduction::native;
      return "rank " + std::to_string(r) +
             " has MpiReduction::" + (native ? "native" : "rank_order");
    };
    const std::ptrdiff_t r = other - all.begin();
    state()->give_up(CommunicatorFailure::mismatch, "MpiCommunicator",
                     "their MpiOptions::reduction differ: " + words(r) + ", " + words(r + 1) +
                         "; give all ranks the same");
  }

  void close() noexcept {
    if (state() != nullptr) state()->close();
  }
};

static_assert(Communicator<MpiCommunicatorRef, float> && Communicator<MpiCommunicatorRef, double>);
static_assert(Communicator<MpiCommunicator, float> && Communicator<MpiCommunicator, double> &&
              Duplicable<MpiCommunicator>);

}  // namespace zero
