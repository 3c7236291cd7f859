// SPDX-License-Identifier: Apache-2.0
// Ranks that throw, hang, stay away or do something else at stage 3, whose traffic goes on beside
// the computation: every rank gets a typed error in time, nothing is half done without saying so,
// and delays make no difference.
#include <algorithm>
#include <array>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <latch>
#include <mutex>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "catch.hpp"
#include "ranks.hpp"
#include "zero/optim/sgd.hpp"

namespace {

using namespace std::chrono_literals;
using Catch::Matchers::ContainsSubstring;
using ranks::Failure;
using ranks::Leaves;
using ranks::Model;
using zero::FaultAction;
using Kind = ranks::Failure::Kind;
using Clock = std::chrono::steady_clock;
using Comm = zero::FaultInjector<zero::InProcessCommunicator, false>;

constexpr int world = 3;
constexpr int steps = 2;
constexpr int units = 4;
constexpr std::size_t resident = 3;  // the parameter whose unit stays

/// The end of the test where a rank would hang: nobody could join its thread.
class Watchdog {
 public:
  explicit Watchdog(std::chrono::seconds limit)
      : thread_([this, limit] {
          std::unique_lock lock(mutex_);
          if (over_.wait_for(lock, limit, [&] { return is_over_; })) return;
          std::fputs("stage_faults_test: a rank hangs\n", stderr);
          std::_Exit(3);
        }) {}
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;
  ~Watchdog() {
    {
      const std::scoped_lock lock(mutex_);
      is_over_ = true;
    }
    over_.notify_one();
    thread_.join();
  }

 private:
  std::mutex mutex_{};
  std::condition_variable over_{};
  bool is_over_ = false;
  std::thread thread_;
};

/// The first two units have one size, so that one could be taken for the other.
Model<> make_model() {
  Model<> model;
  model.emplace_back("a", std::vector<std::size_t>{40}, zero::Attributes{.unit = 0});
  model.emplace_back("b", std::vector<std::size_t>{40}, zero::Attributes{.unit = 1});
  model.emplace_back("c", std::vector<std::size_t>{3, 50}, zero::Attributes{.unit = 2});
  model.emplace_back("d", std::vector<std::size_t>{10}, zero::Attributes{.unit = 3});
  ranks::draw_values(model);
  return model;
}

auto make_optimizer(Model<>& model, Comm& comm) {
  zero::Settings settings;
  settings.poison_padding = true;
  settings.poison_released = true;
  return zero::ZeroSharded(zero::Sgd{.lr = 0.1, .momentum = 0.9}, model, comm, zero::ParamView{256},
                           zero::Stage3{.resident_bytes = 64}, settings);
}
using Optimizer = decltype(make_optimizer(std::declval<Model<>&>(), std::declval<Comm&>()));

/// What this rank keeps and may look at without its peers.
std::string snapshot(const Model<>& model, const Optimizer& optimizer) {
  return ranks::state_of(optimizer) + " steps " + std::to_string(optimizer.steps()) +
         ranks::bytes_of(model[resident].values());
}

void forward(Optimizer& optimizer) {
  for (int unit = 0; unit < units; ++unit) {
    optimizer.acquire(unit);
    optimizer.release(unit);
  }
}
/// Some gradients are leased, others lie in memory of the framework's.
void backward(Optimizer& optimizer, Model<>& model, int rank, int step, int last_unit = 0) {
  ranks::draw_gradients(model, rank, step);
  for (int unit = units; unit-- > last_unit;) {
    const auto i = static_cast<std::size_t>(unit);
    optimizer.acquire(unit);
    if (i % 2 == 0) {
      const auto lease = optimizer.gradient(i);
      const auto& drawn = model[i].own_gradient();
      std::copy(drawn.begin(), drawn.end(), lease.values().begin());
    }
    optimizer.mark_ready(i);
    optimizer.release(unit);
  }
}

/// How a rank's training ended.
struct End {
  Failure failure;
  bool constructed = false;
  bool failed_for_good = false;
  std::string before;  ///< in front of the step that failed, or at the end
  std::string after;
  std::vector<Failure> later;  ///< what the verbs said afterwards
  double seconds = 0;
};

void train(Comm comm, End& end) {
  const auto start = Clock::now();
  const auto stop = [&] {
    end.seconds = std::chrono::duration<double>(Clock::now() - start).count();
  };
  Model<> model = make_model();
  try {
    Optimizer optimizer = make_optimizer(model, comm);
    end.constructed = true;
    try {
      for (int step = 0; step < steps; ++step) {
        end.before = snapshot(model, optimizer);
        forward(optimizer);
        backward(optimizer, model, comm.rank(), step);
        optimizer.step();
      }
      end.before = snapshot(model, optimizer);
    } catch (...) {
      end.failure = ranks::failure_of(std::current_exception());
    }
    stop();
    const Failure shown = ranks::attempt([&] { end.after = snapshot(model, optimizer); });
    end.failed_for_good = shown.kind != Kind::none;
    if (end.failure.kind == Kind::none) return;
    end.later = {shown, ranks::attempt([&] { forward(optimizer); }),
                 ranks::attempt([&] { optimizer.step(); }),
                 ranks::attempt([&] { backward(optimizer, model, comm.rank(), 0); })};
  } catch (...) {
    end.failure = ranks::failure_of(std::current_exception());
    stop();
  }
}

std::vector<End> train_all(const zero::FaultPlan& plan, zero::InProcessOptions options) {
  std::vector<End> ends(world);
  ranks::rethrow_any(ranks::run(
      world,
      [&](const zero::InProcessCommunicator& inner) {
        train(Comm(inner, plan), ends[static_cast<std::size_t>(inner.rank())]);
      },
      options));
  return ends;
}

/// Whether all went well.
bool all_well(const std::vector<End>& ends) {
  for (const End& end : ends) {
    if (end.failure.kind != Kind::none) return false;
  }
  return true;
}

/// Every rank failed, in time, with words, and with nothing half done or saying so.
void check_all_failed(const std::vector<End>& ends, double limit) {
  for (std::size_t r = 0; r < ends.size(); ++r) {
    const End& end = ends[r];
    INFO("rank " << r << ": " << end.failure.text);
    CHECK((end.failure.kind == Kind::communicator || end.failure.kind == Kind::usage));
    CHECK_THAT(end.failure.text, ContainsSubstring("rank "));
    CHECK(end.seconds < limit);
    if (!end.constructed) continue;
    if (end.failed_for_good) {
      for (const Failure& later : end.later) {
        CHECK(later.kind == Kind::usage);
        CHECK_THAT(later.text, ContainsSubstring("reload"));
      }
    } else {
      CHECK((end.after == end.before));
      CHECK((end.later[2].kind == Kind::communicator || end.later[2].kind == Kind::usage));
      CHECK(end.later[1].kind != Kind::other);
      CHECK(end.later[3].kind != Kind::other);
    }
  }
}

constexpr zero::InProcessOptions patient{.timeout = 60s};
constexpr zero::InProcessOptions quick{.timeout = 150ms};

/// The original, the duplicate that reduces and the one that gathers.
constexpr std::array communicators{0, 1, 2};

std::string describe(int duplicate, std::uint64_t operation) {
  return "operation " + std::to_string(operation) + " of communicator " + std::to_string(duplicate);
}

/// How many operations the communicators have in an undisturbed run: found by letting one fail.
std::array<std::uint64_t, 3> operations() {
  std::array<std::uint64_t, 3> counts{};
  for (const int duplicate : communicators) {
    std::uint64_t operation = 0;
    for (;; ++operation) {
      const auto ends = train_all({.faults = {{.action = FaultAction::fail,
                                               .rank = 1,
                                               .operation = operation,
                                               .duplicate = duplicate}}},
                                  patient);
      if (all_well(ends)) break;
      INFO(describe(duplicate, operation));
      check_all_failed(ends, 20);
    }
    counts[static_cast<std::size_t>(duplicate)] = operation;
  }
  return counts;
}

/// Several worlds at once, since they wait for most of the time.
void for_each_operation(FaultAction action, zero::InProcessOptions options,
                        const std::array<std::uint64_t, 3>& counts,
                        const std::function<void(const std::vector<End>&)>& check) {
  constexpr std::size_t at_once = 6;
  for (const int duplicate : communicators) {
    const std::uint64_t count = counts[static_cast<std::size_t>(duplicate)];
    for (std::uint64_t first = 0; first < count; first += at_once) {
      std::array<std::vector<End>, at_once> ends;
      std::vector<std::thread> worlds;
      for (std::uint64_t k = 0; k < at_once && first + k < count; ++k) {
        worlds.emplace_back([&, k] {
          ends[k] = train_all(
              {.faults =
                   {{.action = action, .rank = 1, .operation = first + k, .duplicate = duplicate}}},
              options);
        });
      }
      for (std::thread& thread : worlds) thread.join();
      for (std::uint64_t k = 0; k < worlds.size(); ++k) {
        INFO(describe(duplicate, first + k));
        check(ends[k]);
      }
    }
  }
}

}  // namespace

TEST_CASE("stage 3: a rank fails, hangs or differs at any operation: all get a typed error") {
  const Watchdog watchdog(240s);
  const auto counts = operations();
  CHECK(counts[0] > 2);
  CHECK(counts[1] == 2 * 6);           // buckets
  CHECK(counts[2] > 2 * (3 + 5) * 2);  // announced units and their buckets, there and back
  for_each_operation(FaultAction::stick, quick, counts,
                     [](const std::vector<End>& ends) { check_all_failed(ends, 20); });
  int failures = 0;
  for_each_operation(FaultAction::resize, patient, counts, [&](const std::vector<End>& ends) {
    if (all_well(ends)) return;  // a duplicate has no size
    ++failures;
    check_all_failed(ends, 20);
  });
  CHECK(failures > 40);
}

TEST_CASE("stage 3: ranks acquire different units of one size: all are told both") {
  const Watchdog watchdog(120s);
  for (int round = 0; round < 10; ++round) {
    const auto thrown = ranks::run(world, [](const zero::InProcessCommunicator& inner) {
      Comm comm(inner);
      Model<> model = make_model();
      auto optimizer = make_optimizer(model, comm);
      optimizer.acquire(comm.rank() == 1 ? 1 : 0);
    });
    for (const auto& exception : thrown) {
      const Failure failure = ranks::failure_of(exception);
      INFO(failure.text);
      CHECK(failure.kind == Kind::usage);
      CHECK_THAT(failure.text, ContainsSubstring("rank 1 acquires unit 1"));
      CHECK_THAT(failure.text, ContainsSubstring("rank 0 acquires unit 0"));
    }
  }
}

TEST_CASE("stage 3: a rank that never acquires, or never steps, is given up in time") {
  const Watchdog watchdog(120s);
  for (const bool acquires : {false, true}) {
    INFO("acquires " << acquires);
    std::latch peers(world - 1);
    std::vector<double> seconds(world);
    const auto thrown = ranks::run(
        world,
        [&](const zero::InProcessCommunicator& inner) {
          Comm comm(inner);
          Model<> model = make_model();
          auto optimizer = make_optimizer(model, comm);
          if (comm.rank() == 2) {
            if (acquires) {
              forward(optimizer);
              backward(optimizer, model, 2, 0);
            }
            peers.wait();
            optimizer.step();
            return;
          }
          const auto start = Clock::now();
          const auto arrive = [&] {
            seconds[static_cast<std::size_t>(comm.rank())] =
                std::chrono::duration<double>(Clock::now() - start).count();
            peers.count_down();
          };
          try {
            forward(optimizer);
            backward(optimizer, model, comm.rank(), 0);
            optimizer.step();
          } catch (...) {
            arrive();
            throw;
          }
          arrive();
        },
        {.timeout = 400ms}, Leaves::when_all_have);
    for (std::size_t r = 0; r < thrown.size(); ++r) {
      const Failure failure = ranks::failure_of(thrown[r]);
      INFO("rank " << r << ": " << failure.text);
      CHECK(failure.kind == Kind::communicator);
      CHECK(seconds[r] < 10);
    }
  }
}

namespace {

/// What the ranks threw where rank 1 does `leave(optimizer)` in its second backward, half done.
template <class F>
std::vector<Failure> leave_in_backward(const F& leave) {
  std::vector<Failure> all;
  const auto thrown = ranks::run(
      world,
      [&](const zero::InProcessCommunicator& inner) {
        Comm comm(inner);
        Model<> model = make_model();
        std::optional<Optimizer> optimizer(std::in_place, make_optimizer(model, comm));
        for (int step = 0; step < steps; ++step) {
          forward(*optimizer);
          const bool leaves = step == 1 && comm.rank() == 1;
          backward(*optimizer, model, comm.rank(), step, leaves ? 2 : 0);
          if (leaves) return leave(optimizer);
          optimizer->step();
        }
      },
      patient, Leaves::when_all_have);
  for (const auto& exception : thrown) all.push_back(ranks::failure_of(exception));
  return all;
}

void check_peers_hear(const std::vector<Failure>& all) {
  for (const std::size_t peer : {0, 2}) {
    INFO("rank " << peer << ": " << all[peer].text);
    CHECK(all[peer].kind == Kind::communicator);
    CHECK(all[peer].cause != zero::CommunicatorFailure::timeout);
  }
}

}  // namespace

TEST_CASE("stage 3: a rank throws in its backward, or destroys its optimizer there") {
  const Watchdog watchdog(120s);
  for (int round = 0; round < 5; ++round) {
    const auto start = Clock::now();
    const std::vector<Failure> threw = leave_in_backward(
        [](std::optional<Optimizer>&) { throw std::runtime_error("no such token"); });
    check_peers_hear(threw);
    CHECK(threw[1].text == "no such token");
    const std::vector<Failure> destroyed =
        leave_in_backward([](std::optional<Optimizer>& optimizer) { optimizer.reset(); });
    check_peers_hear(destroyed);
    CHECK(destroyed[1].kind == Kind::none);
    CHECK(Clock::now() - start < 20s);
  }
}

TEST_CASE("stage 3: an optimizer is destroyed while a unit is gathered ahead") {
  const Watchdog watchdog(120s);
  for (const bool throws : {false, true}) {
    const zero::FaultPlan slow{.faults = {{.action = FaultAction::delay_finish,
                                           .rank = 2,
                                           .operation = 0,
                                           .every = 1,
                                           .delay = 3ms,
                                           .duplicate = 2}}};
    const auto thrown = ranks::run(
        world,
        [&](const zero::InProcessCommunicator& inner) {
          Comm comm(inner, slow);
          Model<> model = make_model();
          auto optimizer = make_optimizer(model, comm);
          forward(optimizer);
          backward(optimizer, model, comm.rank(), 0);
          optimizer.step();
          optimizer.acquire(0);  // and unit 1 is on its way
          if (comm.rank() == 0 && throws) throw std::runtime_error("no such token");
          if (throws) forward(optimizer);
        },
        patient);
    for (std::size_t r = 0; r < thrown.size(); ++r) {
      const Failure failure = ranks::failure_of(thrown[r]);
      INFO("rank " << r << ": " << failure.text);
      if (!throws) CHECK(failure.kind == Kind::none);
      if (throws && r > 0) {
        CHECK(failure.kind == Kind::communicator);
        CHECK(failure.cause != zero::CommunicatorFailure::timeout);
      }
    }
  }
}

TEST_CASE("stage 3: delays make no difference") {
  const Watchdog watchdog(120s);
  const auto bits = [](const std::vector<End>& ends) {
    std::string all;
    for (const End& end : ends) all += end.after;
    return all;
  };
  const std::string want = bits(train_all({}, patient));
  for (std::uint64_t seed = 1; seed <= 15; ++seed) {
    const auto ends = train_all(zero::random_delays(seed, 500us), patient);
    INFO("seed " << seed);
    REQUIRE(all_well(ends));
    CHECK((bits(ends) == want));
  }
}
