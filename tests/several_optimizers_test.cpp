// SPDX-License-Identifier: Apache-2.0
// Several optimizers on one communicator, and options that only a close look tells apart.
#include <cstddef>
#include <exception>
#include <limits>
#include <string>
#include <type_traits>
#include <vector>
#include <zero/comm/fault_injector.hpp>
#include <zero/zero.hpp>

#include "catch.hpp"

namespace {

using SharedMemory = zero::InProcessCommunicator;
using CollectivesOnly = zero::FaultInjector<zero::InProcessCommunicator, false>;

template <class Comm>
Comm wrap(zero::InProcessCommunicator& comm) {
  if constexpr (std::is_same_v<Comm, SharedMemory>) {
    return comm;
  } else {
    return Comm(comm);
  }
}

/// A rank's parameters: one tensor and its gradient of ones.
struct Model {
  explicit Model(std::size_t elements)
      : values(elements, 1.0F), gradient(elements, 1.0F), store{{"w", values, gradient}} {}
  std::vector<float> values, gradient;
  std::vector<zero::ParamRef<float>> store;
};

template <class F>
std::string refusal_of(F&& f) {
  try {
    f();
  } catch (const zero::UsageError& error) {
    return error.what();
  }
  return {};
}

/// What `body(comm, rank)` gives on each of two ranks.
template <class Comm, class F>
std::vector<std::string> on_two_ranks(F body) {
  std::vector<std::string> texts(2);
  zero::run_ranks(2, [&](zero::InProcessCommunicator& in_process) {
    Comm comm = wrap<Comm>(in_process);
    texts[static_cast<std::size_t>(comm.rank())] = body(comm, comm.rank());
  });
  return texts;
}

using Catch::Matchers::ContainsSubstring;

}  // namespace

TEMPLATE_TEST_CASE("optimizers stepped in another order are told apart", "", SharedMemory,
                   CollectivesOnly) {
  const auto texts = on_two_ranks<TestType>([](TestType& comm, int rank) {
    Model a(100), b(100);
    zero::ZeroSharded first{zero::Sgd{.lr = 0.5}, a.store, comm};
    zero::ZeroSharded second{zero::Sgd{.lr = 0.5}, b.store, comm};
    const std::string refusal = refusal_of([&] { (rank == 0 ? first : second).step(); });
    if (a.values != std::vector<float>(100, 1.0F) || a.values != b.values)
      return "changed" + refusal;
    first.step();
    second.step();
    if (a.values != std::vector<float>(100, 0.5F) || a.values != b.values) return "wrong" + refusal;
    return refusal;
  });
  for (const std::string& text : texts) CHECK_THAT(text, ContainsSubstring("another optimizer"));
  CHECK_THAT(texts[0], ContainsSubstring("step: rank 1"));
  CHECK_THAT(texts[1], ContainsSubstring("step: rank 0"));
}

TEST_CASE("optimizers of other types and sizes are told apart before anything is read") {
  const auto texts = on_two_ranks<SharedMemory>([](SharedMemory& comm, int rank) {
    Model a(4), b(4000);
    zero::ZeroSharded first{zero::Sgd{}, a.store, comm, zero::Replicated{}};
    zero::ZeroSharded second{zero::Adam{}, b.store, comm};
    return refusal_of([&] { rank == 0 ? (void)first.step() : (void)second.step(); });
  });
  for (const std::string& text : texts) CHECK_THAT(text, ContainsSubstring("another optimizer"));
}

TEMPLATE_TEST_CASE("options that matter only for tiny gradients are compared", "", SharedMemory,
                   CollectivesOnly) {
  const auto texts = on_two_ranks<TestType>([](TestType& comm, int rank) {
    Model model(10);
    zero::ZeroSharded optimizer{zero::Adam{.eps = rank == 0 ? 1e-8 : 1e-12}, model.store, comm};
    return refusal_of([&] { optimizer.step(); });
  });
  for (const std::string& text : texts) {
    CHECK_THAT(text, ContainsSubstring("rank 1") && ContainsSubstring("options differ"));
  }
}

TEST_CASE("two uses of a tied gradient are not leased at once") {
  zero::run_ranks(1, [](zero::InProcessCommunicator& comm) {
    Model model(4);
    model.store.emplace_back("again", model.values, model.gradient, zero::Attributes{.alias = 0});
    zero::ZeroSharded optimizer{zero::Sgd{.lr = 1}, model.store, comm};
    {
      const auto first = optimizer.gradient(0);
      const std::string refusal = refusal_of([&] { (void)optimizer.gradient(1); });
      if (refusal.find("parameter 1 ('again')") == std::string::npos ||
          refusal.find("tied") == std::string::npos) {
        throw std::runtime_error("not refused: " + refusal);
      }
      for (float& g : first.values()) g = 1;
    }
    {
      const auto second = optimizer.gradient(1);
      if (!second.adds()) throw std::runtime_error("must add");
      for (float& g : second.values()) g += 2;
    }
    optimizer.step();
    if (model.values != std::vector<float>(4, -2.0F)) throw std::runtime_error("wrong sum");
  });
}

TEST_CASE("what one rank alone refuses at construction, all refuse") {
  const auto texts = on_two_ranks<SharedMemory>([](SharedMemory& comm, int rank) {
    Model model(4);
    zero::Settings settings;
    if (rank == 1) settings.gradient_scale = std::numeric_limits<double>::quiet_NaN();
    return refusal_of(
        [&] { zero::ZeroSharded optimizer{zero::Sgd{}, model.store, comm, settings}; });
  });
  for (const std::string& text : texts) {
    CHECK_THAT(text, ContainsSubstring("rank 1") && ContainsSubstring("gradient_scale"));
  }
}

TEST_CASE("a tie across groups is refused") {
  zero::run_ranks(1, [](zero::InProcessCommunicator& comm) {
    Model model(4);
    model.store.emplace_back("again", model.values, model.gradient, zero::Attributes{.alias = 0},
                             1);
    const std::string refusal = refusal_of([&] {
      zero::ZeroSharded optimizer{zero::Groups{zero::Sgd{}, zero::Sgd{}}, model.store, comm};
    });
    if (refusal.find("another group") == std::string::npos) throw std::runtime_error(refusal);
  });
}

TEST_CASE("tied entries of a flat buffer take no room, wherever they stand") {
  const auto texts = on_two_ranks<CollectivesOnly>([](CollectivesOnly& comm, int) {
    std::vector<float> values(8, 1.0F), gradient(8, 1.0F);
    zero::FlatParams<float> params(values, gradient,
                                   {{"a", {4}}, {"b", {4}, {.alias = 0}}, {"c", {4}}});
    zero::ZeroSharded optimizer{zero::Sgd{.lr = 0.5}, params, comm};
    optimizer.step();
    return std::string(values == std::vector<float>(8, 0.5F) ? "right" : "wrong");
  });
  CHECK(texts == std::vector<std::string>{"right", "right"});
}
