// Adam with its state spread over four ranks: each keeps a quarter of the two moments.
#include <cstdio>
#include <vector>
#include <zero/zero.hpp>

int main() {
  zero::run_ranks(4, [](zero::InProcessCommunicator& comm) {
    std::vector<float> weights(1024, 1.0F);  // your model's memory, the same on every rank
    std::vector<float> gradient(1024);
    std::vector parameters{zero::ParamRef("weights", weights, gradient)};

    zero::ZeroSharded optimizer{zero::Adam{.lr = 1e-2}, parameters, comm};

    for (int step = 0; step < 100; ++step) {
      for (std::size_t i = 0; i < weights.size(); ++i) gradient[i] = weights[i];  // your backward
      optimizer.step();
    }
    if (comm.rank() == 0) {
      std::printf("weights[0] = %.4f, state on this rank: %zu bytes of %zu\n", weights[0],
                  optimizer.memory().state, 2 * weights.size() * sizeof(float));
    }
  });
}
