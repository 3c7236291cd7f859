// SPDX-License-Identifier: Apache-2.0
// Saved by two ranks, loaded by three into a model that is made of the checkpoint alone, then by
// four that train on: the same bits each time.
#include <cstddef>
#include <cstdio>
#include <filesystem>
#include <string>
#include <vector>
#include <zero/checkpoint.hpp>
#include <zero/zero.hpp>

namespace {

const std::filesystem::path folder = std::filesystem::temp_directory_path() / "zero-example";
constexpr int layers = 10;
constexpr std::size_t width = 100;

/// Steps 1 to 20; those to `first` were gone before.
float train(zero::InProcessCommunicator& comm, int first, int last) {
  std::vector weights(layers, std::vector<float>(width, 1.0F)), gradients = weights;
  std::vector<zero::ParamRef<float>> store;
  for (int l = 0; l < layers; ++l) {
    const auto i = static_cast<std::size_t>(l);
    store.emplace_back("layer" + std::to_string(l), weights[i], gradients[i],
                       zero::Attributes{.unit = l});  // saved, too: stage 3 gathers a layer at once
  }
  zero::ZeroSharded optimizer{zero::Adam{.lr = 0.1}, store, comm};
  if (first > 0) zero::load(optimizer, folder);
  for (int step = first; step < last; ++step) {
    for (std::size_t l = 0; l < layers; ++l) {
      for (std::size_t e = 0; e < width; ++e) gradients[l][e] = weights[l][e] - 0.5F;
    }
    optimizer.step();
  }
  if (last < 20) zero::save(optimizer, folder);
  return weights[0][0];
}

struct Made {
  float value = 0;
  std::size_t bytes = 0;
};
/// No rank ever has memory for all values: its own part of them, and what layers are gathered.
Made read_at_stage_3(zero::InProcessCommunicator& comm) {
  auto store = zero::shaped_params<float>(zero::Checkpoint(folder).info());
  zero::Settings settings;
  settings.initial_value = zero::to_be_loaded;
  zero::ZeroSharded optimizer{zero::Adam{}, store, comm, zero::Stage3{}, settings};
  zero::load(optimizer, folder);
  Made made;
  for (int l = layers - 1; l >= 0; --l) {
    optimizer.acquire(l);
    made.value = store[static_cast<std::size_t>(l)].values()[0];
    optimizer.release(l);
  }
  made.bytes = optimizer.memory().values + optimizer.memory().gathered_peak;
  return made;
}

}  // namespace

int main() {
  float whole = 0, half = 0, resumed = 0;
  Made made;
  zero::run_ranks(1, [&](auto& comm) { whole = train(comm, 0, 20); });
  const auto on_rank_0 = [](auto& comm, auto& result, auto value) {
    if (comm.rank() == 0) result = value;
  };
  zero::run_ranks(2, [&](auto& comm) { on_rank_0(comm, half, train(comm, 0, 10)); });
  zero::run_ranks(3, [&](auto& comm) { on_rank_0(comm, made, read_at_stage_3(comm)); });
  zero::run_ranks(4, [&](auto& comm) { on_rank_0(comm, resumed, train(comm, 10, 20)); });
  std::filesystem::remove_all(folder);
  constexpr std::size_t all = layers * width * sizeof(float);
  std::printf("after 10 steps %.6f, loaded at stage 3: %.6f, in %zu bytes of %zu\n", half,
              made.value, made.bytes, all);
  std::printf("after 20 steps %.6f, of which 10 on other ranks: %.6f\n", whole, resumed);
  return half == made.value && whole == resumed && made.bytes < all ? 0 : 1;
}
