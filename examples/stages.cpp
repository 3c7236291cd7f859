// SPDX-License-Identifier: Apache-2.0
// One training loop for every stage: the same numbers, and less and less on a rank.
#include <cstddef>
#include <cstdio>
#include <string>
#include <string_view>
#include <vector>
#include <zero/zero.hpp>

namespace {

using namespace zero::literals;

constexpr int layers = 8;
constexpr std::size_t width = 512;

/// What a rank has left at the end.
struct Result {
  zero::MemoryReport memory{};
  float weight = 0;
};

/// A model of layers that come one after the other, each a unit: w[i] is drawn to i / width.
template <class Stage>
Result train(zero::InProcessCommunicator& comm, Stage stage) {
  // Names and shapes: nobody ever needs memory for the whole model.
  std::vector<zero::ShapedParam<float>> parameters;
  for (int layer = 0; layer < layers; ++layer) {
    parameters.emplace_back("layer" + std::to_string(layer), std::vector<std::size_t>{width, width},
                            zero::Attributes{.unit = layer});
  }
  zero::Settings settings;
  settings.initial_value = [](std::string_view, std::size_t element) {
    return 1.0 / static_cast<double>(1 + element % 100);
  };
  zero::ZeroSharded optimizer{zero::Adam{.lr = 0.1},         parameters, comm, stage,
                              zero::ParamAndGradView{1_MiB}, settings};

  std::vector<float> activation(width);
  for (int step = 0; step < 20; ++step) {
    for (int layer = 0; layer < layers; ++layer) {  // forward
      optimizer.acquire(layer);
      const auto weights = parameters[static_cast<std::size_t>(layer)].values();
      for (std::size_t i = 0; i < width; ++i) activation[i] += weights[i * width];
      optimizer.release(layer);
    }
    for (int layer = layers; layer-- > 0;) {  // backward
      const auto i = static_cast<std::size_t>(layer);
      optimizer.acquire(layer);
      {
        const auto weights = parameters[i].values();
        const auto gradient = optimizer.gradient(i);  // where to write it
        for (std::size_t e = 0; e < weights.size(); ++e) {
          const float wanted = static_cast<float>(e % width) / width;
          gradient.values()[e] = weights[e] - wanted + 0.01F * static_cast<float>(comm.rank());
        }
      }
      optimizer.mark_ready(i);  // on its way to the peers from here on, at stages 2 and 3
      optimizer.release(layer);
    }
    optimizer.step();
  }
  Result result{optimizer.memory()};
  optimizer.acquire(0);
  result.weight = parameters[0].values()[width - 1];
  optimizer.release(0);
  return result;
}

void print(const char* stage, const Result& of) {
  const auto mega = [](std::size_t bytes) { return static_cast<double>(bytes) / 1e6; };
  std::printf("%-8s %7.2f %10.2f %6.2f %6.2f %9.2f   %.6f\n", stage, mega(of.memory.values),
              mega(of.memory.gradients), mega(of.memory.state), mega(of.memory.pooled_peak),
              mega(of.memory.gathered_peak), static_cast<double>(of.weight));
}

}  // namespace

int main() {
  zero::run_ranks(4, [](zero::InProcessCommunicator& comm) {
    const Result one = train(comm, zero::Stage1{});
    const Result two = train(comm, zero::Stage2{});
    const Result three = train(comm, zero::Stage3{});
    const Result few = train(comm, zero::Stage3{.resident_bytes = 2_MiB, .prefetch = 0});
    if (comm.rank() != 0) return;
    std::puts("MB of one of 4 ranks; a layer is 1.05, all of them 8.39");
    std::puts("stage     values  gradients  state   pool  gathered   weight");
    std::puts("                                  at most   at most");
    print("1", one);
    print("2", two);
    print("3", three);
    print("3, kept", few);
  });
}
