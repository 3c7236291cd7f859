// An optimizer of your own: lion.hpp holds the rule, in fifteen lines. The library turns it into a
// vectorised loop and shards its state like that of any other.
#include <cstdio>
#include <vector>

#include "lion.hpp"

int main() {
  zero::run_ranks(3, [](zero::InProcessCommunicator& comm) {
    std::vector<float> weights(1000, 1.0F);
    std::vector<float> gradient(1000);
    std::vector parameters{zero::ParamRef("weights", weights, gradient)};
    zero::ZeroSharded optimizer{Lion{.lr = 0.01}, parameters, comm};
    for (int step = 0; step < 50; ++step) {
      for (std::size_t i = 0; i < weights.size(); ++i) gradient[i] = weights[i];
      optimizer.step();
    }
    if (comm.rank() != 0) return;
    std::printf("weights[0] = %.4f\n", weights[0]);
    for (const auto& slice : optimizer.state()) {
      std::printf("rank 0 keeps %.*s of %.*s, elements %zu to %zu\n",
                  static_cast<int>(slice.slot.size()), slice.slot.data(),
                  static_cast<int>(slice.parameter.size()), slice.parameter.data(),
                  slice.elements.begin, slice.elements.end);
    }
  });
}
