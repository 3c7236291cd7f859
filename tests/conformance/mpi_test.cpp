// SPDX-License-Identifier: Apache-2.0
// The conformance suite over MPI. Every process runs all of it: start it with mpirun, at 1 to 4.
#include <mpi.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "catch.hpp"
#include "communicator_suite.hpp"
#include "mpi_process.hpp"
#include "zero/bfloat16.hpp"
#include "zero/comm/mpi.hpp"
#include "zero/float16.hpp"
#include "zero/memory.hpp"

namespace {

using Catch::Matchers::ContainsSubstring;
using zero::MpiCommunicator;
using zero::MpiCommunicatorRef;

// The lowest level with which other threads may exist; asked for, the highest.
const bool multiple = std::getenv("ZERO_TEST_MPI_THREADS") != nullptr;
const MpiProcess process(multiple ? MPI_THREAD_MULTIPLE : MPI_THREAD_FUNNELED);

zero::MpiOptions options() { return {.timeout = std::chrono::seconds(20)}; }

}  // namespace

TEST_CASE("MPI: conformance", "[comm]") {
  MpiCommunicator comm(MPI_COMM_WORLD, options());
  CHECK_NOTHROW(zero_test::check_communicator<float>(comm));
  CHECK_NOTHROW(zero_test::check_communicator<double>(comm));
  CHECK_NOTHROW(zero_test::check_communicator<zero::bfloat16>(comm));
  CHECK_NOTHROW(zero_test::check_communicator<zero::float16>(comm));
  CHECK_NOTHROW(zero_test::check_once(comm));
}

TEST_CASE("MPI: conformance in small pieces", "[comm]") {
  zero::MpiOptions small = options();
  // As counts beyond an int are cut: into many messages, of which only few have room, or into
  // many pieces taken out of a peer's memory.
  small.chunk_bytes = 192;
  for (const bool share : {true, false}) {
    small.share_memory = share;
    MpiCommunicator comm(MPI_COMM_WORLD, small);
    CHECK_NOTHROW(zero_test::check_communicator<float>(comm));
    CHECK_NOTHROW(zero_test::check_communicator<zero::bfloat16>(comm));
    CHECK_NOTHROW(zero_test::check_once(comm));
  }
}

TEST_CASE("MPI: what lies in shared memory is read where it lies", "[comm]") {
  MpiCommunicator comm(MPI_COMM_WORLD, options());
  const auto memory = comm.shared_memory();
  if (comm.size() == 1) {
    CHECK(memory != nullptr);
    return;
  }
  if (memory == nullptr) {
    WARN("ranks don't see each other's memory here: not tested");
    return;
  }
  const std::size_t k = zero_test::world_size(comm), me = zero_test::own_rank(comm);
  constexpr std::size_t n = 70'001;
  const auto at = [](std::size_t r, std::size_t i) { return static_cast<float>(r * 1000 + i % 7); };
  zero::HostArray<float> mine(n, memory.get()), all(k * n, memory.get());
  for (std::size_t i = 0; i < n; ++i) mine.data()[i] = at(me, i);

  comm.all_gather(std::span<const float>(mine.span()), all.span()).wait();
  bool right = true;
  for (std::size_t i = 0; i < k * n; ++i) right = right && all.data()[i] == at(i / n, i % n);
  CHECK(right);

  comm.reduce_scatter(std::span<const float>(all.span()), mine.span()).wait();
  for (std::size_t i = 0; i < n; ++i) {
    right = right && mine.data()[i] == static_cast<float>(k) * at(me, i);
  }
  CHECK(right);

  const std::uint64_t address = reinterpret_cast<std::uintptr_t>(mine.data());
  std::vector<std::uint64_t> addresses(k);
  comm.exchange(std::as_bytes(std::span(&address, 1)), std::as_writable_bytes(std::span(addresses)))
      .wait();
  for (std::size_t r = 0; r < k; ++r) {
    const int rank = static_cast<int>(r);
    const std::byte* there = comm.peer_memory(rank, addresses[r], n * sizeof(float));
    REQUIRE(there != nullptr);
    std::vector<float> seen(n);
    std::memcpy(seen.data(), there, n * sizeof(float));
    for (std::size_t i = 0; i < n; ++i) {
      right = right && seen[i] == static_cast<float>(k) * at(r, i);
    }
  }
  // An address means something in its own process alone.
  const int elsewhere = 0;
  const std::uint64_t outside = reinterpret_cast<std::uintptr_t>(&elsewhere);
  CHECK(comm.peer_memory(comm.rank(), outside, 1) == nullptr);
  CHECK(comm.peer_memory(comm.size(), address, 1) == nullptr);
  CHECK(right);
  comm.barrier().wait();
}

TEST_CASE("MPI: a borrowed communicator, its copies, and an owner's", "[comm]") {
  {
    MpiCommunicatorRef comm(MPI_COMM_WORLD, options());
    CHECK_NOTHROW(zero_test::check_once(comm));
    MpiCommunicatorRef copy = comm;
    std::vector<float> a(100, 1), b(100, 2);
    auto one = comm.all_reduce(std::span<float>(a));
    auto two = copy.all_reduce(std::span<float>(b));
    two.wait(), one.wait();
    CHECK(a[5] == static_cast<float>(comm.size()));
    CHECK(b[5] == static_cast<float>(2 * comm.size()));
  }
  MpiCommunicator owner(MPI_COMM_WORLD, options());
  MpiCommunicatorRef ref = owner;
  CHECK_NOTHROW(ref.barrier().wait());
  {
    MpiCommunicator moved = std::move(owner);
    CHECK_NOTHROW(moved.barrier().wait());
    CHECK_NOTHROW(ref.barrier().wait());
  }
  CHECK_THROWS_AS(ref.barrier().wait(), zero::UsageError);
}

TEST_CASE("MPI: its own reductions", "[comm]") {
  zero::MpiOptions native = options();
  native.reduction = zero::MpiReduction::native;
  native.chunk_bytes = 640;
  MpiCommunicator comm(MPI_COMM_WORLD, native);
  const std::size_t k = zero_test::world_size(comm), me = zero_test::own_rank(comm);
  const auto check = [&]<class T>(T) {
    for (const std::size_t n : zero_test::sizes()) {
      // Whole numbers, whose sums are exact in any order.
      const auto at = [&](std::size_t r, std::size_t i) { return static_cast<T>(r * 1000 + i); };
      const auto sum = [&](std::size_t i) {
        return static_cast<T>(k * (k - 1) / 2 * 1000 + k * i);
      };
      std::vector<T> data(n);
      for (std::size_t i = 0; i < n; ++i) data[i] = at(me, i);
      comm.all_reduce(std::span<T>(data)).wait();
      bool right = true;
      for (std::size_t i = 0; i < n; ++i) right = right && data[i] == sum(i);
      CHECK(right);

      const std::vector<std::size_t> counts = zero_test::uneven(k, n, k == 1 ? 0 : 1);
      const std::size_t begin = zero_test::sum_of(std::span(counts).first(me));
      std::vector<T> input(zero_test::sum_of(counts)), output(counts[me]);
      for (std::size_t i = 0; i < input.size(); ++i) input[i] = at(me, i);
      comm.reduce_scatter_v(std::span<const T>(input), std::span<T>(output), counts).wait();
      for (std::size_t i = 0; i < output.size(); ++i) right = right && output[i] == sum(begin + i);
      CHECK(right);
    }
  };
  check(1.0F);
  check(1.0);
  // What MPI doesn't know goes the ranks' way.
  CHECK_NOTHROW(zero_test::check_all_reduce<zero::float16>(comm));
  CHECK_NOTHROW(zero_test::check_nan(comm));
  CHECK_NOTHROW(zero_test::check_in_flight<zero::bfloat16>(comm));
}

TEST_CASE("MPI: refuses what can't be, and says why", "[comm]") {
  CHECK_THROWS_WITH(MpiCommunicator(MPI_COMM_NULL), ContainsSubstring("MPI_COMM_NULL"));
  CHECK_THROWS_WITH(MpiCommunicatorRef(MPI_COMM_NULL), ContainsSubstring("MPI_COMM_NULL"));
  CHECK_THROWS_WITH(MpiCommunicatorRef(MPI_COMM_WORLD, {.chunk_bytes = 63}),
                    ContainsSubstring("chunk_bytes is 63"));

  if (multiple) return;  // what follows is no error then
  MpiCommunicator comm(MPI_COMM_WORLD, options());
  CHECK(!comm.concurrent());
  std::string text;
  std::thread([&] {
    try {
      comm.barrier().wait();
    } catch (const zero::UsageError& error) {
      text = error.what();
    }
  }).join();
  CHECK_THAT(text, ContainsSubstring("MPI_THREAD_MULTIPLE"));
  CHECK_NOTHROW(comm.barrier().wait());
}
