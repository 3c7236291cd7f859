// SPDX-License-Identifier: Apache-2.0
// A step that is captured into a CUDA graph and replayed has the bits of steps that are called.
#include <cuda_runtime_api.h>

#include <cstddef>
#include <optional>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "catch.hpp"
#include "cuda/device_array.hpp"
#include "zero/cuda.cuh"

namespace {

using zero::cuda::check;
using zero::cuda::ParamRef;
using zero::cuda::Stream;
using zero::cuda::StreamView;

/// What a step was captured into.
class Graph {
 public:
  template <class F>
  Graph(StreamView stream, F&& body) {
    check(cudaStreamBeginCapture(stream.get(), cudaStreamCaptureModeThreadLocal),
          "cudaStreamBeginCapture");
    body();
    cudaGraph_t captured = nullptr;
    check(cudaStreamEndCapture(stream.get(), &captured), "cudaStreamEndCapture");
    const cudaError_t code = cudaGraphInstantiate(&executable_, captured, 0);
    (void)cudaGraphDestroy(captured);
    check(code, "cudaGraphInstantiate");
  }
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;
  ~Graph() { (void)cudaGraphExecDestroy(executable_); }
  void launch(StreamView stream) const {
    check(cudaGraphLaunch(executable_, stream.get()), "cudaGraphLaunch");
  }

 private:
  cudaGraphExec_t executable_ = nullptr;
};

/// A rank alone with two parameters, whose gradients the host changes between steps.
template <class T, class Precision = zero::MixedPrecision>
struct Rank {
  static std::vector<T> numbers(std::size_t count, int step) {
    std::vector<T> all;
    for (std::size_t i = 0; i < count; ++i) {
      all.push_back(static_cast<T>(
          static_cast<float>((i * 7 + static_cast<std::size_t>(step) * 11) % 31) * 0.05F - 0.7F));
    }
    return all;
  }
  Stream stream{};
  std::vector<DeviceArray<T>> values{}, gradients{};
  std::vector<ParamRef<T>> store{};
  zero::cuda::InProcessWorld world{1};
  zero::cuda::InProcessCommunicator comm = world.communicator(0, stream);
  zero::ZeroSharded<zero::AdamW, std::vector<ParamRef<T>>&, zero::cuda::InProcessCommunicator&,
                    zero::ContiguousPartition, zero::NoView, zero::Stage1, Precision>
      optimizer;

  explicit Rank(std::optional<double> max_norm, zero::Settings settings = {})
      : optimizer(zero::AdamW{.lr = 0.01}, made(), comm, settings) {
    optimizer.clip_grad_norm(max_norm);
  }
  std::vector<ParamRef<T>>& made() {
    for (const std::size_t count : {std::size_t{700}, std::size_t{33}}) {
      values.emplace_back(numbers(count, 100));
      gradients.emplace_back(numbers(count, 0));
      store.emplace_back("p" + std::to_string(count), std::vector<std::size_t>{count},
                         values.back().data(), gradients.back().data());
    }
    return store;
  }
  /// Enqueues that the gradients become those of `step`, all of them `fill` where it is given.
  void backward(int step, std::optional<T> fill = std::nullopt) {
    for (const DeviceArray<T>& gradient : gradients) {
      std::vector<T> made_on_host = numbers(gradient.size(), step);
      if (fill) made_on_host.assign(gradient.size(), *fill);
      check(cudaMemcpyAsync(gradient.data(), made_on_host.data(), gradient.size() * sizeof(T),
                            cudaMemcpyHostToDevice, stream.view().get()),
            "cudaMemcpyAsync");
    }
  }
  /// As the first of `mark_ready` and `step`.
  void step() {
    optimizer.mark_ready(1, stream);
    (void)optimizer.step(stream);
  }
  bool same_values(const Rank& other) const {
    for (std::size_t i = 0; i < values.size(); ++i) {
      if (!same_bytes(values[i].host(), other.values[i].host())) return false;
    }
    return true;
  }
};

template <class T, class Precision = zero::MixedPrecision>
void check_replays(std::optional<double> max_norm) {
  Rank<T, Precision> called(max_norm), replayed(max_norm);
  const Graph graph(replayed.stream, [&] { replayed.step(); });
  for (int step = 0; step < 5; ++step) {
    called.backward(step);
    called.step();
    replayed.backward(step);
    graph.launch(replayed.stream);
  }
  const zero::Outcome want = called.optimizer.last_outcome();
  const zero::Outcome got = replayed.optimizer.last_outcome(replayed.stream);
  CHECK(want.step == 5);
  CHECK(got.step == 5);
  CHECK(got.applied);
  CHECK(got.gradient_norm == want.gradient_norm);
  CHECK(replayed.optimizer.steps() == 5);
  CHECK(replayed.optimizer.steps(1) == 5);
  CHECK(called.same_values(replayed));
  // Steps may be called again after that.
  called.backward(9);
  called.step();
  replayed.backward(9);
  replayed.step();
  CHECK(replayed.optimizer.last_outcome().step == 6);
  CHECK(called.same_values(replayed));
}

}  // namespace

TEST_CASE("device: a step in a graph has the bits of a step", "[cuda]") {
  check_replays<float>(std::nullopt);
  check_replays<float>(0.5);
}

TEST_CASE("device: a step in a graph draws new noise whenever it is launched", "[cuda]") {
  check_replays<zero::bfloat16, zero::StochasticPrecision>(std::nullopt);
}

TEST_CASE("device: a step in a graph skips gradients that are not finite", "[cuda]") {
  Rank<float> rank(std::nullopt, {.loss_scale = zero::LossScale::dynamic(1024)});
  const Graph graph(rank.stream, [&] { rank.step(); });
  const std::vector<float> before = rank.values[0].host();
  rank.backward(0, INFINITY);
  graph.launch(rank.stream);
  rank.stream.synchronize();
  CHECK_FALSE(rank.optimizer.last_outcome().applied);
  CHECK(rank.optimizer.steps() == 0);
  CHECK(rank.optimizer.loss_scale() == 512);
  CHECK(same_bytes(rank.values[0].host(), before));
  rank.backward(1);
  graph.launch(rank.stream);
  rank.stream.synchronize();
  CHECK(rank.optimizer.last_outcome().applied);
  CHECK(rank.optimizer.steps() == 1);
}

TEST_CASE("device: the step that was captured can't be asked, since it was not taken", "[cuda]") {
  Rank<float> rank(std::nullopt);
  std::optional<zero::cuda::Step> step;
  const Graph graph(rank.stream, [&] { step = rank.optimizer.step(rank.stream); });
  CHECK(rank.optimizer.steps() == 0);
  CHECK_THROWS_WITH(step->outcome(), Catch::Contains("last_outcome(stream)"));
  CHECK_THROWS_AS(step->outcome(), zero::UsageError);
}

TEST_CASE("device: a graph keeps the options that it was captured with", "[cuda]") {
  Rank<float> called(std::nullopt), replayed(std::nullopt);
  const auto both = [&](double lr, const Graph* graph) {
    called.optimizer.group(0).lr = lr;
    called.step();
    graph != nullptr ? graph->launch(replayed.stream) : replayed.step();
    CHECK(called.same_values(replayed));
  };
  const Graph slow(replayed.stream, [&] { replayed.step(); });
  both(0.01, &slow);
  replayed.optimizer.group(0).lr = 0.5;  // of the next capture
  both(0.01, &slow);
  const Graph fast(replayed.stream, [&] { replayed.step(); });
  both(0.5, nullptr);  // a step that is called before the graph with its options
  both(0.5, &fast);
  both(0.01, &slow);
  both(0.5, nullptr);
}

TEST_CASE("device: a graph keeps the places of gradients", "[cuda]") {
  Rank<float> called(0.5), replayed(0.5);
  const Graph graph(replayed.stream, [&] { replayed.step(); });
  // Steps that are called have one more gradient elsewhere, and one absent.
  const DeviceArray<float> elsewhere(Rank<float>::numbers(700, 5));
  for (const bool launched : {false, true, false, true, true}) {
    for (Rank<float>* rank : {&called, &replayed}) {
      float* const place = launched ? rank->gradients[0].data() : elsewhere.data();
      if (rank == &replayed && launched) {
        graph.launch(rank->stream);
        continue;
      }
      rank->store[0] =
          ParamRef<float>("p700", std::vector<std::size_t>{700}, rank->values[0].data(), place);
      if (!launched) rank->optimizer.mark_absent(1);
      (void)rank->optimizer.step(rank->stream);
    }
    CHECK(called.same_values(replayed));
  }
}

TEST_CASE("device: a step is captured in another stream than steps that were called", "[cuda]") {
  Rank<float> called(std::nullopt), replayed(std::nullopt);
  const Stream other;
  for (int step = 0; step < 3; ++step) called.step();
  replayed.step();
  const Graph graph(other, [&] { (void)replayed.optimizer.step(other); });
  replayed.stream.synchronize();
  graph.launch(other);
  other.synchronize();
  replayed.step();
  CHECK(called.same_values(replayed));
}
