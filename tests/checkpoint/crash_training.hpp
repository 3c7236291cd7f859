// SPDX-License-Identifier: Apache-2.0
// A small training whose state after each step is known to the bit, and folders that it saves to.
#pragma once

#include <cstddef>
#include <exception>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "checkpoint/folder.hpp"
#include "ranks.hpp"
#include "zero/checkpoint.hpp"
#include "zero/optim/adam.hpp"

namespace training {

namespace fs = std::filesystem;

/// A folder's files and what they hold.
using Files = std::map<std::string, std::string>;
inline Files files_of(const fs::path& folder) {
  Files files;
  for (const auto& entry : fs::directory_iterator(folder)) {
    files[entry.path().filename().string()] = checkpoints::text_of_file(entry.path());
  }
  return files;
}
/// Makes it hold these and nothing else.
inline void put_files(const fs::path& folder, const Files& files) {
  fs::remove_all(folder);
  fs::create_directories(folder);
  for (const auto& [name, text] : files) checkpoints::make_file(folder / name, text);
}

inline ranks::Model<> make_model() {
  ranks::Model<> model;
  model.emplace_back("a", std::vector<std::size_t>{20});
  model.emplace_back("b", std::vector<std::size_t>{5}, zero::Attributes{.frozen = true});
  model.emplace_back("c", std::vector<std::size_t>{3, 5});
  ranks::draw_values(model);
  return model;
}

/// `f(rank, model, optimizer)` on each of so many ranks; throws what one of them throws.
template <class F>
void on_ranks(int world, F&& f) {
  using Way = ranks::Way<true, zero::Stage1, zero::NoView>;
  ranks::rethrow_any(ranks::run(world, [&](zero::InProcessCommunicator& inner) {
    ranks::Model<> model = make_model();
    auto comm = Way::wrap(inner);
    auto optimizer = Way::optimizer(zero::Adam{.amsgrad = true}, model, comm);
    f(inner.rank(), model, optimizer);
  }));
}

/// Steps up to step number `last`.
template <class Optimizer>
void train(ranks::Model<>& model, Optimizer& optimizer, int rank, int last) {
  while (optimizer.steps() < last) {
    ranks::draw_gradients(model, rank, static_cast<int>(optimizer.steps()));
    optimizer.step();
  }
}

/// Of each rank.
using Snapshots = std::vector<std::string>;

/// After step number `step` of an uninterrupted training.
inline Snapshots after(int world, int step) {
  Snapshots snapshots(static_cast<std::size_t>(world));
  on_ranks(world, [&](int rank, auto& model, auto& optimizer) {
    train(model, optimizer, rank, step);
    snapshots[static_cast<std::size_t>(rank)] = ranks::snapshot(model, optimizer);
  });
  return snapshots;
}

/// After a load by so many ranks.
inline Snapshots loaded(int world, const fs::path& path) {
  Snapshots snapshots(static_cast<std::size_t>(world));
  on_ranks(world, [&](int rank, auto& model, auto& optimizer) {
    zero::load(optimizer, path);
    snapshots[static_cast<std::size_t>(rank)] = ranks::snapshot(model, optimizer);
  });
  return snapshots;
}

/// Saves what so many ranks have after step number `step`.
inline void save_step(int world, int step, const fs::path& folder) {
  on_ranks(world, [&](int rank, auto& model, auto& optimizer) {
    train(model, optimizer, rank, step);
    zero::save(optimizer, folder);
  });
}

/// What `f` throws as a CheckpointError; told in words where it throws nothing or another.
template <class F>
std::string refusal_of(F&& f) {
  try {
    f();
  } catch (const zero::CheckpointError& error) {
    return error.what();
  } catch (const std::exception& error) {
    return std::string("another exception: ") + error.what();
  }
  return "nothing was thrown";
}

}  // namespace training
