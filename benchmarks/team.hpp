// SPDX-License-Identifier: Apache-2.0
// Threads that are there already when the clock starts.
#pragma once

#include <atomic>
#include <exception>
#include <functional>
#include <thread>
#include <vector>

namespace bench {

/// `size` threads that run one function together; thread 0 is the caller's.
class Team {
 public:
  explicit Team(int size) : failures_(static_cast<std::size_t>(size)) {
    for (int rank = 1; rank < size; ++rank) {
      threads_.emplace_back([this, rank] {
        for (unsigned seen = 0;;) {
          round_.wait(seen);
          seen = round_.load();
          if (!job_) return;
          attempt(rank);
          if (--working_ == 0) working_.notify_one();
        }
      });
    }
  }
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;
  ~Team() {
    job_ = nullptr;
    announce();
    for (std::thread& thread : threads_) thread.join();
  }

  /// Calls `job(rank)` on every thread; returns when all have returned, or throws what one threw.
  void run(std::function<void(int)> job) {
    job_ = std::move(job);
    working_ = static_cast<int>(threads_.size());
    announce();
    attempt(0);
    for (int left = working_.load(); left != 0; left = working_.load()) working_.wait(left);
    for (std::exception_ptr& failure : failures_) {
      if (failure) std::rethrow_exception(std::exchange(failure, nullptr));
    }
  }

 private:
  void announce() {
    ++round_;
    round_.notify_all();
  }
  void attempt(int rank) {
    try {
      job_(rank);
    } catch (...) {
      failures_[static_cast<std::size_t>(rank)] = std::current_exception();
    }
  }

  std::function<void(int)> job_{};
  std::atomic<unsigned> round_{0};
  std::atomic<int> working_{0};
  std::vector<std::exception_ptr> failures_;
  std::vector<std::thread> threads_{};
};

}  // namespace bench
