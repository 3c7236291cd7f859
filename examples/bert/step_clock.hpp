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
  void end(double products) {
    now_.products += products;
    now_.step = seconds_between(started_, Clock::now());
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
          &StepTime::reduce, &StepTime::update, &StepTime::gather, &StepTime::step}) {
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
  void begin(const zero::Event&) { begin_ = Clock::now(); }
  void end(const zero::Event& event) {
    static constexpr std::array names{"reduce", "update", "gather"};
    static constexpr std::array parts{&StepTime::reduce, &StepTime::update, &StepTime::gather};
    const auto phase = static_cast<std::size_t>(event.phase);
    clock_->add(parts[phase], names[phase], begin_, Clock::now());
  }

 private:
  StepClock* clock_;
  Clock::time_point begin_{};
};
static_assert(zero::Observer<StepObserver>);

}  // namespace bert
