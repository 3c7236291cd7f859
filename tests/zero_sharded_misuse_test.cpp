// SPDX-License-Identifier: Apache-2.0
// What `ZeroSharded` says to bad input: the type of the exception, who and what is named, on every
// rank; and that nothing has changed, to the bit.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <variant>
#include <vector>

#include "catch.hpp"
#include "ranks.hpp"
#include "zero/flat_params.hpp"
#include "zero/optim/adam.hpp"
#include "zero/optim/sgd.hpp"
#include "zero/parameter.hpp"

namespace {

using ranks::Failure;
using ranks::Model;
using Kind = ranks::Failure::Kind;
using Texts = std::vector<std::string>;

/// Parameters of several buckets, one of them frozen and one tied.
Model<> make_model() {
  Model<> model;
  model.emplace_back("embed", std::vector<std::size_t>{7, 5});
  model.emplace_back("bias", std::vector<std::size_t>{3});
  model.emplace_back("fixed", std::vector<std::size_t>{4}, zero::Attributes{.frozen = true});
  model.emplace_back("dense", std::vector<std::size_t>{13});
  model.emplace_back("tied", std::vector<std::size_t>{7, 5}, zero::Attributes{.alias = 0});
  model.back().take_values(model[0].values());
  model.emplace_back("scale", std::vector<std::size_t>{});
  ranks::draw_values(model);
  return model;
}

void check_names(const Failure& failure, const Texts& fragments) {
  INFO(failure.text);
  CHECK(failure.kind == Kind::usage);
  for (const std::string& fragment : fragments) {
    CHECK_THAT(failure.text, Catch::Matchers::ContainsSubstring(fragment));
  }
}

// ---------------------------------------------------------------------------------------------
// Construction

/// What every rank gets, and whether its values stayed as and where they were.
struct Built {
  Failure failure;
  bool unchanged = false;
};

/// `build(rank, model, comm)` constructs an optimizer on a model that `spoil(rank, model)` changed.
template <class Way, class Spoil, class Build>
std::vector<Built> build_on(int world, Spoil spoil, Build build) {
  std::vector<Built> built(static_cast<std::size_t>(world));
  const auto thrown = ranks::run(world, [&](zero::InProcessCommunicator inner) {
    Built& mine = built[static_cast<std::size_t>(inner.rank())];
    Model<> model = make_model();
    spoil(inner.rank(), model);
    std::vector<float*> where;
    for (auto& tensor : model) where.push_back(tensor.values().data());
    const std::string before = ranks::values_of(model);
    auto comm = Way::wrap(inner);
    mine.failure = ranks::attempt([&] { build(inner.rank(), model, comm); });
    mine.unchanged = ranks::values_of(model) == before;
    for (std::size_t i = 0; i < model.size(); ++i) {
      mine.unchanged = mine.unchanged && model[i].values().data() == where[i];
    }
  });
  ranks::rethrow_any(thrown);
  return built;
}

void check_refused(const std::vector<Built>& built, const Texts& fragments) {
  for (std::size_t r = 0; r < built.size(); ++r) {
    INFO("rank " << r);
    check_names(built[r].failure, fragments);
    CHECK(built[r].failure.text == built[0].failure.text);
    CHECK(built[r].unchanged);
  }
}

constexpr auto as_they_are = [](int, Model<>&) {};

template <class Way>
constexpr auto build_adamw =
    [](int, Model<>& model, auto& comm) { (void)Way::optimizer(zero::AdamW{}, model, comm); };

/// `spoil(model)` on rank `culprit` only (-1: on all), at several world sizes.
template <class Way, class Spoil>
void check_spoiled(Spoil spoil, const Texts& fragments) {
  for (const int world : {1, 2, 4}) {
    for (const int culprit : {-1, world - 1}) {
      INFO("world " << world << ", culprit " << culprit);
      const auto built = build_on<Way>(
          world,
          [&](int rank, Model<>& model) {
            if (culprit == -1 || rank == culprit) spoil(model);
          },
          build_adamw<Way>);
      Texts wanted = fragments;
      if (world > 1) {
        wanted.push_back("construction: rank " + std::to_string(culprit == -1 ? 0 : culprit));
      }
      check_refused(built, wanted);
    }
  }
}

TEMPLATE_LIST_TEST_CASE("construction refuses a store that can't be used", "[misuse]",
                        ranks::FewWays) {
  using Way = TestType;
  float memory[8]{};
  SECTION("empty") {
    check_spoiled<Way>([](Model<>& model) { model.clear(); }, {"store is empty", "at least one"});
  }
  SECTION("a group that isn't there") {
    check_spoiled<Way>(
        [](Model<>& model) {
          model.emplace_back("late", std::vector<std::size_t>{2}, zero::Attributes{}, 3);
        },
        {"parameter 6 ('late')", "group 3", "only 1", "zero::Groups"});
  }
  SECTION("a name twice") {
    check_spoiled<Way>(
        [](Model<>& model) { model.emplace_back("dense", std::vector<std::size_t>{2}); },
        {"parameter 6 ('dense')", "parameter 3 ('dense')", "unique"});
  }
  SECTION("memory shared without a tie") {
    check_spoiled<Way>(
        [](Model<>& model) { model[1].take_values(model[3].values().subspan(10, 3)); },
        {"parameter 3 ('dense')", "parameter 1 ('bias')", "overlaps", "alias = 1"});
  }
  SECTION("one inside another, with a third between their beginnings") {
    check_spoiled<Way>(
        [](Model<>& model) {
          model[1].take_values(model[0].values().subspan(2, 3));
          model[5].take_values(model[0].values().subspan(30, 1));
        },
        {"overlaps", "parameter 0 ('embed')", "alias = 0"});
  }
  SECTION("memory shared with a frozen one") {
    check_spoiled<Way>(
        [](Model<>& model) { model[1].take_values(model[2].values().subspan(1, 3)); },
        {"parameter 2 ('fixed')", "parameter 1 ('bias')", "overlaps"});
  }
  SECTION("a shape that doesn't fit") {
    check_spoiled<Way>([&](Model<>& model) { model[1].take_values(std::span(memory, 2)); },
                       {"parameter 1 ('bias')", "2 values", "shape holds 3"});
  }
  SECTION("null values") {
    check_spoiled<Way>(
        [](Model<>& model) {
          // How a framework may show memory that it has not allocated yet.
          model[1].take_values(std::span<float>(static_cast<float*>(nullptr), 3));
        },
        {"parameter 1 ('bias')", "null values"});
  }
  SECTION("a quantum of 0") {
    check_spoiled<Way>(
        [](Model<>& model) {
          model.emplace_back("q", std::vector<std::size_t>{2}, zero::Attributes{.quantum = 0});
        },
        {"parameter 6 ('q')", "quantum is 0", "use 1"});
  }
  SECTION("an alias of a later, a tied or a missing one, of another size, or frozen otherwise") {
    const auto alias = [](std::size_t target, std::size_t elements, bool frozen = false) {
      return [=](Model<>& model) {
        model.emplace_back("a", std::vector<std::size_t>{elements},
                           zero::Attributes{.frozen = frozen, .alias = target});
      };
    };
    check_spoiled<Way>(alias(6, 2), {"parameter 6 ('a')", "earlier"});
    check_spoiled<Way>(alias(99, 2), {"parameter 6 ('a')", "earlier"});
    check_spoiled<Way>(alias(4, 35), {"parameter 6 ('a')", "alias names an alias"});
    check_spoiled<Way>(alias(1, 4), {"parameter 6 ('a')", "count"});
    check_spoiled<Way>(alias(1, 3, true), {"parameter 6 ('a')", "frozen"});
  }
  if constexpr (Way::view::values == zero::Residency::caller) {
    SECTION("a tied parameter that shows other memory, which nobody would step") {
      std::vector<float> elsewhere(35);
      check_spoiled<Way>([&](Model<>& model) { model[4].take_values(elsewhere); },
                         {"parameter 4 ('tied')", "tied to parameter 0 ('embed')", "other memory"});
    }
  }
  SECTION("a name so long that the message is cut") {
    check_spoiled<Way>(
        [](Model<>& model) {
          model.emplace_back(std::string(1000, 'n'), std::vector<std::size_t>{2},
                             zero::Attributes{}, 1);
        },
        {"parameter 6 ('nnnn"});
  }
}

TEMPLATE_LIST_TEST_CASE("construction refuses options that make no sense", "[misuse]",
                        ranks::TwoWays) {
  using Way = TestType;
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const auto check = [](zero::AdamW bad, const Texts& fragments) {
    for (const int world : {1, 3}) {
      const auto built =
          build_on<Way>(world, as_they_are, [&](int rank, Model<>& model, auto& comm) {
            const zero::AdamW good;
            (void)Way::optimizer(zero::Groups{good, rank == world - 1 ? bad : good}, model, comm);
          });
      Texts wanted = fragments;
      if (world > 1) wanted.push_back("rank 2");
      check_refused(built, wanted);
    }
  };
  check(zero::AdamW{.lr = -1}, {"AdamW", "lr is -1", "not negative"});
  check(zero::AdamW{.lr = nan}, {"AdamW", "lr is nan", "not negative"});
  check(zero::AdamW{.beta1 = 1}, {"AdamW", "beta1 is 1", "below 1"});
  check(zero::AdamW{.eps = -1e-3}, {"AdamW", "eps"});

  const auto none = build_on<Way>(2, as_they_are, [](int rank, Model<>& model, auto& comm) {
    std::vector<zero::AdamW> groups(rank == 1 ? 0 : 1);
    (void)Way::optimizer(zero::Groups<zero::AdamW>(groups), model, comm);
  });
  check_refused(none, {"rank 1", "Groups is empty"});
}

TEMPLATE_LIST_TEST_CASE("construction refuses ranks that differ", "[misuse]", ranks::FewWays) {
  using Way = TestType;
  const auto check = [](auto differ, const Texts& fragments) {
    for (const int world : {2, 3, 4}) {
      for (const int culprit : {1, world - 1}) {
        INFO("world " << world << ", culprit " << culprit);
        const auto built = build_on<Way>(
            world,
            [&](int rank, Model<>& model) {
              if (rank == culprit) differ(model);
            },
            build_adamw<Way>);
        Texts wanted = fragments;
        wanted.push_back("rank " + std::to_string(culprit) + " differs from rank 0");
        check_refused(built, wanted);
      }
    }
  };
  const auto replace = [](std::size_t i, ranks::Tensor<float> by) {
    return [i, by](Model<>& model) {
      const std::vector<float> values(model[i].values().begin(), model[i].values().end());
      model[i] = by;
      std::copy_n(values.begin(), std::min(values.size(), model[i].values().size()),
                  model[i].values().begin());
    };
  };
  using Shape = std::vector<std::size_t>;
  using ranks::Tensor;
  SECTION("a size") {
    check(replace(3, {"dense", Shape{14}}), {"parameter 3 ('dense')", "14 elements, not 13"});
  }
  SECTION("two sizes: the first is named") {
    check(
        [&](Model<>& model) {
          replace(3, {"dense", Shape{14}})(model);
          replace(1, {"bias", Shape{4}})(model);
        },
        {"parameter 1 ('bias')", "4 elements, not 3"});
  }
  SECTION("a name") {
    check(replace(3, {"dense2", Shape{13}}), {"parameter 3 ('dense')", "another name"});
  }
  SECTION("a shape of the same size") {
    check(replace(3, {"dense", Shape{13, 1}}), {"parameter 3 ('dense')", "shape"});
  }
  SECTION("an attribute") {
    check(replace(3, {"dense", Shape{13}, zero::Attributes{.quantum = 2}}),
          {"parameter 3 ('dense')", "attribute"});
    check(replace(3, {"dense", Shape{13}, zero::Attributes{.unit = 2}}),
          {"parameter 3 ('dense')", "attribute"});
    check(replace(3, {"dense", Shape{13}, zero::Attributes{.frozen = true}}),
          {"parameter 3 ('dense')", "attribute"});
  }
  SECTION("a tie") {
    check(replace(4, {"tied", Shape{7, 5}}), {"parameter 4 ('tied')", "attribute"});
  }
  SECTION("one initial value, by one bit") {
    check(
        [](Model<>& model) {
          float& x = model[3].values()[12];
          x = std::nextafter(x, 2.0F);
        },
        {"parameter 3 ('dense')", "initial values", "seed", "broadcast"});
  }
  SECTION("a frozen value") {
    check([](Model<>& model) { model[2].values()[0] = 5; },
          {"parameter 2 ('fixed')", "initial values"});
  }
  SECTION("one more parameter, and one less") {
    check([](Model<>& model) { model.emplace_back("more", Shape{2}); },
          {"7 parameters, not 6", "the first 6"});
    check([](Model<>& model) { model.pop_back(); }, {"5 parameters, not 6", "the first 5"});
  }
  SECTION("another number and another size: the size comes first") {
    check(
        [&](Model<>& model) {
          replace(1, {"bias", Shape{4}})(model);
          model.pop_back();
        },
        {"parameter 1 ('bias')", "4 elements, not 3"});
  }
}

TEMPLATE_LIST_TEST_CASE("construction refuses ranks that are set differently", "[misuse]",
                        ranks::FewWays) {
  using Way = TestType;
  const auto check = [](auto build, const Texts& fragments) {
    const auto built = build_on<Way>(3, as_they_are, build);
    Texts wanted = fragments;
    wanted.push_back("rank 2 differs from rank 0");
    check_refused(built, wanted);
  };
  SECTION("rule") {
    check(
        [](int rank, Model<>& model, auto& comm) {
          if (rank == 2) {
            (void)Way::optimizer(zero::Sgd{}, model, comm);
          } else {
            (void)Way::optimizer(zero::AdamW{}, model, comm);
          }
        },
        {"another type"});
  }
  SECTION("bucket size") {
    check(
        [](int rank, Model<>& model, auto& comm) {
          (void)Way::optimizer(zero::AdamW{}, model, comm, {}, rank == 2 ? 128 : 64);
        },
        {"bucket size"});
  }
  SECTION("whose gradients") {
    check(
        [](int rank, Model<>& model, auto& comm) {
          (void)Way::optimizer(
              zero::AdamW{}, model, comm,
              {.gradients = rank == 2 ? zero::Gradients::reduced : zero::Gradients::local,
               .gradient_scale = 1.0});
        },
        {"settings"});
  }
  SECTION("scale") {
    check(
        [](int rank, Model<>& model, auto& comm) {
          (void)Way::optimizer(zero::AdamW{}, model, comm,
                               {.gradient_scale = rank == 2 ? 0.5 : 0.25});
        },
        {"settings"});
  }
  SECTION("whether values are compared") {
    check(
        [](int rank, Model<>& model, auto& comm) {
          (void)Way::optimizer(zero::AdamW{}, model, comm, {.check_values = rank != 2});
        },
        {"settings"});
  }
  SECTION("number of groups") {
    check(
        [](int rank, Model<>& model, auto& comm) {
          std::vector<zero::AdamW> groups(rank == 2 ? 2 : 1);
          (void)Way::optimizer(zero::Groups<zero::AdamW>(groups), model, comm);
        },
        {"groups"});
  }
  SECTION("which state is kept") {
    check([](int rank, Model<>& model,
             auto& comm) { (void)Way::optimizer(zero::AdamW{.amsgrad = rank == 2}, model, comm); },
          {"state"});
  }
}

TEST_CASE("construction refuses ranks of different stages", "[misuse]") {
  using Sharded = ranks::Way<true, zero::Stage1, zero::NoView>;
  using Replicated = ranks::Way<true, zero::Replicated, zero::NoView>;
  const auto built = build_on<Sharded>(3, as_they_are, [](int rank, Model<>& model, auto& comm) {
    if (rank == 2) {
      (void)Replicated::optimizer(zero::AdamW{}, model, comm);
    } else {
      (void)Sharded::optimizer(zero::AdamW{}, model, comm);
    }
  });
  check_refused(built, {"another type", "policies", "rank 2 differs from rank 0"});
}

TEMPLATE_LIST_TEST_CASE("different initial values pass where nobody compares them", "[misuse]",
                        ranks::TwoWays) {
  using Way = TestType;
  const auto built = build_on<Way>(
      2, [](int rank, Model<>& model) { model[0].values()[0] = static_cast<float>(rank); },
      [](int, Model<>& model, auto& comm) {
        (void)Way::optimizer(zero::AdamW{}, model, comm, {.check_values = false});
      });
  for (const Built& one : built) CHECK(one.failure.text.empty());
}

TEST_CASE("flat parameters must fill their buffer", "[misuse]") {
  std::vector<float> values(10), gradient(10), shorter(9);
  using Flat = zero::FlatParams<float>;
  const auto build = [&](std::span<float> g, std::vector<Flat::Entry> entries) {
    return ranks::attempt([&] { (void)Flat(std::span<float>(values), g, entries); });
  };
  check_names(build(shorter, {{"a", {10}}}), {"10 elements", "9"});
  check_names(build(gradient, {{"a", {9}}}), {"9 elements", "10"});
  check_names(build(gradient, {{"a", {9}}, {"b", {2}}}), {"'b'", "ends behind"});
  CHECK(build(gradient, {{"a", {9}}, {"b", {1}}}).kind == Kind::none);
}

// ---------------------------------------------------------------------------------------------
// Verbs of one rank

/// Trains three steps on each rank; `misuse(optimizer, model)` runs on one rank (or none) before
/// the second. Every rank's end, to the bit.
template <class Way, class Misuse>
std::vector<std::string> train_with(int world, int culprit, Misuse misuse) {
  std::vector<std::string> ends(static_cast<std::size_t>(world));
  ranks::rethrow_any(ranks::run(world, [&](zero::InProcessCommunicator inner) {
    Model<> model = make_model();
    auto comm = Way::wrap(inner);
    auto optimizer = Way::optimizer(zero::AdamW{}, model, comm);
    for (int step = 0; step < 3; ++step) {
      ranks::draw_gradients(model, inner.rank(), step);
      if (step == 1 && inner.rank() == culprit) misuse(optimizer, model);
      optimizer.step();
    }
    ends[static_cast<std::size_t>(inner.rank())] = ranks::snapshot(model, optimizer);
  }));
  return ends;
}

TEMPLATE_LIST_TEST_CASE("a verb that refuses names the parameter and changes nothing", "[misuse]",
                        ranks::FewWays) {
  using Way = TestType;
  for (const int world : {1, 3}) {
    const auto undisturbed = train_with<Way>(world, -1, [](auto&, Model<>&) {});
    std::vector<std::pair<Failure, Texts>> refused;
    bool unchanged = true;
    const auto ends = train_with<Way>(world, world - 1, [&](auto& optimizer, Model<>& model) {
      const std::string before = ranks::snapshot(model, optimizer);
      const auto refuses = [&](auto verb, Texts fragments) {
        refused.emplace_back(ranks::attempt(verb), std::move(fragments));
        unchanged = unchanged && ranks::snapshot(model, optimizer) == before;
      };
      for (const std::size_t i : {std::size_t{6}, ~std::size_t{0}}) {
        const Texts there_is_none{"no parameter " + std::to_string(i), "has 6"};
        const auto with = [&](const char* verb) {
          Texts texts = there_is_none;
          texts.push_back(verb);
          return texts;
        };
        refuses([&] { (void)optimizer.gradient(i); }, with("gradient"));
        refuses([&] { optimizer.mark_ready(i); }, with("mark_ready"));
        refuses([&] { optimizer.mark_absent(i); }, with("mark_absent"));
        refuses([&] { (void)optimizer.steps(i); }, with("steps"));
      }
      refuses([&] { (void)optimizer.group(1); }, {"no group 1", "there are 1"});
      refuses([&] { (void)optimizer.group(~std::size_t{0}); }, {"no group", "there are 1"});

      const std::string fixed = "parameter 2 ('fixed')";
      refuses([&] { optimizer.mark_ready(2); }, {"mark_ready", fixed, "frozen"});
      refuses([&] { optimizer.mark_absent(2); }, {"mark_absent", fixed, "frozen"});
      refuses([&] { (void)optimizer.gradient(2); }, {"gradient", fixed, "frozen"});

      const std::string bias = "parameter 1 ('bias')";
      refuses([&] { (void)optimizer.template gradient<double>(1); }, {"gradient", bias, "type"});
      auto& memory = model[1].own_gradient();
      const std::vector<float> kept = memory;
      for (const std::size_t size : {2, 4}) {
        memory.resize(size);
        const Texts sizes{bias, std::to_string(size) + " elements", "has 3"};
        refuses([&] { optimizer.mark_ready(1); }, sizes);
        refuses([&] { (void)optimizer.gradient(1); }, sizes);
      }
      std::vector<float>().swap(memory);
      refuses([&] { optimizer.mark_ready(1); }, {"mark_ready", bias, "null gradient", "memory"});
      refuses([&] { (void)optimizer.gradient(1); }, {"gradient", bias, "null gradient", "memory"});
      memory = kept;

      {
        auto lease = optimizer.gradient(1);
        refuses([&] { (void)optimizer.gradient(1); }, {"gradient", bias, "leased already", "end"});
        refuses([&] { optimizer.mark_ready(1); }, {"mark_ready", bias, "still leased", "end"});
        refuses([&] { optimizer.mark_absent(1); }, {"mark_absent", bias, "still leased", "end"});
        auto moved = std::move(lease);  // one lease still
        refuses([&] { (void)optimizer.gradient(1); }, {"gradient", bias, "leased already"});
      }
      {
        const auto again = optimizer.gradient(1);
      }
      optimizer.mark_ready(1);
      refuses([&] { optimizer.mark_ready(1); }, {"mark_ready", bias, "marked already", "once"});
      refuses([&] { optimizer.mark_absent(1); }, {"mark_absent", bias, "marked already"});
      refuses([&] { (void)optimizer.gradient(1); }, {"gradient", bias, "marked already", "step"});

      // A tie is marked for itself.
      optimizer.mark_ready(4);
      const std::string tied = "parameter 4 ('tied')";
      refuses([&] { optimizer.mark_ready(4); }, {"mark_ready", tied, "marked already"});
      optimizer.mark_ready(0);
      refuses([&] { optimizer.mark_ready(0); }, {"parameter 0 ('embed')", "marked already"});
    });
    INFO("world " << world);
    CHECK(refused.size() == 29);
    for (const auto& [failure, fragments] : refused) check_names(failure, fragments);
    CHECK(unchanged);
    CHECK((ends == undisturbed));
  }
}

TEMPLATE_LIST_TEST_CASE("marks that were refused are no marks", "[misuse]", ranks::TwoWays) {
  using Way = TestType;
  // A null gradient refuses to be ready; absent is right for it, and steps without it on this rank.
  std::vector<std::string> ends[2];
  for (const bool tries : {false, true}) {
    ends[tries] = train_with<Way>(2, 1, [&](auto& optimizer, Model<>& model) {
      std::vector<float>().swap(model[1].own_gradient());
      if (tries) (void)ranks::attempt([&] { optimizer.mark_ready(1); });
      optimizer.mark_absent(1);
      optimizer.mark_ready(3);
    });
  }
  CHECK((ends[0] == ends[1]));
}

/// A store whose element types are known at run time.
struct Typed {
  using Span = std::variant<std::span<float>, std::span<double>>;
  std::string label;
  std::vector<std::size_t> extents;
  Span own_values;
  Span own_gradient;
  [[nodiscard]] const std::string& name() const { return label; }
  [[nodiscard]] std::span<const std::size_t> shape() const { return extents; }
  [[nodiscard]] Span values() const { return own_values; }
  [[nodiscard]] Span gradient() const { return own_gradient; }
};

TEMPLATE_LIST_TEST_CASE("two lanes: a gradient is asked for in its own type", "[misuse]",
                        ranks::TwoWays) {
  using Way = TestType;
  if constexpr (std::is_same_v<typename Way::view, zero::NoView>) {
    std::vector<std::vector<Failure>> refused(2);
    std::vector<int> right(2, 0);
    ranks::rethrow_any(ranks::run(2, [&](zero::InProcessCommunicator inner) {
      const auto r = static_cast<std::size_t>(inner.rank());
      std::vector<float> f(9, 1), gf(9, 1);
      std::vector<double> d(7, 1), gd(7, 1);
      std::vector<Typed> store{{"single", {9}, std::span(f), std::span(gf)},
                               {"twice", {7}, std::span(d), std::span(gd)}};
      auto comm = Way::wrap(inner);
      auto optimizer = Way::optimizer(zero::Sgd{.lr = 0.5}, store, comm);
      refused[r] = {ranks::attempt([&] { (void)optimizer.template gradient<double>(0); }),
                    ranks::attempt([&] { (void)optimizer.template gradient<float>(1); }),
                    ranks::attempt([&] { (void)optimizer.gradient(1); })};
      store[1].own_gradient = std::span(gf).first(7);  // the right size, the wrong type
      refused[r].push_back(ranks::attempt([&] { optimizer.mark_ready(1); }));
      refused[r].push_back(ranks::attempt([&] { optimizer.step(); }));
      store[1].own_gradient = std::span(gd);
      {
        (void)(optimizer.gradient(0).values()[0]);
      }
      {
        (void)(optimizer.template gradient<double>(1).values()[0]);
      }
      optimizer.step();
      right[r] = f == std::vector<float>(9, 0.5F) && d == std::vector<double>(7, 0.5) ? 1 : 0;
    }));
    for (std::size_t r = 0; r < 2; ++r) {
      check_names(refused[r][0], {"gradient", "parameter 0 ('single')", "element type"});
      check_names(refused[r][1], {"gradient", "parameter 1 ('twice')", "element type"});
      check_names(refused[r][2], {"gradient", "parameter 1 ('twice')", "element type"});
      check_names(refused[r][3], {"mark_ready", "parameter 1 ('twice')", "element type"});
      check_names(refused[r][4], {"step", "parameter 1 ('twice')", "element type"});
      CHECK(right[r] == 1);
    }
  }
}

TEMPLATE_LIST_TEST_CASE("a refused step keeps what was written to a gradient", "[misuse]",
                        ranks::TwoWays) {
  using Way = TestType;
  // Micro-steps add to what is there; a step that was refused is none, so they go on adding.
  std::vector<std::vector<int>> adds(2);
  ranks::rethrow_any(ranks::run(2, [&](zero::InProcessCommunicator inner) {
    auto& mine = adds[static_cast<std::size_t>(inner.rank())];
    Model<> model = make_model();
    auto comm = Way::wrap(inner);
    auto optimizer = Way::optimizer(zero::AdamW{}, model, comm);
    const auto lease = [&](std::size_t i) { mine.push_back(optimizer.gradient(i).adds() ? 1 : 0); };
    lease(1);
    lease(1);
    lease(0);
    lease(4);  // tied to 0
    const double lr = std::exchange(optimizer.group(0).lr, -1);
    const Failure failure = ranks::attempt([&] { optimizer.step(); });
    if (failure.kind != Kind::usage) mine.push_back(99);
    optimizer.group(0).lr = lr;
    lease(1);
    lease(4);
    lease(3);
    optimizer.step();
    lease(1);
    lease(4);
    lease(0);
  }));
  for (const auto& one : adds) CHECK(one == std::vector<int>{0, 1, 0, 1, 1, 1, 0, 0, 0, 1});
}

// ---------------------------------------------------------------------------------------------
// Steps that one rank refuses

struct RefusedStep {
  std::vector<Failure> failures;
  std::vector<int> unchanged;
  std::vector<std::string> ends;
};

/// Three steps, and between the first and the second one that rank `culprit` spoils: `spoil` gives
/// what must be kept meanwhile and `mend` repairs the rest.
template <class Way, class Options, class Spoil, class Mend>
RefusedStep refused_step(int world, int culprit, Options options, zero::Settings settings,
                         Spoil spoil, Mend mend) {
  const auto count = static_cast<std::size_t>(world);
  RefusedStep result{std::vector<Failure>(count), std::vector<int>(count, 0),
                     std::vector<std::string>(count)};
  ranks::rethrow_any(ranks::run(world, [&](zero::InProcessCommunicator inner) {
    const int rank = inner.rank();
    const auto r = static_cast<std::size_t>(rank);
    Model<> model = make_model();
    auto comm = Way::wrap(inner);
    auto optimizer = Way::optimizer(options, model, comm, settings);
    ranks::draw_gradients(model, settings.gradients == zero::Gradients::local ? rank : 0, 0);
    optimizer.step();
    for (int step = 1; step < 3; ++step) {
      ranks::draw_gradients(model, settings.gradients == zero::Gradients::local ? rank : 0, step);
      if (step == 1 && culprit >= 0) {
        const std::string before = ranks::snapshot(model, optimizer);
        if (rank == culprit) {
          [[maybe_unused]] const auto keep = spoil(optimizer, model);
          result.failures[r] = ranks::attempt([&] { optimizer.step(); });
        } else {
          optimizer.mark_ready(5);  // some marks, which the refused step forgets
          optimizer.mark_ready(3);
          result.failures[r] = ranks::attempt([&] { optimizer.step(); });
        }
        result.unchanged[r] = ranks::snapshot(model, optimizer) == before ? 1 : 0;
        if (rank == culprit) mend(optimizer, model);
      }
      if (step == 1) optimizer.mark_ready(3);
      optimizer.step();
    }
    result.ends[r] = ranks::snapshot(model, optimizer);
  }));
  return result;
}

template <class Way, class Options, class Spoil, class Mend>
void check_refused_step(Options options, zero::Settings settings, Spoil spoil, Mend mend,
                        const Texts& fragments) {
  for (const int world : {1, 2, 3}) {
    const auto undisturbed = refused_step<Way>(world, -1, options, settings, spoil, mend);
    for (const int culprit : {0, world - 1}) {
      INFO("world " << world << ", culprit " << culprit);
      const RefusedStep refused = refused_step<Way>(world, culprit, options, settings, spoil, mend);
      Texts wanted = fragments;
      if (world > 1) {
        wanted.push_back("rank " + std::to_string(culprit) + " refused the step");
        wanted.push_back("nothing has changed");
      }
      for (std::size_t r = 0; r < refused.failures.size(); ++r) {
        INFO("rank " << r);
        check_names(refused.failures[r], wanted);
        CHECK(refused.failures[r].text == refused.failures[0].text);
        CHECK(refused.unchanged[r] == 1);
        CHECK((refused.ends[r] == undisturbed.ends[r]));
      }
    }
  }
}

TEMPLATE_LIST_TEST_CASE("where one rank refuses a step, no rank takes it", "[misuse]",
                        ranks::FewWays) {
  using Way = TestType;
  const auto nothing = [](auto&, Model<>&) {};
  SECTION("a lease still open") {
    check_refused_step<Way>(zero::AdamW{}, {},
                            [](auto& optimizer, Model<>& model) {
                              auto lease = optimizer.gradient(3);
                              // Backward is still at it: the sum of the refused step is never seen.
                              model[3].own_gradient()[0] += 0;
                              return lease;
                            },
                            nothing,
                            {"step", "parameter 3 ('dense')", "still leased", "end the lease"});
  }
  SECTION("a lease on a tied parameter") {
    check_refused_step<Way>(zero::AdamW{}, {},
                            [](auto& optimizer, Model<>&) { return optimizer.gradient(4); },
                            nothing, {"step", "parameter 4 ('tied')", "still leased"});
  }
  SECTION("options") {
    const auto with = [&](auto change, const Texts& fragments) {
      check_refused_step<Way>(
          zero::Groups{zero::AdamW{}, zero::AdamW{.lr = 0.5}}, {},
          [&](auto& optimizer, Model<>&) {
            change(optimizer.group(1));
            return 0;
          },
          [](auto& optimizer, Model<>&) { optimizer.groups()[1] = zero::AdamW{.lr = 0.5}; },
          fragments);
    };
    with([](zero::AdamW& group) { group.lr = -0.5; }, {"group 1", "lr is -0.5", "not negative"});
    with([](zero::AdamW& group) { group.lr = std::numeric_limits<double>::quiet_NaN(); },
         {"group 1", "lr is nan"});
    with([](zero::AdamW& group) { group.beta2 = 1; }, {"group 1", "beta2", "below 1"});
    with([](zero::AdamW& group) { group.amsgrad = true; },
         {"group 1", "max_exp_avg_sq", "construct with it on"});
  }
  SECTION("momentum switched on later") {
    check_refused_step<Way>(
        zero::Sgd{}, {},
        [](auto& optimizer, Model<>&) {
          optimizer.group(0).momentum = 0.9;
          return 0;
        },
        [](auto& optimizer, Model<>&) { optimizer.group(0).momentum = 0; },
        {"group 0", "momentum_buffer", "construct with it on"});
  }
  SECTION("a gradient of another size") {
    for (const int by : {-1, 1}) {
      const std::size_t size = static_cast<std::size_t>(13 + by);
      std::vector<float> kept;  // one culprit at a time
      check_refused_step<Way>(
          zero::AdamW{}, {},
          [&](auto&, Model<>& model) {
            kept = model[3].own_gradient();
            model[3].own_gradient().resize(size);
            return 0;
          },
          [&](auto&, Model<>& model) { model[3].own_gradient() = kept; },
          {"step", "parameter 3 ('dense')", std::to_string(size) + " elements", "has 13"});
    }
  }
}

TEMPLATE_LIST_TEST_CASE("reduced gradients are there on all ranks or on none", "[misuse]",
                        ranks::FewWays) {
  using Way = TestType;
  const zero::Settings settings{.gradients = zero::Gradients::reduced};
  const auto nothing = [](auto&, Model<>&) {};
  for (const int culprit : {0, 2}) {
    const auto undisturbed = refused_step<Way>(
        3, -1, zero::AdamW{}, settings, [](auto&, Model<>&) { return 0; }, nothing);
    const auto refused = refused_step<Way>(
        3, culprit, zero::AdamW{}, settings,
        [](auto& optimizer, Model<>&) {
          optimizer.mark_absent(3);
          return 0;
        },
        nothing);
    for (std::size_t r = 0; r < 3; ++r) {
      INFO("culprit " << culprit << ", rank " << r);
      check_names(refused.failures[r], {"step", "parameter 3 ('dense')", "on some ranks only"});
      CHECK(refused.failures[r].text == refused.failures[0].text);
      CHECK(refused.unchanged[r] == 1);
      CHECK((refused.ends[r] == undisturbed.ends[r]));
    }
  }
}

TEMPLATE_LIST_TEST_CASE("several ranks that refuse agree on whom to name", "[misuse]",
                        ranks::TwoWays) {
  using Way = TestType;
  std::vector<Failure> failures(4);
  ranks::rethrow_any(ranks::run(4, [&](zero::InProcessCommunicator inner) {
    Model<> model = make_model();
    auto comm = Way::wrap(inner);
    auto optimizer = Way::optimizer(zero::AdamW{}, model, comm);
    if (inner.rank() == 1) optimizer.group(0).lr = -1;
    if (inner.rank() == 3) optimizer.group(0).eps = -1;
    for (int tries = 0; tries < 3; ++tries) {
      failures[static_cast<std::size_t>(inner.rank())] = ranks::attempt([&] { optimizer.step(); });
    }
  }));
  for (const Failure& failure : failures) check_names(failure, {"rank 1 refused", "lr is -1"});
}

}  // namespace
