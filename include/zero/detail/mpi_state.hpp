// SPDX-License-Identifier: Apache-2.0
/// @file
/// What one rank's handles and requests over MPI share: its operations in order, and its failure.
///
/// Operations go one after the other, in the order in which they were started; waiting for one
/// moves all that came before. Failure poisons the communicator on this rank, and a notice tells
/// the peers, which look for notices whenever they have nothing else to do.
#pragma once

#include <mpi.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <memory_resource>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "zero/comm/mpi_options.hpp"
#include "zero/detail/broken_pipe.hpp"
#include "zero/detail/mpi_context.hpp"
#include "zero/detail/mpi_environment.hpp"
#include "zero/detail/mpi_notices.hpp"
#include "zero/detail/mpi_operation.hpp"
#include "zero/detail/mpi_peer_memory.hpp"
#include "zero/detail/mpi_round.hpp"
#include "zero/error.hpp"
#include "zero/memory.hpp"

namespace zero::detail {

class MpiState {
 public:
  using nanoseconds = std::chrono::nanoseconds;
  using Clock = std::chrono::steady_clock;

  MpiState(MpiMembers members, const MpiOptions& options)
      : members_(std::move(members)),
        options_(options),
        rank_(members_.rank),
        size_(members_.size()),
        round_(members_, mpi_chunk_bytes(options, size_)),
        notices_(members_, round_.staging()),
        operations_(initial_operations),
        left_(size_, 0) {}
  MpiState(const MpiState&) = delete;
  MpiState& operator=(const MpiState&) = delete;
  ~MpiState() { close(); }

  [[nodiscard]] std::size_t rank() const noexcept { return rank_; }
  [[nodiscard]] std::size_t size() const noexcept { return size_; }
  [[nodiscard]] const MpiOptions& options() const noexcept { return options_; }
  [[nodiscard]] const MpiMembers& members() const noexcept { return members_; }

  /// Collective, before any other operation: finds out which peers' memory can be read. Throws
  /// `CommunicatorError`.
  void meet_peers() {
    if (size_ == 1) return;
    memory_.emplace(processor_name(), size_, options_.share_memory);
    const MpiPeerMemory::Reach reach =
        memory_->meet(rank_, size_, [&](auto mine, auto all) { exchange(mine, all); });
    shares_memory_ = reach.all_mapped;
    round_.take_from(*memory_, reach.direct, reach.any_direct);
  }

  /// What is allocated there all peers see; null, on all ranks, where they can't.
  [[nodiscard]] std::shared_ptr<std::pmr::memory_resource> shared_memory() const noexcept {
    if (size_ == 1) return {std::shared_ptr<void>(), huge_page_resource()};
    return shares_memory_ ? memory_->segment() : nullptr;
  }
  /// Where `bytes` that `rank` has at `address`, allocated there, lie here.
  [[nodiscard]] const std::byte* peer_memory(std::size_t rank, std::uint64_t address,
                                             std::size_t bytes) const noexcept {
    return shares_memory_ ? memory_->find(rank, address, bytes) : nullptr;
  }

  /// The operation's sequence number. Throws `UsageError`, or `CommunicatorError` where poisoned.
  std::uint64_t start(const MpiOperation& operation) {
    require_mpi(operation.name);
    const BrokenPipeGuard guard;
    if (closed_) {
      throw UsageError("rank " + std::to_string(rank_) + ": " + operation.name +
                       ": this communicator's owner has been destroyed. Nothing was started.");
    }
    look();
    if (poisoned_) fail(operation, next_);
    if (next_ - completed_ == operations_.size()) grow();
    operation_at(next_) = operation;
    ++next_;
    advance();  // what arrives while the caller computes is taken in passing
    return next_ - 1;
  }

  void wait(std::uint64_t sequence, nanoseconds timeout) {
    if (completed_ > sequence) return;
    require_mpi("wait");
    const BrokenPipeGuard guard;
    Clock::time_point since = Clock::now();  // nothing has arrived
    Clock::time_point looked = since;
    bool watched = false;  // what peers take of this rank's memory
    while (completed_ <= sequence) {
      if (poisoned_) fail(operation_at(sequence), sequence);
      // Time in which this process did not run (suspended, with its peers perhaps) is no waiting.
      const Clock::time_point now = Clock::now();
      if (now - looked > std::chrono::seconds(1)) since += now - looked;
      looked = now;
      if (advance()) {
        since = Clock::now();
        watched = false;
        continue;
      }
      if (poisoned_ || look()) continue;
      const nanoseconds idle = Clock::now() - since;
      if (idle >= timeout / 2 && !watched) {
        (void)peers_work();
        watched = true;
      } else if (idle >= timeout) {
        if (!peers_work()) {
          poison_timeout(timeout);
        } else {
          since = Clock::now() - timeout / 2;
        }
      } else if (idle < options_.spin) {
        std::this_thread::yield();
      } else {
        std::this_thread::sleep_for(std::chrono::microseconds(50));
      }
    }
  }

  /// As `wait`, but returns false rather than wait.
  bool done(std::uint64_t sequence) {
    if (completed_ > sequence) return true;
    require_mpi("done");
    const BrokenPipeGuard guard;
    while (completed_ <= sequence) {
      if (!poisoned_ && advance()) continue;
      if (!poisoned_) look();
      if (poisoned_) fail(operation_at(sequence), sequence);
      return false;
    }
    return true;
  }

  /// What all ranks see alike, of an operation that is over: poisons, and throws.
  [[noreturn]] void give_up(CommunicatorFailure failure, const char* operation,
                            const std::string& why) {
    poison(failure, rank_, [&] { return why; });
    fail({{.kind = InProcessKind::exchange, .name = operation}}, completed_ - 1);
  }

  /// The end of a request that nobody has waited for.
  void drop(std::uint64_t sequence, bool unwinding) noexcept {
    if (completed_ > sequence) return;
    poison(CommunicatorFailure::aborted, rank_, [&] {
      return "rank " + std::to_string(rank_) + " dropped its unfinished request of " +
             describe(operation_at(sequence)) + ", sequence " + std::to_string(sequence) +
             (unwinding ? ", while an exception passed through it"
                        : "; wait for every request before it is destroyed");
    });
    tell_peers();
  }

  /// From any thread. Where that thread may not call MPI, the peers are told by this rank's next
  /// call.
  void abort(std::string_view reason) noexcept {
    poison(CommunicatorFailure::aborted, rank_, [&] {
      return "rank " + std::to_string(rank_) + " called abort: " + std::string(reason);
    });
    if (any_thread_may_call_mpi()) tell_peers();
  }

  /// The end of this rank's use: tells the peers that it has left, waits for their ends (not longer
  /// than `MpiOptions::teardown`) and frees what it owns. Neither throws nor hangs.
  void close() noexcept {
    if (closed_) return;
    closed_ = true;
    const BrokenPipeGuard guard;
    const std::shared_ptr<MpiContext> context = std::move(members_.context);
    const bool owned = context->owned();
    if (!may_call_mpi()) {  // what is in use is leaked
      context->leave_to_mpi();
      return;
    }
    if (completed_ != next_) {
      poison(CommunicatorFailure::rank_left, rank_, [&] {
        return "rank " + std::to_string(rank_) +
               " destroyed its communicator with unfinished operations";
      });
    }
    {
      // From here on an `abort` that some thread calls on a copy sends nothing.
      const std::lock_guard lock(mutex_);
      if (!poisoned_ && owned) told_ = true;
    }
    const bool parted = !poisoned_ && owned && part();
    if (poisoned_) tell_peers();
    round_.staging().abandon();
    notices_.end();
    // One that others may be using still is not freed, which might wait for them.
    if (!parted) context->leave_to_mpi();
  }

 private:
  static constexpr std::size_t initial_operations = 16;  // a power of two

  // Operations ----------------------------------------------------------------------------------

  void exchange(std::span<const std::byte> mine, std::span<std::byte> all) {
    wait(start(mpi_operation<void>(exchange_operation(mine, all), size_, false)), options_.timeout);
  }

  [[nodiscard]] MpiOperation& operation_at(std::uint64_t sequence) noexcept {
    return operations_[sequence & (operations_.size() - 1)];
  }

  void grow() {
    std::vector<MpiOperation> more(2 * operations_.size());
    for (std::uint64_t i = completed_; i != next_; ++i)
      more[i & (more.size() - 1)] = operation_at(i);
    operations_ = std::move(more);
    if (active_) round_.moved(operation_at(completed_));
  }

  /// Nothing arrives from a peer that takes a large payload out of this rank's memory; whether one
  /// has taken something since this was asked last.
  [[nodiscard]] bool peers_work() noexcept { return memory_ && memory_->peers_work(); }

  /// Moves the operation whose turn it is; whether anything has moved. Poisons.
  bool advance() {
    bool moved = false;
    while (completed_ != next_ && !poisoned_) {
      if (!active_) {
        round_.begin(operation_at(completed_), completed_, phase_);
        active_ = true;
      }
      const bool stepped = round_.advance();
      if (round_.trouble()) {
        poison_trouble(*round_.trouble());
        return true;
      }
      moved = moved || stepped;
      if (!round_.over()) return moved;
      moved = true;
      active_ = false;
      if (round_.is_last()) {
        phase_ = 0;
        ++completed_;
      } else {
        ++phase_;
      }
    }
    return moved;
  }

  // Failure -------------------------------------------------------------------------------------

  /// The first cause stays.
  template <class Text>
  void poison(CommunicatorFailure failure, std::size_t rank, Text text) noexcept {
    const std::lock_guard lock(mutex_);
    if (poisoned_) return;
    failure_ = failure;
    origin_ = rank;
    try {
      cause_ = text();
      if (cause_.ends_with('.')) cause_.pop_back();  // `fail` goes on with one
    } catch (...) {
      // Out of memory. The kind of failure and the rank are known all the same.
    }
    poisoned_ = true;
  }

  [[noreturn]] void fail(const MpiOperation& operation, std::uint64_t sequence) {
    tell_peers();
    const std::lock_guard lock(mutex_);
    throw CommunicatorError(
        failure_, static_cast<int>(rank_), operation.name, sequence,
        "rank " + std::to_string(rank_) + ": " + describe(operation) + ", sequence " +
            std::to_string(sequence) + ", failed (" + std::string(to_string(failure_)) +
            "): " + (cause_.empty() ? "rank " + std::to_string(origin_) + " failed" : cause_) +
            (members_.are_all ? "" : part_note(members_.mpi_ranks)) +
            ". This communicator can't be used any more; where all ranks live, make a new one, "
            "else leave the process without MPI_Finalize and start again.");
  }

  void poison_timeout(nanoseconds timeout) noexcept {
    poison(CommunicatorFailure::timeout, rank_, [&] {
      std::array<char, 32> seconds{};
      std::snprintf(seconds.data(), seconds.size(), "%g",
                    std::chrono::duration<double>(timeout).count());
      return "rank " + std::to_string(rank_) + " waited " + seconds.data() + " s in " +
             describe(operation_at(completed_)) + ", sequence " + std::to_string(completed_) +
             ", while nothing came from ranks: " + round_.missing() +
             "; check that they live, start the same operations and wait for them, or allow more "
             "time (MpiOptions::timeout)";
    });
  }

  void poison_trouble(const MpiTrouble& trouble) noexcept {
    if (trouble.peer >= 0 && !trouble.theirs) {
      // One that has failed has said why before it let go of its memory.
      // Or will have in a moment.
      const Clock::time_point end = Clock::now() + std::chrono::milliseconds(100);
      do {
        if (look_quietly()) return;
        std::this_thread::yield();
      } while (Clock::now() < end);
      const auto peer = static_cast<std::size_t>(trouble.peer);
      poison(CommunicatorFailure::rank_left, peer, [&] {
        return "rank " + std::to_string(rank_) + " can't read the memory of rank " +
               std::to_string(peer) + " (" + trouble.text +
               "): its process has ended, or freed what it lent to an operation under way";
      });
      return;
    }
    if (trouble.peer < 0) {
      poison(CommunicatorFailure::transport, rank_, [&] {
        return "rank " + std::to_string(rank_) + ": MPI reported an error: " + trouble.text;
      });
      return;
    }
    poison(CommunicatorFailure::mismatch, rank_, [&] {
      return mismatch_text(rank_, operation_at(completed_), round_.header(), trouble);
    });
  }

  // Notices -------------------------------------------------------------------------------------

  /// Tells the peers, once, unless one of them has told this rank.
  void tell_peers() noexcept {
    const std::lock_guard lock(mutex_);
    if (told_ || !poisoned_ || !may_call_mpi()) return;
    const BrokenPipeGuard guard;
    told_ = true;
    if (!heard_) send_notice(false);
  }

  void send_notice(bool orderly) noexcept {
    MpiNotice notice;
    notice.failure = orderly ? CommunicatorFailure::rank_left : failure_;
    notice.orderly = orderly;
    notice.origin_rank = origin_;
    notice.operations = orderly ? next_ : 0;  // which is the owning thread's alone
    copy_name(cause_, notice.text);
    notices_.send(notice);
  }

  /// Looks for notices; whether that has poisoned the communicator.
  bool look() {
    while (const std::optional<MpiNotices::Arrival> arrival = notices_.take()) {
      const MpiNotice& notice = arrival->notice;
      if (notice.orderly) {
        left_[arrival->sender] = notice.operations + 1;
        any_left_ = true;
        continue;
      }
      heard_ = true;
      poison(notice.failure, notice.origin_rank, [&] { return std::string(notice.text.data()); });
    }
    if (any_left_ && completed_ != next_) check_left();
    return poisoned_;
  }

  /// Whether a peer that has left is needed for the operation whose turn it is.
  void check_left() noexcept {
    for (std::size_t peer = 0; peer < size_; ++peer) {
      if (left_[peer] == 0 || left_[peer] - 1 > completed_) continue;
      poison(CommunicatorFailure::rank_left, peer, [&] {
        return "rank " + std::to_string(peer) + " left (its communicator was destroyed) after " +
               std::to_string(left_[peer] - 1) + " operations, while rank " +
               std::to_string(rank_) + " needs it for sequence " + std::to_string(completed_) +
               ", " + describe(operation_at(completed_)) +
               "; start the same operations on all ranks (step equally often, or within "
               "zero::join), and keep a rank's communicator until its peers need it no more";
      });
    }
  }

  /// The orderly end: all ranks tell each other. Whether all have, in time.
  bool part() noexcept {
    send_notice(true);
    left_[rank_] = next_ + 1;
    const Clock::time_point end =
        Clock::now() +
        std::min({options_.teardown, options_.timeout, nanoseconds(std::chrono::hours(100000))});
    const auto all_left = [&] { return std::find(left_.begin(), left_.end(), 0U) == left_.end(); };
    while (!look_quietly()) {
      if (notices_.sent() && all_left()) return true;
      if (Clock::now() >= end) return false;
      std::this_thread::yield();
    }
    return false;
  }
  bool look_quietly() noexcept {
    try {
      return look();
    } catch (...) {
      return true;
    }
  }

  MpiMembers members_;
  const MpiOptions options_;
  const std::size_t rank_;
  const std::size_t size_;

  std::optional<MpiPeerMemory> memory_{};
  bool shares_memory_ = false;  // every rank has mapped every other's segment
  MpiRound round_;
  MpiNotices notices_;
  std::vector<MpiOperation> operations_;  // by sequence number modulo its size, a power of two
  std::uint64_t next_ = 0;                // the sequence number of the next operation
  std::uint64_t completed_ = 0;           // all before it are over
  unsigned phase_ = 0;                    // rounds of that operation that are over
  bool active_ = false;                   // its next round has begun
  bool closed_ = false;

  std::vector<std::uint64_t> left_;  // by rank: how many operations it took part in, plus one
  bool any_left_ = false;
  std::atomic<bool> heard_{false};  // a peer has told of its failure

  std::mutex mutex_;  // of what follows, which `abort` may change from any thread
  std::atomic<bool> poisoned_{false};
  bool told_ = false;
  CommunicatorFailure failure_ = CommunicatorFailure::aborted;
  std::size_t origin_ = 0;
  std::string cause_{};
};

}  // namespace zero::detail
