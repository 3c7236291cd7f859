// SPDX-License-Identifier: Apache-2.0
/// @file
/// A step on a device: enqueued, and asked for later.
#pragma once

#include <memory>
#include <utility>

#include "zero/error.hpp"
#include "zero/outcome.hpp"

namespace zero::cuda {

/// A step that has been enqueued. It may be dropped: the step is taken all the same. A few may be
/// kept; each keeps a little memory that later steps would use.
class Step {
 public:
  /// @param ask of `optimizer`, for what it left in `report`
  /// @param report null where the step was captured into a graph
  Step(void* optimizer, Outcome (*ask)(void* optimizer, const void* report),
       std::shared_ptr<const void> report)
      : optimizer_(optimizer), ask_(ask), report_(std::move(report)) {}

  /// Blocks the host until the step is done, and tells what it came to. With several ranks it waits
  /// no longer than the communicator's timeout; a rank alone has none, and waits for its device.
  /// The optimizer must still be there; it may have been moved.
  ///
  /// Throws what no rank could know when it enqueued the step, on every rank that asks:
  /// `UsageError` where a rank refused it or ranks differ in their options, so that no rank took it
  /// and nothing has changed; `CommunicatorError` where a peer failed, `CudaError` where the device
  /// did. Where nobody asks, a later `ZeroSharded::step` throws it.
  [[nodiscard]] Outcome outcome() const {
    if (report_ == nullptr) {
      throw UsageError(
          "outcome: the step was captured into a graph, which takes it whenever it is launched; "
          "ask the optimizer's last_outcome(stream) after that");
    }
    return ask_(optimizer_, report_.get());
  }

 private:
  void* optimizer_;
  Outcome (*ask_)(void*, const void*);
  std::shared_ptr<const void> report_;
};

}  // namespace zero::cuda
