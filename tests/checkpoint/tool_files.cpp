// SPDX-License-Identifier: Apache-2.0
// tool_files save FOLDER: what 3 ranks save after a few steps.
// tool_files damage FILE: changes its last byte.
// tool_files load PATH: loads it on 2 ranks, whatever form it has, and exits with 0 where all bits
// are those that were saved.
#include <zero/checkpoint.hpp>
#include <zero/optim/adam.hpp>
#include <zero/zero_sharded.hpp>

#include <cstdio>
#include <exception>
#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "../ranks.hpp"

namespace {

ranks::Model<> model_of() {
  ranks::Model<> model;
  model.emplace_back("body.weight", std::vector<std::size_t>{7, 5});
  model.emplace_back("body.bias", std::vector<std::size_t>{7});
  model.emplace_back("empty", std::vector<std::size_t>{0});
  model.emplace_back("table", std::vector<std::size_t>{3}, zero::Attributes{.frozen = true});
  model.emplace_back("head", std::vector<std::size_t>{}, zero::Attributes{}, 1);
  ranks::draw_values(model);
  return model;
}

template <class Model>
auto optimizer_of(Model& model, zero::InProcessCommunicator& comm) {
  return zero::ZeroSharded(
      zero::Groups{zero::AdamW{.lr = 0.01}, zero::AdamW{.lr = 0.1, .weight_decay = 0}}, model, comm,
      zero::NoView{64}, zero::Settings{.gradients = zero::Gradients::reduced});
}

/// All that was saved, on one rank of `world`: its whole model, and its part of the state.
template <class F>
std::vector<std::string> run(int world, int steps, const F& then) {
  std::vector<std::string> all(static_cast<std::size_t>(world));
  ranks::rethrow_any(ranks::run(world, [&](zero::InProcessCommunicator& comm) {
    auto model = model_of();
    auto optimizer = optimizer_of(model, comm);
    for (int step = 0; step < steps; ++step) {
      // The same on all ranks, and reduced: any number of them comes to the same state.
      ranks::draw_gradients(model, 0, step);
      optimizer.step();
    }
    then(optimizer);
    all[static_cast<std::size_t>(comm.rank())] = ranks::snapshot(model, optimizer);
  }));
  return all;
}

constexpr int steps = 4;

void damage(const std::filesystem::path& path) {
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  file.seekg(-1, std::ios::end);
  const int last = file.get();
  file.seekp(-1, std::ios::end);
  file.put(static_cast<char>(last ^ 1));
  if (!file.flush()) throw std::runtime_error(path.string() + " can't be changed");
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) {
    std::fputs("usage: tool_files save|load|damage PATH\n", stderr);
    return 2;
  }
  const std::filesystem::path path = argv[2];
  try {
    if (std::string_view(argv[1]) == "save") {
      run(3, steps, [&](auto& optimizer) { zero::save(optimizer, path, {{"epoch", "2"}}); });
      return 0;
    }
    if (std::string_view(argv[1]) == "damage") {
      damage(path);
      return 0;
    }
    const auto loaded = run(2, 0, [&](auto& optimizer) { zero::load(optimizer, path); });
    const auto trained = run(2, steps, [](auto&) {});
    if (loaded == trained) return 0;
    std::fputs("tool_files: other bits than were saved\n", stderr);
    return 1;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "tool_files: %s\n", error.what());
    return 1;
  }
}
