// Your own framework's tensors: tell the library what a parameter is, and how its memory may move.
#include <cstddef>
#include <cstdio>
#include <memory>
#include <ranges>
#include <span>
#include <string>
#include <utility>
#include <vector>
#include <zero/zero.hpp>

namespace mine {

// A framework's tensor: it counts references to its memory, and backward makes the gradient.
struct Tensor {
  std::string label;
  std::vector<std::size_t> extents;
  std::shared_ptr<float> data;
  std::size_t size = 0;
  std::vector<float> gradient;
};

Tensor ones(std::string label, std::vector<std::size_t> extents) {
  Tensor tensor{std::move(label), std::move(extents), nullptr, 1, {}};
  for (const std::size_t extent : tensor.extents) tensor.size *= extent;
  tensor.data = std::shared_ptr<float>(new float[tensor.size], std::default_delete<float[]>());
  for (std::size_t i = 0; i < tensor.size; ++i) tensor.data.get()[i] = 1.0F;
  return tensor;
}

// The few lines that make it a zero::Parameter. With `rebind` its memory may move into a bucket.
struct Adapter {
  Tensor* tensor;
  [[nodiscard]] const std::string& name() const { return tensor->label; }
  [[nodiscard]] std::span<const std::size_t> shape() const { return tensor->extents; }
  [[nodiscard]] std::span<float> values() const { return {tensor->data.get(), tensor->size}; }
  [[nodiscard]] std::span<float> gradient() const { return tensor->gradient; }
  void rebind(std::span<float> values, std::shared_ptr<const void> owner) const {
    tensor->data = std::shared_ptr<float>(std::move(owner), values.data());
  }
};

}  // namespace mine

int main() {
  using namespace zero::literals;  // 64_KiB
  zero::run_ranks(2, [](zero::InProcessCommunicator& comm) {
    std::vector<mine::Tensor> model;
    model.push_back(mine::ones("embedding", {100, 16}));
    model.push_back(mine::ones("head", {16, 100}));

    // Any range that can be transformed into parameters is a store.
    auto store = model | std::views::transform([](mine::Tensor& t) { return mine::Adapter{&t}; });
    zero::ZeroSharded optimizer{zero::AdamW{.lr = 0.01}, store, comm, zero::ParamView{64_KiB}};

    for (int step = 0; step < 10; ++step) {
      for (mine::Tensor& tensor : model) tensor.gradient.assign(tensor.size, 0.5F);
      optimizer.step();
    }
    if (comm.rank() == 0) {
      std::printf("embedding[0] = %.4f after %lld steps\n", model[0].data.get()[0],
                  static_cast<long long>(optimizer.steps()));
    }
  });
}
