// SPDX-License-Identifier: Apache-2.0
// As resume_test.cpp, where state and values differ in type or are rounded by noise, where steps
// are skipped, and for optimizers of whole tensors.
#include <span>
#include <string>
#include <vector>

#include "catch.hpp"
#include "checkpoint/runs.hpp"
#include "zero/bfloat16.hpp"
#include "zero/float16.hpp"
#include "zero/optim/adam.hpp"
#include "zero/optim/lamb.hpp"
#include "zero/optim/muon.hpp"
#include "zero/optim/sgd.hpp"
#include "zero/partition/balanced.hpp"

namespace {

using runs::Case;
using runs::Family;
using runs::Stairs;
using runs::Tensors;
using runs::Way;
using zero::BalancedPartition;
using zero::ContiguousPartition;
using zero::NoView;
using zero::ParamView;
using zero::Replicated;
using zero::Stage1;
using zero::Stage2;
using zero::Stage3;

const std::vector<std::string> none{};

TEST_CASE("Resume: bfloat16 parameters with master copies") {
  using Halves = Tensors<std::span<zero::bfloat16>>;
  Family<zero::Adam> family(runs::make_case(), {{.lr = 0.01}, {.lr = 0.02}});
  family.add<Way<Halves, BalancedPartition, NoView, Stage1>>()
      .add<Way<Halves, ContiguousPartition, ParamView, Stage3>>();
  CHECK(family.wrongs(1) == none);
}

TEST_CASE("Resume: float16 parameters, a dynamic loss scale, steps skipped before and after") {
  using Halves = Tensors<std::span<zero::float16>>;
  Case c = runs::make_case();
  c.settings.loss_scale = zero::LossScale::dynamic(1024);
  c.settings.loss_scale->interval = 2;  // applied steps, some before the save and some after
  Family<zero::Sgd> family(c, {{.lr = 0.1, .momentum = 0.9}});
  family.add<Way<Halves, ContiguousPartition, ParamView, Stage1>>()
      .add<Way<Halves, Stairs, NoView, Stage2>>();
  CHECK(family.wrongs(1) == none);
}

TEST_CASE("Resume: stochastic rounding of values goes on with the noise that it had") {
  using Halves = Tensors<std::span<zero::bfloat16>>;
  Family<zero::Adam, zero::StochasticPrecision> family(runs::make_case(), {{.lr = 0.01}});
  family.add<Way<Halves, ContiguousPartition, NoView, Replicated>>()
      .add<Way<Halves, Stairs, ParamView, Stage1>>();
  CHECK(family.wrongs(1) == none);
}

TEST_CASE("Resume: slots in bfloat16, rounded stochastically") {
  using Floats = Tensors<std::span<float>>;
  Family<zero::Adam, zero::Bfloat16Slots> family(runs::make_case(), {{.lr = 0.01}});
  family.add<Way<Floats, ContiguousPartition, NoView, Stage1>>()
      .add<Way<Floats, BalancedPartition, ParamView, Stage2>>();
  CHECK(family.wrongs(1) == none);
}

TEST_CASE("Resume: optimizers of whole tensors") {
  using Floats = Tensors<std::span<float>>;
  Family<zero::Lamb> lamb(runs::make_case(), {{.lr = 0.01}, {.lr = 0.02}});
  lamb.add<Way<Floats, BalancedPartition, ParamView, Stage1>>()
      .add<Way<Floats, BalancedPartition, NoView, Replicated>>();
  CHECK(lamb.wrongs(1) == none);
  Family<zero::Muon> muon(runs::make_matrices(), {{.lr = 0.01}});
  muon.add<Way<Floats, BalancedPartition, ParamView, Stage3>>();
  CHECK(muon.wrongs(1) == none);
}

}  // namespace
