// SPDX-License-Identifier: Apache-2.0
// BalancedPartition against the ranks that PyTorch 1.13 chose (data/golden_partitions.json), asked
// directly and read back from a layout's fragments.
#include <zero/layout.hpp>
#include <zero/partition/balanced.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <fstream>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <vector>

#include "catch.hpp"

namespace {

using zero::BalancedPartition;
using zero::Fragment;
using zero::Interval;
using zero::LayoutLane;
using zero::LayoutParameter;
using Layout = zero::Layout<BalancedPartition>;
using Sizes = std::vector<std::size_t>;
using Ranks = std::vector<int>;

struct Golden {
  std::string name;
  int world = 0;
  std::vector<Sizes> groups;
  Ranks ranks;  ///< by position over all groups, one after the other
  Sizes loads;
};

std::vector<Golden> golden() {
  std::ifstream file(ZERO_TEST_DATA_DIR "/golden_partitions.json");
  const nlohmann::json data = nlohmann::json::parse(file);
  std::vector<Golden> all;
  for (const auto& one : data.at("cases")) {
    all.push_back({one.at("name"), one.at("world_size"), one.at("param_groups"),
                   one.at("rank_of_param"), one.at("numel_per_rank")});
  }
  return all;
}

/// Every rank's elements, all lanes together, and whose each parameter is: -1 where it is empty.
/// Fails where a tensor isn't whole on one rank.
struct Owned {
  Sizes loads;
  Ranks ranks;
};
Owned owned_in(const Layout& layout) {
  Owned owned{Sizes(static_cast<std::size_t>(layout.world()), 0), Ranks(layout.parameters(), -1)};
  for (std::size_t lane = 0; lane < layout.lanes(); ++lane) {
    for (int rank = 0; rank < layout.world(); ++rank) {
      layout.for_each_owned(lane, rank, [&](const Fragment& f, std::size_t, std::size_t) {
        if (f.parameter_begin != 0 || f.elements != layout.place(f.parameter).elements ||
            owned.ranks[f.parameter] != -1) {
          FAIL("parameter " << f.parameter << " isn't whole on one rank");
        }
        owned.ranks[f.parameter] = rank;
        owned.loads[static_cast<std::size_t>(rank)] += f.elements;
      });
    }
  }
  return owned;
}

/// A position in `Golden::ranks`, and what is there.
struct Member {
  std::size_t position = 0;
  LayoutParameter parameter;
};

std::vector<Member> members(const Golden& of) {
  std::vector<Member> all;
  for (std::size_t g = 0; g < of.groups.size(); ++g) {
    for (const std::size_t n : of.groups[g]) {
      all.push_back({all.size(), {.elements = n, .group = g}});
    }
  }
  return all;
}

std::vector<LayoutParameter> parameters(const std::vector<Member>& of) {
  std::vector<LayoutParameter> all;
  for (const Member& member : of) all.push_back(member.parameter);
  return all;
}

void check(const Layout& layout, const std::vector<Member>& registered, const Golden& expected) {
  const Owned owned = owned_in(layout);
  CHECK(owned.loads == expected.loads);
  Ranks wanted;
  for (const Member& member : registered) {
    wanted.push_back(member.parameter.elements == 0 ? -1 : expected.ranks[member.position]);
  }
  CHECK(owned.ranks == wanted);
}

consteval bool constant_assignment() {
  const std::array<std::size_t, 7> elements{5, 9, 5, 9, 5, 9, 5};
  std::array<std::size_t, 3> loads{};
  std::array<int, 7> owners{};
  BalancedPartition{}.assign(elements, loads, owners);
  return owners == std::array{0, 0, 1, 1, 2, 2, 0} &&
         loads == std::array<std::size_t, 3>{19, 14, 14};
}
static_assert(constant_assignment());

consteval bool constant_layout() {
  const std::array<LayoutParameter, 3> parameters{
      {{.elements = 3, .group = 1}, {.elements = 8, .group = 1}, {.elements = 4}}};
  const std::array<LayoutLane, 1> lanes{};
  const Layout layout(parameters, lanes, 2);  // 4 to rank 0, 8 to rank 1, 3 to rank 0
  return layout.slice(0, 0, 0) == Interval{0, 8} && layout.slice(0, 0, 1) == Interval{8, 16} &&
         layout.place(0).offset == 0 && layout.place(2).offset == 3 && layout.place(1).offset == 8;
}
static_assert(constant_layout());

}  // namespace

TEST_CASE("balanced: the golden ranks, asked directly") {
  const std::vector<Golden> all = golden();
  REQUIRE(all.size() == 27);
  for (const Golden& one : all) {
    CAPTURE(one.name, one.world);
    Sizes loads(static_cast<std::size_t>(one.world), 0);
    Ranks ranks;
    for (const Sizes& group : one.groups) {
      Ranks owners(group.size(), -1);
      BalancedPartition{}.assign(group, loads, owners);
      ranks.insert(ranks.end(), owners.begin(), owners.end());
    }
    CHECK(ranks == one.ranks);
    CHECK(loads == one.loads);
  }
}

TEST_CASE("balanced: the golden ranks, through a layout") {
  for (const Golden& one : golden()) {
    CAPTURE(one.name, one.world);
    const std::vector<Member> in_order = members(one);
    const std::vector<LayoutLane> lanes(1);
    check(Layout(parameters(in_order), lanes, one.world), in_order, one);

    // Small buckets and units change where tensors lie, not whose they are.
    std::vector<Member> units = in_order;
    for (Member& member : units) {
      member.parameter.attributes.unit = static_cast<int>(member.position / 5);
    }
    check(Layout(parameters(units), std::vector<LayoutLane>{{.bucket_bytes = 64}}, one.world),
          units, one);

    // Loads count all lanes.
    std::vector<Member> two_lanes = in_order;
    for (Member& member : two_lanes) member.parameter.lane = member.position % 2;
    check(Layout(parameters(two_lanes),
                 std::vector<LayoutLane>{{.element_bytes = 4}, {.element_bytes = 2}}, one.world),
          two_lanes, one);

    // Groups interleaved in registration, the later ones first.
    std::vector<Member> interleaved;
    std::size_t longest = 0;
    for (const Sizes& group : one.groups) longest = std::max(longest, group.size());
    for (std::size_t k = 0; k < longest; ++k) {
      std::size_t behind = in_order.size();
      for (std::size_t g = one.groups.size(); g-- > 0;) {
        behind -= one.groups[g].size();
        if (k < one.groups[g].size()) interleaved.push_back(in_order[behind + k]);
      }
    }
    REQUIRE(interleaved.size() == in_order.size());
    check(Layout(parameters(interleaved), lanes, one.world), interleaved, one);

    // Groups added one after the other.
    Layout grown({}, lanes, one.world);
    for (std::size_t g = 0; g < one.groups.size(); ++g) {
      std::vector<LayoutParameter> added;
      for (const std::size_t n : one.groups[g]) added.push_back({.elements = n, .group = g});
      grown = grown.appended(added);
    }
    check(grown, in_order, one);
  }
}

TEST_CASE("balanced: frozen and tied parameters don't weigh in any group") {
  const std::vector<LayoutParameter> parameters{
      {.elements = 100, .attributes = {.frozen = true}},
      {.elements = 9, .group = 1},
      {.elements = 9, .attributes = {.alias = 1}, .group = 1},
      {.elements = 7, .group = 1},
      {.elements = 50, .attributes = {.frozen = true}, .group = 1},
      {.elements = 5},
  };
  const Layout layout(parameters, std::vector<LayoutLane>(1), 2);
  const Owned owned = owned_in(layout);
  CHECK(owned.loads == Sizes{12, 9});  // 5 of group 0 first, then 9 and 7
  CHECK(owned.ranks == Ranks{-1, 1, -1, 0, -1, 0});
  CHECK(layout.place(2).offset == layout.place(1).offset);
}

TEST_CASE("balanced: empty tensors and more ranks than tensors") {
  for (int world = 1; world <= 9; ++world) {
    CAPTURE(world);
    const auto k = static_cast<std::size_t>(world);
    const std::vector<LayoutLane> lanes{{.element_bytes = 4, .bucket_bytes = 64}};
    const std::vector<LayoutParameter> some{{}, {.elements = 40}, {}, {.elements = 3}, {}};
    const Layout layout(some, lanes, world);
    Sizes loads(k, 0);
    loads[0] += 40;
    loads[world == 1 ? 0 : 1] += 3;
    CHECK(owned_in(layout).loads == loads);
    CHECK(layout.elements(0) == 43);
    for (const std::size_t empty : {0, 2, 4}) CHECK(layout.buckets_of(empty).empty());
    for (int rank = 2; rank < world; ++rank) CHECK(layout.shard_elements(0, rank) == 0);

    const Layout nothing(std::vector<LayoutParameter>(3), lanes, world);
    CHECK(nothing.elements(0) == 0);
    CHECK(owned_in(nothing).loads == Sizes(k, 0));
    CHECK(owned_in(nothing.appended(some)).loads == loads);
  }
}

TEST_CASE("balanced: a unit starts a new bucket, and changes no owner") {
  const std::vector<LayoutLane> lanes(1);
  std::vector<LayoutParameter> parameters;
  for (int i = 0; i < 12; ++i) {
    parameters.push_back(
        {.elements = static_cast<std::size_t>(i) + 1, .attributes = {.unit = i / 3}});
  }
  for (int world = 1; world <= 5; ++world) {
    CAPTURE(world);
    const Layout layout(parameters, lanes, world);
    REQUIRE(layout.buckets(0) == 4);
    for (std::size_t i = 0; i < 12; ++i) CHECK(layout.buckets_of(i) == Interval{i / 3, i / 3 + 1});
    std::vector<LayoutParameter> one_unit = parameters;
    for (LayoutParameter& p : one_unit) p.attributes.unit = 0;
    CHECK(owned_in(layout).ranks == owned_in({one_unit, lanes, world}).ranks);
  }
}
