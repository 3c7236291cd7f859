// SPDX-License-Identifier: Apache-2.0
// What a communicator over NCCL does when NCCL, CUDA, a peer or the caller fails: nobody hangs, and
// everybody learns why.
#include <cuda_runtime_api.h>
#include <nccl.h>

#include <chrono>
#include <cstddef>
#include <exception>
#include <future>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "catch.hpp"
#include "conformance/memory.hpp"
#include "cuda/nccl_ranks.hpp"
#include "fake/cuda_runtime.hpp"
#include "fake/nccl.hpp"
#include "zero/comm/nccl.cuh"
#include "zero/cuda/stream.hpp"
#include "zero/error.hpp"

namespace {

namespace fake = zero_emulation::nccl;
using namespace std::chrono_literals;
using Catch::Matchers::ContainsSubstring;
using Clock = std::chrono::steady_clock;
using nccl_ranks::largest_world;
using zero::CommunicatorError;
using zero::CommunicatorFailure;
using zero::NcclCommunicator;
using zero_test::Vector;

zero::NcclOptions quick(std::chrono::milliseconds timeout = 300ms) {
  zero::NcclOptions options;
  options.timeout = timeout;
  options.init_timeout = 20s;
  options.teardown = 1s;
  options.watchdog_interval = 10ms;
  return options;
}
zero::NcclOptions patient() { return quick(60'000ms); }
zero::NcclOptions unwatched(zero::NcclOptions options) {
  options.watchdog = false;
  return options;
}

/// What a rank threw, as a value that other threads may look at.
struct Failure {
  std::string text{};
  std::string operation{};
  std::optional<CommunicatorFailure> cause{};
  std::uint64_t sequence = 0;
  bool usage = false;
};

template <class F>
Failure attempt(F&& f) {
  try {
    f();
  } catch (const CommunicatorError& error) {
    return {error.what(), error.operation(), error.failure(), error.sequence()};
  } catch (const zero::UsageError& error) {
    return {.text = error.what(), .usage = true};
  } catch (const std::exception& error) {
    return {.text = error.what()};
  }
  return {};
}

/// What every rank threw of `rank_main(comm)`.
template <class F>
std::vector<Failure> failures(int size, F rank_main, const zero::NcclOptions& options) {
  (void)largest_world();
  std::vector<Failure> all;
  for (const std::exception_ptr& thrown : nccl_ranks::run(size, rank_main, options)) {
    all.push_back(attempt([&] {
      if (thrown) std::rethrow_exception(thrown);
    }));
  }
  return all;
}

void sum_once(NcclCommunicator& comm, Vector<float>& data) {
  comm.all_reduce(std::span<float>(data)).wait();
}

/// Forgets faults before and after a test, and that nothing is left behind.
class Clean {
 public:
  Clean() { fake::reset(); }
  ~Clean() {
    fake::reset();
    CHECK(fake::communicators() == 0);
  }
};

}  // namespace

TEST_CASE("NCCL: a rank that doesn't come is a timeout, with sizes and a remedy", "[faults]") {
  const Clean clean;
  for (const bool watchdog : {true, false}) {
    for (const auto reduction : {zero::NcclReduction::rank_order, zero::NcclReduction::native}) {
      zero::NcclOptions options = quick();
      options.reduction = reduction;
      options.watchdog = watchdog;
      const Clock::time_point begin = Clock::now();
      const std::vector<Failure> all = failures(
          3,
          [](NcclCommunicator& comm) {
            Vector<float> data(1234, 1);
            sum_once(comm, data);
            if (comm.rank() == 2) {
              std::this_thread::sleep_for(900ms);
              return;
            }
            sum_once(comm, data);
          },
          options);
      CHECK(Clock::now() - begin < 10s);
      for (const std::size_t rank : {0U, 1U}) {
        CAPTURE(all[rank].text);
        CHECK(all[rank].cause.has_value());
        CHECK(all[rank].operation == "all_reduce");
        CHECK(all[rank].sequence == 2);  // after the one that compares options
        CHECK_THAT(all[rank].text,
                   ContainsSubstring("rank " + std::to_string(rank)) &&
                       ContainsSubstring("all_reduce (sum) of 1234 float32, sequence 2"));
      }
      // One of them was first; NCCL may have told the other.
      CHECK((all[0].cause == CommunicatorFailure::timeout ||
             all[1].cause == CommunicatorFailure::timeout));
      const Failure& first = all[0].cause == CommunicatorFailure::timeout ? all[0] : all[1];
      CHECK_THAT(first.text, ContainsSubstring("waited 0.3 s") &&
                                 ContainsSubstring("NcclOptions::timeout") &&
                                 ContainsSubstring("NCCL_DEBUG=INFO"));
      CHECK(all[2].text.empty());
    }
  }
}

TEST_CASE("NCCL: the watchdog ends what no host thread waits for", "[faults]") {
  const Clean clean;
  const std::vector<Failure> all = failures(
      2,
      [](NcclCommunicator& comm) {
        Vector<float> data(64, 1);
        sum_once(comm, data);
        if (comm.rank() == 1) {
          while (!comm.aborted()) std::this_thread::sleep_for(5ms);  // told by NCCL
          return;
        }
        comm.all_reduce(std::span<float>(data)).enqueue();
        // The stream comes to rest though nobody asks the communicator.
        comm.stream().synchronize();
        const Failure found = attempt([&] { comm.check(); });
        if (found.cause != CommunicatorFailure::timeout) {
          throw std::runtime_error("check: " + found.text);
        }
        sum_once(comm, data);
      },
      quick());
  CAPTURE(all[0].text, all[1].text);
  CHECK(all[0].cause == CommunicatorFailure::timeout);
  CHECK_THAT(all[0].text, ContainsSubstring("all_reduce (sum) of 64 float32, sequence 2") &&
                              ContainsSubstring("waited 0.3 s"));
  CHECK(all[1].text.empty());
}

TEST_CASE("NCCL: without a watchdog, check and wait(event) find it", "[faults]") {
  const Clean clean;
  for (const bool by_event : {true, false}) {
    const std::vector<Failure> all = failures(
        2,
        [&](NcclCommunicator& comm) {
          Vector<float> data(64, 1);
          sum_once(comm, data);
          if (comm.rank() == 1) return std::this_thread::sleep_for(800ms);
          comm.all_reduce(std::span<float>(data)).enqueue();
          if (by_event) {
            const zero::cuda::Event over;
            over.record(comm.stream());
            comm.wait(over);
          }
          for (;;) {
            comm.check();
            std::this_thread::sleep_for(1ms);
          }
        },
        unwatched(quick()));
    CHECK(all[0].cause == CommunicatorFailure::timeout);
    CHECK(all[0].operation == (by_event ? "wait" : "check"));
    CHECK_THAT(all[0].text, ContainsSubstring("all_reduce (sum) of 64 float32, sequence 2"));
  }
}

TEST_CASE("NCCL: an asynchronous error ends the operation on all ranks, in NCCL's words",
          "[faults]") {
  for (const bool watchdog : {true, false}) {
    const Clean clean;
    zero::NcclOptions options = patient();
    options.watchdog = watchdog;
    const std::vector<Failure> all = failures(
        3,
        [](NcclCommunicator& comm) {
          Vector<float> data(96, 1);
          sum_once(comm, data);
          comm.barrier().wait();
          std::this_thread::sleep_for(50ms);  // until nobody is in the barrier any more
          if (comm.rank() == 1) fake::fail_operation(1, ncclSystemError);
          sum_once(comm, data);
        },
        options);
    for (std::size_t rank = 0; rank < 3; ++rank) {
      CAPTURE(all[rank].text);
      CHECK(all[rank].cause == CommunicatorFailure::transport);
      CHECK(all[rank].operation == "all_reduce");
      CHECK_THAT(all[rank].text, ContainsSubstring("96 float32") && ContainsSubstring("NCCL 2.28"));
    }
    CHECK_THAT(all[1].text, ContainsSubstring(ncclGetErrorString(ncclSystemError)) &&
                                ContainsSubstring("NCCL_SOCKET_IFNAME"));
    CHECK_THAT(all[0].text, ContainsSubstring(ncclGetErrorString(ncclRemoteError)) &&
                                ContainsSubstring("see what the other ranks printed"));
  }
}

TEST_CASE("NCCL: a call that fails at once", "[faults]") {
  for (const char* call : {"ncclGroupEnd", "ncclSend", "ncclAllGather", "ncclGroupStart"}) {
    const Clean clean;
    CAPTURE(call);
    const std::vector<Failure> all = failures(
        2,
        [&](NcclCommunicator& comm) {
          Vector<float> data(96, 1);
          sum_once(comm, data);
          comm.barrier().wait();
          if (comm.rank() == 0) {
            std::this_thread::sleep_for(50ms);  // until nobody is in the barrier any more
            fake::fail_call(call, ncclInternalError);
          } else {
            while (!comm.aborted()) std::this_thread::sleep_for(1ms);
          }
          sum_once(comm, data);
        },
        patient());
    CHECK(all[0].cause == CommunicatorFailure::transport);
    CHECK(all[0].operation == "all_reduce");
    CHECK_THAT(all[0].text, ContainsSubstring(ncclGetErrorString(ncclInternalError)));
    CHECK(all[1].cause == CommunicatorFailure::transport);
  }
}

TEST_CASE("NCCL: ranks that want different things fail, all of them", "[faults]") {
  const Clean clean;
  const auto both = [&](auto differ) {
    return failures(
        2,
        [&](NcclCommunicator& comm) {
          Vector<float> data(4000, 1), all(8000);
          sum_once(comm, data);
          differ(comm, data, all);
        },
        quick());
  };
  const auto check = [](const std::vector<Failure>& all) {
    for (const Failure& failure : all) {
      CAPTURE(failure.text);
      CHECK(failure.cause.has_value());
    }
  };
  check(both([](NcclCommunicator& comm, Vector<float>& data, Vector<float>&) {
    const std::size_t n = comm.rank() == 0 ? 4000 : 3000;
    comm.all_reduce(std::span<float>(data).first(n)).wait();
  }));
  check(both([](NcclCommunicator& comm, Vector<float>& data, Vector<float>& all) {
    if (comm.rank() == 0) return sum_once(comm, data);
    comm.all_gather(std::span<const float>(data), std::span<float>(all)).wait();
  }));
  check(both([](NcclCommunicator& comm, Vector<float>& data, Vector<float>& all) {
    const std::vector<std::size_t> counts{comm.rank() == 0 ? 1000U : 1500U, 2000};
    const std::size_t mine = counts[static_cast<std::size_t>(comm.rank())];
    comm.all_gather_v(std::span<const float>(data).first(mine),
                      std::span<float>(all).first(counts[0] + counts[1]), counts)
        .wait();
  }));
  check(both([](NcclCommunicator& comm, Vector<float>& data, Vector<float>&) {
    comm.broadcast(std::span<float>(data), comm.rank()).wait();
  }));
}

TEST_CASE("NCCL: abort, from another thread, with its reason", "[faults]") {
  const Clean clean;
  const std::vector<Failure> all = failures(
      2,
      [](NcclCommunicator& comm) {
        Vector<float> data(64, 1);
        sum_once(comm, data);
        zero::NcclCommunicatorRef handle = comm;
        std::thread other;
        if (comm.rank() == 0) {
          other = std::thread([handle] {
            std::this_thread::sleep_for(50ms);
            handle.abort("the user pressed a key");
          });
        }
        const Failure first = attempt([&] {
          Vector<std::byte> none;
          if (comm.rank() == 0) {
            sum_once(comm, data);
          } else {
            for (;;) comm.check();
          }
        });
        if (other.joinable()) other.join();
        if (!first.cause) throw std::runtime_error("no failure: " + first.text);
        // From now on everything does.
        for (int i = 0; i < 3; ++i) {
          const Failure again = attempt([&] { comm.barrier().wait(); });
          if (again.cause != first.cause) throw std::runtime_error("then: " + again.text);
        }
        comm.check();
      },
      patient());
  CHECK(all[0].cause == CommunicatorFailure::aborted);
  CHECK_THAT(all[0].text, ContainsSubstring("rank 0 called abort: the user pressed a key"));
  CHECK(all[1].cause == CommunicatorFailure::transport);
}

TEST_CASE("NCCL: a request that is dropped poisons, one that is enqueued does not", "[faults]") {
  const Clean clean;
  const std::vector<Failure> all = failures(
      2,
      [](NcclCommunicator& comm) {
        Vector<float> data(64, 1);
        sum_once(comm, data);
        comm.all_reduce(std::span<float>(data)).enqueue();
        comm.barrier().wait();
        std::this_thread::sleep_for(50ms);  // until nobody is in the barrier any more
        if (comm.rank() == 0) {
          (void)comm.all_reduce(std::span<float>(data));
          comm.barrier().wait();
        } else {
          for (;;) comm.check();
        }
      },
      patient());
  CHECK(all[0].cause == CommunicatorFailure::aborted);
  CHECK_THAT(all[0].text, ContainsSubstring("dropped its unfinished request of all_reduce") &&
                              ContainsSubstring("sequence 4"));
  CHECK(all[1].cause == CommunicatorFailure::transport);
}

TEST_CASE("NCCL: destroying a communicator neither throws nor hangs", "[faults]") {
  const Clean clean;
  for (const int what : {0, 1, 2}) {
    const Clock::time_point begin = Clock::now();
    const std::vector<Failure> all = failures(
        2,
        [&](NcclCommunicator& comm) {
          Vector<float> data(64, 1);
          sum_once(comm, data);
          if (comm.rank() == 1) return std::this_thread::sleep_for(200ms);
          std::this_thread::sleep_for(50ms);  // until nobody is in the sum any more
          if (what == 0) comm.all_reduce(std::span<float>(data)).enqueue();  // nobody joins in
          if (what == 1) {
            auto request = comm.all_reduce(std::span<float>(data));
            NcclCommunicator gone = std::move(comm);
          }
          if (what == 2) {
            const auto open = comm.batch();
            auto request = comm.all_reduce(std::span<float>(data));
            throw std::runtime_error("on the way");
          }
        },
        patient());
    CHECK(Clock::now() - begin < 10s);
    CHECK(all[0].text == (what == 2 ? "on the way" : ""));
    CHECK(all[1].text.empty());
  }
}

TEST_CASE("NCCL: a stream that stands still for another reason is not waited for", "[faults]") {
  const Clean clean;
  std::promise<void> open;
  const std::shared_future<void> opened = open.get_future().share();
  const Clock::time_point begin = Clock::now();
  std::vector<std::thread> threads;
  std::vector<Failure> all(2);
  std::vector<zero::cuda::Stream> streams(2);
  (void)largest_world();
  const ncclUniqueId id = zero::detail::new_nccl_id();
  for (int rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&, rank] {
      const auto r = static_cast<std::size_t>(rank);
      Vector<float> data(64, 1);
      all[r] = attempt([&] {
        zero::cuda::check(cudaSetDevice(rank), "cudaSetDevice");
        streams[r] = zero::cuda::Stream();
        NcclCommunicator comm(id, rank, 2, streams[r], quick());
        sum_once(comm, data);
        zero::cuda::check(zero_emulation::enqueue(streams[r].view().get(), [=] { opened.wait(); }),
                          "enqueue");
        sum_once(comm, data);
      });
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(Clock::now() - begin < 10s);
  for (const Failure& each : all) {
    CHECK(each.cause.has_value());
    CHECK_THAT(each.text, ContainsSubstring("The stream is still busy"));
  }
  open.set_value();
  for (const zero::cuda::Stream& stream : streams) stream.synchronize();
}

TEST_CASE("NCCL: joining fails or takes too long", "[faults]") {
  (void)largest_world();
  const ncclUniqueId id = zero::detail::new_nccl_id();
  zero::NcclOptions options = quick();
  options.init_timeout = 200ms;
  {
    const Clean clean;
    const zero::cuda::Stream stream;
    const Failure alone = attempt([&] { NcclCommunicator(id, 0, 2, stream, options); });
    CHECK(alone.cause == CommunicatorFailure::timeout);
    CHECK_THAT(alone.text, ContainsSubstring("init_timeout"));
  }
  {
    const Clean clean;
    fake::hang_init(1);
    const std::vector<Failure> all = failures(2, [](NcclCommunicator&) {}, options);
    for (const Failure& each : all) CHECK(each.cause.has_value());
    // One of them was first; NCCL may have told the other.
    CHECK((all[0].cause == CommunicatorFailure::timeout ||
           all[1].cause == CommunicatorFailure::timeout));
  }
  {
    const Clean clean;
    fake::fail_init(1, ncclSystemError);
    const std::vector<Failure> all = failures(2, [](NcclCommunicator&) {}, options);
    for (const Failure& each : all) CHECK(each.cause == CommunicatorFailure::transport);
    CHECK_THAT(all[1].text, ContainsSubstring(ncclGetErrorString(ncclSystemError)));
  }
  {
    const Clean clean;  // two ranks on one device
    const ncclUniqueId shared = zero::detail::new_nccl_id();
    std::vector<Failure> all(2);
    std::vector<std::thread> threads;
    for (int r = 0; r < 2; ++r) {
      threads.emplace_back([&, r] {
        const zero::cuda::Stream stream;
        all[static_cast<std::size_t>(r)] =
            attempt([&] { NcclCommunicator(shared, r, 2, stream, options); });
      });
    }
    for (std::thread& thread : threads) thread.join();
    for (const Failure& each : all) {
      CAPTURE(each.text);
      CHECK(each.cause == CommunicatorFailure::transport);
      CHECK_THAT(each.text, ContainsSubstring("GPU of its own"));
    }
  }
}

TEST_CASE("NCCL: options that differ are a mismatch, on all ranks", "[faults]") {
  const Clean clean;
  (void)largest_world();
  const ncclUniqueId id = zero::detail::new_nccl_id();
  const auto thrown = nccl_ranks::run_threads(3, [&](int rank) {
    const zero::cuda::Stream stream;
    zero::NcclOptions options = patient();
    if (rank == 2) options.reduction = zero::NcclReduction::native;
    NcclCommunicator(id, rank, 3, stream, options);
  });
  for (const std::exception_ptr& each : thrown) {
    const Failure failure = attempt([&] {
      if (each) std::rethrow_exception(each);
    });
    CHECK(failure.cause == CommunicatorFailure::mismatch);
    CHECK_THAT(failure.text, ContainsSubstring("rank 1 has NcclReduction::rank_order") &&
                                 ContainsSubstring("rank 2 has NcclReduction::native"));
  }
}

TEST_CASE("NCCL: a peer that joins but doesn't compare options", "[faults]") {
  const Clean clean;
  (void)largest_world();
  const ncclUniqueId id = zero::detail::new_nccl_id();
  zero::NcclOptions options = quick();
  options.init_timeout = 500ms;
  const auto thrown = nccl_ranks::run_threads(2, [&](int rank) {
    const zero::cuda::Stream stream;
    if (rank == 0) {
      NcclCommunicator(id, 0, 2, stream, options);
    } else {
      ncclComm_t comm = zero::detail::NcclInit(id, 1, 2).finish(Clock::now() + 20s);
      std::this_thread::sleep_for(900ms);
      (void)ncclCommAbort(comm);
    }
  });
  const Failure failure = attempt([&] {
    if (thrown[0]) std::rethrow_exception(thrown[0]);
  });
  CHECK(failure.cause == CommunicatorFailure::timeout);
  CHECK_THAT(
      failure.text,
      ContainsSubstring("waited 0.5 s; NcclCommunicator (comparing options), sequence 0, was") &&
          ContainsSubstring("init_timeout"));
}

TEST_CASE("NCCL: a reason that is a sentence keeps one full stop", "[faults]") {
  const Clean clean;
  const std::vector<Failure> all = failures(
      1,
      [](NcclCommunicator& comm) {
        comm.abort("data is null. Nothing was started.");
        comm.check();
      },
      patient());
  CHECK_THAT(all[0].text, ContainsSubstring("Nothing was started. This communicator"));
}

TEST_CASE("NCCL: what waits behind an exchange is named too", "[faults]") {
  const Clean clean;
  const std::vector<Failure> all = failures(
      2,
      [](NcclCommunicator& comm) {
        Vector<float> data(64, 1);
        sum_once(comm, data);
        if (comm.rank() == 1) return std::this_thread::sleep_for(800ms);
        std::vector<std::byte> mine(8), both(16);
        auto first = comm.exchange(mine, both);
        auto second = comm.all_reduce(std::span<float>(data));
        second.enqueue();
      },
      quick());
  CHECK(all[0].cause == CommunicatorFailure::timeout);
  CHECK_THAT(all[0].text,
             ContainsSubstring("all_reduce (sum) of 64 float32, sequence 3") &&
                 ContainsSubstring("exchange of 8 bytes into 16, sequence 2, was not in "
                                   "the stream yet"));
}

TEST_CASE("NCCL: a split that a rank stays away from", "[faults]") {
  const Clean clean;
  zero::NcclOptions options = quick();
  options.init_timeout = 500ms;
  const std::vector<Failure> all = failures(
      2,
      [](NcclCommunicator& comm) {
        if (comm.rank() == 1) return std::this_thread::sleep_for(900ms);
        (void)comm.split(0, 0);
      },
      options);
  CHECK(all[0].cause.has_value());
  CHECK(all[0].operation == "split");
  CHECK(all[1].text.empty());
}

TEST_CASE("NCCL: no memory for the workspace, and a device that fails", "[faults]") {
  for (const bool broken : {false, true}) {
    {
      const Clean clean;
      const std::vector<Failure> all = failures(
          2,
          [&](NcclCommunicator& comm) {
            Vector<float> data(100'000, 1);
            comm.barrier().wait();
            if (comm.rank() == 1) {
              for (;;) comm.check();
            }
            std::this_thread::sleep_for(50ms);  // until nobody is in the barrier any more
            if (broken) {
              zero_emulation::break_device(0, cudaErrorIllegalAddress);
            } else {
              zero_emulation::fail("cudaMalloc", 1, cudaErrorMemoryAllocation);
            }
            sum_once(comm, data);
          },
          patient());
      CAPTURE(all[0].text);
      CHECK_THAT(all[0].text, ContainsSubstring(broken ? "cudaErrorIllegalAddress" : "workspace"));
      CHECK(all[1].cause == CommunicatorFailure::transport);
    }
    zero_emulation::reset();
  }
}

TEST_CASE("NCCL: no allocation and no waiting host once warm", "[faults]") {
  const Clean clean;
  for (const auto reduction : {zero::NcclReduction::rank_order, zero::NcclReduction::native}) {
    zero::NcclOptions options = unwatched(patient());
    options.reduction = reduction;
    const std::vector<Failure> all = failures(
        1,
        [](NcclCommunicator& comm) {
          Vector<float> data(1000, 1), parts(1000);
          const auto step = [&] {
            comm.all_reduce(std::span<float>(data)).enqueue();
            comm.reduce_scatter(std::span<const float>(data), std::span<float>(parts)).enqueue();
            comm.all_gather(std::span<const float>(parts), std::span<float>(data)).enqueue();
          };
          step();
          comm.barrier().wait();
          const auto before = zero_emulation::counters();
          for (int i = 0; i < 100; ++i) {
            step();
            comm.check();
          }
          const auto after = zero_emulation::counters();
          if (after.allocations != before.allocations) throw std::runtime_error("it allocates");
          if (after.host_synchronizations != before.host_synchronizations) {
            throw std::runtime_error("the host waits");
          }
          comm.barrier().wait();
        },
        options);
    CHECK(all[0].text.empty());
  }
}
