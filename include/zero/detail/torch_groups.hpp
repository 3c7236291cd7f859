// SPDX-License-Identifier: Apache-2.0
/// @file
/// PyTorch's `param_groups` and ours: the same options in other words.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "zero/checkpoint/info.hpp"
#include "zero/error.hpp"
#include "zero/optim/adam.hpp"
#include "zero/optim/sgd.hpp"
#include "zero/optimizer.hpp"

namespace zero::detail {

/// What PyTorch's optimizer of the same meaning is like.
struct TorchRule {
  const char* name;                    ///< ours
  std::vector<std::string> options{};  ///< ours, in their order
  std::optional<bool> decoupled{};     ///< of Adam: how weights decay
  std::vector<std::string> slots{};

  [[nodiscard]] bool is_adam() const { return decoupled.has_value(); }
  [[nodiscard]] bool has(const std::string& option) const {
    return std::find(options.begin(), options.end(), option) != options.end();
  }
  /// How many slots PyTorch keeps of a parameter that was stepped with these options.
  [[nodiscard]] std::size_t used_slots(const std::map<std::string, double>& group) const {
    if (is_adam()) return group.at("amsgrad") != 0 ? 3 : 2;
    return group.at("momentum") != 0 ? 1 : 0;
  }
};

/// By the optimizer's name, since others than zero's own may keep the same (`TorchOptimizer`).
template <class Opt>
[[nodiscard]] TorchRule torch_rule() {
  constexpr std::string_view name = optimizer_name<Opt>();
  static_assert(
      name == Adam::name || name == AdamW::name || name == Sgd::name,
      "PyTorch's optimizer state is known for zero::Adam, zero::AdamW and zero::Sgd; for another "
      "optimizer use zero::save and zero::load");
  using Known = std::conditional_t<name == Adam::name, Adam,
                                   std::conditional_t<name == Sgd::name, Sgd, AdamW>>;
  TorchRule rule{.name = Known::name.data()};
  if constexpr (!std::is_same_v<Known, Sgd>) rule.decoupled = std::is_same_v<Known, AdamW>;
  Known options{};
  Known::for_each_option(options,
                         [&](const char* option, auto&) { rule.options.emplace_back(option); });
  rule.slots.assign(Known::slots.begin(), Known::slots.end());
  return rule;
}

[[nodiscard]] inline bool is_flag(std::string_view option) {
  return option == "amsgrad" || option == "maximize" || option == "nesterov";
}

/// One of PyTorch's `param_groups`.
struct TorchGroup {
  std::map<std::string, double> options{};  ///< ours
  std::vector<std::uint64_t> params{};      ///< indices into `state`
  std::vector<std::string> names{};         ///< of `params`, where the file has them
};

/// Throws `CheckpointError` naming file, group and option for what our optimizer can't do.
class TorchGroupReader {
 public:
  TorchGroupReader(std::string file, const TorchRule& rule, std::size_t group)
      : file_(std::move(file)), rule_(rule), group_(group) {}

  [[nodiscard]] TorchGroup read(const ParsedJson& json) const {
    if (!json.is_object()) refuse("is no object");
    TorchGroup group;
    // Files of older versions lack some of them.
    for (const std::string& option : rule_.options) {
      if (is_flag(option)) group.options[option] = 0;
    }
    for (const auto& [key, value] : json.items()) {
      if (key == "params") {
        read_params(value, group.params);
      } else if (key == "param_names") {
        read_names(value, group.names);
      } else {
        read_option(key, value, group.options);
      }
    }
    if (!json.contains("params")) refuse("lacks 'params'");
    if (json.contains("param_names") && group.names.size() != group.params.size()) {
      refuse("has " + std::to_string(group.params.size()) + " 'params', but " +
             std::to_string(group.names.size()) + " 'param_names'");
    }
    for (const std::string& option : rule_.options) {
      if (group.options.contains(option)) continue;
      refuse("lacks the option " + in_quotes(option.starts_with("beta") ? "betas" : option) +
             ", which " + rule_.name + " has; load into the optimizer that PyTorch's was");
    }
    return group;
  }

 private:
  [[noreturn]] void refuse(const std::string& what) const {
    throw CheckpointError(file_ + ": group " + std::to_string(group_) + " of 'param_groups' " +
                          what);
  }

  void read_params(const ParsedJson& json, std::vector<std::uint64_t>& params) const {
    if (!json.is_array()) refuse("has 'params' that are no array");
    for (const ParsedJson& index : json) {
      if (!index.is_number_unsigned()) refuse("has 'params' that are no indices from 0 on");
      params.push_back(index.get<std::uint64_t>());
    }
  }
  void read_names(const ParsedJson& json, std::vector<std::string>& names) const {
    if (!json.is_array()) refuse("has 'param_names' that are no array");
    for (const ParsedJson& name : json) {
      if (!name.is_string()) refuse("has 'param_names' that are no strings");
      names.push_back(name.get<std::string>());
    }
  }

  [[nodiscard]] double number(const std::string& key, const ParsedJson& value) const {
    if (value.is_boolean()) return value.get<bool>() ? 1 : 0;
    if (!value.is_number()) refuse("has an option " + in_quotes(key) + " that is no number");
    return value.get<double>();
  }

  void read_option(const std::string& key, const ParsedJson& value,
                   std::map<std::string, double>& options) const {
    if (key == "betas" && rule_.is_adam()) {
      if (!value.is_array() || value.size() != 2) refuse("has 'betas' that are not two numbers");
      options["beta1"] = number(key, value[0]);
      options["beta2"] = number(key, value[1]);
    } else if (key == "decoupled_weight_decay" && rule_.is_adam()) {
      if ((number(key, value) != 0) == *rule_.decoupled) return;
      refuse(std::string("is of ") + (*rule_.decoupled ? "Adam" : "AdamW") +
             " ('decoupled_weight_decay'), but the optimizer is zero::" + rule_.name +
             "; load into zero::" + (*rule_.decoupled ? "Adam" : "AdamW"));
    } else if (rule_.has(key)) {
      options[key] = number(key, value);
    } else if (!is_neutral(key, value)) {
      refuse("has the option " + in_quotes(key) + " with the value " +
             in_quotes(value.dump(-1, ' ', false, ParsedJson::error_handler_t::replace)) +
             ", which " + rule_.name + " lacks; load into the optimizer that PyTorch's was");
    }
  }

  /// Whether an option that we don't have can be left out: it says how, not what is computed, is a
  /// schedule's own note, or off.
  [[nodiscard]] static bool is_neutral(const std::string& key, const ParsedJson& value) {
    constexpr std::array<std::string_view, 9> known{"foreach", "capturable",   "differentiable",
                                                    "fused",   "initial_lr",   "max_lr",
                                                    "min_lr",  "max_momentum", "base_momentum"};
    if (std::find(known.begin(), known.end(), key) != known.end()) return true;
    if (value.is_number()) return value.get<double>() == 0;
    return value.is_null() || value.is_string() || (value.is_boolean() && !value.get<bool>());
  }

  std::string file_;
  const TorchRule& rule_;
  std::size_t group_;
};

/// As PyTorch's optimizer of the same meaning has it. Not told is which of Adam and AdamW it was:
/// the class that loads it knows.
[[nodiscard]] inline Json to_torch(const TorchRule& rule, const TorchGroup& group) {
  Json json = Json::object();
  for (const std::string& option : rule.options) {
    const double value = group.options.at(option);
    if (option == "beta1") {
      json["betas"] = {value, group.options.at("beta2")};
    } else if (is_flag(option)) {
      json[option] = value != 0;
    } else if (option != "beta2") {
      json[option] = value;
    }
  }
  json["foreach"] = nullptr;
  if (rule.is_adam()) json["capturable"] = false;
  json["differentiable"] = false;
  json["fused"] = nullptr;
  json["params"] = group.params;
  json["param_names"] = group.names;
  return json;
}

}  // namespace zero::detail
