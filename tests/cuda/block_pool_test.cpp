// SPDX-License-Identifier: Apache-2.0
// Memory that comes and goes within a step: blocks don't overlap, join when they are free, and
// bring the ticket of whoever had a part of them last.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "catch.hpp"
#include "fake/cuda_runtime.hpp"
#include "zero/cuda/detail/block_pool.hpp"
#include "zero/cuda/detail/gradient_blocks.hpp"
#include "zero/cuda/memory.hpp"
#include "zero/cuda/stream.hpp"
#include "zero/detail/space.hpp"
#include "zero/error.hpp"
#include "zero/memory.hpp"

namespace {

using Catch::Matchers::ContainsSubstring;
using zero::cuda::Stream;
using zero::cuda::detail::BlockPool;
using zero::cuda::detail::GradientBlocks;
using Block = BlockPool::Block;

std::pmr::memory_resource* device_memory() {
  return zero::detail::Space<zero::MemorySpace::cuda>::resource(zero::huge_page_resource());
}

}  // namespace

TEST_CASE("block pool: nothing is allocated before it is needed, and one piece then", "[cuda]") {
  BlockPool pool(1000, false, device_memory());
  CHECK(pool.reserved() == 0);
  const std::optional<Block> block = pool.take(1);
  REQUIRE(block);
  CHECK(block->bytes == 256);
  CHECK(block->ticket == 0);
  CHECK(reinterpret_cast<std::uintptr_t>(block->memory) % 256 == 0);
  CHECK(pool.reserved() == 1024);
  CHECK(pool.take(768));
  CHECK(!pool.take(1));
  CHECK(pool.reserved() == 1024);
  // Of a size that it never has, it allocates nothing.
  BlockPool small(1000, false, device_memory());
  CHECK(!small.take(1025));
  CHECK(small.reserved() == 0);
}

TEST_CASE("block pool: neighbours join, with the later ticket", "[cuda]") {
  BlockPool pool(1024, false, device_memory());
  std::vector<Block> blocks;
  for (int k = 0; k < 4; ++k) blocks.push_back(*pool.take(256));
  for (const std::size_t k : {1U, 3U, 0U}) {
    blocks[k].ticket = 10 + k;
    pool.give_back(blocks[k]);
  }
  CHECK(!pool.take(768));  // there is that much, but not in one piece
  const std::optional<Block> joined = pool.take(512);
  REQUIRE(joined);
  CHECK(joined->memory == blocks[0].memory);
  CHECK(joined->ticket == 11);
  const std::optional<Block> last = pool.take(200);
  REQUIRE(last);
  CHECK(last->memory == blocks[3].memory);
  CHECK(last->ticket == 13);
}

TEST_CASE("block pool: the smallest block that is large enough is cut", "[cuda]") {
  BlockPool pool(2048, false, device_memory());
  std::vector<Block> blocks;
  for (const std::size_t bytes : {1024U, 256U, 512U, 256U}) blocks.push_back(*pool.take(bytes));
  pool.give_back(blocks[0]);
  pool.give_back(blocks[2]);
  CHECK(pool.take(256)->memory == blocks[2].memory);
  CHECK(pool.take(512)->memory == blocks[0].memory);
}

TEST_CASE("block pool: one that grows keeps what it has, and its owners keep it alive", "[cuda]") {
  const std::size_t before = zero_emulation::memory_in_use();
  std::shared_ptr<const void> owner;
  {
    BlockPool pool(512, true, device_memory(), 256);
    const Block first = *pool.take(512);
    const Block second = *pool.take(256);
    CHECK(pool.reserved() == 768);
    CHECK(pool.take(1000)->bytes == 1024);
    CHECK(pool.reserved() == 1792);
    // Blocks of two allocations never are one.
    pool.give_back(first);
    pool.give_back(second);
    CHECK(pool.take(768)->bytes == 768);
    CHECK(pool.reserved() == 2560);
    owner = pool.owner(first.memory + 511);
    CHECK(owner != nullptr);
    CHECK(pool.owner(second.memory) != owner);
    CHECK(pool.owner(nullptr) == nullptr);
  }
  CHECK(zero_emulation::memory_in_use() == before + 512);
  owner.reset();
  CHECK(zero_emulation::memory_in_use() == before);
}

TEST_CASE("block pool: whatever is taken and given back, blocks are apart and none is lost",
          "[cuda]") {
  std::mt19937 random(1);
  BlockPool pool(64 * 256, false, device_memory());
  std::vector<Block> taken;
  for (int k = 0; k < 5000; ++k) {
    if (random() % 2 == 0) {
      const auto block = pool.take(1 + random() % 2500);
      if (block) taken.push_back(*block);
    } else if (!taken.empty()) {
      std::swap(taken[random() % taken.size()], taken.back());
      pool.give_back(taken.back());
      taken.pop_back();
    }
    std::vector<Block> sorted = taken;
    std::sort(sorted.begin(), sorted.end(),
              [](const Block& a, const Block& b) { return a.memory < b.memory; });
    for (std::size_t i = 1; i < sorted.size(); ++i) {
      REQUIRE(sorted[i - 1].memory + sorted[i - 1].bytes <= sorted[i].memory);
    }
  }
  for (const Block& block : taken) pool.give_back(block);
  CHECK(pool.take(64 * 256));  // in one piece again
  CHECK(pool.reserved() == 64 * 256);
}

TEST_CASE("gradient blocks: given out again in stream order, and refused where there are none",
          "[cuda]") {
  const Stream writer, reader;
  GradientBlocks blocks(3, 512, true, false, device_memory());
  blocks.open(0, 256, "gradient", "a", writer);
  blocks.open(1, 100, "gradient", "b", writer);
  std::byte* const memory = blocks.memory(0);
  blocks.open(0, 256, "gradient", "a", writer);
  CHECK(blocks.memory(0) == memory);
  blocks.open(2, 0, "gradient", "empty", writer);  // takes nothing
  CHECK(!blocks.is_open(2));
  try {
    blocks.open(2, 8, "gradient", "c", writer);
    FAIL("there is no room");
  } catch (const zero::PoolExhausted& error) {
    CHECK_THAT(error.what(), ContainsSubstring("the gradient of c needs 8 bytes"));
    CHECK_THAT(error.what(), ContainsSubstring("512 hold gradients"));
    CHECK_THAT(error.what(), ContainsSubstring("pool_bytes"));
  }
  const auto waits = [] { return zero_emulation::counters().stream_waits; };
  const std::uint64_t before = waits();
  blocks.close(std::vector<std::size_t>{0}, reader);
  CHECK(!blocks.is_open(0));
  blocks.open(2, 8, "gradient", "c", writer);
  CHECK(blocks.memory(2) == memory);
  CHECK(waits() == before + 1);
  CHECK(blocks.any_open());
  blocks.close_all(reader);
  CHECK(!blocks.any_open());
  CHECK(blocks.reserved() == 512);
}
