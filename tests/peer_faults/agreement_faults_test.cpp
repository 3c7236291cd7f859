// SPDX-License-Identifier: Apache-2.0
// Faults in the agreement between ranks that other projects shipped, with their inputs and the
// right values. DS is DeepSpeed, FS fairscale, LC llm.c, PT pytorch/pytorch.
#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "../plain_update.hpp"
#include "../ranks.hpp"
#include "catch.hpp"
#include "zero/bfloat16.hpp"
#include "zero/detail/rank_order_sum.hpp"
#include "zero/detail/storage.hpp"
#include "zero/detail/update_loop.hpp"
#include "zero/float16.hpp"
#include "zero/observer.hpp"
#include "zero/optim/adam.hpp"
#include "zero/optim/sgd.hpp"
#include "zero/optimizer.hpp"
#include "zero/partition/balanced.hpp"
#include "zero/precision.hpp"

namespace {

using namespace std::chrono_literals;
using ranks::Failure;
using ranks::Model;
using Kind = ranks::Failure::Kind;
using Clock = std::chrono::steady_clock;

/// Whether rank `rank` has a gradient of parameter `i` in step `step`.
using Present = bool (*)(int rank, int step, std::size_t i);
constexpr Present always = [](int, int, std::size_t) { return true; };

/// What training leaves behind. State by "name.slot", whole tensors.
struct Trained {
  std::vector<std::vector<float>> values{};
  std::map<std::string, std::vector<float>> state{};
  std::vector<std::int64_t> steps{};
  [[maybe_unused]] friend bool operator==(const Trained&,
                                          const Trained&) = default;  // no NaN, no negative zero
};

/// The rule on whole tensors, over gradients summed in rank order by a plain loop.
template <class Rule>
Trained serial(const Model<>& shapes, const std::vector<Rule>& groups, int world, int steps,
               Present present = always) {
  constexpr std::size_t slot_count = Rule::slots.size();
  Model<> model = shapes;
  const std::size_t count = model.size();
  Trained trained;
  std::vector<std::array<std::vector<float>, slot_count>> state(count);
  trained.steps.assign(count, 0);
  std::size_t used = 0;
  for (const Rule& group : groups) used = std::max(used, zero::used_slots(group));
  for (std::size_t i = 0; i < count; ++i) {
    trained.values.emplace_back(model[i].values().begin(), model[i].values().end());
    for (auto& slot : state[i]) slot.assign(trained.values[i].size(), 0.0F);
  }
  for (int step = 0; step < steps; ++step) {
    std::vector<std::vector<float>> sums(count);
    std::vector<bool> anywhere(count, false);
    for (int rank = 0; rank < world; ++rank) {
      ranks::draw_gradients(model, rank, step);
      for (std::size_t i = 0; i < count; ++i) {
        std::vector<float> gradient = model[i].own_gradient();
        if (present(rank, step, i)) {
          anywhere[i] = true;
        } else {
          std::fill(gradient.begin(), gradient.end(), 0.0F);
        }
        if (rank == 0) {
          sums[i] = gradient;
        } else {
          for (std::size_t k = 0; k < gradient.size(); ++k) sums[i][k] += gradient[k];
        }
      }
    }
    for (std::size_t i = 0; i < count; ++i) {
      if (!anywhere[i]) continue;
      for (float& x : sums[i]) x *= static_cast<float>(1.0 / world);
      const Rule& rule = groups[model[i].group()];
      plain::Arrays<float, slot_count> arrays{trained.values[i].data(), sums[i].data(), {}};
      for (std::size_t s = 0; s < zero::used_slots(rule); ++s) arrays.state[s] = state[i][s].data();
      plain::update(rule, rule.template scalars<float>(++trained.steps[i]), arrays,
                    trained.values[i].size());
    }
  }
  for (std::size_t i = 0; i < count; ++i) {
    for (std::size_t s = 0; s < used; ++s) {
      if (!state[i][s].empty()) {
        trained.state[model[i].name() + "." + std::string(Rule::slots[s])] = state[i][s];
      }
    }
  }
  return trained;
}

struct Ended {
  std::vector<Trained> ranks{};  ///< state: this rank's part, in tensors that are 0 elsewhere
  std::map<std::string, std::vector<int>> owners{};  ///< by state and element: how many ranks
};

/// `order(rank, step)` gives in which order parameters are marked.
template <class Way, class Rule, class Order, class... More>
Ended train(const Model<>& shapes, const std::vector<Rule>& groups, int world, int steps,
            Present present, Order order, More... more) {
  Ended ended;
  ended.ranks.resize(static_cast<std::size_t>(world));
  ranks::rethrow_any(ranks::run(world, [&](zero::InProcessCommunicator inner) {
    const int rank = inner.rank();
    Trained& mine = ended.ranks[static_cast<std::size_t>(rank)];
    Model<> model;
    for (const auto& tensor : shapes) {  // not a copy, which would share the values
      model.emplace_back(tensor.name(),
                         std::vector<std::size_t>(tensor.shape().begin(), tensor.shape().end()),
                         tensor.attributes(), tensor.group());
    }
    ranks::draw_values(model);
    auto comm = Way::wrap(inner);
    auto optimizer = Way::optimizer(zero::Groups<Rule>(groups), model, comm, {}, 64, More(more)...);
    for (int step = 0; step < steps; ++step) {
      ranks::draw_gradients(model, rank, step);
      for (const std::size_t i : order(rank, step)) {
        if (present(rank, step, i)) {
          optimizer.mark_ready(i);
        } else {
          optimizer.mark_absent(i);
        }
      }
      optimizer.step();
    }
    for (std::size_t i = 0; i < model.size(); ++i) {
      mine.values.emplace_back(model[i].values().begin(), model[i].values().end());
      mine.steps.push_back(optimizer.steps(i));
    }
    for (const auto& slice : optimizer.state()) {
      const auto of = std::find_if(model.begin(), model.end(), [&](const auto& tensor) {
        return tensor.name() == slice.parameter;
      });
      auto& whole = mine.state[std::string(slice.parameter) + "." + std::string(slice.slot)];
      whole.resize(of->values().size());
      std::copy(slice.values.begin(), slice.values.end(),
                whole.begin() + static_cast<std::ptrdiff_t>(slice.elements.begin));
    }
    // How often each element occurs is counted once all are done.
    comm.barrier().wait();
    for (int turn = 0; turn < world; ++turn) {
      if (turn == rank) {
        for (const auto& slice : optimizer.state()) {
          const std::string key = std::string(slice.parameter) + "." + std::string(slice.slot);
          auto& counts = ended.owners[key];
          counts.resize(std::max(counts.size(), mine.state[key].size()));
          for (std::size_t k = slice.elements.begin; k < slice.elements.end; ++k) ++counts[k];
        }
      }
      comm.barrier().wait();
    }
  }));
  return ended;
}

template <class Way>
void check_equal(const Ended& ended, const Trained& right) {
  const bool shards = Way::stage::shards_state;
  std::map<std::string, std::vector<float>> together;
  for (std::size_t r = 0; r < ended.ranks.size(); ++r) {
    INFO("rank " << r);
    const Trained& mine = ended.ranks[r];
    CHECK(mine.steps == right.steps);
    for (std::size_t i = 0; i < right.values.size(); ++i) {
      INFO("parameter " << i);
      CHECK(mine.values[i] == right.values[i]);
    }
    if (!shards) CHECK(mine.state == right.state);
    for (const auto& [key, part] : mine.state) {
      auto& whole = together[key];
      whole.resize(part.size());
      for (std::size_t k = 0; k < part.size(); ++k) {
        if (part[k] != 0) whole[k] = part[k];
      }
    }
  }
  CHECK(together == right.state);
  const int times = shards ? 1 : static_cast<int>(ended.ranks.size());
  for (const auto& [key, counts] : ended.owners) {
    INFO(key);
    CHECK(std::all_of(counts.begin(), counts.end(), [&](int n) { return n == times; }));
  }
}

Model<> make_model(const std::vector<std::size_t>& sizes, std::size_t groups = 1) {
  Model<> model;
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    model.emplace_back("p" + std::to_string(i), std::vector<std::size_t>{sizes[i]},
                       zero::Attributes{}, i % groups);
  }
  ranks::draw_values(model);
  return model;
}

const std::vector<std::size_t> sizes{31, 3, 17, 1, 40, 11};

constexpr auto registered = [](int, int) { return std::vector<std::size_t>{0, 1, 2, 3, 4, 5}; };

TEMPLATE_LIST_TEST_CASE("DS #2343: gradients are ready in another order on one rank",
                        "[peer_faults]", ranks::FewWays) {
  using Way = TestType;
  const std::vector<zero::AdamW> rule{zero::AdamW{.lr = 0.05}};
  const Trained right = serial(make_model(sizes), rule, 3, 4);
  const auto reversed = [](int rank, int step) {
    auto order = registered(rank, step);
    if (rank == 1) std::reverse(order.begin(), order.end());
    return order;
  };
  check_equal<Way>(train<Way>(make_model(sizes), rule, 3, 4, always, reversed), right);
  const auto random = [](int rank, int step) {
    return ranks::Draw(static_cast<std::uint32_t>(10 * rank + step)).order(6);
  };
  check_equal<Way>(train<Way>(make_model(sizes), rule, 3, 4, always, random), right);
}

TEMPLATE_LIST_TEST_CASE("DS #7044: one gradient is never ready on one rank", "[peer_faults]",
                        ranks::TwoWays) {
  using Way = TestType;
  std::vector<Failure> failures(3);
  const Clock::time_point start = Clock::now();
  ranks::rethrow_any(ranks::run(
      3,
      [&](zero::InProcessCommunicator inner) {
        Model<> model = make_model(sizes);
        auto comm = Way::wrap(inner);
        auto optimizer = Way::optimizer(zero::AdamW{}, model, comm);
        failures[static_cast<std::size_t>(inner.rank())] = ranks::attempt([&] {
          for (const std::size_t i : {5, 4, 3, 1, 0}) optimizer.mark_ready(i);
          if (inner.rank() == 1) return;  // waits for parameter 2 and never comes to its step
          optimizer.mark_ready(2);
          optimizer.step();
        });
        if (inner.rank() == 1) std::this_thread::sleep_for(500ms);
      },
      {.timeout = 200ms}, ranks::Leaves::when_all_have));
  CHECK(Clock::now() - start < 10s);
  for (const std::size_t r : {std::size_t{0}, std::size_t{2}}) {
    INFO(failures[r].text);
    CHECK(failures[r].kind == Kind::communicator);
    CHECK(failures[r].cause == zero::CommunicatorFailure::timeout);
    CHECK(!failures[r].operation.empty());
    // Without shared memory rank 1 has come to the first bucket, but not finished it.
    CHECK((failures[r].text.find("have not come: 1;") != std::string::npos ||
           failures[r].text.find("have not finished: 1;") != std::string::npos));
  }
}

/// Sleeps in front of each update.
struct SlowUpdates {
  bool slow = false;
  void begin(const zero::Event& event) const {
    if (slow && event.phase == zero::Phase::update) std::this_thread::sleep_for(3ms);
  }
  void end(const zero::Event&) const {}
};

TEMPLATE_LIST_TEST_CASE("DS #2463, LC: a gather waits for a slow rank's update", "[peer_faults]",
                        ranks::FewWays) {
  using Way = TestType;
  const std::vector<zero::AdamW> rule{zero::AdamW{.lr = 0.05}};
  const Trained right = serial(make_model(sizes), rule, 3, 3);
  std::vector<std::vector<std::vector<float>>> values(3);
  ranks::rethrow_any(ranks::run(3, [&](zero::InProcessCommunicator inner) {
    Model<> model = make_model(sizes);
    auto comm = Way::wrap(inner);
    auto optimizer = Way::optimizer(rule[0], model, comm, {}, 64, SlowUpdates{inner.rank() == 1});
    for (int step = 0; step < 3; ++step) {
      ranks::draw_gradients(model, inner.rank(), step);
      optimizer.step();
      for (auto& tensor : model) {  // a caller may reuse gradients as soon as the step returns
        for (float& x : tensor.own_gradient()) x = 1e30F;
      }
    }
    for (const auto& tensor : model) {
      values[static_cast<std::size_t>(inner.rank())].emplace_back(tensor.values().begin(),
                                                                  tensor.values().end());
    }
  }));
  for (const auto& mine : values) CHECK(mine == right.values);
}

TEMPLATE_LIST_TEST_CASE("FS #380, #483: state is found under its own parameter's name",
                        "[peer_faults]", ranks::FewWays) {
  using Way = TestType;
  for (const int world : {1, 2, 3, 5}) {
    INFO("world " << world);
    // Groups {0, 2, 4} and {1, 3, 5}, all sizes different.
    const Model<> model = make_model(sizes, 2);
    const std::vector<zero::AdamW> adam{zero::AdamW{.lr = 0.05, .beta1 = 0.8},
                                        zero::AdamW{.lr = 0.01, .beta2 = 0.9, .weight_decay = 0.1}};
    check_equal<Way>(train<Way>(model, adam, world, 3, always, registered),
                     serial(model, adam, world, 3));
    const std::vector<zero::Sgd> sgd{zero::Sgd{.lr = 0.1, .momentum = 0.9},
                                     zero::Sgd{.lr = 0.01, .momentum = 0.5}};
    check_equal<Way>(train<Way>(model, sgd, world, 3, always, registered),
                     serial(model, sgd, world, 3));
    // One group has no use for its slot.
    const std::vector<zero::Sgd> mixed{zero::Sgd{.lr = 0.1},
                                       zero::Sgd{.lr = 0.01, .momentum = 0.5}};
    check_equal<Way>(train<Way>(model, mixed, world, 3, always, registered),
                     serial(model, mixed, world, 3));
  }
}

TEMPLATE_LIST_TEST_CASE("a gradient that is absent everywhere, and one that is on some ranks",
                        "[peer_faults]", ranks::FewWays) {
  using Way = TestType;
  constexpr Present some = [](int rank, int step, std::size_t i) {
    if (i == 2) return step != 1;              // nowhere in step 1: not stepped, count frozen
    if (i == 4) return rank != 1;              // never on rank 1: zeros to the sum
    if (i == 0) return rank == 2 && step > 0;  // on one rank alone, and late
    return i != 5;                             // never anywhere
  };
  const std::vector<zero::AdamW> rule{zero::AdamW{.lr = 0.05}};
  const Trained right = serial(make_model(sizes), rule, 3, 4, some);
  CHECK(right.steps == std::vector<std::int64_t>{3, 4, 3, 4, 4, 0});
  check_equal<Way>(train<Way>(make_model(sizes), rule, 3, 4, some, registered), right);
}

TEMPLATE_LIST_TEST_CASE("PT #54318: ranks with fewer batches", "[peer_faults]", ranks::TwoWays) {
  using Way = TestType;
  // Rank r has 3 + r batches; afterwards it says that all its gradients are absent.
  constexpr Present uneven = [](int rank, int step, std::size_t) { return step < 3 + rank; };
  const std::vector<zero::AdamW> rule{zero::AdamW{.lr = 0.05}};
  check_equal<Way>(train<Way>(make_model(sizes), rule, 3, 5, uneven, registered),
                   serial(make_model(sizes), rule, 3, 5, uneven));
}

TEMPLATE_LIST_TEST_CASE("DS #129, #8297: fewer elements than ranks, and empty tensors",
                        "[peer_faults]", ranks::FewWays) {
  using Way = TestType;
  const std::vector<zero::AdamW> rule{zero::AdamW{.lr = 0.05}};
  const auto unmarked = [](int, int) { return std::vector<std::size_t>{}; };
  check_equal<Way>(train<Way>(make_model({3}), rule, 8, 3, always, unmarked),
                   serial(make_model({3}), rule, 8, 3));
  Trained right = serial(make_model({8, 0, 24}), rule, 2, 3);
  right.steps[1] = 0;  // nothing to step
  check_equal<Way>(train<Way>(make_model({8, 0, 24}), rule, 2, 3, always, unmarked), right);
  const auto marked = [](int, int) { return std::vector<std::size_t>{2, 1, 0}; };
  check_equal<Way>(train<Way>(make_model({8, 0, 24}), rule, 2, 3, always, marked), right);
}

TEMPLATE_LIST_TEST_CASE("an empty tensor's gradient is leased like any other", "[peer_faults]",
                        ranks::TwoWays) {
  using Way = TestType;
  std::vector<std::size_t> leased(2, 99);
  ranks::rethrow_any(ranks::run(2, [&](zero::InProcessCommunicator inner) {
    Model<> model = make_model({4, 0});
    auto comm = Way::wrap(inner);
    auto optimizer = Way::optimizer(zero::AdamW{}, model, comm);
    leased[static_cast<std::size_t>(inner.rank())] = optimizer.gradient(1).values().size();
    optimizer.mark_ready(1);
    optimizer.step();
  }));
  CHECK(leased == std::vector<std::size_t>{0, 0});
}

TEMPLATE_LIST_TEST_CASE("a tied parameter's gradient counts where one of its uses was marked",
                        "[peer_faults]", ranks::TwoWays) {
  using Way = TestType;
  // One use is absent, the other says nothing: it counts as ready, for the store shows a gradient.
  std::vector<std::int64_t> stepped(2, -1);
  ranks::rethrow_any(ranks::run(2, [&](zero::InProcessCommunicator inner) {
    Model<> model = make_model({4});
    model.emplace_back("again", std::vector<std::size_t>{4}, zero::Attributes{.alias = 0});
    model.back().take_values(model[0].values());
    auto comm = Way::wrap(inner);
    auto optimizer = Way::optimizer(zero::AdamW{}, model, comm);
    optimizer.mark_absent(0);
    optimizer.step();
    optimizer.mark_absent(0);
    optimizer.mark_absent(1);
    optimizer.step();
    stepped[static_cast<std::size_t>(inner.rank())] = optimizer.steps(1);
  }));
  CHECK(stepped == std::vector<std::int64_t>{1, 1});
}

// ---------------------------------------------------------------------------------------------
// Found on one rank, known to all

template <class T>
T stored(double x) {
  return zero::element_traits<T>::store(static_cast<zero::arithmetic_t<T>>(x));
}

template <class T>
Model<T> model_of(const std::vector<std::size_t>& of_sizes) {
  Model<T> model;
  for (std::size_t i = 0; i < of_sizes.size(); ++i) {
    model.emplace_back("p" + std::to_string(i), std::vector<std::size_t>{of_sizes[i]});
  }
  return model;
}

/// On each of `world` ranks: a model that starts from zeros, an optimizer, and
/// `body(rank, model, optimizer)`.
template <class Way, class T, class Rule, class Body, class... More>
void on_ranks(int world, const std::vector<std::size_t>& of_sizes, Rule rule,
              zero::Settings settings, Body body, More... more) {
  ranks::rethrow_any(ranks::run(world,
                                [&](zero::InProcessCommunicator inner) {
                                  Model<T> model = model_of<T>(of_sizes);
                                  auto comm = Way::wrap(inner);
                                  auto optimizer = Way::optimizer(rule, model, comm, settings, 64,
                                                                  More(more)...);
                                  body(inner.rank(), model, optimizer);
                                },
                                {.timeout = 20s}));
}

template <class T, class Optimizer>
std::string with_masters(const Model<T>& model, const Optimizer& optimizer) {
  std::string all = ranks::snapshot(model, optimizer);
  for (const auto& slice : optimizer.masters()) all += ranks::bytes_of(slice.values);
  return all;
}

/// How many steps were not skipped, or changed something, on any rank, where the ranks in
/// `culprits` have `bad` at one element, for every element in turn; so that it lies in every rank's
/// shard.
template <class Way, class T>
int not_skipped(int world, const std::vector<int>& culprits, double bad, zero::Settings settings) {
  std::vector<int> wrong(static_cast<std::size_t>(world));
  on_ranks<Way, T>(
      world, sizes, zero::Sgd{.lr = 0.05, .momentum = 0.9}, settings,
      [&](int rank, auto& model, auto& optimizer) {
        int& mine = wrong[static_cast<std::size_t>(rank)];
        ranks::draw_gradients(model, rank, 0);
        if (!optimizer.step().outcome().applied) ++mine;
        const std::string before = with_masters(model, optimizer);
        const bool guilty = std::find(culprits.begin(), culprits.end(), rank) != culprits.end();
        for (auto& tensor : model) {
          for (T& g : tensor.own_gradient()) {
            const T good = g;
            if (guilty) g = stored<T>(bad);
            const auto outcome = optimizer.step().outcome();
            if (outcome.applied || outcome.step != 1 || optimizer.steps() != 1) ++mine;
            if (with_masters(model, optimizer) != before) ++mine;
            g = good;
          }
        }
        const auto outcome = optimizer.step().outcome();  // nobody hangs, nobody is ahead
        if (!outcome.applied || outcome.step != 2) ++mine;
      });
  int all = 0;
  for (const int n : wrong) all += n;
  return all;
}

constexpr double infinity = std::numeric_limits<double>::infinity();
constexpr double nan = std::numeric_limits<double>::quiet_NaN();

TEMPLATE_LIST_TEST_CASE("FS #179, ColossalAI #1175: infinite on one rank, skipped on all",
                        "[peer_faults]", ranks::TwoWays) {
  using Way = TestType;
  const zero::Settings scaled{.loss_scale = zero::LossScale::fixed(4)};
  CHECK(not_skipped<Way, float>(4, {1}, infinity, scaled) == 0);
  CHECK(not_skipped<Way, zero::float16>(4, {1}, infinity, scaled) == 0);
}

TEMPLATE_LIST_TEST_CASE("DS #8415: a bfloat16 NaN on rank 2 is seen", "[peer_faults]",
                        ranks::TwoWays) {
  using Way = TestType;
  CHECK(not_skipped<Way, zero::bfloat16>(4, {2}, nan, {}) == 0);
}

TEMPLATE_LIST_TEST_CASE("PT #88015: two ranks find something, and it's skipped still",
                        "[peer_faults]", ranks::TwoWays) {
  using Way = TestType;
  const zero::Settings checked{.finite_check = zero::FiniteCheck::always};
  for (const double bad : {infinity, nan}) {
    CHECK(not_skipped<Way, float>(4, {0, 3}, bad, checked) == 0);
    CHECK(not_skipped<Way, float>(4, {0, 1, 2, 3}, bad, checked) == 0);
  }
}

/// The norm on each rank, and what came of the parameters.
struct Clipped {
  std::optional<double> norm{};
  std::vector<double> values{};
};

/// One step with lr 1 from zeros: the values are what gradients were stepped with, negated.
template <class Way, class T, class Gradient, class... More>
std::vector<Clipped> clip_once(int world, const std::vector<std::size_t>& of_sizes, double max_norm,
                               Gradient gradient, More... more) {
  std::vector<Clipped> clipped(static_cast<std::size_t>(world));
  on_ranks<Way, T>(
      world, of_sizes, zero::Sgd{.lr = 1}, {},
      [&](int rank, auto& model, auto& optimizer) {
        std::size_t k = 0;
        for (auto& tensor : model) {
          for (T& g : tensor.own_gradient()) g = stored<T>(gradient(k++));
        }
        optimizer.clip_grad_norm(max_norm);
        Clipped& mine = clipped[static_cast<std::size_t>(rank)];
        mine.norm = optimizer.step().outcome().gradient_norm;
        for (auto& tensor : model) {
          for (const T value : tensor.values()) {
            mine.values.push_back(static_cast<double>(zero::element_traits<T>::load(value)));
          }
        }
      },
      more...);
  return clipped;
}

TEMPLATE_LIST_TEST_CASE("LC PR 524: a norm over nothing but owned gradients", "[peer_faults]",
                        ranks::FewWays) {
  using Way = TestType;
  const auto gradient = [](std::size_t k) { return static_cast<double>(k + 1); };
  const std::vector<std::vector<std::size_t>> splits{{10}, {1, 2, 3, 4}, {9, 1}};
  const auto check = [](const std::vector<Clipped>& clipped) {
    for (const Clipped& mine : clipped) {
      REQUIRE(mine.norm.has_value());
      CHECK(*mine.norm == std::sqrt(385.0));
      CHECK(std::abs(*mine.norm - 19.6214169) < 5e-8);
      REQUIRE(mine.values.size() == 10);
      for (std::size_t k = 0; k < 10; ++k) {
        const double right = -0.0509647 * static_cast<double>(k + 1);
        CHECK(std::abs(mine.values[k] - right) < 5.1e-8 * static_cast<double>(k + 1) + 1e-7);
      }
    }
  };
  for (const auto& of_sizes : splits) {
    check(clip_once<Way, float>(4, of_sizes, 1, gradient));
    check(clip_once<Way, float>(4, of_sizes, 1, gradient, zero::BalancedPartition{}));
  }
}

TEMPLATE_LIST_TEST_CASE("FS #263: squares of float16 gradients are no float16s", "[peer_faults]",
                        ranks::TwoWays) {
  using Way = TestType;
  const auto gradient = [](std::size_t) { return 5000.0; };
  for (const int world : {1, 2, 4}) {
    for (const Clipped& mine : clip_once<Way, zero::float16>(world, {40, 12}, 52, gradient)) {
      CHECK(mine.norm == 5000 * std::sqrt(52.0));
      for (const double value : mine.values) {
        CHECK(std::abs(value + std::sqrt(52.0)) < 5e-3);  // half a unit of a float16's last place
      }
    }
  }
}

TEMPLATE_LIST_TEST_CASE("LBANN #2376: nothing counts K times", "[peer_faults]", ranks::TwoWays) {
  using Way = TestType;
  // Gradients whose mean over 1, 2 or 4 equal ones is exact. More ranks than elements, too.
  const auto gradient = [](std::size_t k) { return static_cast<double>(k % 7) - 3.5; };
  for (const std::vector<std::size_t>& of_sizes :
       {std::vector<std::size_t>{31, 3, 17, 1}, std::vector<std::size_t>{1, 1}}) {
    std::size_t count = 0;
    for (const std::size_t n : of_sizes) count += n;
    double squares = 0;
    for (std::size_t k = 0; k < count; ++k) squares += gradient(k) * gradient(k);
    for (const int world : {1, 2, 4, 8}) {
      for (const Clipped& mine : clip_once<Way, float>(world, of_sizes, infinity, gradient)) {
        CHECK(mine.norm == std::sqrt(squares));
        for (std::size_t k = 0; k < count; ++k) CHECK(mine.values[k] == -gradient(k));
      }
    }
  }
}

/// A step of 1 on rank 0 and 2^-9 on all others, which a bfloat16 sum of 1 doesn't notice.
template <class Way>
void check_small_summands(int world) {
  std::vector<float> masters(static_cast<std::size_t>(world), 0);
  std::vector<float> values = masters;
  on_ranks<Way, zero::bfloat16>(world, {5}, zero::Sgd{.lr = 1}, {.gradient_scale = 1},
                                [&](int rank, auto& model, auto& optimizer) {
                                  for (auto& g : model[0].own_gradient())
                                    g = stored<zero::bfloat16>(rank == 0 ? 1 : 0x1p-9);
                                  optimizer.step();
                                  for (const auto& slice : optimizer.masters()) {
                                    if (!slice.values.empty())
                                      masters[static_cast<std::size_t>(rank)] = slice.values[0];
                                  }
                                  values[static_cast<std::size_t>(rank)] =
                                      static_cast<float>(model[0].values()[4]);
                                });
  const float right = -1 - static_cast<float>(world - 1) * 0x1p-9F;
  bool somewhere = false;
  for (std::size_t r = 0; r < values.size(); ++r) {
    CHECK((masters[r] == right || masters[r] == 0));  // 0: owns nothing
    somewhere = somewhere || masters[r] == right;
    CHECK(values[r] == static_cast<float>(zero::bfloat16(right)));
  }
  CHECK(somewhere);
}

TEMPLATE_LIST_TEST_CASE("DS #1800: small summands over many ranks", "[peer_faults]",
                        ranks::TwoWays) {
  using Way = TestType;
  check_small_summands<Way>(8);
  check_small_summands<Way>(257);
}

TEST_CASE("DS #1800: 257 summands in rank order", "[peer_faults]") {
  // Long enough for every path: whole blocks, packs and single elements.
  const std::vector<zero::bfloat16> one(133, zero::bfloat16(1)),
      small(133, zero::bfloat16(0x1p-9F));
  std::vector<const zero::bfloat16*> sources(257, small.data());
  sources[0] = one.data();
  std::vector<float> sums(133);
  zero::detail::sum_sources(zero::detail::GradientSum<zero::bfloat16>{sources, 1}, 0, sums.size(),
                            sums.data());
  CHECK(sums == std::vector<float>(133, 1.5F));
  std::vector<zero::bfloat16> rounded(133);
  zero::detail::sum_in_rank_order<zero::bfloat16>(sources, rounded.size(), rounded.data());
  for (const zero::bfloat16 sum : rounded) CHECK(static_cast<float>(sum) == 1.5F);
}

}  // namespace
