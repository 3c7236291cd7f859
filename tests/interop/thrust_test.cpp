// SPDX-License-Identifier: Apache-2.0
// Parameters in Thrust's vectors: the bits of parameters in plain device memory, whatever becomes
// of gradients' vectors.
#include <thrust/device_vector.h>

#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "catch.hpp"
#include "cuda/emulated_example.hpp"
#include "zero/cuda.cuh"
#include "zero/interop/thrust.cuh"

namespace {

using Vector = thrust::device_vector<float, zero_example::ManagedAllocator<float>>;
using Param = zero::ThrustParam<Vector>;

void backward(Vector& gradient, int rank, int step) {
  for (std::size_t i = 0; i < gradient.size(); ++i) {
    const auto k = i * 7 + static_cast<std::size_t>(rank * 13 + step);
    gradient[i] = static_cast<float>(k % 29) * .01F - .1F;
  }
}

struct Trained {
  std::vector<float> values;
  std::string refusal;
};

/// Three steps of two parameters; the second has no gradient in the second step.
Trained by_thrust(int rank, zero::cuda::InProcessCommunicator& comm) {
  const zero::cuda::Stream stream;
  Vector first(600, 1.0F), first_gradient(600), second(35, 2.0F), second_gradient;
  std::vector store{Param("first", {20, 30}, first, first_gradient),
                    Param("second", {35}, second, second_gradient)};
  zero::ZeroSharded optimizer{zero::cuda::FusedAdam{.lr = 1e-2}, store, comm, zero::NoView{512}};
  for (int step = 0; step < 3; ++step) {
    Vector(600).swap(first_gradient);  // elsewhere
    Vector(step == 1 ? 0 : 35).swap(second_gradient);
    backward(first_gradient, rank, step);
    backward(second_gradient, rank, step);
    (void)optimizer.step(stream.view()).outcome();
  }
  Trained result{{first.begin(), first.end()}, {}};
  result.values.insert(result.values.end(), second.begin(), second.end());
  second.resize(70);  // what is not allowed
  try {
    (void)optimizer.step(stream.view()).outcome();
  } catch (const zero::UsageError& error) {
    result.refusal = error.what();
  }
  return result;
}
std::vector<float> by_pointers(int rank, zero::cuda::InProcessCommunicator& comm) {
  const zero::cuda::Stream stream;
  Vector first(600, 1.0F), first_gradient(600), second(35, 2.0F), second_gradient(35);
  std::vector store{
      zero::cuda::ParamRef<float>("first", {20, 30}, first.data(), first_gradient.data()),
      zero::cuda::ParamRef<float>("second", {35}, second.data(), second_gradient.data())};
  zero::ZeroSharded optimizer{zero::cuda::FusedAdam{.lr = 1e-2}, store, comm, zero::NoView{512}};
  for (int step = 0; step < 3; ++step) {
    backward(first_gradient, rank, step);
    backward(second_gradient, rank, step);
    if (step == 1) optimizer.mark_absent(1);
    (void)optimizer.step(stream.view()).outcome();
  }
  std::vector<float> values(first.begin(), first.end());
  values.insert(values.end(), second.begin(), second.end());
  return values;
}

}  // namespace

TEST_CASE("Thrust's vectors are stepped as plain device memory is") {
  std::vector<Trained> trained(2);
  std::vector<std::vector<float>> expected(2);
  zero::cuda::run_ranks(2, [&](zero::cuda::InProcessCommunicator& comm) {
    const auto rank = static_cast<std::size_t>(comm.rank());
    expected[rank] = by_pointers(comm.rank(), comm);
    trained[rank] = by_thrust(comm.rank(), comm);
  });
  for (std::size_t rank = 0; rank < 2; ++rank) {
    CHECK(trained[rank].values == expected[rank]);
    CHECK(trained[rank].values.front() != 1.0F);
    CHECK_THAT(trained[rank].refusal, Catch::Contains("second"));
  }
}

TEST_CASE("A parameter in a Thrust vector may have no gradient of its own") {
  std::vector<std::vector<float>> trained(2);
  zero::cuda::run_ranks(2, [&](zero::cuda::InProcessCommunicator& comm) {
    const zero::cuda::Stream stream;
    Vector values(100, 1.0F), gradient(100);
    std::vector store{Param("weights", {100}, values, nullptr)};
    zero::ZeroSharded optimizer{zero::cuda::FusedAdam{.lr = 1e-2}, store, comm, zero::Stage2{}};
    backward(gradient, 0, 0);
    {
      const auto lease = optimizer.gradient(0, stream.view());
      zero::cuda::check(cudaMemcpyAsync(lease.values().data(), gradient.data(), 100 * sizeof(float),
                                        cudaMemcpyDefault, stream.view().get()),
                        "cudaMemcpyAsync");
    }
    optimizer.mark_ready(0, stream.view());
    (void)optimizer.step(stream.view()).outcome();
    trained[static_cast<std::size_t>(comm.rank())].assign(values.begin(), values.end());
  });
  CHECK(trained[0] == trained[1]);
  CHECK(trained[0].front() == Approx(1.01));  // one step of Adam, against the gradient's sign
}
