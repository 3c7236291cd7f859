// SPDX-License-Identifier: Apache-2.0
// Whole-tensor optimizers on a device: the bits of the same one on the host.
#include "zero/cuda/tensor_optimizer.hpp"

#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "catch.hpp"
#include "fake/cuda_runtime.hpp"
#include "zero/cuda.cuh"

namespace {

/// What both spaces compute, in one thread.
template <class T>
ZERO_HOST_DEVICE void normalized_momentum(T* values, const T* gradient, T* momentum, T* scratch,
                                          std::size_t count, std::int64_t t, T lr, T decay) {
  T squares = 0;
  for (std::size_t i = 0; i < count; ++i) squares += gradient[i] * gradient[i];
  scratch[0] = squares > 0 ? T(1) / zero::sqrt(squares) : T(0);
  for (std::size_t i = 0; i < count; ++i) {
    momentum[i] = decay * momentum[i] + gradient[i] * scratch[0];
    values[i] -= lr * momentum[i] / T(t);
  }
}
template <class T>
__global__ void normalized_momentum_kernel(T* values, const T* gradient, T* momentum, T* scratch,
                                           std::size_t count, std::int64_t t, T lr, T decay) {
  normalized_momentum(values, gradient, momentum, scratch, count, t, lr, decay);
}

struct NormalizedMomentum {
  double lr = 0.1;
  double decay = 0.9;
  static constexpr std::array<std::string_view, 1> slots{"momentum"};
  [[nodiscard]] std::size_t workspace(std::span<const std::size_t>) const { return 1; }
};
/// Momentum is kept, and descends by steps that get shorter.
struct OnHost : NormalizedMomentum {
  template <std::floating_point T>
  void update(zero::TensorRef<T> tensor, std::array<std::span<T>, 1> state, std::int64_t t) const {
    normalized_momentum(tensor.values.data(), tensor.gradient.data(), state[0].data(),
                        tensor.workspace.data(), tensor.values.size(), t, T(lr), T(decay));
  }
};
struct OnDevice : NormalizedMomentum {
  [[nodiscard]] std::array<double, 2> options() const { return {lr, decay}; }
  template <std::floating_point T>
  void update(zero::TensorRef<T> tensor, std::array<std::span<T>, 1> state, std::int64_t t,
              zero::cuda::StreamView stream) const {
    zero::cuda::detail::launch("normalized_momentum", &normalized_momentum_kernel<T>, {1, 1},
                               stream, tensor.values.data(), tensor.gradient.data(),
                               state[0].data(), tensor.workspace.data(), tensor.values.size(), t,
                               T(lr), T(decay));
  }
};
static_assert(zero::cuda::TensorOptimizer<OnDevice> && zero::WholeTensorOptimizer<OnHost>);
static_assert(!zero::WholeTensorOptimizer<OnDevice> && !zero::cuda::TensorOptimizer<OnHost>);
static_assert(!zero::cuda::TensorOptimizer<zero::Lamb> && !zero::cuda::TensorOptimizer<zero::Adam>);

constexpr std::array<std::size_t, 5> sizes{600, 7, 0, 1333, 64};

struct Plan {
  int ranks = 1;
  bool clips = false;
  double nan_at = -1;  ///< the step that has one
};

/// What a rank steps: host memory is what the emulated device works in.
template <class T>
struct Model {
  std::array<T*, sizes.size()> values{}, gradients{};
  std::vector<T*> memory;

  Model() {
    for (std::size_t p = 0; p < sizes.size(); ++p) {
      values[p] = make(sizes[p]);
      gradients[p] = make(sizes[p]);
      for (std::size_t i = 0; i < sizes[p]; ++i) {
        values[p][i] = zero::element_traits<T>::store(static_cast<float>(i % 17) * .1F - .5F);
      }
    }
  }
  Model(const Model&) = delete;
  Model& operator=(const Model&) = delete;
  ~Model() {
    for (T* all : memory) (void)cudaFree(all);
  }
  T* make(std::size_t count) {
    void* all = nullptr;
    zero::cuda::check(cudaMallocManaged(&all, count * sizeof(T) + 1), "cudaMallocManaged");
    memory.push_back(static_cast<T*>(all));
    return memory.back();
  }
  void backward(int rank, int step, const Plan& plan) {
    for (std::size_t p = 0; p < sizes.size(); ++p) {
      for (std::size_t i = 0; i < sizes[p]; ++i) {
        const auto k = i * 7 + static_cast<std::size_t>(rank * 13 + step);
        float g = static_cast<float>(k % 29) * .01F - .1F;
        if (step == plan.nan_at && i == 3) g = std::numeric_limits<float>::quiet_NaN();
        gradients[p][i] = zero::element_traits<T>::store(g);
      }
    }
  }
  [[nodiscard]] std::vector<double> contents() const {
    std::vector<double> all;
    for (std::size_t p = 0; p < sizes.size(); ++p) {
      for (std::size_t i = 0; i < sizes[p]; ++i) {
        all.push_back(static_cast<double>(zero::element_traits<T>::load(values[p][i])));
      }
    }
    return all;
  }
};

/// All ranks' values after three steps; the fourth parameter is absent in the second.
template <class T, template <zero::Element> class Param, class Opt, class Comm, class Wait,
          class... Policies>
std::vector<double> train(Comm& comm, Model<T>& model, const Plan& plan, Wait wait,
                          Policies... policies) {
  std::vector<Param<T>> store;
  for (std::size_t p = 0; p < sizes.size(); ++p) {
    store.emplace_back("p" + std::to_string(p), std::vector<std::size_t>{sizes[p]}, model.values[p],
                       model.gradients[p]);
  }
  zero::Settings settings;
  settings.finite_check =
      plan.nan_at >= 0 ? zero::FiniteCheck::always : zero::FiniteCheck::where_needed;
  zero::ZeroSharded optimizer{
      Opt{}, store, comm, zero::BalancedPartition{}, zero::NoView{4096}, settings, policies...};
  if (plan.clips) optimizer.clip_grad_norm(0.5);
  for (int step = 0; step < 3; ++step) {
    model.backward(comm.rank(), step, plan);
    if (step == 1) optimizer.mark_absent(3);
    const zero::Outcome outcome = wait(optimizer);
    if (outcome.applied == (step == plan.nan_at)) throw std::runtime_error("applied or skipped");
  }
  return model.contents();
}

template <class T, class... Policies>
std::vector<std::vector<double>> on_host(const Plan& plan, Policies... policies) {
  std::vector<std::vector<double>> out(static_cast<std::size_t>(plan.ranks));
  zero::run_ranks(plan.ranks, [&](zero::InProcessCommunicator& comm) {
    Model<T> model;
    out[static_cast<std::size_t>(comm.rank())] = train<T, zero::ParamRef, OnHost>(
        comm, model, plan, [](auto& optimizer) { return optimizer.step().outcome(); }, policies...);
  });
  return out;
}
template <class T, class... Policies>
std::vector<std::vector<double>> on_device(const Plan& plan, Policies... policies) {
  std::vector<std::vector<double>> out(static_cast<std::size_t>(plan.ranks));
  zero::cuda::run_ranks(plan.ranks, [&](zero::cuda::InProcessCommunicator& comm) {
    Model<T> model;
    const zero::cuda::Stream stream;
    out[static_cast<std::size_t>(comm.rank())] = train<T, zero::cuda::ParamRef, OnDevice>(
        comm, model, plan, [&](auto& optimizer) { return optimizer.step(stream.view()).outcome(); },
        policies...);
  });
  return out;
}

}  // namespace

TEST_CASE("A whole-tensor optimizer on a device has the host's bits") {
  for (const int ranks : {1, 2, 3}) {
    for (const bool clips : {false, true}) {
      CAPTURE(ranks, clips);
      const Plan plan{ranks, clips};
      const auto expected = on_host<float>(plan);
      CHECK(on_device<float>(plan) == expected);
      CHECK(on_device<float>(plan, zero::Replicated{}) == expected);
      CHECK(on_device<float>(plan, zero::Stage2{}) == expected);
    }
  }
}
TEST_CASE("A whole-tensor optimizer on a device: 16 bits with masters, and rounded without") {
  for (const int ranks : {1, 2}) {
    CAPTURE(ranks);
    const Plan plan{ranks};
    CHECK(on_device<zero::bfloat16>(plan) == on_host<zero::bfloat16>(plan));
    const zero::StochasticPrecision rounded{.seed = 5};
    CHECK(on_device<zero::bfloat16>(plan, rounded) == on_host<zero::bfloat16>(plan, rounded));
  }
}
TEST_CASE("A whole-tensor optimizer on a device leaves tensors alone where a step is skipped") {
  const Plan plan{.ranks = 2, .nan_at = 1};
  CHECK(on_device<float>(plan) == on_host<float>(plan));
}

TEST_CASE("A whole-tensor optimizer on a device: ranks' options are compared") {
  std::vector<std::string> said(2);
  zero::cuda::run_ranks(2, [&](zero::cuda::InProcessCommunicator& comm) {
    Model<float> model;
    std::vector store{zero::cuda::ParamRef<float>("p", {600}, model.values[0], model.gradients[0])};
    zero::ZeroSharded optimizer{OnDevice{}, store, comm, zero::BalancedPartition{}};
    optimizer.group(0).decay = comm.rank() == 0 ? 0.5 : 0.25;
    try {
      (void)optimizer.step().outcome();
    } catch (const zero::UsageError& error) {
      said[static_cast<std::size_t>(comm.rank())] = error.what();
    }
  });
  for (const std::string& words : said) {
    CHECK_THAT(words, Catch::Contains("options"));
  }
}

TEST_CASE("A whole-tensor optimizer on a device refuses to be captured") {
  std::string said;
  zero::cuda::run_ranks(1, [&](zero::cuda::InProcessCommunicator& comm) {
    Model<float> model;
    const zero::cuda::Stream stream;
    std::vector store{zero::cuda::ParamRef<float>("p", {600}, model.values[0], model.gradients[0])};
    zero::ZeroSharded optimizer{OnDevice{}, store, comm, zero::BalancedPartition{}};
    zero::cuda::check(cudaStreamBeginCapture(stream.view().get(), cudaStreamCaptureModeThreadLocal),
                      "begin");
    try {
      (void)optimizer.step(stream.view());
    } catch (const zero::UsageError& error) {
      said = error.what();
    }
    cudaGraph_t graph = nullptr;
    zero::cuda::check(cudaStreamEndCapture(stream.view().get(), &graph), "end");
    (void)cudaGraphDestroy(graph);
  });
  CHECK_THAT(said, Catch::Contains("can't be captured"));
}
