// SPDX-License-Identifier: Apache-2.0
// Ranks that throw, hang, stay away or do something else, at every operation: every rank gets a
// typed error in time, nothing is half done without saying so, and no peer reads freed memory.
// And what must make no difference: delays, the order of marks, and who marks.
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "catch.hpp"
#include "ranks.hpp"
#include "zero/optim/adam.hpp"

namespace {

using namespace std::chrono_literals;
using ranks::Failure;
using ranks::Leaves;
using ranks::Model;
using zero::Fault;
using zero::FaultAction;
using Kind = ranks::Failure::Kind;
using Clock = std::chrono::steady_clock;

constexpr int world = 3;
constexpr int steps = 2;

/// Units make buckets of different sizes, so that a swap of two shows.
Model<> make_model() {
  Model<> model;
  model.emplace_back("a", std::vector<std::size_t>{40}, zero::Attributes{.unit = 0});
  model.emplace_back("b", std::vector<std::size_t>{5}, zero::Attributes{.unit = 1});
  model.emplace_back("c", std::vector<std::size_t>{3, 5}, zero::Attributes{.unit = 2});
  model.emplace_back("d", std::vector<std::size_t>{80}, zero::Attributes{.unit = 3});
  ranks::draw_values(model);
  return model;
}
constexpr std::size_t whole_units = 512;  // bytes of a bucket

/// How a rank's training ended.
struct End {
  Failure failure;
  std::string before;  ///< the snapshot in front of the step that failed, or at the end
  std::string after;   ///< the snapshot behind it
  int steps_done = 0;
  bool constructed = false;
  Failure later_zero;  ///< what the verbs said afterwards
  Failure later_mark;
  Failure later_absent;
  Failure later_gradient;
  Failure later_step;
  Failure later_state;
  Failure later_group;
  double seconds = 0;  ///< from the first step on, or from construction
};

/// Marks parameters as they come, then steps; after a failure asks every verb.
template <class Way, class Comm, class Prepare>
void train(Comm comm, End& end, Prepare prepare) {
  const Clock::time_point start = Clock::now();
  const auto seconds = [&] { return std::chrono::duration<double>(Clock::now() - start).count(); };
  Model<> model = make_model();
  try {
    auto optimizer = Way::optimizer(zero::AdamW{}, model, comm, {}, whole_units);
    end.constructed = true;
    try {
      for (int step = 0; step < steps; ++step) {
        end.before = ranks::snapshot(model, optimizer);
        prepare(optimizer, model, comm.rank(), step);
        optimizer.step();
        ++end.steps_done;
      }
      end.before = ranks::snapshot(model, optimizer);
    } catch (...) {
      end.failure = ranks::failure_of(std::current_exception());
    }
    end.seconds = seconds();
    // A failed optimizer does not show its state.
    const auto look = [&] {
      std::string seen;
      const Failure refused = ranks::attempt([&] { seen = ranks::snapshot(model, optimizer); });
      return refused.kind == Kind::none ? seen : refused.text;
    };
    end.after = look();
    if (end.failure.kind != Kind::none) {
      end.later_zero = ranks::attempt([&] { optimizer.zero_grad(); });
      end.later_gradient = ranks::attempt([&] { (void)optimizer.gradient(0); });
      end.later_mark = ranks::attempt([&] { optimizer.mark_ready(3); });
      end.later_absent = ranks::attempt([&] { optimizer.mark_absent(2); });
      end.later_step = ranks::attempt([&] { optimizer.step(); });
      end.later_state = ranks::attempt([&] { (void)optimizer.state(); });
      end.later_group = ranks::attempt([&] { (void)optimizer.group(0); });
      if (look() != end.after) end.after += " and again";
    }
  } catch (...) {
    end.failure = ranks::failure_of(std::current_exception());
    end.seconds = seconds();
  }
}

constexpr auto mark_in_reverse = [](auto& optimizer, Model<>& model, int rank, int step) {
  ranks::draw_gradients(model, rank, step);
  for (std::size_t i = model.size(); i-- > 0;) optimizer.mark_ready(i);
};

template <class Way>
std::vector<End> train_all(const zero::FaultPlan& plan, zero::InProcessOptions options,
                           std::vector<std::uint64_t>* started = nullptr) {
  std::vector<End> ends(world);
  if (started != nullptr) started->assign(world, 0);
  const auto thrown = ranks::run(
      world,
      [&](zero::InProcessCommunicator inner) {
        const auto r = static_cast<std::size_t>(inner.rank());
        auto comm = Way::wrap(inner, plan);
        train<Way>(comm, ends[r], mark_in_reverse);
        if (started != nullptr) (*started)[r] = comm.started();
      },
      options);
  ranks::rethrow_any(thrown);
  return ends;
}

std::string ends_of(const std::vector<End>& ends) {
  std::string all;
  for (const End& end : ends) all += end.after;
  return all;
}

/// What holds on any rank whose training failed.
void check_failed(const End& end, int rank) {
  INFO("rank " << rank << " after " << end.steps_done << " steps: " << end.failure.text);
  CHECK((end.failure.kind == Kind::communicator || end.failure.kind == Kind::usage));
  CHECK_THAT(end.failure.text, Catch::Matchers::ContainsSubstring("rank " + std::to_string(rank)));
  if (end.failure.kind == Kind::communicator) {
    CHECK(end.failure.text.find(end.failure.operation) != std::string::npos);
    CHECK(!end.failure.operation.empty());
  }
  if (!end.constructed) return;
  if (end.later_zero.kind == Kind::usage) {  // failed: every verb says so
    for (const Failure* later :
         {&end.later_zero, &end.later_gradient, &end.later_mark, &end.later_absent, &end.later_step,
          &end.later_state, &end.later_group}) {
      CHECK(later->kind == Kind::usage);
      CHECK_THAT(later->text, Catch::Matchers::ContainsSubstring("reload"));
      CHECK_THAT(later->text, Catch::Matchers::ContainsSubstring(end.failure.text));
    }
  } else {
    INFO(end.later_zero.text << end.later_gradient.text << end.later_mark.text);
    CHECK((end.after == end.before));
    CHECK(end.later_zero.kind == Kind::none);
    CHECK(end.later_gradient.kind == Kind::none);
    CHECK((end.later_mark.kind == Kind::none || end.later_mark.kind == Kind::communicator));
    CHECK((end.later_absent.kind == Kind::none || end.later_absent.kind == Kind::communicator));
    CHECK(end.later_step.kind == Kind::communicator);
    CHECK(end.later_state.kind == Kind::none);
    CHECK(end.later_group.kind == Kind::none);
  }
}

/// Every rank failed, within `limit`.
void check_all_failed(const std::vector<End>& ends, double limit) {
  for (std::size_t r = 0; r < ends.size(); ++r) {
    check_failed(ends[r], static_cast<int>(r));
    CHECK(ends[r].seconds < limit);
  }
}

#ifdef ZERO_TEST_EACH_ONCE  // sanitizers and a second compiler
using AllWays = ranks::FewWays;
using MainWays = ranks::FewWays;
#else
using ranks::AllWays;
using ranks::MainWays;
#endif

constexpr zero::InProcessOptions patient{.timeout = 60s};
constexpr zero::InProcessOptions quick{.timeout = 300ms};

TEMPLATE_LIST_TEST_CASE("a rank fails at an operation: all get a typed error at once", "[failure]",
                        AllWays) {
  using Way = TestType;
  std::vector<std::uint64_t> started;
  const std::string whole = ends_of(train_all<Way>({}, patient, &started));
  for (std::uint64_t operation = 0; operation < started[1]; ++operation) {
    for (const int rank : {0, 2}) {
      INFO("operation " << operation << " of " << started[1] << " on rank " << rank);
      const zero::FaultPlan plan{.faults = {{FaultAction::fail, rank, operation}}};
      const auto ends = train_all<Way>(plan, patient);
      check_all_failed(ends, 20);
      for (const End& end : ends) CHECK(end.constructed == (operation > 0));
    }
  }
}

TEMPLATE_LIST_TEST_CASE("a rank's operation has another size or place: all get a typed error",
                        "[failure]", MainWays) {
  using Way = TestType;
  std::vector<std::uint64_t> started;
  const std::string whole = ends_of(train_all<Way>({}, patient, &started));
  for (const FaultAction action : {FaultAction::resize, FaultAction::swap}) {
    int failures = 0;
    for (std::uint64_t operation = 0; operation < started[1]; ++operation) {
      INFO("operation " << operation << " of " << started[1] << ", action "
                        << static_cast<int>(action));
      const auto ends = train_all<Way>({.faults = {{action, 1, operation}}}, patient);
      // A meeting has no size, and one operation alone has nothing to be swapped with.
      if (ends[0].failure.kind == Kind::none) {
        CHECK((ends_of(ends) == whole));
        continue;
      }
      ++failures;
      check_all_failed(ends, 20);
    }
    if (!Way::shares) CHECK(failures > 2);
  }
}

TEMPLATE_LIST_TEST_CASE("a rank hangs in an operation: its peers get a typed error in time",
                        "[failure]", MainWays) {
  using Way = TestType;
  std::vector<std::uint64_t> started;
  (void)train_all<Way>({}, patient, &started);
  // Of the second step, in the middle of which the peers have begun to update.
  for (std::uint64_t operation = 0; operation < started[1];
       operation += operation == 0 ? started[1] / 2 : 2) {
    INFO("operation " << operation << " of " << started[1]);
    const auto ends = train_all<Way>({.faults = {{FaultAction::stick, 1, operation}}}, quick);
    // A loaded machine may be late, but not by another timeout for each operation.
    check_all_failed(ends, 10);
    for (const int peer : {0, 2}) {
      const Failure& failure = ends[static_cast<std::size_t>(peer)].failure;
      INFO(failure.text);
      CHECK(failure.kind == Kind::communicator);
      CHECK_THAT(failure.text, Catch::Matchers::ContainsSubstring("sequence"));
    }
  }
}

TEMPLATE_LIST_TEST_CASE("a delay beyond the timeout is an error, one below it is none", "[failure]",
                        MainWays) {
  using Way = TestType;
  std::vector<std::uint64_t> started;
  const std::string whole = ends_of(train_all<Way>({}, patient, &started));
  for (std::uint64_t operation = 0; operation < started[1]; ++operation) {
    for (const FaultAction action : {FaultAction::delay_start, FaultAction::delay_finish}) {
      INFO("operation " << operation << ", action " << static_cast<int>(action));
      const zero::FaultPlan below{
          .faults = {{.action = action, .rank = 1, .operation = operation, .delay = 10ms}}};
      CHECK((ends_of(train_all<Way>(below, patient)) == whole));
    }
  }
  const zero::FaultPlan beyond{.faults = {{.action = FaultAction::delay_start,
                                           .rank = 1,
                                           .operation = started[1] - 1,
                                           .delay = 500ms}}};
  check_all_failed(train_all<Way>(beyond, quick), 10);
}

TEMPLATE_LIST_TEST_CASE("random delays change no bit", "[failure]", AllWays) {
  using Way = TestType;
  const std::string whole = ends_of(train_all<Way>({}, patient));
  for (std::uint64_t seed = 1; seed <= 8; ++seed) {
    INFO("seed " << seed);
    const auto ends = train_all<Way>(zero::random_delays(seed, 2ms), patient);
    for (const End& end : ends) CHECK(end.failure.text.empty());
    CHECK((ends_of(ends) == whole));
  }
}

TEMPLATE_LIST_TEST_CASE("a failure before the first update leaves a usable optimizer", "[failure]",
                        MainWays) {
  using Way = TestType;
  // The first operations of the first step: the construction's one comes before them. Then no rank
  // can have updated: without shared memory the sums of 4 buckets and the exchange come first, and
  // with it the meeting (and, without sharding, the one where ranks look at each other's sums).
  const std::uint64_t before = Way::shares ? (Way::stage::shards_state ? 1 : 2) : 5;
  for (std::uint64_t operation = 1; operation <= before; ++operation) {
    INFO("operation " << operation);
    const auto ends = train_all<Way>({.faults = {{FaultAction::fail, 1, operation}}}, patient);
    for (const End& end : ends) {
      CHECK(end.failure.kind == Kind::communicator);
      CHECK(end.steps_done == 0);
      CHECK(end.later_zero.kind == Kind::none);
      CHECK((end.after == end.before));
    }
  }
  // And the last one comes after: that rank has changed, and says so.
  std::vector<std::uint64_t> started;
  (void)train_all<Way>({}, patient, &started);
  if (Way::stage::shards_state) {
    const auto ends = train_all<Way>({.faults = {{FaultAction::fail, 1, started[1] - 1}}}, patient);
    for (const End& end : ends) CHECK(end.steps_done == steps - 1);
    CHECK(ends[1].later_zero.kind == Kind::usage);
    CHECK((ends[1].after != ends[1].before));
  }
}

/// Ranks that share memory and are cut in the middle of everything must leave nothing behind that a
/// peer still reads: each frees its memory as soon as a verb throws.
template <class Way>
void free_at_once(const Fault& fault, bool optimizer_first, std::size_t elements,
                  std::size_t bucket_bytes) {
  std::vector<Failure> failures(world);
  const auto thrown = ranks::run(
      world,
      [&](zero::InProcessCommunicator inner) {
        const int rank = inner.rank();
        auto comm = Way::wrap(inner, {.faults = {fault}});
        Model<> model;
        model.emplace_back("all", std::vector<std::size_t>{elements});  // gradients go out in place
        std::optional optimizer{Way::optimizer(zero::AdamW{}, model, comm, {}, bucket_bytes)};
        failures[static_cast<std::size_t>(rank)] = ranks::attempt([&] {
          for (int step = 0; step < 3; ++step) {
            optimizer->mark_ready(0);
            optimizer->step();
          }
        });
        if (optimizer_first) optimizer.reset();
        for (auto& tensor : model) tensor.free_all();
      },
      patient);
  ranks::rethrow_any(thrown);
  for (const Failure& failure : failures) {
    INFO(failure.text);
    CHECK(failure.kind == Kind::communicator);
  }
}

TEMPLATE_LIST_TEST_CASE("memory may be freed as soon as a verb has thrown", "[failure]", MainWays) {
  using Way = TestType;
  // 13 buckets: while some are reduced, others start or are gathered.
  const std::uint64_t operations = Way::shares ? 5 : 40;
  for (std::uint64_t operation = 1; operation < operations; operation += Way::shares ? 1 : 3) {
    INFO("operation " << operation);
    free_at_once<Way>({FaultAction::fail, 1, operation}, operation % 2 == 0, 200003, 64 << 10);
  }
  // Four buckets are on their way when the fifth fails to start, and peers still sum them.
  for (int tries = 0; tries < 3; ++tries) {
    free_at_once<Way>({FaultAction::fail, 1, Way::shares ? 2U : 5U}, false, 3600003, 2 << 20);
  }
}

TEMPLATE_LIST_TEST_CASE("a rank that throws or stays away before a step", "[failure]", MainWays) {
  using Way = TestType;
  for (const bool throws : {true, false}) {
    for (const int culprit_steps : {-1, 0, 1}) {  // -1: not even constructed
      INFO("throws " << throws << ", after " << culprit_steps << " steps");
      std::vector<End> ends(world);
      const auto thrown = ranks::run(
          world,
          [&](zero::InProcessCommunicator inner) {
            const auto r = static_cast<std::size_t>(inner.rank());
            auto comm = Way::wrap(inner, {});
            if (r != 1) return train<Way>(comm, ends[r], mark_in_reverse);
            Model<> model = make_model();
            std::optional<decltype(Way::optimizer(zero::AdamW{}, model, comm))> optimizer;
            if (culprit_steps >= 0) {
              optimizer.emplace(Way::optimizer(zero::AdamW{}, model, comm, {}, whole_units));
            }
            for (int step = 0; step < culprit_steps; ++step) {
              mark_in_reverse(*optimizer, model, 1, step);
              optimizer->step();
            }
            if (throws) throw std::runtime_error("out of data");
          },
          throws ? patient : quick, throws ? Leaves::when_it_returns : Leaves::when_all_have);
      CHECK(bool(thrown[1]) == throws);
      for (const std::size_t r : {std::size_t{0}, std::size_t{2}}) {
        CHECK(!thrown[r]);
        check_failed(ends[r], static_cast<int>(r));
        CHECK(ends[r].failure.kind == Kind::communicator);
        CHECK(ends[r].failure.cause ==
              (throws ? zero::CommunicatorFailure::rank_left : zero::CommunicatorFailure::timeout));
        CHECK_THAT(ends[r].failure.text,
                   Catch::Matchers::ContainsSubstring(throws ? "rank 1 left" : "have not come: 1"));
        CHECK(ends[r].steps_done == std::max(culprit_steps, 0));
        CHECK(ends[r].seconds < 10);
        if (ends[r].constructed) CHECK(ends[r].later_zero.kind == Kind::none);  // nothing changed
      }
    }
  }
}

TEMPLATE_LIST_TEST_CASE("one gradient is never ready: the others learn of it in time", "[failure]",
                        MainWays) {
  using Way = TestType;
  std::vector<End> ends(world);
  const auto thrown = ranks::run(
      world,
      [&](zero::InProcessCommunicator inner) {
        const auto r = static_cast<std::size_t>(inner.rank());
        auto comm = Way::wrap(inner, {});
        if (r != 1) return train<Way>(comm, ends[r], mark_in_reverse);
        // Backward got stuck on parameter 2, and this rank never comes to its step.
        Model<> model = make_model();
        auto optimizer = Way::optimizer(zero::AdamW{}, model, comm, {}, whole_units);
        optimizer.mark_ready(3);
        optimizer.mark_ready(1);
        optimizer.mark_ready(0);
        const auto lease = optimizer.gradient(2);
        std::this_thread::sleep_for(700ms);
      },
      quick, Leaves::when_all_have);
  ranks::rethrow_any(thrown);
  for (const std::size_t r : {std::size_t{0}, std::size_t{2}}) {
    check_failed(ends[r], static_cast<int>(r));
    INFO(ends[r].failure.text);
    CHECK(ends[r].failure.kind == Kind::communicator);
    CHECK(ends[r].failure.cause == zero::CommunicatorFailure::timeout);
    CHECK(ends[r].steps_done == 0);
    CHECK(ends[r].later_zero.kind == Kind::none);
    CHECK(ends[r].seconds < 10);
  }
}

/// A rule that throws at its fifth step on one rank, with or without words.
struct Brittle : zero::AdamW {
  int rank = 0;
  bool silent = false;
  template <class Real>
  [[nodiscard]] Scalars<Real> scalars(std::int64_t t) const {
    // Not where ranks compare options, which they do in double, before anything is updated.
    if (t == 5 && rank == 1 && std::is_same_v<Real, float>) {
      if (silent) throw std::runtime_error("");
      throw std::runtime_error("the rule broke");
    }
    return zero::AdamW::scalars<Real>(t);
  }
};

TEMPLATE_LIST_TEST_CASE("a rule that throws fails its optimizer, and the peers at once",
                        "[failure]", MainWays) {
  using Way = TestType;
  for (const bool silent : {false, true}) {
    std::vector<Failure> failures(world), later(world);
    std::vector<double> seconds(world);
    ranks::rethrow_any(ranks::run(
        world,
        [&](zero::InProcessCommunicator inner) {
          const auto r = static_cast<std::size_t>(inner.rank());
          auto comm = Way::wrap(inner, {});
          Model<> model = make_model();
          Brittle rule;
          rule.rank = inner.rank();
          rule.silent = silent;
          auto optimizer = Way::optimizer(rule, model, comm, {}, whole_units);
          const Clock::time_point start = Clock::now();
          failures[r] = ranks::attempt([&] {
            for (int step = 0; step < 6; ++step) {
              mark_in_reverse(optimizer, model, inner.rank(), step);
              optimizer.step();
            }
          });
          seconds[r] = std::chrono::duration<double>(Clock::now() - start).count();
          later[r] = ranks::attempt([&] { optimizer.zero_grad(); });
        },
        patient, Leaves::when_all_have));
    for (std::size_t r = 0; r < world; ++r) {
      INFO("rank " << r << ": " << failures[r].text << "; later: " << later[r].text);
      CHECK(failures[r].kind == (r == 1 ? Kind::other : Kind::communicator));
      CHECK(seconds[r] < 20);
    }
    CHECK(later[1].kind == Kind::usage);
    CHECK_THAT(later[1].text, Catch::Matchers::ContainsSubstring("reload"));
  }
}

// ---------------------------------------------------------------------------------------------
// What makes no difference

template <class Way, class Mark>
std::string ends_with_marks(Mark mark) {
  std::vector<End> ends(world);
  ranks::rethrow_any(ranks::run(world, [&](zero::InProcessCommunicator inner) {
    auto comm = Way::wrap(inner, {});
    train<Way>(comm, ends[static_cast<std::size_t>(inner.rank())],
               [&](auto& optimizer, Model<>& model, int rank, int step) {
                 ranks::draw_gradients(model, rank, step);
                 mark(optimizer, rank, step);
               });
  }));
  for (const End& end : ends) {
    INFO(end.failure.text);
    CHECK(end.failure.kind == Kind::none);
  }
  return ends_of(ends);
}

TEMPLATE_LIST_TEST_CASE("the order of marks, and who marks, change no bit", "[failure]", AllWays) {
  using Way = TestType;
  const std::string unmarked = ends_with_marks<Way>([](auto&, int, int) {});
  CHECK((ends_of(train_all<Way>({}, patient)) == unmarked));

  const std::string opposed = ends_with_marks<Way>([](auto& optimizer, int rank, int) {
    for (std::size_t k = 0; k < 4; ++k) optimizer.mark_ready(rank == 1 ? 3 - k : k);
  });
  CHECK((opposed == unmarked));

  for (std::uint32_t seed = 0; seed < 10; ++seed) {
    const std::string random = ends_with_marks<Way>([&](auto& optimizer, int rank, int step) {
      ranks::Draw draw(100 * seed + static_cast<std::uint32_t>(10 * rank + step));
      auto order = draw.order(4);
      if (seed % 2 == 1) order.pop_back();  // the step itself finds the last
      for (const std::size_t i : order) optimizer.mark_ready(i);
    });
    CHECK((random == unmarked));
  }

  const std::string threads = ends_with_marks<Way>([](auto& optimizer, int rank, int step) {
    ranks::Draw draw(static_cast<std::uint32_t>(7 * rank + step));
    const auto order = draw.order(4);
    std::vector<std::thread> markers;
    for (std::size_t t = 0; t < 2; ++t) {
      markers.emplace_back([&optimizer, &order, t] {
        for (const std::size_t i : {order[t], order[t + 2]}) {
          {
            const auto lease = optimizer.gradient(i);
          }
          optimizer.mark_ready(i);
        }
      });
    }
    for (std::thread& marker : markers) marker.join();
  });
  CHECK((threads == unmarked));
}

}  // namespace
