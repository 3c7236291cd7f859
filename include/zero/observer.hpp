// SPDX-License-Identifier: Apache-2.0
/// @file
/// Who is told what a step does, and when.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>

namespace zero {

/// The parts of a step.
enum class Phase : std::uint8_t {
  reduce,  ///< gradients of a bucket are summed (or waited for)
  update,  ///< the rule runs over this rank's part of a bucket
  gather,  ///< peers' parts of a bucket are fetched (or waited for)
};

/// One part of one bucket.
struct Event {
  Phase phase;
  std::size_t lane;
  std::size_t bucket;
  std::size_t elements;  ///< that this rank handles in it
};

/// Intent: traces, timings and counts without a cost where nobody looks.
///  1. `begin(event)` and `end(event)` are called in pairs, on the thread that runs the step; at
///     stages 2 and 3 those of `Phase::reduce` and `Phase::gather` on the thread of that traffic. A
///     pair of one phase may then stand within one of another, but no two calls run at once.
///  2. They don't throw, and call nothing of the optimizer that they observe.
/// With `NoObserver` no code is generated.
///
/// A minimal model:
/// @code
/// struct BucketCounter {
///   std::size_t updated = 0;
///   void begin(const zero::Event&) {}
///   void end(const zero::Event& event) { updated += event.phase == zero::Phase::update; }
/// };
/// @endcode
template <class O>
concept Observer = std::movable<O> && requires(O& observer, const Event& event) {
  observer.begin(event);
  observer.end(event);
};

/// Nobody looks.
struct NoObserver {
  void begin(const Event&) noexcept {}
  void end(const Event&) noexcept {}
};

static_assert(Observer<NoObserver>);

}  // namespace zero
