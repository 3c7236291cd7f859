// SPDX-License-Identifier: Apache-2.0
// What the in-process communicator does when ranks fail, differ, leave or stay away.
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "catch.hpp"
#include "zero/comm/fault_injector.hpp"
#include "zero/comm/in_process.hpp"

namespace {

using namespace std::chrono_literals;
using zero::CommunicatorError;
using zero::CommunicatorFailure;
using zero::InProcessCommunicator;
using Clock = std::chrono::steady_clock;

constexpr zero::InProcessOptions quick{.timeout = 200ms};  // only where a timeout is the point
constexpr zero::InProcessOptions patient{.timeout = 60s};

/// How one rank ended.
struct Outcome {
  bool threw = false;
  std::optional<CommunicatorFailure> failure{};  // of a CommunicatorError
  int rank = -1;
  std::string operation{};
  std::uint64_t sequence = 0;
  std::string text{};
  std::chrono::nanoseconds took{0};

  [[nodiscard]] bool says(const std::string& words) const {
    return text.find(words) != std::string::npos;
  }
};

Outcome outcome_of(const std::function<void()>& action) {
  Outcome outcome;
  const Clock::time_point start = Clock::now();
  try {
    action();
  } catch (const CommunicatorError& error) {
    outcome = {
        true, error.failure(), error.rank(), error.operation(), error.sequence(), error.what(), {}};
  } catch (const std::exception& error) {
    outcome.threw = true;
    outcome.text = error.what();
  }
  outcome.took = Clock::now() - start;
  return outcome;
}

/// Runs all ranks and tells how each ended. No rank leaves before all have returned, save those
/// that give up the handle themselves.
using Handle = std::optional<InProcessCommunicator>;
std::vector<Outcome> outcomes(int size, zero::InProcessOptions options,
                              const std::function<void(Handle&)>& rank_main) {
  zero::InProcessWorld world(size, options);
  std::vector<Handle> handles;
  for (int rank = 0; rank < size; ++rank) handles.emplace_back(world.communicator(rank));
  std::vector<Outcome> results(handles.size());
  std::vector<std::thread> threads;
  for (std::size_t rank = 0; rank < handles.size(); ++rank) {
    threads.emplace_back(
        [&, rank] { results[rank] = outcome_of([&] { rank_main(handles[rank]); }); });
  }
  for (std::thread& thread : threads) thread.join();
  return results;
}

void sleep_until_equal(const std::atomic<int>& count, int target) {
  while (count != target) std::this_thread::sleep_for(2ms);
}
/// Counts a rank as soon as it leaves the scope.
class Count {
 public:
  explicit Count(std::atomic<int>& count) : count_(count) {}
  Count(const Count&) = delete;
  Count& operator=(const Count&) = delete;
  ~Count() { ++count_; }

 private:
  std::atomic<int>& count_;
};

void check_all(const std::vector<Outcome>& results, CommunicatorFailure failure,
               const std::string& operation, std::uint64_t sequence,
               std::initializer_list<const char*> words) {
  for (std::size_t rank = 0; rank < results.size(); ++rank) {
    const Outcome& result = results[rank];
    CAPTURE(rank, result.text);
    CHECK(result.failure == failure);
    CHECK(result.rank == static_cast<int>(rank));
    CHECK(result.operation == operation);
    CHECK(result.sequence == sequence);
    CHECK(result.says("rank " + std::to_string(rank)));
    CHECK(result.says("sequence " + std::to_string(sequence)));
    for (const char* word : words) {
      CAPTURE(word);
      CHECK(result.says(word));
    }
  }
}

}  // namespace

TEST_CASE("in-process: a rank that does not come is named", "[comm]") {
  std::atomic<int> failed{0};
  const auto results = outcomes(3, quick, [&](Handle& comm) {
    comm->barrier().wait(60s);
    if (comm->rank() == 1) return sleep_until_equal(failed, 2);
    std::vector<float> data(1234);
    auto request = comm->all_reduce(std::span<float>(data));
    const Count count(failed);
    request.wait();
  });
  CHECK_FALSE(results[1].threw);
  check_all({results[0]}, CommunicatorFailure::timeout, "all_reduce", 1,
            {"1234 float32", "sequence 1", "not come: 1", "0.2 s", "timeout", "check that"});
  CHECK(results[2].failure == CommunicatorFailure::timeout);
  CHECK(results[2].says("not come: 1"));
  CHECK(results[0].took >= 190ms);
}

TEST_CASE("in-process: a rank that came and does not finish is named", "[comm]") {
  std::atomic<int> failed{0};
  const auto results = outcomes(2, patient, [&](Handle& comm) {
    std::vector<double> data(10);
    auto request = comm->all_reduce(std::span<double>(data));
    comm->barrier().wait();
    if (comm->rank() == 1) sleep_until_equal(failed, 1);
    const Count count(failed);
    request.wait(100ms);
  });
  check_all(results, CommunicatorFailure::timeout, "all_reduce", 0,
            {"10 float64", "not finished: 1", "rank 0 waited 0.1 s"});
}

TEST_CASE("in-process: late, but within the timeout", "[comm]") {
  const auto results = outcomes(2, patient, [](Handle& comm) {
    if (comm->rank() == 1) std::this_thread::sleep_for(100ms);
    comm->barrier().wait();
  });
  CHECK_FALSE(results[0].threw);
  CHECK_FALSE(results[1].threw);
}

TEST_CASE("in-process: ranks that differ", "[comm]") {
  const auto differ = [](auto zero_does, auto one_does) {
    return outcomes(2, patient, [=](Handle& comm) {
      comm->barrier().wait();
      if (comm->rank() == 0) {
        zero_does(*comm);
      } else {
        one_does(*comm);
      }
    });
  };
  using Comm = InProcessCommunicator;
  std::vector<float> f0(12), f1(12), g0(12), g1(12);
  std::vector<double> d(12);
  const auto reduce = [](auto& x, std::size_t n, zero::ReduceOp op = zero::ReduceOp::sum) {
    return [&x, n, op](Comm& comm) { comm.all_reduce(std::span(x).first(n), op).wait(); };
  };

  check_all(differ(reduce(f0, 10), reduce(f1, 9)), CommunicatorFailure::mismatch, "all_reduce", 1,
            {"ranks 0 and 1", "rank 0 called all_reduce (sum) of 10 float32",
             "rank 1 called all_reduce (sum) of 9 float32", "same operations in the same order"});
  check_all(differ(reduce(f0, 10), reduce(d, 10)), CommunicatorFailure::mismatch, "all_reduce", 1,
            {"10 float32", "10 float64"});
  check_all(differ(reduce(f0, 10), reduce(f1, 10, zero::ReduceOp::max)),
            CommunicatorFailure::mismatch, "all_reduce", 1, {"(sum)", "(max)"});

  const auto results = differ(reduce(f0, 10), [](Comm& comm) { comm.barrier().wait(); });
  CHECK(results[0].failure == CommunicatorFailure::mismatch);
  CHECK(results[0].operation == "all_reduce");
  CHECK(results[1].failure == CommunicatorFailure::mismatch);
  CHECK(results[1].operation == "barrier");
  for (const Outcome& result : results) {
    CHECK(result.says("rank 0 called all_reduce (sum) of 10 float32"));
    CHECK(result.says("rank 1 called barrier"));
  }

  const auto root = [](auto& x, int from) {
    return [&x, from](Comm& comm) { comm.broadcast(std::span(x), from).wait(); };
  };
  check_all(differ(root(f0, 0), root(f1, 1)), CommunicatorFailure::mismatch, "broadcast", 1,
            {"root 0", "root 1"});

  const std::vector<std::size_t> a{4, 8}, b{8, 4};
  const auto scatter = [](auto& x, auto& y, const auto& counts) {
    return [&](Comm& comm) {
      const auto own = static_cast<std::size_t>(comm.rank());
      comm.reduce_scatter_v(std::span(x), std::span(y).first(counts[own]), counts).wait();
    };
  };
  check_all(differ(scatter(f0, g0, a), scatter(f1, g1, b)), CommunicatorFailure::mismatch,
            "reduce_scatter_v", 1, {"counts[0] is 4 on rank 0 and 8 on rank 1"});
  const auto gather = [](auto& x, auto& y, const auto& counts) {
    return [&](Comm& comm) {
      const auto own = static_cast<std::size_t>(comm.rank());
      comm.all_gather_v(std::span(x).first(counts[own]), std::span(y), counts).wait();
    };
  };
  check_all(differ(gather(f0, g0, a), gather(f1, g1, b)), CommunicatorFailure::mismatch,
            "all_gather_v", 1, {"counts[0] is 4 on rank 0 and 8 on rank 1"});
  const auto to_all = [](auto& x, auto& y, const auto& send, const auto& receive) {
    return [&](Comm& comm) { comm.all_to_all_v(std::span(x), send, std::span(y), receive).wait(); };
  };
  // Rank 0 sends 8 to rank 1, which expects 4.
  check_all(differ(to_all(f0, g0, a, a), to_all(f1, g1, a, a)), CommunicatorFailure::mismatch,
            "all_to_all_v", 1, {"rank 0 sends 8 to rank 1, which expects 4"});

  const auto meet = [](const char* name) {
    return [name](Comm& comm) { (void)comm.meet(name, nullptr).peers(); };
  };
  const auto met = differ(meet("update"), meet("norm"));
  CHECK(met[0].failure == CommunicatorFailure::mismatch);
  CHECK(met[0].says("meeting \"update\""));
  CHECK(met[1].says("meeting \"norm\""));
  // An operation is no meeting, whatever that is called.
  CHECK(differ(meet("barrier"), [](Comm& comm) { comm.barrier().wait(); })[0].failure ==
        CommunicatorFailure::mismatch);
}

TEST_CASE("in-process: a mismatch needs no third rank to be seen", "[comm]") {
  const auto results = outcomes(3, patient, [](Handle& comm) {
    if (comm->rank() == 2) return std::this_thread::sleep_for(100ms);
    std::vector<float> data(static_cast<std::size_t>(comm->rank()) + 1);
    comm->all_reduce(std::span<float>(data)).wait();
  });
  CHECK(results[0].failure == CommunicatorFailure::mismatch);
  CHECK(results[1].failure == CommunicatorFailure::mismatch);
}

TEST_CASE("in-process: poison", "[comm]") {
  zero::InProcessWorld world(2, patient);
  InProcessCommunicator zero = world.communicator(0), one = world.communicator(1);
  CHECK(world.failed_rank() == -1);
  std::vector<float> data(5), more(5);

  // Complete before the failure: stays complete. Its one thread plays both ranks.
  auto done_zero = zero.barrier(), done_one = one.barrier();
  auto under_way = zero.all_reduce(std::span<float>(data));
  auto stuck = zero.all_reduce(std::span<float>(more));
  one.abort("the user lost patience");
  CHECK_NOTHROW(done_zero.wait());
  CHECK_NOTHROW(done_one.wait());
  CHECK(world.failed_rank() == 1);

  for (const auto& action : std::vector<std::function<void()>>{
           [&] { under_way.wait(); }, [&] { under_way.wait(); }, [&] { (void)under_way.done(); },
           [&] { (void)stuck.done(); }, [&] { (void)zero.barrier(); },
           [&] { (void)one.all_reduce(std::span<float>(data)); },
           [&] { (void)one.meet("late", nullptr); }}) {
    const Outcome outcome = outcome_of(action);
    CAPTURE(outcome.text);
    CHECK(outcome.failure == CommunicatorFailure::aborted);
    CHECK(outcome.says("rank 1 called abort: the user lost patience"));
    CHECK(outcome.says("build a new world"));
    CHECK(outcome.took < 10s);
  }
  CHECK(outcome_of([&] { under_way.wait(); }).sequence == 1);
  one.abort("too late");  // the first cause stays
  CHECK(outcome_of([&] { under_way.wait(); }).says("lost patience"));
  // Wrong arguments are still the caller's fault first.
  CHECK_THROWS_AS(one.broadcast(std::span<float>(data), 2), zero::UsageError);
}

TEST_CASE("in-process: abort from another thread", "[comm]") {
  zero::InProcessWorld world(2, patient);
  InProcessCommunicator zero = world.communicator(0), one = world.communicator(1);
  std::thread aborter([zero] {
    std::this_thread::sleep_for(50ms);
    zero.abort("stop");
  });
  const Outcome outcome = outcome_of([&] { one.barrier().wait(); });
  aborter.join();
  CHECK(outcome.failure == CommunicatorFailure::aborted);
  CHECK(outcome.says("rank 0 called abort: stop"));
  CHECK(outcome.took < 10s);
}

TEST_CASE("in-process: a rank leaves", "[comm]") {
  // While its peers wait, and before they come.
  for (const auto& [leaver_first, name] : {std::pair(true, "before"), std::pair(false, "after")}) {
    CAPTURE(name);
    const bool first = leaver_first;
    const auto results = outcomes(3, patient, [first](Handle& comm) {
      comm->barrier().wait();
      if ((comm->rank() == 2) != first) std::this_thread::sleep_for(50ms);
      if (comm->rank() == 2) return comm.reset();
      comm->barrier().wait();
    });
    CHECK_FALSE(results[2].threw);
    check_all({results[0], results[1]}, CommunicatorFailure::rank_left, "barrier", 1,
              {"rank 2 left", "after 1 operations"});
    CHECK(results[0].took < 10s);
  }
  // After all that the peers need of it.
  const auto results = outcomes(2, patient, [](Handle& comm) {
    for (int i = 0; i < 100; ++i) comm->barrier().wait();
    comm.reset();
  });
  CHECK_FALSE(results[0].threw);
  CHECK_FALSE(results[1].threw);
}

TEST_CASE("in-process: a rank is taken once at a time", "[comm]") {
  zero::InProcessWorld world(2);
  Handle zero = world.communicator(0);
  CHECK_THROWS_AS(world.communicator(0), zero::UsageError);
  const InProcessCommunicator copy = *zero;
  zero.reset();
  CHECK_THROWS_AS(world.communicator(0), zero::UsageError);
  CHECK_THROWS_AS(world.communicator(2), zero::UsageError);
  CHECK_THROWS_AS(world.communicator(-1), zero::UsageError);
  CHECK_THROWS_AS(zero::InProcessWorld(0), zero::UsageError);
  {
    const InProcessCommunicator one = world.communicator(1);
  }
  CHECK(world.communicator(1).rank() == 1);  // it had left, and nobody had missed it
}

TEST_CASE("in-process: dropped requests and meetings", "[comm]") {
  // The request's destructor, while the peer waits.
  auto results = outcomes(2, patient, [](Handle& comm) {
    std::vector<float> data(7);
    auto request = comm->all_reduce(std::span<float>(data));
    if (comm->rank() == 0) request.wait();
  });
  CHECK_FALSE(results[1].threw);
  CHECK(results[0].failure == CommunicatorFailure::aborted);
  CHECK(results[0].says("rank 1 dropped its unfinished request of all_reduce"));
  CHECK(results[0].says("sequence 0"));

  results = outcomes(2, patient, [](Handle& comm) {
    auto meeting = comm->meet("update", nullptr);
    (void)meeting.peers();
    if (comm->rank() == 0) meeting.wait();
  });
  CHECK(results[0].failure == CommunicatorFailure::aborted);
  CHECK(results[0].says("meeting \"update\""));

  // All had done their parts: that's no failure.
  zero::InProcessWorld world(2, patient);
  InProcessCommunicator zero = world.communicator(0), one = world.communicator(1);
  {
    auto a = zero.barrier();
    auto b = one.barrier();
  }
  CHECK(world.failed_rank() == -1);
  // One thread is two ranks, one of which may read the other's memory: no hang.
  {
    auto a = zero.meet("one thread", nullptr);
    auto b = one.meet("one thread", nullptr);
    (void)a.peers();
    (void)b.peers();
  }
  CHECK(world.failed_rank() == 1);
}

TEST_CASE("in-process: two ranks fail inside one meeting", "[comm]") {
  // Each may read the other's memory when its other operation fails: neither waits for ever.
  const auto results = outcomes(2, patient, [](Handle& comm) {
    auto meeting = comm->meet("update", nullptr);
    (void)meeting.peers();
    if (comm->rank() == 0) return comm->barrier().wait();
    std::vector<float> data(3);
    comm->all_reduce(std::span<float>(data)).wait();
  });
  CHECK(results[0].failure == CommunicatorFailure::mismatch);
  CHECK(results[1].failure == CommunicatorFailure::mismatch);
}

TEST_CASE("in-process: peers() after leave()", "[comm]") {
  const auto results = outcomes(2, patient, [](Handle& comm) {
    auto meeting = comm->meet("update", nullptr);
    meeting.leave();
    try {
      (void)meeting.peers();
    } catch (const zero::UsageError&) {
      return meeting.wait();
    }
    throw std::runtime_error("no UsageError");
  });
  CHECK_FALSE(results[0].threw);
  CHECK_FALSE(results[1].threw);
}

namespace {

struct Custom {
  int code;
};

}  // namespace

TEST_CASE("run_ranks rethrows the first cause with its type", "[comm]") {
  std::atomic<int> told{0};
  const auto rank_main = [&](auto fail) {
    return [&, fail](InProcessCommunicator& comm) {
      comm.barrier().wait();
      if (comm.rank() == 2) fail();
      const Outcome outcome = outcome_of([&] { comm.barrier().wait(); });
      if (outcome.failure == CommunicatorFailure::aborted &&
          outcome.says("rank 2 called abort: out of cheese")) {
        ++told;
      }
      if (outcome.threw) throw std::logic_error("a consequence");
    };
  };
  CHECK_THROWS_AS(zero::run_ranks(4, rank_main([] { throw std::out_of_range("out of cheese"); })),
                  std::out_of_range);
  CHECK(told == 3);
  CHECK_THROWS_AS(zero::run_ranks(3, rank_main([] { throw Custom{3}; })), Custom);

  // The exception drops a request on its way, which is what the peers learn of first.
  CHECK_THROWS_AS(zero::run_ranks(2,
                                  [](InProcessCommunicator& comm) {
                                    auto request = comm.barrier();
                                    auto next = comm.barrier();
                                    if (comm.rank() == 0) throw std::out_of_range("no");
                                    next.wait();
                                    comm.barrier().wait();
                                  }),
                  std::out_of_range);

  // A rank that returns early: nobody threw but those who missed it.
  const Outcome early = outcome_of([] {
    zero::run_ranks(2, [](InProcessCommunicator& comm) {
      if (comm.rank() == 1) comm.barrier().wait();
    });
  });
  CHECK(early.failure == CommunicatorFailure::rank_left);
  CHECK(early.rank == 1);
  CHECK_THROWS_AS(zero::run_ranks(0, [](InProcessCommunicator&) {}), zero::UsageError);
}

TEST_CASE("in-process: memory may go as soon as wait has thrown", "[comm]") {
  // Each rank frees its buffers the moment that its wait fails, at every stage of its peers' work;
  // a sanitizer sees a peer that still reads. Rank 0 gives up as soon as its own part is done.
  constexpr std::size_t n = 200'000;
  std::atomic<int> failures{0};
  for (int round = 0; round < 60; ++round) {
    const auto results = outcomes(3, patient, [&](Handle& comm) {
      auto input = std::make_unique<float[]>(3 * n);
      auto output = std::make_unique<float[]>(3 * n);
      const std::span<float> in(input.get(), 3 * n), out(output.get(), 3 * n);
      zero::InProcessRequest request;
      zero::InProcessMeeting meeting;
      if (round % 5 == 0) request = comm->all_reduce(in);
      if (round % 5 == 1) request = comm->reduce_scatter<float>(in, out.first(n));
      if (round % 5 == 2) request = comm->all_gather<float>(in.first(n), out);
      if (round % 5 == 3) request = comm->all_to_all<float>(in, out);
      if (round % 5 == 4) meeting = comm->meet("update", in.data());
      const bool hurried = comm->rank() == 0;
      try {
        if (hurried && round % 2 == 0) std::this_thread::sleep_for(200us * (round % 9));
        if (hurried && round % 4 == 3) comm->abort("now");
        if (round % 5 == 4) {
          float sum = 0;
          for (const void* peer : meeting.peers(hurried ? 50ms : 60s)) {
            for (std::size_t i = 0; i < n; ++i) sum += static_cast<const float*>(peer)[i];
          }
          meeting.leave();
          if (sum != 0) throw std::runtime_error("never");
          meeting.wait(hurried ? 0ms : 60s);
        } else {
          request.wait(hurried ? 0ms : 60s);
        }
      } catch (const CommunicatorError&) {
        ++failures;
        input.reset();
        output.reset();
        throw;
      }
    });
    for (const Outcome& result : results) {
      CHECK((!result.threw || result.failure.has_value()));
    }
  }
  CHECK(failures > 20);
}

TEST_CASE("in-process: memory may go as soon as a request is dropped", "[comm]") {
  constexpr std::size_t n = 300'000;
  for (int round = 0; round < 20; ++round) {
    (void)outcomes(3, patient, [&](Handle& comm) {
      auto data = std::make_unique<float[]>(n);
      auto request = comm->all_reduce(std::span<float>(data.get(), n));
      if (comm->rank() == 1) {
        std::this_thread::sleep_for(100us * (round % 10));
        request = {};
        return;
      }
      request.wait();
    });
  }
  SUCCEED();
}

// The injector ----------------------------------------------------------------------------------

namespace {

using Faulty = zero::FaultInjector<InProcessCommunicator>;

std::vector<Outcome> with_faults(std::vector<zero::Fault> faults, zero::InProcessOptions options,
                                 const std::function<void(Faulty&)>& rank_main) {
  return outcomes(2, options, [&](Handle& comm) {
    Faulty faulty(*comm, zero::FaultPlan{.faults = faults});
    rank_main(faulty);
  });
}

void reduce(Faulty& comm, std::size_t n) {
  std::vector<float> data(n, 1);
  comm.all_reduce(std::span<float>(data)).wait();
  if (n > 0 && data[n - 1] != 2) throw std::runtime_error("a wrong sum");
}

}  // namespace

TEST_CASE("fault injector: failure, delays, stuck ranks", "[comm]") {
  using zero::FaultAction;
  auto results = with_faults({{.action = FaultAction::fail, .rank = 1, .operation = 2}}, patient,
                             [](Faulty& comm) {
                               for (int i = 0; i < 4; ++i) reduce(comm, 5);
                             });
  CHECK(results[1].failure == CommunicatorFailure::injected);
  CHECK(results[1].sequence == 2);
  CHECK(results[0].failure == CommunicatorFailure::aborted);
  CHECK(results[0].sequence == 2);
  CHECK(results[0].says("injected failure"));

  for (const FaultAction action : {FaultAction::delay_start, FaultAction::delay_finish}) {
    results =
        with_faults({{.action = action, .rank = -1, .operation = 1, .every = 2, .delay = 20ms}},
                    patient, [](Faulty& comm) {
                      for (int i = 0; i < 4; ++i) reduce(comm, 5);
                    });
    CHECK_FALSE(results[0].threw);
    CHECK_FALSE(results[1].threw);
    CHECK(results[0].took >= 40ms);
  }

  results = with_faults({{.action = FaultAction::stick, .rank = 0}}, quick,
                        [](Faulty& comm) { (void)comm.meet("update", nullptr).peers(); });
  CHECK(results[0].failure == CommunicatorFailure::timeout);
  CHECK(results[0].says("injected"));
  CHECK(results[1].failure == CommunicatorFailure::timeout);
  CHECK(results[1].says("not come: 0"));
}

TEST_CASE("fault injector: other sizes, other orders", "[comm]") {
  using zero::FaultAction;
  using Operation = std::function<void(Faulty&)>;
  std::vector<Operation> operations{
      [](Faulty& comm) { reduce(comm, 5); },
      [](Faulty& comm) {
        std::vector<float> in(6), out(3);
        comm.reduce_scatter<float>(in, std::span<float>(out)).wait();
      },
      [](Faulty& comm) {
        std::vector<float> in(3), out(6);
        comm.all_gather<float>(in, std::span<float>(out)).wait();
      },
      [](Faulty& comm) {
        std::vector<float> in(6), out(6);
        comm.all_to_all<float>(in, std::span<float>(out)).wait();
      },
      [](Faulty& comm) {
        const std::vector<std::size_t> counts(2, 3);
        std::vector<float> in(6), out(3);
        comm.reduce_scatter_v<float>(in, std::span<float>(out), counts).wait();
      },
      [](Faulty& comm) {
        const std::vector<std::size_t> counts(2, 3);
        std::vector<float> in(3), out(6);
        comm.all_gather_v<float>(in, std::span<float>(out), counts).wait();
      },
      [](Faulty& comm) {
        const std::vector<std::size_t> counts(2, 3);
        std::vector<float> in(6), out(6);
        comm.all_to_all_v<float>(in, counts, std::span<float>(out), counts).wait();
      },
      [](Faulty& comm) {
        std::vector<float> data(6);
        comm.broadcast(std::span<float>(data), 0).wait();
      },
      [](Faulty& comm) {
        std::vector<std::byte> mine(2), all(4);
        comm.exchange(mine, all).wait();
      }};
  for (std::size_t i = 0; i < operations.size(); ++i) {
    CAPTURE(i);
    const auto results =
        with_faults({{.action = FaultAction::resize, .rank = 1}}, patient, operations[i]);
    CHECK(results[0].failure == CommunicatorFailure::mismatch);
    CHECK(results[1].failure == CommunicatorFailure::mismatch);
  }

  const auto two = [](Faulty& comm) {
    std::vector<float> a(3), b(4);
    auto first = comm.all_reduce(std::span<float>(a));
    auto second = comm.all_reduce(std::span<float>(b));
    first.wait(), second.wait();
  };
  auto results = with_faults({{.action = FaultAction::swap, .rank = 1}}, patient, two);
  CHECK(results[0].failure == CommunicatorFailure::mismatch);
  CHECK(results[1].failure == CommunicatorFailure::mismatch);
  CHECK(results[0].says("of 3 float32"));
  CHECK(results[0].says("of 4 float32"));
  // The same order everywhere, though not the written one; and nothing to swap with.
  results = with_faults({{.action = FaultAction::swap, .rank = -1}}, patient, two);
  CHECK_FALSE(results[0].threw);
  results = with_faults({{.action = FaultAction::swap, .rank = 1}}, patient,
                        [](Faulty& comm) { reduce(comm, 5); });
  CHECK_FALSE(results[0].threw);
  CHECK_FALSE(results[1].threw);
  // Held back for ever: its peer learns of that.
  results = with_faults({{.action = FaultAction::swap, .rank = 1}}, patient, [](Faulty& comm) {
    std::vector<float> a(3);
    auto request = comm.all_reduce(std::span<float>(a));
    if (comm.rank() == 0) request.wait();
  });
  CHECK(results[0].failure == CommunicatorFailure::aborted);
}

TEST_CASE("fault injector: duplicates go wrong by the same plan", "[comm]") {
  using zero::FaultAction;
  // Operations 0 and 3 are the first's, 1 and 2 make duplicates, 4 and 5 are theirs.
  const auto rank_main = [](Faulty& comm) {
    reduce(comm, 5);
    Faulty a = comm.duplicate();
    Faulty b = comm.duplicate();
    reduce(comm, 5);
    reduce(b, 5);
    reduce(a, 5);
    if (comm.started() != 6 || a.started() != 6) throw std::runtime_error("what was counted");
  };
  const char* const names[] = {"all_reduce", "duplicate",  "duplicate",
                               "all_reduce", "all_reduce", "all_reduce"};
  for (std::uint64_t i = 0; i < 7; ++i) {
    CAPTURE(i);
    const auto results = with_faults({{.rank = 1, .operation = i}}, patient, rank_main);
    CHECK(results[1].threw == (i < 6));
    CHECK(results[0].threw == (i < 6));
    if (i == 6) continue;
    CHECK(results[1].failure == CommunicatorFailure::injected);
    CHECK(results[1].operation == names[i]);
    CHECK(results[0].operation == names[i]);
    CHECK(results[0].says("injected failure"));
  }
  // The first operation of the second duplicate, whichever it is of all.
  auto results = with_faults({{.rank = 1, .operation = 0, .duplicate = 2}}, patient, rank_main);
  CHECK(results[1].sequence == 4);
  CHECK(results[0].says("injected failure"));
  results =
      with_faults({{.action = FaultAction::resize, .rank = 1, .duplicate = 1}}, patient, rank_main);
  CHECK(results[0].failure == CommunicatorFailure::mismatch);
  results =
      with_faults({{.action = FaultAction::stick, .rank = 1, .operation = 1}}, quick, rank_main);
  CHECK(results[0].failure == CommunicatorFailure::timeout);
  CHECK(results[1].failure == CommunicatorFailure::timeout);
  CHECK(results[1].operation == "duplicate");
}

TEST_CASE("errors of a part say who its ranks are in the whole", "[comm]") {
  std::vector<std::string> texts(4);
  zero::run_ranks(
      4,
      [&](InProcessCommunicator& comm) {
        InProcessCommunicator part = comm.split(comm.rank() % 2, comm.rank());
        if (comm.rank() == 3) part.abort("the disk is full");
        try {
          part.barrier().wait();
        } catch (const CommunicatorError& error) {
          texts[static_cast<std::size_t>(comm.rank())] = error.what();
        }
      },
      patient);
  CHECK(texts[0].empty());
  CHECK(texts[2].empty());
  CHECK(texts[1].find("rank 1 called abort: the disk is full (ranks of a part; in the whole that "
                      "was split they are, in order: 1, 3)") != std::string::npos);
}
