// SPDX-License-Identifier: Apache-2.0
// How long the parts of a rank's steps take.
#pragma once

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <span>
#include <vector>
#include <zero/observer.hpp>

#include "trace.hpp"
#include "training.hpp"

namespace bert {

using Clock = std::chrono::steady_clock;

inline double seconds_between(Clock::time_point begin, Clock::time_point end) {
  return std::chrono::duration<double>(end - begin).count();
}

/// Measures one rank's steps, and records them where there is a recorder. A training loop
/// needs nothing of it.
class StepClock {
 public:
  explicit StepClock(Recorder* recorder) : recorder_(recorder) {}

  void begin(double products) {
    now_ = StepTime{};
    now_.products = -products;
    started_ = last_ = Clock::now();
  }
  /// What came since the last call was this part.
  void was(double StepTime::* part, const char* name) {
    const auto now = Clock::now();
    add(part, name, last_, now);
    last_ = now;
  }
  void add(double StepTime::* part, const char* name, Clock::time_point begin,
           Clock::time_point end) {
    now_.*part += seconds_between(begin, end);
    if (recorder_ != nullptr) recorder_->add(name, begin, end);
  }
  /// Seconds that traffic took and those that it was waited for, where it has threads of its own.
  void traffic(double took, double exposed) {
    now_.traffic = took;
    now_.exposed = exposed;
  }
  void add_seconds(double StepTime::* part, double seconds) { now_.*part += seconds; }
  void end(double products) {
    now_.products += products;
    now_.step = seconds_between(started_, Clock::now());
    if (now_.traffic == 0) now_.traffic = now_.exposed = now_.reduce + now_.gather;
    // In `step()` ranks wait for each other too.
    now_.wait = std::max(0.0, now_.step - now_.forward - now_.backward - now_.optimizer());
    steps_.push_back(now_);
  }

  /// Each number's median over the steps; the first, which touches memory anew, is left out where
  /// there are more.
  [[nodiscard]] StepTime median() const {
    std::span<const StepTime> steps = steps_;
    if (steps.size() > 1) steps = steps.subspan(1);
    StepTime result;
    std::vector<double> numbers(steps.size());
    for (double StepTime::* part :
         {&StepTime::forward, &StepTime::backward, &StepTime::products, &StepTime::wait,
          &StepTime::reduce, &StepTime::update, &StepTime::gather, &StepTime::traffic,
          &StepTime::exposed, &StepTime::step}) {
      std::transform(steps.begin(), steps.end(), numbers.begin(),
                     [part](const StepTime& step) { return step.*part; });
      std::sort(numbers.begin(), numbers.end());
      result.*part = (numbers[(numbers.size() - 1) / 2] + numbers[numbers.size() / 2]) / 2;
    }
    return result;
  }

 private:
  Recorder* recorder_;
  StepTime now_{};
  Clock::time_point started_{}, last_{};
  std::vector<StepTime> steps_{};
};

/// Tells the clock what `zero` does in a step. A `zero::Observer`.
class StepObserver {
 public:
  explicit StepObserver(StepClock& clock) : clock_(&clock) {}
  /// Of an optimizer whose traffic has threads of its own: it is recorded, where there is a
  /// recorder, and is no part of the step.
  StepObserver(StepClock& clock, Recorder* traffic)
      : clock_(&clock), traffic_(traffic), beside_(true) {}

  void begin(const zero::Event& event) { begin_[phase_of(event)] = Clock::now(); }
  void end(const zero::Event& event) {
    static constexpr std::array names{"reduce", "update", "gather"};
    static constexpr std::array parts{&StepTime::reduce, &StepTime::update, &StepTime::gather};
    const std::size_t phase = phase_of(event);
    if (!beside_ || event.phase == zero::Phase::update) {
      clock_->add(parts[phase], names[phase], begin_[phase], Clock::now());
    } else if (traffic_ != nullptr) {
      traffic_->add(names[phase], begin_[phase], Clock::now());
    }
  }

 private:
  static std::size_t phase_of(const zero::Event& event) {
    return static_cast<std::size_t>(event.phase);
  }

  StepClock* clock_;
  Recorder* traffic_ = nullptr;
  bool beside_ = false;
  std::array<Clock::time_point, 3> begin_{};  ///< by phase: each has one thread
};
static_assert(zero::Observer<StepObserver>);

}  // namespace bert
