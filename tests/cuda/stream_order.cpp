// SPDX-License-Identifier: Apache-2.0
/// @file
/// Under ThreadSanitizer: work that CUDA orders is no race in the fake runtime, and work that it
/// doesn't is one, even where one happens to run after the other and the host has called CUDA
/// between.
///
///     stream_order SCENARIO ordered|unordered
#include <cuda_runtime.h>

#include <atomic>
#include <cstring>
#include <functional>
#include <iostream>
#include <map>
#include <string>
#include <thread>

#include "fake/cuda_runtime.hpp"
#include "zero/cuda/detail/launch.cuh"
#include "zero/cuda/stream.hpp"

namespace {

using zero::cuda::check;
using zero::cuda::Event;
using zero::cuda::Stream;
using zero::cuda::StreamView;
using zero::cuda::detail::launch;

__global__ void write(int* at, int value) { *at = value; }
__global__ void copy(int* to, const int* from) { *to = *from; }

int* allocate(std::size_t n) {
  void* pointer = nullptr;
  check(cudaMalloc(&pointer, n * sizeof(int)), "cudaMalloc");
  return static_cast<int*>(pointer);
}

// Returns once the streams have done what they have, without any order that ThreadSanitizer sees.
void pass_time(std::initializer_list<StreamView> streams) {
  static std::atomic<int> passed{0};
  for (const StreamView stream : streams) {
    const int before = passed.load(std::memory_order_relaxed);
    check(zero_emulation::enqueue(stream.get(),
                                  [] { passed.fetch_add(1, std::memory_order_relaxed); }),
          "enqueue");
    while (passed.load(std::memory_order_relaxed) == before)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

// Calls that order nothing in `streams`.
void chatter(std::initializer_list<StreamView> streams) {
  for (const StreamView stream : streams) {
    int* other = allocate(1);  // not freed here, since that waits for the device
    cudaPointerAttributes attributes;
    check(cudaPointerGetAttributes(&attributes, other), "cudaPointerGetAttributes");
    const Event event;
    event.record(stream);
    event.record(stream);
    cudaStreamCaptureStatus status;
    check(cudaStreamIsCapturing(stream.get(), &status), "cudaStreamIsCapturing");
    launch("write", write, {1, 1}, stream, other, 1);
  }
}

void two_streams(bool ordered) {
  const Stream first;
  const Stream second;
  const Event event;
  int* values = allocate(2);
  launch("write", write, {1, 1}, first, values, 7);
  event.record(first);
  pass_time({first});
  chatter({first, second});
  if (ordered) second.view().wait(event);
  launch("copy", copy, {1, 1}, second, values + 1, values);
  second.synchronize();
  first.synchronize();
}

// The other way round: what was read is overwritten.
void overwritten(bool ordered) {
  const Stream first;
  const Stream second;
  const Event event;
  int* values = allocate(2);
  check(cudaMemset(values, 0, 8), "cudaMemset");
  check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  launch("copy", copy, {1, 1}, first, values + 1, values);
  event.record(first);
  pass_time({first});
  if (ordered) second.view().wait(event);
  launch("write", write, {1, 1}, second, values, 7);
  second.synchronize();
  first.synchronize();
}

void recorded_too_early(bool ordered) {
  const Stream first;
  const Stream second;
  const Event event;
  int* values = allocate(2);
  event.record(first);
  launch("write", write, {1, 1}, first, values, 7);
  pass_time({first});
  if (ordered) event.record(first);
  second.view().wait(event);
  launch("copy", copy, {1, 1}, second, values + 1, values);
  second.synchronize();
  first.synchronize();
}

void host(bool ordered) {
  const Stream stream;
  int* values = allocate(1);
  launch("write", write, {1, 1}, stream, values, 7);
  pass_time({stream});
  chatter({stream});
  if (ordered) stream.synchronize();
  std::cout << *values << '\n';
  stream.synchronize();
}

// What work that has not begun yet will read is changed, and more is enqueued.
void host_too_early(bool ordered) {
  const Stream stream;
  int* values = allocate(2);
  check(zero_emulation::enqueue(stream.view().get(),
                                [] { std::this_thread::sleep_for(std::chrono::milliseconds(20)); }),
        "enqueue");
  launch("copy", copy, {1, 1}, stream, values + 1, values);
  if (ordered) stream.synchronize();
  *values = 7;
  launch("copy", copy, {1, 1}, stream, values + 1, values);
  stream.synchronize();
}

void queried(bool ordered) {
  const Stream stream;
  const Event event;
  int* values = allocate(1);
  launch("write", write, {1, 1}, stream, values, 7);
  event.record(stream);
  pass_time({stream});
  if (ordered) std::cout << event.done();
  std::cout << *values << '\n';
  stream.synchronize();
}

// Ranks that are threads meet at nothing but the runtime.
void ranks(bool ordered) {
  int* values = allocate(2);
  std::atomic<int> at{0};
  const auto order = ordered ? std::memory_order_seq_cst : std::memory_order_relaxed;
  std::thread first([&] {
    const Stream stream;
    launch("write", write, {1, 1}, stream, values, 7);
    stream.synchronize();
    chatter({stream});
    at.store(1, order);
    stream.synchronize();
  });
  std::thread second([&] {
    const Stream stream;
    while (at.load(order) != 1) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    chatter({stream});
    launch("copy", copy, {1, 1}, stream, values + 1, values);
    stream.synchronize();
  });
  first.join();
  second.join();
}

void legacy_stream(bool ordered) {
  cudaStream_t stream = nullptr;
  check(cudaStreamCreateWithFlags(&stream, ordered ? cudaStreamDefault : cudaStreamNonBlocking),
        "cudaStreamCreateWithFlags");
  int* values = allocate(2);
  launch("write", write, {1, 1}, StreamView(stream), values, 7);
  pass_time({StreamView(stream)});
  launch("copy", copy, {1, 1}, StreamView(), values + 1, values);
  check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  check(cudaStreamDestroy(stream), "cudaStreamDestroy");
}

void allocated_in_stream_order(bool ordered) {
  const Stream first;
  const Stream second;
  const Event event;
  void* values = nullptr;
  check(cudaMallocAsync(&values, 4, first.view().get()), "cudaMallocAsync");
  event.record(first);
  pass_time({first});
  if (ordered) second.view().wait(event);
  launch("write", write, {1, 1}, second, static_cast<int*>(values), 7);
  second.synchronize();
  first.synchronize();
}

void graph(bool ordered) {
  const Stream first;
  const Stream second;
  const Event fork;
  const Event join;
  const Event between;
  int* values = allocate(2);
  check(cudaStreamBeginCapture(first.view().get(), cudaStreamCaptureModeThreadLocal),
        "cudaStreamBeginCapture");
  fork.record(first);
  second.view().wait(fork);
  launch("write", write, {1, 1}, first, values, 7);
  between.record(first);
  if (ordered) second.view().wait(between);
  launch("copy", copy, {1, 1}, second, values + 1, values);
  join.record(second);
  first.view().wait(join);
  cudaGraph_t captured = nullptr;
  cudaGraphExec_t executable = nullptr;
  check(cudaStreamEndCapture(first.view().get(), &captured), "cudaStreamEndCapture");
  check(cudaGraphInstantiate(&executable, captured, 0), "cudaGraphInstantiate");
  for (int i = 0; i < 3; ++i)
    check(cudaGraphLaunch(executable, first.view().get()), "cudaGraphLaunch");
  first.synchronize();
  check(cudaGraphExecDestroy(executable), "cudaGraphExecDestroy");
  check(cudaGraphDestroy(captured), "cudaGraphDestroy");
}

}  // namespace

int main(int argc, char** argv) {
  const std::map<std::string, std::function<void(bool)>> scenarios = {
      {"two_streams", two_streams},
      {"overwritten", overwritten},
      {"recorded_too_early", recorded_too_early},
      {"host", host},
      {"host_too_early", host_too_early},
      {"queried", queried},
      {"ranks", ranks},
      {"legacy_stream", legacy_stream},
      {"allocated_in_stream_order", allocated_in_stream_order},
      {"graph", graph},
  };
  const auto found = argc == 3 ? scenarios.find(argv[1]) : scenarios.end();
  if (found == scenarios.end()) {
    std::cerr << "usage: stream_order SCENARIO ordered|unordered\n";
    return 2;
  }
  found->second(std::strcmp(argv[2], "ordered") == 0);
  return 0;
}
