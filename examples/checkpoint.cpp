// SPDX-License-Identifier: Apache-2.0
// Saved by two ranks, loaded by three into a model that is made of the checkpoint alone, then by
// four that train on: the same bits each time.
#include <cstddef>
#include <cstdio>
#include <filesystem>
#include <vector>
#include <zero/checkpoint.hpp>
#include <zero/zero.hpp>

namespace {

const std::filesystem::path folder = std::filesystem::temp_directory_path() / "zero-example";

/// Steps 1 to 20; those to `first` were gone before.
float train(zero::InProcessCommunicator& comm, int first, int last) {
  std::vector<float> weights(1000, 1.0F), gradient(1000);
  std::vector store{zero::ParamRef("weights", weights, gradient)};
  zero::ZeroSharded optimizer{zero::Adam{.lr = 0.1}, store, comm};
  if (first > 0) zero::load(optimizer, folder);
  for (int step = first; step < last; ++step) {
    for (std::size_t i = 0; i < weights.size(); ++i) gradient[i] = weights[i] - 0.5F;
    optimizer.step();
  }
  if (last < 20) zero::save(optimizer, folder);
  return weights[0];
}

/// No rank ever has memory for all values.
float read_at_stage_3(zero::InProcessCommunicator& comm) {
  auto store = zero::shaped_params<float>(zero::Checkpoint(folder).info());
  zero::Settings settings;
  settings.initial_value = zero::to_be_loaded;
  zero::ZeroSharded optimizer{zero::Adam{}, store, comm, zero::Stage3{}, settings};
  zero::load(optimizer, folder);
  optimizer.acquire(0);
  const float first = store[0].values()[0];
  optimizer.release(0);
  return first;
}

}  // namespace

int main() {
  float whole = 0, half = 0, resumed = 0, made = 0;
  zero::run_ranks(1, [&](auto& comm) { whole = train(comm, 0, 20); });
  const auto on_rank_0 = [](auto& comm, float& result, float value) {
    if (comm.rank() == 0) result = value;
  };
  zero::run_ranks(2, [&](auto& comm) { on_rank_0(comm, half, train(comm, 0, 10)); });
  zero::run_ranks(3, [&](auto& comm) { on_rank_0(comm, made, read_at_stage_3(comm)); });
  zero::run_ranks(4, [&](auto& comm) { on_rank_0(comm, resumed, train(comm, 10, 20)); });
  std::filesystem::remove_all(folder);
  std::printf("after 10 steps %.6f, loaded at stage 3: %.6f\n", half, made);
  std::printf("after 20 steps %.6f, of which 10 on other ranks: %.6f\n", whole, resumed);
  return half == made && whole == resumed ? 0 : 1;
}
