// SPDX-License-Identifier: Apache-2.0
// Estimates: the figures of papers by count, and memory() to the byte from stores and shapes.
#include "zero/estimate.hpp"

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <variant>
#include <vector>
#include <zero/comm/fault_injector.hpp>
#include <zero/zero.hpp>

#include "catch.hpp"

namespace {

using Catch::Matchers::ContainsSubstring;

constexpr std::uint64_t billion = 1'000'000'000;
constexpr zero::ElementBytes mixed_adam{2, 2, 4, 8, 2};  // ZeRO's 2 + 2 + 12

double gigabytes(std::uint64_t bytes) { return static_cast<double>(bytes) / 1e9; }

// ---- By count.

TEST_CASE("estimate: table 1 of ZeRO") {
  struct Row {
    int ranks;
    std::array<double, 9> printed;  // GB: 7.5 B, 128 B and 1 T parameters, stages 1 to 3 of each
    std::array<double, 9> digit;    // the last printed one
  };
  // Some are rounded in the paper, others cut off.
  const Row rows[] = {
      {1, {120, 120, 120, 2048, 2048, 2048, 16000, 16000, 16000}, {1, 1, 1, 1, 1, 1, 1, 1, 1}},
      {4, {52.5, 41.3, 30, 896, 704, 512, 7000, 5500, 4000}, {.1, .1, 1, 1, 1, 1, 1, 1, 1}},
      {16, {35.6, 21.6, 7.5, 608, 368, 128, 4750, 2875, 1000}, {.1, .1, .1, 1, 1, 1, 1, 1, 1}},
      {64, {31.4, 16.6, 1.88, 536, 284, 32, 4187, 2218, 250}, {.1, .1, .01, 1, 1, 1, 1, 1, 1}},
      {256, {30.4, 15.4, .47, 518, 263, 8, 4046, 2054, 62.5}, {.1, .1, .01, 1, 1, 1, 1, 1, .1}},
      {1024, {30.1, 15.1, .12, 513, 257, 2, 4011, 2013, 15.6}, {.1, .1, .01, 1, 1, 1, 1, 1, .1}},
  };
  const std::uint64_t counts[] = {15 * billion / 2, 128 * billion, 1000 * billion};
  for (const Row& row : rows) {
    for (std::size_t i = 0; i < 9; ++i) {
      const int stage = static_cast<int>(i % 3) + 1;
      const double is =
          gigabytes(zero::estimate(mixed_adam, counts[i / 3], row.ranks, stage).total());
      INFO(row.ranks << " ranks, column " << i << ": " << is << ", printed " << row.printed[i]);
      CHECK(std::abs(is - row.printed[i]) <= row.digit[i] * (1 + 1e-6));
    }
  }
}

TEST_CASE("estimate: figure 1 of ZeRO") {
  const std::array<double, 4> printed{120, 31.4, 16.6, 1.88};
  for (int stage = 0; stage <= 3; ++stage) {
    const zero::Estimate is =
        zero::estimate<zero::Adam, zero::bfloat16>(15 * billion / 2, 64, stage);
    const double wanted = printed[static_cast<std::size_t>(stage)];
    CHECK(std::abs(gigabytes(is.total()) / wanted - 1) < 0.005);
  }
}

TEST_CASE("estimate: well-known optimizer states") {
  const auto state = [](std::uint64_t count, int ranks = 1) {
    return zero::estimate<zero::Adam>(count, ranks, zero::Stage1{}).state;
  };
  CHECK(state(175 * billion) == 1400 * billion);  // GPT-3: 1.4 TB
  CHECK(state(65 * billion) == 520 * billion);    // LLaMA-65B
  CHECK(state(30 * billion) == 240 * billion);
  CHECK(state(30 * billion, 8) == 30 * billion);
  const auto mixed = zero::estimate<zero::Adam, zero::float16>(30 * billion, 1, zero::Replicated{});
  CHECK(mixed.master + mixed.state == 360 * billion);
  CHECK(std::abs(gigabytes(state(zero::model_parameters("GPT3-175B"))) - 1400) < 5);
}

TEST_CASE("estimate: bytes an element follow from types and options") {
  const auto bytes = [](const zero::ElementBytes& of) {
    return std::array{of.parameter, of.gradient, of.master, of.state, of.wire};
  };
  using Bytes = std::array<std::size_t, 5>;
  using zero::element_bytes;
  CHECK(bytes(element_bytes(zero::Adam{})) == Bytes{4, 4, 0, 8, 4});
  CHECK(bytes(element_bytes(zero::AdamW{.amsgrad = true})) == Bytes{4, 4, 0, 12, 4});
  CHECK(bytes(element_bytes(zero::Sgd{})) == Bytes{4, 4, 0, 0, 4});
  CHECK(bytes(element_bytes<double>(zero::Sgd{.momentum = .9})) == Bytes{8, 8, 0, 8, 8});
  CHECK(bytes(element_bytes<zero::bfloat16>(zero::Adam{})) == bytes(mixed_adam));
  CHECK(bytes(element_bytes<zero::bfloat16, zero::Bfloat16Slots>(zero::Adam{})) ==
        Bytes{2, 2, 4, 4, 2});
  CHECK(bytes(element_bytes<zero::float16, zero::StochasticPrecision>(zero::Lamb{})) ==
        Bytes{2, 2, 0, 8, 2});
}

TEST_CASE("estimate: traffic is that of an all-reduce, in stage 3 half as much again") {
  for (const int ranks : {1, 2, 3, 64}) {
    const std::uint64_t n = 1000;
    const std::uint64_t once = n - n / static_cast<std::uint64_t>(ranks);
    const auto of = [&](int stage) { return zero::estimate(mixed_adam, n, ranks, stage).traffic; };
    CHECK(of(0).all_reduce == 2 * once);
    CHECK(of(0).elements() == 2 * once);
    for (const int stage : {1, 2}) {
      CHECK(of(stage).reduce_scatter == once);
      CHECK(of(stage).all_gather == once);
      CHECK(of(stage).bytes == of(0).bytes);
    }
    CHECK(of(3).all_gather == 2 * once);
    CHECK(of(3).elements() == 3 * once);
  }
}

TEST_CASE("estimate: the largest of unequal shards counts") {
  const zero::Estimate of_7 = zero::estimate<zero::Adam>(7, 3, 3);
  CHECK(of_7.state == 3 * 8);
  CHECK(of_7.parameters == 3 * 4);
  CHECK(zero::estimate<zero::Adam>(2, 5, 3).total() == 16);  // more ranks than elements
  CHECK(zero::estimate<zero::Adam>(0, 5, 1).total() == 0);
}

TEST_CASE("estimate: the published models are the sums over their shapes") {
  const auto bert = [](std::uint64_t h, std::uint64_t layers) {
    return (30522 + 512 + 2 + 2) * h + layers * (12 * h * h + 13 * h) + h * h + h;
  };
  const auto gpt = [](std::uint64_t h, std::uint64_t layers, std::uint64_t positions) {
    return (50257 + positions) * h + layers * (12 * h * h + 13 * h) + 2 * h;
  };
  const auto llama = [](std::uint64_t h, std::uint64_t inner, std::uint64_t layers) {
    return 2 * 32000 * h + layers * (4 * h * h + 3 * h * inner + 2 * h) + h;
  };
  const auto count = [](std::string_view name) { return zero::model_parameters(name); };
  CHECK(count("bert-tiny") == bert(128, 2));
  CHECK(count("bert-mini") == bert(256, 4));
  CHECK(count("BERT-base") == bert(768, 12));
  CHECK(count("BERT-large") == bert(1024, 24));
  CHECK(count("gpt2-small") == gpt(768, 12, 1024));
  CHECK(count("gpt2-medium") == gpt(1024, 24, 1024));
  CHECK(count("gpt2-large") == gpt(1280, 36, 1024));
  CHECK(count("gpt2-xl") == gpt(1600, 48, 1024));
  CHECK(count("gpt3-175b") == gpt(12288, 96, 2048));
  CHECK(count("LLaMA-7B") == llama(4096, 11008, 32));
  CHECK(count("llama-13b") == llama(5120, 13824, 40));
  CHECK(count("llama-33b") == llama(6656, 17920, 60));
  CHECK(count("llama-65b") == llama(8192, 22016, 80));
  CHECK_THROWS_WITH(count("llama-8b"), ContainsSubstring("no model 'llama-8b'") &&
                                           ContainsSubstring("bert-large") &&
                                           ContainsSubstring("llama-65b"));
}

TEST_CASE("estimate: advice says whether sharding pays") {
  const auto adam = [](std::uint64_t n, int world, auto... memory) {
    return zero::advice(zero::element_bytes(zero::Adam{}), n, world, memory...);
  };
  using std::uint64_t;
  CHECK_THAT(adam(billion, 1), ContainsSubstring("one rank"));
  CHECK_THAT(adam(1'000'000, 8), ContainsSubstring("small"));
  CHECK_THAT(adam(billion, 2), ContainsSubstring("a little"));
  CHECK_THAT(adam(billion, 8), ContainsSubstring("Shard: ") && ContainsSubstring("7 GB"));
  CHECK_THAT(adam(billion, 8, uint64_t{100 * billion}), ContainsSubstring("Don't shard"));
  CHECK_THAT(adam(billion, 8, uint64_t{10 * billion}), ContainsSubstring("stage 1 is the first"));
  CHECK_THAT(adam(billion, 8, uint64_t{6 * billion}), ContainsSubstring("stage 2"));
  CHECK_THAT(adam(billion, 8, uint64_t{billion}), ContainsSubstring("it takes 16 ranks"));
  CHECK_THAT(adam(billion, 8, uint64_t{0}), ContainsSubstring("No stage fits"));
  CHECK_THAT(zero::advice(zero::element_bytes(zero::Sgd{}), billion, 8),
             ContainsSubstring("saves nothing"));
}

TEST_CASE("estimate: what makes no sense is refused") {
  CHECK_THROWS_AS(zero::estimate<zero::Adam>(10, 0, 1), zero::UsageError);
  CHECK_THROWS_AS(zero::estimate<zero::Adam>(10, -1, 1), zero::UsageError);
  CHECK_THROWS_AS(zero::estimate<zero::Adam>(10, 1, 4), zero::UsageError);
  CHECK_THROWS_AS(zero::estimate<zero::Adam>(10, 1, -1), zero::UsageError);
  CHECK_THROWS_AS(zero::estimate<zero::Adam>(std::numeric_limits<std::uint64_t>::max(), 1, 1),
                  zero::UsageError);
  const std::vector<zero::ParamShape> shapes{{{4, 4}}, {{4}}};
  const auto exact = [&](int world, int rank) {
    return zero::estimate<float>(zero::Adam{}, shapes, {.world = world, .rank = rank});
  };
  CHECK_THROWS_AS(exact(0, 0), zero::UsageError);
  CHECK_THROWS_AS(exact(2, 2), zero::UsageError);
  CHECK_THROWS_AS(exact(2, -1), zero::UsageError);
  const std::vector<zero::ParamShape> other_group{{.shape = {4}, .name = "w", .group = 1}};
  CHECK_THROWS_WITH(zero::estimate<float>(zero::Adam{}, other_group, {}),
                    ContainsSubstring("'w'") && ContainsSubstring("group 1"));
  CHECK_THROWS_AS(zero::estimate<float>(zero::Adam{.lr = -1}, shapes, {}), zero::UsageError);
  CHECK_THROWS_AS(zero::estimate<float>(zero::Muon{}, shapes, {}, zero::BalancedPartition{}),
                  zero::UsageError);
}

// ---- To the byte.

/// A tensor whose values and gradient may be moved.
template <class T>
class Tensor {
 public:
  explicit Tensor(zero::ParamShape of) : of_(std::move(of)) {
    std::size_t elements = 1;
    for (const std::size_t extent : of_.shape) elements *= extent;
    for (Part* part : {&values_, &gradient_}) {
      auto memory = std::make_shared<std::vector<T>>(elements);
      *part = {*memory, memory};
    }
  }
  [[nodiscard]] const std::string& name() const { return of_.name; }
  [[nodiscard]] std::span<const std::size_t> shape() const { return of_.shape; }
  [[nodiscard]] std::span<T> values() const { return values_.elements; }
  [[nodiscard]] std::span<T> gradient() const { return gradient_.elements; }
  [[nodiscard]] const zero::Attributes& attributes() const { return of_.attributes; }
  [[nodiscard]] std::size_t group() const { return of_.group; }
  void rebind(std::span<T> to, std::shared_ptr<const void> owner) {
    values_ = {to, std::move(owner)};
  }
  void rebind_gradient(std::span<T> to, std::shared_ptr<const void> owner) {
    gradient_ = {to, std::move(owner)};
  }

 private:
  struct Part {
    std::span<T> elements{};
    std::shared_ptr<const void> owner{};
  };
  zero::ParamShape of_;
  Part values_{}, gradient_{};
};

/// One whose type is known at run time.
class AnyTensor {
  template <class F>
  auto visit(F&& f) const {
    return std::visit(f, tensor_);
  }

 public:
  using Span = std::variant<std::span<float>, std::span<zero::bfloat16>>;
  explicit AnyTensor(const zero::ParamShape& of, bool wide) : tensor_(Tensor<float>(of)) {
    if (!wide) tensor_ = Tensor<zero::bfloat16>(of);
  }
  [[nodiscard]] std::string name() const {
    return visit([](auto& tensor) { return tensor.name(); });
  }
  [[nodiscard]] std::span<const std::size_t> shape() const {
    return visit([](auto& tensor) { return tensor.shape(); });
  }
  [[nodiscard]] Span values() const {
    return visit([](auto& tensor) -> Span { return tensor.values(); });
  }
  [[nodiscard]] Span gradient() const {
    return visit([](auto& tensor) -> Span { return tensor.gradient(); });
  }
  [[nodiscard]] zero::Attributes attributes() const {
    return visit([](auto& tensor) { return tensor.attributes(); });
  }

 private:
  std::variant<Tensor<float>, Tensor<zero::bfloat16>> tensor_;
};

/// Odd sizes, an empty tensor and a scalar, a frozen one, and ones that may not be cut anywhere.
std::vector<zero::ParamShape> odd_shapes() {
  return {{{7, 5}, "a"},
          {{3}, "b"},
          {{2, 0}, "empty"},
          {{}, "scalar"},
          {{5, 13}, "rows", {.quantum = 13}},
          {{11}, "frozen", {.frozen = true}},
          {{129}, "c"},
          {{3, 3, 3}, "whole", {.unsplittable = true, .unit = 1}}};
}

template <class T>
std::vector<Tensor<T>> tensors(const std::vector<zero::ParamShape>& shapes) {
  std::vector<Tensor<T>> made;
  for (const zero::ParamShape& shape : shapes) made.emplace_back(shape);
  return made;
}

using Shared = zero::InProcessCommunicator;
using Collectives = zero::FaultInjector<zero::InProcessCommunicator, false>;
/// Two ranks to a group, or one where that doesn't divide them.
struct Groups : zero::HybridCommunicator<Shared> {
  explicit Groups(Shared& world)
      : zero::HybridCommunicator<Shared>(world, world.size() % 2 == 0 ? 2 : 1) {}
};

std::string text(const zero::MemoryReport& of) {
  std::string all;
  for (const std::size_t bytes : {of.state, of.master, of.values, of.gradients, of.staging}) {
    all += std::to_string(bytes) + " ";
  }
  return all;
}

/// Largest parts over all cases, to see that there was something to compare.
struct Most {
  std::size_t state = 0, master = 0, values = 0, gradients = 0, staging = 0, padding = 0;
};

/// Compares estimate and memory(), unclipped and clipped, on every rank of 1, 2, …, `worlds`.
/// @param make makes a rank's parameters
template <class Comm, int worlds = 3, class Make, class Options, class... P>
Most compare(const Make& make, const Options& options, const zero::Settings& settings,
             P... policies) {
  Most most;
  for (int world = 1; world <= worlds; ++world) {
    struct Pair {
      zero::ExactEstimate estimate{};
      zero::MemoryReport memory{};
    };
    std::vector<std::array<Pair, 2>> of_ranks(static_cast<std::size_t>(world));
    zero::run_ranks(world, [&](zero::InProcessCommunicator& in_process) {
      Comm comm(in_process);
      auto store = make();
      auto& [plain, clipped] = of_ranks[static_cast<std::size_t>(comm.rank())];
      zero::EstimateFor of = zero::EstimateFor::member(comm);
      plain.estimate = zero::estimate(options, store, of, policies..., settings);
      of.clips = true;
      clipped.estimate = zero::estimate(options, store, of, policies..., settings);
      zero::ZeroSharded optimizer{options, store, comm, policies..., settings};
      plain.memory = optimizer.memory();
      optimizer.clip_grad_norm(1.0);
      clipped.memory = optimizer.memory();
    });
    for (std::size_t rank = 0; rank < of_ranks.size(); ++rank) {
      for (const Pair& pair : of_ranks[rank]) {
        INFO("rank " << rank << " of " << world);
        CHECK(text(pair.estimate.optimizer) == text(pair.memory));
        CHECK(pair.estimate.padding <= pair.memory.total());
        const auto raise = [](std::size_t& most_yet, std::size_t bytes) {
          most_yet = std::max(most_yet, bytes);
        };
        raise(most.state, pair.memory.state);
        raise(most.master, pair.memory.master);
        raise(most.values, pair.memory.values);
        raise(most.gradients, pair.memory.gradients);
        raise(most.staging, pair.memory.staging);
        raise(most.padding, pair.estimate.padding);
      }
    }
  }
  return most;
}

TEST_CASE("estimate: to the byte, Adam in shared memory, sharded") {
  const auto make = [] { return tensors<float>(odd_shapes()); };
  const std::size_t shard = 260;  // all that is trainable
  for (const std::size_t bucket : {std::size_t{64}, std::size_t{1} << 20}) {
    for (const bool amsgrad : {false, true}) {
      const Most most =
          compare<Shared>(make, zero::Adam{.amsgrad = amsgrad}, {}, zero::NoView{bucket});
      CHECK(most.state >= shard * (amsgrad ? 12 : 8));
      CHECK(most.gradients > 0);  // clipped
      CHECK(most.padding > 0);
      CHECK(most.staging == 0);
    }
  }
  compare<Shared>(make, zero::Adam{}, {.gradients = zero::Gradients::reduced}, zero::NoView{64});
  compare<Shared>(make, zero::Adam{}, {.finite_check = zero::FiniteCheck::always},
                  zero::NoView{64});
  compare<Shared>(make, zero::Adam{}, {}, zero::NoView{zero::PerTensor{}});
}

TEST_CASE("estimate: to the byte, Sgd replicated in one flat buffer") {
  std::vector<zero::FlatParams<float>::Entry> entries;
  std::size_t elements = 0;
  for (const zero::ParamShape& shape : odd_shapes()) {
    entries.push_back({shape.name, shape.shape, shape.attributes});
    std::size_t of_shape = 1;
    for (const std::size_t extent : shape.shape) of_shape *= extent;
    elements += of_shape;
  }
  entries.push_back({"tied", {7, 5}, {.alias = 0}});
  struct Flat {  // buffers that live as long as the store
    std::shared_ptr<std::vector<float>> values, gradient;
    zero::FlatParams<float> params;
    [[nodiscard]] auto begin() const { return params.begin(); }
    [[nodiscard]] auto end() const { return params.end(); }
    [[nodiscard]] auto flat_values() const { return params.flat_values(); }
    [[nodiscard]] auto flat_gradient() const { return params.flat_gradient(); }
  };
  static_assert(zero::FlatParamStore<Flat>);
  const auto make = [&] {
    auto values = std::make_shared<std::vector<float>>(elements);
    auto gradient = std::make_shared<std::vector<float>>(elements);
    return Flat{values, gradient, zero::FlatParams<float>(*values, *gradient, entries)};
  };
  for (const double momentum : {0., .9}) {
    const Most most =
        compare<Shared>(make, zero::Sgd{.momentum = momentum}, {}, zero::Replicated{});
    CHECK((most.state == 0) == (momentum == 0));
    CHECK(most.gradients > 0);
  }
}

TEST_CASE("estimate: to the byte, AdamW over collectives, replicated, all moved, two groups") {
  const auto make = [] {
    auto shapes = odd_shapes();
    shapes[3].group = 1;
    shapes.push_back({{7, 5}, "tied", {.alias = 0}});
    return tensors<float>(shapes);
  };
  const zero::Groups groups{zero::AdamW{}, zero::AdamW{.amsgrad = true}};
  const Most most =
      compare<Collectives>(make, groups, {}, zero::Replicated{}, zero::ParamAndGradView{128});
  CHECK(most.values > 0);
  CHECK(most.gradients > most.values);
}

TEST_CASE("estimate: to the byte, 16 bits and floats over collectives, sharded and moved") {
  const auto make = [] {
    std::vector<AnyTensor> made;
    for (const zero::ParamShape& shape : odd_shapes())
      made.emplace_back(shape, made.size() % 3 == 1);
    return made;
  };
  const Most most = compare<Collectives>(make, zero::Adam{}, {}, zero::NoView{96});
  CHECK(most.master > 0);
  CHECK(most.staging > 0);
  CHECK(most.padding > 0);
}

TEST_CASE("estimate: to the byte, Lamb's workspace, balanced, bfloat16 slots") {
  const auto make = [] { return tensors<zero::bfloat16>(odd_shapes()); };
  const Most most = compare<Shared>(make, zero::Lamb{}, {}, zero::BalancedPartition{},
                                    zero::ParamView{64}, zero::Bfloat16Slots{});
  CHECK(most.master > 0);
  CHECK(most.staging > 129 * 4);
}

TEST_CASE("estimate: to the byte, Lamb over collectives, replicated, no masters") {
  const auto make = [] { return tensors<zero::float16>(odd_shapes()); };
  const Most most =
      compare<Collectives>(make, zero::Lamb{}, {}, zero::StochasticPrecision{}, zero::Replicated{},
                           zero::BalancedPartition{}, zero::ParamView{64});
  CHECK(most.master == 0);
  CHECK(most.staging > 2 * 129 * 4);
}

TEST_CASE("estimate: to the byte, double over collectives, balanced") {
  const auto make = [] { return tensors<double>(odd_shapes()); };
  const Most most = compare<Collectives>(make, zero::Adam{}, {}, zero::BalancedPartition{},
                                         zero::NoView{64}, zero::NativePrecision{});
  CHECK(most.state >= 260 * 16);
  CHECK(most.staging > 0);
}

TEST_CASE("estimate: to the byte, groups of ranks, 16 bits and floats") {
  const auto make = [] {
    std::vector<AnyTensor> made;
    for (const zero::ParamShape& shape : odd_shapes())
      made.emplace_back(shape, made.size() % 3 == 1);
    return made;
  };
  const Most most = compare<Groups, 4>(make, zero::Adam{}, {}, zero::NoView{96});
  CHECK(most.gradients > 0);
  CHECK(most.staging > 0);
}

TEST_CASE("estimate: to the byte, stage 2") {
  const auto make = [] { return tensors<float>(odd_shapes()); };
  const Most most = compare<Shared>(make, zero::Adam{}, {}, zero::Stage2{}, zero::NoView{96});
  CHECK(most.gradients > 0);
  CHECK(most.staging > 0);  // gathered here, and copied to where values are
}

TEST_CASE("estimate: to the byte, stage 3, some units resident") {
  const auto make = [] { return tensors<zero::bfloat16>(odd_shapes()); };
  for (const std::size_t resident : {0, 80, 10'000}) {
    const Most most = compare<Groups, 4>(
        make, zero::Adam{}, {}, zero::Stage3{.resident_bytes = resident}, zero::ParamView{96});
    CHECK(most.values > 0);
    CHECK(most.master > 0);
    CHECK(most.staging > 0);  // of gradients that are summed here
  }
}

TEST_CASE("estimate: what comes and goes in steps") {
  std::vector<zero::ParamShape> shapes;
  for (int unit = 0; unit < 4; ++unit) {
    shapes.push_back({{1000}, "u" + std::to_string(unit), {.unit = unit}});
  }
  shapes.push_back({{1000}, "tied", {.alias = 0}});
  const auto of = [&](auto stage) {
    return zero::estimate<float>(zero::Sgd{}, shapes, {.world = 2}, stage, zero::ParamView{2000})
        .optimizer;
  };
  const std::size_t bucket = 2000 / 32 * 32;
  CHECK(of(zero::Stage1{}).pooled_peak == 0);
  CHECK(of(zero::Stage2{}).pooled_peak == bucket + 4000 + 4000);  // the largest, and what is tied
  CHECK(of(zero::Stage2{.pool_bytes = 1 << 20}).pooled_peak == 1 << 20);
  CHECK(of(zero::Stage2{}).gathered_peak == 0);
  const std::size_t unit = (4000 + 31) / 32 * 32;
  CHECK(of(zero::Stage3{}).gathered_peak == 2 * unit);
  CHECK(of(zero::Stage3{.prefetch = 9}).gathered_peak == 4 * unit);
}

TEST_CASE("estimate: ranks of several groups share no memory, and are not alone") {
  const std::vector<zero::ParamShape> shapes{{{4, 4}}, {{4}}};
  const auto of = [&](zero::EstimateFor which, zero::Settings settings = {}) {
    return text(zero::estimate<float>(zero::Adam{}, shapes, which, settings).optimizer);
  };
  CHECK(of({.world = 2, .replicas = 3}) == of({.world = 2, .share_memory = false}));
  CHECK(of({.world = 1, .replicas = 3}) != of({.world = 1, .share_memory = false}));  // not alone
  CHECK_THROWS_AS(of({.world = 2, .replicas = 0}), zero::UsageError);
}

TEST_CASE("estimate: shapes without memory are as good as a store") {
  auto shapes = odd_shapes();
  shapes.push_back({{7, 5}, "tied", {.alias = 0}});
  std::vector<float> memory(1000), gradient(1000);
  std::vector<zero::ParamRef<float>> store;
  std::size_t at = 0;
  for (const zero::ParamShape& of : shapes) {
    const std::size_t offset = of.name == "tied" ? 0 : at;
    store.emplace_back(of.name, of.shape, memory.data() + offset, gradient.data() + offset,
                       of.attributes);
    at += store.back().values().size();
  }
  const auto same = [&](const zero::EstimateFor& of, auto... policies) {
    const zero::ExactEstimate a = zero::estimate<float>(zero::Adam{}, shapes, of, policies...);
    const zero::ExactEstimate b = zero::estimate(zero::Adam{}, store, of, policies...);
    CHECK(text(a.optimizer) == text(b.optimizer));
    CHECK(a.total() == b.total());
    CHECK(a.padding == b.padding);
    CHECK(a.parameters == (260 + 11) * 4);  // frozen, and the tied one once
    CHECK(a.gradients == 260 * 4);
    CHECK(a.total() == a.parameters + a.gradients + a.optimizer.total());
  };
  for (int rank = 0; rank < 3; ++rank) {
    same({.world = 3, .rank = rank});
    same({.world = 3, .rank = rank, .share_memory = false, .clips = true}, zero::NoView{64});
    same({.world = 3, .rank = rank}, zero::BalancedPartition{}, zero::Replicated{});
  }
  const zero::ExactEstimate moved = zero::estimate<float>(
      zero::Adam{}, shapes, {.world = 3}, zero::NativePrecision{}, zero::ParamAndGradView{});
  CHECK(moved.parameters == 11 * 4);
  CHECK(moved.gradients == 0);
  CHECK(moved.optimizer.values >= 260 * 4);
}

TEST_CASE("estimate: what construction refuses is refused") {
  const std::vector<zero::ParamShape> shapes{{{4}, "a"}, {{4}, "b", {.alias = 0}, 1}};
  const zero::Groups two{zero::Adam{}, zero::Adam{}};
  CHECK_THROWS_WITH(zero::estimate<float>(two, shapes, {}),
                    ContainsSubstring("tied to parameter 0 ('a') of another group"));
  const std::vector<zero::ParamShape> one{{{4}, "a"}};
  const auto with = [&](const zero::Settings& settings) {
    return zero::estimate<float>(zero::Adam{}, one, {}, settings);
  };
  CHECK_NOTHROW(with({}));
  CHECK_THROWS_WITH(with({.gradient_scale = std::numeric_limits<double>::quiet_NaN()}),
                    ContainsSubstring("gradient_scale"));
  CHECK_THROWS_WITH(
      with({.finite_check = zero::FiniteCheck::never, .loss_scale = zero::LossScale::dynamic()}),
      ContainsSubstring("dynamic loss scale"));
  // What no machine has would overflow, or take for ever to go through.
  CHECK_THROWS_WITH(
      zero::estimate<double>(zero::Adam{},
                             std::vector<zero::ParamShape>{{{std::size_t{1} << 59}, "a"}}, {}),
      ContainsSubstring("2^50"));
  CHECK_THROWS_WITH(zero::estimate(zero::ElementBytes{SIZE_MAX, 1, 0, 0, 0}, 1000, 4, 0),
                    ContainsSubstring("is no element"));
}

TEST_CASE("estimate: what is moved is there twice while an optimizer is made") {
  const std::vector<zero::ParamShape> shapes{{{10}, "a"}, {{7}, "b", {.frozen = true}}};
  const auto moved = [&](auto view) {
    return zero::estimate<float>(zero::Sgd{}, shapes, {}, view).moved;
  };
  CHECK(moved(zero::NoView{}) == 0);
  CHECK(moved(zero::ParamView{}) == 40);
  CHECK(moved(zero::ParamAndGradView{}) == 80);
}

TEST_CASE("estimate: Linear(10000, 10000), two ranks") {
  const std::vector<zero::ParamShape> linear{{{10000, 10000}, "weight"}, {{10000}, "bias"}};
  const auto state = [&](int rank, auto... policies) {
    return zero::estimate<float>(zero::Adam{}, linear, {.world = 2, .rank = rank}, policies...)
        .optimizer.state;
  };
  CHECK(state(0, zero::Replicated{}) == 800'080'000);
  CHECK(state(0) == 400'040'000);
  CHECK(state(1) == 400'040'000);
  CHECK(state(0, zero::BalancedPartition{}) == 800'000'000);
  CHECK(state(1, zero::BalancedPartition{}) == 80'000);
}

}  // namespace
