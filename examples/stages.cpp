// One training loop at stages 1, 2 and 3: a model of eight layers, each a unit, over four ranks.
#include <cstdio>
#include <string>
#include <string_view>
#include <vector>
#include <zero/zero.hpp>

template <class Stage, class View>
void train(const char* name, Stage stage, View view) {
  zero::run_ranks(4, [&](zero::InProcessCommunicator& comm) {
    // Names and shapes; the optimizer has the memory.
    constexpr int layers = 8;
    std::vector<zero::ShapedParam<float>> weights;
    for (int layer = 0; layer < layers; ++layer) {
      weights.emplace_back("layer" + std::to_string(layer), std::vector<std::size_t>{65536},
                           zero::Attributes{.unit = layer});
    }
    zero::Settings settings;
    settings.initial_value = [](std::string_view, std::size_t) { return 1.0; };
    zero::ZeroSharded optimizer{zero::Adam{.lr = 1e-2}, weights, comm, stage, view, settings};

    double sum = 0;
    for (int step = 0; step < 20; ++step) {
      sum = 0;
      for (int layer = 0; layer < layers; ++layer) {  // forward
        optimizer.acquire(layer);
        for (const float w : weights[layer].values()) sum += w;
        optimizer.release(layer);
      }
      for (int layer = layers; layer-- > 0;) {  // backward
        optimizer.acquire(layer);
        {
          const auto lease = optimizer.gradient(layer);
          const auto values = weights[layer].values();
          for (std::size_t i = 0; i < values.size(); ++i) lease.values()[i] = values[i];
        }
        optimizer.mark_ready(layer);  // may be reduced from here on
        optimizer.release(layer);
      }
      optimizer.step();
    }
    if (comm.rank() != 0) return;
    const zero::MemoryReport memory = optimizer.memory();
    std::printf(
        "%s: sum %.6f; bytes: state %zu, values %zu, gradients %zu, at most %zu pooled "
        "and %zu gathered\n",
        name, sum, memory.state, memory.values, memory.gradients, memory.pooled_peak,
        memory.gathered_peak);
  });
}

int main() {
  using namespace zero::literals;
  train("stage 1", zero::Stage1{}, zero::ParamAndGradView{256_KiB});
  train("stage 2", zero::Stage2{}, zero::ParamView{256_KiB});
  train("stage 3", zero::Stage3{}, zero::ParamView{256_KiB});
}
