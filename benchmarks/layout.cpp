// SPDX-License-Identifier: Apache-2.0
// The layout of GPT-3 175B over 1024 ranks.
#include <benchmark/benchmark.h>

#include <cstddef>
#include <string>
#include <vector>
#include <zero/bucket_view/no_view.hpp>
#include <zero/layout.hpp>

#include "bert_shapes.hpp"
#include "table.hpp"

namespace bench {
namespace {

constexpr int world = 1024;

/// Brown et al. (arXiv:2005.14165), table 2.1.
std::vector<zero::LayoutParameter> gpt3_parameters() {
  constexpr std::size_t hidden = 12288, vocabulary = 50257, context = 2048;
  std::vector<zero::LayoutParameter> parameters;
  const auto add = [&](std::size_t elements) { parameters.push_back({.elements = elements}); };
  const auto linear = [&](std::size_t out, std::size_t in) {
    add(out * in);
    add(out);
  };
  const auto norm = [&] {
    add(hidden);
    add(hidden);
  };
  add(vocabulary * hidden);
  add(context * hidden);
  for (int layer = 0; layer < 96; ++layer) {
    norm();
    linear(3 * hidden, hidden);
    linear(hidden, hidden);
    norm();
    linear(4 * hidden, hidden);
    linear(hidden, 4 * hidden);
  }
  norm();
  return parameters;
}

const Row gpt3("layout", [](Sheet& sheet) {
  const std::vector<zero::LayoutParameter> parameters = gpt3_parameters();
  const std::vector<zero::LayoutLane> lanes{
      {.element_bytes = sizeof(float), .bucket_bytes = zero::NoView{}.bucket_bytes}};
  const auto make = [&] { return zero::Layout<>(parameters, lanes, world); };

  std::vector<double> construction;
  for (int i = 0; i < 3 * pair_count; ++i) {
    construction.push_back(1e3 * seconds([&] {
                             const zero::Layout<> layout = make();
                             benchmark::DoNotOptimize(layout.buckets(0));
                           }));
  }
  const zero::Layout<> layout = make();
  sheet.value("", "ms", spread_of(construction), at_most(5),
              "GPT-3, " + std::to_string(layout.elements(0)) + " parameters in " +
                  std::to_string(layout.buckets(0)) + " buckets, K=1024: construction");
  const double megabytes = static_cast<double>(layout.bytes()) / 1e6;
  sheet.value("bytes", "MB", {megabytes, megabytes, megabytes}, at_most(4), "kept");

  std::vector<double> nanoseconds;
  for (int rank = 0; rank < world; rank += world / pair_count) {
    std::size_t fragments = 0;
    std::size_t elements = 0;
    const double time = seconds([&] {
      layout.for_each_owned(0, rank, [&](const zero::Fragment& f, std::size_t, std::size_t begin) {
        ++fragments;
        elements += f.elements + begin;
      });
    });
    benchmark::DoNotOptimize(elements);
    nanoseconds.push_back(1e9 * time / static_cast<double>(fragments));
  }
  sheet.value("fragment", "ns", spread_of(nanoseconds), at_most(20),
              "each of a rank's fragments, over " + std::to_string(nanoseconds.size()) + " ranks");
});

}  // namespace
}  // namespace bench
