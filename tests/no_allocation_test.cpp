// SPDX-License-Identifier: Apache-2.0
// After the first step nothing is allocated: not by a rank, not by what ranks share.
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdlib>
#include <new>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <vector>
#include <zero/zero.hpp>

#include "catch.hpp"

// g++ sees `free` behind an inlined delete but not the allocation behind new.
#pragma GCC diagnostic ignored "-Wmismatched-new-delete"

namespace {
std::atomic<bool> counting{false};
std::atomic<std::size_t> allocations{0};

void* counted(std::size_t bytes, std::size_t alignment) {
  if (counting) ++allocations;
  void* memory = std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
}  // namespace

void* operator new(std::size_t bytes) { return counted(bytes, alignof(std::max_align_t)); }
void* operator new(std::size_t bytes, std::align_val_t alignment) {
  return counted(bytes, static_cast<std::size_t>(alignment));
}
void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept {
  if (counting) ++allocations;
  return std::malloc(bytes);
}
void operator delete(void* memory, const std::nothrow_t&) noexcept { std::free(memory); }
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t, std::align_val_t) noexcept { std::free(memory); }

namespace {

/// Hides that ranks share memory: steps go through buckets and collectives.
struct CollectivesOnly : zero::InProcessCommunicator {
  explicit CollectivesOnly(const zero::InProcessCommunicator& comm)
      : zero::InProcessCommunicator(comm) {}
  void meet() = delete;
};
static_assert(zero::Communicator<CollectivesOnly> &&
              !zero::SharedMemoryCommunicator<CollectivesOnly>);

/// Allocations during steps 3 to 6 on all ranks together, unclipped and clipped in turns.
template <class Comm, class T = float, class Stage, class Opt = zero::Adam,
          class Partition = zero::ContiguousPartition>
std::size_t allocations_while_stepping(int world, Stage stage, Opt rule = {},
                                       Partition partition = {}) {
  allocations = 0;
  zero::run_ranks(world, [&](zero::InProcessCommunicator& in_process) {
    Comm comm(in_process);
    std::vector<std::vector<T>> values(12, std::vector<T>(1000, T(1.0F)));
    std::vector<std::vector<T>> gradients(12, std::vector<T>(1000, T(0.5F)));
    std::vector<zero::ParamRef<T>> store;
    for (std::size_t i = 0; i < values.size(); ++i) {
      store.emplace_back("p" + std::to_string(i), values[i], gradients[i]);
    }
    zero::ZeroSharded optimizer{rule, store, comm, stage, partition, zero::NoView{4096}};
    for (int step = 0; step < 6; ++step) {
      optimizer.clip_grad_norm(step % 2 == 0 ? std::nullopt : std::optional(1.0));
      comm.barrier().wait();
      if (step == 2) counting = true;
      comm.barrier().wait();
      for (std::size_t i = 0; i < store.size(); ++i) optimizer.mark_ready(i);
      optimizer.step();
    }
    comm.barrier().wait();
    counting = false;
    comm.barrier().wait();
  });
  return allocations;
}

/// The same of a loop over units, of two backward passes a step, which leases what it writes.
template <class Stage>
std::size_t allocations_while_leasing(int world, Stage stage) {
  constexpr std::size_t units = 4;
  allocations = 0;
  zero::run_ranks(world, [&](zero::InProcessCommunicator& comm) {
    std::vector<zero::ShapedParam<float>> store;
    for (std::size_t i = 0; i < units; ++i) {
      store.emplace_back("p" + std::to_string(i), std::vector<std::size_t>{1000},
                         zero::Attributes{.unit = static_cast<int>(i)});
    }
    zero::Settings settings;
    settings.initial_value = [](std::string_view, std::size_t) { return 1.0; };
    zero::ZeroSharded optimizer{zero::Adam{},
                                store,
                                comm,
                                zero::ParamView{1024},
                                stage,
                                settings,
                                zero::ContiguousPartition{}};
    const auto pass = [&] {
      for (int unit = 0; unit < static_cast<int>(units); ++unit) {
        optimizer.acquire(unit);
        optimizer.release(unit);
      }
      for (std::size_t i = units; i-- > 0;) {
        const auto unit = static_cast<int>(i);
        optimizer.acquire(unit);
        {
          const auto lease = optimizer.gradient(i);
          for (float& x : lease.values()) x = 0.5F;
        }
        optimizer.mark_ready(i);
        optimizer.release(unit);
      }
    };
    for (int step = 0; step < 6; ++step) {
      optimizer.clip_grad_norm(step % 2 == 0 ? std::nullopt : std::optional(1.0));
      comm.barrier().wait();
      if (step == 2) counting = true;
      comm.barrier().wait();
      {
        const auto scope = optimizer.accumulate();
        pass();
      }
      pass();
      optimizer.step();
    }
    comm.barrier().wait();
    counting = false;
    comm.barrier().wait();
  });
  return allocations;
}

/// Allocations on all ranks together while rank 0, which had two batches, serves steps 4 to 6.
template <class Comm>
std::size_t allocations_while_serving() {
  allocations = 0;
  zero::run_ranks(2, [&](zero::InProcessCommunicator& in_process) {
    Comm comm(in_process);
    std::vector<float> values(1000, 1.0F), gradient(1000, 0.5F);
    std::vector<zero::ParamRef<float>> store{{"p", values, gradient}};
    zero::ZeroSharded optimizer{
        zero::Adam{}, store, comm, zero::Stage1{}, zero::ContiguousPartition{}, zero::NoView{1024}};
    const int batches = comm.rank() == 0 ? 2 : 6;
    optimizer.join(
        [&] {
          for (int batch = 0; batch < batches; ++batch) {
            if (batch == 3) counting = true;
            optimizer.step();
          }
          if (comm.rank() != 0) counting = false;
        },
        {.mean = zero::JoinMean::ranks_with_input});
  });
  return allocations;
}

}  // namespace

TEST_CASE("the counter counts") {
  allocations = 0;
  counting = true;
  ::operator delete(::operator new(1));
  counting = false;
  CHECK(allocations == 1);
}

TEST_CASE("in-process collectives allocate nothing once warm") {
  allocations = 0;
  zero::run_ranks(3, [&](zero::InProcessCommunicator& comm) {
    const std::size_t n = 300;
    std::vector<float> data(n), large(3 * n), other(3 * n), third(3 * n);
    std::vector<std::byte> bytes(8), all(24);
    const std::vector<std::size_t> counts(3, n);
    const auto everything = [&] {
      auto a = comm.all_reduce(std::span<float>(data));
      auto b = comm.reduce_scatter<float>(
          large, std::span<float>(large).subspan(static_cast<std::size_t>(comm.rank()) * n, n));
      a.wait(), b.wait();
      auto meeting = comm.meet("allocation", data.data());
      auto c = comm.all_gather<float>(data, std::span<float>(third));
      auto d = comm.all_to_all<float>(large, std::span<float>(other));
      (void)meeting.peers();
      meeting.leave();
      d.wait(), c.wait(), meeting.wait();
      comm.reduce_scatter_v<float>(large, std::span<float>(data), counts).wait();
      comm.all_gather_v<float>(data, std::span<float>(large), counts).wait();
      comm.all_to_all_v<float>(large, counts, std::span<float>(other), counts).wait();
      comm.broadcast(std::span<float>(data), 1).wait();
      auto e = comm.exchange(bytes, all);
      auto f = comm.barrier();
      while (!f.done()) std::this_thread::yield();
      e.wait();
    };
    for (int i = 0; i < 3; ++i) everything();
    comm.barrier().wait();
    if (comm.rank() == 0) counting = true;
    comm.barrier().wait();
    for (int i = 0; i < 50; ++i) everything();
    comm.barrier().wait();
    if (comm.rank() == 0) counting = false;
    comm.barrier().wait();
  });
  CHECK(allocations == 0);
}

TEST_CASE("a step allocates nothing") {
  for (const int world : {1, 2, 4}) {
    CHECK(allocations_while_stepping<zero::InProcessCommunicator>(world, zero::Stage1{}) == 0);
    CHECK(allocations_while_stepping<zero::InProcessCommunicator>(world, zero::Replicated{}) == 0);
    CHECK(allocations_while_stepping<CollectivesOnly>(world, zero::Stage1{}) == 0);
    CHECK(allocations_while_stepping<CollectivesOnly>(world, zero::Replicated{}) == 0);
    using Half = zero::bfloat16;
    using Shared = zero::InProcessCommunicator;
    CHECK(allocations_while_stepping<Shared, Half>(world, zero::Stage1{}) == 0);
    CHECK(allocations_while_stepping<CollectivesOnly, Half>(world, zero::Stage1{}) == 0);
    CHECK(allocations_while_stepping<CollectivesOnly, Half>(world, zero::Replicated{}, zero::Lamb{},
                                                            zero::BalancedPartition{}) == 0);
  }
}

TEST_CASE("stages 2 and 3 allocate nothing either") {
  for (const int world : {1, 2, 4}) {
    CHECK(allocations_while_leasing(world, zero::Stage2{}) == 0);
    CHECK(allocations_while_leasing(world, zero::Stage3{}) == 0);
    CHECK(allocations_while_leasing(world, zero::Stage3{.prefetch = 3}) == 0);
  }
}

TEST_CASE("serving the steps of others allocates nothing") {
  CHECK(allocations_while_serving<zero::InProcessCommunicator>() == 0);
  CHECK(allocations_while_serving<CollectivesOnly>() == 0);
}

TEMPLATE_TEST_CASE("whole-tensor optimizers allocate nothing", "", zero::Lamb, zero::Muon) {
  const TestType optimizer;
  const std::array<std::size_t, 2> shape{90, 70};
  std::vector<float> values(6300, 1.0F), gradient(6300, 0.5F);
  std::vector<float> workspace(zero::workspace_elements(optimizer, shape));
  std::array<std::vector<float>, TestType::slots.size()> state;
  std::array<std::span<float>, TestType::slots.size()> slots;
  for (std::size_t i = 0; i < slots.size(); ++i) {
    state[i].resize(6300);
    slots[i] = state[i];
  }
  allocations = 0;
  counting = true;
  optimizer.update(zero::TensorRef<float>{shape, values, gradient, workspace}, slots, 1);
  counting = false;
  CHECK(allocations == 0);
}
