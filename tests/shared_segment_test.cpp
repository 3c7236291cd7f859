// SPDX-License-Identifier: Apache-2.0
// The memory that ranks of one host read where it lies.
#include "zero/detail/shared_segment.hpp"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "catch.hpp"
#include "zero/memory.hpp"

#if ZERO_PROCESS_MEMORY
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

namespace {

using zero::detail::SharedSegment;

std::shared_ptr<SharedSegment> make() { return SharedSegment::make(1); }

bool is_in(const SharedSegment& segment, const void* memory) {
  const auto address = reinterpret_cast<std::uintptr_t>(memory);
  const SharedSegment::Card card = segment.card();
  return address >= card.begin && address < card.begin + card.bytes;
}

/// Whether `f` holds in a process of its own.
template <class F>
bool in_a_child(F f) {
  const pid_t child = ::fork();
  if (child == 0) ::_exit(f() ? 0 : 1);
  int status = 1;
  ::waitpid(child, &status, 0);
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

}  // namespace

TEST_CASE("a shared segment's memory is aligned, empty, and used again", "[memory]") {
  const auto segment = make();
  if (segment == nullptr) {
    WARN("no shared segment here: not tested");
    return;
  }
  struct Piece {
    void* memory;
    std::size_t bytes, alignment;
  };
  std::vector<Piece> pieces;
  for (const std::size_t bytes : {std::size_t{1}, std::size_t{5000}, std::size_t{9} << 20U}) {
    for (const std::size_t alignment :
         {std::size_t{16}, std::size_t{4096}, std::size_t{64} << 20U}) {
      void* const memory = segment->allocate(bytes, alignment);
      CHECK(is_in(*segment, memory));
      CHECK(reinterpret_cast<std::uintptr_t>(memory) % alignment == 0);
      auto* const numbers = static_cast<unsigned char*>(memory);
      bool empty = true;
      for (std::size_t i = 0; i < bytes; i += 997) empty = empty && numbers[i] == 0;
      CHECK(empty);
      for (std::size_t i = 0; i < bytes; ++i) numbers[i] = 0xff;
      pieces.push_back({memory, bytes, alignment});
    }
  }
  for (const std::size_t i : {4U, 0U, 8U, 1U, 3U, 2U, 7U, 5U, 6U}) {
    segment->deallocate(pieces[i].memory, pieces[i].bytes, pieces[i].alignment);
  }
  // All of it is one range again, and its pages were given back.
  void* const again = segment->allocate(pieces[8].bytes, pieces[8].alignment);
  CHECK(again == pieces[2].memory);
  CHECK(static_cast<unsigned char*>(again)[100] == 0);
  segment->deallocate(again, pieces[8].bytes, pieces[8].alignment);
}

TEST_CASE("a shared segment that is full gives ordinary memory", "[memory]") {
  const auto segment = SharedSegment::make(1U << 20U);  // small, for that many ranks
  if (segment == nullptr) return;
  const std::size_t bytes = segment->card().bytes + 1;
  void* const memory = segment->allocate(bytes, 256);
  CHECK_FALSE(is_in(*segment, memory));
  segment->deallocate(memory, bytes, 256);
}

TEST_CASE("a forked child takes nothing from its parent's shared segment", "[memory]") {
  const auto segment = make();
  if (segment == nullptr) return;
  zero::HostArray<float> array(5000, segment.get());
  array.data()[4999] = 7;
  CHECK(in_a_child([&] {
    const bool seen = array.data()[4999] == 7;
    array = zero::HostArray<float>(5000, segment.get());
    return seen && !is_in(*segment, array.data());
  }));
  CHECK(array.data()[4999] == 7);
}

TEST_CASE("where addresses or files are limited there is no shared segment", "[memory]") {
  for (const auto kind : {RLIMIT_AS, RLIMIT_FSIZE}) {
    CHECK(in_a_child([&] {
      const rlimit limit{rlim_t{1} << 40U, RLIM_INFINITY};
      return ::setrlimit(kind, &limit) == 0 && make() == nullptr;
    }));
  }
}
#endif
