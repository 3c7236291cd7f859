// SPDX-License-Identifier: Apache-2.0
/// @file
/// A communicator that goes wrong on demand, for testing what is built on communicators.
#pragma once

#include <atomic>
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
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "zero/communicator.hpp"
#include "zero/element.hpp"
#include "zero/error.hpp"
#include "zero/memory.hpp"

namespace zero {

/// What can go wrong with one operation on one rank.
enum class FaultAction : std::uint8_t {
  delay_start,   ///< sleeps `delay` before it starts
  delay_finish,  ///< sleeps `delay` in `wait` before it goes on
  fail,          ///< throws `CommunicatorError` (injected) instead of starting; peers are aborted
  stick,         ///< never starts, nor does any later one; `wait` blocks beyond the timeout
  resize,        ///< starts with one element (of one rank's slice) less than asked for
  swap,          ///< starts after the rank's next operation, or in `wait` where that comes first
};

/// One thing to go wrong. Operations are counted over a rank's communicator and its duplicates
/// together, `duplicate()` itself included, so that a plan reaches each of them, whichever it is;
/// with `duplicate`, over one of them alone, which tells which it is although their threads race.
/// `resize` concerns operations with elements whose buffers are disjoint;
/// a meeting and `duplicate()` can be neither resized nor held back by a swap.
struct Fault {
  FaultAction action = FaultAction::fail;
  int rank = 0;                 ///< -1 for all
  std::uint64_t operation = 0;  ///< how many operations this rank has started before that one
  std::uint64_t every = 0;      ///< if positive, every so many operations from then on
  std::chrono::nanoseconds delay{0};
  int duplicate = -1;  ///< 0: the operations of the first communicator alone; n: of the rank's n-th
                       ///< duplicate; -1: of all of them
};

/// All that goes wrong in a world. Give every rank the same one.
struct FaultPlan {
  std::vector<Fault> faults{};
  std::uint64_t seed = 0;
  /// If positive, every start and every wait sleeps for up to that long, or not at all.
  std::chrono::nanoseconds random_delay{0};
};

/// Shakes the order in which ranks start and finish: another seed, another order.
[[nodiscard]] inline FaultPlan random_delays(std::uint64_t seed, std::chrono::nanoseconds max) {
  return {.faults = {}, .seed = seed, .random_delay = max};
}

namespace detail {

/// What one rank's injector and its duplicates share.
struct FaultsOfRank {
  std::atomic<std::uint64_t> started{0};
  std::atomic<int> duplicates{0};
  std::atomic<bool> stuck{false};
};

/// What the copies and requests of one rank's injector share.
template <class Comm>
struct FaultState {
  struct Decision {
    std::uint64_t index = 0;
    std::chrono::nanoseconds delay_start{0};
    std::chrono::nanoseconds delay_finish{0};
    bool fail = false;
    bool resize = false;
    bool swap = false;
  };

  FaultState(Comm comm, FaultPlan what, std::shared_ptr<FaultsOfRank> of_rank, int duplicate)
      : inner(std::move(comm)),
        plan(std::move(what)),
        all(std::move(of_rank)),
        number(duplicate),
        random(plan.seed * 0x9e3779b97f4a7c15U + static_cast<std::uint64_t>(inner.rank()) +
               (static_cast<std::uint64_t>(number) << 32U)) {}

  Decision next() {
    Decision decision{
        .index = all->started++, .delay_start = random_delay(), .delay_finish = random_delay()};
    const std::uint64_t own_index = count++;
    for (const Fault& fault : plan.faults) {
      if (fault.rank != -1 && fault.rank != inner.rank()) continue;
      if (fault.duplicate != -1 && fault.duplicate != number) continue;
      const std::uint64_t index = fault.duplicate == -1 ? decision.index : own_index;
      const bool due = fault.every == 0 ? index == fault.operation
                                        : index >= fault.operation &&
                                              (index - fault.operation) % fault.every == 0;
      if (!due) continue;
      switch (fault.action) {
        case FaultAction::delay_start: decision.delay_start += fault.delay; break;
        case FaultAction::delay_finish: decision.delay_finish += fault.delay; break;
        case FaultAction::fail: decision.fail = true; break;
        case FaultAction::stick: all->stuck = true; break;
        case FaultAction::resize: decision.resize = true; break;
        case FaultAction::swap: decision.swap = true; break;
      }
    }
    return decision;
  }

  std::chrono::nanoseconds random_delay() {
    if (plan.random_delay.count() <= 0) return {};
    random += 0x9e3779b97f4a7c15U;  // splitmix64: the same delays with every standard library
    std::uint64_t x = random;
    x = (x ^ (x >> 30U)) * 0xbf58476d1ce4e5b9U;
    x = (x ^ (x >> 27U)) * 0x94d049bb133111ebU;
    x ^= x >> 31U;
    if ((x & 1U) == 0) return {};
    return std::chrono::nanoseconds(static_cast<std::int64_t>(
        (x >> 1U) % (static_cast<std::uint64_t>(plan.random_delay.count()) + 1)));
  }

  void launch_held() {
    if (held) std::exchange(held, nullptr)();
  }

  [[noreturn]] void fail(const char* operation, std::uint64_t index) {
    const std::string text = "rank " + std::to_string(inner.rank()) + ": " + operation +
                             ", operation " + std::to_string(index) + ": injected failure";
    inner.abort(text);
    throw CommunicatorError(CommunicatorFailure::injected, inner.rank(), operation, index, text);
  }

  [[noreturn]] void block(const char* operation, std::uint64_t index,
                          std::chrono::nanoseconds timeout) {
    std::this_thread::sleep_for(timeout + timeout / 2);  // so that the peers are the first to see
    throw CommunicatorError(CommunicatorFailure::timeout, inner.rank(), operation, index,
                            "rank " + std::to_string(inner.rank()) + ": " + operation +
                                ", operation " + std::to_string(index) +
                                ": injected: this rank was stuck");
  }

  [[nodiscard]] std::chrono::nanoseconds timeout() const {
    if constexpr (requires { inner.timeout(); }) {
      return inner.timeout();
    } else {
      return std::chrono::seconds(1);
    }
  }

  Comm inner;
  FaultPlan plan;
  std::shared_ptr<FaultsOfRank> all;
  int number;  // 0, or that of a duplicate
  std::uint64_t random;
  std::uint64_t count = 0;
  std::function<void()> held{};
};

/// One operation, which may have been started, be held back, or never start. `R` is the inner
/// request or meeting.
template <class Comm, class R>
class FaultyRequest {
 public:
  using State = FaultState<Comm>;
  /// Where the inner operation will appear, if it isn't started at once.
  struct Place {
    std::optional<R> inner{};
    std::exception_ptr failure{};
    std::vector<std::size_t> counts[2];  // of a resized operation; they outlive it
  };

  FaultyRequest(std::shared_ptr<State> state, std::shared_ptr<Place> place, const char* operation,
                std::uint64_t index, std::chrono::nanoseconds delay)
      : state_(std::move(state)),
        place_(std::move(place)),
        operation_(operation),
        index_(index),
        delay_(delay) {}
  FaultyRequest(FaultyRequest&&) noexcept = default;
  FaultyRequest& operator=(FaultyRequest&& other) noexcept {
    FaultyRequest(std::move(other)).swap(*this);
    return *this;
  }
  ~FaultyRequest() {
    if (place_ == nullptr || place_->inner || place_->failure || over_) return;
    try {
      state_->held = nullptr;
      state_->inner.abort(std::string("dropped an unfinished request of ") + operation_ +
                          ", which an injected fault had kept from starting");
    } catch (...) {
      // Out of memory: the peers time out.
    }
  }

  void wait() { wait(state_->timeout()); }
  void wait(std::chrono::nanoseconds timeout) {
    if (over_ || place_ == nullptr) return;
    inner(timeout).wait(timeout);
    over_ = true;
  }
  void enqueue()
    requires requires(R& request) { request.enqueue(); }
  {
    if (over_ || place_ == nullptr) return;
    inner(state_->timeout()).enqueue();
    over_ = true;
  }
  [[nodiscard]] bool done() {
    if (over_ || place_ == nullptr) return true;
    if (!place_->inner && state_->all->stuck) return false;
    return inner({}).done();
  }

  [[nodiscard]] std::span<const void* const> peers()
    requires Meeting<R>
  {
    return peers(state_->timeout());
  }
  [[nodiscard]] std::span<const void* const> peers(std::chrono::nanoseconds timeout)
    requires Meeting<R>
  {
    return inner(timeout).peers(timeout);
  }
  void leave()
    requires Meeting<R>
  {
    if (place_->inner) place_->inner->leave();
  }

 private:
  void swap(FaultyRequest& other) noexcept {
    std::swap(state_, other.state_);
    std::swap(place_, other.place_);
    std::swap(operation_, other.operation_);
    std::swap(index_, other.index_);
    std::swap(delay_, other.delay_);
    std::swap(over_, other.over_);
  }

  R& inner(std::chrono::nanoseconds timeout) {
    std::this_thread::sleep_for(std::exchange(delay_, std::chrono::nanoseconds{0}));
    if (!place_->inner && !place_->failure && !state_->all->stuck) state_->launch_held();
    if (place_->failure) std::rethrow_exception(place_->failure);
    if (!place_->inner) {
      over_ = true;
      state_->block(operation_, index_, timeout);
    }
    return *place_->inner;
  }

  std::shared_ptr<State> state_;
  std::shared_ptr<Place> place_;
  const char* operation_;
  std::uint64_t index_;
  std::chrono::nanoseconds delay_;
  bool over_ = false;
};

}  // namespace detail

/// One rank's communicator with faults: models what `Comm` models, and passes everything on save
/// for what the plan says. Copies are the same rank.
///
/// With `shares_memory` false it has no `meet`, so that code with a shortcut for ranks that share
/// memory takes the way that it takes with all other communicators.
template <class Comm, bool shares_memory = SharedMemoryCommunicator<Comm>>
class FaultInjector {
  static_assert(Ranked<Comm> && Abortable<Comm> && Capable<Comm>,
                "FaultInjector<Comm>: Comm must model zero::Communicator");
  static_assert(!shares_memory || SharedMemoryCommunicator<Comm>,
                "FaultInjector<Comm, true>: Comm's ranks share no memory (no meet); drop the true");

 public:
  static constexpr MemorySpace memory_space = Comm::memory_space;
  [[nodiscard]] static constexpr bool supports(ElementType type) { return Comm::supports(type); }
  [[nodiscard]] static constexpr bool supports(ReduceOp op) { return Comm::supports(op); }

  explicit FaultInjector(Comm inner, FaultPlan plan = {})
      : FaultInjector(std::move(inner), std::move(plan), std::make_shared<detail::FaultsOfRank>(),
                      0) {}

  [[nodiscard]] int rank() const { return state_->inner.rank(); }
  [[nodiscard]] int size() const { return state_->inner.size(); }
  [[nodiscard]] std::chrono::nanoseconds timeout() const { return state_->timeout(); }
  /// How many operations this rank has started, faulty ones and those of its duplicates included:
  /// the index of the next.
  [[nodiscard]] std::uint64_t started() const { return state_->all->started; }

  template <Element T>
  [[nodiscard]] auto all_reduce(std::span<T> data, ReduceOp op = ReduceOp::sum) {
    return start("all_reduce", [=](Comm& inner, bool resize, Counts&) {
      return inner.all_reduce(shorter(data, resize), op);
    });
  }

  template <Element T>
  [[nodiscard]] auto reduce_scatter(std::span<const std::type_identity_t<T>> input,
                                    std::span<T> output, ReduceOp op = ReduceOp::sum) {
    return start("reduce_scatter", [=, ranks = ranks()](Comm& inner, bool resize, Counts&) {
      return inner.reduce_scatter(shorter(input, resize, ranks), shorter(output, resize), op);
    });
  }

  template <Element T>
  [[nodiscard]] auto reduce_scatter_v(std::span<const std::type_identity_t<T>> input,
                                      std::span<T> output, std::span<const std::size_t> counts,
                                      ReduceOp op = ReduceOp::sum) {
    return start("reduce_scatter_v", [=, this_rank = own()](Comm& inner, bool resize, Counts& c) {
      return inner.reduce_scatter_v(shorter(input, resize), shorter(output, resize),
                                    fewer(counts, resize, this_rank, c[0]), op);
    });
  }

  template <Element T>
  [[nodiscard]] auto all_gather(std::span<const std::type_identity_t<T>> input,
                                std::span<T> output) {
    return start("all_gather", [=, ranks = ranks()](Comm& inner, bool resize, Counts&) {
      return inner.all_gather(shorter(input, resize), shorter(output, resize, ranks));
    });
  }

  template <Element T>
  [[nodiscard]] auto all_gather_v(std::span<const std::type_identity_t<T>> input,
                                  std::span<T> output, std::span<const std::size_t> counts) {
    return start("all_gather_v", [=, this_rank = own()](Comm& inner, bool resize, Counts& c) {
      return inner.all_gather_v(shorter(input, resize), shorter(output, resize),
                                fewer(counts, resize, this_rank, c[0]));
    });
  }

  template <Element T>
  [[nodiscard]] auto all_to_all(std::span<const std::type_identity_t<T>> input,
                                std::span<T> output) {
    return start("all_to_all", [=, ranks = ranks()](Comm& inner, bool resize, Counts&) {
      return inner.all_to_all(shorter(input, resize, ranks), shorter(output, resize, ranks));
    });
  }

  template <Element T>
  [[nodiscard]] auto all_to_all_v(std::span<const std::type_identity_t<T>> input,
                                  std::span<const std::size_t> send_counts, std::span<T> output,
                                  std::span<const std::size_t> receive_counts) {
    const std::size_t peer = (own() + 1) % ranks();
    return start("all_to_all_v", [=](Comm& inner, bool resize, Counts& c) {
      return inner.all_to_all_v(shorter(input, resize), fewer(send_counts, resize, peer, c[0]),
                                output, receive_counts);
    });
  }

  template <Element T>
  [[nodiscard]] auto broadcast(std::span<T> data, int root) {
    return start("broadcast", [=](Comm& inner, bool resize, Counts&) {
      return inner.broadcast(shorter(data, resize), root);
    });
  }

  [[nodiscard]] auto barrier() {
    return start("barrier", [](Comm& inner, bool, Counts&) { return inner.barrier(); });
  }

  [[nodiscard]] auto exchange(std::span<const std::byte> mine, std::span<std::byte> all) {
    return start("exchange", [=, ranks = ranks()](Comm& inner, bool resize, Counts&) {
      return inner.exchange(shorter(mine, resize), shorter(all, resize, ranks));
    });
  }

  [[nodiscard]] auto meet(const char* operation, const void* published)
    requires shares_memory
  {
    return start(
        operation, [=](Comm& inner, bool, Counts&) { return inner.meet(operation, published); },
        /*can_be_held=*/false);
  }

  /// A duplicate of the inner one, which goes wrong by the same plan (see `Fault`). An operation
  /// of this one, as far as the plan is concerned.
  [[nodiscard]] FaultInjector duplicate()
    requires Duplicable<Comm>
  {
    const auto decision = state_->next();
    std::this_thread::sleep_for(decision.delay_start);
    if (decision.fail) state_->fail("duplicate", decision.index);
    if (state_->all->stuck) state_->block("duplicate", decision.index, timeout());
    state_->launch_held();
    FaultInjector copy(state_->inner.duplicate(), state_->plan, state_->all,
                       ++state_->all->duplicates);
    std::this_thread::sleep_for(decision.delay_finish);
    return copy;
  }
  [[nodiscard]] bool concurrent() const
    requires Duplicable<Comm>
  {
    return state_->inner.concurrent();
  }

  // Passed on as they are: faults are of this communicator's own operations.

  [[nodiscard]] auto stream() const
    requires requires(Comm& comm) { comm.stream(); }
  {
    return state_->inner.stream();
  }
  template <class Event>
    requires requires(Comm& comm, const Event& event) { comm.wait(event); }
  void wait(const Event& event) {
    state_->inner.wait(event);
  }
  void check() const
    requires requires(Comm& comm) { comm.check(); }
  {
    state_->inner.check();
  }
  [[nodiscard]] auto& replicas() const
    requires ReplicatedCommunicator<Comm>
  {
    return state_->inner.replicas();
  }
  [[nodiscard]] auto& world() const
    requires ReplicatedCommunicator<Comm>
  {
    return state_->inner.world();
  }

  void abort(std::string_view reason) const { state_->inner.abort(std::string(reason)); }
  [[nodiscard]] auto batch() { return state_->inner.batch(); }

 private:
  using State = detail::FaultState<Comm>;
  using Counts = std::vector<std::size_t>[2];

  FaultInjector(Comm inner, FaultPlan plan, std::shared_ptr<detail::FaultsOfRank> all, int number)
      : state_(std::make_shared<State>(std::move(inner), std::move(plan), std::move(all), number)) {
  }

  [[nodiscard]] std::size_t own() const { return static_cast<std::size_t>(rank()); }
  [[nodiscard]] std::size_t ranks() const { return static_cast<std::size_t>(size()); }

  template <class T>
  static std::span<T> shorter(std::span<T> span, bool resize, std::size_t by = 1) {
    return resize && span.size() >= by ? span.first(span.size() - by) : span;
  }

  static std::span<const std::size_t> fewer(std::span<const std::size_t> counts, bool resize,
                                            std::size_t place, std::vector<std::size_t>& copy) {
    if (!resize || counts[place] == 0) return counts;
    copy.assign(counts.begin(), counts.end());
    --copy[place];
    return copy;
  }

  template <class Launch>
  auto start(const char* operation, Launch launch, bool can_be_held = true) {
    using Inner = std::invoke_result_t<Launch&, Comm&, bool, Counts&>;
    const auto decision = state_->next();
    std::this_thread::sleep_for(decision.delay_start);
    if (decision.fail) state_->fail(operation, decision.index);

    using Request = detail::FaultyRequest<Comm, Inner>;
    const auto place = std::make_shared<typename Request::Place>();
    if (state_->all->stuck) {
      // Its place stays empty.
    } else if (decision.swap && can_be_held && !state_->held) {
      state_->held = [state = state_.get(), place, launch, decision] {
        try {
          place->inner.emplace(launch(state->inner, decision.resize, place->counts));
        } catch (...) {
          place->failure = std::current_exception();  // for the operation that it belongs to
        }
      };
    } else {
      place->inner.emplace(launch(state_->inner, decision.resize, place->counts));
      state_->launch_held();
    }
    return Request(state_, place, operation, decision.index, decision.delay_finish);
  }

  std::shared_ptr<State> state_;
};

}  // namespace zero
