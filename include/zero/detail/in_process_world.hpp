// SPDX-License-Identifier: Apache-2.0
/// @file
/// What the ranks of an in-process world share: the slots in which their operations meet.
///
/// The n-th operation of every rank meets in slot n. Arriving there writes down what the rank
/// wants and where its memory is, and never blocks. Once all have arrived, each rank does its own
/// part of the work inside its own `wait`, straight from its peers' memory and without the mutex.
/// An operation is complete when all parts are done, so nobody reads a buffer after its `wait`.
///
/// Failure poisons the world. From then on nobody starts to read its peers' memory, and a rank
/// whose call throws (or whose request dies) first waits for those who are still reading.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "zero/communicator.hpp"
#include "zero/detail/in_process_operation.hpp"
#include "zero/error.hpp"

namespace zero::detail {

/// Where the n-th operation of all ranks meets.
struct InProcessSlot {
  struct Part {
    bool arrived = false;
    bool entered = false;  ///< a meeting only: may be reading its peers' memory
    bool left = false;     ///< a meeting only
    unsigned phase = 0;    ///< phases that this rank has finished
  };

  explicit InProcessSlot(std::size_t size) : ranks(size), parts(size), published(size) {}

  [[nodiscard]] bool begun() const noexcept { return arrived == ranks.size() && !differs; }
  [[nodiscard]] bool ready(unsigned phase) const noexcept {
    return begun() && finished >= phase * ranks.size();
  }
  [[nodiscard]] bool complete() const noexcept { return ready(phases); }

  std::uint64_t sequence = 0;
  unsigned phases = 0;
  bool differs = false;  ///< ranks disagree: it never begins
  std::size_t arrived = 0;
  std::size_t finished = 0;  ///< parts of phases
  std::size_t released = 0;  ///< ranks whose request is over; the slot is reused after the last
  std::vector<InProcessOperation> ranks;
  std::vector<Part> parts;
  std::vector<const void*> published;
};

/// The shared state. Every public function may be called by any rank's thread; those that take a
/// `rank` are that rank's, from one thread at a time.
class InProcessState {
 public:
  using nanoseconds = std::chrono::nanoseconds;
  using Clock = std::chrono::steady_clock;

  /// @param part who the ranks are in the world that was split, or nothing
  InProcessState(std::size_t size, nanoseconds timeout, nanoseconds spin, std::string part = {})
      : size_(size),
        part_(std::move(part)),
        timeout_(timeout),
        spin_(size > 1 && size <= std::thread::hardware_concurrency() ? spin : nanoseconds{0}),
        members_(size),
        ring_(initial_slots, nullptr) {
    for (Member& member : members_) {
      member.pending.reserve(initial_slots);
      member.scratch.resize(size * sizeof(void*));
    }
    slots_.reserve(initial_slots);
    for (std::size_t i = 0; i < initial_slots; ++i) add_slot();
  }

  [[nodiscard]] std::size_t size() const noexcept { return size_; }
  /// As given, for a world of the same ranks.
  [[nodiscard]] const std::string& part() const noexcept { return part_; }
  [[nodiscard]] nanoseconds timeout() const noexcept { return timeout_; }
  [[nodiscard]] nanoseconds spin() const noexcept { return spin_; }

  /// Makes the caller `rank`. Throws `UsageError` while somebody else is.
  void take(std::size_t rank) {
    const std::lock_guard lock(mutex_);
    Member& me = members_[rank];
    if (me.taken) {
      throw UsageError("InProcessWorld::communicator(" + std::to_string(rank) +
                       "): this rank's communicator has been taken and still lives; copy it where "
                       "one rank needs several handles.");
    }
    me.taken = true;
    me.departed = false;
  }

  /// Undoes `take`. Peers that have gone on without this rank fail at once.
  void depart(std::size_t rank) noexcept {
    const std::lock_guard lock(mutex_);
    Member& me = members_[rank];
    me.taken = false;
    me.departed = true;
    for (std::size_t peer = 0; peer < size_; ++peer) {
      if (members_[peer].next > me.next) return poison_departed(rank, peer);
    }
  }

  /// Arrives at the next slot. Throws `CommunicatorError` where the operation cannot succeed.
  InProcessSlot& start(std::size_t rank, const InProcessOperation& operation) {
    const std::lock_guard lock(mutex_);
    Member& me = members_[rank];
    for (std::size_t peer = 0; peer < size_ && !poisoned_; ++peer) {
      if (members_[peer].departed && members_[peer].next <= me.next) poison_departed(peer, rank);
    }
    if (poisoned_) throw error(rank, operation, me.next);
    InProcessSlot& slot = slot_for(me.next);
    me.pending.push_back(&slot);

    ++me.next;
    slot.phases = operation.phases;
    slot.ranks[rank] = operation;
    slot.published[rank] = operation.published;
    slot.parts[rank].arrived = true;
    ++slot.arrived;
    for (std::size_t peer = 0; peer < size_; ++peer) {
      if (peer == rank || !slot.parts[peer].arrived) continue;
      if (!agree(peer, slot.ranks[peer], rank, operation, size_)) {
        slot.differs = true;
        poison_mismatch(rank, peer, slot);
        break;
      }
      // Other rules are equalities: who agrees with one of those that agree, agrees with all.
      if (operation.kind != InProcessKind::all_to_all_v) break;
    }
    if (slot.begun()) announce();
    return slot;
  }

  /// Returns when all ranks have done their parts; `slot` is this rank's no more then, nor when
  /// it throws `CommunicatorError`.
  void wait(std::size_t rank, InProcessSlot& slot, nanoseconds timeout) {
    std::unique_lock lock(mutex_);
    leave_locked(rank, slot);
    block(lock, rank, slot, timeout, [&] { return slot.complete(); });
    release(rank, slot);
  }

  /// As `wait`, but returns false rather than block.
  bool done(std::size_t rank, InProcessSlot& slot) {
    std::unique_lock lock(mutex_);
    while (!slot.complete()) {
      if (poisoned_) fail(lock, rank, slot);
      if (!progress(lock, rank)) return false;
    }
    release(rank, slot);
    return true;
  }

  /// Waits until all ranks are at a meeting; this rank may read its peers' memory from then on.
  std::span<const void* const> enter(std::size_t rank, InProcessSlot& slot, nanoseconds timeout) {
    std::unique_lock lock(mutex_);
    InProcessSlot::Part& part = slot.parts[rank];
    if (part.left && !poisoned_) {
      throw UsageError("rank " + std::to_string(rank) + ": peers() of " +
                       describe(slot.ranks[rank]) +
                       " after leave(); read the peers' memory before leaving.");
    }
    if (!part.entered || poisoned_) {
      block(lock, rank, slot, timeout, [&] { return slot.begun(); });
      if (poisoned_) fail(lock, rank, slot);
      part.entered = true;
      begin_work(members_[rank]);
    }
    return slot.published;
  }

  /// Ends what `enter` began. Does nothing the second time, nor for other operations.
  void leave(std::size_t rank, InProcessSlot& slot) noexcept {
    const std::lock_guard lock(mutex_);
    leave_locked(rank, slot);
  }

  /// The end of a request that nobody has waited for.
  void drop(std::size_t rank, InProcessSlot& slot, bool unwinding) noexcept {
    std::unique_lock lock(mutex_);
    if (!slot.complete()) {
      poison(CommunicatorFailure::aborted, rank, [&] {
        return "rank " + std::to_string(rank) + " dropped its unfinished request of " +
               describe(slot.ranks[rank]) + ", sequence " + std::to_string(slot.sequence) +
               (unwinding ? ", while an exception passed through it"
                          : "; wait for every request before it is destroyed");
      });
      settle(lock, rank);
    }
    release(rank, slot);
  }

  void abort(std::size_t rank, std::string_view reason) noexcept {
    const std::lock_guard lock(mutex_);
    poison(CommunicatorFailure::aborted, rank, [&] {
      return "rank " + std::to_string(rank) + " called abort: " + std::string(reason);
    });
  }

  /// Poisons the world, as every failure does, with a cause that only the caller can see.
  void give_up(std::size_t rank, CommunicatorFailure failure, std::string_view text) noexcept {
    const std::lock_guard lock(mutex_);
    poison(failure, rank, [&] { return std::string(text); });
  }

  /// Throws `CommunicatorError` where the world is poisoned. Never blocks.
  void check(std::size_t rank) {
    const std::lock_guard lock(mutex_);
    InProcessOperation operation;
    operation.name = "check";
    if (poisoned_) throw error(rank, operation, members_[rank].next);
  }
  /// As above, once no peer reads this rank's memory.
  void check_settled(std::size_t rank, const char* name) {
    std::unique_lock lock(mutex_);
    if (!poisoned_) return;
    const std::uint64_t sequence = members_[rank].next;
    lock.unlock();
    throw_poisoned(rank, name, sequence);
  }

  /// Keeps `resource`, which peers may still use when its rank has left, as long as the world.
  void keep(std::shared_ptr<const void> resource) {
    const std::lock_guard lock(mutex_);
    kept_.push_back(std::move(resource));
  }

  /// Throws what an operation of a poisoned world throws, once no peer reads this rank's memory.
  [[noreturn]] void throw_poisoned(std::size_t rank, const char* name, std::uint64_t sequence) {
    std::unique_lock lock(mutex_);
    InProcessOperation operation;
    operation.name = name;
    const CommunicatorError failure = error(rank, operation, sequence);
    settle(lock, rank);
    throw failure;
  }

  /// The rank at which the world's failure began, or `size()` where nothing has failed.
  [[nodiscard]] std::size_t origin() {
    const std::lock_guard lock(mutex_);
    return poisoned_ ? origin_ : size_;
  }

 private:
  static constexpr std::size_t initial_slots = 16;  // a power of two

  struct Member {
    bool taken = false;
    bool departed = false;
    std::uint64_t next = 0;                 // the sequence number of its next operation
    unsigned working = 0;                   // how many times it may be reading its peers' memory
    std::thread::id thread{};               // where it does so
    std::vector<InProcessSlot*> pending{};  // started and not released, in sequence order
    std::vector<std::byte> scratch{};
  };
  using Lock = std::unique_lock<std::mutex>;

  // Slots ---------------------------------------------------------------------------------------

  void add_slot() {
    // Room for all in the free list first: giving a slot back must not throw.
    free_.reserve(slots_.size() + 1);
    slots_.push_back(std::make_unique<InProcessSlot>(size_));
    free_.push_back(slots_.back().get());
  }

  InProcessSlot& slot_for(std::uint64_t sequence) {
    if (sequence - oldest_ >= ring_.size()) grow_ring(sequence);
    InProcessSlot*& place = ring_[sequence & (ring_.size() - 1)];
    if (place == nullptr) {
      if (free_.empty()) add_slot();
      place = free_.back();
      free_.pop_back();
      place->sequence = sequence;
    }
    return *place;
  }

  void grow_ring(std::uint64_t sequence) {
    std::size_t capacity = ring_.size();
    while (sequence - oldest_ >= capacity) capacity *= 2;
    std::vector<InProcessSlot*> bigger(capacity, nullptr);
    for (InProcessSlot* slot : ring_) {
      if (slot != nullptr) bigger[slot->sequence & (capacity - 1)] = slot;
    }
    ring_ = std::move(bigger);
  }

  void release(std::size_t rank, InProcessSlot& slot) noexcept {
    std::erase(members_[rank].pending, &slot);
    if (++slot.released < size_) return;
    ring_[slot.sequence & (ring_.size() - 1)] = nullptr;
    slot.arrived = slot.finished = slot.released = 0;
    slot.differs = false;
    for (InProcessSlot::Part& part : slot.parts) part = {};
    free_.push_back(&slot);
    std::uint64_t end = oldest_ + ring_.size();
    for (const Member& member : members_) end = std::min(end, member.next);
    while (oldest_ < end && ring_[oldest_ & (ring_.size() - 1)] == nullptr) ++oldest_;
  }

  // Waiting -------------------------------------------------------------------------------------

  void announce() noexcept {
    version_.fetch_add(1, std::memory_order_release);
    if (sleepers_ > 0) changed_.notify_all();
  }

  static Clock::time_point deadline(nanoseconds timeout) {
    return Clock::now() + std::min<nanoseconds>(timeout, std::chrono::hours(100000));
  }

  /// Waits, without the mutex, for `announce`. False where the deadline passed first.
  bool sleep(Lock& lock, Clock::time_point until) {
    const std::uint64_t seen = version_.load(std::memory_order_relaxed);
    const auto same = [&] { return version_.load(std::memory_order_acquire) == seen; };
    if (spin_ > nanoseconds{0}) {
      // Waking a sleeper costs more than most operations do.
      lock.unlock();
      const Clock::time_point spin_end = std::min(until, Clock::now() + spin_);
      while (same() && Clock::now() < spin_end) std::this_thread::yield();
      lock.lock();
    }
    ++sleepers_;
    while (same() && changed_.wait_until(lock, until) != std::cv_status::timeout) {
    }
    --sleepers_;
    return !same();
  }

  template <class Ready>
  void block(Lock& lock, std::size_t rank, InProcessSlot& slot, nanoseconds timeout,
             Ready is_ready) {
    Clock::time_point until = deadline(timeout);
    while (!is_ready()) {
      if (poisoned_) fail(lock, rank, slot);
      if (progress(lock, rank)) {
        until = deadline(timeout);  // own work is not the peers' delay
      } else if (!sleep(lock, until) && !is_ready()) {
        poison_timeout(rank, slot, timeout);
      }
    }
  }

  // Work ----------------------------------------------------------------------------------------

  void begin_work(Member& me) noexcept {
    ++me.working;
    me.thread = std::this_thread::get_id();
  }

  /// One part of the first of this rank's operations that can go on. False where none can.
  bool progress(Lock& lock, std::size_t rank) noexcept {
    Member& me = members_[rank];
    bool my_turn = true;
    for (InProcessSlot* slot : me.pending) {
      InProcessSlot::Part& part = slot->parts[rank];
      const InProcessOperation& operation = slot->ranks[rank];
      if (operation.work == nullptr || part.phase == operation.phases) continue;
      if (operation.in_turn && !my_turn) continue;
      if (operation.in_turn) my_turn = false;
      if (!slot->ready(part.phase)) continue;
      begin_work(me);
      lock.unlock();
      operation.work(slot->ranks, rank, part.phase, me.scratch.data());
      lock.lock();
      finish_part(me, *slot, part);
      return true;
    }
    return false;
  }

  void finish_part(Member& me, InProcessSlot& slot, InProcessSlot::Part& part) noexcept {
    --me.working;
    ++part.phase;
    ++slot.finished;
    // In a poisoned world somebody may be waiting for this rank to stop reading.
    if (poisoned_ || slot.ready(part.phase)) announce();
  }

  void leave_locked(std::size_t rank, InProcessSlot& slot) noexcept {
    InProcessSlot::Part& part = slot.parts[rank];
    if (slot.ranks[rank].kind != InProcessKind::meeting || part.left) return;
    part.left = true;
    if (!part.entered) ++members_[rank].working;  // leaving without having looked
    finish_part(members_[rank], slot, part);
  }

  // Failure -------------------------------------------------------------------------------------

  /// The first cause stays. `text` is called under the mutex and may run out of memory.
  template <class Text>
  void poison(CommunicatorFailure failure, std::size_t rank, Text text) noexcept {
    if (poisoned_) return;
    poisoned_ = true;
    failure_ = failure;
    origin_ = rank;
    try {
      cause_ = text();
      if (cause_.ends_with('.')) cause_.pop_back();  // `error` goes on with one
    } catch (...) {
      // The kind of failure and the rank are known all the same.
    }
    announce();
  }

  void poison_departed(std::size_t departed, std::size_t peer) noexcept {
    poison(CommunicatorFailure::rank_left, departed, [&] {
      const std::uint64_t sequence = members_[departed].next;
      std::string text = "rank " + std::to_string(departed) +
                         " left (its last communicator handle was destroyed) after " +
                         std::to_string(sequence) + " operations, while rank " +
                         std::to_string(peer) + " needs it for sequence " +
                         std::to_string(sequence);
      const InProcessSlot* slot = ring_[sequence & (ring_.size() - 1)];
      if (slot != nullptr && slot->sequence == sequence && slot->parts[peer].arrived) {
        text += ", " + describe(slot->ranks[peer]);
      }
      return text +
             "; start the same operations on all ranks (step equally often, or within zero::join), "
             "and keep a rank's communicator until its peers need it no more";
    });
  }

  void poison_mismatch(std::size_t rank, std::size_t peer, const InProcessSlot& slot) noexcept {
    poison(CommunicatorFailure::mismatch, rank, [&] {
      const std::size_t a = std::min(rank, peer), b = std::max(rank, peer);
      return "ranks " + std::to_string(a) + " and " + std::to_string(b) + " disagree at sequence " +
             std::to_string(slot.sequence) + ": rank " + std::to_string(a) + " called " +
             describe(slot.ranks[a]) + ", rank " + std::to_string(b) + " called " +
             describe(slot.ranks[b]) + count_difference(a, slot.ranks[a], b, slot.ranks[b], size_) +
             "; every rank must start the same operations in the same order, with element types "
             "and sizes that agree";
    });
  }

  void poison_timeout(std::size_t rank, const InProcessSlot& slot, nanoseconds timeout) noexcept {
    poison(CommunicatorFailure::timeout, rank, [&] {
      std::array<char, 32> seconds{};
      std::snprintf(seconds.data(), seconds.size(), "%g",
                    std::chrono::duration<double>(timeout).count());
      const auto list = [&](auto is_listed) {
        std::string text;
        for (std::size_t peer = 0; peer < size_; ++peer) {
          if (is_listed(slot.parts[peer]))
            text += (text.empty() ? "" : ", ") + std::to_string(peer);
        }
        return text;
      };
      const std::string missing =
          list([](const InProcessSlot::Part& part) { return !part.arrived; });
      const std::string unfinished = list(
          [&](const InProcessSlot::Part& part) { return part.phase == slot.finished / size_; });
      return "rank " + std::to_string(rank) + " waited " + seconds.data() + " s in " +
             describe(slot.ranks[rank]) + ", sequence " + std::to_string(slot.sequence) +
             (missing.empty() ? ", which these ranks have not finished: " + unfinished
                              : ", to which these ranks have not come: " + missing) +
             "; check that every rank starts the same operations and waits for them, or allow more "
             "time (InProcessOptions::timeout)";
    });
  }

  CommunicatorError error(std::size_t rank, const InProcessOperation& operation,
                          std::uint64_t sequence) const {
    return CommunicatorError(
        failure_, static_cast<int>(rank), operation.name, sequence,
        "rank " + std::to_string(rank) + ": " + describe(operation) + ", sequence " +
            std::to_string(sequence) + ", failed (" + std::string(to_string(failure_)) +
            "): " + (cause_.empty() ? "rank " + std::to_string(origin_) + " failed" : cause_) +
            part_ + ". This communicator can't be used any more; build a new world to go on.");
  }

  /// Throws, once no peer reads this rank's memory.
  [[noreturn]] void fail(Lock& lock, std::size_t rank, InProcessSlot& slot) {
    const CommunicatorError failure = error(rank, slot.ranks[rank], slot.sequence);
    settle(lock, rank);
    release(rank, slot);
    throw failure;
  }

  /// In a poisoned world, where no new work begins: leaves this rank's own meetings (or two ranks
  /// would wait for each other here), then waits until no peer is at work, nor any device for one.
  /// Work that a peer does on this very thread can't go on meanwhile and isn't waited for.
  void settle(Lock& lock, std::size_t rank) noexcept {
    for (InProcessSlot* slot : members_[rank].pending) {
      InProcessSlot::Part& part = slot->parts[rank];
      if (!part.entered || part.left) continue;
      part.left = true;  // but hasn't finished its part: for the peers this meeting fails
      --members_[rank].working;
      announce();
    }
    const auto somebody_works = [&] {
      for (std::size_t peer = 0; peer < size_; ++peer) {
        const Member& member = members_[peer];
        if (peer != rank && member.working > 0 && member.thread != std::this_thread::get_id()) {
          return true;
        }
      }
      return false;
    };
    ++sleepers_;
    while (somebody_works()) changed_.wait(lock);
    --sleepers_;
    // From here on nobody changes the slots of this rank's operations.
    lock.unlock();
    for (const InProcessSlot* slot : members_[rank].pending) {
      const InProcessOperation& operation = slot->ranks[rank];
      if (operation.settle != nullptr) operation.settle(*slot, rank);
    }
    lock.lock();
  }

  const std::size_t size_;
  const std::string part_;
  const nanoseconds timeout_;
  const nanoseconds spin_;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::atomic<std::uint64_t> version_{0};  // changes, under the mutex, when a rank can go on
  std::size_t sleepers_ = 0;

  std::vector<std::shared_ptr<const void>> kept_{};
  std::vector<Member> members_;
  std::vector<std::unique_ptr<InProcessSlot>> slots_{};
  std::vector<InProcessSlot*> free_{};
  std::vector<InProcessSlot*> ring_;  // by sequence number modulo its size, a power of two
  std::uint64_t oldest_ = 0;          // no slot below it is in the ring

  bool poisoned_ = false;
  CommunicatorFailure failure_ = CommunicatorFailure::aborted;
  std::size_t origin_ = 0;
  std::string cause_{};
};

}  // namespace zero::detail
