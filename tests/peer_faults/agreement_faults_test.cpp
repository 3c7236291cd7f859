// SPDX-License-Identifier: Apache-2.0
// Faults in the agreement between ranks that other projects shipped, with their inputs and the
// right values. DS is DeepSpeed, FS fairscale, LC llm.c, PT pytorch/pytorch.
#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <string>
#include <string_view>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "../plain_update.hpp"
#include "../ranks.hpp"
#include "catch.hpp"
#include "zero/detail/update_loop.hpp"
#include "zero/observer.hpp"
#include "zero/optim/adam.hpp"
#include "zero/optim/sgd.hpp"
#include "zero/optimizer.hpp"

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
                        "[peer_faults]", ranks::AllWays) {
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
                        ranks::MainWays) {
  using Way = TestType;
  std::vector<Failure> failures(3);
  const Clock::time_point start = Clock::now();
  ranks::rethrow_any(ranks::run(
      3,
      [&](zero::InProcessCommunicator inner) {
        Model<> model = make_model(sizes);
        auto comm = Way::wrap(inner);
        auto optimizer = Way::optimizer(zero::Adam{}, model, comm);
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
                        ranks::AllWays) {
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
                        "[peer_faults]", ranks::AllWays) {
  using Way = TestType;
  for (const int world : {1, 2, 3, 5}) {
    INFO("world " << world);
    // Groups {0, 2, 4} and {1, 3, 5}, all sizes different.
    const Model<> model = make_model(sizes, 2);
    const std::vector<zero::Adam> adam{zero::Adam{.lr = 0.05, .beta1 = 0.8},
                                       zero::Adam{.lr = 0.01, .beta2 = 0.9, .weight_decay = 0.1}};
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
                        "[peer_faults]", ranks::AllWays) {
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

TEMPLATE_LIST_TEST_CASE("PT #54318: ranks with fewer batches", "[peer_faults]", ranks::MainWays) {
  using Way = TestType;
  // Rank r has 3 + r batches; afterwards it says that all its gradients are absent.
  constexpr Present uneven = [](int rank, int step, std::size_t) { return step < 3 + rank; };
  const std::vector<zero::Adam> rule{zero::Adam{.lr = 0.05}};
  check_equal<Way>(train<Way>(make_model(sizes), rule, 3, 5, uneven, registered),
                   serial(make_model(sizes), rule, 3, 5, uneven));
}

TEMPLATE_LIST_TEST_CASE("DS #129, #8297: fewer elements than ranks, and empty tensors",
                        "[peer_faults]", ranks::AllWays) {
  using Way = TestType;
  const std::vector<zero::Adam> rule{zero::Adam{.lr = 0.05}};
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
                        ranks::MainWays) {
  using Way = TestType;
  std::vector<std::size_t> leased(2, 99);
  ranks::rethrow_any(ranks::run(2, [&](zero::InProcessCommunicator inner) {
    Model<> model = make_model({4, 0});
    auto comm = Way::wrap(inner);
    auto optimizer = Way::optimizer(zero::Adam{}, model, comm);
    leased[static_cast<std::size_t>(inner.rank())] = optimizer.gradient(1).values().size();
    optimizer.mark_ready(1);
    optimizer.step();
  }));
  CHECK(leased == std::vector<std::size_t>{0, 0});
}

TEMPLATE_LIST_TEST_CASE("a tied parameter's gradient counts where one of its uses was marked",
                        "[peer_faults]", ranks::MainWays) {
  using Way = TestType;
  // One use is absent, the other says nothing: it counts as ready, for the store shows a gradient.
  std::vector<std::int64_t> stepped(2, -1);
  ranks::rethrow_any(ranks::run(2, [&](zero::InProcessCommunicator inner) {
    Model<> model = make_model({4});
    model.emplace_back("again", std::vector<std::size_t>{4}, zero::Attributes{.alias = 0});
    model.back().take_values(model[0].values());
    auto comm = Way::wrap(inner);
    auto optimizer = Way::optimizer(zero::Adam{}, model, comm);
    optimizer.mark_absent(0);
    optimizer.step();
    optimizer.mark_absent(0);
    optimizer.mark_absent(1);
    optimizer.step();
    stepped[static_cast<std::size_t>(inner.rank())] = optimizer.steps(1);
  }));
  CHECK(stepped == std::vector<std::int64_t>{1, 1});
}

}  // namespace
