// SPDX-License-Identifier: Apache-2.0
// Device memory that K ranks on one GPU take, as the driver counts it.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <mutex>
#include <string>
#include <thread>
#include <vector>
#include <zero/cuda.cuh>

#include "benchmarks.hpp"
#include "device.hpp"
#include "models.hpp"
#include "rows.hpp"

namespace bench {

namespace {

/// The least free device memory while it lives, looked at every millisecond.
class LowWater {
 public:
  LowWater() : least_(device_memory().free), watcher_([this] { watch(); }) {}
  LowWater(const LowWater&) = delete;
  LowWater& operator=(const LowWater&) = delete;
  ~LowWater() {
    ended_ = true;
    watcher_.join();
  }
  [[nodiscard]] std::size_t least() { return std::min(least_.load(), device_memory().free); }

 private:
  void watch() {
    while (!ended_) {
      std::size_t free = 0, total = 0;
      if (cudaMemGetInfo(&free, &total) == cudaSuccess) least_ = std::min(least_.load(), free);
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }
  std::atomic<bool> ended_ = false;
  std::atomic<std::size_t> least_;
  std::thread watcher_;
};

Spread mebibytes(std::size_t more, std::size_t less) {
  const double value = (static_cast<double>(more) - static_cast<double>(less)) / (1 << 20);
  return {value, value, value};
}

/// Rows of what the model takes, what the optimizers add to it, and what they add at their peak
/// until two steps are done: of all ranks together.
template <class Stage>
void memory_rows(const std::string& name, const Model& model, int ranks, Stage stage) {
  trim_pool();
  const std::size_t before = device_memory().free;
  // A replica has values, gradients, two slots, and a copy in buckets at most.
  const std::size_t needed = static_cast<std::size_t>(ranks) * model.elements() * sizeof(float) * 6;
  if (needed > before / 10 * 9) {
    return print_skipped(name, "needs " + std::to_string(needed >> 20) + " MiB of device memory");
  }
  std::size_t with_model = 0, with_optimizer = 0, least = 0;
  zero::cuda::run_ranks(ranks, [&](zero::cuda::InProcessCommunicator& comm) {
    const bool tells = comm.rank() == 0;
    DeviceModel<float> memory(model);
    comm.barrier().wait();
    if (tells) with_model = device_memory().free;
    comm.barrier().wait();
    std::optional<LowWater> water;
    if (tells) water.emplace();
    comm.barrier().wait();
    zero::ZeroSharded optimizer{zero::cuda::FusedAdam{}, memory.store(), comm, stage,
                                zero::Settings{.check_values = false}};
    for (int k = 0; k < 2; ++k) (void)optimizer.step(comm.stream()).outcome();
    comm.barrier().wait();
    if (tells) {
      with_optimizer = device_memory().free;
      least = water->least();
    }
    comm.barrier().wait();
  });
  print_row(name + "/model", "MiB", mebibytes(before, with_model));
  print_row(name + "/optimizer", "MiB", mebibytes(with_model, with_optimizer));
  print_row(name + "/optimizer at its peak", "MiB", mebibytes(with_model, least));
}

}  // namespace

void memory(bool tiny) {
  for (const Model& model : memory_models(tiny)) {
    for (const int ranks : {2, 4}) {
      const std::string suffix = "/" + model.name + "/K=" + std::to_string(ranks);
      memory_rows("memory" + suffix + "/replicated", model, ranks, zero::Replicated{});
      memory_rows("memory" + suffix + "/sharded", model, ranks, zero::Stage1{});
    }
  }
}

}  // namespace bench
