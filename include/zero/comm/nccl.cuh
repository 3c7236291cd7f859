// SPDX-License-Identifier: Apache-2.0
/// @file
/// Ranks on GPUs, over NCCL (`zero::nccl`). One rank a GPU; a rank is a process, or a thread.
///
///     cudaSetDevice(local_rank);
///     zero::cuda::Stream stream;
///     zero::NcclCommunicator comm(zero::NcclTcp::from_environment(), stream);   // torchrun's
///     zero::ZeroSharded optimizer{zero::Adam{}, store, comm};
///
/// Other ways to meet: a shared file (`NcclFile`), any communicator in host memory
/// (`NcclOver(mpi_comm)`), NCCL's unique id carried by the program itself, and all devices of one
/// process (`NcclCommunicator::local`).
///
/// Who notices what: this rank's failures, and whatever NCCL reports, end all operations on this
/// rank at once. NCCL tells peers of a failure where their connection breaks; where it doesn't,
/// they give up after `NcclOptions::timeout`.
#pragma once

#include <nccl.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "zero/comm/nccl_bootstrap.hpp"
#include "zero/comm/nccl_options.hpp"
#include "zero/communicator.hpp"
#include "zero/cuda/communicator.hpp"
#include "zero/cuda/stream.hpp"
#include "zero/detail/checked_operation.hpp"
#include "zero/detail/nccl_error.hpp"
#include "zero/detail/nccl_id.hpp"
#include "zero/detail/nccl_init.hpp"
#include "zero/detail/nccl_operation.cuh"
#include "zero/detail/nccl_scope.hpp"
#include "zero/detail/nccl_state.cuh"
#include "zero/element.hpp"
#include "zero/error.hpp"
#include "zero/memory.hpp"

namespace zero {

/// An operation over NCCL. Operations run in the communicator's stream, in the order of their
/// starts. A request that is empty, moved from, waited for or enqueued is complete.
class NcclRequest {
 public:
  NcclRequest() = default;
  NcclRequest(NcclRequest&& other) noexcept { swap(other); }
  NcclRequest& operator=(NcclRequest&& other) noexcept {
    NcclRequest(std::move(other)).swap(*this);
    return *this;
  }
  /// Poisons the communicator where the operation is unfinished and nobody has enqueued it.
  ~NcclRequest() {
    if (state_ != nullptr) state_->drop(sequence_, std::uncaught_exceptions() > 0);
  }

  /// Blocks the host until the device has done the operation. Throws `CommunicatorError`, after
  /// which the buffers may be freed unless the message says otherwise.
  void wait() {
    if (state_ != nullptr) wait(state_->options().timeout);
  }
  /// As above. `timeout` is how long this rank waits while none of its operations ends.
  void wait(std::chrono::nanoseconds timeout) {
    if (state_ == nullptr) return;
    state_->wait(sequence_, timeout);
    state_.reset();
  }
  /// Ends the request once the operation stands in the stream, which is at once, save that NCCL may
  /// wait for peers where it connects to them: in the first operations of a kind. Throws as `wait`;
  /// what fails later is known to the communicator's `check` and `wait`.
  void enqueue() {
    if (state_ == nullptr) return;
    state_->enqueue(sequence_);
    state_.reset();
  }
  /// Whether the operation is over. Throws what `wait` throws when it has failed.
  [[nodiscard]] bool done() {
    if (state_ == nullptr) return true;
    if (!state_->done(sequence_)) return false;
    state_.reset();
    return true;
  }

 private:
  friend class NcclCommunicatorRef;
  NcclRequest(std::shared_ptr<detail::NcclState> state, const detail::NcclOperation& operation)
      : state_(std::move(state)), sequence_(state_->start(operation)) {}

  void swap(NcclRequest& other) noexcept {
    std::swap(state_, other.state_);
    std::swap(sequence_, other.sequence_);
  }

  std::shared_ptr<detail::NcclState> state_{};
  std::uint64_t sequence_ = 0;
};

/// One rank's handle to a communicator over NCCL that it doesn't own: one made of an `ncclComm_t`
/// and a stream, or a `NcclCommunicator`'s. Copies are the same rank. Works in CUDA memory: spans
/// are of memory that this rank's device reaches. It need not be the current device where
/// operations are called; no group of the caller's own (ncclGroupStart) may be open there.
///
/// Every operation throws `UsageError` before anything is started where this rank's arguments are
/// wrong in themselves, and `CommunicatorError` where the communicator is poisoned; all other
/// failures come from the request.
///
/// Where the stream is captured into a graph, operations are captured (end requests by `enqueue`),
/// and nobody but `wait(event)` watches over the graph's launches.
class NcclCommunicatorRef {
 public:
  using request_type = NcclRequest;

  static constexpr MemorySpace memory_space = MemorySpace::cuda;
  [[nodiscard]] static constexpr bool supports(ElementType) noexcept { return true; }
  [[nodiscard]] static constexpr bool supports(ReduceOp) noexcept { return true; }

  /// Borrows `comm`; both it and `stream` outlive the last copy and request. Best made with
  /// `config.blocking = 0`: in a blocking one's calls no timeout runs. A failure ends `comm`
  /// (ncclCommAbort): whoever owns it destroys it only while `aborted()` is false.
  NcclCommunicatorRef(ncclComm_t comm, cuda::StreamView stream, const NcclOptions& options = {})
      : NcclCommunicatorRef(borrowed(comm, stream), options) {}

  [[nodiscard]] int rank() const noexcept { return state_->rank(); }
  [[nodiscard]] int size() const noexcept { return state_->size(); }
  /// Where operations run, in the order of their starts.
  [[nodiscard]] cuda::StreamView stream() const noexcept { return state_->stream(); }
  /// The CUDA device of this rank.
  [[nodiscard]] int device() const noexcept { return state_->device(); }
  [[nodiscard]] std::chrono::nanoseconds timeout() const noexcept {
    return state_->options().timeout;
  }
  /// NCCL's own handle; null once aborted. It may be aborted at any time while the watchdog runs.
  [[nodiscard]] ncclComm_t native_handle() const { return state_->native_handle(); }
  [[nodiscard]] bool aborted() const { return native_handle() == nullptr; }

  // The operations, what they do and how spans may alias: zero/communicator.hpp.

  template <Element T>
  [[nodiscard]] NcclRequest all_reduce(std::span<T> data, ReduceOp op = ReduceOp::sum) {
    return start<T>(detail::checked::all_reduce<T>(*this, data, op));
  }

  template <Element T>
  [[nodiscard]] NcclRequest reduce_scatter(std::span<const std::type_identity_t<T>> input,
                                           std::span<T> output, ReduceOp op = ReduceOp::sum) {
    return start<T>(detail::checked::reduce_scatter<T>(*this, input, output, op));
  }

  template <Element T>
  [[nodiscard]] NcclRequest reduce_scatter_v(std::span<const std::type_identity_t<T>> input,
                                             std::span<T> output,
                                             std::span<const std::size_t> counts,
                                             ReduceOp op = ReduceOp::sum) {
    return start<T>(detail::checked::reduce_scatter_v<T>(*this, input, output, counts, op));
  }

  // Scaled sums. In rank order the sum is multiplied, once, in `arithmetic_t<T>`; NCCL's own
  // reductions multiply each rank's elements before (a factor) or the sum (an average).

  template <Element T>
  [[nodiscard]] NcclRequest all_reduce_average(std::span<T> data) {
    return scaled<T>(detail::checked::all_reduce<T>(*this, data, ReduceOp::sum),
                     "all_reduce_average", detail::NcclScaling::average, 1.0 / size());
  }
  template <Element T>
  [[nodiscard]] NcclRequest all_reduce_scaled(std::span<T> data, double factor) {
    return scaled<T>(detail::checked::all_reduce<T>(*this, data, ReduceOp::sum),
                     "all_reduce_scaled", detail::NcclScaling::factor, factor);
  }
  template <Element T>
  [[nodiscard]] NcclRequest reduce_scatter_average(std::span<const std::type_identity_t<T>> input,
                                                   std::span<T> output) {
    return scaled<T>(detail::checked::reduce_scatter<T>(*this, input, output, ReduceOp::sum),
                     "reduce_scatter_average", detail::NcclScaling::average, 1.0 / size());
  }
  template <Element T>
  [[nodiscard]] NcclRequest reduce_scatter_scaled(std::span<const std::type_identity_t<T>> input,
                                                  std::span<T> output, double factor) {
    return scaled<T>(detail::checked::reduce_scatter<T>(*this, input, output, ReduceOp::sum),
                     "reduce_scatter_scaled", detail::NcclScaling::factor, factor);
  }

  template <Element T>
  [[nodiscard]] NcclRequest all_gather(std::span<const std::type_identity_t<T>> input,
                                       std::span<T> output) {
    return start<void>(detail::checked::all_gather<T>(*this, input, output));
  }

  template <Element T>
  [[nodiscard]] NcclRequest all_gather_v(std::span<const std::type_identity_t<T>> input,
                                         std::span<T> output, std::span<const std::size_t> counts) {
    return start<void>(detail::checked::all_gather_v<T>(*this, input, output, counts));
  }

  template <Element T>
  [[nodiscard]] NcclRequest all_to_all(std::span<const std::type_identity_t<T>> input,
                                       std::span<T> output) {
    return start<void>(detail::checked::all_to_all<T>(*this, input, output));
  }

  template <Element T>
  [[nodiscard]] NcclRequest all_to_all_v(std::span<const std::type_identity_t<T>> input,
                                         std::span<const std::size_t> send_counts,
                                         std::span<T> output,
                                         std::span<const std::size_t> receive_counts) {
    return start<void>(
        detail::checked::all_to_all_v<T>(*this, input, send_counts, output, receive_counts));
  }

  template <Element T>
  [[nodiscard]] NcclRequest broadcast(std::span<T> data, int root) {
    return start<void>(detail::checked::broadcast<T>(*this, data, root));
  }

  /// For the host: `wait` for it.
  [[nodiscard]] NcclRequest barrier() {
    return start<void>({.kind = detail::InProcessKind::barrier, .name = "barrier"});
  }

  /// Host bytes, through the device. `mine` may be exactly this rank's part of `all`. It moves on
  /// whenever this rank waits, asks or starts, and later operations go after it.
  [[nodiscard]] NcclRequest exchange(std::span<const std::byte> mine, std::span<std::byte> all) {
    return start<void>(detail::checked::exchange(*this, mine, all));
  }

  /// Blocks the host until `event`, which was recorded behind operations, has happened, no longer
  /// than `timeout` (the options', unless given). Throws `CommunicatorError` where it has not, and
  /// where this communicator has failed meanwhile; `CudaError`.
  void wait(const cuda::Event& event) { state_->wait(event, state_->options().timeout); }
  void wait(const cuda::Event& event, std::chrono::nanoseconds timeout) {
    state_->wait(event, timeout);
  }

  /// Throws `CommunicatorError` where the communicator has failed. Doesn't block.
  void check() { state_->check(); }

  /// From any thread. Operations under way on this rank fail at once; those on its peers as NCCL
  /// tells them, else by their timeouts.
  void abort(std::string_view reason) const noexcept { state_->abort(reason); }

  /// Another thread may call a duplicate while this one calls this communicator.
  [[nodiscard]] bool concurrent() const noexcept { return true; }

  /// Room for sums in rank order, on the device: (size - 1) / size of an operation's bytes, that is
  /// what a batch needs together. It otherwise grows in the first operation that needs more, which
  /// a captured stream can't do.
  void reserve(std::size_t bytes) { state_->reserve(bytes); }

  /// Operations started within its life are launched together when it ends, as one of NCCL's
  /// groups (two where sums are in rank order), and don't depend on each other; or when one of them
  /// is waited for, asked for or enqueued. What goes wrong then comes from their requests.
  class Batch {
   public:
    explicit Batch(std::shared_ptr<detail::NcclState> state) : state_(std::move(state)) {
      state_->begin_batch();
    }
    Batch(const Batch&) = delete;
    Batch& operator=(const Batch&) = delete;
    ~Batch() { state_->end_batch(); }

   private:
    std::shared_ptr<detail::NcclState> state_;
  };
  [[nodiscard]] Batch batch() { return Batch(state_); }

 protected:
  NcclCommunicatorRef(detail::NcclPlace place, const NcclOptions& options)
      : state_(make_state(std::move(place), options)) {}

  /// Every rank's `mine`, in rank order, in an operation of this name.
  template <class T>
  std::vector<T> exchange_all(const char* name, const T& mine, std::chrono::nanoseconds timeout) {
    std::vector<T> all(static_cast<std::size_t>(size()));
    detail::InProcessOperation what = detail::checked::exchange(
        *this, std::as_bytes(std::span(&mine, 1)), std::as_writable_bytes(std::span(all)));
    what.name = name;
    what.element = {};  // how many bytes it is says nothing to the caller
    start<void>(what).wait(timeout);
    return all;
  }
  detail::NcclState* state() const noexcept { return state_.get(); }

 private:
  /// @tparam T what is reduced, or void
  template <class T>
  NcclRequest start(const detail::InProcessOperation& what) {
    return NcclRequest(state_, detail::nccl_operation<T>(what, native()));
  }
  template <class T>
  NcclRequest scaled(detail::InProcessOperation what, const char* name, detail::NcclScaling scaling,
                     double factor) {
    what.name = name;
    return NcclRequest(state_, detail::nccl_operation<T>(what, native(), scaling, factor));
  }
  [[nodiscard]] bool native() const noexcept {
    return state_->options().reduction == NcclReduction::native;
  }

  static std::shared_ptr<detail::NcclState> make_state(detail::NcclPlace place,
                                                       const NcclOptions& options) {
    const ncclComm_t owned = place.owned ? place.comm : nullptr;
    try {
      return std::make_shared<detail::NcclState>(std::move(place), options);
    } catch (...) {
      if (owned != nullptr) (void)ncclCommAbort(owned);
      throw;
    }
  }

  static detail::NcclPlace borrowed(ncclComm_t comm, cuda::StreamView stream) {
    if (comm == nullptr) {
      throw UsageError(
          "NcclCommunicatorRef: the ncclComm_t is null; make one, or use NcclCommunicator.");
    }
    detail::NcclPlace place{.comm = comm, .owned = false, .stream = stream};
    const auto check = [&](ncclResult_t result, const char* call) {
      if (result == ncclSuccess) return;
      throw UsageError("NcclCommunicatorRef: " + detail::nccl_failure_text(result, call, comm));
    };
    check(ncclCommUserRank(comm, &place.rank), "ncclCommUserRank");
    check(ncclCommCount(comm, &place.size), "ncclCommCount");
    check(ncclCommCuDevice(comm, &place.device), "ncclCommCuDevice");
    const int device = detail::nccl_device(stream);
    if (device != place.device) {
      throw UsageError("NcclCommunicatorRef: the communicator is one of device " +
                       std::to_string(place.device) + ", but the stream of device " +
                       std::to_string(device) + "; give a stream of the communicator's device.");
    }
    return place;
  }

  std::shared_ptr<detail::NcclState> state_;
};

/// A communicator over NCCL that owns its `ncclComm_t`. Made on the device that is current and that
/// `stream` belongs to; the stream outlives it. Destroying it waits for what is under way, not
/// longer than `NcclOptions::teardown`, and aborts it then. All ranks make, split, duplicate and
/// destroy communicators in the same order.
class NcclCommunicator : public NcclCommunicatorRef {
 public:
  /// Waits for all ranks. Throws `UsageError`, `CudaError`, and `CommunicatorError` where a rank
  /// doesn't come within `NcclOptions::init_timeout`, NCCL refuses or the ranks' options differ.
  /// @param id made by one rank (ncclGetUniqueId) and the same on all
  NcclCommunicator(const ncclUniqueId& id, int rank, int size, cuda::StreamView stream,
                   const NcclOptions& options = {})
      : NcclCommunicatorRef(joined(id, rank, size, stream, options), options) {
    agree_on_reduction();
  }

  /// Where `bootstrap` says how ranks meet. Throws what that throws, too.
  template <NcclBootstrap B>
  NcclCommunicator(const B& bootstrap, cuda::StreamView stream, const NcclOptions& options = {})
      : NcclCommunicatorRef(met(bootstrap, stream, options), options) {
    agree_on_reduction();
  }

  /// All ranks of a world in one process, rank r on `devices[r]`, each with a stream of its own.
  /// Each is to be used by a thread of its own. Throws as the constructors do.
  [[nodiscard]] static std::vector<NcclCommunicator> local(std::span<const int> devices,
                                                           const NcclOptions& options = {}) {
    if (devices.empty()) {
      throw UsageError(
          "NcclCommunicator::local: there are no devices; give one for each rank, such as 0, 1.");
    }
    const auto end = detail::deadline(options.init_timeout);
    const ncclUniqueId id = detail::new_nccl_id();
    std::vector<detail::NcclInit> joining;
    for (std::size_t r = 0; r < devices.size(); ++r) {
      const detail::CudaDeviceScope device(devices[r]);
      joining.emplace_back(id, static_cast<int>(r), static_cast<int>(devices.size()));
    }
    std::vector<NcclCommunicator> all;
    for (std::size_t r = 0; r < devices.size(); ++r) {
      const detail::CudaDeviceScope device(devices[r]);
      cuda::Stream stream;
      detail::NcclPlace place{.rank = static_cast<int>(r),
                              .size = static_cast<int>(devices.size()),
                              .device = devices[r],
                              .stream = stream};
      place.own_stream = std::move(stream);
      place.comm = joining[r].finish(end);
      all.push_back(NcclCommunicator(std::move(place), options));
    }
    return all;
  }

  NcclCommunicator(NcclCommunicator&&) noexcept = default;
  NcclCommunicator& operator=(NcclCommunicator&& other) noexcept {
    if (this != &other) {
      close();
      NcclCommunicatorRef::operator=(std::move(other));
    }
    return *this;
  }
  ~NcclCommunicator() { close(); }

  /// This rank's part of a smaller communicator: of those that give the same `color`, in the order
  /// of `key`, then of rank. Collective over this one; waits for what is under way. Throws
  /// `UsageError` where `color` is negative, and `CommunicatorError`. A failure of the part is not
  /// one of the whole, nor the reverse, but a stream that they share stands still until then. A
  /// part may outlive the whole.
  /// @param stream where the part's operations run: unless given, the whole's
  [[nodiscard]] NcclCommunicator split(int color, int key) { return split(color, key, stream()); }
  [[nodiscard]] NcclCommunicator split(int color, int key, cuda::StreamView stream) {
    if (color < 0) {
      throw UsageError("rank " + std::to_string(rank()) + ": split: color is " +
                       std::to_string(color) + "; it must not be negative. Nothing was started.");
    }
    return part("split", color, key, stream, std::nullopt);
  }

  /// The same ranks, apart from this communicator, in a stream of its own (or of the caller's):
  /// operations of the two may be under way at once, from two threads. Their kernels then run at
  /// once too, for which the device has room, save where others fill it. Collective, as `split`.
  [[nodiscard]] NcclCommunicator duplicate() {
    const detail::CudaDeviceScope scope(device());
    cuda::Stream own;
    const cuda::StreamView view = own;
    return part("duplicate", 0, rank(), view, std::move(own));
  }
  [[nodiscard]] NcclCommunicator duplicate(cuda::StreamView stream) {
    return part("duplicate", 0, rank(), stream, std::nullopt);
  }

 private:
  NcclCommunicator(detail::NcclPlace place, const NcclOptions& options)
      : NcclCommunicatorRef(std::move(place), options) {}

  static detail::NcclPlace joined(const ncclUniqueId& id, int rank, int size,
                                  cuda::StreamView stream, const NcclOptions& options) {
    detail::NcclPlace place{.rank = rank, .size = size, .stream = stream};
    place.device = detail::nccl_device(stream);
    const auto end = detail::deadline(options.init_timeout);
    place.comm = detail::NcclInit(id, rank, size).finish(end);
    return place;
  }

  template <class B>
  static detail::NcclPlace met(const B& bootstrap, cuda::StreamView stream,
                               const NcclOptions& options) {
    (void)detail::nccl_device(stream);  // before peers are involved
    return joined(bootstrap.unique_id(options.init_timeout), bootstrap.rank, bootstrap.size, stream,
                  options);
  }

  /// @param name of the operation, for messages
  NcclCommunicator part(const char* name, int color, int key, cuda::StreamView stream,
                        std::optional<cuda::Stream> own) {
    struct Wish {
      int color, key;
    };
    detail::NcclPlace place{.device = device(), .stream = stream};
    // Where it returns, nothing is under way on any rank.
    const std::vector<Wish> all =
        exchange_all(name, Wish{color, key}, state()->options().init_timeout);
    std::vector<int> ranks;
    for (int r = 0; r < size(); ++r) {
      if (all[static_cast<std::size_t>(r)].color == color) ranks.push_back(r);
    }
    std::stable_sort(ranks.begin(), ranks.end(), [&](int a, int b) {
      return all[static_cast<std::size_t>(a)].key < all[static_cast<std::size_t>(b)].key;
    });
    place.rank = static_cast<int>(std::find(ranks.begin(), ranks.end(), rank()) - ranks.begin());
    place.size = static_cast<int>(ranks.size());
    place.own_stream = std::move(own);
    if (place.size != size() || !std::is_sorted(ranks.begin(), ranks.end())) {
      place.ranks_in_whole = std::move(ranks);
    }
    place.comm = state()->split(name, color, key);
    const detail::CudaDeviceScope scope(device());
    return NcclCommunicator(std::move(place), state()->options());
  }

  void agree_on_reduction() {
    const std::vector<NcclReduction> all =
        exchange_all("NcclCommunicator (comparing options)", state()->options().reduction,
                     state()->options().init_timeout);
    const auto other = std::adjacent_find(all.begin(), all.end(), std::not_equal_to<>());
    if (other == all.end()) return;
    const auto words = [&](std::ptrdiff_t r) {
      const bool native = all[static_cast<std::size_t>(r)] == NcclReduction::native;
      return "rank " + std::to_string(r) +
             " has NcclReduction::" + (native ? "native" : "rank_order");
    };
    const std::ptrdiff_t r = other - all.begin();
    // All ranks see it alike and end in good order, so that none is told of the others' end first.
    throw CommunicatorError(CommunicatorFailure::mismatch, rank(), "NcclCommunicator", 0,
                            "rank " + std::to_string(rank()) +
                                ": NcclCommunicator: the ranks' NcclOptions::reduction differ: " +
                                words(r) + ", " + words(r + 1) + "; give all ranks the same.");
  }

  void close() noexcept {
    if (state() != nullptr) state()->close();
  }
};

static_assert(Communicator<NcclCommunicatorRef, float> &&
              Communicator<NcclCommunicatorRef, double> &&
              cuda::StreamCommunicator<NcclCommunicatorRef>);
static_assert(Communicator<NcclCommunicator, float> && Communicator<NcclCommunicator, double> &&
              cuda::StreamCommunicator<NcclCommunicator> && Duplicable<NcclCommunicator>);

}  // namespace zero
