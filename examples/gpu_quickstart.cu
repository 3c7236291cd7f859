// Adam with its state spread over GPUs, a process a GPU: torchrun --no-python --nproc-per-node 8 …
#include <cstdio>
#include <vector>
#include <zero/comm/nccl.cuh>
#include <zero/cuda.cuh>

__global__ void backward(const float* weights, float* gradient, unsigned count) {
  const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) gradient[i] = weights[i] - 1.0F;
}

int main() {
  const auto place = zero::NcclTcp::from_environment();  // RANK, WORLD_SIZE, MASTER_ADDR, …
  zero::cuda::check(cudaSetDevice(place.local_rank), "cudaSetDevice");
  const zero::cuda::Stream stream, traffic;  // yours, and the one that NCCL works in
  zero::NcclCommunicator comm(place, traffic);

  zero::cuda::DeviceArray<float> weights(1024), gradient(1024);  // your model's memory
  std::vector parameters{zero::cuda::ParamRef("weights", {1024}, weights.data(), gradient.data())};
  zero::ZeroSharded optimizer{zero::cuda::FusedAdam{.lr = 1e-1}, parameters, comm};

  for (int step = 1; step <= 100; ++step) {
    backward<<<4, 256, 0, stream.view().get()>>>(weights.data(), gradient.data(), 1024);
    optimizer.mark_ready(0, stream);  // complete once the stream is here: reduced from then on
    const auto taken = optimizer.step(stream);  // enqueued; the host waits for nothing
    if (step % 10 != 0) continue;
    const zero::Outcome outcome = taken.outcome();  // now and then: waits, throws what went wrong
    if (!outcome.applied) std::printf("step %d was skipped\n", step);
  }
  std::printf("step %ld, state on this rank: %zu bytes of %zu\n",
              static_cast<long>(optimizer.last_outcome().step), optimizer.memory().state,
              2 * weights.bytes());
}
