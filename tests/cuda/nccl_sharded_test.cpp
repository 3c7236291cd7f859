// SPDX-License-Identifier: Apache-2.0
// ZeroSharded over NCCL: the bits of host ranks, at every stage, and what a rank learns of others.
#include <cuda_runtime_api.h>

#include <cstddef>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "catch.hpp"
#include "conformance/communicator_suite.hpp"
#include "cuda/nccl_ranks.hpp"
#include "zero/comm/in_process.hpp"
#include "zero/comm/nccl.cuh"
#include "zero/cuda.cuh"
#include "zero/zero.hpp"

namespace {

using Catch::Matchers::ContainsSubstring;
using zero_test::require;
using zero_test::Vector;

const std::vector<std::size_t> sizes{1000, 7, 0, 333, 5000};
constexpr int units = 3;
constexpr int steps = 3;

int unit_of(std::size_t k) { return static_cast<int>(k / 2); }
double initial(std::string_view name, std::size_t i) {
  return static_cast<double>((i * 3 + name.size()) % 17) * 0.1 - 0.5;
}
float gradient(int rank, int step, std::size_t k, std::size_t i) {
  return static_cast<float>((i * 7 + k * 5 + static_cast<std::size_t>(rank * 13 + step)) % 29) *
             0.01F -
         0.1F;
}

/// Shapes in device memory that the optimizer makes.
struct DeviceParam : zero::ShapedParam<float> {
  static constexpr zero::MemorySpace memory_space = zero::MemorySpace::cuda;
  using zero::ShapedParam<float>::ShapedParam;
};

/// One parameter of ones, whose gradient is ones.
struct Ones {
  Vector<float> values = Vector<float>(100, 1);
  Vector<float> gradients = Vector<float>(100, 1);
  std::vector<zero::cuda::ParamRef<float>> store{
      zero::cuda::ParamRef<float>("w", {100}, values.data(), gradients.data())};
};

/// Gradients are made on the host and copied, in stream order, to where the optimizer has them.
template <class Param, class Comm, class Stage, class... Stream>
std::vector<float> trained(Comm& comm, Stage stage, const Stream&... stream) {
  std::vector<Param> store;
  for (std::size_t k = 0; k < sizes.size(); ++k) {
    store.emplace_back("p" + std::to_string(k), std::vector<std::size_t>{sizes[k]},
                       zero::Attributes{.unit = unit_of(k)});
  }
  zero::Settings settings;
  settings.initial_value = initial;
  zero::ZeroSharded optimizer{zero::Adam{.lr = 1e-2}, store,    comm,
                              zero::ParamView{4096},  settings, stage};
  optimizer.clip_grad_norm(0.5);
  std::vector<std::vector<float>> made;
  for (int step = 0; step < steps; ++step) {
    made.clear();
    for (int unit = units; unit-- > 0;) {
      optimizer.acquire(unit, stream...);
      for (std::size_t k = sizes.size(); k-- > 0;) {
        if (unit_of(k) != unit) continue;
        {
          const auto lease = optimizer.gradient(k, stream...);
          auto& from = made.emplace_back(sizes[k]);
          for (std::size_t i = 0; i < sizes[k]; ++i) from[i] = gradient(comm.rank(), step, k, i);
          if constexpr (sizeof...(Stream) != 0) {
            zero::cuda::check(
                cudaMemcpyAsync(lease.values().data(), from.data(), from.size() * sizeof(float),
                                cudaMemcpyHostToDevice, (stream.view().get(), ...)),
                "cudaMemcpyAsync");
          } else {
            std::copy(from.begin(), from.end(), lease.values().begin());
          }
        }
        optimizer.mark_ready(k, stream...);
      }
      optimizer.release(unit, stream...);
    }
    require(optimizer.step(stream...).outcome().step == step + 1, "a step was not applied");
  }
  std::vector<float> all;
  for (int unit = 0; unit < units; ++unit) {
    optimizer.acquire(unit, stream...);
    for (std::size_t k = 0; k < sizes.size(); ++k) {
      if (unit_of(k) != unit) continue;
      std::vector<float> values(sizes[k]);
      if constexpr (sizeof...(Stream) != 0) {
        (stream.synchronize(), ...);
        zero::cuda::check(cudaMemcpy(values.data(), store[k].values().data(),
                                     values.size() * sizeof(float), cudaMemcpyDefault),
                          "cudaMemcpy");
      } else {
        values.assign(store[k].values().begin(), store[k].values().end());
      }
      all.insert(all.end(), values.begin(), values.end());
    }
    optimizer.release(unit, stream...);
  }
  return all;
}

template <class Stage>
void check_stage(int size, Stage stage) {
  std::vector<float> expected;
  zero::run_ranks(size, [&](zero::InProcessCommunicator& comm) {
    auto values = trained<zero::ShapedParam<float>>(comm, zero::Stage2{});
    if (comm.rank() == 0) expected = std::move(values);
  });
  nccl_ranks::rethrow_any(nccl_ranks::run(size, [&](zero::NcclCommunicator& comm) {
    const zero::cuda::Stream stream;
    require(trained<DeviceParam>(comm, stage, stream) == expected, "values differ");
  }));
}

}  // namespace

TEST_CASE("NCCL: stages 2 and 3 have the bits of host ranks", "[cuda]") {
  for (int size = 1; size <= nccl_ranks::largest_world(); ++size) {
    CAPTURE(size);
    CHECK_NOTHROW(check_stage(size, zero::Stage2{}));
    CHECK_NOTHROW(check_stage(size, zero::Stage3{}));
    CHECK_NOTHROW(check_stage(size, zero::Stage3{.resident_bytes = 4096}));
  }
}

TEST_CASE("NCCL: all ranks that ask learn of one that refuses its step", "[cuda]") {
  const int size = nccl_ranks::largest_world();
  if (size < 2) return;
  nccl_ranks::rethrow_any(nccl_ranks::run(size, [&](zero::NcclCommunicator& comm) {
    Ones parameters;
    auto& values = parameters.values;
    auto& store = parameters.store;
    const zero::cuda::Stream stream;
    zero::ZeroSharded optimizer{zero::cuda::FusedSgd{.lr = 0.5}, store, comm};
    const bool refuses = comm.rank() == 1;
    if (refuses) optimizer.group(0).lr = -1;
    std::string refusal;
    try {
      (void)optimizer.step(stream).outcome();
    } catch (const zero::UsageError& error) {
      refusal = error.what();
    }
    require(refusal.find("lr") != std::string::npos, "nobody says why: " + refusal);
    stream.synchronize();
    require(values[0] == 1, "a refused step has changed values");
    if (refuses) optimizer.group(0).lr = 0.5;
    require(optimizer.step(stream).outcome().step == 1, "the next step was not applied");
    stream.synchronize();
    require(values[99] == 0.5F, "the next step is another one");
  }));
}

TEST_CASE("NCCL: who never asks is told of a refused step by a later one", "[cuda]") {
  const int size = nccl_ranks::largest_world();
  if (size < 2) return;
  nccl_ranks::rethrow_any(nccl_ranks::run(size, [&](zero::NcclCommunicator& comm) {
    Ones parameters;
    auto& values = parameters.values;
    auto& store = parameters.store;
    const zero::cuda::Stream stream;
    zero::ZeroSharded optimizer{zero::cuda::FusedSgd{.lr = 0.25}, store, comm};
    const bool refuses = comm.rank() == 1;
    int told = 0;
    for (int step = 0; step < 4; ++step) {
      if (refuses) optimizer.group(0).lr = step == 0 ? -1 : 0.25;
      try {
        (void)optimizer.step(stream);
      } catch (const zero::UsageError& error) {
        ++told;
        require(std::string(error.what()).find("lr") != std::string::npos, error.what());
        require(refuses ? step == 0 : step != 0, "told by another step");
      }
      stream.synchronize();
    }
    require(told == 1, "told " + std::to_string(told) + " times");
    require(values[0] == 0.25F, "three steps were to be taken");
  }));
}

TEST_CASE("NCCL: a step is captured without one before it, with marks inside alone", "[cuda]") {
  const int size = nccl_ranks::largest_world();
  if (size < 2) return;
  nccl_ranks::rethrow_any(nccl_ranks::run(size, [&](zero::NcclCommunicator& comm) {
    Ones parameters;
    auto& values = parameters.values;
    auto& store = parameters.store;
    const zero::cuda::Stream stream;
    zero::ZeroSharded optimizer{zero::cuda::FusedSgd{.lr = 0.25}, store, comm};
    const auto capture = [&](auto&& body) {
      cudaGraph_t graph = nullptr;
      zero::cuda::check(
          cudaStreamBeginCapture(stream.view().get(), cudaStreamCaptureModeThreadLocal),
          "cudaStreamBeginCapture");
      body();
      zero::cuda::check(cudaStreamEndCapture(stream.view().get(), &graph), "cudaStreamEndCapture");
      return graph;
    };
    cudaGraph_t graph = capture([&] {
      optimizer.mark_ready(0, stream);
      (void)optimizer.step(stream);
    });
    cudaGraphExec_t captured = nullptr;
    zero::cuda::check(cudaGraphInstantiate(&captured, graph, 0), "cudaGraphInstantiate");
    for (int k = 0; k < 2; ++k) {
      zero::cuda::check(cudaGraphLaunch(captured, stream.view().get()), "cudaGraphLaunch");
    }
    require(optimizer.last_outcome(stream).step == 2, "steps of the graph");
    require(values[99] == 0.5F, "values of the graph");
    zero::cuda::check(cudaGraphExecDestroy(captured), "cudaGraphExecDestroy");
    zero::cuda::check(cudaGraphDestroy(graph), "cudaGraphDestroy");

    optimizer.mark_ready(0, stream);
    std::string refusal;
    graph = capture([&] {
      try {
        (void)optimizer.step(stream);
      } catch (const zero::UsageError& error) {
        refusal = error.what();
      }
    });
    require(refusal.find("marked before the capture") != std::string::npos,
            "not refused: " + refusal);
    zero::cuda::check(cudaGraphDestroy(graph), "cudaGraphDestroy");
  }));
}

TEST_CASE("NCCL: what can't be captured is refused before anything is enqueued", "[cuda]") {
  const int size = nccl_ranks::largest_world();
  if (size < 2) return;
  nccl_ranks::rethrow_any(nccl_ranks::run(size, [&](zero::NcclCommunicator& comm) {
    std::vector<DeviceParam> store;
    store.emplace_back("w", std::vector<std::size_t>{100}, zero::Attributes{.unit = 0});
    zero::Settings settings;
    settings.initial_value = initial;
    zero::ZeroSharded optimizer{zero::Adam{},      store,    comm,
                                zero::ParamView{}, settings, zero::Stage3{}};
    const zero::cuda::Stream stream;
    zero::cuda::check(cudaStreamBeginCapture(stream.view().get(), cudaStreamCaptureModeThreadLocal),
                      "cudaStreamBeginCapture");
    std::string refusal;
    try {
      optimizer.acquire(0, stream);
    } catch (const zero::UsageError& error) {
      refusal = error.what();
    }
    cudaGraph_t graph = nullptr;
    zero::cuda::check(cudaStreamEndCapture(stream.view().get(), &graph), "cudaStreamEndCapture");
    zero::cuda::check(cudaGraphDestroy(graph), "cudaGraphDestroy");
    require(refusal.find("zero::Stage2") != std::string::npos, "not refused: " + refusal);
    optimizer.acquire(0, stream);  // and nothing is lost
    optimizer.release(0, stream);
    stream.synchronize();
  }));
}
