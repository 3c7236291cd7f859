// SPDX-License-Identifier: Apache-2.0
// A user's program on CUDA, with the real runtime and the real NCCL: steps of a sharded optimizer
// on a world of one, enqueued and captured in a graph. Where there is no GPU the program is told
// so, and what to do about it.
#include <zero/cuda.cuh>
#include <zero/zero.hpp>

#if ZERO_TEST_NCCL
#include <zero/comm/nccl.cuh>
#endif

#include <cstddef>
#include <cstdio>
#include <string_view>
#include <vector>

namespace {

constexpr std::size_t count = 1000;

std::vector<float> host_copy(zero::cuda::DeviceArray<float>& from) {
  std::vector<float> to(from.size());
  zero::cuda::check(cudaMemcpy(to.data(), from.data(), from.bytes(), cudaMemcpyDefault),
                    "cudaMemcpy");
  return to;
}
void fill(zero::cuda::DeviceArray<float>& to, float value) {
  const std::vector<float> from(to.size(), value);
  zero::cuda::check(cudaMemcpy(to.data(), from.data(), to.bytes(), cudaMemcpyDefault),
                    "cudaMemcpy");
  zero::cuda::StreamView().synchronize();  // it may return before the device has the bytes
}

/// Values of 1 and gradients of 1, so that a step takes a quarter from the values.
template <class Comm>
bool steps_are_right(Comm& comm) {
  zero::cuda::DeviceArray<float> values(count), gradients(count);
  fill(values, 1.0F);
  fill(gradients, 1.0F);
  std::vector<zero::cuda::ParamRef<float>> store;
  store.emplace_back("weight", std::vector<std::size_t>{count}, values.data(), gradients.data());
  zero::ZeroSharded optimizer{zero::cuda::FusedSgd{.lr = 0.25}, store, comm};
  const zero::cuda::StreamView stream = comm.stream();
  const auto step = [&] {
    optimizer.mark_ready(0, stream);
    return optimizer.step(stream);
  };
  bool right = step().outcome().applied;
  right &= host_copy(values) == std::vector<float>(count, 0.75F);

  cudaGraph_t graph = nullptr;
  cudaGraphExec_t captured = nullptr;
  zero::cuda::check(cudaStreamBeginCapture(stream.get(), cudaStreamCaptureModeThreadLocal),
                    "cudaStreamBeginCapture");
  (void)step();
  zero::cuda::check(cudaStreamEndCapture(stream.get(), &graph), "cudaStreamEndCapture");
  zero::cuda::check(cudaGraphInstantiate(&captured, graph, 0), "cudaGraphInstantiate");
  for (int k = 0; k < 2; ++k) {
    zero::cuda::check(cudaGraphLaunch(captured, stream.get()), "cudaGraphLaunch");
  }
  right &= optimizer.last_outcome(stream).step == 3;
  right &= host_copy(values) == std::vector<float>(count, 0.25F);
  zero::cuda::check(cudaGraphExecDestroy(captured), "cudaGraphExecDestroy");
  zero::cuda::check(cudaGraphDestroy(graph), "cudaGraphDestroy");
  return right;
}

int run() {
  bool right = true;
  zero::cuda::run_ranks(
      1, [&](zero::cuda::InProcessCommunicator& comm) { right &= steps_are_right(comm); });
#if ZERO_TEST_NCCL
  const zero::cuda::Stream stream;
  zero::NcclCommunicator comm(zero::detail::new_nccl_id(), 0, 1, stream);
  right &= steps_are_right(comm);
#endif
  std::puts(right ? "the steps are right" : "wrong values after a step");
  return right ? 0 : 1;
}

}  // namespace

int main() {
  try {
    return run();
  } catch (const zero::CudaError& error) {
    std::puts(error.what());
    const std::string_view words = error.what();
    const bool no_gpu =
        error.code() == cudaErrorNoDevice || error.code() == cudaErrorInsufficientDriver;
    return no_gpu && words.find(';') != std::string_view::npos ? 0 : 1;
  }
}
