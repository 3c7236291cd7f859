// SPDX-License-Identifier: Apache-2.0
// In-process ranks over CUDA memory: the conformance suite, the bits of the host's sums, and the
// order in which streams do what was started.
#include "zero/cuda/in_process.cuh"

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "../conformance/communicator_suite.hpp"
#include "catch.hpp"
#include "zero/bfloat16.hpp"
#include "zero/comm/fault_injector.hpp"
#include "zero/comm/in_process.hpp"
#include "zero/float16.hpp"

#if ZERO_CUDA_EMULATED
#include "fake/cuda_runtime.hpp"
#endif

namespace {

using namespace std::chrono_literals;
using zero::cuda::Event;
using zero::cuda::InProcessCommunicator;
using zero_test::require;
using zero_test::Vector;
using Shaken = zero::FaultInjector<InProcessCommunicator>;

static_assert(zero::Communicator<Shaken, float> && zero::cuda::StreamCommunicator<Shaken>);
static_assert(!zero::SharedMemoryCommunicator<Shaken>);

/// Streams lag behind the host for as long as it lives; a GPU's do as they do.
class Lag {
 public:
  explicit Lag(std::uint64_t seed, unsigned microseconds = 60) { delay(seed, microseconds); }
  Lag(const Lag&) = delete;
  Lag& operator=(const Lag&) = delete;
  ~Lag() { delay(0, 0); }

 private:
  static void delay([[maybe_unused]] std::uint64_t seed, [[maybe_unused]] unsigned microseconds) {
#if ZERO_CUDA_EMULATED
    zero_emulation::delay(seed, microseconds);
#endif
  }
};

/// Work of a rank's own in its stream, on a thread of the runtime's.
template <class Body>
void enqueue(const InProcessCommunicator& comm, Body body) {
  const auto run = [](void* held) {
    const std::unique_ptr<Body> owned(static_cast<Body*>(held));
    (*owned)();
  };
  auto held = std::make_unique<Body>(std::move(body));
  zero::cuda::check(cudaLaunchHostFunc(comm.stream().get(), run, held.get()), "cudaLaunchHostFunc");
  (void)held.release();
}

template <class T>
void fill_later(const InProcessCommunicator& comm, std::span<T> data, T value) {
  enqueue(comm, [=] {
    for (T& x : data) x = value;
  });
}

}  // namespace

TEST_CASE("CUDA in-process: conformance", "[cuda]") {
  for (int size = 1; size <= 4; ++size) {
    CAPTURE(size);
    CHECK_NOTHROW(zero::cuda::run_ranks(size, [](InProcessCommunicator& comm) {
      zero_test::check_communicator<float>(comm);
      zero_test::check_communicator<double>(comm);
      zero_test::check_communicator<zero::bfloat16>(comm);
      zero_test::check_communicator<zero::float16>(comm);
      zero_test::check_once(comm);
    }));
  }
}

TEST_CASE("CUDA in-process: conformance of late streams and late ranks", "[cuda]") {
  const Lag lag(7);
  for (int size = 1; size <= 4; ++size) {
    CAPTURE(size);
    CHECK_NOTHROW(zero::cuda::run_ranks(size, [](InProcessCommunicator& inner) {
      zero_test::check_in_flight<double>(inner);
      zero_test::check_uneven<float>(inner);
      Shaken comm(inner, zero::random_delays(7, 60us));
      zero_test::check_communicator<zero::bfloat16>(comm);
      zero_test::check_duplicates(comm);
    }));
  }
}

TEST_CASE("CUDA in-process: the host's bits", "[cuda]") {
  const auto check_type = []<class T>(T, int size, std::uint64_t seed) {
    zero::InProcessWorld host_world(size);
    zero::cuda::run_ranks(size, [&](InProcessCommunicator& comm) {
      zero::InProcessCommunicator host = host_world.communicator(comm.rank());
      const std::size_t k = zero_test::world_size(comm), me = zero_test::own_rank(comm);
      std::mt19937_64 common(seed);  // the same draws on all ranks
      for (std::uint64_t round = 0; round < 12; ++round) {
        const std::size_t n = common() % 5000, skip = common() % 9;
        const auto op = static_cast<zero::ReduceOp>(common() % 3);
        // Where every rank's memory is aligned otherwise too.
        const std::size_t own_skip = common() % 2 == 0 ? skip : skip + me;
        std::vector<std::size_t> counts(k);
        for (std::size_t& count : counts) count = common() % 700;
        const std::size_t total = zero_test::sum_of(counts);

        Vector<T> found = zero_test::data_of<T>(me, own_skip + n, round);
        Vector<T> expected = found;
        comm.all_reduce(std::span(found).subspan(own_skip), op).wait();
        host.all_reduce(std::span(expected).subspan(own_skip), op).wait();
        zero_test::require_same_bits(found, expected, "all_reduce");

        const Vector<T> input = zero_test::data_of<T>(me, own_skip + total, round + 100);
        const std::span<const T> in = std::span<const T>(input).subspan(own_skip);
        Vector<T> part(counts[me]), host_part(counts[me]);
        comm.reduce_scatter_v(in, std::span<T>(part), counts, op).wait();
        host.reduce_scatter_v(in, std::span<T>(host_part), counts, op).wait();
        zero_test::require_same_bits(part, host_part, "reduce_scatter_v");
      }
      comm.barrier().wait();
    });
  };
  for (int size = 1; size <= 4; ++size) {
    CAPTURE(size);
    const auto seed = static_cast<std::uint64_t>(size);
    CHECK_NOTHROW(check_type(1.0F, size, seed));
    CHECK_NOTHROW(check_type(1.0, size, seed));
    CHECK_NOTHROW(check_type(zero::bfloat16{}, size, seed));
    CHECK_NOTHROW(check_type(zero::float16{}, size, seed));
  }
}

TEST_CASE("CUDA in-process: more ranks than one small launch takes", "[cuda]") {
  CHECK_NOTHROW(zero::cuda::run_ranks(
      18, [](InProcessCommunicator& comm) { zero_test::check_reduce_scatter<float>(comm); }));
  CHECK_THROWS_AS(zero::cuda::InProcessWorld(481), zero::UsageError);
  CHECK_THROWS_AS(zero::cuda::InProcessWorld(0), zero::UsageError);
}

TEST_CASE("CUDA in-process: enqueue does not wait for devices", "[cuda]") {
  // Held up until all ranks have enqueued everything.
  std::atomic<int> enqueued{0};
  CHECK_NOTHROW(zero::cuda::run_ranks(3, [&](InProcessCommunicator& comm) {
    const std::size_t k = zero_test::world_size(comm), me = zero_test::own_rank(comm), n = 1001;
    Vector<float> data = zero_test::data_of<float>(me, n, 5), all(k * n);
    enqueue(comm, [&] {
      while (enqueued < 3) std::this_thread::yield();
    });
    comm.all_reduce(std::span<float>(data)).enqueue();
    auto gather = comm.all_gather<float>(data, std::span<float>(all));
    gather.enqueue();
    gather.wait();  // of a request that has been enqueued: nothing
    require(gather.done(), "an enqueued request is done");
    Event event;
    event.record(comm.stream());
    require(!event.done(), "what the streams were held up for");
    auto last = comm.all_reduce(std::span<float>(data), zero::ReduceOp::max);
    require(!last.done(), "an operation that waits for a device");
    last.enqueue();
    Event end;
    end.record(comm.stream());
    ++enqueued;
    comm.wait(event);
    const Vector<float> sum = zero_test::reduced<float>(k, n, 5, zero::ReduceOp::sum);
    for (std::size_t r = 0; r < k; ++r) {
      zero_test::require_same_bits(std::span<const float>(all).subspan(r * n, n),
                                   std::span<const float>(sum), "all_gather of sums");
    }
    comm.wait(end, 30s);
    comm.check();
  }));
}

TEST_CASE("CUDA in-process: what is enqueued behind an operation comes after it", "[cuda]") {
  // Inputs are written in the stream, right before; and again right behind, where peers may still
  // be reading if they aren't waited for.
  const Lag lag(11, 200);
  CHECK_NOTHROW(zero::cuda::run_ranks(3, [](InProcessCommunicator& comm) {
    const std::size_t k = zero_test::world_size(comm), me = zero_test::own_rank(comm), n = 300;
    const auto x = [](std::size_t r, std::size_t round) {
      return static_cast<float>(10 * r + round);
    };
    Vector<float> sum(n), in(k * n), part(n), mine(n), all(k * n), sent(k * n), got(k * n);
    Vector<float> root(n);
    const auto later = [&](Vector<float>& data, float value) {
      fill_later(comm, std::span<float>(data), value);
    };
    for (std::size_t round = 0; round < 12; ++round) {
      for (auto* data : {&sum, &in, &mine, &sent, &root}) later(*data, x(me, round));
      comm.all_reduce(std::span<float>(sum)).enqueue();
      comm.reduce_scatter<float>(in, std::span<float>(part)).enqueue();
      later(in, -1);
      comm.all_gather<float>(mine, std::span<float>(all)).enqueue();
      later(mine, -2);
      comm.all_to_all<float>(sent, std::span<float>(got)).enqueue();
      later(sent, -3);
      comm.broadcast(std::span<float>(root), 1).enqueue();
      auto right = std::make_shared<std::atomic<bool>>(true);
      enqueue(comm, [&, right, round] {
        float total = 0;
        for (std::size_t r = 0; r < k; ++r) total += x(r, round);
        for (std::size_t i = 0; i < n; ++i) {
          if (sum[i] != total || part[i] != total || root[i] != x(1, round)) *right = false;
        }
        for (std::size_t i = 0; i < k * n; ++i) {
          if (all[i] != x(i / n, round) || got[i] != x(i / n, round)) *right = false;
        }
      });
      later(root, -4);
      comm.stream().synchronize();
      require(*right, "what follows an operation in the stream, round " + std::to_string(round));
    }
  }));
}

TEST_CASE("CUDA in-process: one operation's output is the next one's input", "[cuda]") {
  // Neither waited for nor enqueued in between, nor enqueued in order.
  const Lag lag(13, 200);
  CHECK_NOTHROW(zero::cuda::run_ranks(4, [](InProcessCommunicator& comm) {
    const std::size_t k = zero_test::world_size(comm), me = zero_test::own_rank(comm), n = 77;
    const Vector<float> sum = zero_test::reduced<float>(k, k * n, 3, zero::ReduceOp::sum);
    for (int round = 0; round < 10; ++round) {
      Vector<float> data = zero_test::data_of<float>(me, k * n, 3), part(n), all(k * n);
      auto a = comm.reduce_scatter<float>(data, std::span<float>(part));
      auto b = comm.all_gather<float>(part, std::span<float>(all));
      auto c = comm.broadcast(std::span<float>(part), 2);
      if (me % 2 == 0) c.enqueue();
      b.wait();
      a.wait();
      c.enqueue();
      comm.stream().synchronize();
      zero_test::require_same_bits(all, sum, "a chain");
      zero_test::require_same_bits(std::span<const float>(part),
                                   std::span<const float>(sum).subspan(2 * n, n), "its end");
    }
  }));
}

#if ZERO_CUDA_EMULATED  // nobody else counts

TEST_CASE("CUDA in-process: neither events nor waiting once warm", "[cuda]") {
  zero_emulation::Counters before{}, after{};
  std::size_t events_before = 0, events_after = 0;
  CHECK_NOTHROW(zero::cuda::run_ranks(3, [&](InProcessCommunicator& comm) {
    Vector<float> data(300), large(900), other(900), mine(300);
    const auto everything = [&] {
      auto a = comm.all_reduce(std::span<float>(data));
      auto b = comm.all_to_all<float>(large, std::span<float>(other));
      a.enqueue(), b.enqueue();
      comm.reduce_scatter<float>(large, std::span<float>(mine)).enqueue();
      comm.all_gather<float>(mine, std::span<float>(large)).enqueue();
      comm.broadcast(std::span<float>(data), 1).enqueue();
    };
    everything();
    comm.barrier().wait();
    if (comm.rank() == 0) {
      before = zero_emulation::counters();
      events_before = zero_emulation::alive().events;
    }
    comm.barrier().wait();
    for (int i = 0; i < 20; ++i) everything();
    comm.barrier().wait();
    if (comm.rank() == 0) {
      after = zero_emulation::counters();
      events_after = zero_emulation::alive().events;
    }
    comm.barrier().wait();
    comm.stream().synchronize();
  }));
  CHECK(events_before > 0);
  CHECK(events_after == events_before);
  CHECK(after.host_synchronizations == before.host_synchronizations);
  CHECK(after.allocations == before.allocations);
  CHECK(after.launches - before.launches == 20 * 3 * 2);  // one a reduction
}

#endif

TEST_CASE("CUDA in-process: worlds side by side, and one rank's several handles", "[cuda]") {
  zero::cuda::InProcessWorld other(2);
  CHECK(other.size() == 2);
  CHECK_NOTHROW(zero::cuda::run_ranks(2, [&](InProcessCommunicator& comm) {
    const zero::cuda::Stream stream;
    InProcessCommunicator second = other.communicator(comm.rank(), stream);
    require(second.stream() == stream.view(), "stream()");
    InProcessCommunicator copy = comm;
    Vector<float> a(100, 1), b(100, 2), c(100, 3);
    auto one = comm.all_reduce(std::span<float>(a));
    auto two = second.all_reduce(std::span<float>(b));
    auto three = copy.all_reduce(std::span<float>(c));
    three.wait(), two.wait(), one.wait();
    require(a[5] == 2 && b[5] == 4 && c[5] == 6, "two worlds");
  }));
  CHECK(other.failed_rank() == -1);
}
