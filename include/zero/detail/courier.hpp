// SPDX-License-Identifier: Apache-2.0
/// @file
/// A thread that carries out one communicator's operations while the rank computes.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "zero/error.hpp"

namespace zero::detail {

/// Carries out errands one after the other, in the order in which they are handed over. The first
/// that throws is the last: whoever waits for it, or for a later one, gets what it threw.
template <class Errand>
class Courier {
 public:
  using Clock = std::chrono::steady_clock;

  Courier() = default;
  Courier(const Courier&) = delete;
  Courier& operator=(const Courier&) = delete;
  ~Courier() { stop(); }

  /// @param capacity errands that may be under way at once
  /// @param run carries one out
  template <class F>
  void start(std::size_t capacity, F run) {
    stop();
    queue_.resize(capacity + 1);
    pushed_ = done_ = 0;
    stopping_ = false;
    failure_ = nullptr;
    thread_ = std::thread([this, run = std::move(run)]() mutable { work(run); });
  }

  /// Returns its number: how many had been handed over before it.
  std::uint64_t push(const Errand& errand) {
    std::uint64_t number = 0;
    {
      const std::scoped_lock lock(mutex_);
      queue_[pushed_ % queue_.size()] = errand;
      number = pushed_++;
    }
    pushed_some_.notify_one();
    return number;
  }

  /// Returns when `count` errands have been carried out; throws what one of them threw.
  void wait(std::uint64_t count) {
    std::unique_lock lock(mutex_);
    if (done_ < count && failure_ == nullptr) {
      const auto begin = Clock::now();
      done_some_.wait(lock, [&] { return done_ >= count || failure_ != nullptr || stopping_; });
      waited_ += Clock::now() - begin;
    }
    if (done_ >= count) return;
    if (failure_ != nullptr) std::rethrow_exception(failure_);
    throw UsageError(
        "this optimizer can't go on after the failure that was thrown before; make a new one, over "
        "a new "
        "communicator");
  }
  /// The same of all that has been handed over.
  void wait_for_all() { wait(pushed()); }
  /// The same of one more than have been now. False, at once, where none is under way: what is has
  /// to be known and waited for in one go, since it may end meanwhile, and nothing may follow.
  bool wait_for_one() {
    std::uint64_t next = 0;
    {
      const std::scoped_lock lock(mutex_);
      if (done_ == pushed_ || failure_ != nullptr) return false;
      next = done_ + 1;
    }
    wait(next);
    return true;
  }

  /// Throws what an errand threw.
  void require_sound() const {
    const std::scoped_lock lock(mutex_);
    if (failure_ != nullptr) std::rethrow_exception(failure_);
  }
  [[nodiscard]] std::uint64_t pushed() const {
    const std::scoped_lock lock(mutex_);
    return pushed_;
  }
  [[nodiscard]] bool idle() const {
    const std::scoped_lock lock(mutex_);
    return done_ == pushed_ || failure_ != nullptr;
  }

  /// How long errands took, and how long callers waited for them.
  [[nodiscard]] std::pair<Clock::duration, Clock::duration> worked_and_waited() const {
    const std::scoped_lock lock(mutex_);
    return {worked_, waited_};
  }

  /// Ends the thread, after the errand that it is at: which must end, so abort its communicator.
  void stop() noexcept {
    if (!thread_.joinable()) return;
    {
      const std::scoped_lock lock(mutex_);
      stopping_ = true;
    }
    pushed_some_.notify_one();
    done_some_.notify_all();
    thread_.join();
  }

 private:
  template <class F>
  void work(F& run) noexcept {
    std::unique_lock lock(mutex_);
    while (true) {
      pushed_some_.wait(lock, [&] { return stopping_ || done_ < pushed_; });
      if (stopping_) return;
      const Errand errand = queue_[done_ % queue_.size()];
      lock.unlock();
      std::exception_ptr failure;
      const auto begin = Clock::now();
      try {
        run(errand);
      } catch (...) {
        failure = std::current_exception();
      }
      const auto end = Clock::now();
      lock.lock();
      worked_ += end - begin;
      if (failure == nullptr) {
        ++done_;
      } else {
        failure_ = failure;
        failure = nullptr;
      }
      done_some_.notify_all();
      if (failure_ != nullptr) return;
    }
  }

  mutable std::mutex mutex_{};
  std::condition_variable pushed_some_{};
  std::condition_variable done_some_{};
  std::vector<Errand> queue_{};  ///< a ring
  std::uint64_t pushed_ = 0;
  std::uint64_t done_ = 0;
  bool stopping_ = false;
  std::exception_ptr failure_{};  ///< kept until the end: its last owner frees it
  Clock::duration worked_{};
  Clock::duration waited_{};
  std::thread thread_{};
};

}  // namespace zero::detail
