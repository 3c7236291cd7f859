// SPDX-License-Identifier: Apache-2.0
// The shipped update loop against values that PyTorch 1.13 computed: parameters after every step,
// state after the last. data/golden_optimizers.json says how it was made and why these tolerances
// tell right formulas from wrong ones.
#include <zero/detail/update_loop.hpp>
#include <zero/error.hpp>
#include <zero/optim/adam.hpp>
#include <zero/optim/sgd.hpp>
#include <zero/optimizer.hpp>

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <type_traits>
#include <vector>

#include "../plain_update.hpp"
#include "catch.hpp"

namespace {

using Json = nlohmann::json;

const Json& golden() {
  static const Json data = [] {
    std::ifstream file(ZERO_TEST_DATA_DIR "/golden_optimizers.json");
    return Json::parse(file);
  }();
  return data;
}

template <class Rule>
Rule rule_from(const Json& options) {
  Rule rule;
  rule.lr = options.at("lr").get<double>();
  rule.weight_decay = options.at("weight_decay").get<double>();
  rule.maximize = options.at("maximize").get<bool>();
  if constexpr (std::is_same_v<Rule, zero::Sgd>) {
    rule.momentum = options.at("momentum").get<double>();
    rule.dampening = options.at("dampening").get<double>();
    rule.nesterov = options.at("nesterov").get<bool>();
  } else {
    rule.beta1 = options.at("betas").at(0).get<double>();
    rule.beta2 = options.at("betas").at(1).get<double>();
    rule.eps = options.at("eps").get<double>();
    rule.amsgrad = options.at("amsgrad").get<bool>();
  }
  return rule;
}

struct Tolerance {
  double relative, absolute;
};

template <class Rule, class T>
constexpr Tolerance tolerance() {
  constexpr bool is_float = std::is_same_v<T, float>;
  if (std::is_same_v<Rule, zero::Sgd>) return {is_float ? 1e-6 : 2e-15, is_float ? 4e-6 : 1e-14};
  return {is_float ? 1e-6 : 2e-15, is_float ? 1e-9 : 1e-18};
}

template <class T>
std::vector<T> numbers(const Json& json) {
  std::vector<T> out;
  for (const double x : json.get<std::vector<double>>()) out.push_back(static_cast<T>(x));
  return out;
}

/// What differs first, or nothing.
template <class T>
std::string difference(const std::vector<T>& got, const Json& expected, Tolerance allowed) {
  const auto right = expected.get<std::vector<double>>();
  if (got.size() != right.size()) return "another size";
  for (std::size_t i = 0; i < got.size(); ++i) {
    const double off = std::abs(static_cast<double>(got[i]) - right[i]);
    if (!(off <= allowed.absolute + allowed.relative * std::abs(right[i]))) {
      std::ostringstream out;
      out.precision(std::numeric_limits<double>::max_digits10);
      out << "element " << i << " is " << got[i] << ", not " << right[i];
      return out.str();
    }
  }
  return {};
}

template <class Rule, class T>
void run_case(const Json& golden_case) {
  const auto rule = rule_from<Rule>(golden_case.at("options"));
  zero::validate(rule);
  const Json& inputs = golden().at("inputs").at(golden_case.at("dtype").get<std::string>());
  std::vector<T> values = numbers<T>(inputs.at("param0"));
  const std::size_t n = values.size();
  std::array<std::vector<T>, Rule::slots.size()> state;
  plain::Arrays<T, Rule::slots.size()> arrays{values.data(), nullptr, {}};
  for (std::size_t slot = 0; slot < zero::used_slots(rule); ++slot) {
    state[slot].assign(n, T(0));
    arrays.state[slot] = state[slot].data();
  }

  const Json& steps = golden_case.at("params_after_step");
  REQUIRE(steps.size() == inputs.at("grads").size());
  std::int64_t t = 0;
  for (const Json& expected : steps) {
    const std::vector<T> gradient = numbers<T>(inputs.at("grads").at(static_cast<std::size_t>(t)));
    ++t;
    arrays.gradient = gradient.data();
    plain::update(rule, rule.template scalars<T>(t), arrays, n);
    INFO("step " << t);
    CHECK(difference(values, expected, tolerance<Rule, T>()) == "");
  }

  std::size_t slots_in_torch = 0;
  for (std::size_t slot = 0; slot < Rule::slots.size(); ++slot) {
    const std::string name(Rule::slots[slot]);
    const Json& expected = golden_case.at("state_after_last_step");
    if (!expected.contains(name)) continue;
    ++slots_in_torch;
    INFO("slot " << name);
    CHECK(difference(state[slot], expected.at(name), tolerance<Rule, T>()) == "");
  }
  CHECK(slots_in_torch == zero::used_slots(rule));
}

template <class Rule>
void run_all(const std::string& optimizer, int expected_cases) {
  int cases = 0;
  for (const Json& golden_case : golden().at("cases")) {
    if (golden_case.at("optimizer") != optimizer) continue;
    ++cases;
    INFO(optimizer << ' ' << golden_case.at("dtype") << ' ' << golden_case.at("options").dump());
    if (golden_case.at("dtype") == "float32") {
      run_case<Rule, float>(golden_case);
    } else {
      REQUIRE(golden_case.at("dtype") == "float64");
      run_case<Rule, double>(golden_case);
    }
  }
  CHECK(cases == expected_cases);
}

}  // namespace

TEST_CASE("golden: Adam") { run_all<zero::Adam>("Adam", 32); }
TEST_CASE("golden: AdamW") { run_all<zero::AdamW>("AdamW", 32); }
TEST_CASE("golden: Sgd") { run_all<zero::Sgd>("SGD", 40); }

TEST_CASE("golden: what PyTorch refuses is a UsageError") {
  const Json& refused = golden().at("invalid_combinations");
  CHECK(refused.size() == 12);
  for (const Json& combination : refused) {
    INFO(combination.dump());
    REQUIRE(combination.at("optimizer") == "SGD");
    CHECK_THROWS_AS(rule_from<zero::Sgd>(combination.at("options")).validate(), zero::UsageError);
  }
}
