// SPDX-License-Identifier: Apache-2.0
/// @file
/// Where backward writes gradients on a device, until their buckets have been packed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory_resource>
#include <string>
#include <utility>
#include <vector>

#include "zero/cuda/detail/block_pool.hpp"
#include "zero/cuda/stream.hpp"
#include "zero/error.hpp"

namespace zero::cuda::detail {

/// One block a parameter, whose memory is given out again as soon as what reads it is enqueued:
/// whoever writes there next waits for that in stream order, and nobody on the host. So with a
/// fixed size there is nothing to wait for either: what can't be had now can't be had.
class GradientBlocks {
 public:
  GradientBlocks() = default;
  /// @param limit bytes
  /// @param keeps_limit whether it must not be exceeded
  /// @param poison fills what is let go of with NaN
  GradientBlocks(std::size_t parameters, std::size_t limit, bool keeps_limit, bool poison,
                 std::pmr::memory_resource* memory)
      : pool_(limit, !keeps_limit, memory, limit),
        limit_(limit),
        poison_(poison),
        blocks_(parameters),
        events_(64) {
    for (std::size_t i = 0; i < parameters; ++i) all_.push_back(i);
  }

  [[nodiscard]] bool is_open(std::size_t leader) const { return blocks_[leader].memory != nullptr; }
  [[nodiscard]] std::byte* memory(std::size_t leader) const { return blocks_[leader].memory; }

  /// Whether what comes now is captured into a graph. Between the two nothing can wait: that is the
  /// concern of whoever launches the graph.
  void note_capture(bool captures) noexcept {
    if (captures != std::exchange(captures_, captures)) pool_.forget_tickets();
  }

  /// Memory for a parameter's gradient, which `stream` may write to. Throws `PoolExhausted`.
  /// @param name of the parameter
  void open(std::size_t leader, std::size_t bytes, const char* verb, const std::string& name,
            StreamView stream) {
    if (is_open(leader) || bytes == 0) return;
    const auto block = pool_.take(bytes);
    if (!block) {
      throw PoolExhausted(
          taken_ + bytes, limit_,
          std::string(verb) + ": the gradient of " + name + " needs " + std::to_string(bytes) +
              " bytes in one piece, but of the pool's " + std::to_string(limit_) + " " +
              std::to_string(taken_) +
              " hold gradients that can't be reduced yet: buckets go in one order, in the first "
              "step from the last parameter to the first. Make gradients in that order, or make "
              "pool_bytes larger (or leave it out: the pool then grows as needed)");
    }
    blocks_[leader] = *block;
    taken_ += block->bytes;
    if (block->ticket != 0) stream.wait(event_of(block->ticket));
  }

  /// What reads the gradients of `leaders` now stands in `reader`: what is enqueued there is all
  /// that their memory waits for.
  template <class Leaders>
  void close(const Leaders& leaders, StreamView reader) {
    if (poison_) {
      for (const std::size_t leader : leaders) poison_block(blocks_[leader], reader);
    }
    bool recorded = false;
    for (const std::size_t leader : leaders) {
      Block& block = blocks_[leader];
      if (block.memory == nullptr) continue;
      if (!recorded) event_of(++ticket_).record(reader);
      recorded = true;
      taken_ -= block.bytes;
      block.ticket = ticket_;
      pool_.give_back(std::exchange(block, {}));
    }
  }
  void close_all(StreamView reader) { close(all_, reader); }
  [[nodiscard]] bool any_open() const noexcept { return taken_ != 0; }

  [[nodiscard]] std::size_t reserved() const noexcept { return pool_.reserved(); }

 private:
  using Block = BlockPool::Block;

  /// Readers' streams are one, so an event that was recorded anew for a later ticket does for the
  /// earlier one.
  [[nodiscard]] const Event& event_of(std::uint64_t ticket) const {
    return events_[ticket % events_.size()];
  }

  BlockPool pool_{};
  std::size_t limit_ = 0;
  bool poison_ = false;
  bool captures_ = false;
  std::size_t taken_ = 0;
  std::vector<Block> blocks_{};     ///< by leader; empty where there is none
  std::vector<std::size_t> all_{};  ///< leaders
  std::vector<Event> events_{};
  std::uint64_t ticket_ = 0;
};

}  // namespace zero::cuda::detail
