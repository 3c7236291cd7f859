// SPDX-License-Identifier: Apache-2.0
/// @file
/// What one rank's handles and requests over NCCL share: its operations in order, their progress,
/// and its failure.
///
/// NCCL's communicator is a non-blocking one: a call may return while NCCL still works on it, and
/// the next call, or what belongs behind it in the stream, has to wait. So operations stand in a
/// queue, and the calling thread moves the queue on whenever it starts, waits or asks.
///
/// `mutex_` is held around every call that uses NCCL's communicator, so that `abort` and the
/// watchdog may end it from their threads; never around a call to CUDA that may block.
#pragma once

#include <nccl.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "zero/comm/nccl_options.hpp"
#include "zero/cuda/error.hpp"
#include "zero/cuda/stream.hpp"
#include "zero/detail/in_process_operation.hpp"
#include "zero/detail/nccl_error.hpp"
#include "zero/detail/nccl_memory.hpp"
#include "zero/detail/nccl_operation.cuh"
#include "zero/detail/nccl_scope.hpp"
#include "zero/error.hpp"

namespace zero::detail {

/// Where a communicator of NCCL's runs, and who its ranks are.
struct NcclPlace {
  ncclComm_t comm = nullptr;  ///< ready
  bool owned = true;          ///< to be finalised and destroyed
  int rank = 0;
  int size = 1;
  int device = 0;
  cuda::StreamView stream{};
  std::optional<cuda::Stream> own_stream{};  ///< kept, where `stream` is nobody else's
  std::vector<int> ranks_in_whole{};         ///< of a part, for messages
};

class NcclState {
 public:
  using nanoseconds = std::chrono::nanoseconds;
  using Clock = std::chrono::steady_clock;

  /// The device of `place` is current. Throws `CudaError`.
  NcclState(NcclPlace place, const NcclOptions& options)
      : place_(std::move(place)),
        options_(options),
        calls_(place_.rank, place_.size, place_.stream),
        staging_(place_.size, place_.stream),
        slots_(initial_slots),
        comm_(place_.comm) {
    if (options_.watchdog) watchdog_ = std::thread([this] { watch(); });
  }
  NcclState(const NcclState&) = delete;
  NcclState& operator=(const NcclState&) = delete;
  ~NcclState() { close(); }

  [[nodiscard]] int rank() const noexcept { return place_.rank; }
  [[nodiscard]] int size() const noexcept { return place_.size; }
  [[nodiscard]] int device() const noexcept { return place_.device; }
  [[nodiscard]] cuda::StreamView stream() const noexcept { return place_.stream; }
  [[nodiscard]] const NcclOptions& options() const noexcept { return options_; }
  [[nodiscard]] ncclComm_t native_handle() const {
    const std::lock_guard lock(mutex_);
    return comm_;
  }

  /// The operation's sequence number. Throws `UsageError`, `CudaError`, or `CommunicatorError`
  /// where poisoned.
  std::uint64_t start(NcclOperation operation) {
    if (closed_) reject(operation, "this communicator's owner has been destroyed");
    if (poisoned_) fail(operation.what, next_);
    const NcclScope scope(place_.device);
    const bool host = operation.what.kind == InProcessKind::exchange;
    const std::size_t needed = batch_bytes_ + calls_.workspace_bytes(operation);
    if (capturing()) {
      if (host) {
        reject(operation, "the stream is being captured, and an exchange is for the host");
      }
      if (needed > workspace_.bytes()) {
        reject(operation,
               "the stream is being captured, and the workspace must grow for this operation; run "
               "it once before the capture, or reserve(" +
                   std::to_string(needed) + ") bytes");
      }
    } else if (next_ - first_kept_ == slots_.size()) {
      const std::lock_guard lock(mutex_);
      reap();
      first_kept_ = completed_;
    }
    if (next_ - first_kept_ == slots_.size()) grow();
    if (operation.what.kind == InProcessKind::barrier) {
      operation.what.output = staging_.barrier_number();
    }
    // What the host has a part in can't be launched together with anything.
    if (host) ++batch_;
    operation.batch = batch_;
    if (host) ++batch_;
    slot(next_).operation = operation;
    slot(next_).recorded = false;
    ++next_;
    if (open_batches_ == 0) {
      seal();
      advance();
    } else {
      batch_bytes_ = needed;
    }
    return next_ - 1;
  }

  /// Until the operation is over.
  void wait(std::uint64_t sequence, nanoseconds timeout) {
    const NcclScope scope(place_.device);
    if (capturing()) {
      throw UsageError("rank " + std::to_string(rank()) +
                       ": wait: the stream is being captured, so that nothing runs that a host "
                       "could wait for; end requests by enqueue().");
    }
    pass(sequence, timeout, true);
  }
  /// Until the operation stands in the stream.
  void enqueue(std::uint64_t sequence) {
    const NcclScope scope(place_.device);
    pass(sequence, options_.timeout, false);
  }

  /// Whether the operation is over; throws as `wait` where it has failed.
  bool done(std::uint64_t sequence) {
    const NcclScope scope(place_.device);
    seal();
    advance();
    {
      const bool captured = capturing();
      const std::lock_guard lock(mutex_);
      if (!captured) reap();
      if (completed_ > sequence) return true;
    }
    if (poisoned_) fail(slot(sequence).operation.what, sequence);
    return false;
  }

  /// Blocks until `event` has happened.
  void wait(const cuda::Event& event, nanoseconds timeout) {
    const NcclScope scope(place_.device);
    const InProcessOperation what{.name = "wait"};
    const Clock::time_point begin = Clock::now();
    for (;;) {
      seal();
      advance();
      look();
      if (poisoned_) fail(what, next_);
      if (event.done()) return;
      const Clock::duration waited = Clock::now() - begin;
      if (waited >= timeout) {
        poison(CommunicatorFailure::timeout, [&] {
          return "rank " + std::to_string(rank()) + " waited " + seconds_of(timeout) +
                 " for an event; " + unfinished_text();
        });
      } else {
        pause(waited);
      }
    }
  }

  void check() {
    const NcclScope scope(place_.device);
    look();
    if (poisoned_) fail({.name = "check"}, next_);
  }

  /// The end of a request that nobody has waited for.
  void drop(std::uint64_t sequence, bool unwinding) noexcept {
    try {
      const NcclScope scope(place_.device);
      const bool captured = capturing();
      const std::lock_guard lock(mutex_);
      if (captured && launched_ > sequence) return;
      if (!captured) reap();
      if (completed_ > sequence) return;
      poison_locked(CommunicatorFailure::aborted, [&] {
        return "rank " + std::to_string(rank()) + " dropped its unfinished request of " +
               describe(slot(sequence).operation.what) + ", sequence " + std::to_string(sequence) +
               (unwinding ? ", while an exception passed through it"
                          : "; wait for every request, or enqueue it, before it is destroyed");
      });
    } catch (...) {
      abort("a request was dropped");
    }
  }

  /// From any thread.
  void abort(std::string_view reason) noexcept {
    poison(CommunicatorFailure::aborted, [&] {
      return "rank " + std::to_string(rank()) + " called abort: " + std::string(reason);
    });
  }

  void begin_batch() noexcept {
    if (open_batches_++ == 0) ++batch_;
  }
  void end_batch() noexcept {
    if (--open_batches_ != 0) return;
    seal();
    try {
      const NcclScope scope(place_.device);
      advance();
    } catch (const std::exception& error) {
      poison_transport(error.what());
    }
  }

  /// Room for an operation that needs so many bytes of workspace.
  void reserve(std::size_t bytes) {
    const NcclScope scope(place_.device);
    if (capturing()) {
      throw UsageError("rank " + std::to_string(rank()) +
                       ": reserve: the stream is being captured; reserve before.");
    }
    if (next_ != 0) pass(next_ - 1, options_.timeout, false);
    workspace_.reserve(bytes);
  }

  /// A communicator of those ranks that give the same color. All ranks have agreed to it, and
  /// nothing is under way.
  ncclComm_t split(const char* name, int color, int key) {
    const NcclScope scope(place_.device);
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    ncclComm_t part = nullptr;
    {
      const std::lock_guard lock(mutex_);
      if (!poisoned_) {
        const ncclResult_t result = ncclCommSplit(comm_, color, key, &part, &config);
        if (result != ncclSuccess && result != ncclInProgress) {
          poison_locked(CommunicatorFailure::transport,
                        [&] { return nccl_failure_text(result, "ncclCommSplit", comm_); });
        }
      }
    }
    const Clock::time_point begin = Clock::now();
    for (;;) {
      if (ready()) {
        ncclResult_t state = ncclInternalError;
        if (part != nullptr) (void)ncclCommGetAsyncError(part, &state);
        if (state == ncclSuccess) return part;
        if (state != ncclInProgress) {
          poison(CommunicatorFailure::transport,
                 [&] { return nccl_failure_text(state, "ncclCommSplit", part); });
        }
      }
      const Clock::duration waited = Clock::now() - begin;
      if (!poisoned_ && waited >= options_.init_timeout) {
        poison(CommunicatorFailure::timeout, [&] {
          return "rank " + std::to_string(rank()) + " waited " + seconds_of(options_.init_timeout) +
                 " in " + name +
                 "; check that all ranks call it, or allow more time (NcclOptions::init_timeout)";
        });
      }
      if (poisoned_) {
        if (part != nullptr) (void)ncclCommAbort(part);
        fail({.name = name}, next_);
      }
      pause(waited);
    }
  }

  /// The end of this rank's use. Neither throws nor hangs.
  void close() noexcept {
    if (closed_) return;
    closed_ = true;
    if (watchdog_.joinable()) {
      {
        const std::lock_guard lock(mutex_);
        stopping_ = true;
      }
      wake_.notify_all();
      watchdog_.join();
    }
    std::optional<NcclScope> scope;
    try {
      scope.emplace(place_.device);
    } catch (const std::exception&) {
      // A device with an error: what follows fails, each for itself.
    }
    const cudaError_t error = place_.stream.query();
    if (error != cudaSuccess && error != cudaErrorNotReady) {
      poison_transport(cudaGetErrorString(error));  // so that peers hear of it
    }
    if (launched_ != next_) {
      poison(CommunicatorFailure::rank_left, [&] {
        return "rank " + std::to_string(rank()) +
               " destroyed its communicator with unfinished operations";
      });
    }
    {
      const std::lock_guard lock(mutex_);
      if (place_.owned && comm_ != nullptr && !finalize()) (void)ncclCommAbort(comm_);
      comm_ = nullptr;
      try {
        if (!poisoned_) completed_ = over_until();
      } catch (...) {
        // Requests that outlive the communicator then say that it was destroyed.
      }
      poison_locked(CommunicatorFailure::rank_left, [&] {
        return "the communicator of rank " + std::to_string(rank()) + " was destroyed";
      });
    }
    if (!drain()) {  // to free it would be to wait, perhaps for ever
      workspace_.abandon();
      staging_.abandon();
    }
    workspace_.release();
    staging_.release();
  }

 private:
  static constexpr std::size_t initial_slots = 16;  // a power of two

  struct Slot {
    NcclOperation operation{};
    cuda::Event event{};
    bool recorded = false;  // else it was captured, and runs at other times
    Clock::time_point launched{};
  };

  [[nodiscard]] Slot& slot(std::uint64_t sequence) noexcept {
    return slots_[sequence & (slots_.size() - 1)];
  }

  /// Room for twice as many operations.
  void grow() {
    std::vector<Slot> more(2 * slots_.size());
    const std::lock_guard lock(mutex_);
    for (std::uint64_t i = completed_; i != next_; ++i)
      more[i & (more.size() - 1)] = std::move(slot(i));
    slots_ = std::move(more);
    first_kept_ = completed_;
  }

  [[nodiscard]] bool capturing() const {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    cuda::check(cudaStreamIsCapturing(place_.stream.get(), &status), "cudaStreamIsCapturing");
    return status != cudaStreamCaptureStatusNone;
  }

  [[noreturn]] void reject(const NcclOperation& operation, const std::string& why) const {
    throw UsageError("rank " + std::to_string(rank()) + ": " + operation.what.name + ": " + why +
                     ". Nothing was started.");
  }

  // Progress ------------------------------------------------------------------------------------

  /// What has been started may be launched.
  void seal() noexcept {
    sealed_ = next_;
    ++batch_;
    batch_bytes_ = 0;
  }

  /// Launches what can be launched without waiting. Failures poison.
  void advance() noexcept {
    try {
      while (launched_ != sealed_ && step()) {
      }
    } catch (const std::exception& error) {
      poison_transport(error.what());
    }
  }

  /// One step of the operations whose turn it is; false where it has to wait for NCCL, or failed.
  bool step() {
    if (!ready()) return false;
    if (slot(launched_).operation.what.kind == InProcessKind::exchange) return step_exchange();
    switch (phase_) {
      case 0: {
        turn_end_ = launched_;
        std::size_t bytes = 0;
        while (turn_end_ != sealed_ &&
               slot(turn_end_).operation.batch == slot(launched_).operation.batch) {
          NcclOperation& operation = slot(turn_end_++).operation;
          operation.workspace = bytes;
          bytes += calls_.workspace_bytes(operation);
        }
        workspace_.reserve(bytes);
        issue([&](ncclComm_t comm, NcclOperation& operation) {
          return calls_.first(operation, comm, workspace_.data());
        });
        break;
      }
      case 1: {
        bool more = false;
        for (std::uint64_t i = launched_; i != turn_end_; ++i) {
          calls_.kernel(slot(i).operation, workspace_.data());
          more = more || calls_.has_second(slot(i).operation);
        }
        if (more) {
          issue([&](ncclComm_t comm, NcclOperation& operation) {
            return calls_.second(operation, comm);
          });
        }
        break;
      }
      default: finish_turn(); return true;
    }
    ++phase_;
    return true;
  }

  /// `call(comm, operation)` for all operations whose turn it is, as one group.
  template <class Call>
  void issue(Call call) {
    const std::lock_guard lock(mutex_);
    if (poisoned_) return;
    const auto broken = [](ncclResult_t result) {
      return result != ncclSuccess && result != ncclInProgress;
    };
    ncclResult_t result = ncclSuccess;
    const char* name = "ncclRedOpCreatePreMulSum";
    if (phase_ == 0) result = make_reductions();
    if (!broken(result)) {
      name = "ncclGroupStart";
      result = ncclGroupStart();
    }
    if (!broken(result)) {
      for (std::uint64_t i = launched_; i != turn_end_ && !broken(result); ++i) {
        name = slot(i).operation.what.name;
        result = call(comm_, slot(i).operation);
      }
      const ncclResult_t end = ncclGroupEnd();
      if (!broken(result)) {
        name = "ncclGroupEnd";
        result = end;
      }
    }
    if (!broken(result)) return;
    poison_locked(CommunicatorFailure::transport, [&] {
      return "rank " + std::to_string(rank()) + ": " + nccl_failure_text(result, name, comm_);
    });
  }

  ncclResult_t make_reductions() {
    for (std::uint64_t i = launched_; i != turn_end_; ++i) {
      NcclOperation& operation = slot(i).operation;
      if (!operation.native || operation.scaling != NcclScaling::factor) continue;
      const ncclResult_t result =
          ncclRedOpCreatePreMulSum(&operation.own_reduction, operation.scalar, operation.type,
                                   ncclScalarHostImmediate, comm_);
      if (result != ncclSuccess) return result;
    }
    return ncclSuccess;
  }

  /// All calls stand in the stream.
  void finish_turn() {
    const bool captured = capturing();
    if (!captured) {
      for (std::uint64_t i = launched_; i != turn_end_; ++i) slot(i).event.record(place_.stream);
    }
    const Clock::time_point now = Clock::now();
    const std::lock_guard lock(mutex_);
    if (poisoned_) return;
    for (; launched_ != turn_end_; ++launched_) {
      Slot& finished = slot(launched_);
      finished.recorded = !captured;
      finished.launched = now;
      const NcclOperation& operation = finished.operation;
      if (operation.native && operation.scaling == NcclScaling::factor) {
        (void)ncclRedOpDestroy(operation.own_reduction, comm_);
      }
    }
    phase_ = 0;
  }

  /// Host bytes, a piece at a time: up, gathered, down, out.
  bool step_exchange() {
    const InProcessOperation& what = slot(launched_).operation.what;
    const std::size_t piece = std::min(staging_.piece_bytes(), what.input_count - exchanged_);
    turn_end_ = launched_ + 1;
    switch (phase_) {
      case 0:
        if (piece == 0) {
          exchanged_ = 0;
          finish_turn();
          return true;
        }
        staging_.up(rank(), static_cast<const std::byte*>(what.input) + exchanged_, piece,
                    place_.stream);
        issue([&](ncclComm_t comm, NcclOperation&) {
          return staging_.gather(rank(), piece, comm, place_.stream);
        });
        break;
      case 1: staging_.down(piece, place_.stream); break;
      default:
        if (!staging_.arrived()) return false;
        for (int r = 0; r < size(); ++r) {
          staging_.out(r, piece,
                       static_cast<std::byte*>(what.output) +
                           static_cast<std::size_t>(r) * what.input_count + exchanged_);
        }
        exchanged_ += piece;
        phase_ = 0;
        return true;
    }
    ++phase_;
    return true;
  }

  /// Whether NCCL has finished the last call, as far as the host is concerned. Poisons.
  bool ready() {
    const std::lock_guard lock(mutex_);
    return nccl_state() == ncclSuccess;
  }

  /// `ncclInProgress` while NCCL works on the last call. Poisons.
  ncclResult_t nccl_state() {
    if (poisoned_) return ncclInternalError;
    ncclResult_t state = ncclSuccess;
    const ncclResult_t result = ncclCommGetAsyncError(comm_, &state);
    if (result != ncclSuccess) state = result;
    if (state != ncclSuccess && state != ncclInProgress) {
      poison_locked(CommunicatorFailure::transport, [&] {
        return "rank " + std::to_string(rank()) + ": " + unfinished_text() + ": " +
               nccl_failure_text(state, "NCCL", comm_);
      });
    }
    return state;
  }

  /// Counts what is over. Once poisoned nothing is, since aborted kernels end too.
  void reap() {
    if (poisoned_) return;
    std::uint64_t over = completed_;
    try {
      over = over_until();
    } catch (const std::exception& error) {
      return poison_locked(CommunicatorFailure::transport, [&] {
        return "rank " + std::to_string(rank()) + ": " + unfinished_text() + ": " + error.what();
      });
    }
    // What ended because of an error has not been done.
    const ncclResult_t state = nccl_state();
    if (over == completed_ || (state != ncclSuccess && state != ncclInProgress)) return;
    completed_ = over;
    progressed_ = Clock::now();
  }
  [[nodiscard]] std::uint64_t over_until() {
    std::uint64_t over = completed_;
    while (over != launched_ && (!slot(over).recorded || slot(over).event.done())) ++over;
    return over;
  }

  /// `reap`, and whether what is oldest takes too long. Where the calling thread captures the
  /// stream it may not ask for events.
  void look() {
    const bool captured = capturing();
    const std::lock_guard lock(mutex_);
    if (captured) {
      (void)nccl_state();
    } else {
      look_locked();
    }
  }
  void look_locked() {
    reap();
    if (poisoned_ || completed_ == launched_) return;
    const Clock::time_point since = std::max(progressed_, slot(completed_).launched);
    if (Clock::now() - since >= options_.timeout) poison_timeout(completed_, options_.timeout);
  }

  /// Until the operation stands in the stream, or is over.
  void pass(std::uint64_t sequence, nanoseconds timeout, bool over) {
    seal();
    Clock::time_point since = Clock::now();  // nothing has happened
    std::uint64_t progress = 0;
    for (;;) {
      advance();
      {
        const std::lock_guard lock(mutex_);
        if (over) reap();
        first_kept_ = completed_;
        if ((over ? completed_ : launched_) > sequence) return;
        if (!poisoned_ && progress != completed_ + launched_ + exchanged_) {
          progress = completed_ + launched_ + exchanged_;
          since = Clock::now();
        }
        if (!poisoned_ && Clock::now() - since >= timeout) poison_timeout(completed_, timeout);
      }
      if (poisoned_) fail(slot(sequence).operation.what, sequence);
      pause(Clock::now() - since);
    }
  }

  void pause(Clock::duration waited) const {
    if (waited < options_.spin) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
  }

  void watch() noexcept {
    (void)cudaSetDevice(place_.device);
    // Events of a stream that is not being captured may be asked for while another one is.
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    (void)cudaThreadExchangeStreamCaptureMode(&mode);
    std::unique_lock lock(mutex_);
    watchdog_id_ = std::this_thread::get_id();
    while (!stopping_ && !poisoned_) {
      try {
        wake_.wait_for(lock, options_.watchdog_interval);
        if (!stopping_) look_locked();
      } catch (...) {
        return;  // no clock or no memory: who waits still looks
      }
    }
  }

  // Failure -------------------------------------------------------------------------------------

  /// The first cause stays. NCCL's communicator is aborted.
  template <class Text>
  void poison_locked(CommunicatorFailure failure, Text text) noexcept {
    if (poisoned_) return;
    failure_ = failure;
    try {
      cause_ = text();
      if (cause_.ends_with('.')) cause_.pop_back();  // `fail` goes on with one
    } catch (...) {
      // Out of memory. The kind of failure is known all the same.
    }
    poisoned_ = true;
    if (comm_ != nullptr) (void)ncclCommAbort(comm_);
    comm_ = nullptr;
  }
  template <class Text>
  void poison(CommunicatorFailure failure, Text text) noexcept {
    const std::lock_guard lock(mutex_);
    poison_locked(failure, text);
  }
  void poison_transport(const char* what) noexcept {
    poison(CommunicatorFailure::transport, [&] {
      return "rank " + std::to_string(rank()) + ": " + unfinished_text() + ": " + what;
    });
  }
  void poison_timeout(std::uint64_t sequence, nanoseconds timeout) noexcept {
    poison_locked(CommunicatorFailure::timeout, [&] {
      return "rank " + std::to_string(rank()) + " waited " + seconds_of(timeout) + "; " +
             unfinished_text(sequence) +
             "; check that all ranks live and start the same operations, in the same order and "
             "with sizes that agree (NCCL_DEBUG=INFO shows what NCCL does), or allow more time "
             "(NcclOptions::timeout; init_timeout while a communicator is made)";
    });
  }

  /// "broadcast of …, sequence 3, was in the stream", with the lock held.
  std::string unfinished_text() { return unfinished_text(completed_); }
  std::string unfinished_text(std::uint64_t sequence) {
    if (sequence >= next_known()) return "no operation was under way";
    return describe(slot(sequence).operation.what) + ", sequence " + std::to_string(sequence) +
           (sequence < launched_ ? ", was in the stream and not over"
                                 : ", was not in the stream yet");
  }
  /// Operations that this thread may describe: those that only stand in the queue are the calling
  /// thread's.
  [[nodiscard]] std::uint64_t next_known() const noexcept {
    return std::this_thread::get_id() == watchdog_id_ ? launched_ : next_;
  }

  [[noreturn]] void fail(const InProcessOperation& what, std::uint64_t sequence) {
    // Kernels of an aborted communicator end by themselves; the caller may then free its memory.
    const bool at_rest = drain();
    const std::lock_guard lock(mutex_);
    throw CommunicatorError(
        failure_, rank(), what.name, sequence,
        "rank " + std::to_string(rank()) + ": " + describe(what) + ", sequence " +
            std::to_string(sequence) + ", failed (" + std::string(to_string(failure_)) +
            "): " + (cause_.empty() ? std::string("out of memory for the reason") : cause_) +
            (place_.ranks_in_whole.empty() ? "" : part_note(place_.ranks_in_whole)) +
            (at_rest ? ""
                     : ". The stream is still busy: don't free what operations use before it is "
                       "idle") +
            ". This communicator can't be used any more; where all ranks live, make a new one, "
            "else start the processes again.");
  }

  /// Waits, not long, until the stream is past what was launched there; whether it is.
  bool drain() noexcept {
    try {
      if (stuck_) return false;
      if (capturing()) return true;
      const auto busy = [&] {
        if (!staging_.arrived()) return true;
        if (launched_ == 0) return false;
        Slot& last = slot(launched_ - 1);
        return last.recorded && !last.event.done();
      };
      const Clock::time_point begin = Clock::now();
      while (busy()) {
        const Clock::duration waited = Clock::now() - begin;
        if (waited >= options_.teardown) {
          stuck_ = true;
          return false;
        }
        pause(waited);
      }
    } catch (...) {
      // A device with an error runs nothing.
    }
    return true;
  }

  /// Whether NCCL has ended the communicator in time. With the lock held.
  bool finalize() noexcept {
    ncclResult_t state = ncclCommFinalize(comm_);
    const Clock::time_point begin = Clock::now();
    while (state == ncclInProgress || state == ncclSuccess) {
      if (ncclCommGetAsyncError(comm_, &state) != ncclSuccess) return false;
      if (state == ncclSuccess) return ncclCommDestroy(comm_) == ncclSuccess;
      const Clock::duration waited = Clock::now() - begin;
      if (waited >= options_.teardown) return false;
      pause(waited);
    }
    return false;
  }

  NcclPlace place_;
  const NcclOptions options_;
  const NcclCalls calls_;
  NcclStaging staging_;
  NcclWorkspace workspace_{};

  // The calling thread's.
  std::uint64_t next_ = 0;       // the sequence number of the next operation
  std::uint64_t sealed_ = 0;     // all before it may be launched
  std::uint64_t turn_end_ = 0;   // those from `launched_` to there are being launched
  unsigned phase_ = 0;           // what of that has been done
  std::size_t exchanged_ = 0;    // bytes of the exchange whose turn it is
  std::uint64_t batch_ = 0;      // operations of one number are launched together
  std::size_t batch_bytes_ = 0;  // of workspace, that those of the open batch need together
  unsigned open_batches_ = 0;
  std::uint64_t first_kept_ = 0;  // `completed_` as this thread knows it
  bool closed_ = false;
  bool stuck_ = false;  // the stream did not come to rest after a failure

  mutable std::mutex mutex_;     // of what follows, and of slots from `completed_` to `launched_`
  std::vector<Slot> slots_;      // by sequence number modulo its size, a power of two
  std::uint64_t completed_ = 0;  // all before it are over
  std::uint64_t launched_ = 0;   // all before it stand in the stream; changed by the calling thread
  Clock::time_point progressed_ = Clock::now();
  ncclComm_t comm_;  // null: aborted, or ended
  std::atomic<bool> poisoned_{false};
  CommunicatorFailure failure_ = CommunicatorFailure::aborted;
  std::string cause_{};

  bool stopping_ = false;
  std::condition_variable wake_{};
  std::thread::id watchdog_id_{};
  std::thread watchdog_{};
};

}  // namespace zero::detail
