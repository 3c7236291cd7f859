// SPDX-License-Identifier: Apache-2.0
// Timing on a machine that others use too: subject and reference take turns, so that whatever slows
// the machine down slows both, and only the ratio of neighbours counts.
#pragma once

#include <algorithm>
#include <chrono>
#include <utility>
#include <vector>

namespace bench {

/// Seconds that one call takes.
template <class F>
double seconds(F&& f) {
  const auto begin = std::chrono::steady_clock::now();
  std::forward<F>(f)();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

/// Median and range of some samples.
struct Spread {
  double median = 0;
  double min = 0;
  double max = 0;
};

/// Of at least one sample.
inline Spread spread_of(std::vector<double> samples) {
  std::sort(samples.begin(), samples.end());
  const std::size_t middle = samples.size() / 2;
  const double median =
      samples.size() % 2 == 1 ? samples[middle] : (samples[middle - 1] + samples[middle]) / 2;
  return {median, samples.front(), samples.back()};
}

/// Seconds of neighbouring runs; the k-th of both were measured one right after the other.
struct Pairs {
  std::vector<double> subject{};
  std::vector<double> reference{};

  /// How many times as long as the reference the subject takes.
  [[nodiscard]] Spread time_ratio() const { return ratio(subject, reference); }
  /// How many times as fast as the reference the subject is.
  [[nodiscard]] Spread speed_ratio() const { return ratio(reference, subject); }

 private:
  static Spread ratio(const std::vector<double>& a, const std::vector<double>& b) {
    std::vector<double> ratios(a.size());
    for (std::size_t i = 0; i < a.size(); ++i) ratios[i] = a[i] / b[i];
    return spread_of(std::move(ratios));
  }
};

/// Enough for a median that one disturbed run, or five, can't move.
inline constexpr int pair_count = 11;

/// Runs both once unmeasured, then `count` pairs in the order A B, B A, A B, …; before each
/// `prepare`, which is not measured.
template <class Prepare, class Subject, class Reference>
Pairs run_prepared_pairs(Prepare&& prepare, Subject&& subject, Reference&& reference,
                         int count = pair_count) {
  const auto measure = [&](auto&& run) {
    prepare();
    return seconds(run);
  };
  (void)measure(subject);
  (void)measure(reference);
  Pairs pairs;
  for (int i = 0; i < count; ++i) {
    if (i % 2 == 0) pairs.subject.push_back(measure(subject));
    pairs.reference.push_back(measure(reference));
    if (i % 2 == 1) pairs.subject.push_back(measure(subject));
  }
  return pairs;
}

template <class Subject, class Reference>
Pairs run_pairs(Subject&& subject, Reference&& reference, int count = pair_count) {
  return run_prepared_pairs([] {}, subject, reference, count);
}

}  // namespace bench
