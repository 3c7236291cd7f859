// SPDX-License-Identifier: Apache-2.0
/// @file
/// The events of in-process operations in CUDA memory, and how long the host waits for them.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdio>
#include <exception>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "zero/cuda/error.hpp"
#include "zero/cuda/stream.hpp"
#include "zero/detail/in_process_world.hpp"
#include "zero/error.hpp"

namespace zero::cuda::detail {

class InProcessFlights;

/// One operation of one rank, as its peers see it. All of them outlive the world's last rank.
struct InProcessFlight {
  explicit InProcessFlight(InProcessFlights& flights) : owner(&flights) {}

  InProcessFlights* owner;
  Event ready{};                ///< the rank's memory may be read, and written by itself
  std::array<Event, 2> done{};  ///< by phase: the rank's part of the work
  Event end{};                  ///< no peer reads the rank's memory any more
  bool failed = false;          ///< the rank's own enqueueing
};

/// One rank's flights: taken and given back by the thread that calls the rank's communicator.
class InProcessFlights {
 public:
  using nanoseconds = std::chrono::nanoseconds;
  using Clock = std::chrono::steady_clock;

  InProcessFlights(StreamView stream, zero::detail::InProcessState& state, std::size_t rank)
      : stream_(stream), state_(&state), rank_(rank) {}

  [[nodiscard]] StreamView stream() const noexcept { return stream_; }
  [[nodiscard]] std::size_t rank() const noexcept { return rank_; }

  /// Throws `CudaError`, where an event can't be made.
  [[nodiscard]] InProcessFlight& take() {
    if (free_.empty()) {
      free_.reserve(all_.size() + 1);  // giving back must not throw
      all_.push_back(std::make_unique<InProcessFlight>(*this));
      free_.push_back(all_.back().get());
    }
    InProcessFlight& flight = *free_.back();
    free_.pop_back();
    return flight;
  }
  void give_back(InProcessFlight& flight) noexcept {
    flight.failed = false;
    free_.push_back(&flight);
  }

  /// Waits until `event` has happened or failed, at most the world's timeout; once that has
  /// passed, later calls don't wait. For a rank whose memory peers may still read.
  void settle(const Event& event) noexcept {
    if (stuck_) return;
    stuck_ = !until(state_->timeout(), [&] { return event.query() != cudaErrorNotReady; });
  }

  /// As above, for all operations that are enqueued.
  void settle() noexcept {
    if (last_end_ != nullptr) settle(*last_end_);
  }

  /// Records in the stream that `flight` is over.
  void record_end(const InProcessFlight& flight) {
    flight.end.record(stream_);
    last_end_ = &flight.end;
  }

  /// Within a handler, of what the enqueueing of `flight` threw. Poisons the world.
  void fail(InProcessFlight& flight, const char* operation, const char* why) noexcept {
    flight.failed = true;
    if (!error_) error_ = std::current_exception();
    give_up(CommunicatorFailure::transport, operation, why);
  }
  /// What the first of those was.
  [[nodiscard]] const std::exception_ptr& error() const noexcept { return error_; }

  /// Poisons the world.
  void give_up(CommunicatorFailure failure, const char* operation, const char* why) noexcept {
    try {
      state_->give_up(rank_, failure,
                      "rank " + std::to_string(rank_) + ", in " + operation + ": " + why);
    } catch (...) {
      state_->give_up(rank_, failure, why);  // out of memory
    }
  }
  /// Poisons the world: this rank has waited too long for its device.
  void give_up_waiting(nanoseconds timeout, const char* operation) noexcept {
    std::array<char, 256> why{};
    std::snprintf(why.data(), why.size(),
                  "its device has not come that far after %g s; something before it in a stream of "
                  "one of the ranks takes longer or never ends: look for kernels that wait, or "
                  "allow more time (InProcessOptions::timeout)",
                  std::chrono::duration<double>(timeout).count());
    stuck_ = stuck_ || timeout >= state_->timeout();
    give_up(CommunicatorFailure::timeout, operation, why.data());
  }

  /// Calls `is_over()` until it returns true; false once `timeout` has passed.
  template <class IsOver>
  static bool until(nanoseconds timeout, IsOver is_over) {
    const Clock::time_point start = Clock::now();
    while (!is_over()) {
      const nanoseconds waited = Clock::now() - start;
      if (waited >= timeout) return false;
      // Most operations are over soon; a long wait takes no processor from those who work.
      if (waited < std::chrono::microseconds(200)) {
        std::this_thread::yield();
      } else {
        std::this_thread::sleep_for(std::chrono::microseconds(50));
      }
    }
    return true;
  }

 private:
  StreamView stream_;
  zero::detail::InProcessState* state_;
  std::size_t rank_;
  bool stuck_ = false;
  const Event* last_end_ = nullptr;  // what the stream does last but for what is under way
  std::exception_ptr error_{};
  std::vector<std::unique_ptr<InProcessFlight>> all_{};
  std::vector<InProcessFlight*> free_{};
};

}  // namespace zero::cuda::detail
