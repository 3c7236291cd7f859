// SPDX-License-Identifier: Apache-2.0
/// @file
/// The fake CUDA runtime does what CUDA documents, and orders nothing that CUDA doesn't.
#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "catch.hpp"
#include "fake/cuda_runtime.hpp"
#include "zero/cuda/detail/launch.cuh"
#include "zero/cuda/stream.hpp"

// What nvcc's code calls.
extern "C" void __cudaRegisterFunction(void** handle, const char* stub, char* device_function,
                                       const char* device_name, int thread_limit, uint3* thread,
                                       uint3* block, dim3* block_dim, dim3* grid_dim,
                                       int* warp_size);

namespace fake = zero_emulation;
using zero::cuda::Event;
using zero::cuda::Stream;
using zero::cuda::StreamView;
using zero::cuda::detail::launch;

namespace {

__global__ void add(int* values, int n, int summand) {
  for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < static_cast<unsigned>(n);
       i += gridDim.x * blockDim.x)
    values[i] += summand;
}

__global__ void throws() { throw std::runtime_error("illegal"); }

__global__ void meets() { __syncthreads(); }

__global__ void count_threads(int* at) { atomicAdd(at, 1); }

__global__ void note_block(int* order, int* next) {
  order[(*next)++] = static_cast<int>(blockIdx.x);
}

// Work that ends when the test says so, and before the gate does.
class Gate {
 public:
  Gate() = default;
  Gate(const Gate&) = delete;
  Gate& operator=(const Gate&) = delete;
  ~Gate() {
    open();
    (void)cudaDeviceSynchronize();
  }
  void hold(StreamView stream) {
    REQUIRE(fake::enqueue(stream.get(), [this] { open_.wait(false); }) == cudaSuccess);
  }
  void open() {
    open_ = true;
    open_.notify_all();
  }

 private:
  std::atomic<bool> open_{false};
};

class Fresh {
 public:
  Fresh() { fake::reset(); }
  Fresh(const Fresh&) = delete;
  Fresh& operator=(const Fresh&) = delete;
  ~Fresh() {
    (void)cudaDeviceSynchronize();
    fake::reset();
  }
};

template <class T>
class Managed {
 public:
  explicit Managed(std::size_t n, T value = {}) : size_(n) {
    REQUIRE(cudaMallocManaged(&data_, n * sizeof(T)) == cudaSuccess);
    std::fill_n(data_, n, value);
  }
  Managed(const Managed&) = delete;
  Managed& operator=(const Managed&) = delete;
  ~Managed() { (void)cudaFree(data_); }
  T* data() { return data_; }
  T& operator[](std::size_t i) { return data_[i]; }
  std::vector<T> values() const { return {data_, data_ + size_}; }

 private:
  T* data_ = nullptr;
  std::size_t size_;
};

}  // namespace

TEST_CASE("A kernel runs once for each thread of each block, in stream order") {
  const Fresh fresh;
  const Stream stream;
  Managed<int> values(1000, 1);
  launch("add", add, {3, 32}, stream, values.data(), 1000, 2);
  launch("add", add, {1, 1}, stream, values.data(), 1000, 3);
  stream.synchronize();
  CHECK(values.values() == std::vector<int>(1000, 6));

  Managed<int> count(1, 0);
  launch("count_threads", count_threads, {7, 33}, stream, count.data());
  stream.synchronize();
  CHECK(count[0] == 231);
  CHECK(fake::counters().launches == 3);
}

TEST_CASE("Blocks run in another order when asked to") {
  const Fresh fresh;
  const Stream stream;
  Managed<int> order(64);
  Managed<int> next(1, 0);
  std::vector<int> in_order(64);
  std::iota(in_order.begin(), in_order.end(), 0);
  launch("note_block", note_block, {64, 1}, stream, order.data(), next.data());
  stream.synchronize();
  CHECK(order.values() == in_order);

  fake::scramble_blocks(5);
  next[0] = 0;
  launch("note_block", note_block, {64, 1}, stream, order.data(), next.data());
  stream.synchronize();
  std::vector<int> seen = order.values();
  CHECK(seen != in_order);
  std::sort(seen.begin(), seen.end());
  CHECK(seen == in_order);
}

TEST_CASE("Streams run beside each other and beside the host, and wait for events") {
  const Fresh fresh;
  Gate gate;
  const Stream first;
  const Stream second;
  const Stream third;
  const Event event;
  CHECK(event.done());  // never recorded
  std::atomic<int> steps{0};
  gate.hold(first);
  event.record(first);
  second.view().wait(event);
  REQUIRE(fake::enqueue(second.view().get(), [&] { steps = 1; }) == cudaSuccess);
  REQUIRE(fake::enqueue(third.view().get(), [&] { steps += 10; }) == cudaSuccess);
  third.synchronize();
  CHECK(steps == 10);
  CHECK(!event.done());
  CHECK(cudaStreamQuery(second.view().get()) == cudaErrorNotReady);
  gate.open();
  second.synchronize();
  CHECK(steps == 1);
  CHECK(event.done());
  CHECK(cudaStreamQuery(second.view().get()) == cudaSuccess);
  CHECK(cudaGetLastError() == cudaErrorNotReady);
  CHECK(cudaGetLastError() == cudaSuccess);
}

TEST_CASE("A wait is for the event as it was recorded last when the wait was enqueued") {
  const Fresh fresh;
  Gate early;
  Gate late;
  const Stream first;
  const Stream second;
  const Stream waiting;
  const Event event;
  early.hold(first);
  event.record(first);
  waiting.view().wait(event);
  event.record(second);  // which is done at once
  event.synchronize();
  CHECK(cudaStreamQuery(waiting.view().get()) == cudaErrorNotReady);
  late.hold(second);
  event.record(second);
  early.open();
  waiting.synchronize();
  CHECK(!event.done());
  late.open();
}

TEST_CASE("The legacy default stream and blocking streams wait for each other") {
  const Fresh fresh;
  cudaStream_t blocking = nullptr;
  REQUIRE(cudaStreamCreate(&blocking) == cudaSuccess);
  const Stream free;
  std::atomic<int> order{0};
  Gate gate;
  gate.hold(StreamView(blocking));
  std::atomic<int> legacy_at{0};
  std::atomic<int> after_at{0};
  REQUIRE(fake::enqueue(nullptr, [&] { legacy_at = ++order; }) == cudaSuccess);
  REQUIRE(fake::enqueue(blocking, [&] { after_at = ++order; }) == cudaSuccess);
  REQUIRE(fake::enqueue(free.view().get(), [&] { ++order; }) == cudaSuccess);
  free.synchronize();
  CHECK(order == 1);  // exempt
  gate.open();
  REQUIRE(cudaStreamSynchronize(blocking) == cudaSuccess);
  CHECK(legacy_at == 2);
  CHECK(after_at == 3);

  // Blocking streams don't wait for each other.
  cudaStream_t other = nullptr;
  REQUIRE(cudaStreamCreate(&other) == cudaSuccess);
  Gate second;
  second.hold(StreamView(blocking));
  REQUIRE(fake::enqueue(other, [&] { ++order; }) == cudaSuccess);
  REQUIRE(cudaStreamSynchronize(other) == cudaSuccess);
  CHECK(order == 4);
  // One that is destroyed still comes before the legacy stream's later work.
  REQUIRE(cudaStreamDestroy(blocking) == cudaSuccess);
  REQUIRE(fake::enqueue(cudaStreamLegacy, [] {}) == cudaSuccess);
  CHECK(cudaStreamQuery(nullptr) == cudaErrorNotReady);
  second.open();
  REQUIRE(cudaStreamSynchronize(nullptr) == cudaSuccess);
  REQUIRE(cudaStreamDestroy(other) == cudaSuccess);
}

TEST_CASE("The device's synchronisation drains every stream, destroyed ones too") {
  const Fresh fresh;
  std::atomic<int> done{0};
  const auto slow = [&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    ++done;
  };
  const Stream kept;
  {
    const Stream destroyed;
    REQUIRE(fake::enqueue(destroyed.view().get(), slow) == cudaSuccess);
  }
  REQUIRE(fake::enqueue(kept.view().get(), slow) == cudaSuccess);
  REQUIRE(fake::enqueue(nullptr, slow) == cudaSuccess);
  REQUIRE(fake::enqueue(cudaStreamPerThread, slow) == cudaSuccess);
  REQUIRE(cudaDeviceSynchronize() == cudaSuccess);
  CHECK(done == 4);
}

TEST_CASE("Destroying a stream doesn't block the host") {
  const Fresh fresh;
  Gate gate;
  {
    const Stream stream;
    gate.hold(stream);
  }
  CHECK(fake::counters().host_synchronizations == 0);
  gate.open();
}

TEST_CASE("Memory is known by what it is, counted, and full of garbage") {
  const Fresh fresh;
  const std::size_t before = fake::memory_in_use();
  const auto type_of = [](const void* pointer) {
    cudaPointerAttributes attributes;
    REQUIRE(cudaPointerGetAttributes(&attributes, pointer) == cudaSuccess);
    return attributes.type;
  };
  float* device = nullptr;
  float* managed = nullptr;
  void* pinned = nullptr;
  std::vector<float> pageable(25, 1.F);
  REQUIRE(cudaMalloc(&device, 100) == cudaSuccess);
  REQUIRE(cudaMallocManaged(&managed, 100) == cudaSuccess);
  REQUIRE(cudaMallocHost(&pinned, 100) == cudaSuccess);
  CHECK(reinterpret_cast<std::uintptr_t>(device) % 256 == 0);
  CHECK(type_of(device) == cudaMemoryTypeDevice);
  CHECK(type_of(device + 24) == cudaMemoryTypeDevice);
  CHECK(type_of(managed) == cudaMemoryTypeManaged);
  CHECK(type_of(pinned) == cudaMemoryTypeHost);
  CHECK(type_of(pageable.data()) == cudaMemoryTypeUnregistered);
  REQUIRE(cudaHostRegister(pageable.data(), 100, cudaHostRegisterDefault) == cudaSuccess);
  CHECK(type_of(pageable.data()) == cudaMemoryTypeHost);
  REQUIRE(cudaHostUnregister(pageable.data()) == cudaSuccess);
  CHECK(std::isnan(managed[24]));
  CHECK(fake::memory_in_use() == before + 200);
  std::size_t free = 0;
  std::size_t total = 0;
  REQUIRE(cudaMemGetInfo(&free, &total) == cudaSuccess);
  CHECK(total - free == fake::memory_in_use());
  CHECK(fake::counters().allocations == 3);

  REQUIRE(cudaMemcpy(device, pageable.data(), 100, cudaMemcpyHostToDevice) == cudaSuccess);
  pageable.assign(25, 0.F);
  REQUIRE(cudaMemcpy(pageable.data(), device, 100, cudaMemcpyDefault) == cudaSuccess);
  CHECK(pageable == std::vector<float>(25, 1.F));
  CHECK(fake::counters().copies == 2);
  CHECK(fake::counters().host_synchronizations == 2);

  REQUIRE(cudaFree(device) == cudaSuccess);
  CHECK(type_of(device) == cudaMemoryTypeUnregistered);
  CHECK(cudaFree(device) == cudaErrorInvalidValue);
  CHECK(cudaFree(pinned) == cudaErrorInvalidValue);
  REQUIRE(cudaFree(managed) == cudaSuccess);
  REQUIRE(cudaFreeHost(pinned) == cudaSuccess);
  CHECK(fake::memory_in_use() == before);
  CHECK(fake::peak_memory() >= before + 200);
  CHECK(fake::counters().frees == 3);
  fake::set_total_memory(1000);
  CHECK(cudaMalloc(&device, 1001) == cudaErrorMemoryAllocation);
}

TEST_CASE("Copies wait as CUDA's do") {
  const Fresh fresh;
  const Stream stream;
  int* device = nullptr;
  int* pinned = nullptr;
  int pageable = 5;
  REQUIRE(cudaMallocAsync(&device, 8, stream.view().get()) == cudaSuccess);
  REQUIRE(cudaMallocHost(&pinned, 8) == cudaSuccess);
  Gate gate;
  gate.hold(stream);
  // Staged at once: the source may change before the stream gets there.
  REQUIRE(cudaMemcpyAsync(device, &pageable, 4, cudaMemcpyHostToDevice, stream.view().get()) ==
          cudaSuccess);
  pageable = 6;
  REQUIRE(cudaMemsetAsync(device + 1, 0, 4, stream.view().get()) == cudaSuccess);
  REQUIRE(cudaMemcpyAsync(pinned, device, 8, cudaMemcpyDeviceToHost, stream.view().get()) ==
          cudaSuccess);
  CHECK(fake::counters().host_synchronizations == 0);
  gate.open();
  REQUIRE(cudaMemcpyAsync(&pageable, device, 4, cudaMemcpyDeviceToHost, stream.view().get()) ==
          cudaSuccess);
  CHECK(fake::counters().host_synchronizations == 1);
  CHECK(pageable == 5);
  CHECK(pinned[0] == 5);
  CHECK(pinned[1] == 0);
  REQUIRE(cudaFreeAsync(device, stream.view().get()) == cudaSuccess);
  REQUIRE(cudaFreeHost(pinned) == cudaSuccess);
}

TEST_CASE("Several threads enqueue into streams of their own and into one") {
  const Fresh fresh;
  fake::delay(3, 20);
  const Stream shared;
  Managed<int> count(5, 0);
  std::atomic<int> failures{0};
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 4; ++rank) {
    threads.emplace_back([&, rank] {
      const Stream mine;
      for (int i = 0; i < 50; ++i) {
        launch("count", count_threads, {1, 2}, shared, count.data());
        launch("count", count_threads, {1, 1}, mine, count.data() + rank + 1);
      }
      if (cudaStreamSynchronize(mine.view().get()) != cudaSuccess) ++failures;
    });
  }
  for (std::thread& each : threads) each.join();
  shared.synchronize();
  CHECK(failures == 0);
  CHECK(count.values() == std::vector<int>{400, 50, 50, 50, 50});
}

TEST_CASE("An error is told once, and a broken device for ever") {
  const Fresh fresh;
  const Stream stream;
  CHECK(cudaSetDevice(1) == cudaErrorInvalidDevice);
  CHECK(cudaPeekAtLastError() == cudaErrorInvalidDevice);
  CHECK(cudaGetLastError() == cudaErrorInvalidDevice);
  CHECK(cudaGetLastError() == cudaSuccess);
  CHECK_THROWS_AS(launch("add", add, {1, 1025}, stream, nullptr, 0, 0), zero::CudaError);
  CHECK(cudaGetLastError() == cudaErrorInvalidConfiguration);

  launch("throws", throws, {1, 1}, stream);
  CHECK(cudaStreamSynchronize(stream.view().get()) == cudaErrorLaunchFailure);
  CHECK(cudaGetLastError() == cudaErrorLaunchFailure);
  CHECK(cudaGetLastError() == cudaErrorLaunchFailure);
  void* pointer = nullptr;
  CHECK(cudaMalloc(&pointer, 4) == cudaErrorLaunchFailure);
  fake::reset();
  CHECK(cudaGetLastError() == cudaSuccess);
  fake::break_device(0, cudaErrorIllegalAddress);
  CHECK(cudaDeviceSynchronize() == cudaErrorIllegalAddress);
}

TEST_CASE("Calls fail where a test says so") {
  const Fresh fresh;
  void* pointer = nullptr;
  fake::fail("cudaMalloc", 2, cudaErrorMemoryAllocation);
  REQUIRE(cudaMalloc(&pointer, 4) == cudaSuccess);
  REQUIRE(cudaFree(pointer) == cudaSuccess);
  CHECK(cudaMalloc(&pointer, 4) == cudaErrorMemoryAllocation);
  REQUIRE(cudaMalloc(&pointer, 4) == cudaSuccess);
  REQUIRE(cudaFree(pointer) == cudaSuccess);

  int count = -1;
  fake::set_devices(0);
  CHECK(cudaGetDeviceCount(&count) == cudaErrorNoDevice);
  CHECK(count == 0);
  CHECK(cudaMalloc(&pointer, 4) == cudaErrorNoDevice);
  fake::set_devices(2);
  fake::set_driver_version(12040);
  CHECK(cudaGetDeviceCount(&count) == cudaErrorInsufficientDriver);
  CHECK(cudaDriverGetVersion(&count) == cudaSuccess);
  CHECK(count == 12040);
}

TEST_CASE("A stream and an event belong to the device they were made on") {
  const Fresh fresh;
  fake::set_devices(2);
  const Stream first;
  REQUIRE(cudaSetDevice(1) == cudaSuccess);
  const Stream second;
  const Event event;
  int device = -1;
  REQUIRE(cudaStreamGetDevice(first.view().get(), &device) == cudaSuccess);
  CHECK(device == 0);
  REQUIRE(cudaStreamGetDevice(second.view().get(), &device) == cudaSuccess);
  CHECK(device == 1);
  CHECK(cudaEventRecord(event.get(), first.view().get()) == cudaErrorInvalidResourceHandle);
  CHECK_THROWS_AS(launch("throws", throws, {1, 1}, first), zero::CudaError);
  event.record(second);
  first.view().wait(event);
  first.synchronize();
  REQUIRE(cudaSetDevice(0) == cudaSuccess);
}

namespace {

// Counts up in `stream` and, between events, in `other`.
void fork_and_join(StreamView stream, StreamView other, const Event& fork, const Event& join,
                   int* values) {
  launch("add", add, {1, 1}, stream, values, 1, 1);
  fork.record(stream);
  other.wait(fork);
  launch("add", add, {1, 1}, other, values, 1, 10);
  join.record(other);
  launch("add", add, {1, 1}, stream, values + 1, 1, 100);
  stream.wait(join);
  launch("add", add, {1, 1}, stream, values, 2, 1000);
}

}  // namespace

TEST_CASE("What forked and joined streams captured is replayed") {
  const Fresh fresh;
  const Stream stream;
  const Stream other;
  const Event fork;
  const Event join;
  Managed<int> values(2, 0);
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  const cudaStream_t raw = stream.view().get();
  REQUIRE(cudaStreamBeginCapture(raw, cudaStreamCaptureModeThreadLocal) == cudaSuccess);
  fork_and_join(stream, other, fork, join, values.data());
  REQUIRE(cudaStreamIsCapturing(other.view().get(), &status) == cudaSuccess);
  CHECK(status == cudaStreamCaptureStatusActive);
  REQUIRE(cudaMemsetAsync(values.data() + 1, 0, 4, raw) == cudaSuccess);
  REQUIRE(cudaStreamEndCapture(raw, &graph) == cudaSuccess);
  REQUIRE(cudaStreamIsCapturing(other.view().get(), &status) == cudaSuccess);
  CHECK(status == cudaStreamCaptureStatusNone);
  stream.synchronize();
  CHECK(values[0] == 0);  // nothing ran

  REQUIRE(cudaGraphInstantiate(&executable, graph, 0) == cudaSuccess);
  REQUIRE(cudaGraphDestroy(graph) == cudaSuccess);
  fake::delay(1, 200);
  const std::uint64_t launches = fake::counters().launches;
  for (int i = 0; i < 5; ++i) REQUIRE(cudaGraphLaunch(executable, raw) == cudaSuccess);
  REQUIRE(cudaGraphLaunch(executable, other.view().get()) == cudaSuccess);
  REQUIRE(cudaGraphExecDestroy(executable) == cudaSuccess);
  other.synchronize();
  CHECK(values[0] == 6 * 1011);
  CHECK(values[1] == 0);
  CHECK(fake::counters().launches == launches);
  CHECK(fake::counters().graph_launches == 6);
}

TEST_CASE("What may not be captured ends the capture") {
  const Fresh fresh;
  const Stream stream;
  const Stream other;
  const Event event;
  const Event outside;
  outside.record(other);
  const cudaStream_t raw = stream.view().get();
  Managed<int> values(1, 0);
  void* pointer = nullptr;
  cudaGraph_t graph = nullptr;
  CHECK(cudaStreamBeginCapture(nullptr, cudaStreamCaptureModeGlobal) ==
        cudaErrorStreamCaptureUnsupported);
  REQUIRE(cudaStreamBeginCapture(raw, cudaStreamCaptureModeGlobal) == cudaSuccess);

  SECTION("a call that waits") {
    CHECK(cudaStreamSynchronize(raw) == cudaErrorStreamCaptureUnsupported);
    CHECK(cudaStreamEndCapture(raw, &graph) == cudaErrorStreamCaptureInvalidated);
  }
  SECTION("a query of a captured event") {
    event.record(stream);
    CHECK(cudaEventQuery(event.get()) == cudaErrorCapturedEvent);
    CHECK(cudaStreamEndCapture(raw, &graph) == cudaErrorStreamCaptureInvalidated);
  }
  SECTION("an allocation") {
    CHECK(cudaMalloc(&pointer, 4) == cudaErrorStreamCaptureUnsupported);
    CHECK(cudaStreamEndCapture(raw, &graph) == cudaErrorStreamCaptureInvalidated);
  }
  SECTION("an event from outside") {
    CHECK(cudaStreamWaitEvent(raw, outside.get(), 0) == cudaErrorStreamCaptureIsolation);
    CHECK(cudaStreamEndCapture(raw, &graph) == cudaErrorStreamCaptureInvalidated);
  }
  SECTION("a fork that is not joined") {
    event.record(stream);
    other.view().wait(event);
    launch("add", add, {1, 1}, other, values.data(), 1, 1);
    CHECK(cudaStreamEndCapture(other.view().get(), &graph) == cudaErrorStreamCaptureUnmatched);
    CHECK(cudaStreamEndCapture(raw, &graph) == cudaErrorStreamCaptureUnjoined);
  }
  SECTION("nothing of that") {
    CHECK(cudaStreamEndCapture(raw, &graph) == cudaSuccess);
    CHECK(cudaGraphDestroy(graph) == cudaSuccess);
  }
  (void)cudaGetLastError();
}

TEST_CASE("Timed events measure what lies between them") {
  const Fresh fresh;
  const Stream stream;
  const Event untimed;
  cudaEvent_t start = nullptr;
  cudaEvent_t end = nullptr;
  float milliseconds = 0;
  REQUIRE(cudaEventCreate(&start) == cudaSuccess);
  REQUIRE(cudaEventCreate(&end) == cudaSuccess);
  REQUIRE(cudaEventRecord(start, stream.view().get()) == cudaSuccess);
  REQUIRE(fake::enqueue(stream.view().get(), [] {
            std::this_thread::sleep_for(std::chrono::milliseconds(3));
          }) == cudaSuccess);
  REQUIRE(cudaEventRecord(end, stream.view().get()) == cudaSuccess);
  REQUIRE(cudaEventSynchronize(end) == cudaSuccess);
  REQUIRE(cudaEventElapsedTime(&milliseconds, start, end) == cudaSuccess);
  CHECK(milliseconds >= 3.F);
  CHECK(cudaEventElapsedTime(&milliseconds, start, untimed.get()) ==
        cudaErrorInvalidResourceHandle);
  REQUIRE(cudaEventDestroy(start) == cudaSuccess);
  REQUIRE(cudaEventDestroy(end) == cudaSuccess);
}

TEST_CASE("What is alive is counted") {
  const Fresh fresh;
  const fake::Alive before = fake::alive();
  {
    const Stream stream;
    const Event event;
    const Managed<int> values(1);
    CHECK(fake::alive().streams == before.streams + 1);
    CHECK(fake::alive().events == before.events + 1);
    CHECK(fake::alive().allocations == before.allocations + 1);
  }
  CHECK(fake::alive().streams == before.streams);
  CHECK(fake::alive().events == before.events);
  CHECK(fake::alive().allocations == before.allocations);
}

TEST_CASE("What belongs to a broken device can be given back") {
  const fake::Alive before = fake::alive();
  {
    const Fresh fresh;
    const Stream stream;
    const Event event;
    const Managed<int> values(1);
    void* in_order = nullptr;
    REQUIRE(cudaMallocAsync(&in_order, 4, stream.view().get()) == cudaSuccess);
    Gate gate;
    gate.hold(stream);
    launch("throws", throws, {1, 1}, stream);
    event.record(stream);
    gate.open();
    CHECK(cudaEventSynchronize(event.get()) == cudaErrorLaunchFailure);
    CHECK_THROWS_AS(event.done(), zero::CudaError);
    CHECK(cudaFreeAsync(in_order, stream.view().get()) == cudaErrorLaunchFailure);
  }
  CHECK(fake::alive().streams == before.streams);
  CHECK(fake::alive().events == before.events);
  CHECK(fake::alive().allocations == before.allocations);
}

TEST_CASE("A device breaks for itself") {
  const Fresh fresh;
  fake::set_devices(2);
  const Stream first;
  REQUIRE(cudaSetDevice(1) == cudaSuccess);
  const Stream second;
  launch("throws", throws, {1, 1}, second);
  REQUIRE(cudaSetDevice(0) == cudaSuccess);
  CHECK(cudaStreamSynchronize(second.view().get()) == cudaErrorLaunchFailure);
  CHECK(cudaStreamSynchronize(first.view().get()) == cudaSuccess);
}

TEST_CASE("Threads of a block that wait for each other are refused") {
  const Fresh fresh;
  const Stream stream;
  launch("meets", meets, {4, 1}, stream);
  stream.synchronize();
  launch("meets", meets, {1, 2}, stream);
  CHECK(cudaStreamSynchronize(stream.view().get()) == cudaErrorLaunchFailure);
}

TEST_CASE("A kernel that was registered is launched as the function provided for it") {
  const Fresh fresh;
  const Stream stream;
  Managed<int> values(4, 1);
  static const char stub = 0;
  int* data = values.data();
  int n = 4;
  int summand = 5;
  void* arguments[] = {&data, &n, &summand};
  CHECK(cudaLaunchKernel(&stub, dim3(2), dim3(2), arguments, 0, stream.view().get()) ==
        cudaErrorInvalidDeviceFunction);
  __cudaRegisterFunction(nullptr, &stub, nullptr, "add_on_device", -1, nullptr, nullptr, nullptr,
                         nullptr, nullptr);
  CHECK(cudaLaunchKernel(&stub, dim3(2), dim3(2), arguments, 0, stream.view().get()) ==
        cudaErrorNoKernelImageForDevice);
  fake::provide("add_on_device", add);
  CHECK(cudaLaunchKernel(&stub, dim3(2), dim3(2), arguments, 0, stream.view().get()) ==
        cudaSuccess);
  summand = 1000;  // read at launch
  stream.synchronize();
  CHECK(values.values() == std::vector<int>(4, 6));
}

TEST_CASE("Synchronising a blocking stream waits for no work of the legacy stream's") {
  const Fresh fresh;
  cudaStream_t blocking = nullptr;
  REQUIRE(cudaStreamCreate(&blocking) == cudaSuccess);
  Gate gate;
  gate.hold(StreamView());
  REQUIRE(cudaStreamSynchronize(blocking) == cudaSuccess);
  REQUIRE(fake::enqueue(blocking, [] {}) == cudaSuccess);
  CHECK(cudaStreamQuery(blocking) == cudaErrorNotReady);
  gate.open();
  REQUIRE(cudaStreamSynchronize(blocking) == cudaSuccess);
  REQUIRE(cudaStreamDestroy(blocking) == cudaSuccess);
}

TEST_CASE("Calls are counted until the counters are reset") {
  const Fresh fresh;
  const Stream stream;
  const Event event;
  const cudaStream_t raw = stream.view().get();
  event.record(stream);
  stream.view().wait(event);
  REQUIRE(fake::enqueue(raw, [] {}) == cudaSuccess);
  REQUIRE(cudaLaunchHostFunc(raw, [](void*) {}, nullptr) == cudaSuccess);
  event.record(stream);
  event.synchronize();
  const fake::Counters counted = fake::counters();
  CHECK(counted.event_records == 2);
  CHECK(counted.stream_waits == 1);
  CHECK(counted.collectives == 1);
  CHECK(counted.host_functions == 1);
  CHECK(counted.host_synchronizations == 1);
  CHECK(counted.launches == 0);
  fake::reset();
  CHECK(fake::counters().event_records == 0);
}

TEST_CASE("Devices tell what they are and whom they reach") {
  const Fresh fresh;
  fake::set_devices(2);
  cudaDeviceProp properties;
  cudaMemPool_t pool = nullptr;
  std::uint64_t threshold = UINT64_MAX;
  int value = 0;
  REQUIRE(cudaGetDeviceProperties(&properties, 1) == cudaSuccess);
  CHECK(properties.multiProcessorCount > 0);
  REQUIRE(cudaDeviceGetAttribute(&value, cudaDevAttrMultiProcessorCount, 1) == cudaSuccess);
  CHECK(value == properties.multiProcessorCount);
  CHECK(cudaDeviceGetAttribute(&value, cudaDevAttrWarpSize, 2) == cudaErrorInvalidDevice);
  REQUIRE(cudaDeviceCanAccessPeer(&value, 0, 1) == cudaSuccess);
  CHECK(value == 1);
  CHECK(cudaDeviceEnablePeerAccess(1, 0) == cudaSuccess);
  CHECK(cudaDeviceEnablePeerAccess(1, 0) == cudaErrorPeerAccessAlreadyEnabled);
  REQUIRE(cudaDeviceGetDefaultMemPool(&pool, 0) == cudaSuccess);
  CHECK(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &threshold) == cudaSuccess);
  REQUIRE(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&value, add, 256, 0) == cudaSuccess);
  CHECK(value == 8);
  CHECK(std::string(cudaGetErrorName(cudaErrorNoDevice)) == "cudaErrorNoDevice");
}

#if defined(__SANITIZE_ADDRESS__)
extern "C" int __asan_address_is_poisoned(void const volatile* address);

TEST_CASE("AddressSanitizer sees what lies behind memory and what was freed") {
  const Fresh fresh;
  const Stream stream;
  Gate gate;
  void* pointer = nullptr;
  REQUIRE(cudaMallocAsync(&pointer, 100, stream.view().get()) == cudaSuccess);
  const char* bytes = static_cast<const char*>(pointer);
  CHECK(!__asan_address_is_poisoned(bytes + 99));
  CHECK(__asan_address_is_poisoned(bytes + 100));
  gate.hold(stream);
  REQUIRE(cudaFreeAsync(pointer, stream.view().get()) == cudaSuccess);
  CHECK(!__asan_address_is_poisoned(bytes));  // in stream order
  gate.open();
  stream.synchronize();
  CHECK(__asan_address_is_poisoned(bytes));
}
#endif
