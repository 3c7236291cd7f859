// SPDX-License-Identifier: Apache-2.0
// Adam over NCCL, its state spread over GPUs: each keeps 1/K of the two moments.
//
//   nvcc -std=c++20 -O2 -Werror=cross-execution-space-call -Iinclude examples/nccl_adam.cu -lnccl
//        -o nccl_adam
//   ./nccl_adam                                            one process, a thread for each GPU
//   torchrun --no-python --nproc-per-node 8 ./nccl_adam    a process for each GPU, on any hosts
//
// The model is a linear regression; what it is to find out is w[j] = sin(j).
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <future>
#include <numeric>
#include <vector>
#include <zero/comm/nccl.cuh>
#include <zero/cuda.cuh>

namespace {

constexpr unsigned features = 1024, samples = 64, threads = 128;
constexpr int steps = 200;

/// Feature j of sample i, in [-1, 1): the data, which needs no memory.
__device__ float x(unsigned i, unsigned j) {
  unsigned h = (i * 2654435761U) ^ (j * 2246822519U);
  h = (h ^ h >> 15) * 2246822519U;
  h = (h ^ h >> 13) * 3266489917U;
  return static_cast<float>(h >> 8) * 0x1p-23F - 1.0F;
}

/// How far off each of this rank's predictions is.
__global__ void residuals(const float* w, float* residual, unsigned first_sample) {
  const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= samples) return;
  float sum = 0;
  for (unsigned j = 0; j < features; ++j) {
    sum += x(first_sample + i, j) * (w[j] - sinf(static_cast<float>(j)));
  }
  residual[i] = sum;
}

/// Of half the mean of their squares, by each weight.
__global__ void gradients(const float* residual, float* gradient, unsigned first_sample) {
  const unsigned j = blockIdx.x * blockDim.x + threadIdx.x;
  if (j >= features) return;
  float sum = 0;
  for (unsigned i = 0; i < samples; ++i) sum += x(first_sample + i, j) * residual[i];
  gradient[j] = sum / samples;
}

double half_mean_square(const zero::cuda::DeviceArray<float>& residual) {
  std::vector<float> host(residual.size());
  zero::cuda::check(
      cudaMemcpy(host.data(), residual.data(), residual.bytes(), cudaMemcpyDeviceToHost),
      "cudaMemcpy");
  return std::inner_product(host.begin(), host.end(), host.begin(), 0.0) / (2.0 * samples);
}

/// One rank. Its device is current.
void train(zero::NcclCommunicator& comm) {
  const zero::cuda::Stream stream;  // of the computation; the communicator has another
  zero::cuda::DeviceArray<float> weights(features), gradient(features), residual(samples);
  std::vector parameters{
      zero::cuda::ParamRef("weights", {features}, weights.data(), gradient.data())};
  zero::ZeroSharded optimizer{zero::cuda::FusedAdam{.lr = 5e-2}, parameters, comm};
  const unsigned first = static_cast<unsigned>(comm.rank()) * samples;

  for (int step = 0; step < steps; ++step) {
    residuals<<<(samples + threads - 1) / threads, threads, 0, stream.view().get()>>>(
        weights.data(), residual.data(), first);
    gradients<<<(features + threads - 1) / threads, threads, 0, stream.view().get()>>>(
        residual.data(), gradient.data(), first);
    zero::cuda::check(cudaGetLastError(), "gradients");
    optimizer.mark_ready(0, stream);
    const auto taken = optimizer.step(stream);  // enqueued: the host goes on
    if (step % 50 != 0 && step != steps - 1) continue;
    const zero::Outcome outcome = taken.outcome();  // this waits
    if (comm.rank() == 0) {
      std::printf("step %3ld  loss %9.5f%s\n", static_cast<long>(outcome.step),
                  half_mean_square(residual), outcome.applied ? "" : "  (skipped)");
    }
  }
  const zero::MemoryReport memory = optimizer.memory();
  std::printf("rank %d of %d: optimizer state %zu bytes; replicated it would be %zu\n", comm.rank(),
              comm.size(), memory.state, 2 * weights.bytes());
}

/// All GPUs of this machine.
void train_in_threads(int gpus) {
  std::vector<int> devices(static_cast<std::size_t>(gpus));
  std::iota(devices.begin(), devices.end(), 0);
  std::vector<zero::NcclCommunicator> ranks = zero::NcclCommunicator::local(devices);
  std::vector<std::future<void>> running;
  for (zero::NcclCommunicator& comm : ranks) {
    running.push_back(std::async(std::launch::async, [&comm] {
      try {
        zero::cuda::check(cudaSetDevice(comm.device()), "cudaSetDevice");
        train(comm);
      } catch (const std::exception& error) {
        comm.abort(error.what());  // or the others would wait for this one
        throw;
      }
    }));
  }
  for (std::future<void>& rank : running) rank.get();
}

/// As torchrun says who this is.
void train_in_processes() {
  const zero::NcclTcp place = zero::NcclTcp::from_environment();
  zero::cuda::check(cudaSetDevice(place.local_rank), "cudaSetDevice");
  const zero::cuda::Stream traffic;
  zero::NcclCommunicator comm(place, traffic);
  train(comm);
}

}  // namespace

int main() try {
  int gpus = 0;
  zero::cuda::check(cudaGetDeviceCount(&gpus), "cudaGetDeviceCount");
  if (std::getenv("RANK") != nullptr) {
    train_in_processes();
  } else {
    train_in_threads(gpus);
  }
  return 0;
} catch (const zero::CudaError& error) {
  std::fprintf(stderr, "nccl_adam: %s\n", error.what());
  const bool no_gpu =
      error.code() == cudaErrorNoDevice || error.code() == cudaErrorInsufficientDriver;
  return no_gpu ? 77 : 1;
} catch (const std::exception& error) {
  std::fprintf(stderr, "nccl_adam: %s\n", error.what());
  return 1;
}
