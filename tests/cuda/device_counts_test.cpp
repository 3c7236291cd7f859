// SPDX-License-Identifier: Apache-2.0
// What a step costs the host: how many launches it makes, and that it waits for no device and
// allocates nothing, neither on the device nor on the host.
#include <atomic>
#include <cstddef>
#include <cstdlib>
#include <limits>
#include <new>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "catch.hpp"
#include "cuda/device_array.hpp"
#include "fake/cuda_runtime.hpp"
#include "zero/cuda.cuh"

// g++ sees `free` behind an inlined delete but not the allocation behind new.
#pragma GCC diagnostic ignored "-Wmismatched-new-delete"

namespace {
// Of threads that step, and not of streams' threads nor of the fake runtime.
thread_local bool counting = false;
std::atomic<std::size_t> host_allocations{0};

void* counted(std::size_t bytes, std::size_t alignment) {
  if (counting && !zero_emulation::InRuntime::now()) ++host_allocations;
  void* memory = std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
}  // namespace

void* operator new(std::size_t bytes) { return counted(bytes, alignof(std::max_align_t)); }
void* operator new(std::size_t bytes, std::align_val_t alignment) {
  return counted(bytes, static_cast<std::size_t>(alignment));
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t, std::align_val_t) noexcept { std::free(memory); }

namespace {

constexpr std::size_t parameters = 6;
constexpr std::size_t elements = 200;
constexpr int warm = 2;  // steps before counting
constexpr int counted_steps = 4;

/// Of `counted_steps` steps of all ranks together.
struct Costs {
  std::size_t buckets = 0;
  std::size_t host_allocations = 0;
  zero_emulation::Counters device{};
};

/// One buffer of values and one of gradients.
struct FlatStore {
  DeviceArray<float> values{std::vector<float>(parameters * elements, 1.0F)};
  DeviceArray<float> gradients{std::vector<float>(parameters * elements, 0.5F)};
  zero::cuda::FlatParams<float> params{
      {values.data(), values.size()}, {gradients.data(), gradients.size()}, entries()};
  static std::vector<zero::cuda::FlatParams<float>::Entry> entries() {
    std::vector<zero::cuda::FlatParams<float>::Entry> all;
    for (std::size_t i = 0; i < parameters; ++i) all.push_back({std::to_string(i), {elements}});
    return all;
  }
};

/// Tensors apart from each other, which are copied through buckets.
struct ScatteredStore {
  std::vector<DeviceArray<float>> arrays;
  std::vector<zero::cuda::ParamRef<float>> params;
  ScatteredStore() {
    for (std::size_t i = 0; i < parameters; ++i) {
      for (const float x : {1.0F, 0.5F}) arrays.emplace_back(std::vector<float>(elements, x));
      params.emplace_back(std::to_string(i), std::vector<std::size_t>{elements},
                          arrays[2 * i].data(), arrays[2 * i + 1].data());
    }
  }
};

/// @param max_norm of each step from the one on that is counted first, in turns
template <class Store, class Stage = zero::Stage1>
Costs costs(int world, std::optional<double> max_norm, Stage stage = {},
            zero::Gradients gradients = zero::Gradients::local) {
  Costs costs;
  host_allocations = 0;
  zero::cuda::run_ranks(world, [&](zero::cuda::InProcessCommunicator& comm) {
    Store store;
    const zero::cuda::Stream stream, backward;
    const zero::cuda::Event stepped;
    zero::Settings settings;
    settings.gradients = gradients;
    zero::ZeroSharded optimizer{zero::Adam{}, store.params,
                                comm,         zero::NoView{2 * elements * sizeof(float)},
                                stage,        settings};
    optimizer.clip_grad_norm(max_norm);
    zero_emulation::Counters before{};
    for (int step = 0; step < warm + counted_steps; ++step) {
      if (step == warm) {
        comm.barrier().wait();
        if (comm.rank() == 0) before = zero_emulation::counters();
        comm.barrier().wait();
        counting = true;
      }
      backward.view().wait(stepped);
      for (std::size_t i = parameters; i-- > 0;) {
        const auto lease = optimizer.gradient(i);
        if (lease.values().empty()) std::abort();
      }
      for (std::size_t i = parameters; i-- > 0;) {
        if (i != 1) optimizer.mark_ready(i, backward);
      }
      optimizer.mark_ready(1);
      (void)optimizer.step(stream);
      stepped.record(stream);
    }
    counting = false;
    comm.barrier().wait();
    if (comm.rank() == 0) {
      const zero_emulation::Counters after = zero_emulation::counters();
      costs.device.launches = after.launches - before.launches;
      costs.device.host_synchronizations =
          after.host_synchronizations - before.host_synchronizations;
      costs.device.allocations = after.allocations - before.allocations;
      costs.device.frees = after.frees - before.frees;
      costs.buckets = optimizer.layout().buckets(0);
    }
    comm.barrier().wait();
    if (optimizer.last_outcome().step != warm + counted_steps) std::abort();
  });
  costs.host_allocations = host_allocations;
  return costs;
}

void check_nothing_waits_or_allocates(const Costs& costs) {
  CHECK(costs.device.host_synchronizations == 0);
  CHECK(costs.device.allocations == 0);
  CHECK(costs.device.frees == 0);
  CHECK(costs.host_allocations == 0);
}

}  // namespace

TEST_CASE("device: the counter counts", "[cuda]") {
  host_allocations = 0;
  counting = true;
  ::operator delete(::operator new(1));
  counting = false;
  CHECK(host_allocations == 1);
}

TEST_CASE("device: one rank makes three launches a step, and one more to clip", "[cuda]") {
  // What this rank tells, the decision, the update of everything; and a look at all gradients.
  const Costs plain = costs<FlatStore>(1, std::nullopt);
  CHECK(plain.device.launches == counted_steps * 3);
  check_nothing_waits_or_allocates(plain);
  const Costs clipped = costs<ScatteredStore>(1, 0.1);
  CHECK(clipped.device.launches == counted_steps * 4);
  check_nothing_waits_or_allocates(clipped);
}

TEST_CASE("device: ranks make two launches a step and one a bucket", "[cuda]") {
  for (const int world : {2, 3}) {
    // Beside those: the communicator's own, which sums a bucket's slices with one launch a rank.
    // Where a rank has nothing of a bucket it launches less.
    const auto launches = [&](std::size_t of_step, const Costs& costs) {
      return static_cast<std::size_t>(world * counted_steps) * (of_step + costs.buckets);
    };
    CAPTURE(world);
    const Costs plain = costs<FlatStore>(world, std::nullopt);
    REQUIRE(plain.buckets > 1);
    CHECK(plain.device.launches <= launches(2 + plain.buckets, plain));
    check_nothing_waits_or_allocates(plain);
    const Costs clipped = costs<FlatStore>(world, 0.1);
    CHECK(clipped.device.launches <= launches(3 + clipped.buckets, clipped));
    check_nothing_waits_or_allocates(clipped);
    // Gradients are packed before they are sent, values before they are gathered and after.
    const Costs scattered = costs<ScatteredStore>(world, std::nullopt);
    CHECK(scattered.device.launches <= launches(2 + 4 * scattered.buckets, scattered));
    check_nothing_waits_or_allocates(scattered);
  }
}

TEST_CASE("device: neither do other stages wait or allocate", "[cuda]") {
  for (const int world : {1, 2, 3}) {
    CAPTURE(world);
    check_nothing_waits_or_allocates(costs<ScatteredStore>(world, 0.1, zero::Replicated{}));
    check_nothing_waits_or_allocates(
        costs<FlatStore>(world, 0.1, zero::Stage1{}, zero::Gradients::reduced));
  }
}
