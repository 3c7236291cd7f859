// SPDX-License-Identifier: Apache-2.0
/// @file
/// Under ThreadSanitizer: a rank that works in CUDA memory races with nothing, and each of its
/// waits for an event is needed, in one scenario at least: with any of them left out there is a
/// race.
///
///     device_order SCENARIO          all of that
///     device_order SCENARIO NUMBER   leaves out that wait of rank 0; 0: none
#include <cuda_runtime.h>
#include <sys/wait.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdlib>
#include <functional>
#include <iostream>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "cuda/device_array.hpp"
#include "fake/cuda_runtime.hpp"
#include "zero/cuda.cuh"

namespace {

using zero::cuda::Event;
using zero::cuda::InProcessCommunicator;
using zero::cuda::Stream;
using zero::cuda::StreamView;
using zero::cuda::detail::launch;

constexpr int no_such_wait = 3;
constexpr int race = 66;  // as ThreadSanitizer ends a program

__global__ void write(float* to, std::size_t count, float value) {
  for (std::size_t i = 0; i < count; ++i) to[i] = value + static_cast<float>(i % 5);
}
__global__ void read(const float* from, std::size_t count, float* sum) {
  for (std::size_t i = 0; i < count; ++i) *sum += from[i];
}

constexpr std::size_t steps = 3;

/// Returns once the stream has done what it has, without any order that ThreadSanitizer sees.
void pass_time(StreamView stream) {
  // By rank 0 alone. Not owned by the task, since counting owners would be an order.
  static std::atomic<bool> passed{false};
  zero::cuda::check(
      zero_emulation::enqueue(stream.get(), [] { passed.store(true, std::memory_order_relaxed); }),
      "enqueue");
  while (!passed.load(std::memory_order_relaxed)) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

/// Parameters apart from each other. Backward makes each one's gradient in a stream of its own, but
/// for the first: that one's is not marked, and made in the stream that steps.
struct Rank {
  std::vector<DeviceArray<float>> values{};
  std::vector<std::vector<DeviceArray<float>>> gradients{steps};
  std::vector<zero::cuda::ParamRef<float>> store{};
  DeviceArray<float> losses{std::vector<float>(3)};
  std::vector<Stream> making{3}, stepping{2};

  Rank() {
    for (const std::size_t count : {40, 24, 32}) {
      values.emplace_back(std::vector<float>(count, 1));
      for (auto& of_step : gradients) of_step.emplace_back(std::vector<float>(count, 1));
      store.push_back(shown(store.size(), 0));
    }
  }
  [[nodiscard]] zero::cuda::ParamRef<float> shown(std::size_t i, std::size_t set) const {
    return {std::to_string(i), {values[i].size()}, values[i].data(), gradients[set][i].data()};
  }
  void forward(std::size_t i, StreamView stream, std::size_t loss) const {
    launch("read", read, {1, 1}, stream, values[i].data(), values[i].size(), losses.data() + loss);
  }
};

struct Plan {
  /// Each step's gradients are made elsewhere, while the one before is under way, and it is taken
  /// in another stream than that one.
  bool overlaps = false;
  /// Only the waits of the destruction, while gradients are under way.
  bool destroys = false;
  std::optional<double> max_norm = std::nullopt;
};

/// Of all steps but the last the waits are counted: what comes after them needs them.
template <class... Policy>
void run(int world, std::uint64_t ignored, const Plan& plan, Policy... policies) {
  zero::cuda::run_ranks(world, [&](InProcessCommunicator& comm) {
    Rank rank;
    auto optimizer =
        std::make_unique<decltype(zero::ZeroSharded{zero::Adam{}, rank.store, comm, policies...})>(
            zero::Adam{}, rank.store, comm, policies...);
    optimizer->clip_grad_norm(plan.max_norm);
    const auto count_waits = [&] {
      if (comm.rank() == 0) zero_emulation::ignore_wait(ignored);
    };
    const auto end_count = [&] {
      if (comm.rank() != 0 || ignored == 0) return;
      if (!zero_emulation::wait_was_ignored()) std::_Exit(no_such_wait);
      zero_emulation::ignore_wait(0);
    };
    const Event stepped;
    comm.barrier().wait();
    if (!plan.destroys) count_waits();
    for (std::size_t step = 0; step < steps; ++step) {
      if (!plan.destroys && step + 1 == steps) end_count();
      const std::size_t set = plan.overlaps ? step : 0;
      const StreamView stepping = rank.stepping[set % 2];
      for (std::size_t i = 0; i < rank.store.size(); ++i) {
        const StreamView making = i == 0 ? stepping : rank.making[i].view();
        rank.store[i] = rank.shown(i, set);
        if (!plan.overlaps) {
          if (step > 0 && i != 0) making.wait(stepped);
          rank.forward(i, making, i);
        }
        launch("write", write, {1, 1}, making, rank.gradients[set][i].data(), rank.values[i].size(),
               static_cast<float>(step));
        if (i != 0) optimizer->mark_ready(i, making);
      }
      (void)optimizer->step(stepping);
      for (std::size_t i = 0; !plan.overlaps && i < rank.store.size(); ++i) {
        rank.forward(i, stepping, i);
      }
      stepped.record(stepping);
    }
    stepped.synchronize();
    if (!plan.destroys) {
      if (!optimizer->last_outcome().applied) std::abort();
      return;
    }
    for (const std::size_t i : {2, 1}) optimizer->mark_ready(i, rank.making[i]);
    // Rank 0 first: its peers' frees come after its traffic, in the same stream as its own.
    if (comm.rank() != 0) return comm.barrier().wait();
    pass_time(comm.stream());
    count_waits();
    optimizer.reset();
    end_count();
    comm.barrier().wait();
  });
}

using Scenario = std::function<void(std::uint64_t ignored)>;

const std::map<std::string, Scenario>& scenarios() {
  constexpr zero::NoView few{64};  // elements a bucket
  static const std::map<std::string, Scenario> all = {
      {"alone", [few](auto n) { run(1, n, {.overlaps = true, .max_norm = 1}, few); }},
      {"sharded", [few](auto n) { run(2, n, {}, few); }},
      {"clipped", [few](auto n) { run(2, n, {.max_norm = 1}, few); }},
      {"replicated",
       [few](auto n) { run(2, n, {.overlaps = true, .max_norm = 1}, few, zero::Replicated{}); }},
      {"pooled", [few](auto n) { run(2, n, {.max_norm = 1}, few, zero::Stage2{}); }},
      {"destroyed", [few](auto n) { run(2, n, {.destroys = true}, few); }},
  };
  return all;
}

/// Runs this program anew, silently but for what shows that there is nothing to see.
int child(const std::string& self, const std::string& scenario, std::uint64_t ignored) {
  const std::string command = "TSAN_OPTIONS=halt_on_error=1:exitcode=" + std::to_string(race) +
                              " '" + self + "' " + scenario + " " + std::to_string(ignored) +
                              (ignored == 0 ? "" : " >/dev/null 2>&1");
  const int status = std::system(command.c_str());
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

}  // namespace

int main(int argc, char** argv) {
  const auto found = argc > 1 ? scenarios().find(argv[1]) : scenarios().end();
  if (found == scenarios().end()) {
    std::cerr << "usage: device_order SCENARIO [NUMBER]\n";
    return 2;
  }
  if (argc > 2) {
    found->second(std::stoull(argv[2]));
    return 0;
  }
  if (child(argv[0], found->first, 0) != 0) return 1;
  int missed = 0;
  for (std::uint64_t n = 1;; ++n) {
    const int code = child(argv[0], found->first, n);
    if (code == no_such_wait) {
      std::cout << n - 1 << " waits, " << missed << " of them without effect\n";
      return n == 1 || missed != 0 ? 1 : 0;
    }
    if (code == race) continue;
    std::cout << "no race without wait " << n << " (exit status " << code << ")\n";
    ++missed;
  }
}
