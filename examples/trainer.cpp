// A trainer as a class: two groups, a frozen and a tied parameter, a schedule, gradients written
// through leases and marked as backward makes them.
#include <cmath>
#include <cstddef>
#include <cstdio>
#include <vector>
#include <zero/zero.hpp>

namespace {

using Store = std::vector<zero::ParamRef<float>>;

class Trainer {
 public:
  explicit Trainer(zero::InProcessCommunicator& comm) : optimizer_(groups(), store_, comm) {}

  float train(int steps) {
    for (int step = 0; step < steps; ++step) {
      // Any schedule works: options may change between steps, alike on all ranks.
      const double cosine = 0.5 * (1 + std::cos(3.14159265 * step / steps));
      for (zero::AdamW& options : optimizer_.groups()) options.lr = 0.01 * cosine;
      backward();
      optimizer_.step();
    }
    return embedding_[0];
  }

 private:
  static zero::Groups<zero::AdamW> groups() {
    return zero::Groups{zero::AdamW{.weight_decay = 0.1}, zero::AdamW{.weight_decay = 0}};
  }

  void backward() {
    // 3 is frozen, and 4 tied to 0: both uses write to one gradient.
    for (const std::size_t i : {std::size_t{4}, std::size_t{2}, std::size_t{1}, std::size_t{0}}) {
      {
        const auto lease = optimizer_.gradient(i);  // of this rank; the step takes the mean of all
        for (float& g : lease.values()) g = lease.adds() ? g + 0.5F : 0.5F;
      }
      optimizer_.mark_ready(i);  // from here on it may be on its way
    }
  }

  std::vector<float> embedding_ = std::vector<float>(64 * 16, 1.0F);
  std::vector<float> scale_ = std::vector<float>(16, 1.0F);
  std::vector<float> weight_ = std::vector<float>(16 * 16, 1.0F);
  std::vector<float> positions_ = std::vector<float>(64 * 16, 1.0F);
  std::vector<float> embedding_gradient_ = std::vector<float>(64 * 16);
  std::vector<float> scale_gradient_ = std::vector<float>(16);
  std::vector<float> weight_gradient_ = std::vector<float>(16 * 16);
  Store store_{
      {"embedding", {64, 16}, embedding_.data(), embedding_gradient_.data()},
      {"scale", {16}, scale_.data(), scale_gradient_.data(), {}, 1},  // group 1: no decay
      {"weight", {16, 16}, weight_.data(), weight_gradient_.data()},
      {"positions", {64, 16}, positions_.data(), nullptr, {.frozen = true}},
      {"head", {64, 16}, embedding_.data(), embedding_gradient_.data(), {.alias = 0}},  // tied
  };
  // References: the store and the communicator are used where they are.
  zero::ZeroSharded<zero::AdamW, Store&, zero::InProcessCommunicator&> optimizer_;
};

}  // namespace

int main() {
  zero::run_ranks(2, [](zero::InProcessCommunicator& comm) {
    const float first = Trainer(comm).train(20);
    if (comm.rank() == 0) std::printf("embedding[0] = %.4f after 20 steps\n", first);
  });
}
