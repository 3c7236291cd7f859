// SPDX-License-Identifier: Apache-2.0
// From 4 MiB on, sums and copies are written past the caches: the same bits, at any offset.
#include <cstddef>
#include <cstring>
#include <numeric>
#include <span>
#include <string>
#include <tuple>
#include <vector>
#include <zero/zero.hpp>

#include "catch.hpp"

namespace {

constexpr std::size_t large = (std::size_t{9} << 20) / sizeof(float) + 5;

#ifdef ZERO_TEST_EACH_ONCE  // sanitizers and a second compiler
using Types = std::tuple<float>;
#else
using Types = std::tuple<float, double>;
#endif

template <class T>
T number(std::size_t rank, std::size_t i) {
  return static_cast<T>((i * 2654435761U + rank * 40503U) % 10007) / static_cast<T>(977);
}

/// Two steps of AdamW over a large tensor between two small ones, which leave it unaligned.
template <class T>
std::vector<std::vector<T>> train(int world) {
  std::vector<std::vector<T>> results(static_cast<std::size_t>(world));
  zero::run_ranks(world, [&](zero::InProcessCommunicator& comm) {
    std::vector<std::vector<T>> values, gradients;
    std::vector<zero::ParamRef<T>> store;
    for (const std::size_t elements : {std::size_t{7}, large, std::size_t{33}}) {
      values.emplace_back(elements, T(1));
      gradients.emplace_back(elements);
    }
    for (std::size_t p = 0; p < values.size(); ++p) {
      store.emplace_back("p" + std::to_string(p), values[p], gradients[p]);
    }
    zero::ZeroSharded optimizer{zero::AdamW{.lr = 0.1}, store, comm};
    for (std::size_t step = 0; step < 2; ++step) {
      for (auto& gradient : gradients) {
        for (std::size_t i = 0; i < gradient.size(); ++i) {
          // The same on every rank and small enough to add exactly: the mean is K-independent.
          gradient[i] = static_cast<T>((i + step) % 127) / T(8);
        }
      }
      optimizer.step();
    }
    auto& all = results[static_cast<std::size_t>(comm.rank())];
    for (const auto& of_one : values) all.insert(all.end(), of_one.begin(), of_one.end());
  });
  return results;
}

template <class T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

}  // namespace

TEMPLATE_LIST_TEST_CASE("a step over large tensors", "", Types) {
  const auto alone = train<TestType>(1);
  for (const int world : {2, 4}) {  // powers of two: the mean of equal gradients is exact
    for (const auto& rank : train<TestType>(world)) CHECK(same_bits(rank, alone[0]));
  }
}

TEMPLATE_LIST_TEST_CASE("collectives over large arrays", "", Types) {
  using T = TestType;
  constexpr std::size_t world = 3;
  std::vector<int> right(world, 0);
  zero::run_ranks(world, [&](zero::InProcessCommunicator& comm) {
    const auto rank = static_cast<std::size_t>(comm.rank());
    std::vector<T> input(world * large), output(large + 1), gathered(world * large + 1);
    for (std::size_t i = 0; i < input.size(); ++i) input[i] = number<T>(rank, i);
    const std::span<T> slice = std::span(output).subspan(1);  // on 4 or 8 bytes only
    comm.reduce_scatter(std::span<const T>(input), slice, zero::ReduceOp::sum).wait();
    bool good = true;
    for (std::size_t i = 0; i < large; ++i) {
      T sum = number<T>(0, rank * large + i);
      for (std::size_t r = 1; r < world; ++r) sum += number<T>(r, rank * large + i);
      good = good && slice[i] == sum;
    }
    const std::span<T> all = std::span(gathered).subspan(1);
    comm.all_gather(std::span<const T>(slice), all).wait();
    for (std::size_t i = 0; i < world * large; ++i) {
      T sum = number<T>(0, i);
      for (std::size_t r = 1; r < world; ++r) sum += number<T>(r, i);
      good = good && all[i] == sum;
    }
    right[rank] = good ? 1 : 0;
  });
  CHECK(std::accumulate(right.begin(), right.end(), std::size_t{0}) == world);
}
