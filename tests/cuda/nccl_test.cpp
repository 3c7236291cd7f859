// SPDX-License-Identifier: Apache-2.0
// The conformance suite over NCCL, and what a communicator of streams has beyond it.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>
#include <nccl.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <numeric>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "catch.hpp"
#include "conformance/communicator_suite.hpp"
#include "cuda/nccl_ranks.hpp"
#include "zero/bfloat16.hpp"
#include "zero/comm/nccl.cuh"
#include "zero/cuda/communicator.hpp"
#include "zero/cuda/element.hpp"
#include "zero/cuda/stream.hpp"
#include "zero/float16.hpp"

namespace {

using namespace std::chrono_literals;
using Catch::Matchers::ContainsSubstring;
using nccl_ranks::largest_world;
using nccl_ranks::rethrow_any;
using nccl_ranks::run;
using zero::NcclCommunicator;
using zero::NcclCommunicatorRef;
using zero_test::require;
using zero_test::Vector;

static_assert(zero::Communicator<NcclCommunicator, zero::bfloat16> &&
              zero::Communicator<NcclCommunicator, zero::float16>);
static_assert(!zero::SharedMemoryCommunicator<NcclCommunicator>);

zero::NcclOptions options(zero::NcclReduction reduction = zero::NcclReduction::rank_order) {
  zero::NcclOptions options;
  options.timeout = options.init_timeout = 60s;
  options.reduction = reduction;
  return options;
}

}  // namespace

TEST_CASE("NCCL: conformance", "[comm][cuda]") {
  for (int size = 1; size <= largest_world(); ++size) {
    CAPTURE(size);
    CHECK_NOTHROW(rethrow_any(run(
        size,
        [](NcclCommunicator& comm) {
          zero_test::check_communicator<float>(comm);
          zero_test::check_communicator<double>(comm);
          zero_test::check_communicator<zero::bfloat16>(comm);
          zero_test::check_communicator<zero::float16>(comm);
          zero_test::check_in_flight<__nv_bfloat16>(comm);
          zero_test::check_in_flight<__half>(comm);
          zero_test::check_once(comm);
        },
        options())));
  }
}

#if ZERO_CUDA_EMULATED

TEST_CASE("NCCL: conformance with streams that lag behind", "[comm][cuda]") {
  const int size = largest_world() - 1;
  zero_emulation::delay(11, 300);
  CHECK_NOTHROW(rethrow_any(run(
      size,
      [](NcclCommunicator& comm) {
        zero_test::check_in_flight<float>(comm);
        zero_test::check_exchange_and_barrier(comm);
        zero_test::check_all_gather<zero::float16>(comm);
        zero_test::check_duplicates(comm);
      },
      options())));
  zero_emulation::delay(0, 0);
}

#endif

TEST_CASE("NCCL: conformance of what it sums itself, save for the order", "[comm][cuda]") {
  for (int size = 1; size <= largest_world(); ++size) {
    CAPTURE(size);
    CHECK_NOTHROW(rethrow_any(run(
        size,
        [](NcclCommunicator& comm) {
          const std::size_t k = zero_test::world_size(comm), me = zero_test::own_rank(comm);
          const auto check = [&]<class T>(T) {
            using A = zero::arithmetic_t<T>;
            const auto at = [](A x) { return zero_test::stored<T>(x); };
            // Small whole numbers, whose sums are exact in any order and any type.
            const auto term = [](std::size_t r, std::size_t i) {
              return static_cast<A>(r + 1 + i % 5);
            };
            const auto sum = [&](std::size_t i) {
              A all = 0;
              for (std::size_t r = 0; r < k; ++r) all += term(r, i);
              return all;
            };
            for (const std::size_t n : zero_test::sizes()) {
              Vector<T> data(n), expected(n);
              for (std::size_t i = 0; i < n; ++i) data[i] = at(term(me, i));
              for (std::size_t i = 0; i < n; ++i) expected[i] = at(sum(i));
              comm.all_reduce(std::span<T>(data)).wait();
              zero_test::require_same_bits(data, expected, "all_reduce");

              for (const bool even : {true, false}) {
                const std::vector<std::size_t> counts =
                    even ? std::vector<std::size_t>(k, n) : zero_test::uneven(k, n, 1);
                const std::size_t begin = zero_test::sum_of(std::span(counts).first(me));
                Vector<T> input(zero_test::sum_of(counts)), output(counts[me]);
                for (std::size_t i = 0; i < input.size(); ++i) input[i] = at(term(me, i));
                expected.resize(output.size());
                for (std::size_t i = 0; i < output.size(); ++i) expected[i] = at(sum(begin + i));
                if (even) {
                  comm.reduce_scatter(std::span<const T>(input), std::span<T>(output)).wait();
                  zero_test::require_same_bits(output, expected, "reduce_scatter");
                }
                comm.reduce_scatter_v(std::span<const T>(input), std::span<T>(output), counts)
                    .wait();
                zero_test::require_same_bits(output, expected, "reduce_scatter_v");
                const std::span<T> own = std::span<T>(input).subspan(begin, counts[me]);
                comm.reduce_scatter_v(std::span<const T>(input), own, counts).wait();
                zero_test::require_same_bits(std::span<const T>(own), std::span<const T>(expected),
                                             "in place");
              }
            }
          };
          check(1.0F);
          check(1.0);
          check(zero::bfloat16{});
          check(zero::float16{});
          check(__nv_bfloat16{});
          check(__half{});
          // What NCCL doesn't know, or would lose, goes the ranks' way.
          zero_test::check_nan(comm);
          zero_test::check_arithmetic_type(comm);
          zero_test::check_all_gather<float>(comm);
          zero_test::check_in_flight<zero_test::Half>(comm);
        },
        options(zero::NcclReduction::native))));
  }
}

TEST_CASE("NCCL: averages and scaled sums", "[comm][cuda]") {
  for (const auto reduction : {zero::NcclReduction::rank_order, zero::NcclReduction::native}) {
    for (int size = 1; size <= largest_world(); ++size) {
      CAPTURE(size, reduction == zero::NcclReduction::native);
      CHECK_NOTHROW(rethrow_any(run(
          size,
          [](NcclCommunicator& comm) {
            const std::size_t k = zero_test::world_size(comm), n = 37;
            const auto me = static_cast<float>(comm.rank());
            const float sum = static_cast<float>(k * (k + 1)) / 2;
            const auto all = [&](const Vector<float>& found, float expected, const char* what) {
              for (const float x : found) {
                require(x > expected - 1e-5F && x < expected + 1e-5F,
                        std::string(what) + ": " + std::to_string(x) + ", not " +
                            std::to_string(expected));
              }
            };
            Vector<float> data(n, me + 1), input(n * k, me + 1), output(n);
            comm.all_reduce_average(std::span<float>(data)).wait();
            all(data, sum / static_cast<float>(k), "all_reduce_average");
            data.assign(n, me + 1);
            comm.all_reduce_scaled(std::span<float>(data), 0.25).wait();
            all(data, sum / 4, "all_reduce_scaled");
            comm.reduce_scatter_average(std::span<const float>(input), std::span<float>(output))
                .wait();
            all(output, sum / static_cast<float>(k), "reduce_scatter_average");
            comm.reduce_scatter_scaled(std::span<const float>(input), std::span<float>(output), 2)
                .wait();
            all(output, sum * 2, "reduce_scatter_scaled");
            Vector<zero::bfloat16> narrow(n, zero::bfloat16(me + 1));
            comm.all_reduce_scaled(std::span<zero::bfloat16>(narrow), 0.5).wait();
            for (const zero::bfloat16 x : narrow) {
              require(static_cast<float>(x) == sum / 2, "all_reduce_scaled of bfloat16");
            }
          },
          options(reduction))));
    }
  }
}

TEST_CASE("NCCL: operations follow each other in the stream, without the host", "[comm][cuda]") {
  CHECK_NOTHROW(rethrow_any(run(
      largest_world(),
      [](NcclCommunicator& comm) {
        const std::size_t k = zero_test::world_size(comm), n = 4096;
        const auto size = static_cast<float>(comm.size());
        Vector<float> data(n, 1), parts(n * k), back(n);
        const zero::cuda::Event over;
        for (int i = 0; i < 40; ++i) {  // more than there are slots at first
          comm.all_reduce_scaled(std::span<float>(data), 1.0 / comm.size()).enqueue();
          comm.all_gather(std::span<const float>(data), std::span<float>(parts)).enqueue();
          comm.reduce_scatter(std::span<const float>(parts), std::span<float>(back)).enqueue();
        }
        over.record(comm.stream());
        comm.wait(over);
        comm.check();
        for (const float x : back) require(x == size, "operations in stream order");
      },
      options())));
}

TEST_CASE("NCCL: a batch is one group", "[comm][cuda]") {
  for (const auto reduction : {zero::NcclReduction::rank_order, zero::NcclReduction::native}) {
    CHECK_NOTHROW(rethrow_any(run(
        largest_world(),
        [](NcclCommunicator& comm) {
          const std::size_t k = zero_test::world_size(comm), n = 1000;
          const auto size = static_cast<float>(comm.size());
          std::array<Vector<float>, 5> data;
          for (auto& each : data) each.assign(n, 1);
          Vector<float> gathered(n * k);
          zero::NcclRequest requests[5], gather;
          {
            const auto scope = comm.batch();
            for (std::size_t i = 0; i < data.size(); ++i) {
              requests[i] = comm.all_reduce(std::span<float>(data[i]));
            }
            const auto within = comm.batch();
            gather = comm.all_gather(std::span<const float>(data[4]).first(0),
                                     std::span<float>(gathered).first(0));
          }
          for (auto& request : requests) request.wait();
          gather.wait();
          for (const auto& each : data) {
            for (const float x : each) require(x == size, "a batch");
          }
          const auto scope = comm.batch();
          auto first = comm.all_reduce(std::span<float>(data[0]));
          std::vector<int> all(k);
          const int me = comm.rank();
          auto exchange = comm.exchange(std::as_bytes(std::span(&me, 1)),
                                        std::as_writable_bytes(std::span(all)));
          auto last = comm.all_reduce(std::span<float>(data[1]));
          last.wait();  // within the scope
          require(first.done() && exchange.done(), "what was started before is over");
          require(all.back() == comm.size() - 1, "an exchange in a batch");
          require(data[1][0] == size * size, "a batch that is waited for before its end");
        },
        options(reduction))));
  }
}

TEST_CASE("NCCL: exchanges of more than one piece", "[comm][cuda]") {
  CHECK_NOTHROW(rethrow_any(run(
      largest_world(),
      [](NcclCommunicator& comm) {
        const std::size_t k = zero_test::world_size(comm), me = zero_test::own_rank(comm);
        const std::size_t n = 100'001;
        const auto byte = [](std::size_t r, std::size_t i) {
          return static_cast<std::byte>((31 * r + i / 7) & 0xffU);
        };
        std::vector<std::byte> all(n * k);
        const std::span<std::byte> mine = std::span(all).subspan(me * n, n);
        for (std::size_t i = 0; i < n; ++i) mine[i] = byte(me, i);
        auto first = comm.exchange(mine, all);
        auto second = comm.barrier();
        second.wait();
        first.wait();
        for (std::size_t i = 0; i < all.size(); ++i) {
          require(all[i] == byte(i / n, i % n), "byte " + std::to_string(i));
        }
      },
      options())));
}

TEST_CASE("NCCL: a captured operation runs with its graph", "[comm][cuda]") {
  for (const auto reduction : {zero::NcclReduction::rank_order, zero::NcclReduction::native}) {
    CHECK_NOTHROW(rethrow_any(run(
        largest_world(),
        [](NcclCommunicator& comm) {
          const cudaStream_t stream = comm.stream().get();
          const auto size = static_cast<float>(comm.size());
          Vector<float> data(5000, 1);
          comm.all_reduce(std::span<float>(data)).wait();  // so that the workspace is large enough
          std::fill(data.begin(), data.end(), 1.0F);
          comm.barrier().wait();

          cudaGraph_t graph = nullptr;
          cudaGraphExec_t launchable = nullptr;
          using zero::cuda::check;
          check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), "begin capture");
          comm.all_reduce(std::span<float>(data)).enqueue();
          std::string refused;
          auto barrier = comm.barrier();
          try {
            barrier.wait();
          } catch (const zero::UsageError& error) {
            refused = error.what();
          }
          barrier.enqueue();
          comm.check();
          check(cudaStreamEndCapture(stream, &graph), "end capture");
          require(refused.find("captured") != std::string::npos, "a wait in a capture: " + refused);
          check(cudaGraphInstantiate(&launchable, graph, 0), "cudaGraphInstantiate");
          const zero::cuda::Event over;
          check(cudaGraphLaunch(launchable, stream), "cudaGraphLaunch");
          check(cudaGraphLaunch(launchable, stream), "cudaGraphLaunch");
          over.record(comm.stream());
          comm.wait(over);
          for (const float x : data) require(x == size * size, "a graph launched twice");
          comm.all_reduce(std::span<float>(data)).wait();
          check(cudaGraphExecDestroy(launchable), "cudaGraphExecDestroy");
          check(cudaGraphDestroy(graph), "cudaGraphDestroy");
        },
        options(reduction))));
  }
}

TEST_CASE("NCCL: a borrowed communicator, its copies, and an owner's", "[comm][cuda]") {
  const ncclUniqueId id = zero::detail::new_nccl_id();
  const int size = largest_world();
  CHECK_NOTHROW(rethrow_any(nccl_ranks::run_threads(size, [&](int rank) {
    const zero::cuda::Stream stream;
    ncclComm_t borrowed =
        zero::detail::NcclInit(id, rank, size).finish(std::chrono::steady_clock::now() + 60s);
    {
      NcclCommunicatorRef comm(borrowed, stream, options());
      require(comm.rank() == rank && comm.size() == size && comm.device() == rank, "who it is");
      NcclCommunicatorRef copy = comm;
      Vector<float> a(100, 1), b(100, 2);
      auto one = comm.all_reduce(std::span<float>(a));
      auto two = copy.all_reduce(std::span<float>(b));
      two.wait(), one.wait();
      require(a[5] == static_cast<float>(size) && b[5] == static_cast<float>(2 * size), "copies");
      require(!comm.aborted() && comm.native_handle() == borrowed, "its handle");
    }
    require(ncclCommDestroy(borrowed) == ncclSuccess, "it is the caller's to destroy");
  })));
  CHECK_NOTHROW(rethrow_any(run(
      size,
      [](NcclCommunicator& owner) {
        NcclCommunicatorRef ref = owner;
        {
          NcclCommunicator moved = std::move(owner);
          moved.barrier().wait();
          ref.barrier().wait();
        }
        zero_test::require_usage_error([&] { return ref.barrier(); }, {"barrier", "destroyed"});
      },
      options())));
}

TEST_CASE("NCCL: another device may be current", "[comm][cuda]") {
  if (largest_world() < 2) return;
  CHECK_NOTHROW(rethrow_any(run(
      2,
      [](NcclCommunicator& comm) {
        zero::cuda::check(cudaSetDevice(1 - comm.rank()), "cudaSetDevice");
        zero_test::check_all_reduce<float>(comm);
        zero_test::check_exchange_and_barrier(comm);
        int device = -1;
        zero::cuda::check(cudaGetDevice(&device), "cudaGetDevice");
        require(device == 1 - comm.rank(), "the device that was current is so again");
      },
      options())));
}

TEST_CASE("NCCL: all devices of one process", "[comm][cuda]") {
  std::vector<int> devices(static_cast<std::size_t>(largest_world()));
  std::iota(devices.begin(), devices.end(), 0);
  std::vector<NcclCommunicator> all = NcclCommunicator::local(devices, options());
  REQUIRE(all.size() == devices.size());
  CHECK_NOTHROW(rethrow_any(nccl_ranks::run_threads(static_cast<int>(all.size()), [&](int rank) {
    NcclCommunicator& comm = all[static_cast<std::size_t>(rank)];
    require(comm.rank() == rank && comm.device() == rank, "who is where");
    zero_test::check_communicator<float>(comm);
  })));
}

TEST_CASE("NCCL: refuses what can't be, and says why", "[comm][cuda]") {
  const zero::cuda::Stream stream;
  const ncclUniqueId id = zero::detail::new_nccl_id();
  CHECK_THROWS_WITH(NcclCommunicator(id, 2, 2, stream), ContainsSubstring("rank is 2 of 2"));
  CHECK_THROWS_WITH(NcclCommunicator(id, 0, 0, stream), ContainsSubstring("rank is 0 of 0"));
  CHECK_THROWS_WITH(NcclCommunicatorRef(nullptr, stream), ContainsSubstring("null"));
  if (largest_world() < 2) return;
  REQUIRE(cudaSetDevice(1) == cudaSuccess);
  CHECK_THROWS_WITH(NcclCommunicator(id, 0, 1, stream),
                    ContainsSubstring("device 0") && ContainsSubstring("cudaSetDevice"));
  REQUIRE(cudaSetDevice(0) == cudaSuccess);
}
