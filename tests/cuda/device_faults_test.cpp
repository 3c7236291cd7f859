// SPDX-License-Identifier: Apache-2.0
// Bad input, ranks that disagree or fail, and devices that do, where ranks work in CUDA memory:
// an error that says what to do, never a wrong answer, and nobody hangs.
#include <cuda_runtime_api.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "catch.hpp"
#include "cuda/device_array.hpp"
#include "fake/cuda_runtime.hpp"
#include "zero/cuda.cuh"
#include "zero/cuda/detail/step_reports.hpp"

namespace {

using namespace std::chrono_literals;
using Catch::Contains;
using zero::cuda::InProcessCommunicator;
using zero::cuda::ParamRef;
using zero::cuda::Stream;

/// As a process starts, and when a test ends.
struct Fresh {
  Fresh() { zero_emulation::reset(); }
  Fresh(const Fresh&) = delete;
  Fresh& operator=(const Fresh&) = delete;
  ~Fresh() { zero_emulation::reset(); }
};

struct Tensors {
  std::vector<DeviceArray<float>> values{}, gradients{};
  std::vector<ParamRef<float>> store{};

  explicit Tensors(std::vector<std::size_t> sizes = {700, 33}) {
    for (const std::size_t size : sizes) {
      std::vector<float> numbers;
      for (std::size_t e = 0; e < size; ++e) numbers.push_back(static_cast<float>(e % 19) * 0.1F);
      values.emplace_back(numbers);
      gradients.emplace_back(std::vector<float>(size, 0.25F));
      show(store.size(), values.back().data(), gradients.back().data());
    }
  }
  void show(std::size_t i, float* value, float* gradient) {
    ParamRef<float> shown("p" + std::to_string(i), {values[i].size()}, value, gradient);
    if (i == store.size()) return store.push_back(std::move(shown));
    store[i] = std::move(shown);
  }
  [[nodiscard]] std::vector<std::vector<float>> host() const {
    std::vector<std::vector<float>> all;
    for (const DeviceArray<float>& array : values) all.push_back(array.host());
    return all;
  }
};

using Optimizer =
    zero::ZeroSharded<zero::Adam, std::vector<ParamRef<float>>&, InProcessCommunicator&,
                      zero::ContiguousPartition, zero::NoView>;

/// The text of what `body` throws; "" where it throws nothing.
template <class Error, class F>
std::string text_of(F&& body) {
  try {
    body();
  } catch (const std::exception& error) {
    const bool expected = dynamic_cast<const Error*>(&error) != nullptr;
    return (expected ? "" : "another exception: ") + std::string(error.what());
  }
  return "";
}

/// Runs ranks, each of which returns what it has to tell. No rank leaves before all have returned.
std::vector<std::string> tell(int world,
                              const std::function<std::string(InProcessCommunicator&)>& f,
                              zero::InProcessOptions options = {}) {
  std::vector<std::string> told(static_cast<std::size_t>(world));
  zero::cuda::InProcessWorld ranks(world, options);
  std::vector<Stream> streams(told.size());
  std::vector<InProcessCommunicator> comms;
  for (int r = 0; r < world; ++r) {
    comms.push_back(ranks.communicator(r, streams[static_cast<std::size_t>(r)]));
  }
  std::vector<std::thread> threads;
  for (std::size_t r = 0; r < told.size(); ++r) {
    threads.emplace_back([&, r] {
      std::string said;
      const std::string thrown = text_of<std::exception>([&] { said = f(comms[r]); });
      told[r] = thrown.empty() ? said : "thrown: " + thrown;
    });
  }
  for (std::thread& thread : threads) thread.join();
  return told;
}

/// A step on each rank after something that must not have changed anything: they go on alike.
std::string go_on(Optimizer& optimizer, const Tensors& tensors,
                  const std::vector<std::vector<float>>& before) {
  if (tensors.host() != before) return "values have changed";
  const zero::Outcome outcome = optimizer.step().outcome();
  if (!outcome.applied || outcome.step != 1) return "the next step was not the first";
  if (tensors.host() == before) return "the next step did nothing";
  return "";
}

}  // namespace

TEST_CASE("device faults: without a GPU the message says where to look", "[cuda]") {
  const Fresh fresh;
  zero_emulation::set_devices(0);
  CHECK_THROWS_AS(zero::cuda::run_ranks(1, [](auto&) {}), zero::CudaError);
  CHECK_THROWS_WITH(zero::cuda::run_ranks(1, [](auto&) {}), Contains("CUDA_VISIBLE_DEVICES"));
}

TEST_CASE("device faults: an old driver is named", "[cuda]") {
  const Fresh fresh;
  zero_emulation::set_driver_version(12040);
  CHECK_THROWS_WITH(zero::cuda::run_ranks(1, [](auto&) {}), Contains("install or update it"));
}

TEST_CASE("device faults: host memory in a device store is refused by all ranks", "[cuda]") {
  const Fresh fresh;
  std::vector<float> pageable(33, 1.0F);
  const auto told = tell(2, [&](InProcessCommunicator& comm) {
    Tensors tensors;
    if (comm.rank() == 1) tensors.show(1, pageable.data(), tensors.gradients[1].data());
    return text_of<zero::UsageError>(
        [&] { Optimizer optimizer(zero::Adam{}, tensors.store, comm); });
  });
  for (const std::string& text : told) {
    CHECK_THAT(text, Contains("'p1') has values in memory of the host") && Contains("cudaMalloc"));
  }
}

TEST_CASE("device faults: a gradient in host memory is refused when it is first seen", "[cuda]") {
  const Fresh fresh;
  const auto told = tell(2, [&](InProcessCommunicator& comm) -> std::string {
    Tensors tensors;
    const auto before = tensors.host();
    std::vector<float> pageable(33, 1.0F);
    Optimizer optimizer(zero::Adam{}, tensors.store, comm);
    if (comm.rank() == 1) tensors.show(1, tensors.values[1].data(), pageable.data());
    const auto refusal = Contains("'p1') has a gradient in memory of the host");
    if (comm.rank() == 1) {
      const auto leased = text_of<zero::UsageError>([&] { (void)optimizer.gradient(1); });
      if (!refusal.match(leased)) return "lease: " + leased;
      const auto marked = text_of<zero::UsageError>([&] { optimizer.mark_ready(1); });
      if (!refusal.match(marked)) return "mark: " + marked;
    }
    // Peers learn of it when they ask.
    const auto stepped = text_of<zero::UsageError>([&] { (void)optimizer.step().outcome(); });
    if (!refusal.match(stepped)) return "step: " + stepped;
    tensors.show(1, tensors.values[1].data(), tensors.gradients[1].data());
    return go_on(optimizer, tensors, before);
  });
  for (const std::string& text : told) CHECK(text == "");
}

TEST_CASE("device faults: memory and streams of another device are refused", "[cuda]") {
  const Fresh fresh;
  zero_emulation::set_devices(2);
  zero::cuda::check(cudaSetDevice(1), "cudaSetDevice");
  {
    const Tensors elsewhere;
    const Stream other;
    zero::cuda::check(cudaSetDevice(0), "cudaSetDevice");
    const Stream stream;
    zero::cuda::InProcessWorld world(1);
    InProcessCommunicator comm = world.communicator(0, stream);
    Tensors tensors;
    const auto before = tensors.host();
    tensors.show(0, elsewhere.values[0].data(), tensors.gradients[0].data());
    CHECK_THROWS_WITH(
        Optimizer(zero::Adam{}, tensors.store, comm),
        Contains("on device 1, but device 0 is current") && Contains("cudaSetDevice(1)"));
    tensors.show(0, tensors.values[0].data(), elsewhere.gradients[0].data());
    Optimizer optimizer(zero::Adam{}, tensors.store, comm);
    CHECK_THROWS_WITH(optimizer.mark_ready(0, stream), Contains("on device 1"));
    tensors.show(0, tensors.values[0].data(), tensors.gradients[0].data());
    const auto refusal =
        Contains("the stream is of device 1, but this optimizer was made on device 0");
    CHECK_THROWS_WITH(optimizer.mark_ready(0, other), refusal);
    CHECK_THROWS_AS(optimizer.step(other), zero::UsageError);
    CHECK_THROWS_WITH(optimizer.step(other), refusal);
    zero::cuda::check(cudaSetDevice(1), "cudaSetDevice");
    CHECK_THROWS_WITH(optimizer.step(stream),
                      Contains("device 1 is current") && Contains("cudaSetDevice(0)"));
    zero::cuda::check(cudaSetDevice(0), "cudaSetDevice");
    CHECK(go_on(optimizer, tensors, before) == "");
  }
}

TEST_CASE("device faults: where one rank refuses a step nobody takes it", "[cuda]") {
  const Fresh fresh;
  const auto told = tell(3, [&](InProcessCommunicator& comm) -> std::string {
    Tensors tensors;
    const auto before = tensors.host();
    Optimizer optimizer(zero::Adam{}, tensors.store, comm);
    if (comm.rank() == 1) optimizer.group(0).beta1 = 2;
    const auto stepped = text_of<zero::UsageError>([&] { (void)optimizer.step().outcome(); });
    if (!Contains("rank 1 refused the step").match(stepped) && comm.rank() != 1) return stepped;
    if (!Contains("beta1").match(stepped)) return stepped;
    optimizer.group(0).beta1 = 0.9;
    return go_on(optimizer, tensors, before);
  });
  for (const std::string& text : told) CHECK(text == "");
}

TEST_CASE("device faults: a step that is done at once is not yet an earlier one", "[cuda]") {
  const Fresh fresh;
  zero::cuda::detail::StepReports<int> reports;
  const auto told = [&](const auto& last) {
    int sum = 0;
    reports.for_each_done_before(last.get(), [&](int report) { sum += report; });
    return sum;
  };
  const auto first = reports.take();
  *first->memory() = 7;
  CHECK(told(first) == 0);
  CHECK(told(reports.take()) == 7);
}

TEST_CASE("device faults: ranks whose options differ take no step", "[cuda]") {
  const Fresh fresh;
  const auto told = tell(2, [&](InProcessCommunicator& comm) -> std::string {
    Tensors tensors;
    const auto before = tensors.host();
    Optimizer optimizer(zero::Adam{}, tensors.store, comm);
    if (comm.rank() == 1) optimizer.group(0).lr = 0.5;
    const auto stepped = text_of<zero::UsageError>([&] { (void)optimizer.step().outcome(); });
    if (!Contains("differ from rank 0's").match(stepped)) return stepped;
    optimizer.group(0).lr = 0.5;
    return go_on(optimizer, tensors, before);
  });
  for (const std::string& text : told) CHECK(text == "");
}

TEST_CASE("device faults: reduced gradients on some ranks only are named", "[cuda]") {
  const Fresh fresh;
  const auto told = tell(2, [&](InProcessCommunicator& comm) -> std::string {
    Tensors tensors;
    const auto before = tensors.host();
    Optimizer optimizer(zero::Adam{}, tensors.store, comm,
                        zero::Settings{.gradients = zero::Gradients::reduced});
    if (comm.rank() == 1) optimizer.mark_absent(1);
    const auto stepped = text_of<zero::UsageError>([&] { (void)optimizer.step().outcome(); });
    if (!Contains("'p1') has a gradient on some ranks only").match(stepped)) return stepped;
    return go_on(optimizer, tensors, before);
  });
  for (const std::string& text : told) CHECK(text == "");
}

TEST_CASE("device faults: ranks that step other optimizers take no step", "[cuda]") {
  const Fresh fresh;
  const auto told = tell(2, [&](InProcessCommunicator& comm) -> std::string {
    Tensors tensors, others;
    const auto before = tensors.host();
    Optimizer optimizer(zero::Adam{}, tensors.store, comm);
    Optimizer another(zero::Adam{}, others.store, comm);
    Optimizer& stepped = comm.rank() == 0 ? optimizer : another;
    const auto text = text_of<zero::UsageError>([&] { (void)stepped.step().outcome(); });
    if (!Contains("stepped another optimizer").match(text)) return text;
    const std::string first = go_on(optimizer, tensors, before);
    return first.empty() ? go_on(another, others, before) : first;
  });
  for (const std::string& text : told) CHECK(text == "");
}

TEST_CASE("device faults: a peer that never comes is named in time", "[cuda]") {
  const Fresh fresh;
  std::atomic<int> left{0};
  const auto told = tell(
      3,
      [&](InProcessCommunicator& comm) -> std::string {
        Tensors tensors;
        Optimizer optimizer(zero::Adam{}, tensors.store, comm);
        comm.barrier().wait(10s);
        if (comm.rank() == 1) {
          while (left != 2) std::this_thread::sleep_for(1ms);
          return "";
        }
        const auto begin = std::chrono::steady_clock::now();
        const auto text =
            text_of<zero::CommunicatorError>([&] { (void)optimizer.step().outcome(); });
        ++left;
        if (std::chrono::steady_clock::now() - begin > 20s) return "it took long";
        if (!Contains("1").match(text)) return text;
        // What may have been half done is refused from then on.
        return text_of<zero::Error>([&] { (void)optimizer.step(); }).empty() ? "it went on" : "";
      },
      {.timeout = 300ms});
  for (const std::string& text : told) CHECK(text == "");
}

TEST_CASE("device faults: an abort ends the steps of all ranks", "[cuda]") {
  const Fresh fresh;
  const auto told = tell(2, [&](InProcessCommunicator& comm) -> std::string {
    Tensors tensors;
    Optimizer optimizer(zero::Adam{}, tensors.store, comm);
    (void)optimizer.step().outcome();
    comm.barrier().wait(10s);
    if (comm.rank() == 1) {
      comm.abort("out of data");
      return text_of<zero::CommunicatorError>([&] { (void)optimizer.step(); }).empty()
                 ? "it stepped"
                 : "";
    }
    const auto text = text_of<zero::CommunicatorError>([&] {
      for (;;) (void)optimizer.step().outcome();
    });
    return Contains("out of data").match(text) ? "" : text;
  });
  for (const std::string& text : told) CHECK(text == "");
}

TEST_CASE("device faults: a device that is lost is told, and nothing hangs", "[cuda]") {
  const Fresh fresh;
  for (const int world : {1, 2}) {
    const auto told = tell(world, [&](InProcessCommunicator& comm) -> std::string {
      Tensors tensors;
      Optimizer optimizer(zero::Adam{}, tensors.store, comm);
      (void)optimizer.step().outcome();
      comm.barrier().wait();
      if (comm.rank() == 0) zero_emulation::break_device(0, cudaErrorIllegalAddress);
      comm.barrier().wait();
      const auto text = text_of<zero::Error>([&] { (void)optimizer.step().outcome(); });
      return Contains("compute-sanitizer").match(text) || comm.rank() != 0 ? "" : text;
    });
    for (const std::string& text : told) CHECK(text == "");
    zero_emulation::reset();
  }
}

TEST_CASE("device faults: settings that no device has are refused", "[cuda]") {
  const Fresh fresh;
  const Stream stream;
  zero::cuda::InProcessWorld world(1);
  InProcessCommunicator comm = world.communicator(0, stream);
  Tensors tensors;
  CHECK_THROWS_WITH(
      Optimizer(zero::Adam{}, tensors.store, comm, zero::Settings{.flush_denormals = true}),
      Contains("flush_denormals") && Contains("leave it off"));
  Optimizer optimizer(zero::Adam{}, tensors.store, comm);
  CHECK_THROWS_WITH(optimizer.join([] {}), Contains("give all ranks as many batches"));
}

TEST_CASE("device faults: a construction that fails leaves nothing behind", "[cuda]") {
  const Fresh fresh;
  for (const int world : {1, 2}) {
    for (const char* function :
         {"cudaMallocAsync", "cudaMallocHost", "cudaMemset", "cudaMemcpy",
          "cudaEventCreateWithFlags", "cudaStreamSynchronize", "cudaPointerGetAttributes"}) {
      bool failed = true;
      int nth = 1;
      for (; failed && nth < 400; ++nth) {
        CAPTURE(world, function, nth);
        std::atomic<int> failures{0}, ended{0};
        const auto told = tell(world, [&](InProcessCommunicator& comm) -> std::string {
          Tensors tensors;
          const auto before = tensors.host();
          comm.barrier().wait();
          const auto alive = zero_emulation::alive();
          comm.barrier().wait();
          if (comm.rank() == 0) {
            zero_emulation::fail(function, nth, cudaErrorMemoryAllocation);
          }
          comm.barrier().wait();
          const std::string text =
              text_of<zero::Error>([&] { Optimizer optimizer(zero::Adam{}, tensors.store, comm); });
          if (text.find("another exception") != std::string::npos) return text;
          if (!text.empty()) ++failures;
          // After a failure the world can't meet any more; nobody looks before all have ended.
          ++ended;
          while (ended < world) std::this_thread::sleep_for(100us);
          zero_emulation::reset();
          if (tensors.host() != before) return "values have changed";
          const auto now = zero_emulation::alive();
          if (now.allocations > alive.allocations) return "device memory leaks";
          if (now.events > alive.events + 40) return "events leak";
          return "";
        });
        for (const std::string& text : told) REQUIRE(text == "");
        failed = failures != 0;
      }
      // Where nothing failed the construction was through before.
      CHECK_FALSE(failed);
      CHECK((nth > 2 || std::string(function) == "cudaEventCreateWithFlags"));
    }
  }
}
