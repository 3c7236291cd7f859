// SPDX-License-Identifier: Apache-2.0
/// @file
/// Where devices leave what steps came to, for the host to read.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <memory>
#include <new>
#include <utility>
#include <vector>

#include "zero/cuda/error.hpp"
#include "zero/cuda/stream.hpp"

namespace zero::cuda::detail {

/// Pinned memory for one report, and when it is there.
template <class Report>
class ReportSlot {
 public:
  ReportSlot() {
    void* memory = nullptr;
    check(cudaMallocHost(&memory, sizeof(Report)), "cudaMallocHost");
    memory_ = new (memory) Report{};
  }
  ReportSlot(const ReportSlot&) = delete;
  ReportSlot& operator=(const ReportSlot&) = delete;
  /// Blocks until what was enqueued to write to it has.
  ~ReportSlot() {
    (void)cudaEventSynchronize(done_.get());
    (void)cudaFreeHost(memory_);
  }

  [[nodiscard]] Report* memory() const noexcept { return memory_; }
  [[nodiscard]] const Event& done() const noexcept { return done_; }

 private:
  Report* memory_ = nullptr;
  Event done_{};
};

/// Slots are used again once nobody asks for their step any more. As long as few steps are asked
/// for late, `take` allocates nothing.
template <class Report>
class StepReports {
 public:
  using Slot = ReportSlot<Report>;

  /// Made on the device that is current.
  StepReports() {
    for (int k = 0; k < 4; ++k) slots_.push_back(std::make_shared<Slot>());
  }

  /// `f(report)` of steps before `last` that are done.
  template <class F>
  void for_each_done_before(const Slot* last, F&& f) const {
    for (const std::shared_ptr<Slot>& slot : slots_) {
      if (slot.get() != last && slot->done().done()) f(std::as_const(*slot->memory()));
    }
  }

  [[nodiscard]] std::shared_ptr<Slot> take() {
    for (std::size_t k = 0; k < slots_.size(); ++k) {
      std::shared_ptr<Slot>& slot = slots_[(next_ + k) % slots_.size()];
      if (slot.use_count() > 1) continue;
      next_ = (next_ + k + 1) % slots_.size();
      return slot;
    }
    slots_.push_back(std::make_shared<Slot>());
    return slots_.back();
  }

 private:
  std::vector<std::shared_ptr<Slot>> slots_{};
  std::size_t next_ = 0;
};

}  // namespace zero::cuda::detail
