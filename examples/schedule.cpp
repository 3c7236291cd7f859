// A usual recipe: warm-up and cosine over two groups (AdamW, biases without weight decay), clipped
// gradients, and steps that are made of two micro-batches.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <numbers>
#include <random>
#include <vector>
#include <zero/zero.hpp>

#include "perceptron.hpp"

namespace {

constexpr int ranks = 2;
constexpr int steps = 60;
constexpr int warmup = 10;
constexpr int micro_batches = 2;
constexpr double peak_lr = 3e-3;
constexpr double max_norm = 2.5;

/// Rises in a line, falls in half a cosine.
double lr_at(int step) {
  if (step < warmup) return peak_lr * (step + 1) / warmup;
  const double done = static_cast<double>(step - warmup) / (steps - warmup);
  return peak_lr * 0.5 * (1 + std::cos(std::numbers::pi * done));
}

}  // namespace

int main() {
  bool good = true;
  zero::run_ranks(ranks, [&](zero::InProcessCommunicator& comm) {
    Perceptron network(1), teacher(2);
    zero::ZeroSharded optimizer{
        zero::Groups{zero::AdamW{.weight_decay = 0.01}, zero::AdamW{.weight_decay = 0}},
        network.tensors, comm,
        // Gradients are summed over ranks and micro-batches: this makes it their mean.
        zero::Settings{.gradient_scale = 1.0 / (ranks * micro_batches)}};
    optimizer.clip_grad_norm(max_norm);

    std::mt19937 random(100 + static_cast<unsigned>(comm.rank()));  // each rank its own data
    std::normal_distribution<float> normal;
    std::vector<float> input(8 * Perceptron::inputs);
    const auto backward = [&] {
      std::generate(input.begin(), input.end(), [&] { return normal(random); });
      return network.backward(input, teacher.forward(input),
                              [&](std::size_t i) { optimizer.mark_ready(i); });
    };

    double first_loss = 0, loss = 0;
    int clipped = 0;
    for (int step = 0; step < steps; ++step) {
      for (zero::AdamW& options : optimizer.groups()) options.lr = lr_at(step);
      optimizer.zero_grad();
      loss = 0;
      {
        const auto scope = optimizer.accumulate();  // until its end marks start no traffic
        for (int m = 1; m < micro_batches; ++m) loss += backward() / micro_batches;
      }
      loss += backward() / micro_batches;
      const zero::Outcome outcome = optimizer.step().outcome();

      if (step == 0) first_loss = loss;
      if (*outcome.gradient_norm > max_norm) ++clipped;
      if (comm.rank() == 0 && (step % 10 == 0 || step == steps - 1)) {
        std::printf("step %2d   lr %.5f   gradient norm %6.3f%s   loss %.4f\n", step, lr_at(step),
                    *outcome.gradient_norm, *outcome.gradient_norm > max_norm ? ", clipped" : "",
                    loss);
      }
    }
    if (comm.rank() != 0) return;
    const bool learned = loss < 0.5 * first_loss;
    const bool clips = 0 < clipped && clipped < steps;
    if (!learned) std::printf("the loss did not fall\n");
    if (!clips) std::printf("%d of %d steps were clipped\n", clipped, steps);
    good = learned && clips;
  });
  return good ? 0 : 1;
}
