// SPDX-License-Identifier: Apache-2.0
// An optimizer of your own that needs whole tensors, written with Thrust's algorithms: LAMB, whose
// step is as long as the tensor is large. Two ranks share one GPU; each keeps the moments of its
// half of the tensors.
//
//   nvcc -std=c++20 -O2 -Werror=cross-execution-space-call -Iinclude
//        examples/thrust_optimizer.cu -o thrust_optimizer
#include <thrust/device_vector.h>
#include <thrust/execution_policy.h>
#include <thrust/for_each.h>
#include <thrust/functional.h>
#include <thrust/iterator/counting_iterator.h>
#include <thrust/transform.h>
#include <thrust/transform_reduce.h>

#include <array>
#include <cmath>
#include <cstdio>
#include <functional>
#include <numeric>
#include <zero/cuda.cuh>
#include <zero/interop/thrust.cuh>

namespace {

/// You et al., arXiv:1904.00962, algorithm 2.
struct ThrustLamb {
  double lr = 1e-2, beta1 = 0.9, beta2 = 0.999, eps = 1e-6, weight_decay = 1e-2;

  static constexpr std::array<const char*, 2> slots{"exp_avg", "exp_avg_sq"};
  /// What ranks compare before a step.
  std::array<double, 5> options() const { return {lr, beta1, beta2, eps, weight_decay}; }
  /// Room for the direction.
  std::size_t workspace(std::span<const std::size_t> shape) const {
    return std::accumulate(shape.begin(), shape.end(), std::size_t{1}, std::multiplies<>());
  }

  struct Advance {
    const float* value;
    const float* gradient;
    float *exp_avg, *exp_avg_sq, *direction;
    float beta1, beta2, correction1, correction2, eps, decay;
    __host__ __device__ void operator()(std::size_t i) const {
      const float g = gradient[i];
      exp_avg[i] = beta1 * exp_avg[i] + (1 - beta1) * g;
      exp_avg_sq[i] = beta2 * exp_avg_sq[i] + (1 - beta2) * g * g;
      direction[i] =
          exp_avg[i] / correction1 / (sqrtf(exp_avg_sq[i] / correction2) + eps) + decay * value[i];
    }
  };
  struct Square {
    __host__ __device__ double operator()(float x) const { return static_cast<double>(x) * x; }
  };
  struct Descend {
    float length;
    __host__ __device__ float operator()(float x, float u) const { return x - length * u; }
  };

  void update(zero::TensorRef<float> tensor, std::array<std::span<float>, 2> state, std::int64_t t,
              zero::cuda::StreamView stream) const {
    const auto policy = thrust::cuda::par_nosync.on(stream.get());
    float* const values = tensor.values.data();
    float* const u = tensor.workspace.data();
    const std::size_t n = tensor.values.size();
    const auto steps = static_cast<double>(t);
    const Advance advance{values,
                          tensor.gradient.data(),
                          state[0].data(),
                          state[1].data(),
                          u,
                          static_cast<float>(beta1),
                          static_cast<float>(beta2),
                          static_cast<float>(1 - std::pow(beta1, steps)),
                          static_cast<float>(1 - std::pow(beta2, steps)),
                          static_cast<float>(eps),
                          static_cast<float>(weight_decay)};
    thrust::for_each_n(policy, thrust::counting_iterator<std::size_t>(0), n, advance);
    // Sums for the host: each waits for the stream.
    const double size = std::sqrt(thrust::transform_reduce(policy, values, values + n, Square{},
                                                           0.0, thrust::plus<double>()));
    const double length = std::sqrt(
        thrust::transform_reduce(policy, u, u + n, Square{}, 0.0, thrust::plus<double>()));
    const double ratio = size > 0 && length > 0 ? size / length : 1;
    thrust::transform(policy, values, values + n, u, values,
                      Descend{static_cast<float>(lr * ratio)});
  }
};
static_assert(zero::cuda::TensorOptimizer<ThrustLamb>);

/// Of half the squared distance to `target`.
struct Pull {
  float target;
  __host__ __device__ float operator()(float x) const { return x - target; }
};

void train(zero::cuda::InProcessCommunicator& comm) {
  const zero::cuda::Stream own;
  const zero::cuda::StreamView stream = own;
  thrust::device_vector<float> first(64 * 64, 1.0F), first_gradient(64 * 64);
  thrust::device_vector<float> second(4000, 3.0F), second_gradient(4000);
  std::vector parameters{zero::ThrustParam("first", {64, 64}, first, first_gradient),
                         zero::ThrustParam("second", {4000}, second, second_gradient)};
  zero::ZeroSharded optimizer{ThrustLamb{.lr = 2e-2}, parameters, comm, zero::BalancedPartition{}};

  const Pull pull{0.5F + static_cast<float>(comm.rank())};  // 0.5 and 1.5: together 1
  for (int step = 0; step <= 200; ++step) {
    for (const auto& parameter : parameters) {
      const std::span<float> x = parameter.values();
      thrust::transform(thrust::cuda::par_nosync.on(stream.get()), x.data(), x.data() + x.size(),
                        parameter.gradient().data(), pull);
    }
    const zero::Outcome outcome = optimizer.step(stream).outcome();
    if (comm.rank() == 0 && step % 50 == 0) {
      std::printf("step %3ld  first[0] = %7.4f  second[0] = %7.4f\n",
                  static_cast<long>(outcome.step), static_cast<double>(first[0]),
                  static_cast<double>(second[0]));
    }
  }
  std::printf("rank %d keeps %zu bytes of state, of %zu\n", comm.rank(), optimizer.memory().state,
              2 * sizeof(float) * (first.size() + second.size()));
}

}  // namespace

int main() try {
  int gpus = 0;
  zero::cuda::check(cudaGetDeviceCount(&gpus), "cudaGetDeviceCount");
  zero::cuda::run_ranks(2, train);
  return 0;
} catch (const zero::CudaError& error) {
  std::fprintf(stderr, "thrust_optimizer: %s\n", error.what());
  const bool no_gpu =
      error.code() == cudaErrorNoDevice || error.code() == cudaErrorInsufficientDriver;
  return no_gpu ? 77 : 1;
}
