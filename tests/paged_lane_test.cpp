// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstddef>
#include <random>
#include <vector>
#include <zero/detail/paged_lane.hpp>

#include "catch.hpp"

using zero::Interval;
using zero::detail::PagedLane;
using zero::detail::ReservedArray;

namespace {

/// Buckets one behind the other, small and large, of a lane of several huge pages.
std::vector<Interval> buckets_of(std::size_t elements, std::mt19937& draw) {
  std::vector<Interval> buckets;
  for (std::size_t at = 0; at < elements;) {
    const std::size_t most = draw() % 3 == 0 ? elements / 3 : elements / 60;
    const std::size_t end = std::min(elements, at + 4 * (1 + draw() % (most / 4)));
    buckets.push_back({at, end});
    at = end;
  }
  return buckets;
}

bool all(PagedLane<float>& lane, Interval part, float wanted) {
  return std::all_of(lane.data() + part.begin, lane.data() + part.end,
                     [&](float x) { return x == wanted; });
}

}  // namespace

TEST_CASE("a bucket that is let go takes nothing of its neighbours along") {
  constexpr std::size_t elements = 4 * ReservedArray<float>::huge_page / sizeof(float) + 1000;
  for (unsigned seed = 0; seed < 3; ++seed) {
    std::mt19937 draw(seed);
    const std::vector<Interval> buckets = buckets_of(elements, draw);
    PagedLane<float> lane(elements, buckets.size(), false);
    std::vector<float> held(buckets.size(), 0);  // what each bucket was filled with; 0: let go
    for (int turn = 1; turn < 60; ++turn) {
      const std::size_t b = draw() % buckets.size();
      if (held[b] == 0) {
        lane.take(b, buckets[b]);
        if (draw() % 2 == 0) lane.take(b, buckets[b]);
        held[b] = static_cast<float>(turn);
        std::fill(lane.data() + buckets[b].begin, lane.data() + buckets[b].end, held[b]);
      } else {
        REQUIRE(all(lane, buckets[b], held[b]));
        lane.let_go(b, buckets[b]);
        held[b] = 0;
      }
    }
    for (std::size_t b = 0; b < buckets.size(); ++b) {
      if (held[b] == 0) continue;
      REQUIRE(all(lane, buckets[b], held[b]));
      lane.let_go(b, buckets[b]);
    }
    if (!ReservedArray<float>::releases) continue;
    // Nobody uses a block any more: they are all gone, but for what ends within a page.
    REQUIRE(all(lane, {0, elements - 1000}, 0));
  }
}
