// SPDX-License-Identifier: Apache-2.0
// One rank's own troubles: memory that runs out, a framework that throws while it is handed
// buffers, options that change under a whole-tensor optimizer. Peers learn of them at once, nothing
// is read or written out of bounds, and what has failed says so.
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <memory_resource>
#include <new>
#include <span>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "catch.hpp"
#include "ranks.hpp"
#include "zero/bfloat16.hpp"
#include "zero/bucket_view/param_view.hpp"
#include "zero/optim/adam.hpp"
#include "zero/optim/sgd.hpp"
#include "zero/partition/balanced.hpp"

namespace {

using Catch::Matchers::ContainsSubstring;
using Kind = ranks::Failure::Kind;
using Ways = std::tuple<ranks::Way<true, zero::Stage1, zero::ParamView>,
                        ranks::Way<false, zero::Stage1, zero::ParamView>>;

/// Has no memory any more after so many allocations.
class Scarce final : public std::pmr::memory_resource {
 public:
  explicit Scarce(int left) : left_(left) {}
  int left_;

 private:
  void* do_allocate(std::size_t bytes, std::size_t alignment) override {
    if (left_-- <= 0) throw std::bad_alloc();
    return zero::huge_page_resource()->allocate(bytes, alignment);
  }
  void do_deallocate(void* memory, std::size_t bytes, std::size_t alignment) override {
    zero::huge_page_resource()->deallocate(memory, bytes, alignment);
  }
  [[nodiscard]] bool do_is_equal(const memory_resource& other) const noexcept override {
    return this == &other;
  }
};

/// A tensor that does something of its own while it is rebound.
struct Touchy : ranks::Tensor<float> {
  using ranks::Tensor<float>::Tensor;
  std::function<void()> when_rebound = [] {};
  void rebind(std::span<float> values, std::shared_ptr<const void> owner) {
    when_rebound();
    ranks::Tensor<float>::rebind(values, std::move(owner));
  }
};

/// Construction, a step, a group added and a step, on two ranks; rank 1 as it is told.
template <class Way>
std::vector<ranks::Failure> life(zero::Settings settings_of_1, bool touchy_at_first,
                                 bool touchy_later, const std::function<void()>& trouble) {
  const auto thrown =
      ranks::run(2,
                 [&](zero::InProcessCommunicator inner) {
                   const bool troubled = inner.rank() == 1;
                   std::vector<Touchy> store;
                   store.reserve(4);
                   store.emplace_back("a", std::vector<std::size_t>{50});
                   store.emplace_back("b", std::vector<std::size_t>{7});
                   if (troubled && touchy_at_first) store[1].when_rebound = trouble;
                   auto comm = Way::wrap(inner);
                   auto optimizer = Way::optimizer(zero::Adam{}, store, comm,
                                                   troubled ? settings_of_1 : zero::Settings{});
                   optimizer.step();
                   store.emplace_back("c", std::vector<std::size_t>{300}, zero::Attributes{}, 1);
                   if (troubled && touchy_later) store[1].when_rebound = trouble;
                   const ranks::Failure failure =
                       ranks::attempt([&] { optimizer.add_param_group(zero::Adam{}); });
                   if (failure.kind != Kind::none) {
                     // Whatever is asked of it next, it refuses or fails in words.
                     const auto after = ranks::attempt([&] { optimizer.mark_ready(2); });
                     if (after.kind == Kind::none)
                       throw std::runtime_error("goes on after: " + failure.text);
                     if (ranks::attempt([&] { optimizer.step(); }).kind == Kind::none) {
                       throw std::runtime_error("steps after: " + failure.text);
                     }
                     throw zero::UsageError("add: " + failure.text);
                   }
                   optimizer.step();
                 },
                 {.timeout = std::chrono::seconds(20)});
  return {ranks::failure_of(thrown[0]), ranks::failure_of(thrown[1])};
}

}  // namespace

TEMPLATE_LIST_TEST_CASE("memory that runs out on one rank is told to the others", "[robustness]",
                        Ways) {
  bool all_there = false;
  for (int left = 0; !all_there; ++left) {
    REQUIRE(left < 100);
    Scarce memory(left);
    zero::Settings settings;
    settings.memory = &memory;
    const auto begin = std::chrono::steady_clock::now();
    const auto failures = life<TestType>(settings, false, false, [] {});
    all_there = failures[1].kind == Kind::none;
    CAPTURE(left, failures[1].text);
    CHECK((failures[0].kind == Kind::none) == all_there);
    if (!all_there) CHECK_THAT(failures[0].text, ContainsSubstring("bad_alloc"));
    CHECK(std::chrono::steady_clock::now() - begin < std::chrono::seconds(15));
  }
}

TEMPLATE_LIST_TEST_CASE("what a framework throws while it is handed a buffer is told, too",
                        "[robustness]", Ways) {
  const std::vector<std::function<void()>> troubles{[] { throw std::runtime_error("trouble"); },
                                                    [] { throw zero::UsageError("trouble"); },
                                                    [] { throw 42; }};
  for (const auto& trouble : troubles) {
    for (const bool first : {true, false}) {
      const auto failures = life<TestType>({}, first, !first, trouble);
      CHECK(failures[0].kind != Kind::none);
      CHECK_THAT(failures[0].text, ContainsSubstring("rank 1 called abort"));
      // An int that was thrown is known to nobody, but for what it led to.
      if (!first) CHECK(failures[1].kind == Kind::usage);
    }
  }
}

namespace {

/// Needs room by its options, and doesn't always take vectors.
struct Roomy {
  std::size_t room = 1;
  bool vectors = true;
  static constexpr std::array<const char*, 0> slots{};
  [[nodiscard]] std::size_t workspace(std::span<const std::size_t> shape) const {
    return room * shape[0];
  }
  void validate(std::span<const std::size_t> shape) const {
    if (!vectors && shape.size() < 2) throw zero::UsageError("vectors are off");
  }
  void update(zero::TensorRef<float> tensor, std::array<std::span<float>, 0>, std::int64_t) const {
    for (float& x : tensor.workspace) x = 1;
    for (std::size_t i = 0; i < tensor.values.size(); ++i) {
      tensor.values[i] -= tensor.gradient[i] * tensor.workspace[i % tensor.workspace.size()];
    }
  }
};

}  // namespace

TEST_CASE("a whole-tensor optimizer's options may change, but not its room", "[robustness]") {
  for (const int world : {1, 2}) {
    ranks::rethrow_any(ranks::run(world, [](zero::InProcessCommunicator comm) {
      std::vector<float> values(10, 4.0F), gradient(10, 1.0F);
      std::vector store{zero::ParamRef("w", values, gradient)};
      zero::ZeroSharded optimizer{Roomy{.room = 2}, store, comm, zero::BalancedPartition{}};
      const auto refused = [&](Roomy options, const std::string& text) {
        optimizer.group(0) = options;
        const auto failure = ranks::attempt([&] { optimizer.step(); });
        if (failure.kind != Kind::usage || failure.text.find(text) == std::string::npos) {
          throw std::runtime_error("not refused: " + failure.text);
        }
      };
      optimizer.step();
      refused({.room = 50}, "parameter 0 ('w') needs more workspace");
      refused({.vectors = false}, "vectors are off");
      optimizer.group(0) = {};
      optimizer.step();
      if (values[9] != 2) throw std::runtime_error("two steps");
    }));
  }
}

namespace {

template <class Comm, class Stage>
float flushed(Comm&& wrap, Stage stage, zero::FiniteCheck check) {
  float value = 0;
  zero::run_ranks(2, [&](zero::InProcessCommunicator& inner) {
    auto comm = wrap(inner);
    // The sum is normal, its terms are not.
    std::vector<float> values(3, 1.0F), gradient(3, inner.rank() == 0 ? 0.9e-38F : 1e-38F);
    std::vector store{zero::ParamRef("w", values, gradient)};
    zero::Settings settings;
    settings.flush_denormals = true;
    settings.gradient_scale = 1e37;
    settings.finite_check = check;
    zero::ZeroSharded optimizer{zero::Sgd{.lr = 1}, store, comm, stage, settings};
    optimizer.step();
    if (inner.rank() == 0) value = values[0];
  });
  return value;
}

}  // namespace

TEST_CASE("flushing denormals leaves the bits the same under all policies", "[robustness]") {
  if (!zero::detail::can_flush_denormals) return;
  const auto shared = [](zero::InProcessCommunicator& comm) { return comm; };
  const auto buckets = [](zero::InProcessCommunicator& comm) {
    return zero::FaultInjector<zero::InProcessCommunicator, false>(comm);
  };
  const float right = flushed(shared, zero::Stage1{}, zero::FiniteCheck::never);
  CHECK(right == 1.0F - 1.9e-38F * 1e37F);
  for (const auto check : {zero::FiniteCheck::never, zero::FiniteCheck::always}) {
    CHECK(flushed(shared, zero::Stage1{}, check) == right);
    CHECK(flushed(shared, zero::Replicated{}, check) == right);
    CHECK(flushed(buckets, zero::Stage1{}, check) == right);
    CHECK(flushed(buckets, zero::Replicated{}, check) == right);
  }
}

TEST_CASE("masters are read anew where the caller has changed values", "[robustness]") {
  for (const int world : {1, 2}) {
    zero::run_ranks(world, [](zero::InProcessCommunicator& comm) {
      std::vector<zero::bfloat16> values(9, zero::bfloat16(1.0F)), gradient(9, zero::bfloat16(0.F));
      std::vector store{zero::ParamRef("w", values, gradient)};
      zero::ZeroSharded optimizer{zero::Sgd{}, store, comm};
      values.assign(9, zero::bfloat16(3.0F));
      optimizer.step();
      if (!(values[8] == zero::bfloat16(1.0F))) throw std::runtime_error("masters are stepped");
      values.assign(9, zero::bfloat16(3.0F));
      optimizer.reload_masters();
      optimizer.step();
      if (!(values[8] == zero::bfloat16(3.0F))) throw std::runtime_error("not reloaded");
    });
  }
}
