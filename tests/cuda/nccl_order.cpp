// SPDX-License-Identifier: Apache-2.0
/// @file
/// Under ThreadSanitizer: the fake NCCL orders what NCCL does and nothing else, so that a race of
/// the code that is tested with it shows, even where one thing happens to run after the other.
///
///     nccl_order SCENARIO ordered|unordered
#include <cuda_runtime.h>
#include <nccl.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <iostream>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "fake/cuda_runtime.hpp"
#include "fake/nccl.hpp"
#include "zero/cuda/stream.hpp"

namespace {

using zero::cuda::check;
using zero::cuda::Event;
using zero::cuda::Stream;
using zero::cuda::StreamView;

void check(ncclResult_t result) {
  if (result == ncclSuccess) return;
  std::cerr << ncclGetErrorString(result) << '\n';
  std::exit(3);
}

constexpr int ranks = 4;

/// Four ranks of one thread, with an integer each.
struct World {
  World() {
    zero_emulation::set_devices(ranks);
    check(ncclCommInitAll(comms.data(), ranks, nullptr));
    for (std::size_t r = 0; r < ranks; ++r) {
      check(cudaSetDevice(static_cast<int>(r)), "cudaSetDevice");
      streams.emplace_back();
      check(cudaMalloc(reinterpret_cast<void**>(&data[r]), sizeof(int)), "cudaMalloc");
      check(cudaMemset(data[r], 0, sizeof(int)), "cudaMemset");
      check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    }
    check(cudaSetDevice(0), "cudaSetDevice");
  }

  void all_reduce() {
    check(ncclGroupStart());
    for (std::size_t r = 0; r < ranks; ++r) {
      check(ncclAllReduce(data[r], data[r], 1, ncclInt32, ncclSum, comms[r],
                          streams[r].view().get()));
    }
    check(ncclGroupEnd());
  }
  void transfer(std::size_t from, std::size_t to) {
    check(ncclSend(data[from], 1, ncclInt32, static_cast<int>(to), comms[from],
                   streams[from].view().get()));
    check(ncclRecv(data[to], 1, ncclInt32, static_cast<int>(from), comms[to],
                   streams[to].view().get()));
  }

  std::array<ncclComm_t, ranks> comms{};
  std::array<int*, ranks> data{};
  std::vector<Stream> streams;
};

void write(int* at, StreamView stream) {
  check(zero_emulation::enqueue(stream.get(), [at] { *at = 7; }), "enqueue");
}

/// Returns once the stream has done what it has, without any order that ThreadSanitizer sees.
void pass_time(StreamView stream) {
  static std::atomic<int> passed{0};
  const int before = passed.load(std::memory_order_relaxed);
  check(
      zero_emulation::enqueue(stream.get(), [] { passed.fetch_add(1, std::memory_order_relaxed); }),
      "enqueue");
  while (passed.load(std::memory_order_relaxed) == before) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

void input(bool ordered) {
  World world;
  const Stream producer;
  const Event ready;
  write(world.data[0], producer);
  ready.record(producer);
  pass_time(producer);
  if (ordered) world.streams[0].view().wait(ready);
  world.all_reduce();
  for (const Stream& stream : world.streams) pass_time(stream);
}

void output(bool ordered) {
  World world;
  const Stream consumer;
  const Event ready;
  world.all_reduce();
  ready.record(world.streams[0]);
  pass_time(world.streams[0]);
  if (ordered) consumer.view().wait(ready);
  write(world.data[0], consumer);
  pass_time(consumer);
}

// That nothing has failed doesn't mean that anything is done.
void polled(bool ordered) {
  World world;
  world.all_reduce();
  pass_time(world.streams[0]);
  for (const ncclComm_t comm : world.comms) {
    ncclResult_t error = ncclInternalError;
    check(ncclCommGetAsyncError(comm, &error));
    check(error);
  }
  if (ordered) world.streams[0].synchronize();
  *world.data[0] = 7;
}

// What two ranks exchange orders no third.
void others(bool ordered) {
  World world;
  int shared = 0;
  write(&shared, world.streams[0]);
  world.transfer(0, 1);
  pass_time(world.streams[1]);
  if (ordered) {
    world.transfer(1, 2);
  } else {
    world.transfer(3, 2);
  }
  write(&shared, world.streams[2]);
  pass_time(world.streams[2]);
}

// A collective operation orders all ranks' streams.
void peers(bool ordered) {
  World world;
  int shared = 0;
  write(&shared, world.streams[3]);
  if (ordered) world.all_reduce();
  pass_time(world.streams[3]);
  write(&shared, world.streams[0]);
  pass_time(world.streams[0]);
}

}  // namespace

int main(int argc, char** argv) {
  const std::map<std::string, std::function<void(bool)>> scenarios = {
      {"input", input},   {"output", output}, {"polled", polled},
      {"others", others}, {"peers", peers},
  };
  const auto found = argc == 3 ? scenarios.find(argv[1]) : scenarios.end();
  if (found == scenarios.end()) {
    std::cerr << "usage: nccl_order SCENARIO ordered|unordered\n";
    return 2;
  }
  found->second(std::strcmp(argv[2], "ordered") == 0);
  return 0;
}
