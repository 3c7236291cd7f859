// SPDX-License-Identifier: Apache-2.0
/// @file
/// Memory that comes and goes within a step, without a call to CUDA.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <memory_resource>
#include <optional>
#include <utility>
#include <vector>

#include "zero/cuda/error.hpp"
#include "zero/cuda/memory.hpp"
#include "zero/cuda/stream.hpp"

namespace zero::cuda::detail {

/// Gives out parts of a few large allocations. What is given back is given out again at once,
/// although the device may still be using it: with it comes the ticket of whoever gave it back
/// last, which the next one's stream waits for. Later tickets are larger, and come true later.
class BlockPool {
 public:
  struct Block {
    std::byte* memory = nullptr;
    std::size_t bytes = 0;
    std::uint64_t ticket = 0;  ///< 0: nobody has used it
  };

  BlockPool() = default;
  /// @param bytes of the first allocation, made when it is first needed
  /// @param grows whether there may be more of them
  /// @param growth bytes of each later one, where no larger block is asked for
  BlockPool(std::size_t bytes, bool grows, std::pmr::memory_resource* memory,
            std::size_t growth = 0)
      : first_bytes_(round_up(bytes)), growth_(round_up(growth)), grows_(grows), memory_(memory) {}

  /// The smallest free block that is large enough, cut to size; none where the pool must not grow.
  /// Throws what the memory resource throws where it grows.
  [[nodiscard]] std::optional<Block> take(std::size_t bytes) {
    const std::size_t wanted = round_up(std::max<std::size_t>(bytes, 1));
    auto best = find(wanted);
    if (best == free_.end()) {
      if (!grows_ && !chunks_.empty()) return std::nullopt;
      if (!grows_ && wanted > first_bytes_) return std::nullopt;
      // Room for all bookkeeping before the allocation, so that nothing of it can fail.
      chunks_.reserve(chunks_.size() + 1);
      free_.reserve(free_.size() + 2);
      const std::size_t size = std::max(wanted, chunks_.empty() ? first_bytes_ : growth_);
      chunks_.push_back(std::make_shared<DeviceArray<std::byte>>(size, memory_));
      reserved_ += size;
      give_back({chunks_.back()->data(), size, 0});
      best = find(wanted);
    }
    Block taken = *best;
    if (taken.bytes == wanted) {
      free_.erase(best);
    } else {
      best->memory += wanted;
      best->bytes -= wanted;
      taken.bytes = wanted;
    }
    return taken;
  }

  /// @param block as it was taken, with the ticket that whoever takes it next waits for
  void give_back(Block block) {
    const auto next =
        std::lower_bound(free_.begin(), free_.end(), block.memory,
                         [](const Block& b, const std::byte* memory) { return b.memory < memory; });
    const auto at = free_.insert(next, block);
    join(at);
    if (at != free_.begin()) join(at - 1);
  }

  /// Nobody who has used what is free need be waited for any more.
  void forget_tickets() noexcept {
    for (Block& block : free_) block.ticket = 0;
  }

  /// What a block of so many bytes takes.
  [[nodiscard]] static std::size_t round_up(std::size_t bytes) {
    return (bytes + array_alignment - 1) / array_alignment * array_alignment;
  }
  /// Bytes taken from the memory resource.
  [[nodiscard]] std::size_t reserved() const noexcept { return reserved_; }
  /// Keeps the memory of a block alive.
  [[nodiscard]] std::shared_ptr<const void> owner(const std::byte* memory) const {
    for (const auto& chunk : chunks_) {
      if (memory >= chunk->data() && memory < chunk->data() + chunk->size()) return chunk;
    }
    return nullptr;
  }

 private:
  [[nodiscard]] std::vector<Block>::iterator find(std::size_t bytes) {
    auto best = free_.end();
    for (auto at = free_.begin(); at != free_.end(); ++at) {
      if (at->bytes >= bytes && (best == free_.end() || at->bytes < best->bytes)) best = at;
    }
    return best;
  }
  /// A block with the next one, where they are neighbours of one allocation.
  void join(std::vector<Block>::iterator at) {
    const auto next = at + 1;
    if (next == free_.end() || at->memory + at->bytes != next->memory) return;
    if (owner(at->memory) != owner(next->memory)) return;
    at->bytes += next->bytes;
    at->ticket = std::max(at->ticket, next->ticket);
    free_.erase(next);
  }

  std::size_t first_bytes_ = 0;
  std::size_t growth_ = 0;
  bool grows_ = true;
  std::pmr::memory_resource* memory_ = nullptr;
  std::vector<std::shared_ptr<DeviceArray<std::byte>>> chunks_{};
  std::vector<Block> free_{};  ///< by address
  std::size_t reserved_ = 0;
};

/// Fills a block with NaN, of whatever type, in the order of `stream`.
inline void poison_block(const BlockPool::Block& block, StreamView stream) {
  if (block.memory == nullptr) return;
  check(cudaMemsetAsync(block.memory, 0xff, block.bytes, stream.get()), "cudaMemsetAsync");
}

}  // namespace zero::cuda::detail
