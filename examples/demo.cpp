// The main job: the same network trained on four ranks with its optimizer replicated, then sharded.
// Losses and weights agree to the last bit; memory and time are printed side by side.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <vector>
#include <zero/zero.hpp>

namespace {

constexpr int ranks = 4;
constexpr int steps = 40;
constexpr std::size_t batch = 8;
const std::vector<std::size_t> widths{64, 512, 512, 512, 16};

/// One fully connected layer with its gradient; activations are `batch` rows.
struct Layer {
  std::size_t inputs, outputs;
  std::vector<float> weight, bias, weight_gradient, bias_gradient, output, output_gradient;

  Layer(std::size_t in, std::size_t out, std::mt19937& random)
      : inputs(in),
        outputs(out),
        weight(in * out),
        bias(out),
        weight_gradient(in * out),
        bias_gradient(out),
        output(batch * out),
        output_gradient(batch * out) {
    std::normal_distribution<float> normal(0.0F, std::sqrt(2.0F / static_cast<float>(in)));
    for (float& w : weight) w = normal(random);
  }

  void forward(const std::vector<float>& input, bool relu) {
    for (std::size_t row = 0; row < batch; ++row) {
      float* out = output.data() + row * outputs;
      std::copy(bias.begin(), bias.end(), out);
      for (std::size_t i = 0; i < inputs; ++i) {
        const float x = input[row * inputs + i];
        const float* w = weight.data() + i * outputs;
        for (std::size_t o = 0; o < outputs; ++o) out[o] += x * w[o];
      }
      if (relu) std::transform(out, out + outputs, out, [](float x) { return std::max(x, 0.0F); });
    }
  }

  /// From output_gradient (of the values before the relu) to the parameters' and the input's.
  void backward(const std::vector<float>& input, std::vector<float>* input_gradient) {
    std::fill(weight_gradient.begin(), weight_gradient.end(), 0.0F);
    std::fill(bias_gradient.begin(), bias_gradient.end(), 0.0F);
    for (std::size_t row = 0; row < batch; ++row) {
      const float* g = output_gradient.data() + row * outputs;
      for (std::size_t o = 0; o < outputs; ++o) bias_gradient[o] += g[o];
      for (std::size_t i = 0; i < inputs; ++i) {
        const float x = input[row * inputs + i];
        float* wg = weight_gradient.data() + i * outputs;
        const float* w = weight.data() + i * outputs;
        float sum = 0;
        for (std::size_t o = 0; o < outputs; ++o) {
          wg[o] += x * g[o];
          sum += w[o] * g[o];
        }
        // The input came out of a relu: where it is 0, nothing flows back.
        if (input_gradient != nullptr) (*input_gradient)[row * inputs + i] = x > 0 ? sum : 0.0F;
      }
    }
  }
};

struct Network {
  std::vector<Layer> layers;

  explicit Network(unsigned seed) {
    std::mt19937 random(seed);
    for (std::size_t l = 0; l + 1 < widths.size(); ++l) {
      layers.emplace_back(widths[l], widths[l + 1], random);
    }
  }
  const std::vector<float>& forward(const std::vector<float>& input) {
    for (std::size_t l = 0; l < layers.size(); ++l) {
      layers[l].forward(l == 0 ? input : layers[l - 1].output, l + 1 < layers.size());
    }
    return layers.back().output;
  }
  /// Mean squared error; `ready(l)` is called as soon as layer l's gradients are complete.
  template <class Ready>
  float train(const std::vector<float>& input, const std::vector<float>& target, Ready&& ready) {
    const std::vector<float>& output = forward(input);
    float loss = 0;
    const auto count = static_cast<float>(output.size());
    for (std::size_t i = 0; i < output.size(); ++i) {
      const float error = output[i] - target[i];
      loss += error * error / count;
      layers.back().output_gradient[i] = 2 * error / count;
    }
    for (std::size_t l = layers.size(); l-- > 0;) {
      layers[l].backward(l == 0 ? input : layers[l - 1].output,
                         l == 0 ? nullptr : &layers[l - 1].output_gradient);
      ready(l);
    }
    return loss;
  }
};

struct Report {
  std::vector<float> losses;  // of rank 0
  std::vector<float> weights;
  std::size_t state_bytes = 0;  // the most that any rank keeps
  double step_ms = 0;           // median of rank 0's optimizer steps
};

template <class Stage>
Report train(Stage stage) {
  Report report;
  std::vector<std::size_t> state(ranks);
  zero::run_ranks(ranks, [&](zero::InProcessCommunicator& comm) {
    Network network(1);
    Network teacher(2);
    std::vector<zero::ParamRef<float>> parameters;
    for (std::size_t l = 0; l < network.layers.size(); ++l) {
      Layer& layer = network.layers[l];
      const std::string name = "layer" + std::to_string(l);
      parameters.emplace_back(name + ".weight", std::vector{layer.inputs, layer.outputs},
                              layer.weight.data(), layer.weight_gradient.data());
      parameters.emplace_back(name + ".bias", std::vector{layer.outputs}, layer.bias.data(),
                              layer.bias_gradient.data());
    }
    zero::ZeroSharded optimizer{zero::Adam{.lr = 1e-3}, parameters, comm, stage};

    std::mt19937 random(100 + static_cast<unsigned>(comm.rank()));  // each rank its own data
    std::normal_distribution<float> normal;
    std::vector<float> input(batch * widths.front());
    std::vector<double> times;
    for (int step = 0; step < steps; ++step) {
      std::generate(input.begin(), input.end(), [&] { return normal(random); });
      const std::vector<float> target = teacher.forward(input);
      const float loss = network.train(input, target, [&](std::size_t l) {
        optimizer.mark_ready(2 * l);
        optimizer.mark_ready(2 * l + 1);
      });
      comm.barrier().wait();  // so that waiting for a slower rank's backward is not timed
      const auto begin = std::chrono::steady_clock::now();
      optimizer.step();
      const std::chrono::duration<double, std::milli> took =
          std::chrono::steady_clock::now() - begin;
      times.push_back(took.count());
      if (comm.rank() == 0) report.losses.push_back(loss);
    }
    state[static_cast<std::size_t>(comm.rank())] = optimizer.memory().state;
    if (comm.rank() == 0) {
      std::nth_element(times.begin(), times.begin() + steps / 2, times.end());
      report.step_ms = times[steps / 2];
      for (const Layer& layer : network.layers) {
        report.weights.insert(report.weights.end(), layer.weight.begin(), layer.weight.end());
      }
    }
  });
  report.state_bytes = *std::max_element(state.begin(), state.end());
  return report;
}

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

}  // namespace

int main() {
  std::size_t parameters = 0;
  for (std::size_t l = 0; l + 1 < widths.size(); ++l) {
    parameters += (widths[l] + 1) * widths[l + 1];
  }
  std::printf("%zu parameters, Adam, %d ranks in this process, %d steps\n\n", parameters, ranks,
              steps);
  const Report replicated = train(zero::Replicated{});
  const Report sharded = train(zero::Stage1{});

  std::printf("  step   replicated      sharded\n");
  for (std::size_t step = 0; step < replicated.losses.size(); step += 13) {
    std::printf("  %4zu   loss %.5f   loss %.5f\n", step, replicated.losses[step],
                sharded.losses[step]);
  }
  std::printf("\n%-34s %12s %12s\n", "", "replicated", "sharded");
  std::printf("%-34s %12zu %12zu\n", "optimizer state, bytes per rank", replicated.state_bytes,
              sharded.state_bytes);
  std::printf("%-34s %12.2f %12.2f\n", "optimizer step, ms (median)", replicated.step_ms,
              sharded.step_ms);
  const unsigned cores = std::thread::hardware_concurrency();
  if (cores < ranks) {
    std::printf("(%d ranks take turns on %u cores, so the times say little)\n", ranks, cores);
  }
  const bool same = same_bits(replicated.losses, sharded.losses) &&
                    same_bits(replicated.weights, sharded.weights);
  const bool learned = sharded.losses.back() < 0.7F * sharded.losses.front();
  std::printf("\nlosses and weights: %s\n", same ? "the same, bit for bit" : "DIFFERENT");
  if (!learned) std::printf("the loss did not fall\n");
  return same && learned ? 0 : 1;
}
