// SPDX-License-Identifier: Apache-2.0
// Ranks' parameters made alike.
#include "zero/broadcast.hpp"

#include <algorithm>
#include <cstddef>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "catch.hpp"
#include "ranks.hpp"
#include "zero/bfloat16.hpp"
#include "zero/comm/hybrid.hpp"
#include "zero/parameter.hpp"

namespace {

using Values = std::variant<std::span<float>, std::span<zero::bfloat16>>;

/// Of a framework that types its tensors at run time.
struct Param {
  std::string label;
  std::vector<std::size_t> extents;
  Values held;
  zero::Attributes traits{};
  [[nodiscard]] const std::string& name() const { return label; }
  [[nodiscard]] std::span<const std::size_t> shape() const { return extents; }
  [[nodiscard]] Values values() const { return held; }
  [[nodiscard]] Values gradient() const { return held; }
  [[nodiscard]] const zero::Attributes& attributes() const { return traits; }
};

bool all_are(std::span<const float> values, float wanted) {
  return std::all_of(values.begin(), values.end(), [&](float x) { return x == wanted; });
}

}  // namespace

TEST_CASE("every parameter becomes the root's, frozen, tied and empty ones too") {
  for (const int root : {0, 2}) {
    std::vector<int> alike(3);
    ranks::rethrow_any(ranks::run(3, [&](zero::InProcessCommunicator& comm) {
      const auto rank = static_cast<float>(comm.rank());
      std::vector<float> a(1001, rank), frozen(3, rank);
      std::vector<zero::bfloat16> half(7, zero::bfloat16(rank));
      std::vector<Param> store{
          {"a", {7, 11, 13}, std::span(a)},
          {"half", {7}, std::span(half)},
          {"frozen", {3}, std::span(frozen), {.frozen = true}},
          {"again", {1001}, std::span(a), {.alias = 0}},
          {"none", {0, 4}, std::span<float>()},
      };
      zero::broadcast_values(store, comm, root);
      const auto wanted = static_cast<float>(root);
      alike[static_cast<std::size_t>(comm.rank())] =
          all_are(a, wanted) && all_are(frozen, wanted) && static_cast<float>(half[6]) == wanted;
    }));
    CHECK(alike == std::vector<int>{1, 1, 1});
  }
}

TEST_CASE("in groups of replicas the root is one of all ranks") {
  std::vector<float> values(4);
  ranks::rethrow_any(ranks::run(4, [&](zero::InProcessCommunicator& world) {
    zero::HybridCommunicator comm(world, 2);
    std::vector<float> a(5, static_cast<float>(world.rank())), g(5);
    std::vector store{zero::ParamRef("a", a, g)};
    zero::broadcast_values(store, comm, 3);
    values[static_cast<std::size_t>(world.rank())] = a[4];
  }));
  CHECK(values == std::vector<float>{3, 3, 3, 3});
}

TEST_CASE("stores that differ are refused on all ranks, and nothing has changed") {
  const auto failures_with = [](auto change) {
    std::vector<ranks::Failure> failures(3);
    std::vector<int> unchanged(3);
    ranks::rethrow_any(ranks::run(3, [&](zero::InProcessCommunicator& comm) {
      const auto rank = static_cast<std::size_t>(comm.rank());
      std::vector<float> a(4, static_cast<float>(rank)), g(4);
      std::vector<zero::ParamRef<float>> store{{"a", {4}, a.data(), g.data()}};
      if (comm.rank() == 2) change(store, a, g);
      failures[rank] = ranks::attempt([&] { zero::broadcast_values(store, comm, 1); });
      unchanged[rank] = all_are(a, static_cast<float>(rank));
    }));
    CHECK(unchanged == std::vector<int>{1, 1, 1});
    return failures;
  };
  const auto check = [&](auto change) {
    for (const ranks::Failure& failure : failures_with(change)) {
      CHECK(failure.kind == ranks::Failure::Kind::usage);
      CHECK_THAT(failure.text, Catch::Matchers::ContainsSubstring("differ between ranks 0 and 2"));
    }
  };
  check([](auto& store, auto& a, auto& g) { store = {{"a", {3}, a.data(), g.data()}}; });
  check([](auto& store, auto& a, auto& g) { store = {{"b", {4}, a.data(), g.data()}}; });
  check([](auto& store, auto& a, auto& g) { store.push_back({"b", {1}, a.data(), g.data()}); });
}
