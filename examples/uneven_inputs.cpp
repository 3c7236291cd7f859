// Ranks with unlike numbers of batches: those that have run out serve the others' steps until all
// have ended, and then all have the same weights.
#include <cstddef>
#include <cstdio>
#include <mutex>
#include <vector>
#include <zero/zero.hpp>

int main() {
  constexpr int ranks = 3;
  std::mutex mutex;  // of what follows, and of the output
  std::vector<std::vector<float>> ends;

  zero::run_ranks(ranks, [&](zero::InProcessCommunicator& comm) {
    std::vector<float> weights(1000, 1.0F);
    std::vector<float> gradient(1000);
    std::vector parameters{zero::ParamRef("weights", weights, gradient)};
    zero::ZeroSharded optimizer{zero::Adam{.lr = 0.1}, parameters, comm};

    const int batches = 3 + comm.rank();
    const auto set_lr = [&] {  // a schedule; on ranks that serve, too
      optimizer.group(0).lr = 0.1 / (1.0 + 0.5 * static_cast<double>(optimizer.steps()));
    };
    optimizer.join(
        [&] {
          for (int batch = 0; batch < batches; ++batch) {
            set_lr();
            for (std::size_t i = 0; i < weights.size(); ++i) {  // your backward
              gradient[i] = weights[i] + static_cast<float>(comm.rank());
            }
            optimizer.step();
          }
        },
        // Divides the gradients' sum by how many ranks still have a batch.
        {.mean = zero::JoinMean::ranks_with_input, .before_serving = set_lr});

    const std::scoped_lock lock(mutex);
    std::printf("rank %d: %d batches, %d steps, weights[0] = %.6f\n", comm.rank(), batches,
                static_cast<int>(optimizer.steps()), weights[0]);
    ends.push_back(weights);
  });

  bool agree = true;
  for (const std::vector<float>& weights : ends) agree = agree && weights == ends[0];
  std::printf(agree ? "all ranks have the same weights\n" : "the ranks' weights differ\n");
  return agree ? 0 : 1;
}
