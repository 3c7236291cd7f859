// SPDX-License-Identifier: Apache-2.0
// Who owns what of a small BERT on three ranks, before any memory is allocated. Needs range-v3.
#include <zero/describe.hpp>
#include <zero/layout.hpp>
#include <zero/views.hpp>

#include <cstddef>
#include <functional>
#include <iostream>
#include <range/v3/action/sort.hpp>
#include <range/v3/numeric/accumulate.hpp>
#include <range/v3/range/conversion.hpp>
#include <range/v3/view/filter.hpp>
#include <range/v3/view/take.hpp>
#include <range/v3/view/transform.hpp>
#include <string>
#include <vector>

namespace {

namespace views = zero::views;

/// A tensor's name and element count.
struct Tensor {
  std::string name;
  std::size_t elements;
};

/// BERT-tiny: two layers of width 128.
std::vector<Tensor> bert_tiny() {
  constexpr std::size_t hidden = 128, intermediate = 512;
  std::vector<Tensor> tensors;
  const auto linear = [&](const std::string& name, std::size_t out, std::size_t in) {
    tensors.push_back({name + ".weight", out * in});
    tensors.push_back({name + ".bias", out});
  };
  tensors.push_back({"embeddings.word", 30522 * hidden});
  tensors.push_back({"embeddings.position", 512 * hidden});
  tensors.push_back({"embeddings.type", 2 * hidden});
  linear("embeddings.norm", hidden, 1);
  for (int i = 0; i < 2; ++i) {
    const std::string layer = "layer." + std::to_string(i) + ".";
    for (const char* part : {"query", "key", "value", "attention"}) {
      linear(layer + part, hidden, hidden);
    }
    linear(layer + "attention.norm", hidden, 1);
    linear(layer + "intermediate", intermediate, hidden);
    linear(layer + "output", hidden, intermediate);
    linear(layer + "output.norm", hidden, 1);
  }
  linear("pooler", hidden, hidden);
  return tensors;
}

}  // namespace

int main() {
  using namespace zero::literals;  // 4_MiB
  constexpr int world = 3;
  const std::vector<Tensor> tensors = bert_tiny();
  const auto names = tensors | ranges::views::transform(&Tensor::name);
  const auto parameters = tensors | ranges::views::transform([](const Tensor& tensor) {
                            return zero::LayoutParameter{.elements = tensor.elements};
                          }) |
                          ranges::to<std::vector>();
  const std::vector<zero::LayoutLane> lanes{
      {.element_bytes = sizeof(float), .bucket_bytes = 4_MiB}};
  const zero::Layout<> layout(parameters, lanes, world);

  std::cout << zero::describe(layout, names, {.fragments = 3});

  std::cout << "\nbytes of parameters per rank:\n";
  for (int rank = 0; rank < world; ++rank) {
    const std::size_t elements =
        ranges::accumulate(layout | views::shard(rank) | views::fragments, std::size_t{0},
                           std::plus<>(), &views::LaneFragment::elements);
    std::cout << "  rank " << rank << ": " << elements * sizeof(float) << "\n";
  }

  std::cout << "\nwho owns the pooler:\n";
  for (int rank = 0; rank < world; ++rank) {
    const auto of_pooler = ranges::views::filter([&](const views::LaneFragment& fragment) {
      return names[static_cast<std::ptrdiff_t>(fragment.parameter)].starts_with("pooler.");
    });
    for (const auto& fragment : layout | views::shard(rank) | views::fragments | of_pooler) {
      std::cout << "  rank " << rank << ": " << fragment.elements << " elements of "
                << tensors[fragment.parameter].name << "\n";
    }
  }

  std::cout << "\nthe largest fragments of rank 1, the word embedding's left out:\n";
  const auto fragments = layout | views::shard(1) | views::fragments |
                         ranges::views::filter([](const auto& f) { return f.parameter != 0; }) |
                         ranges::to<std::vector>() |
                         ranges::actions::sort(std::greater<>(), &views::LaneFragment::elements);
  for (const views::LaneFragment& fragment : fragments | ranges::views::take(5)) {
    std::cout << "  " << tensors[fragment.parameter].name << "[" << fragment.parameter_begin << ", "
              << fragment.parameter_begin + fragment.elements << ") in bucket " << fragment.bucket
              << "\n";
  }
  return 0;
}
