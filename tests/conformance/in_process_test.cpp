// SPDX-License-Identifier: Apache-2.0
// The conformance suite over the in-process communicator, as it is and with shaken timing.
#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <stdexcept>
#include <utility>
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

// An element type whose sums are computed in another type, as 16-bit types' are.
struct Half {
  float bits = 0;  // a store truncates to a multiple of 1/4
};

}  // namespace

template <>
struct zero::element_traits<Half> {
  static constexpr ElementType type = ElementType::float32;
  static constexpr std::string_view name = "half";
  using arithmetic = double;
  static double load(Half x) { return static_cast<double>(x.bits); }
  static Half store(double x) {
    return {static_cast<float>(static_cast<double>(static_cast<long long>(x * 4)) / 4)};
  }
};

TEST_CASE("in-process: conformance", "[comm]") {
  for (int size = 1; size <= 4; ++size) {
    CAPTURE(size);
    CHECK_NOTHROW(zero::run_ranks(size, [](InProcessCommunicator& comm) {
      zero_test::check_communicator<float>(comm);
      zero_test::check_communicator<double>(comm);
      zero_test::check_communicator<zero::bfloat16>(comm);
      zero_test::check_communicator<zero::float16>(comm);
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
    }));
  }
}

TEST_CASE("in-process: more operations in flight than there were slots", "[comm]") {
  CHECK_NOTHROW(zero::run_ranks(3, [](InProcessCommunicator& comm) {
    for (int round = 0; round < 3; ++round) {
      constexpr std::size_t many = 200;
      std::vector<double> data(many, comm.rank() + 1.0);
      std::vector<zero::InProcessRequest> requests;
      for (double& x : data) requests.push_back(comm.all_reduce(std::span<double>(&x, 1)));
      for (std::size_t i = many; i-- > 0;) requests[i].wait();
      for (const double x : data) zero_test::require(x == 6, "a sum of 200");
    }
  }));
}

TEST_CASE("in-process: sums in the arithmetic type, rounds once", "[comm]") {
  CHECK_NOTHROW(zero::run_ranks(3, [](InProcessCommunicator& comm) {
    // 0.2 truncates to 0: adding in the stored type would lose it.
    std::vector<Half> data(3000, Half{comm.rank() == 0 ? 0.25F : 0.2F});
    comm.all_reduce(std::span<Half>(data)).wait();
    for (const Half x : data) zero_test::require(x.bits == 0.5F, "0.25 + 0.2 + 0.2");
  }));
}

TEST_CASE("in-process: min and max keep a NaN, wherever it is", "[comm]") {
  CHECK_NOTHROW(zero::run_ranks(3, [](InProcessCommunicator& comm) {
    for (const zero::ReduceOp op : {zero::ReduceOp::min, zero::ReduceOp::max}) {
      for (int from = 0; from < 3; ++from) {
        std::vector<float> data{comm.rank() == from ? std::numeric_limits<float>::quiet_NaN()
                                                    : static_cast<float>(comm.rank())};
        comm.all_reduce(std::span<float>(data), op).wait();
        zero_test::require(data[0] != data[0], "a NaN was lost");
      }
    }
  }));
}

TEST_CASE("in-process: large sums, every vector tail, unaligned", "[comm]") {
  CHECK_NOTHROW(zero::run_ranks(2, [](InProcessCommunicator& comm) {
    const std::size_t me = zero_test::own_rank(comm);
    for (std::size_t n = 1; n < 140; ++n) {
      std::vector<float> data = zero_test::data_of<float>(me, n + 3, n);
      std::vector<float> expected = zero_test::reduced<float>(2, n + 3, n, zero::ReduceOp::sum);
      const std::size_t skip = n % 4;
      comm.all_reduce(std::span<float>(data).subspan(skip, n)).wait();
      for (std::size_t i = 0; i < n + 3; ++i) {
        if (i < skip || i >= skip + n) expected[i] = zero_test::value<float>(me, i, n);
      }
      zero_test::require_same_bits(data, expected, "unaligned sum");
    }
  }));
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
