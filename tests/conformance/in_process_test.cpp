// SPDX-License-Identifier: Apache-2.0
// The conformance suite over the in-process communicator, as it is and with shaken timing.
#include <chrono>
#include <cstddef>
#include <span>
#include <vector>

#include "catch.hpp"
#include "communicator_suite.hpp"
#include "zero/bfloat16.hpp"
#include "zero/comm/fault_injector.hpp"
#include "zero/comm/in_process.hpp"
#include "zero/float16.hpp"

namespace {

using zero::InProcessCommunicator;
using Shaken = zero::FaultInjector<InProcessCommunicator>;
using Hidden = zero::FaultInjector<InProcessCommunicator, /*shares_memory=*/false>;

static_assert(zero::Communicator<Shaken, float> && zero::Communicator<Shaken, double>);
static_assert(zero::SharedMemoryCommunicator<Shaken>);
static_assert(zero::Communicator<Hidden, float> && !zero::SharedMemoryCommunicator<Hidden>);

}  // namespace

TEST_CASE("in-process: conformance", "[comm]") {
  for (int size = 1; size <= 4; ++size) {
    CAPTURE(size);
    CHECK_NOTHROW(zero::run_ranks(size, [](InProcessCommunicator& comm) {
      zero_test::check_communicator<float>(comm);
      zero_test::check_communicator<double>(comm);
      zero_test::check_communicator<zero::bfloat16>(comm);
      zero_test::check_communicator<zero::float16>(comm);
      zero_test::check_once(comm);
    }));
  }
}

TEST_CASE("in-process: conformance without spinning", "[comm]") {
  CHECK_NOTHROW(zero::run_ranks(
      2, [](InProcessCommunicator& comm) { zero_test::check_communicator<float>(comm); },
      {.timeout = std::chrono::seconds(60), .spin = std::chrono::nanoseconds(0)}));
}

TEST_CASE("in-process: conformance with random delays", "[comm]") {
  for (int size = 1; size <= 4; ++size) {
    CAPTURE(size);
    CHECK_NOTHROW(zero::run_ranks(size, [](InProcessCommunicator& inner) {
      Shaken comm(inner, zero::random_delays(7, std::chrono::microseconds(60)));
      zero_test::check_communicator<float>(comm);
      Hidden hidden(inner, zero::random_delays(8, std::chrono::microseconds(60)));
      zero_test::check_communicator<double>(hidden);
      zero_test::check_duplicates(hidden);
    }));
  }
}

TEST_CASE("in-process: worlds side by side, and one rank's several handles", "[comm]") {
  zero::InProcessWorld other(2);
  CHECK_NOTHROW(zero::run_ranks(2, [&](InProcessCommunicator& comm) {
    InProcessCommunicator second = other.communicator(comm.rank());
    InProcessCommunicator copy = comm;
    std::vector<float> a(100, 1), b(100, 2), c(100, 3);
    auto one = comm.all_reduce(std::span<float>(a));
    auto two = second.all_reduce(std::span<float>(b));
    auto three = copy.all_reduce(std::span<float>(c));
    three.wait(), two.wait(), one.wait();
    zero_test::require(a[5] == 2 && b[5] == 4 && c[5] == 6, "two worlds");
  }));
  CHECK(other.failed_rank() == -1);
}
