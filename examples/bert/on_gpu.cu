// SPDX-License-Identifier: Apache-2.0
// The optimizer's part of BERT's training on a GPU: BERT's parameters as published, AdamW with fp32
// state, K ranks on one GPU; a kernel that makes up gradients stands in for backward. Prints the
// time of a step, and memory as the library accounts for it and as the device sees it.
//
//   nvcc -std=c++20 -O2 -Werror=cross-execution-space-call -Iinclude
//        examples/bert/on_gpu.cu examples/bert/config.cpp -o bert_on_gpu
//   ./bert_on_gpu base 3 2 10            model, stage (1, 2, 3), ranks, steps
#include <algorithm>
#include <charconv>
#include <chrono>
#include <cstdio>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>
#include <zero/cuda.cuh>

#include "config.hpp"
#include "input_error.hpp"

namespace {

struct Options {
  std::string model = "base";
  int stage = 1, ranks = 2, steps = 10;
};

/// A tensor of the model in device memory. Biases and norms are not decayed: they are group 1.
zero::cuda::ShapedParam<float> as_parameter(const bert::Shape& shape) {
  return {shape.name, shape.extents, zero::Attributes{.unit = shape.unit},
          static_cast<std::size_t>(shape.decays ? 0 : 1)};
}

/// Numbers in [-0.01, 0.01) that differ with the seed.
__global__ void make_gradient(float* gradient, std::size_t count, unsigned seed) {
  const std::size_t stride = std::size_t{gridDim.x} * blockDim.x;
  for (std::size_t i = std::size_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += stride) {
    unsigned h = static_cast<unsigned>(i) * 2654435761U ^ seed;
    h = (h ^ h >> 15) * 2246822519U;
    h = (h ^ h >> 13) * 3266489917U;
    gradient[i] = (static_cast<float>(h >> 8) * 0x1p-23F - 1.0F) * 0.01F;
  }
}

/// Unit by unit, as a network runs: forward only looks at the values, backward makes gradients.
template <class Optimizer>
void forward_and_backward(Optimizer& optimizer, const std::vector<bert::Shape>& shapes,
                          unsigned seed, zero::cuda::StreamView stream) {
  const int units = shapes.back().unit + 1;
  for (int unit = 0; unit < units; ++unit) {
    optimizer.acquire(unit, stream);
    optimizer.release(unit, stream);
  }
  for (int unit = units; unit-- > 0;) {
    optimizer.acquire(unit, stream);
    for (std::size_t i = shapes.size(); i-- > 0;) {
      if (shapes[i].unit != unit) continue;
      {
        const auto lease = optimizer.gradient(i, stream);
        make_gradient<<<132, 256, 0, stream.get()>>>(lease.values().data(), lease.values().size(),
                                                     seed + static_cast<unsigned>(i));
        zero::cuda::check(cudaGetLastError(), "make_gradient");
      }
      optimizer.mark_ready(i, stream);
    }
    optimizer.release(unit, stream);
  }
}

double megabytes(std::size_t bytes) { return static_cast<double>(bytes) * 1e-6; }

std::size_t free_memory() {
  std::size_t free = 0, total = 0;
  zero::cuda::check(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
  return free;
}

void print(const zero::MemoryReport& memory) {
  std::printf(
      "MB of rank 0: values %.1f, gradients %.1f, state %.1f, staging %.1f, pool %.1f, "
      "units %.1f; sum %.1f\n",
      megabytes(memory.values), megabytes(memory.gradients), megabytes(memory.state),
      megabytes(memory.staging), megabytes(memory.pooled_peak), megabytes(memory.gathered_peak),
      megabytes(memory.total()));
}

/// One rank.
template <class Stage>
void train(zero::cuda::InProcessCommunicator& comm, const Options& options,
           std::size_t free_at_first) {
  // At stage 1 gradients are whole and have one place, beside the values.
  using View = std::conditional_t<std::is_same_v<Stage, zero::Stage1>, zero::ParamAndGradView,
                                  zero::ParamView>;
  const std::vector<bert::Shape> shapes = bert::shapes_of(bert::config_of(options.model));
  std::vector<zero::cuda::ShapedParam<float>> store;
  for (const bert::Shape& shape : shapes) store.push_back(as_parameter(shape));
  zero::Settings settings;
  settings.initial_value = [](std::string_view, std::size_t) { return 0.02; };
  settings.check_values = false;  // they are the same by construction
  zero::ZeroSharded optimizer{zero::Groups{zero::cuda::FusedAdamW{.lr = 1e-4},
                                           zero::cuda::FusedAdamW{.lr = 1e-4, .weight_decay = 0}},
                              store,
                              comm,
                              View{},
                              Stage{},
                              settings};

  const zero::cuda::Stream stream;
  std::vector<double> milliseconds;
  for (int step = 0; step < options.steps; ++step) {
    comm.barrier().wait();
    const auto begin = std::chrono::steady_clock::now();
    forward_and_backward(optimizer, shapes,
                         static_cast<unsigned>(step * comm.size() + comm.rank()) * 7919U, stream);
    if (!optimizer.step(stream).outcome().applied) throw zero::Error("a step was skipped");
    milliseconds.push_back(
        std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin)
            .count());
  }
  comm.barrier().wait();
  if (comm.rank() == 0) {
    print(optimizer.memory());
    std::printf("the device has %.1f MB less, for %d ranks\n",
                megabytes(free_at_first - std::min(free_at_first, free_memory())), comm.size());
    std::sort(milliseconds.begin() + 1, milliseconds.end());  // but for the first step
    std::printf("gradients made up and stepped: %.2f ms (median of %zu)\n",
                milliseconds[milliseconds.size() / 2], milliseconds.size() - 1);
  }
  comm.barrier().wait();  // nobody frees before rank 0 has looked
}

Options parse(int argc, char** argv) {
  Options options;
  const auto number = [&](int k, int least, int most, int otherwise) {
    if (k >= argc) return otherwise;
    const std::string_view text = argv[k];
    int value = 0;
    const auto [end, code] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (code == std::errc() && end == text.data() + text.size() && value >= least && value <= most)
      return value;
    throw bert::InputError("usage: bert_on_gpu [MODEL [STAGE [RANKS [STEPS]]]]; " +
                           std::string(text) + " is no number from " + std::to_string(least) +
                           " to " + std::to_string(most));
  };
  if (argc > 1) options.model = argv[1];
  options.stage = number(2, 1, 3, options.stage);
  options.ranks = number(3, 1, 64, options.ranks);
  options.steps = number(4, 2, 100000, options.steps);
  return options;
}

}  // namespace

int main(int argc, char** argv) try {
  const Options options = parse(argc, argv);
  std::printf("BERT-%s, stage %d, %d ranks on one GPU\n",
              bert::config_of(options.model).name.c_str(), options.stage, options.ranks);
  const std::size_t free_at_first = free_memory();
  zero::cuda::run_ranks(options.ranks, [&](zero::cuda::InProcessCommunicator& comm) {
    switch (options.stage) {
      case 1: return train<zero::Stage1>(comm, options, free_at_first);
      case 2: return train<zero::Stage2>(comm, options, free_at_first);
      default: return train<zero::Stage3>(comm, options, free_at_first);
    }
  });
  return 0;
} catch (const zero::CudaError& error) {
  std::fprintf(stderr, "bert_on_gpu: %s\n", error.what());
  const bool no_gpu =
      error.code() == cudaErrorNoDevice || error.code() == cudaErrorInsufficientDriver;
  return no_gpu ? 77 : 1;
} catch (const std::exception& error) {
  std::fprintf(stderr, "bert_on_gpu: %s\n", error.what());
  return 1;
}
