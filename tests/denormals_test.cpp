// SPDX-License-Identifier: Apache-2.0
// State that decays below the smallest normal number.
#include <limits>
#include <span>
#include <vector>
#include <zero/detail/denormals.hpp>
#include <zero/zero.hpp>

#include "catch.hpp"

namespace {

constexpr float smallest = std::numeric_limits<float>::min();

/// The momentum of one element after a first gradient of the smallest normal number and some of 0.
template <class Stage>
float momentum_after(int steps, bool flushes) {
  float momentum = 0;
  zero::run_ranks(2, [&](zero::InProcessCommunicator& comm) {
    std::vector<float> values(11, 1.0F), gradient(11, smallest);
    std::vector store{zero::ParamRef("p", values, gradient)};
    zero::Settings settings;
    settings.gradient_scale = 0.5;
    settings.flush_denormals = flushes;
    zero::ZeroSharded optimizer{zero::Sgd{.lr = 1, .momentum = 0.5}, store, comm, Stage{},
                                settings};
    for (int step = 0; step < steps; ++step) {
      optimizer.step();
      gradient.assign(11, 0.0F);
    }
    const auto state = optimizer.state();
    if (comm.rank() == 0) momentum = state.front().values[0];
  });
  return momentum;
}

}  // namespace

TEMPLATE_TEST_CASE("denormal state counts unless it is to be flushed", "", zero::Stage1,
                   zero::Replicated) {
  CHECK(momentum_after<TestType>(1, false) == smallest);
  CHECK(momentum_after<TestType>(4, false) == smallest / 8);
  if (!zero::detail::can_flush_denormals) {
    CHECK_THROWS_AS(momentum_after<TestType>(1, true), zero::UsageError);
    return;
  }
  CHECK(momentum_after<TestType>(1, true) == smallest);
  CHECK(momentum_after<TestType>(2, true) == 0);
}

TEST_CASE("flushing ends with the step") {
  volatile float number = smallest;
  {
    const zero::detail::FlushDenormals flush(zero::detail::can_flush_denormals);
    CHECK((number / 2 == 0) == zero::detail::can_flush_denormals);
  }
  CHECK(number / 2 != 0);
}
