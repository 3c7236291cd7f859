// SPDX-License-Identifier: Apache-2.0
// What ranks agree on in a step: whether gradients are finite, what they are scaled by, how long
// they are, when they are complete, and which parameters there are. To the bit, over both ways
// between ranks, with and without sharding, for every element type.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "catch.hpp"
#include "ranks.hpp"
#include "zero/bfloat16.hpp"
#include "zero/bucket_view/param_and_grad_view.hpp"
#include "zero/detail/square_sum.hpp"
#include "zero/element.hpp"
#include "zero/float16.hpp"
#include "zero/loss_scale.hpp"
#include "zero/optim/sgd.hpp"
#include "zero/parameter.hpp"
#include "zero/partition/balanced.hpp"

namespace {

using ranks::Failure;
using ranks::Model;
using Kind = ranks::Failure::Kind;
using Texts = std::vector<std::string>;

constexpr double infinity = std::numeric_limits<double>::infinity();
constexpr double nan = std::numeric_limits<double>::quiet_NaN();

template <class W, class T>
struct Case {
  using way = W;
  using element = T;
};
// Each way and each element type once: all pairs take minutes to compile.
using SharedReplicated = std::tuple_element_t<0, ranks::TwoWays>;
using BucketsStage1 = std::tuple_element_t<1, ranks::TwoWays>;
using SharedStage1 = std::tuple_element_t<0, ranks::MainWays>;
using BucketsReplicated = std::tuple_element_t<3, ranks::MainWays>;
using Cases =
    std::tuple<Case<SharedStage1, double>, Case<SharedReplicated, float>,
               Case<BucketsStage1, zero::bfloat16>, Case<BucketsReplicated, zero::float16>>;

template <class T>
T stored(double x) {
  return zero::element_traits<T>::store(static_cast<zero::arithmetic_t<T>>(x));
}
template <class T>
double loaded(T x) {
  return static_cast<double>(zero::element_traits<T>::load(x));
}

/// Several buckets, one parameter frozen and one tied.
template <class T>
Model<T> make_model() {
  Model<T> model;
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
/// What of it is stepped.
constexpr std::size_t stepped[]{0, 1, 3, 5};

constexpr zero::Sgd rule{.lr = 0.125, .momentum = 0.5};

template <class Way, class T, class... More>
using optimizer_t =
    decltype(Way::optimizer(rule, std::declval<Model<T>&>(), std::declval<typename Way::comm&>(),
                            zero::Settings{}, std::size_t{}, std::declval<More>()...));

/// What `body(rank, model, optimizer)` gives on each rank.
template <class Way, class T, class Body, class... More>
auto on_ranks(int world, zero::Settings settings, Body body, std::size_t bucket_bytes = 64,
              More... more) {
  using Optimizer = optimizer_t<Way, T, More...>;
  using Result = std::invoke_result_t<Body, int, Model<T>&, Optimizer&>;
  std::vector<Result> results(static_cast<std::size_t>(world));
  ranks::rethrow_any(ranks::run(world, [&](zero::InProcessCommunicator inner) {
    Model<T> model = make_model<T>();
    auto comm = Way::wrap(inner);
    auto optimizer = Way::optimizer(rule, model, comm, settings, bucket_bytes, More(more)...);
    results[static_cast<std::size_t>(inner.rank())] = body(inner.rank(), model, optimizer);
  }));
  return results;
}

/// All that a step may change on this rank, to the bit, of the first `count` parameters.
template <class T, class Optimizer>
std::string everything(const Model<T>& model, const Optimizer& optimizer,
                       std::size_t count = 1000) {
  std::string all = ranks::state_of(optimizer);
  for (std::size_t i = 0; i < std::min(count, model.size()); ++i) {
    all += ranks::bytes_of(model[i].values()) + std::to_string(optimizer.steps(i)) + ";";
  }
  for (const auto& slice : optimizer.masters()) all += ranks::bytes_of(slice.values);
  const double scale = optimizer.loss_scale();
  return all + std::to_string(optimizer.steps()) + ranks::bytes_of(std::span(&scale, 1));
}

template <class T>
void scale_gradients(Model<T>& model, double by) {
  for (auto& tensor : model) {
    for (T& g : tensor.own_gradient()) g = stored<T>(loaded(g) * by);
  }
}

/// Multiples of 1/64 of at most 7 bits: their sums and the squares' sums are exact.
template <class T>
void short_gradients(Model<T>& model, std::uint32_t seed, int largest = 100) {
  std::uint32_t x = seed * 2654435761U + 12345U;
  for (auto& tensor : model) {
    for (T& g : tensor.own_gradient()) {
      x = x * 1664525U + 1013904223U;
      const int span = 2 * largest + 1;
      g = stored<T>((static_cast<int>((x >> 16) % static_cast<std::uint32_t>(span)) - largest) /
                    64.0);
    }
  }
}

void check_refused(const std::vector<Failure>& failures, const Texts& fragments) {
  for (std::size_t r = 0; r < failures.size(); ++r) {
    INFO("rank " << r << ": " << failures[r].text);
    CHECK(failures[r].kind == Kind::usage);
    CHECK(failures[r].text == failures[0].text);
    for (const std::string& fragment : fragments) {
      CHECK_THAT(failures[r].text, Catch::Matchers::ContainsSubstring(fragment));
    }
  }
}

/// What one rank saw; `wrong` names what it found wrong itself.
struct Seen {
  std::string bits{};
  std::vector<std::string> wrong{};
  std::vector<double> numbers{};
  std::vector<Failure> failures{};
};

void check_none_wrong(const std::vector<Seen>& seen) {
  for (std::size_t r = 0; r < seen.size(); ++r) {
    INFO("rank " << r);
    CHECK(seen[r].wrong == std::vector<std::string>{});
  }
}
void check_same_bits(const std::vector<Seen>& a, const std::vector<Seen>& b) {
  REQUIRE(a.size() == b.size());
  for (std::size_t r = 0; r < a.size(); ++r) {
    INFO("rank " << r);
    CHECK((a[r].bits == b[r].bits));  // bytes: not to be printed
  }
}

// ---------------------------------------------------------------------------------------------
// Finite or not

TEMPLATE_LIST_TEST_CASE("a gradient that is not finite on one rank skips the step on all",
                        "[agreement]", Cases) {
  using Way = typename TestType::way;
  using T = typename TestType::element;
  constexpr std::pair<std::size_t, std::size_t> places[]{{0, 0}, {0, 34}, {1, 2},
                                                         {3, 6}, {3, 12}, {5, 0}};
  const zero::Settings settings{.finite_check = zero::FiniteCheck::always};
  for (const int world : {1, 2, 3, 4}) {
    INFO("world " << world);
    const auto good = [](int rank, auto& model, auto& optimizer, int step, Seen& mine) {
      ranks::draw_gradients(model, rank, step);
      const auto outcome = optimizer.step().outcome();
      if (!outcome.applied || outcome.step != step + 1) mine.wrong.push_back("a good step");
    };
    const auto seen =
        on_ranks<Way, T>(world, settings, [&](int rank, auto& model, auto& optimizer) {
          Seen mine;
          good(rank, model, optimizer, 0, mine);
          good(rank, model, optimizer, 1, mine);
          const std::string before = everything(model, optimizer);
          const auto bad = [&](const std::string& what) {
            const auto outcome = optimizer.step().outcome();
            if (outcome.applied || outcome.step != 2 || optimizer.steps() != 2 ||
                outcome.gradient_norm || everything(model, optimizer) != before) {
              mine.wrong.push_back(what);
            }
          };
          for (const auto& [parameter, element] : places) {
            for (int culprit = 0; culprit < world; ++culprit) {
              for (const double value : {infinity, -infinity, nan}) {
                ranks::draw_gradients(model, rank, 77);
                if (rank == culprit) model[parameter].own_gradient()[element] = stored<T>(value);
                bad(std::to_string(parameter) + "[" + std::to_string(element) + "] of rank " +
                    std::to_string(culprit) + " is " + std::to_string(value));
              }
            }
          }
          for (const double last : {infinity, -infinity}) {  // two: of equal and of opposite sign
            ranks::draw_gradients(model, rank, 78);
            if (rank == 0) model[3].own_gradient()[5] = stored<T>(infinity);
            if (rank == world - 1) model[3].own_gradient()[5] = stored<T>(last);
            bad("two infinities");
            // In different places, which different ranks may own.
            ranks::draw_gradients(model, rank, 79);
            if (rank == 0) model[0].own_gradient()[1] = stored<T>(infinity);
            if (rank == world - 1) model[5].own_gradient()[0] = stored<T>(last);
            bad("two infinities in two places");
          }
          good(rank, model, optimizer, 2, mine);
          mine.bits = everything(model, optimizer);
          return mine;
        });
    const auto plain = on_ranks<Way, T>(world, {}, [&](int rank, auto& model, auto& optimizer) {
      Seen mine;
      for (int step = 0; step < 3; ++step) good(rank, model, optimizer, step, mine);
      mine.bits = everything(model, optimizer);
      return mine;
    });
    check_none_wrong(seen);
    check_none_wrong(plain);
    check_same_bits(seen, plain);
  }
}

TEMPLATE_LIST_TEST_CASE("gradients are checked where that is needed", "[agreement]", Cases) {
  using Way = typename TestType::way;
  using T = typename TestType::element;
  // Whether a step with a NaN on the last rank is applied, and then spoils its element alone.
  const auto applies = [](zero::Settings settings, bool clips) {
    const auto seen = on_ranks<Way, T>(3, settings, [&](int rank, auto& model, auto& optimizer) {
      Seen mine;
      if (clips) optimizer.clip_grad_norm(infinity);
      ranks::draw_gradients(model, rank, 0);
      if (rank == 2) model[3].own_gradient()[12] = stored<T>(nan);
      const bool applied = optimizer.step().outcome().applied;
      mine.numbers.push_back(applied ? 1 : 0);
      std::size_t spoilt = 0;
      for (const std::size_t i : stepped) {
        for (const T value : model[i].values()) {
          if (std::isnan(loaded(value))) ++spoilt;
        }
      }
      const bool all = applied && clips;  // scaled by a norm that is NaN
      const std::size_t expected = all ? 52 : applied ? 1 : 0;
      if (spoilt != expected) mine.wrong.push_back(std::to_string(spoilt) + " are NaN");
      return mine;
    });
    check_none_wrong(seen);
    for (const Seen& one : seen) CHECK(one.numbers == seen[0].numbers);
    return seen[0].numbers[0] == 1;
  };
  using zero::FiniteCheck;
  const auto fixed = zero::LossScale::fixed(8);
  CHECK(applies({}, false) == (sizeof(T) != 2));
  CHECK(!applies({.loss_scale = fixed}, false));
  CHECK(!applies({.loss_scale = zero::LossScale::dynamic(8)}, false));
  CHECK(!applies({}, true));
  CHECK(!applies({.finite_check = FiniteCheck::always}, false));
  CHECK(applies({.finite_check = FiniteCheck::never}, false));
  CHECK(applies({.finite_check = FiniteCheck::never, .loss_scale = fixed}, false));
  CHECK(applies({.finite_check = FiniteCheck::never}, true));
}

TEMPLATE_LIST_TEST_CASE("an absent gradient's numbers don't count", "[agreement]", Cases) {
  using Way = typename TestType::way;
  using T = typename TestType::element;
  for (const int world : {1, 3}) {
    const auto seen = on_ranks<Way, T>(
        world, {.finite_check = zero::FiniteCheck::always},
        [&](int rank, auto& model, auto& optimizer) {
          Seen mine;
          ranks::draw_gradients(model, rank, 0);
          for (T& g : model[3].own_gradient()) g = stored<T>(nan);  // absent everywhere
          optimizer.mark_absent(3);
          if (rank == 1) {  // absent on one rank
            for (T& g : model[1].own_gradient()) g = stored<T>(nan);
            optimizer.mark_absent(1);
          }
          for (T& g : model[4].own_gradient()) g = stored<T>(nan);  // nobody's: the leader's counts
          const auto outcome = optimizer.step().outcome();
          if (!outcome.applied || optimizer.steps(3) != 0 || optimizer.steps(1) != 1) {
            mine.wrong.push_back("skipped");
          }
          return mine;
        });
    check_none_wrong(seen);
  }
}

using Halves = std::tuple<SharedStage1, BucketsReplicated>;

TEMPLATE_LIST_TEST_CASE("large float16 gradients whose sum only a float holds are applied",
                        "[agreement]", Halves) {
  using Way = TestType;
  using T = zero::float16;
  for (const int world : {1, 2, 3, 4}) {
    INFO("world " << world);
    const auto seen = on_ranks<Way, T>(world, {}, [&](int, auto& model, auto& optimizer) {
      Seen mine;
      for (auto& tensor : model) {
        std::fill(tensor.own_gradient().begin(), tensor.own_gradient().end(), stored<T>(60000));
      }
      std::vector<T> before(model[0].values().begin(), model[0].values().end());
      optimizer.group(0).lr = 0x1p-16;
      if (!optimizer.step().outcome().applied) mine.wrong.push_back("skipped");
      const float mean = static_cast<float>(world * 60000) * static_cast<float>(1.0 / world);
      for (std::size_t k = 0; k < before.size(); ++k) {
        const T right = stored<T>(static_cast<float>(before[k]) - mean * 0x1p-16F);
        if (model[0].values()[k].bits != right.bits) mine.wrong.push_back(std::to_string(k));
      }
      return mine;
    });
    check_none_wrong(seen);
  }
}

// ---------------------------------------------------------------------------------------------
// Loss scale

TEMPLATE_LIST_TEST_CASE("a power of two as loss scale changes no bit", "[agreement]", Cases) {
  using Way = typename TestType::way;
  using T = typename TestType::element;
  for (const int world : {1, 2, 3, 4}) {
    INFO("world " << world);
    const auto run = [&](std::optional<zero::LossScale> scale, double by) {
      return on_ranks<Way, T>(world, {.loss_scale = scale},
                              [&](int rank, auto& model, auto& optimizer) {
                                Seen mine;
                                for (int step = 0; step < 3; ++step) {
                                  ranks::draw_gradients(model, rank, step);
                                  scale_gradients(model, by);
                                  optimizer.step();
                                  if (optimizer.loss_scale() != by) mine.wrong.push_back("scale");
                                }
                                mine.bits = ranks::snapshot(model, optimizer);
                                return mine;
                              });
    };
    const auto plain = run(std::nullopt, 1);
    const auto scaled = run(zero::LossScale::fixed(1024), 1024);
    const auto small = run(zero::LossScale::fixed(0.5), 0.5);
    check_none_wrong(plain);
    check_none_wrong(scaled);
    check_same_bits(scaled, plain);
    if constexpr (!std::is_same_v<T, zero::float16>) check_same_bits(small, plain);
    check_none_wrong(small);
  }
}

TEMPLATE_LIST_TEST_CASE("a dynamic loss scale falls with skipped steps and rises with applied ones",
                        "[agreement]", Cases) {
  using Way = typename TestType::way;
  using T = typename TestType::element;
  const zero::LossScale scale{
      .scale = 8, .growth = 4, .backoff = 0.25, .interval = 3, .minimum = 1, .maximum = 64};
  const std::string script =
      "ggg"
      "ggb"
      "ggg"
      "ggg"
      "bbbb"
      "gbggg"
      "b";
  const std::vector<double> right{8,  8,  32, 32, 32, 8, 8, 8, 32, 32, 32,
                                  64, 16, 4,  1,  1,  1, 1, 1, 1,  4,  1};
  REQUIRE(script.size() == right.size());
  for (const int world : {1, 2, 3, 4}) {
    INFO("world " << world);
    const auto seen =
        on_ranks<Way, T>(world, {.loss_scale = scale}, [&](int rank, auto& model, auto& optimizer) {
          Seen mine;
          int step = 0;
          std::size_t at = 0;
          for (const char what : script) {
            const double by = optimizer.loss_scale();
            ranks::draw_gradients(model, rank, step);
            scale_gradients(model, by);
            if (what == 'b' && rank == static_cast<int>(at) % world) {
              model[1].own_gradient()[2] = stored<T>(infinity);
            }
            const auto outcome = optimizer.step().outcome();
            if (outcome.applied != (what == 'g')) mine.wrong.push_back("step");
            if (what == 'g') ++step;
            mine.numbers.push_back(optimizer.loss_scale());
            ++at;
          }
          mine.bits = ranks::snapshot(model, optimizer);
          return mine;
        });
    const auto plain = on_ranks<Way, T>(world, {}, [&](int rank, auto& model, auto& optimizer) {
      Seen mine;
      for (int step = 0; step < std::count(script.begin(), script.end(), 'g'); ++step) {
        ranks::draw_gradients(model, rank, step);
        optimizer.step();
      }
      mine.bits = ranks::snapshot(model, optimizer);
      return mine;
    });
    check_none_wrong(seen);
    check_same_bits(seen, plain);
    for (const Seen& one : seen) CHECK(one.numbers == right);
  }
}

/// What construction throws on each rank.
template <class Way>
std::vector<Failure> construct(int world, const std::function<zero::Settings(int)>& settings) {
  std::vector<Failure> failures(static_cast<std::size_t>(world));
  ranks::rethrow_any(ranks::run(world, [&](zero::InProcessCommunicator inner) {
    Model<float> model = make_model<float>();
    auto comm = Way::wrap(inner);
    failures[static_cast<std::size_t>(inner.rank())] =
        ranks::attempt([&] { (void)Way::optimizer(rule, model, comm, settings(inner.rank())); });
  }));
  return failures;
}

TEMPLATE_LIST_TEST_CASE("loss scales that make no sense are refused", "[agreement]",
                        ranks::TwoWays) {
  using Way = TestType;
  using zero::LossScale;
  const std::vector<std::pair<LossScale, std::string>> rows{
      {{.scale = 0}, "scale is 0"},
      {{.scale = -2}, "scale is -2"},
      {{.scale = nan}, "scale is"},
      {{.scale = infinity}, "scale is inf"},
      {{.scale = 8, .growth = 0.5}, "growth is 0.5"},
      {{.scale = 8, .growth = nan}, "growth is"},
      {{.scale = 8, .growth = infinity}, "growth is inf"},
      {{.scale = 8, .backoff = 0}, "backoff is 0"},
      {{.scale = 8, .backoff = -0.5}, "backoff is -0.5"},
      {{.scale = 8, .backoff = 1.5}, "backoff is 1.5"},
      {{.scale = 8, .backoff = nan}, "backoff is"},
      {{.scale = 8, .growth = 2, .interval = 0}, "interval is 0"},
      {{.scale = 8, .growth = 2, .interval = -1}, "interval is -1"},
      {{.scale = 8, .growth = 2, .minimum = 0}, "minimum is 0"},
      {{.scale = 8, .growth = 2, .minimum = 16}, "minimum is 16"},
      {{.scale = 8, .growth = 2, .minimum = nan}, "minimum is"},
      {{.scale = 8, .growth = 2, .maximum = 4}, "maximum is 4"},
      {{.scale = 8, .growth = 2, .maximum = infinity}, "maximum is inf"},
      {{.scale = 8, .growth = 2, .maximum = nan}, "maximum is"}};
  for (const auto& [scale, text] : rows) {
    for (const int world : {1, 3}) {
      INFO(text << ", world " << world);
      const auto wrong = scale;
      check_refused(construct<Way>(world, [&](int) { return zero::Settings{.loss_scale = wrong}; }),
                    {"loss scale: " + text});
      // On one rank alone, its refusal is what all say.
      if (world == 1) continue;
      check_refused(construct<Way>(world,
                                   [&](int rank) {
                                     return zero::Settings{
                                         .loss_scale = rank == 1 ? wrong : LossScale::fixed(8)};
                                   }),
                    {"rank 1", "loss scale: " + text});
    }
  }
  for (const int world : {1, 3}) {
    check_refused(construct<Way>(world,
                                 [](int) {
                                   return zero::Settings{.finite_check = zero::FiniteCheck::never,
                                                         .loss_scale = LossScale::dynamic()};
                                 }),
                  {"FiniteCheck::never", "dynamic loss scale", "LossScale::fixed"});
    // Limits are for what moves; a fixed scale may be anything.
    for (const Failure& failure : construct<Way>(
             world, [](int) { return zero::Settings{.loss_scale = LossScale::fixed(0x1p+30)}; })) {
      CHECK(failure.kind == Kind::none);
    }
  }
}

TEMPLATE_LIST_TEST_CASE("ranks with different loss scales are refused", "[agreement]",
                        ranks::TwoWays) {
  using Way = TestType;
  using zero::LossScale;
  const LossScale usual{
      .scale = 8, .growth = 2, .backoff = 0.5, .interval = 5, .minimum = 2, .maximum = 64};
  std::vector<std::optional<LossScale>> others(7, usual);
  others[0]->scale = 16;
  others[1]->growth = 4;
  others[2]->backoff = 0.25;
  others[3]->interval = 6;
  others[4]->minimum = 1;
  others[5]->maximum = 32;
  others[6].reset();
  for (const auto& other : others) {
    check_refused(construct<Way>(4,
                                 [&](int rank) {
                                   return zero::Settings{
                                       .loss_scale = rank == 3 ? other : std::optional(usual)};
                                 }),
                  {"rank 3 differs from rank 0", "settings"});
  }
}

// ---------------------------------------------------------------------------------------------
// Norm and clipping

template <class Way, class T, class... More>
std::vector<Seen> measure(int world, zero::Settings settings, std::size_t bucket_bytes,
                          const std::function<void(Model<T>&, int)>& gradients,
                          std::optional<double> clip, int steps, More... more) {
  return on_ranks<Way, T>(
      world, settings,
      [&](int rank, auto& model, auto& optimizer) {
        Seen mine;
        optimizer.clip_grad_norm(clip);
        for (int step = 0; step < steps; ++step) {
          gradients(model, rank);
          const auto outcome = optimizer.step().outcome();
          if (!outcome.applied) mine.wrong.push_back("skipped");
          if (outcome.gradient_norm.has_value() != clip.has_value()) mine.wrong.push_back("norm");
          mine.numbers.push_back(outcome.gradient_norm.value_or(-1));
        }
        mine.bits = everything(model, optimizer);
        return mine;
      },
      bucket_bytes, more...);
}

template <class Way, class T, class... More>
void check_norms(More... more) {
  constexpr std::size_t sizes[]{16, 64, 1024, std::size_t{zero::PerTensor{}}};
  const auto short_ones = [](Model<T>& model, int) { short_gradients(model, 5); };
  Model<T> model = make_model<T>();
  short_gradients(model, 5);
  double squares = 0;  // exact
  for (const std::size_t i : stepped) {
    for (const T g : model[i].own_gradient()) squares += loaded(g) * loaded(g);
  }
  for (const int world : {1, 2, 4}) {
    for (const std::size_t bytes : sizes) {
      for (const Seen& one : measure<Way, T>(world, {}, bytes, short_ones, infinity, 2, more...)) {
        INFO("world " << world << ", buckets of " << bytes);
        CHECK(one.wrong.empty());
        CHECK(one.numbers == std::vector<double>(2, std::sqrt(squares)));
      }
    }
  }
  const auto any_ones = [](Model<T>& to, int rank) { ranks::draw_gradients(to, rank, 9); };
  for (const int world : {1, 2, 3, 4}) {
    using A = zero::arithmetic_t<T>;
    std::vector<A> sums;
    for (int rank = 0; rank < world; ++rank) {
      ranks::draw_gradients(model, rank, 9);
      std::size_t at = 0;
      for (const std::size_t i : stepped) {
        for (const T g : model[i].own_gradient()) {
          if (rank == 0) {
            sums.push_back(zero::element_traits<T>::load(g));
          } else {
            sums[at] += zero::element_traits<T>::load(g);
          }
          ++at;
        }
      }
    }
    zero::detail::SquareSum exact;
    exact.add(std::span<const A>(sums));
    const double norm = std::sqrt(exact.value()) * (1.0 / world);
    long double by_hand = 0;
    for (const A sum : sums)
      by_hand += static_cast<long double>(sum) * static_cast<long double>(sum);
    CHECK(std::abs(norm - static_cast<double>(std::sqrt(by_hand) / world)) <= 4e-16 * norm);
    for (const std::size_t bytes : sizes) {
      for (const Seen& one : measure<Way, T>(world, {}, bytes, any_ones, infinity, 1, more...)) {
        INFO("world " << world << ", buckets of " << bytes);
        CHECK(one.numbers == std::vector<double>(1, norm));
      }
    }
    // The norm is of what the step uses: a loss scale is taken out, a gradient scale counts.
    const auto scaled = [&](Model<T>& to, int rank) {
      any_ones(to, rank);
      scale_gradients(to, 256);
    };
    for (const Seen& one : measure<Way, T>(world, {.loss_scale = zero::LossScale::fixed(256)}, 64,
                                           scaled, infinity, 1, more...)) {
      CHECK(one.numbers == std::vector<double>(1, norm));
    }
    for (const Seen& one :
         measure<Way, T>(world, {.gradient_scale = -2}, 64, any_ones, infinity, 1, more...)) {
      CHECK(one.numbers == std::vector<double>(1, std::sqrt(exact.value()) * 2));
    }
  }
}

TEMPLATE_LIST_TEST_CASE("a norm has the same bits whatever the layout", "[agreement]", Cases) {
  check_norms<typename TestType::way, typename TestType::element>();
}

TEST_CASE("a norm has the same bits over whole tensors", "[agreement]") {
  check_norms<BucketsStage1, zero::bfloat16>(zero::BalancedPartition{});
}

TEMPLATE_LIST_TEST_CASE("a clipped step is the step with scaled gradients", "[agreement]", Cases) {
  using Way = typename TestType::way;
  using T = typename TestType::element;
  const auto gradients = [](Model<T>& model, int rank) { ranks::draw_gradients(model, rank, 3); };
  for (const int world : {1, 2, 3, 4}) {
    INFO("world " << world);
    const auto run = [&](std::optional<double> clip, std::optional<double> scale = {}) {
      auto seen = measure<Way, T>(world, {.gradient_scale = scale}, 64, gradients, clip, 3);
      check_none_wrong(seen);
      return seen;
    };
    const auto plain = run(std::nullopt);
    const auto measured = run(infinity);
    check_same_bits(measured, plain);
    const double norm = measured[0].numbers[0];
    check_same_bits(run(norm + 1e-3), plain);
    check_same_bits(run(1e30), plain);
    for (const double limit : {norm / 2, norm / 3, 1e-3, norm}) {
      INFO("limit " << limit);
      const double coefficient = limit / (norm + 1e-6);
      REQUIRE(coefficient < 1);
      const auto clipped = run(limit);
      check_same_bits(clipped, run(std::nullopt, 1.0 / world * coefficient));
      for (const Seen& one : clipped) CHECK(one.numbers == measured[0].numbers);  // before clipping
      if (limit <= norm / 2) CHECK((clipped[0].bits != plain[0].bits));
    }
  }
}

TEMPLATE_LIST_TEST_CASE("clipping is switched on and off between steps", "[agreement]", Cases) {
  using Way = typename TestType::way;
  using T = typename TestType::element;
  for (const int world : {1, 2, 3}) {
    INFO("world " << world);
    const auto seen = on_ranks<Way, T>(world, {}, [&](int rank, auto& model, auto& optimizer) {
      Seen mine;
      const auto step = [&](int number) {
        ranks::draw_gradients(model, rank, number);
        return optimizer.step().outcome();
      };
      if (step(0).gradient_norm) mine.wrong.push_back("measured before");
      optimizer.clip_grad_norm(1e9);
      if (!step(1).gradient_norm) mine.wrong.push_back("not measured");
      for (const double wrong : {0.0, -0.0, -1.0, nan, -infinity}) {
        mine.failures.push_back(ranks::attempt([&] { optimizer.clip_grad_norm(wrong); }));
      }
      if (!step(2).gradient_norm) mine.wrong.push_back("a refusal ended it");
      optimizer.clip_grad_norm(std::nullopt);
      if (step(3).gradient_norm) mine.wrong.push_back("measured after");
      if (world > 1) {
        const std::string before = everything(model, optimizer);
        const auto differ = [&](std::optional<double> usual, std::optional<double> other) {
          optimizer.clip_grad_norm(rank == world - 1 ? other : usual);
          ranks::draw_gradients(model, rank, 4);
          const Failure failure = ranks::attempt([&] { optimizer.step(); });
          if (failure.kind != Kind::usage ||
              failure.text.find("rank " + std::to_string(world - 1)) == std::string::npos) {
            mine.wrong.push_back("ranks that differ: " + failure.text);
          }
          if (everything(model, optimizer) != before) mine.wrong.push_back("changed");
        };
        differ(1.0, 2.0);
        differ(infinity, 1.0);
        differ(1.0, std::nullopt);
        differ(std::nullopt, infinity);
        optimizer.clip_grad_norm(std::nullopt);
      }
      step(4);
      mine.bits = everything(model, optimizer);
      return mine;
    });
    const auto plain = on_ranks<Way, T>(world, {}, [&](int rank, auto& model, auto& optimizer) {
      Seen mine;
      for (int step = 0; step < 5; ++step) {
        ranks::draw_gradients(model, rank, step);
        optimizer.step();
      }
      mine.bits = everything(model, optimizer);
      return mine;
    });
    check_none_wrong(seen);
    check_same_bits(seen, plain);
    for (const Seen& one : seen) {
      for (const Failure& failure : one.failures) {
        check_refused({failure}, {"clip_grad_norm", "must be above 0"});
      }
    }
  }
}

TEMPLATE_LIST_TEST_CASE("a norm counts what is stepped, once", "[agreement]", Cases) {
  using Way = typename TestType::way;
  using T = typename TestType::element;
  for (const auto mode : {zero::Gradients::local, zero::Gradients::reduced}) {
    for (const int world : {1, 2, 4}) {
      INFO("world " << world << ", reduced " << (mode == zero::Gradients::reduced));
      const auto seen =
          on_ranks<Way, T>(world, {.gradients = mode}, [&](int rank, auto& model, auto& optimizer) {
            Seen mine;
            optimizer.clip_grad_norm(infinity);
            // Frozen, but with a gradient: never looked at. Nor is the tied one's own.
            model[2].own_gradient().resize(4);
            short_gradients(model, 6);
            for (const std::size_t i : {2, 4}) {
              for (T& g : model[i].own_gradient()) g = stored<T>(nan);
            }
            const auto norm_of = [&](std::initializer_list<std::size_t> counted, double times) {
              double squares = 0;
              for (const std::size_t i : counted) {
                for (const T g : model[i].own_gradient()) squares += loaded(g) * loaded(g);
              }
              return std::sqrt(squares) * times;
            };
            const auto check = [&](const std::string& what, double right) {
              const auto outcome = optimizer.step().outcome();
              if (!outcome.applied || outcome.gradient_norm != right) {
                mine.wrong.push_back(what + ": " +
                                     std::to_string(outcome.gradient_norm.value_or(-1)) + " not " +
                                     std::to_string(right));
              }
            };
            check("all", norm_of({0, 1, 3, 5}, 1));
            const double right = norm_of({0, 1, 5}, 1);
            for (T& g : model[3].own_gradient()) g = stored<T>(nan);
            optimizer.mark_absent(3);
            check("one absent", right);
            if (mode == zero::Gradients::local) {  // only rank 0 has gradients: 1/K of them
              short_gradients(model, 6);
              const double mean = norm_of({0, 1, 3, 5}, 1.0 / world);
              if (rank != 0) {
                for (const std::size_t i : {0, 1, 3, 4, 5}) optimizer.mark_absent(i);
              }
              check("absent elsewhere", mean);
            }
            for (const std::size_t i : {0, 1, 3, 4, 5}) optimizer.mark_absent(i);
            check("all absent", 0);
            return mine;
          });
      check_none_wrong(seen);
    }
  }
}

TEMPLATE_LIST_TEST_CASE("reduced gradients are clipped as they are", "[agreement]", Cases) {
  using Way = typename TestType::way;
  using T = typename TestType::element;
  // The same on all ranks; with local gradients that is the mean, exact for 1, 2 and 4.
  const auto gradients = [](Model<T>& model, int) { short_gradients(model, 11); };
  for (const int world : {1, 2, 4}) {
    INFO("world " << world);
    for (const double limit : {infinity, 1.5}) {
      const auto local = measure<Way, T>(world, {}, 64, gradients, limit, 3);
      const auto reduced =
          measure<Way, T>(world, {.gradients = zero::Gradients::reduced}, 64, gradients, limit, 3);
      check_none_wrong(reduced);
      check_same_bits(reduced, local);
      for (const Seen& one : reduced) CHECK(one.numbers == local[0].numbers);
    }
  }
}

/// Element types known at run time.
struct Typed {
  using Span = std::variant<std::span<float>, std::span<zero::bfloat16>, std::span<double>>;
  std::string label;
  std::vector<std::size_t> extents;
  Span own_values;
  Span own_gradient;
  std::size_t number = 0;
  [[nodiscard]] const std::string& name() const { return label; }
  [[nodiscard]] std::span<const std::size_t> shape() const { return extents; }
  [[nodiscard]] Span values() const { return own_values; }
  [[nodiscard]] Span gradient() const { return own_gradient; }
  [[nodiscard]] std::size_t group() const { return number; }
};

TEMPLATE_LIST_TEST_CASE("parameters of several types have one norm and one decision", "[agreement]",
                        ranks::TwoWays) {
  using Way = TestType;
  for (const int world : {1, 2, 4}) {
    INFO("world " << world);
    std::vector<Seen> seen(static_cast<std::size_t>(world));
    ranks::rethrow_any(ranks::run(world, [&](zero::InProcessCommunicator inner) {
      Seen& mine = seen[static_cast<std::size_t>(inner.rank())];
      std::vector<float> f(19, 1), gf(19, 2);
      std::vector<zero::bfloat16> h(21, zero::bfloat16(1)), gh(21, zero::bfloat16(3));
      std::vector<double> d(7, 1), gd(7, 5);
      std::vector<Typed> store{{"single", {19}, std::span(f), std::span(gf)},
                               {"half", {21}, std::span(h), std::span(gh)},
                               {"twice", {7}, std::span(d), std::span(gd)}};
      auto comm = Way::wrap(inner);
      auto optimizer = Way::optimizer(zero::Sgd{.lr = 1}, store, comm);
      const double norm = std::sqrt(19 * 4.0 + 21 * 9.0 + 7 * 25.0);
      optimizer.clip_grad_norm(infinity);
      if (optimizer.step().outcome().gradient_norm != norm) mine.wrong.push_back("norm");
      if (f[18] != -1 || static_cast<float>(h[20]) != -2 || d[6] != -4)
        mine.wrong.push_back("step");
      optimizer.clip_grad_norm(norm / 4);
      optimizer.step();
      const double c = norm / 4 / (norm + 1e-6);
      const double scale = 1.0 / world * c;
      const float right_f = -1 - 2.0F * static_cast<float>(world) * static_cast<float>(scale);
      const float right_h = -2 - 3.0F * static_cast<float>(world) * static_cast<float>(scale);
      if (f[18] != right_f || h[20].bits != zero::bfloat16(right_h).bits ||
          d[6] != -4 - 5.0 * world * scale) {
        mine.wrong.push_back("clipped step");
      }
      // One that is not finite skips all of them.
      const auto skipped = [&](const char* what) {
        const auto before = std::tuple(f, ranks::bytes_of(std::span(h)), d);
        const auto outcome = optimizer.step().outcome();
        if (outcome.applied || std::tuple(f, ranks::bytes_of(std::span(h)), d) != before) {
          mine.wrong.push_back(what);
        }
      };
      const bool last = inner.rank() == world - 1;
      for (const bool clips : {true, false}) {
        if (!clips) optimizer.clip_grad_norm(std::nullopt);  // a 16-bit lane is there: checked
        if (last) gf[0] = static_cast<float>(nan);
        skipped("float");
        gf[0] = 2;
        if (last) gh[20] = stored<zero::bfloat16>(infinity);
        skipped("bfloat16");
        gh[20] = zero::bfloat16(3);
        if (last) gd[6] = -infinity;
        skipped("double");
        gd[6] = 5;
      }
      if (!optimizer.step().outcome().applied) mine.wrong.push_back("last step");
    }));
    check_none_wrong(seen);
  }
}

// ---------------------------------------------------------------------------------------------
// Accumulation

TEMPLATE_LIST_TEST_CASE("micro-steps add up to one step", "[agreement]", Cases) {
  using Way = typename TestType::way;
  using T = typename TestType::element;
  constexpr std::uint32_t micro = 4;
  const auto seed = [](int rank, int step, std::uint32_t part) {
    return static_cast<std::uint32_t>(100 * rank + 10 * step) + part;
  };
  for (const int world : {1, 2, 3, 4}) {
    INFO("world " << world);
    // All steps but the last backward within the scope; marks there say nothing.
    const auto accumulated =
        on_ranks<Way, T>(world, {}, [&](int rank, auto& model, auto& optimizer) {
          Seen mine;
          Model<T> part = make_model<T>();
          for (int step = 0; step < 3; ++step) {
            for (auto& tensor : model) {  // stale: the first lease overwrites
              std::fill(tensor.own_gradient().begin(), tensor.own_gradient().end(), stored<T>(nan));
            }
            const auto backward = [&](std::uint32_t p) {
              short_gradients(part, seed(rank, step, p), 15);
              for (const std::size_t i : {5, 3, 1, 0}) {
                {
                  auto lease = optimizer.gradient(i);
                  const std::span<T> to = lease.values();
                  if (lease.adds() != (p != 0)) mine.wrong.push_back("adds");
                  for (std::size_t k = 0; k < to.size(); ++k) {
                    const double before = lease.adds() ? loaded(to[k]) : 0;
                    to[k] = stored<T>(before + loaded(part[i].own_gradient()[k]));
                  }
                }
                optimizer.mark_ready(i);
              }
              optimizer.mark_absent(4);
            };
            {
              const auto scope = optimizer.accumulate();
              for (std::uint32_t p = 0; p + 1 < micro; ++p) backward(p);
            }
            backward(micro - 1);
            if (!optimizer.step().outcome().applied) mine.wrong.push_back("skipped");
          }
          mine.bits = everything(model, optimizer);
          return mine;
        });
    const auto at_once = on_ranks<Way, T>(world, {}, [&](int rank, auto& model, auto& optimizer) {
      Seen mine;
      Model<T> part = make_model<T>();
      for (int step = 0; step < 3; ++step) {
        for (std::uint32_t p = 0; p < micro; ++p) {
          short_gradients(part, seed(rank, step, p), 15);
          for (const std::size_t i : stepped) {
            for (std::size_t k = 0; k < part[i].own_gradient().size(); ++k) {
              T& sum = model[i].own_gradient()[k];
              sum = stored<T>((p == 0 ? 0 : loaded(sum)) + loaded(part[i].own_gradient()[k]));
            }
          }
        }
        optimizer.step();
      }
      mine.bits = everything(model, optimizer);
      return mine;
    });
    check_none_wrong(accumulated);
    check_same_bits(accumulated, at_once);
  }
}

TEMPLATE_LIST_TEST_CASE("marks while accumulating are checked and otherwise ignored", "[agreement]",
                        ranks::TwoWays) {
  using Way = TestType;
  for (const int world : {1, 2, 4}) {
    INFO("world " << world);
    const auto seen = on_ranks<Way, float>(world, {}, [&](int rank, auto& model, auto& optimizer) {
      Seen mine;
      ranks::draw_gradients(model, rank, 0);
      const auto refuses = [&](const std::string& text, auto f) {
        const Failure failure = ranks::attempt(f);
        if (failure.kind != Kind::usage || failure.text.find(text) == std::string::npos) {
          mine.wrong.push_back(text + ": " + failure.text);
        }
      };
      {
        auto scope = optimizer.accumulate();
        const auto moved = std::move(scope);
        refuses("no parameter 6", [&] { optimizer.mark_ready(6); });
        refuses("frozen", [&] { optimizer.mark_absent(2); });
        {
          const auto lease = optimizer.gradient(0);
          refuses("leased", [&] { optimizer.mark_ready(0); });
        }
        auto& gradient = model[1].own_gradient();
        gradient.resize(2);
        refuses("2 elements", [&] { optimizer.mark_ready(1); });
        gradient.clear();
        refuses("null gradient", [&] { optimizer.mark_ready(1); });
        gradient.assign(3, 1.0F);
        for (int micro = 0; micro < 2; ++micro) {  // again and again
          for (const std::size_t i : stepped) optimizer.mark_ready(i);
          optimizer.mark_ready(4);
        }
        optimizer.mark_absent(5);
      }
      // What was said within counts for nothing: not for presence, either.
      for (const std::size_t i : {3, 1}) optimizer.mark_absent(i);
      for (const std::size_t i : {5, 4, 0}) optimizer.mark_ready(i);
      optimizer.step();
      for (const std::size_t i : stepped) {
        mine.numbers.push_back(static_cast<double>(optimizer.steps(i)));
      }
      return mine;
    });
    check_none_wrong(seen);
    for (const Seen& one : seen) CHECK(one.numbers == std::vector<double>{1, 0, 0, 1});
  }
}

TEMPLATE_LIST_TEST_CASE("accumulation is refused where it makes no sense", "[agreement]", Cases) {
  using Way = typename TestType::way;
  using T = typename TestType::element;
  for (const int world : {1, 2, 4}) {
    for (const int culprit : {-1, world - 1}) {
      INFO("world " << world << ", culprit " << culprit);
      const auto seen = on_ranks<Way, T>(world, {}, [&](int rank, auto& model, auto& optimizer) {
        Seen mine;
        ranks::draw_gradients(model, rank, 0);
        const std::string before = everything(model, optimizer);
        {
          using Scope = decltype(optimizer.accumulate());
          std::optional<Scope> scope;
          if (culprit == -1 || rank == culprit) scope.emplace(optimizer.accumulate());
          mine.failures.push_back(ranks::attempt([&] { optimizer.step(); }));
          if (everything(model, optimizer) != before) mine.wrong.push_back("changed");
          if (scope) {
            const Failure nested = ranks::attempt([&] { (void)optimizer.accumulate(); });
            if (nested.kind != Kind::usage ||
                nested.text.find("already accumulating") == std::string::npos) {
              mine.wrong.push_back("nested: " + nested.text);
            }
          }
          // Still within the scope.
          mine.failures.push_back(ranks::attempt([&] { optimizer.step(); }));
          if (everything(model, optimizer) != before) mine.wrong.push_back("changed later");
        }
        optimizer.mark_ready(3);
        const Failure marked = ranks::attempt([&] { (void)optimizer.accumulate(); });
        if (marked.kind != Kind::usage || marked.text.find("marked already") == std::string::npos) {
          mine.wrong.push_back("marked: " + marked.text);
        }
        optimizer.step();
        mine.bits = everything(model, optimizer);
        return mine;
      });
      const auto plain = on_ranks<Way, T>(world, {}, [&](int rank, auto& model, auto& optimizer) {
        Seen mine;
        ranks::draw_gradients(model, rank, 0);
        optimizer.step();
        mine.bits = everything(model, optimizer);
        return mine;
      });
      check_none_wrong(seen);
      check_same_bits(seen, plain);
      for (std::size_t k = 0; k < 2; ++k) {
        std::vector<Failure> failures;
        for (const Seen& one : seen) failures.push_back(one.failures[k]);
        Texts wanted{"still accumulating"};
        if (world > 1) wanted.push_back("rank " + std::to_string(std::max(culprit, 0)));
        check_refused(failures, wanted);
      }
    }
  }
}

// ---------------------------------------------------------------------------------------------
// Groups added later

/// A tensor whose values and gradient may be moved.
template <class T>
class Movable {
 public:
  Movable(std::string name, std::vector<std::size_t> shape, std::size_t group,
          zero::Attributes attributes = {})
      : name_(std::move(name)), shape_(std::move(shape)), group_(group), attributes_(attributes) {
    std::size_t elements = 1;
    for (const std::size_t extent : shape_) elements *= extent;
    const auto make = [&](std::span<T>& span, std::shared_ptr<const void>& owner) {
      auto memory = std::make_shared<std::vector<T>>(elements);
      span = *memory;
      owner = std::move(memory);
    };
    make(values_, values_owner_);
    if (!attributes.frozen) make(gradient_, gradient_owner_);
    std::uint32_t seed = 0;
    for (const char c : name_) seed = 31 * seed + static_cast<std::uint32_t>(c);
    ranks::Draw(seed).fill(values_);
  }
  [[nodiscard]] const std::string& name() const { return name_; }
  [[nodiscard]] std::span<const std::size_t> shape() const { return shape_; }
  [[nodiscard]] std::span<T> values() const { return values_; }
  [[nodiscard]] std::span<T> gradient() const { return gradient_; }
  [[nodiscard]] std::size_t group() const { return group_; }
  [[nodiscard]] const zero::Attributes& attributes() const { return attributes_; }
  void rebind(std::span<T> values, std::shared_ptr<const void> owner) {
    values_ = values;
    values_owner_ = std::move(owner);
  }
  void rebind_gradient(std::span<T> gradient, std::shared_ptr<const void> owner) {
    gradient_ = gradient;
    gradient_owner_ = std::move(owner);
  }
  void draw_gradient(int rank, int step) {
    std::uint32_t seed = static_cast<std::uint32_t>(rank + 100 * step);
    for (const char c : name_) seed = 31 * seed + static_cast<std::uint32_t>(c);
    ranks::Draw(seed).fill(gradient_);
  }
  /// For a tied parameter without a view that moves it.
  void take_values(const Movable& other) {
    values_ = other.values_;
    values_owner_ = other.values_owner_;
  }

 private:
  std::string name_;
  std::vector<std::size_t> shape_;
  std::size_t group_;
  zero::Attributes attributes_;
  std::shared_ptr<const void> values_owner_{}, gradient_owner_{};
  std::span<T> values_{}, gradient_{};
};

template <class T>
using Store = std::vector<Movable<T>>;

/// The g-th group's parameters. The third ties two new ones, and freezes one.
template <class T>
void add_group(Store<T>& store, std::size_t g) {
  using Shape = std::vector<std::size_t>;
  if (g == 0) {
    store.emplace_back("embed", Shape{7, 5}, g);
    store.emplace_back("bias", Shape{3}, g);
  } else if (g == 1) {
    store.emplace_back("dense", Shape{13}, g);
    store.emplace_back("scale", Shape{}, g);
    store.emplace_back("none", Shape{0}, g);
  } else {
    store.emplace_back("late", Shape{41}, g);
    store.emplace_back("fixed", Shape{5}, g, zero::Attributes{.frozen = true});
    store.emplace_back("tied", Shape{41}, g, zero::Attributes{.alias = store.size() - 2});
    store.back().take_values(store[store.size() - 3]);
  }
}

/// Without state, with momentum, and with another.
const std::vector<zero::Sgd> group_rules{{.lr = 0.5},
                                         {.lr = 0.25, .momentum = 0.5},
                                         {.lr = 0.125, .momentum = 0.75, .weight_decay = 0.25}};

/// What a run leaves on one rank. Slices by "name.slot" and where they begin.
struct Grown {
  std::vector<std::string> values{};
  std::vector<std::int64_t> counts{};
  std::map<std::string, std::map<std::size_t, std::string>> slices{};
  std::vector<std::string> wrong{};
  std::int64_t steps = 0;
  std::size_t groups = 0;
};

/// All ranks' slices put together, each element as often as it is kept.
std::map<std::string, std::string> together(const std::vector<Grown>& ranks_of, bool sharded) {
  std::map<std::string, std::map<std::size_t, std::string>> all;
  for (const Grown& one : ranks_of) {
    for (const auto& [key, parts] : one.slices) all[key].insert(parts.begin(), parts.end());
    if (!sharded) break;
  }
  std::map<std::string, std::string> whole;
  for (const auto& [key, parts] : all) {
    for (const auto& [begin, bytes] : parts) {
      if (whole[key].size() != begin) whole[key] += "a gap or an overlap";
      whole[key] += bytes;
    }
  }
  return whole;
}

constexpr int grown_steps = 8;
constexpr int added_before[]{0, 3, 5};  ///< the step before which each group comes

template <class Way, class T, class... More>
std::vector<Grown> grow(int world, bool at_once, bool reserves, zero::Settings settings = {},
                        std::optional<double> clip = {}, More... more) {
  std::vector<Grown> grown(static_cast<std::size_t>(world));
  ranks::rethrow_any(ranks::run(world, [&](zero::InProcessCommunicator inner) {
    Grown& mine = grown[static_cast<std::size_t>(inner.rank())];
    Store<T> store;
    if (reserves) store.reserve(16);
    for (std::size_t g = 0; g < (at_once ? 3 : 1); ++g) add_group(store, g);
    std::vector<zero::Sgd> rules(group_rules.begin(), group_rules.begin() + (at_once ? 3 : 1));
    auto comm = Way::wrap(inner);
    auto optimizer =
        Way::optimizer(zero::Groups<zero::Sgd>(rules), store, comm, settings, 64, More(more)...);
    optimizer.clip_grad_norm(clip);
    for (int step = 0; step < grown_steps; ++step) {
      const std::size_t before = store.size();
      for (auto& tensor : store) tensor.draw_gradient(inner.rank(), step);  // kept when moved
      if (!at_once) {
        for (std::size_t g = 1; g < 3; ++g) {
          if (step != added_before[g]) continue;
          std::vector<std::array<std::size_t, 3>> places;
          const auto place = [&](std::size_t i) {
            const auto& at = optimizer.layout().place(i);
            const auto buckets = optimizer.layout().buckets_of(i);
            return std::array<std::size_t, 3>{at.offset, buckets.begin, buckets.end};
          };
          for (std::size_t i = 0; i < before; ++i) places.push_back(place(i));
          const std::size_t owned = optimizer.state().size();
          add_group(store, g);
          optimizer.add_param_group(group_rules[g]);
          for (std::size_t i = 0; i < before; ++i) {
            if (place(i) != places[i]) mine.wrong.push_back("moved " + std::to_string(i));
          }
          if (optimizer.layout().parameters() != store.size() || optimizer.steps() != step ||
              optimizer.groups().size() != g + 1 || optimizer.group(g).lr != group_rules[g].lr ||
              optimizer.state().size() < owned) {
            mine.wrong.push_back("group " + std::to_string(g));
          }
          for (std::size_t i = before; i < store.size(); ++i) {
            if (optimizer.steps(i) != 0) mine.wrong.push_back("stepped " + std::to_string(i));
            store[i].draw_gradient(inner.rank(), step);
          }
        }
      } else {
        for (std::size_t i = 0; i < store.size(); ++i) {
          const bool there = step >= added_before[store[i].group()];
          if (!there && !store[i].attributes().frozen) optimizer.mark_absent(i);
        }
      }
      const auto outcome = optimizer.step().outcome();
      if (!outcome.applied || outcome.step != step + 1) mine.wrong.push_back("step");
    }
    for (std::size_t i = 0; i < store.size(); ++i) {
      mine.values.push_back(ranks::bytes_of(store[i].values()));
      mine.counts.push_back(optimizer.steps(i));
    }
    mine.steps = optimizer.steps();
    mine.groups = optimizer.groups().size();
    const auto keep = [&](const auto& slices) {
      for (const auto& slice : slices) {
        auto& parts = mine.slices[std::string(slice.parameter) + "." + std::string(slice.slot)];
        const std::size_t begin = slice.elements.begin * sizeof slice.values[0];
        if (!parts.emplace(begin, ranks::bytes_of(slice.values)).second) {
          mine.wrong.push_back("a slice twice");
        }
      }
    };
    keep(optimizer.state());
    keep(optimizer.masters());
  }));
  return grown;
}

// Every way, view and type once.
using GrowingCases =
    std::tuple<Case<SharedStage1, float>, Case<BucketsReplicated, double>,
               Case<ranks::Way<true, zero::Replicated, zero::ParamView>, zero::bfloat16>,
               Case<ranks::Way<false, zero::Stage1, zero::ParamAndGradView>, zero::float16>>;

template <class Way, class T, class... More>
void check_growth(More... more) {
  const bool sharded = Way::stage::shards_state;
  for (const int world : {1, 2, 3, 4}) {
    for (const bool looks : {false, true}) {
      zero::Settings settings;
      if (looks) settings.loss_scale = zero::LossScale::fixed(2);
      const std::optional<double> clip = looks ? std::optional(0.75) : std::nullopt;
      const auto right = grow<Way, T>(world, true, true, settings, clip, more...);
      const auto state = together(right, sharded);
      CHECK(state.size() == (sizeof(T) == 2 ? 10 : 5));  // nothing of "none", frozen, tied
      for (const bool reserves : {true, false}) {
        INFO("world " << world << ", looks " << looks << ", reserves " << reserves);
        const auto grown = grow<Way, T>(world, false, reserves, settings, clip, more...);
        CHECK((together(grown, sharded) == state));
        for (std::size_t r = 0; r < grown.size(); ++r) {
          INFO("rank " << r);
          CHECK(grown[r].wrong == std::vector<std::string>{});
          CHECK(right[r].wrong == std::vector<std::string>{});
          CHECK((grown[r].values == right[r].values));
          CHECK(grown[r].counts == right[r].counts);
          CHECK(grown[r].counts == std::vector<std::int64_t>{8, 8, 5, 5, 0, 3, 0, 3});
          CHECK(grown[r].steps == grown_steps);
          CHECK(grown[r].groups == 3);
          if (!sharded) CHECK((grown[r].slices == grown[0].slices));
        }
      }
    }
  }
}

TEMPLATE_LIST_TEST_CASE("groups added later are as if they had been absent", "[agreement]",
                        GrowingCases) {
  check_growth<typename TestType::way, typename TestType::element>();
}

TEST_CASE("groups of whole tensors added later are, too", "[agreement]") {
  check_growth<BucketsStage1, float>(zero::BalancedPartition{});
}

TEMPLATE_LIST_TEST_CASE("once 16-bit parameters are added, gradients are checked", "[agreement]",
                        ranks::TwoWays) {
  using Way = TestType;
  for (const int world : {1, 3}) {
    INFO("world " << world);
    std::vector<Seen> seen(static_cast<std::size_t>(world));
    ranks::rethrow_any(ranks::run(world, [&](zero::InProcessCommunicator inner) {
      Seen& mine = seen[static_cast<std::size_t>(inner.rank())];
      std::vector<float> f(19, 1), gf(19, 2);
      std::vector<zero::bfloat16> h(21, zero::bfloat16(1)), gh(21, zero::bfloat16(3));
      std::vector<Typed> store{{"single", {19}, std::span(f), std::span(gf)}};
      auto comm = Way::wrap(inner);
      auto optimizer = Way::optimizer(zero::Sgd{.lr = 1}, store, comm);
      optimizer.step();
      store.push_back({"half", {21}, std::span(h), std::span(gh), 1});
      optimizer.add_param_group({.lr = 0.5});
      if (inner.rank() == world - 1) gf[18] = static_cast<float>(nan);
      if (optimizer.step().outcome().applied) mine.wrong.push_back("applied");
      gf[18] = 2;
      if (!optimizer.step().outcome().applied) mine.wrong.push_back("skipped");
      if (f[18] != -3 || static_cast<float>(h[20]) != -0.5F) mine.wrong.push_back("values");
    }));
    check_none_wrong(seen);
  }
}

TEMPLATE_LIST_TEST_CASE("a vector of references grows and may move", "[agreement]",
                        ranks::TwoWays) {
  using Way = TestType;
  for (const int world : {1, 3}) {
    std::vector<std::string> bits[3];
    for (std::size_t run = 0; run < 3; ++run) {  // reserved, grown in place of it, at once
      bits[run].resize(static_cast<std::size_t>(world));
      ranks::rethrow_any(ranks::run(world, [&](zero::InProcessCommunicator inner) {
        std::vector<std::vector<float>> values{std::vector<float>(11, 1), std::vector<float>(6, 2)};
        std::vector<std::vector<float>> gradients = values;
        std::vector<zero::ParamRef<float>> store;
        if (run == 0) store.reserve(8);
        store.emplace_back("a", values[0], gradients[0]);
        if (run != 0) store.shrink_to_fit();
        std::vector<zero::Sgd> rules{group_rules[0]};
        const auto second = [&] {
          store.emplace_back("b", values[1], gradients[1], zero::Attributes{}, 1);
        };
        if (run == 2) second(), rules.push_back(group_rules[1]);
        auto comm = Way::wrap(inner);
        auto optimizer = Way::optimizer(zero::Groups<zero::Sgd>(rules), store, comm);
        for (int step = 0; step < 4; ++step) {
          if (run == 2 && step < 2) optimizer.mark_absent(1);
          if (run != 2 && step == 2) {
            second();
            optimizer.add_param_group(group_rules[1]);
          }
          for (auto& gradient : gradients) {
            ranks::Draw(static_cast<std::uint32_t>(step + 10 * inner.rank()))
                .fill(std::span<float>(gradient));
          }
          optimizer.step();
        }
        bits[run][static_cast<std::size_t>(inner.rank())] =
            ranks::bytes_of(std::span(values[0])) + ranks::bytes_of(std::span(values[1]));
      }));
    }
    CHECK((bits[0] == bits[2]));
    CHECK((bits[1] == bits[2]));
  }
}

/// What spoils an addition: how the store is grown, and with which options.
struct Addition {
  std::string title{};
  std::function<void(Model<float>&)> grow{};
  Texts wanted{};
  zero::Sgd options{.lr = 0.25, .momentum = 0.5};
  bool only_alone = false;  ///< wrong only where the other ranks do right
  bool keeps_old = true;    ///< whether the old parameters are shown as before
};

void grow_rightly(Model<float>& model) {
  model.emplace_back("late", std::vector<std::size_t>{9}, zero::Attributes{}, 1);
  ranks::Draw(99).fill(model.back().values());
}

TEMPLATE_LIST_TEST_CASE("an addition that is refused changes nothing", "[agreement]",
                        ranks::TwoWays) {
  using Way = TestType;
  using Shape = std::vector<std::size_t>;
  const auto late = [](std::string name, Shape shape, zero::Attributes attributes,
                       std::size_t group, std::uint32_t seed = 99) {
    return [=](Model<float>& model) {
      model.emplace_back(name, shape, attributes, group);
      ranks::Draw(seed).fill(model.back().values());
    };
  };
  const std::string rank_differs = "differs from rank 0";
  const std::vector<Addition> additions{
      {"nothing new", [](Model<float>&) {}, {"6 parameters", "as many as before"}},
      {"fewer", [](Model<float>& model) { model.pop_back(); }, {"5 parameters"}, {}, false, false},
      {"an old group", late("late", {9}, {}, 0), {"'late'", "group 0", "forms group 1"}},
      {"a later group", late("late", {9}, {}, 2), {"'late'", "group 2"}},
      {"a name twice", late("dense", {9}, {}, 1), {"parameter 6 ('dense')", "unique"}},
      {"a quantum of 0", late("late", {9}, {.quantum = 0}, 1), {"'late'", "quantum is 0"}},
      {"tied to an old one", late("late", {3}, {.alias = 1}, 1), {"'late'", "another group"}},
      {"an alias of nothing", late("late", {3}, {.alias = 9}, 1), {"'late'", "earlier"}},
      {"a tie of new ones that don't share memory",
       [](Model<float>& model) {
         grow_rightly(model);
         model.emplace_back("tie", Shape{9}, zero::Attributes{.alias = 6}, 1);
       },
       {"parameter 7 ('tie')", "tied to parameter 6 ('late')", "other memory"}},
      {"overlapping an owned one",
       [](Model<float>& model) {
         grow_rightly(model);
         model.back().take_values(model[0].values().subspan(20, 9));
       },
       {"'late'", "overlaps parameter 0 ('embed')"}},
      {"overlapping a frozen one",
       [](Model<float>& model) {
         model.emplace_back("late", Shape{2}, zero::Attributes{}, 1);
         model.back().take_values(model[2].values().subspan(1, 2));
       },
       {"'late'", "overlaps parameter 2 ('fixed')"}},
      {"null values",
       [](Model<float>& model) {
         grow_rightly(model);
         model.back().take_values(std::span<float>(static_cast<float*>(nullptr), 9));
       },
       {"'late'", "null values"}},
      {"a shape that doesn't fit",
       [](Model<float>& model) {
         grow_rightly(model);
         model.back().take_values(model.back().values().first(8));
       },
       {"'late'", "8 values", "holds 9"}},
      {"in front of an old one",
       [](Model<float>& model) {
         model.emplace(model.begin() + 5, "late", Shape{}, zero::Attributes{}, 0);
       },
       {"parameter 5 ('late')", "'scale'", "at its end"},
       {},
       false,
       false},
      {"options without sense", grow_rightly, {"lr"}, {.lr = -1}},
      {"other values",
       late("late", {9}, {}, 1, 98),
       {rank_differs, "parameter 6 ('late')", "values"},
       {},
       true},
      {"another shape",
       late("late", {3, 3}, {}, 1),
       {rank_differs, "parameter 6 ('late')", "shape"},
       {},
       true},
      {"more elements",
       late("late", {10}, {}, 1),
       {rank_differs, "parameter 6 ('late')", "10 elements, not 9"},
       {},
       true},
      {"another name",
       late("latest", {9}, {}, 1),
       {rank_differs, "parameter 6 ('late')", "name"},
       {},
       true},
      {"another attribute",
       late("late", {9}, {.unsplittable = true}, 1),
       {rank_differs, "parameter 6 ('late')", "attribute"},
       {},
       true},
      {"one more",
       [](Model<float>& model) {
         grow_rightly(model);
         model.emplace_back("latest", Shape{2}, zero::Attributes{}, 1);
       },
       {rank_differs, "2 parameters, not 1"},
       {},
       true},
  };
  for (const Addition& addition : additions) {
    for (const int world : {1, 2, 4}) {
      for (const int culprit : {-1, world - 1}) {
        if (addition.only_alone && (culprit == -1 || world == 1)) continue;
        INFO(addition.title << ", world " << world << ", culprit " << culprit);
        const auto run = [&](bool spoils) {
          return on_ranks<Way, float>(world, {}, [&](int rank, auto& model, auto& optimizer) {
            Seen mine;
            const auto step = [&](int number) {
              ranks::draw_gradients(model, rank, number);
              if (!optimizer.step().outcome().applied) mine.wrong.push_back("skipped");
            };
            step(0);
            if (spoils) {
              const Model<float> saved = model;  // shows the same memory
              const std::string before = everything(model, optimizer, 6);
              const bool guilty = culprit == -1 || rank == culprit;
              if (guilty) {
                addition.grow(model);
              } else {
                grow_rightly(model);
              }
              const zero::Sgd options = guilty ? addition.options : Addition{}.options;
              mine.failures.push_back(ranks::attempt([&] { optimizer.add_param_group(options); }));
              if (optimizer.groups().size() != 1 || optimizer.layout().parameters() != 6 ||
                  (addition.keeps_old && everything(model, optimizer, 6) != before)) {
                mine.wrong.push_back("changed");
              }
              if (!addition.keeps_old) model = saved;
              model.erase(model.begin() + 6, model.end());
              step(1);
            } else {
              step(1);
            }
            grow_rightly(model);
            optimizer.add_param_group({.lr = 0.25, .momentum = 0.5});
            step(2);
            mine.bits = everything(model, optimizer);
            return mine;
          });
        };
        const auto spoilt = run(true);
        const auto plain = run(false);
        check_none_wrong(spoilt);
        check_none_wrong(plain);
        check_same_bits(spoilt, plain);
        std::vector<Failure> failures;
        for (const Seen& one : spoilt) failures.push_back(one.failures.at(0));
        Texts wanted = addition.wanted;
        if (world > 1) wanted.push_back("rank " + std::to_string(std::max(culprit, 0)));
        check_refused(failures, wanted);
      }
    }
  }
}

TEMPLATE_LIST_TEST_CASE("a group that needs more state on one rank only is refused", "[agreement]",
                        ranks::TwoWays) {
  using Way = TestType;
  for (const int world : {2, 4}) {
    std::vector<Seen> seen(static_cast<std::size_t>(world));
    ranks::rethrow_any(ranks::run(world, [&](zero::InProcessCommunicator inner) {
      Seen& mine = seen[static_cast<std::size_t>(inner.rank())];
      Model<float> model = make_model<float>();
      auto comm = Way::wrap(inner);
      auto optimizer = Way::optimizer(zero::Sgd{.lr = 0.5}, model, comm);
      grow_rightly(model);
      const double momentum = inner.rank() == 1 ? 0.5 : 0;
      mine.failures.push_back(
          ranks::attempt([&] { optimizer.add_param_group({.lr = 0.25, .momentum = momentum}); }));
      if (!optimizer.state().empty()) mine.wrong.push_back("state");
      model.pop_back();
      ranks::draw_gradients(model, inner.rank(), 0);
      optimizer.step();
      grow_rightly(model);
      optimizer.add_param_group({.lr = 0.25, .momentum = 0.5});
      optimizer.step();
      if (optimizer.steps(0) != 2 || optimizer.steps(6) != 1) mine.wrong.push_back("steps");
    }));
    check_none_wrong(seen);
    std::vector<Failure> failures;
    for (const Seen& one : seen) failures.push_back(one.failures.at(0));
    check_refused(failures, {"add_param_group", "rank 1 differs from rank 0", "momentum"});
  }
}

TEMPLATE_LIST_TEST_CASE("ranks that add to different optimizers are refused", "[agreement]",
                        ranks::TwoWays) {
  using Way = TestType;
  for (const int world : {2, 4}) {
    std::vector<Seen> seen(static_cast<std::size_t>(world));
    ranks::rethrow_any(ranks::run(world, [&](zero::InProcessCommunicator inner) {
      Seen& mine = seen[static_cast<std::size_t>(inner.rank())];
      const int last = world - 1;
      Model<float> large, small;  // of other sizes, in as many buckets
      large.emplace_back("w", std::vector<std::size_t>{400});
      small.emplace_back("w", std::vector<std::size_t>{397});
      auto comm = Way::wrap(inner);
      auto first = Way::optimizer(rule, large, comm);
      auto second = Way::optimizer(rule, small, comm);
      grow_rightly(large);
      grow_rightly(small);
      mine.failures.push_back(ranks::attempt([&] {
        if (inner.rank() == last) {
          second.add_param_group(rule);
        } else {
          first.add_param_group(rule);
        }
      }));
      first.add_param_group(rule);
      second.add_param_group(rule);
      first.step();
      second.step();
      if (first.steps(1) != 1 || second.steps(1) != 1) mine.wrong.push_back("steps");
    }));
    check_none_wrong(seen);
    std::vector<Failure> failures;
    for (const Seen& one : seen) failures.push_back(one.failures.at(0));
    check_refused(failures, {"add_param_group", "rank " + std::to_string(world - 1),
                             "another optimizer of the communicator"});
  }
}

TEMPLATE_LIST_TEST_CASE("nothing is added while gradients are marked or leased", "[agreement]",
                        ranks::TwoWays) {
  using Way = TestType;
  for (const bool leases : {false, true}) {
    for (const int world : {1, 2, 4}) {
      for (const int culprit : {-1, world - 1}) {
        INFO("leases " << leases << ", world " << world << ", culprit " << culprit);
        const auto run = [&](bool spoils) {
          return on_ranks<Way, float>(world, {}, [&](int rank, auto& model, auto& optimizer) {
            Seen mine;
            ranks::draw_gradients(model, rank, 0);
            const bool guilty = spoils && (culprit == -1 || rank == culprit);
            if (spoils) {
              grow_rightly(model);
              const auto add = [&] {
                mine.failures.push_back(
                    ranks::attempt([&] { optimizer.add_param_group({.lr = 0.25}); }));
              };
              if (guilty && leases) {
                const auto lease = optimizer.gradient(3);
                add();
              } else {
                if (guilty) {
                  for (const std::size_t i : {5, 4, 3}) optimizer.mark_ready(i);
                }
                add();
              }
              model.pop_back();
            }
            if (!optimizer.step().outcome().applied) mine.wrong.push_back("skipped");
            grow_rightly(model);
            optimizer.add_param_group({.lr = 0.25});
            ranks::draw_gradients(model, rank, 1);
            optimizer.step();
            mine.bits = everything(model, optimizer);
            return mine;
          });
        };
        const auto spoilt = run(true);
        check_none_wrong(spoilt);
        check_same_bits(spoilt, run(false));
        std::vector<Failure> failures;
        for (const Seen& one : spoilt) failures.push_back(one.failures.at(0));
        check_refused(failures, {"add_param_group", "between steps"});
      }
    }
  }
}

}  // namespace
