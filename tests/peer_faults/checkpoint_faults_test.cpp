// SPDX-License-Identifier: Apache-2.0
// Faults in saving and loading that other projects shipped, with their inputs and the right values.
// DS is DeepSpeed, FS fairscale, LC llm.c, MC Megatron-Core, PT pytorch/pytorch. (The rows on
// malformed files: safetensors_test.cpp.)
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <mutex>
#include <new>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "catch.hpp"
#include "checkpoint/folder.hpp"
#include "ranks.hpp"
#include "zero/checkpoint.hpp"
#include "zero/optim/adam.hpp"
#include "zero/partition/balanced.hpp"

namespace {

/// Bytes from `new` at the same time, and the most that there were.
std::atomic<std::size_t> allocated{0};
std::atomic<std::size_t> most_allocated{0};

constexpr std::size_t header = 2 * sizeof(std::max_align_t);

void* allocate(std::size_t bytes) {
  void* const memory = std::malloc(bytes + header);
  if (memory == nullptr) throw std::bad_alloc();
  *static_cast<std::size_t*>(memory) = bytes;
  const std::size_t now = allocated += bytes;
  std::size_t most = most_allocated;
  while (most < now && !most_allocated.compare_exchange_weak(most, now)) {
  }
  return static_cast<char*>(memory) + header;
}
void deallocate(void* memory) noexcept {
  if (memory == nullptr) return;
  void* const begin = static_cast<char*>(memory) - header;
  allocated -= *static_cast<std::size_t*>(begin);
  std::free(begin);
}

}  // namespace

void* operator new(std::size_t bytes) { return allocate(bytes); }
void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept {
  try {
    return allocate(bytes);
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}
void operator delete(void* memory) noexcept { deallocate(memory); }
void operator delete(void* memory, std::size_t) noexcept { deallocate(memory); }

namespace {

using checkpoints::Folder;
using ranks::Model;
using zero::BalancedPartition;
using zero::ContiguousPartition;

/// What all ranks together keep, by "name.slot" and as bytes.
using State = std::map<std::string, std::string>;

/// Parameters of sizes that no world divides; "often" is stepped each time, "seldom" every second.
Model<> make_model(std::uint32_t seed) {
  Model<> model;
  model.emplace_back("often", std::vector<std::size_t>{13, 77});
  model.emplace_back("frozen", std::vector<std::size_t>{31}, zero::Attributes{.frozen = true});
  model.emplace_back("seldom", std::vector<std::size_t>{101}, zero::Attributes{}, 1);
  ranks::draw_values(model, seed);
  return model;
}

template <class Partition>
struct Rank {
  using Comm = zero::InProcessCommunicator;
  using Optimizer = zero::ZeroSharded<zero::Adam, Model<>&, Comm&, Partition, zero::NoView>;

  Rank(Comm& comm, double step_size, std::uint32_t seed)
      : model(make_model(seed)),
        optimizer(zero::Groups(zero::Adam{.lr = step_size}, zero::Adam{.lr = 2 * step_size}), model,
                  comm, zero::NoView{256},
                  zero::Settings{.gradients = zero::Gradients::reduced, .poison_padding = true}) {}

  void step(int number) {
    ranks::draw_gradients(model, 0, number);
    if (number % 2 == 1) optimizer.mark_absent(2);
    optimizer.step();
  }
  /// Adds what this rank keeps, in its place.
  void add_to(State& all) {
    for (const ranks::Tensor<float>& tensor : model) {
      all[tensor.name()] = ranks::bytes_of(tensor.values());
    }
    for (const auto& slice : optimizer.state()) {
      std::string& slot = all[std::string(slice.parameter) + "." + std::string(slice.slot)];
      const std::string part = ranks::bytes_of(slice.values);
      const std::size_t begin = slice.elements.begin * sizeof(float);
      if (slot.size() < begin + part.size()) slot.resize(begin + part.size());
      slot.replace(begin, part.size(), part);
    }
    all["steps"] = std::to_string(optimizer.steps()) + " " + std::to_string(optimizer.steps(0)) +
                   " " + std::to_string(optimizer.steps(2));
  }

  Model<> model;
  Optimizer optimizer;
};

/// `f(rank)` on `world` ranks, and what they keep then.
template <class Partition, class F>
State run(int world, double step_size, std::uint32_t seed, F&& f) {
  State all;
  std::mutex mutex;
  zero::run_ranks(world, [&](auto& comm) {
    Rank<Partition> rank(comm, step_size, seed);
    f(rank);
    const std::scoped_lock lock(mutex);
    rank.add_to(all);
  });
  return all;
}

constexpr int saved_after = 3;
constexpr double lr = 0.01;

/// Saved by 4 ranks.
void save_run(const std::filesystem::path& folder) {
  run<ContiguousPartition>(4, lr, 1, [&](auto& rank) {
    for (int s = 0; s < saved_after; ++s) rank.step(s);
    zero::save(rank.optimizer, folder);
  });
}
/// Of a run that doesn't stop.
State uninterrupted(int steps) {
  return run<ContiguousPartition>(1, lr, 1, [&](auto& rank) {
    for (int s = 0; s < steps; ++s) rank.step(s);
  });
}

template <class Partition>
void check_loaded(const std::filesystem::path& folder, int world) {
  for (const int more : {0, 1, 2}) {
    const State got = run<Partition>(world, 5, 9, [&](auto& rank) {
      zero::load(rank.optimizer, folder);
      for (int s = 0; s < more; ++s) rank.step(saved_after + s);
    });
    INFO(world << " ranks, " << more << " more steps");
    CHECK(got == uninterrupted(saved_after + more));
  }
}

TEST_CASE("DS #2898, #3810, PT #65650, LC; DS #5105; PT #124133: another world size loads it all") {
  const Folder folder;
  save_run(folder / "saved");
  // Every element of every slot, and the next steps, which the step counts take part in.
  for (const int world : {3, 8, 1}) {
    check_loaded<ContiguousPartition>(folder / "saved", world);
    check_loaded<BalancedPartition>(folder / "saved", world);
  }
}

TEST_CASE("MC #659: padding depends on the world size, and is never stored") {
  for (const int world : {16, 24, 32}) {
    for (const std::size_t quantum : {1, 7, 40}) {
      const Folder folder;
      std::size_t lane = 0;
      zero::run_ranks(world, [&](auto& comm) {
        Model<> model;
        model.emplace_back("p", std::vector<std::size_t>{1000},
                           zero::Attributes{.quantum = quantum});
        ranks::draw_values(model);
        zero::ZeroSharded optimizer{zero::Adam{}, model, comm, zero::NoView{1 << 20},
                                    zero::Settings{.poison_padding = true}};
        ranks::draw_gradients(model, comm.rank(), 0);
        optimizer.step();
        zero::save(optimizer, folder / "saved");
        if (comm.rank() == 0) lane = optimizer.layout().extent(0);
      });
      INFO(world << " ranks, quantum " << quantum);
      CHECK(lane - 1000 <= static_cast<std::size_t>(world) * 64 / sizeof(float));
      const zero::Checkpoint saved(folder / "saved");
      std::map<std::size_t, std::size_t> elements;
      saved.for_each_piece([&](std::size_t, std::size_t array, const auto& piece, std::uint64_t) {
        elements[array] += piece.elements.size();
      });
      CHECK(elements ==
            std::map<std::size_t, std::size_t>{{zero::Checkpoint::values, 1000},
                                               {zero::Checkpoint::first_slot, 1000},
                                               {zero::Checkpoint::first_slot + 1, 1000}});
    }
  }
}

TEST_CASE("PT #54736: what was loaded from is byte-identical afterwards") {
  const Folder folder;
  save_run(folder / "saved");
  const auto before = checkpoints::files_of(folder / "saved");
  run<ContiguousPartition>(2, lr, 9, [&](auto& rank) {
    zero::load(rank.optimizer, folder / "saved");
    rank.step(saved_after);
  });
  CHECK(checkpoints::files_of(folder / "saved") == before);
}

TEST_CASE("DS #3090: frozen weights come back, without any state") {
  const Folder folder;
  save_run(folder / "saved");
  const State loaded = run<ContiguousPartition>(
      3, lr, 9, [&](auto& rank) { zero::load(rank.optimizer, folder / "saved"); });
  CHECK(loaded.at("frozen") == ranks::bytes_of(make_model(1)[1].values()));
  CHECK(loaded.at("frozen") != ranks::bytes_of(make_model(9)[1].values()));
  const zero::Checkpoint saved(folder / "saved");
  std::size_t bytes = 0;
  saved.for_each_piece([&](std::size_t i, std::size_t array, const auto&, std::uint64_t size) {
    if (i == 1 && array != zero::Checkpoint::values) bytes += size;
  });
  CHECK(bytes == 0);
}

TEST_CASE(
    "libtorch #15792, #125215: a second load is as the first, and groups' options come back") {
  const Folder folder;
  save_run(folder / "saved");
  const State twice = run<ContiguousPartition>(2, 5, 9, [&](auto& rank) {
    zero::load(rank.optimizer, folder / "saved");
    zero::load(rank.optimizer, folder / "saved");
    const auto groups = rank.optimizer.groups();
    if (groups[0].lr != lr || groups[1].lr != 2 * lr) throw std::runtime_error("options");
  });
  CHECK(twice == uninterrupted(saved_after));
}

TEST_CASE("Lightning #10745: one call saves, without any collective before") {
  const Folder folder;
  run<ContiguousPartition>(3, lr, 1,
                           [&](auto& rank) { zero::save(rank.optimizer, folder / "saved"); });
  const State loaded = run<ContiguousPartition>(
      2, 5, 9, [&](auto& rank) { zero::load(rank.optimizer, folder / "saved"); });
  CHECK(loaded == uninterrupted(0));
}

TEST_CASE("PT #68181, FS #937: consolidation takes at most two buckets more a rank") {
  constexpr int world = 2;
  constexpr std::size_t bucket = 2 << 20;
  constexpr std::size_t elements = 4 << 20;  // 16 MiB, and as much for each of two slots
  const Folder folder;
  std::size_t before = 0, most = 0;
  zero::run_ranks(world, [&](auto& comm) {
    Model<> model;
    model.emplace_back("p", std::vector<std::size_t>{elements});
    zero::ZeroSharded optimizer{zero::Adam{}, model, comm, zero::NoView{bucket}};
    comm.barrier().wait();
    if (comm.rank() == 0) {
      before = allocated;
      most_allocated = before;
    }
    comm.barrier().wait();
    zero::consolidate(optimizer, folder / "whole.safetensors");
    comm.barrier().wait();
    if (comm.rank() == 0) most = most_allocated;
  });
  CHECK(most - before <= world * 2 * bucket);
  const zero::Checkpoint whole(folder / "whole.safetensors");
  CHECK(whole.bytes() >= 3 * elements * sizeof(float));
}

}  // namespace
