// SPDX-License-Identifier: Apache-2.0
// Views over a layout, and its description, against the layout's own loops.
#include <zero/bucket_view.hpp>
#include <zero/describe.hpp>
#include <zero/layout.hpp>
#include <zero/partition/balanced.hpp>
#include <zero/partition/contiguous.hpp>
#include <zero/views.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdlib>
#include <iomanip>
#include <new>
#include <random>
#include <range/v3/algorithm/max_element.hpp>
#include <range/v3/iterator/operations.hpp>
#include <range/v3/numeric/accumulate.hpp>
#include <range/v3/range/conversion.hpp>
#include <range/v3/view/filter.hpp>
#include <range/v3/view/take.hpp>
#include <range/v3/view/transform.hpp>
#include <ranges>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "catch.hpp"

// g++ sees `free` behind an inlined delete but not the allocation behind new.
#pragma GCC diagnostic ignored "-Wmismatched-new-delete"

namespace {
std::size_t allocations = 0;
}  // namespace

void* operator new(std::size_t bytes) {
  ++allocations;
  void* memory = std::malloc(bytes);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept {
  ++allocations;
  return std::malloc(bytes);
}
void operator delete(void* memory, const std::nothrow_t&) noexcept { std::free(memory); }
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }

namespace {

namespace views = zero::views;
using views::LaneFragment;
using zero::Fragment;
using zero::Interval;
using zero::LayoutLane;
using zero::LayoutParameter;
using Layout = zero::Layout<>;
using Balanced = zero::Layout<zero::BalancedPartition>;

// ---- What they promise at compile time

using BucketsOf = decltype(std::declval<const Layout&>() | views::buckets);
using ShardOf = decltype(std::declval<const Layout&>() | views::shard(0));
template <class View>
using FragmentsOf = decltype(std::declval<View>() | views::fragments);

template <class View>
constexpr bool forward_view =
    ranges::view_<View> && ranges::input_range<View> && ranges::forward_range<View> &&
    ranges::forward_range<const View> && std::ranges::forward_range<const View> &&
    ranges::borrowed_range<View>;
static_assert(forward_view<BucketsOf> && forward_view<FragmentsOf<BucketsOf>>);
static_assert(forward_view<ShardOf> && forward_view<FragmentsOf<ShardOf>>);
static_assert(std::same_as<ranges::range_value_t<FragmentsOf<ShardOf>>, LaneFragment>);

template <class T, class View>
concept Piped = requires(T&& source, View view) { std::forward<T>(source) | view; };
static_assert(Piped<Layout&, decltype(views::buckets)> &&
              Piped<const Layout&, decltype(views::buckets(0))> &&
              Piped<const Balanced&, decltype(views::shard(0))>);
// The views point into the layout.
static_assert(!Piped<Layout, decltype(views::buckets)> &&
              !Piped<const Layout, decltype(views::buckets(0))> &&
              !Piped<Balanced, decltype(views::shard(0))>);
static_assert(!Piped<std::vector<int>&, decltype(views::fragments)>);

// ---- Drawn layouts

/// The distributions of the standard library differ between implementations; this doesn't.
class Draw {
 public:
  explicit Draw(unsigned seed) : engine_(seed) {}
  std::size_t below(std::size_t bound) { return static_cast<std::size_t>(engine_()) % bound; }
  bool one_in(std::size_t n) { return below(n) == 0; }

 private:
  std::mt19937 engine_;
};

//! [LaneRun]
/// The first elements of the first lane.
struct Head {
  const zero::Layout<>* layout;
  zero::Interval interval;
  std::size_t lane = 0;
  std::size_t bucket = 0;
};
//! [LaneRun]
static_assert(zero::views::LaneRun<Head>);

struct Case {
  std::vector<LayoutParameter> parameters;
  std::vector<LayoutLane> lanes;
};

/// Two lanes, with every kind of attribute, and lanes without a bucket among them.
Case draw_case(Draw& draw) {
  Case c;
  constexpr std::array<std::size_t, 4> bucket_bytes{16, 200, 3000, zero::PerTensor{}};
  for (const std::size_t element_bytes : {std::size_t{4}, std::size_t{8}}) {
    c.lanes.push_back({.element_bytes = element_bytes,
                       .bucket_bytes = bucket_bytes[draw.below(bucket_bytes.size())]});
  }
  int unit = 0;
  for (std::size_t n = draw.below(9); n > 0; --n) {
    LayoutParameter p{.elements = draw.below(draw.one_in(4) ? 3 : 300), .lane = draw.below(2)};
    p.attributes.frozen = draw.one_in(8);
    p.attributes.unsplittable = draw.one_in(8);
    if (draw.one_in(5)) p.attributes.quantum = 1 + draw.below(40);
    if (draw.one_in(5)) ++unit;
    p.attributes.unit = unit;
    if (!c.parameters.empty() && draw.one_in(8)) {
      const std::size_t target = draw.below(c.parameters.size());
      if (!c.parameters[target].attributes.alias) {
        p = c.parameters[target];
        p.attributes.alias = target;
      }
    }
    c.parameters.push_back(p);
  }
  return c;
}

template <class Partition>
std::vector<LaneFragment> owned_by_callback(const zero::Layout<Partition>& layout, int rank) {
  std::vector<LaneFragment> owned;
  for (std::size_t lane = 0; lane < layout.lanes(); ++lane) {
    layout.for_each_owned(lane, rank, [&](const zero::Fragment& f, std::size_t b, std::size_t) {
      owned.push_back({f, lane, b});
    });
  }
  return owned;
}

/// How often each element of each lane's extent is in some rank's fragments.
template <class Partition>
std::vector<std::vector<int>> times_owned(const zero::Layout<Partition>& layout) {
  std::vector<std::vector<int>> times;
  for (std::size_t lane = 0; lane < layout.lanes(); ++lane) times.emplace_back(layout.extent(lane));
  for (int rank = 0; rank < layout.world(); ++rank) {
    for (const LaneFragment& f : layout | views::shard(rank) | views::fragments) {
      for (std::size_t i = 0; i < f.elements; ++i) ++times[f.lane][f.lane_begin + i];
    }
  }
  return times;
}

template <class Partition>
bool each_element_has_one_owner(const zero::Layout<Partition>& layout) {
  std::vector<std::vector<int>> wanted;
  for (std::size_t lane = 0; lane < layout.lanes(); ++lane)
    wanted.emplace_back(layout.extent(lane));
  for (std::size_t p = 0; p < layout.parameters(); ++p) {
    const zero::Place& place = layout.place(p);
    if (!place.placed) continue;
    for (std::size_t i = 0; i < place.elements; ++i) wanted[place.lane][place.offset + i] = 1;
  }
  return times_owned(layout) == wanted;
}

template <class Partition>
void compare(const Case& c, int world) {
  const zero::Layout<Partition> layout(c.parameters, c.lanes, world);

  std::vector<views::Bucket<Partition>> buckets;
  std::vector<LaneFragment> fragments;
  for (std::size_t lane = 0; lane < layout.lanes(); ++lane) {
    const std::size_t before = buckets.size();
    for (std::size_t b = 0; b < layout.buckets(lane); ++b) {
      buckets.push_back({&layout, lane, b, layout.bucket(lane, b)});
      for (const zero::Fragment& f : layout.fragments(lane, layout.bucket(lane, b))) {
        fragments.push_back({f, lane, b});
      }
    }
    const std::vector of_lane(buckets.begin() + static_cast<std::ptrdiff_t>(before), buckets.end());
    REQUIRE((layout | views::buckets(lane) | ranges::to<std::vector>()) == of_lane);
  }
  REQUIRE((layout | views::buckets | ranges::to<std::vector>()) == buckets);
  REQUIRE((layout | views::buckets | views::fragments | ranges::to<std::vector>()) == fragments);

  for (int rank = 0; rank < world; ++rank) {
    std::vector<views::Slice<Partition>> slices;
    for (const views::Bucket<Partition>& bucket : buckets) {
      const views::Slice<Partition> slice = bucket.slice(rank);
      if (!slice.interval.empty()) slices.push_back(slice);
    }
    const auto shard = layout | views::shard(rank);
    REQUIRE((shard | ranges::to<std::vector>()) == slices);
    const auto owned = shard | views::fragments;
    REQUIRE((owned | ranges::to<std::vector>()) == owned_by_callback(layout, rank));
    REQUIRE((owned | ranges::to<std::vector>()) == owned_by_callback(layout, rank));  // multi-pass
  }
  REQUIRE(each_element_has_one_owner(layout));
}

template <class Partition>
void compare_drawn(unsigned first_seed) {
  for (unsigned seed = first_seed; seed < first_seed + 60; ++seed) {
    Draw draw(seed);
    const Case c = draw_case(draw);
    for (int world = 1; world <= 8; ++world) {
      CAPTURE(seed, world);
      compare<Partition>(c, world);
    }
  }
}

// Not `&LaneFragment::elements`, which would refer into a value that is gone.
const auto elements_of =
    ranges::views::transform([](const LaneFragment& fragment) { return fragment.elements; });

// ---- One small layout for the rest

const std::vector<std::string> names{"embedding", "bias", "scale", "head"};

/// Lane 0: buckets of about 16 elements; lane 1: one bucket. `scale` is frozen.
template <class Partition = zero::ContiguousPartition>
zero::Layout<Partition> small_layout(int world = 2) {
  const std::vector<LayoutParameter> parameters{{.elements = 21},
                                                {.elements = 4},
                                                {.elements = 9, .attributes = {.frozen = true}},
                                                {.elements = 5, .lane = 1}};
  const std::vector<LayoutLane> lanes{{.element_bytes = 4, .bucket_bytes = 64},
                                      {.element_bytes = 8}};
  return zero::Layout<Partition>(parameters, lanes, world);
}

template <class... Arguments>
std::string described(const Arguments&... arguments) {
  std::ostringstream out;
  out << zero::describe(arguments...);
  return out.str();
}

/// Counts how often the layout asks where a slice begins.
struct CountingPartition {
  static constexpr bool cuts_tensors = true;
  static inline std::size_t asked = 0;
  [[nodiscard]] std::size_t cut(std::size_t elements, std::size_t alignment, int world,
                                int rank) const {
    ++asked;
    return zero::ContiguousPartition{}.cut(elements, alignment, world, rank);
  }
};

std::string message_of(const auto& call) {
  try {
    call();
  } catch (const zero::UsageError& error) {
    return error.what();
  }
  return "nothing was thrown";
}

}  // namespace

TEST_CASE("views: drawn layouts are what the layout's own loops say, contiguous partition") {
  compare_drawn<zero::ContiguousPartition>(1);
}

TEST_CASE("views: drawn layouts are what the layout's own loops say, balanced partition") {
  compare_drawn<zero::BalancedPartition>(10'001);
}

TEST_CASE("views: a layout without lanes, or without parameters, has empty views") {
  const Layout none({}, {}, 3);
  const std::vector<LayoutLane> lanes(2);
  const Layout bare({}, lanes, 3);
  for (const Layout* layout : {&none, &bare}) {
    CHECK(ranges::empty(*layout | views::buckets));
    CHECK(ranges::empty(*layout | views::buckets | views::fragments));
    CHECK(ranges::empty(*layout | views::shard(2)));
    CHECK(ranges::empty(*layout | views::shard(2) | views::fragments));
  }
  CHECK(described(none) == "layout: 0 parameters, 0 lanes, world 3\n");
}

TEST_CASE("views: they compose with range-v3's") {
  const Layout layout = small_layout();
  const auto in_lane_0 = ranges::views::filter([](const auto& x) { return x.lane == 0; });
  using Counts = std::vector<std::size_t>;

  CHECK((layout | views::shard(1) | views::fragments | elements_of | ranges::to<Counts>()) ==
        Counts{8, 1, 1});
  // A filter in front is a range only while it isn't const.
  auto filtered = layout | views::shard(1) | in_lane_0 | views::fragments | elements_of;
  CHECK((filtered | ranges::to<Counts>()) == Counts{8, 1});
  CHECK((layout | views::shard(1) | views::fragments | in_lane_0 | elements_of |
         ranges::to<Counts>()) == Counts{8, 1});
  CHECK((layout | views::buckets | ranges::views::take(1) | views::fragments | elements_of |
         ranges::to<Counts>()) == Counts{16});
  // Adaptors without a layout make an adaptor.
  const auto counts = views::fragments | elements_of;
  CHECK(ranges::accumulate(layout | views::buckets | counts, std::size_t{0}) == 30);
  // What is owned by containers, or made by the user, has fragments as well.
  const auto slices = layout | views::shard(0) | ranges::to<std::vector>();
  CHECK(ranges::distance(slices | views::fragments) == 4);
  const auto first_element =
      ranges::views::transform([](views::Bucket<zero::ContiguousPartition> b) {
        b.interval.end = b.interval.begin + 1;
        return b;
      });
  CHECK((layout | views::buckets | first_element | counts | ranges::to<Counts>()) ==
        Counts{1, 1, 1});
  // Iterators outlive the views.
  const auto largest =
      ranges::max_element(layout | views::shard(1) | views::fragments, {}, &LaneFragment::elements);
  CHECK(*largest ==
        LaneFragment{{.parameter = 0, .parameter_begin = 8, .lane_begin = 8, .elements = 8}, 0, 0});
}

TEST_CASE("views: composing computes nothing, and iterating allocates nothing") {
  const std::vector<LayoutParameter> parameters(100, {.elements = 50});
  const std::vector<LayoutLane> lanes{{.bucket_bytes = 256}};
  const zero::Layout<CountingPartition> layout(parameters, lanes, 4);

  CountingPartition::asked = 0;
  const std::size_t before = allocations;
  const auto owned = layout | views::shard(1) | views::fragments | elements_of;
  const auto all = layout | views::buckets | views::fragments;
  const std::size_t asked_by_composing = CountingPartition::asked;
  const auto first = *owned.begin();
  const std::size_t asked_by_first = CountingPartition::asked;
  const std::size_t sum = ranges::accumulate(owned, std::size_t{0});
  const auto fragments = ranges::distance(all);
  const std::size_t allocated = allocations - before;

  CHECK(asked_by_composing == 0);
  CHECK(asked_by_first == 2);  // where the slice begins and ends
  CHECK(allocated == 0);
  CHECK(first == 16);
  CHECK(sum == layout.shard_elements(0, 1));
  CHECK(fragments > 100);
}

TEST_CASE("views: ranks and lanes that don't exist are named") {
  const Layout layout = small_layout();
  CHECK(message_of([&] { (void)(layout | views::shard(2)); }) ==
        "views: rank 2 is outside the world of 2 (ranks count from 0)");
  CHECK(message_of([&] { (void)(layout | views::shard(-1)); }) ==
        "views: rank -1 is outside the world of 2 (ranks count from 0)");
  CHECK(message_of([&] { (void)(layout | views::buckets(2)); }) ==
        "views: lane 2 does not exist: the layout has 2 lanes");
}

TEST_CASE("describe: a small layout, word for word") {
  const Layout layout = small_layout();
  CHECK(described(layout, names) ==
        "layout: 4 parameters, 2 lanes, world 2\n"
        "lane 0: 25 elements, alignment 4, extent 32, 2 buckets\n"
        "  bucket 0 [0, 16)\n"
        "    rank 0 [0, 8): embedding[0, 8)\n"
        "    rank 1 [8, 16): embedding[8, 16)\n"
        "  bucket 1 [16, 32), padding 7\n"
        "    rank 0 [16, 24): embedding[16, 21), bias[0, 3)\n"
        "    rank 1 [24, 32): bias[3, 4), padding 7\n"
        "lane 1: 5 elements, alignment 2, extent 8, 1 bucket\n"
        "  bucket 0 [0, 8), padding 3\n"
        "    rank 0 [0, 4): head[0, 4)\n"
        "    rank 1 [4, 8): head[4, 5), padding 3\n");
  CHECK(described(layout, names) == zero::describe(layout, names).text());
}

TEST_CASE("describe: whole tensors, a rank that owns nothing, parameters by index") {
  CHECK(described(small_layout<zero::BalancedPartition>(3), zero::DescribeLimits{.lanes = 1}) ==
        "layout: 4 parameters, 2 lanes, world 3\n"
        "lane 0: 25 elements, alignment 4, extent 28, 2 buckets\n"
        "  bucket 0 [0, 24), padding 3\n"
        "    rank 0 [0, 24): #0[0, 21), padding 3\n"
        "    rank 1 nothing\n"
        "    rank 2 nothing\n"
        "  bucket 1 [24, 28)\n"
        "    rank 0 nothing\n"
        "    rank 1 nothing\n"
        "    rank 2 [24, 28): #1[0, 4)\n"
        "… 1 more lane\n");
}

TEST_CASE("describe: limits say how much they leave out") {
  const Layout layout = small_layout();
  CHECK(described(layout, names,
                  zero::DescribeLimits{.lanes = 1, .buckets = 1, .ranks = 1, .fragments = 0}) ==
        "layout: 4 parameters, 2 lanes, world 2\n"
        "lane 0: 25 elements, alignment 4, extent 32, 2 buckets\n"
        "  bucket 0 [0, 16)\n"
        "    rank 0 [0, 8): … 1 more fragment\n"
        "    … 1 more rank\n"
        "  … 1 more bucket\n"
        "… 1 more lane\n");
  CHECK(described(layout, names, zero::DescribeLimits{.fragments = 1})
            .find("rank 0 [16, 24): embedding[16, 21), … 1 more fragment\n") != std::string::npos);

  const std::vector<LayoutParameter> parameters(5000, {.elements = 10});
  const std::vector<LayoutLane> lanes{{.bucket_bytes = 100'000}};
  const Layout large(parameters, lanes, 1000);
  const std::string text = described(large);
  CHECK(std::count(text.begin(), text.end(), '\n') < 100);
  CHECK(text.find("    … 992 more ranks\n") != std::string::npos);
  const std::string whole = described(large, zero::DescribeLimits::none());
  CHECK(whole.find("more") == std::string::npos);
  CHECK(whole.find("#4999[") != std::string::npos);
}

TEST_CASE("describe: the text is the same whatever the stream's flags") {
  const Layout layout = small_layout();
  std::ostringstream out;
  out << std::hex << std::showbase << std::showpos << zero::describe(layout, names);
  CHECK(out.str() == described(layout, names));
}

TEST_CASE("describe: names are any random-access range of texts, one for each parameter") {
  const Layout layout = small_layout();
  const auto loud = names | ranges::views::transform([](const std::string& n) { return n + "!"; });
  CHECK(described(layout, loud).find("bias![3, 4)") != std::string::npos);
  const std::array<const char*, 4> texts{"a", "b", "c", "d"};
  CHECK(described(layout, texts).find("b[3, 4)") != std::string::npos);
  const std::array<const char*, 1> few{"a"};
  CHECK(message_of([&] { (void)zero::describe(layout, few); }) ==
        "describe: 1 names for 4 parameters");
}

TEST_CASE("fragments: of runs of a user's own") {
  const Layout layout = small_layout();
  const std::vector<Head> heads{{&layout, {0, 5}}, {&layout, {2, 9}}};
  std::vector<Fragment> found;
  for (const auto& f : heads | zero::views::fragments) found.push_back(f);
  std::vector<Fragment> wanted;
  for (const Head& head : heads) {
    for (const Fragment& f : layout.fragments(0, head.interval)) wanted.push_back(f);
  }
  CHECK(found == wanted);
  CHECK(found.size() == 2);  // one in each
}
