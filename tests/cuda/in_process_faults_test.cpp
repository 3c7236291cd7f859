// SPDX-License-Identifier: Apache-2.0
// What in-process ranks over CUDA memory do when ranks fail, differ, leave or stay away, and when
// their devices do: nobody hangs, and nobody reads what a rank has freed.
#include <algorithm>
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
#include <vector>

#include "catch.hpp"
#include "fake/cuda_runtime.hpp"
#include "zero/comm/fault_injector.hpp"
#include "zero/cuda/in_process.cuh"

namespace {

using namespace std::chrono_literals;
using zero::CommunicatorError;
using zero::CommunicatorFailure;
using zero::CudaError;
using zero::cuda::Event;
using zero::cuda::InProcessCommunicator;
using zero::cuda::InProcessRequest;
using zero::cuda::Stream;
using Clock = std::chrono::steady_clock;

constexpr zero::InProcessOptions quick{.timeout = 200ms};  // only where a timeout is the point
constexpr zero::InProcessOptions patient{.timeout = 60s};

/// How one rank ended.
struct Outcome {
  bool threw = false;
  std::optional<CommunicatorFailure> failure{};  // of a CommunicatorError
  std::optional<cudaError_t> cuda{};             // of a CudaError
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
  } catch (const std::exception& error) {
    outcome.threw = true;
    outcome.text = error.what();
    if (const auto* comm = dynamic_cast<const CommunicatorError*>(&error)) {
      outcome.failure = comm->failure();
      outcome.operation = comm->operation();
      outcome.sequence = comm->sequence();
    }
    if (const auto* cuda = dynamic_cast<const CudaError*>(&error)) outcome.cuda = cuda->code();
  }
  outcome.took = Clock::now() - start;
  return outcome;
}

/// Runs all ranks and tells how each ended. No rank leaves before all have returned, save those
/// that give up the handle themselves.
using Handle = std::optional<InProcessCommunicator>;
std::vector<Outcome> outcomes(int size, zero::InProcessOptions options,
                              const std::function<void(Handle&)>& rank_main) {
  zero::cuda::InProcessWorld world(size, options);
  std::vector<Stream> streams(static_cast<std::size_t>(size));
  std::vector<Handle> handles;
  for (int rank = 0; rank < size; ++rank) {
    handles.emplace_back(world.communicator(rank, streams[static_cast<std::size_t>(rank)]));
  }
  std::vector<Outcome> results(handles.size());
  std::vector<std::thread> threads;
  for (std::size_t rank = 0; rank < handles.size(); ++rank) {
    threads.emplace_back(
        [&, rank] { results[rank] = outcome_of([&] { rank_main(handles[rank]); }); });
  }
  for (std::thread& thread : threads) thread.join();
  for (const Stream& stream : streams) (void)cudaStreamSynchronize(stream.view().get());
  return results;
}

/// Holds streams up until it is opened, at the latest by its end.
class Gate {
 public:
  Gate() = default;
  Gate(const Gate&) = delete;
  Gate& operator=(const Gate&) = delete;
  ~Gate() { open(); }

  void hold_up(zero::cuda::StreamView stream) const {
    const auto body = [opened = opened_] {
      while (!*opened) std::this_thread::sleep_for(100us);
    };
    zero::cuda::check(zero_emulation::enqueue(stream.get(), body), "enqueue");
  }
  void open() { *opened_ = true; }

 private:
  std::shared_ptr<std::atomic<bool>> opened_ = std::make_shared<std::atomic<bool>>(false);
};

/// Device memory, freed while streams go on.
class Buffer {
 public:
  explicit Buffer(std::size_t count) : count_(count), data_(new float[count]()) {}
  [[nodiscard]] std::span<float> span() const { return {data_.get(), count_}; }
  void free() { data_.reset(); }

 private:
  std::size_t count_;
  std::unique_ptr<float[]> data_;
};

}  // namespace

TEST_CASE("CUDA in-process: a rank that does not come is named", "[cuda]") {
  std::atomic<int> failed{0};
  const auto results = outcomes(3, quick, [&](Handle& comm) {
    comm->barrier().wait(60s);
    std::vector<float> data(1234);
    if (comm->rank() == 1) {
      while (failed != 2) std::this_thread::sleep_for(2ms);
      return;
    }
    auto request = comm->all_reduce(std::span<float>(data));
    try {
      comm->rank() == 0 ? request.enqueue() : request.wait();
    } catch (...) {
      ++failed;
      throw;
    }
  });
  CHECK_FALSE(results[1].threw);
  for (const std::size_t rank : {0U, 2U}) {
    CAPTURE(results[rank].text);
    CHECK(results[rank].failure == CommunicatorFailure::timeout);
    CHECK(results[rank].operation == "all_reduce");
    CHECK(results[rank].sequence == 1);
    CHECK(results[rank].says("not come: 1"));
    CHECK(results[rank].says("1234 float32"));
  }
  CHECK(results[0].took >= 190ms);
}

TEST_CASE("CUDA in-process: ranks that differ", "[cuda]") {
  auto results = outcomes(2, patient, [](Handle& comm) {
    std::vector<float> data(static_cast<std::size_t>(comm->rank()) + 9);
    comm->all_reduce(std::span<float>(data)).enqueue();
  });
  for (const Outcome& result : results) {
    CHECK(result.failure == CommunicatorFailure::mismatch);
    CHECK(result.says("rank 0 called all_reduce (sum) of 9 float32"));
    CHECK(result.says("rank 1 called all_reduce (sum) of 10 float32"));
  }
  results = outcomes(2, patient, [](Handle& comm) {
    std::vector<float> data(4);
    if (comm->rank() == 0) return comm->broadcast(std::span<float>(data), 0).wait();
    comm->barrier().wait();
  });
  CHECK(results[0].failure == CommunicatorFailure::mismatch);
  CHECK(results[1].failure == CommunicatorFailure::mismatch);
}

TEST_CASE("CUDA in-process: poison", "[cuda]") {
  zero::cuda::InProcessWorld world(2, patient);
  Stream streams[2];
  InProcessCommunicator zero = world.communicator(0, streams[0]);
  InProcessCommunicator one = world.communicator(1, streams[1]);
  std::vector<float> data(5);
  CHECK_NOTHROW(zero.check());
  CHECK(world.failed_rank() == -1);
  CHECK_THROWS_AS(world.communicator(1, streams[1]), zero::UsageError);

  Event event;
  event.record(streams[0]);
  streams[0].synchronize();
  auto under_way = zero.all_reduce(std::span<float>(data));
  one.abort("the user lost patience");
  CHECK(world.failed_rank() == 1);
  CHECK_NOTHROW(zero.wait(event));  // had happened before
  for (const auto& action : std::vector<std::function<void()>>{
           [&] { under_way.enqueue(); }, [&] { under_way.wait(); }, [&] { (void)under_way.done(); },
           [&] { zero.check(); }, [&] { one.check(); }, [&] { (void)one.barrier(); },
           [&] { (void)one.all_reduce(std::span<float>(data)); }}) {
    const Outcome outcome = outcome_of(action);
    CAPTURE(outcome.text);
    CHECK(outcome.failure == CommunicatorFailure::aborted);
    CHECK(outcome.says("rank 1 called abort: the user lost patience"));
    CHECK(outcome.took < 10s);
  }
}

TEST_CASE("CUDA in-process: a dropped request", "[cuda]") {
  const auto results = outcomes(2, patient, [](Handle& comm) {
    std::vector<float> data(7);
    auto request = comm->all_reduce(std::span<float>(data));
    if (comm->rank() == 0) request.wait();
  });
  CHECK_FALSE(results[1].threw);
  CHECK(results[0].failure == CommunicatorFailure::aborted);
  CHECK(results[0].says("rank 1 dropped its unfinished request of all_reduce"));
}

TEST_CASE("CUDA in-process: a rank leaves behind what it has enqueued", "[cuda]") {
  // Its handle, requests and events are gone while the streams have not even begun.
  Gate gate;
  std::atomic<int> gone{0};
  std::vector<float> data[3] = {std::vector<float>(1000, 1), std::vector<float>(1000, 2),
                                std::vector<float>(1000, 3)};
  const auto results = outcomes(3, patient, [&](Handle& comm) {
    auto& mine = data[static_cast<std::size_t>(comm->rank())];
    const zero::cuda::StreamView stream = comm->stream();
    gate.hold_up(stream);
    comm->all_reduce(std::span<float>(mine)).enqueue();
    comm->all_reduce(std::span<float>(mine)).enqueue();
    comm.reset();
    if (++gone == 3) gate.open();
    stream.synchronize();
  });
  for (std::size_t rank = 0; rank < 3; ++rank) {
    CHECK_FALSE(results[rank].threw);
    CHECK(std::all_of(data[rank].begin(), data[rank].end(), [](float x) { return x == 18; }));
  }

  const auto missed = outcomes(2, patient, [](Handle& comm) {
    if (comm->rank() == 1) return comm.reset();
    std::vector<float> mine(3);
    comm->all_reduce(std::span<float>(mine)).enqueue();
  });
  CHECK(missed[0].failure == CommunicatorFailure::rank_left);
}

TEST_CASE("CUDA in-process: memory may go as soon as a call has thrown", "[cuda]") {
  // Each rank frees its buffers the moment that its call fails or its request is gone, at every
  // stage of what its peers have enqueued; a sanitizer sees a device that still reads.
  constexpr std::size_t n = 20'000;
  std::atomic<int> failures{0};
  zero_emulation::delay(3, 300);
  for (int round = 0; round < 60; ++round) {
    const auto results = outcomes(3, patient, [&](Handle& comm) {
      Buffer input(3 * n), output(3 * n);
      const bool hurried = comm->rank() == 0;
      const auto start = [&] {
        if (round % 4 == 0) return comm->all_reduce(input.span());
        if (round % 4 == 1) {
          return comm->reduce_scatter<float>(input.span(), output.span().first(n));
        }
        if (round % 4 == 2) return comm->all_gather<float>(input.span().first(n), output.span());
        return comm->all_to_all<float>(input.span(), output.span());
      };
      InProcessRequest request = start(), next = start();
      try {
        if (hurried) std::this_thread::sleep_for(100us * (round % 9));
        if (hurried && round % 3 == 0) comm->abort("now");
        if (hurried && round % 3 == 1) next = {};
        request.wait(hurried ? 0ms : 60s);
        next.wait(hurried ? 0ms : 60s);
      } catch (const CommunicatorError&) {
        ++failures;
        input.free();
        output.free();
        throw;
      }
    });
    for (const Outcome& result : results) {
      CAPTURE(result.text);
      CHECK((!result.threw || result.failure.has_value()));
    }
  }
  zero_emulation::delay(0, 0);
  CHECK(failures > 20);
}

TEST_CASE("CUDA in-process: a device that gets stuck", "[cuda]") {
  // Rank 1's stream never gets to what was enqueued; all ranks' hosts did their parts.
  Gate gate;
  Buffer data[2] = {Buffer(10), Buffer(10)};
  std::atomic<int> returned{0};
  auto results = outcomes(2, quick, [&](Handle& comm) {
    if (comm->rank() == 1) gate.hold_up(comm->stream());
    auto request = comm->all_reduce(data[comm->rank()].span());
    const Outcome first = outcome_of([&] { request.wait(); });
    ++returned;
    while (returned < 2) std::this_thread::sleep_for(1ms);
    gate.open();
    comm->stream().synchronize();
    const Outcome second = outcome_of([&] { request.wait(); });  // too late now
    if (second.failure != CommunicatorFailure::timeout) throw std::logic_error("it fails again");
    if (first.operation != "all_reduce") throw std::logic_error("the operation");
    if (first.took > 10s || second.took > 10s) throw std::logic_error("took too long");
    throw std::runtime_error(first.text);
  });
  for (const Outcome& result : results) {
    CAPTURE(result.text);
    CHECK(result.says("in all_reduce"));
    CHECK(result.says("0.2 s"));
    CHECK(result.says("never ends"));
  }

  Gate other;
  results = outcomes(2, quick, [&](Handle& comm) {
    comm->all_reduce(data[comm->rank()].span()).enqueue();
    if (comm->rank() == 0) other.hold_up(comm->stream());
    Event event;
    event.record(comm->stream());
    const Outcome outcome = outcome_of([&] { comm->wait(event); });
    if (comm->rank() == 0) other.open();
    if (outcome.threw) throw std::runtime_error(outcome.text);
  });
  CHECK(results[0].says("0.2 s"));
  CHECK_FALSE(results[1].threw);
}

TEST_CASE("CUDA in-process: an event that happens after a peer has failed", "[cuda]") {
  Gate gate;
  std::atomic<bool> aborted{false};
  const auto results = outcomes(2, patient, [&](Handle& comm) {
    if (comm->rank() == 1) {
      comm->abort("no more");
      aborted = true;
      std::this_thread::sleep_for(20ms);
      return gate.open();
    }
    gate.hold_up(comm->stream());
    Event event;
    event.record(comm->stream());
    while (!aborted) std::this_thread::yield();
    comm->wait(event);
  });
  CHECK(results[0].failure == CommunicatorFailure::aborted);
  CHECK(results[0].says("no more"));
  CHECK(results[0].took < 10s);
}

TEST_CASE("CUDA in-process: any call to CUDA may fail", "[cuda]") {
  // On one rank: it throws what CUDA said, its peers learn of that, and memory may go at once.
  int failed = 0;
  for (const char* function : {"cudaEventCreateWithFlags", "cudaEventRecord", "cudaStreamWaitEvent",
                               "cudaLaunchKernel", "cudaMemcpyAsync", "cudaEventQuery"}) {
    for (int nth = 1; nth < 24; ++nth) {
      CAPTURE(function, nth);
      zero_emulation::fail(function, nth, cudaErrorInvalidValue);
      const auto results = outcomes(2, patient, [](Handle& comm) {
        Buffer data(501), all(1002);
        const zero::cuda::StreamView stream = comm->stream();
        bool good = true;
        try {
          auto first = comm->all_reduce(data.span());
          auto second = comm->all_gather<float>(data.span(), all.span());
          second.wait();
          first.wait();
          comm->reduce_scatter<float>(all.span(), data.span()).wait();
        } catch (const zero::Error&) {
          good = false;
          data.free();
          all.free();
          throw;
        }
        if (good) stream.synchronize();
      });
      int own = 0;
      for (const Outcome& result : results) {
        CAPTURE(result.text);
        if (!result.threw) continue;
        if (result.cuda) {
          ++own;
          CHECK(result.cuda == cudaErrorInvalidValue);
        } else {
          CHECK(result.failure == CommunicatorFailure::transport);
          CHECK(result.says("cudaErrorInvalidValue"));
          CHECK(result.says(", in "));
        }
        CHECK(result.took < 20s);
      }
      if (results[0].threw || results[1].threw) {
        CHECK(own == 1);
        ++failed;
      }
      zero_emulation::reset();
    }
  }
  CHECK(failed > 60);
}

TEST_CASE("CUDA in-process: injected faults", "[cuda]") {
  using zero::FaultAction;
  const auto with = [](FaultAction action, zero::InProcessOptions options) {
    return outcomes(2, options, [=](Handle& inner) {
      zero::FaultInjector comm(
          *inner, zero::FaultPlan{.faults = {{.action = action, .rank = 1, .operation = 1}}});
      std::vector<float> data(5, 1), part(4, 1), all(8);
      // A rank that gives up by itself waits for what it has enqueued before its memory goes.
      const std::shared_ptr<void> idle(
          nullptr, [stream = comm.stream()](void*) { (void)cudaStreamSynchronize(stream.get()); });
      comm.all_reduce(std::span<float>(data)).enqueue();
      comm.all_gather<float>(part, std::span<float>(all)).enqueue();
      Event event;
      event.record(comm.stream());
      comm.wait(event);
      comm.check();
      if (data[4] != 2 || all[7] != 1) throw std::logic_error("what was enqueued");
    });
  };
  auto results = with(FaultAction::delay_start, patient);
  CHECK((!results[0].threw && !results[1].threw));
  results = with(FaultAction::fail, patient);
  CHECK(results[1].failure == CommunicatorFailure::injected);
  CHECK(results[0].says("injected failure"));
  results = with(FaultAction::stick, quick);
  CHECK(results[0].failure == CommunicatorFailure::timeout);
  CHECK(results[1].failure == CommunicatorFailure::timeout);
}

TEST_CASE("CUDA in-process: run_ranks throws what it all began with", "[cuda]") {
  struct Custom {};
  CHECK_THROWS_AS(zero::cuda::run_ranks(3,
                                        [](InProcessCommunicator& comm) {
                                          if (comm.rank() == 1) throw Custom();
                                          comm.barrier().wait();
                                        }),
                  Custom);
  zero_emulation::set_devices(0);
  CHECK_THROWS_AS(zero::cuda::run_ranks(1, [](InProcessCommunicator&) {}), CudaError);
  zero_emulation::reset();
}
