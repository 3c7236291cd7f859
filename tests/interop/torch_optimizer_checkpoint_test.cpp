// SPDX-License-Identifier: Apache-2.0
// Checkpoints of libtorch's optimizers: at other world sizes, from and to zero's own optimizers of
// the same name, and as PyTorch's state.
#include <zero/checkpoint/load.hpp>
#include <zero/checkpoint/save.hpp>
#include <zero/checkpoint/torch.hpp>
#include <zero/interop/torch/optimizer.hpp>
#include <zero/optim/adam.hpp>
#include <zero/optim/sgd.hpp>
#include <zero/partition/balanced.hpp>
#include <zero/zero_sharded.hpp>

#include <ATen/Parallel.h>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "../checkpoint/folder.hpp"
#include "../ranks.hpp"
#include "catch.hpp"

namespace {

using Catch::Matchers::ContainsSubstring;
using ::torch::optim::Adam, ::torch::optim::SGD;
using zero::TorchOptimizer;

/// Three parameters in two groups; the last one has no gradient before step 2.
struct Model {
  std::vector<std::vector<float>> values{{1, 2, 3, 4, 5, 6}, {.5F}, {-1, 1, 2}};
  std::vector<std::vector<float>> gradients{{0, 0, 0, 0, 0, 0}, {0}, {0, 0, 0}};

  [[nodiscard]] std::vector<zero::ParamRef<float>> store() {
    return {{"matrix", {2, 3}, values[0].data(), gradients[0].data()},
            {"scalar", {}, values[1].data(), gradients[1].data(), {}, 1},
            {"late", {3}, values[2].data(), gradients[2].data(), {}, 1}};
  }
};

/// What all ranks together keep.
struct Result {
  std::vector<std::vector<float>> values;
  std::map<std::string, std::vector<float>> state;  ///< by slot and parameter
  std::vector<std::int64_t> steps;
  std::map<std::string, double> options;  ///< of group 1
};
bool operator==(const Result& a, const Result& b) {
  return a.values == b.values && a.state == b.state && a.steps == b.steps && a.options == b.options;
}

struct Plan {
  int ranks = 1;
  std::size_t first_step = 0, last_step = 0;
  std::filesystem::path load = {}, load_torch = {}, save = {};
};

/// Loads, steps and saves, as planned. Every rank has the same gradients, so their mean is the same
/// at any world size.
template <class Opt>
Result run(const std::vector<Opt>& groups, const Plan& plan, const Model& from = {}) {
  std::vector<Result> results(static_cast<std::size_t>(plan.ranks));
  ranks::rethrow_any(ranks::run(plan.ranks, [&](zero::InProcessCommunicator& comm) {
    at::set_num_threads(1);
    Model model = from;
    auto store = model.store();
    zero::ZeroSharded sharded{zero::Groups<Opt>{groups}, store, comm, zero::BalancedPartition{},
                              zero::Settings{.gradients = zero::Gradients::reduced}};
    if (!plan.load.empty()) zero::load(sharded, plan.load);
    if (!plan.load_torch.empty()) zero::load_torch(sharded, plan.load_torch);
    for (std::size_t step = plan.first_step; step < plan.last_step; ++step) {
      for (std::size_t i = 0; i < model.gradients.size(); ++i) {
        for (std::size_t e = 0; e < model.gradients[i].size(); ++e) {
          model.gradients[i][e] = 0.1F * static_cast<float>(step * 7 + i * 3 + e) - 0.7F;
        }
      }
      if (step < 2) sharded.mark_absent(2);
      sharded.step();
    }
    if (!plan.save.empty()) zero::save(sharded, plan.save);
    Result& mine = results[static_cast<std::size_t>(comm.rank())];
    mine.values = model.values;
    for (const auto& slice : sharded.state()) {
      mine.state[std::string(slice.slot) + " of " + std::string(slice.parameter)].assign(
          slice.values.begin(), slice.values.end());
    }
    for (std::size_t i = 0; i < store.size(); ++i) mine.steps.push_back(sharded.steps(i));
    Opt::for_each_option(sharded.groups()[1], [&](const char* name, const auto& option) {
      mine.options[name] = static_cast<double>(option);
    });
  }));
  Result all = results[0];
  for (const Result& result : results) all.state.insert(result.state.begin(), result.state.end());
  return all;
}

/// The model after `result`, for PyTorch's state, which has no values.
Model model_of(const Result& result) {
  Model model;
  model.values = result.values;
  return model;
}

const std::vector<TorchOptimizer<Adam>> adams{
    {::torch::optim::AdamOptions(.1).weight_decay(.1)},
    {::torch::optim::AdamOptions(.2).betas({.8, .98}).amsgrad(true)}};
const std::vector<TorchOptimizer<Adam>> other_adams{{::torch::optim::AdamOptions()},
                                                    {::torch::optim::AdamOptions().amsgrad(true)}};
const std::vector<TorchOptimizer<SGD>> sgds{
    {::torch::optim::SGDOptions(.1).momentum(.9).nesterov(true)},
    {::torch::optim::SGDOptions(.2).momentum(.8).dampening(.5)}};
const std::vector<TorchOptimizer<SGD>> other_sgds{{::torch::optim::SGDOptions(1).momentum(.1)},
                                                  {::torch::optim::SGDOptions(1).momentum(.1)}};

}  // namespace

TEST_CASE("torch checkpoint: two ranks save, three go on") {
  const checkpoints::Folder folder;
  const Result whole = run(adams, {.ranks = 1, .last_step = 5});
  (void)run(adams, {.ranks = 2, .last_step = 3, .save = folder / "saved"});
  const Result resumed =
      run(other_adams, {.ranks = 3, .first_step = 3, .last_step = 5, .load = folder / "saved"});
  CHECK((resumed == whole));
  CHECK(whole.steps == std::vector<std::int64_t>{5, 5, 3});
}

TEST_CASE("torch checkpoint: zero's Adam and Sgd load libtorch's, and the other way round") {
  const checkpoints::Folder folder;
  const auto go = [&](const auto& groups, const auto& others) {
    const Result saved = run(groups, {.ranks = 2, .last_step = 3, .save = folder / "saved"});
    const Result loaded = run(others, {.ranks = 1, .load = folder / "saved"});
    CHECK((loaded == saved));
    std::filesystem::remove_all(folder / "saved");
  };
  using zero::Sgd;
  const std::vector<zero::Adam> own_adams{{.lr = .3, .maximize = true}, {.amsgrad = true}};
  const std::vector<Sgd> own_sgds{{.lr = .3, .momentum = .7},
                                  {.momentum = .6, .dampening = .2, .maximize = true}};
  go(adams, own_adams);
  go(own_adams, other_adams);
  go(sgds, own_sgds);
  go(own_sgds, other_sgds);
}

TEST_CASE("torch checkpoint: PyTorch's state and back") {
  const checkpoints::Folder folder;
  const auto go = [&](const auto& groups, const auto& others, const std::string& name) {
    const Result whole = run(groups, {.ranks = 1, .last_step = 5});
    const Result saved = run(groups, {.ranks = 2, .last_step = 3, .save = folder / name});
    const zero::Checkpoint checkpoint(folder / name);
    zero::save_torch(checkpoint, folder / (name + ".safetensors"));
    const Plan plan{.ranks = 2,
                    .first_step = 3,
                    .last_step = 5,
                    .load_torch = folder / (name + ".safetensors")};
    Result resumed = run(others, plan, model_of(saved));
    if (name == "sgd") resumed.steps = whole.steps;  // which PyTorch's SGD doesn't count
    CHECK((resumed == whole));
  };
  go(adams, other_adams, "adam");
  go(sgds, other_sgds, "sgd");
}

TEST_CASE("torch checkpoint: of another optimizer it is refused") {
  const checkpoints::Folder folder;
  (void)run(sgds, {.ranks = 1, .last_step = 1, .save = folder / "saved"});
  const Plan load{.ranks = 1, .load = folder / "saved"};
  CHECK_THROWS_AS(run(other_adams, load), zero::CheckpointError);
  CHECK_THROWS_WITH(run(other_adams, load),
                    ContainsSubstring("\"Sgd\"") && ContainsSubstring("\"Adam\""));
}
