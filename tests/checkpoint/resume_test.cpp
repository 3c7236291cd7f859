// SPDX-License-Identifier: Apache-2.0
// A run that is saved and loaded, in a world of any size and under any policies, goes on as if it
// had never stopped: to the bit. Here with parameters of float and double.
#include "checkpoint/runs.hpp"

#include <span>
#include <string>
#include <variant>
#include <vector>

#include "catch.hpp"
#include "zero/optim/adam.hpp"
#include "zero/optim/sgd.hpp"
#include "zero/partition/balanced.hpp"

namespace {

using runs::Family;
using runs::Flat;
using runs::Shaped;
using runs::Stairs;
using runs::Tensors;
using runs::Way;
using zero::BalancedPartition;
using zero::ContiguousPartition;
using zero::NoView;
using zero::ParamAndGradView;
using zero::ParamView;
using zero::Replicated;
using zero::Stage1;
using zero::Stage2;
using zero::Stage3;

using Floats = Tensors<std::span<float>>;
using Mixed = Tensors<std::variant<std::span<float>, std::span<double>>>;

TEST_CASE("Resume: float parameters, every stage and view, at any world size") {
  Family<zero::AdamW> family(runs::make_case(),
                             {{.lr = 0.01}, {.lr = 0.02, .weight_decay = 0.1}, {.lr = 0.03}}, 2.0);
  family.add<Way<Floats, ContiguousPartition, ParamView, Stage1>>()
      .add<Way<Floats, BalancedPartition, NoView, Stage2>>()
      .add<Way<Flat<float>, ContiguousPartition, NoView, Stage1>>()
      .add<Way<Floats, ContiguousPartition, ParamAndGradView, Stage2, runs::Collectives>>()
      .add<Way<Floats, Stairs, NoView, Stage1, runs::Replicas>>()
      .add<Way<Shaped<float>, ContiguousPartition, ParamView, Stage3>>();
#ifndef ZERO_TEST_EACH_ONCE
  family.add<Way<Floats, Stairs, ParamView, Stage3>>()
      .add<Way<Floats, ContiguousPartition, NoView, Replicated>>();
#endif
  CHECK(family.wrongs(2) == std::vector<std::string>{});
}

#ifndef ZERO_TEST_EACH_ONCE
TEST_CASE("Resume: float and double parameters in one store") {
  Family<zero::Adam> family(runs::make_case(), {{.lr = 0.01, .amsgrad = true}});
  family.add<Way<Mixed, BalancedPartition, ParamView, Stage1>>()
      .add<Way<Mixed, Stairs, ParamView, Stage3>>();
  CHECK(family.wrongs(1) == std::vector<std::string>{});
}
#endif

}  // namespace
