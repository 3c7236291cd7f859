// SPDX-License-Identifier: Apache-2.0
/// @file
/// What a checkpoint says of itself: everything but the arrays.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include "zero/attributes.hpp"
#include "zero/checkpoint/safetensors.hpp"
#include "zero/error.hpp"

namespace zero {

/// One parameter, as it was registered.
struct SavedParameter {
  std::string name;
  std::vector<std::size_t> shape;
  std::size_t group = 0;
  std::int64_t steps = 0;   ///< how often it was stepped
  Attributes attributes{};  ///< `alias` counts in `CheckpointInfo::parameters`
  bool has_master = false;  ///< a copy is kept of it in a wider type, which is what was stepped

  /// Has neither values of its own nor state: it is tied to another.
  [[nodiscard]] bool tied() const noexcept { return attributes.alias.has_value(); }
  /// Has slots.
  [[nodiscard]] bool stepped() const noexcept { return !tied() && !attributes.frozen; }
  /// What was read has few enough for a `std::size_t`.
  [[nodiscard]] std::size_t elements() const noexcept {
    std::size_t product = 1;
    for (const std::size_t n : shape) product *= n;
    return product;
  }
};

/// A dynamic loss scale in the middle of its work.
struct SavedLossScale {
  double scale = 1;
  std::int32_t applied_in_a_row = 0;
};

/// Everything that a checkpoint holds beside the arrays. Nothing in it depends on how many ranks
/// there were or how the parameters lay, but for `world`, which is only told.
struct CheckpointInfo {
  static constexpr int version = 1;

  std::int64_t step = 0;             ///< steps applied
  int world = 1;                     ///< ranks that wrote it
  std::string optimizer{};           ///< its name; empty where it has none
  std::vector<std::string> slots{};  ///< of every parameter that is stepped
  std::optional<SavedLossScale> loss_scale{};
  std::optional<std::uint64_t> seed{};  ///< of stochastic rounding
  /// Options by name, one map a group; empty where the optimizer doesn't name them.
  std::vector<std::map<std::string, double>> groups{};
  std::vector<SavedParameter> parameters{};
  /// What the program that saved wanted to find again, by name: say how much data it has seen.
  std::map<std::string, std::string> notes{};
};

namespace detail {

/// Whether JSON can say it.
[[nodiscard]] inline bool is_utf8(const std::string& text) {
  try {
    (void)nlohmann::json(text).dump();
    return true;
  } catch (const nlohmann::json::exception&) {
    return false;
  }
}

/// To write, in the order of this page.
using Json = nlohmann::ordered_json;
/// What was read: finds a key among many in no time.
using ParsedJson = nlohmann::json;

/// The arrays of one parameter, by number.
inline constexpr std::size_t value_array = 0;
inline constexpr std::size_t master_array = 1;
inline constexpr std::size_t first_slot_array = 2;

/// What an array of a parameter is called: its values as the parameter itself.
[[nodiscard]] inline std::string array_name(const CheckpointInfo& info, std::size_t parameter,
                                            std::size_t array) {
  const std::string& name = info.parameters[parameter].name;
  if (array == value_array) return name;
  return name + "." + (array == master_array ? "master" : info.slots[array - first_slot_array]);
}

/// Whether a parameter has an array of this number.
[[nodiscard]] inline bool has_array(const SavedParameter& parameter, std::size_t array) {
  if (array == value_array) return !parameter.tied();
  return parameter.stepped() && (array != master_array || parameter.has_master);
}

/// Which parameter's which array a name belongs to. Takes memory as the names of parameters and
/// slots do, not as those of all arrays.
class ArrayNames {
 public:
  struct Array {
    std::size_t parameter;
    std::size_t array;
  };

  /// `info` must stay. Throws `UsageError` where two arrays would have one name.
  explicit ArrayNames(const CheckpointInfo& info) : info_(&info) {
    suffixes_.emplace("master", master_array);
    for (std::size_t s = 0; s < info.slots.size(); ++s) {
      const std::string& slot = info.slots[s];
      if (slot.empty() || slot.find('.') != std::string::npos ||
          !suffixes_.emplace(slot, first_slot_array + s).second) {
        throw UsageError("the slot " + in_quotes(slot) +
                         " must have a name of its own, not 'master' and without a dot");
      }
    }
    for (std::size_t i = 0; i < info.parameters.size(); ++i) {
      const std::string& name = info.parameters[i].name;
      if (name.empty()) {
        throw UsageError("parameter " + std::to_string(i) +
                         " has no name, which checkpoints know parameters by; give it one");
      }
      if (name == "__metadata__") {
        throw UsageError("parameter " + std::to_string(i) +
                         " is called __metadata__, which safetensors files keep for themselves; "
                         "give it another name");
      }
      const auto [other, is_new] = parameters_.emplace(name, i);
      if (!is_new) refuse(other->second, i, name);
    }
    for (std::size_t i = 0; i < info.parameters.size(); ++i) {
      const std::string& name = info.parameters[i].name;
      if (const auto other = state_array(name)) refuse(other->parameter, i, name);
    }
  }

  /// None where no array has the name.
  [[nodiscard]] std::optional<Array> find(std::string_view name) const {
    const auto parameter = parameters_.find(name);
    if (parameter == parameters_.end()) return state_array(name);
    return Array{parameter->second, value_array};
  }

 private:
  /// The one that is called PARAMETER.SLOT.
  [[nodiscard]] std::optional<Array> state_array(std::string_view name) const {
    const std::size_t dot = name.rfind('.');
    if (dot == std::string_view::npos) return std::nullopt;
    const auto parameter = parameters_.find(name.substr(0, dot));
    const auto suffix = suffixes_.find(name.substr(dot + 1));
    if (parameter == parameters_.end() || suffix == suffixes_.end()) return std::nullopt;
    if (!has_array(info_->parameters[parameter->second], suffix->second)) return std::nullopt;
    return Array{parameter->second, suffix->second};
  }

  [[noreturn]] void refuse(std::size_t i, std::size_t j, const std::string& name) const {
    throw UsageError(
        "parameters " + std::to_string(i) + " (" + in_quotes(info_->parameters[i].name) + ") and " +
        std::to_string(j) + " (" + in_quotes(info_->parameters[j].name) + ") both have an array " +
        in_quotes(name) + ", by which checkpoints know it; give the parameters other names");
  }

  const CheckpointInfo* info_;
  std::unordered_map<std::string_view, std::size_t> parameters_{};  ///< by name
  std::unordered_map<std::string_view, std::size_t> suffixes_{};    ///< to the array's number
};

[[noreturn]] inline void refuse_info(const std::string& file, const std::string& rule) {
  throw CheckpointError(file + ": its description " + rule +
                        "; the file is damaged, or not of this library");
}

/// Members of a JSON object, checked.
class JsonReader {
 public:
  JsonReader(std::string file, const ParsedJson& object, std::string where)
      : file_(std::move(file)), object_(object), where_(std::move(where)) {
    if (!object.is_object()) refuse("must be an object");
  }

  [[nodiscard]] bool has(const char* key) const { return object_.contains(key); }
  [[nodiscard]] const ParsedJson& at(const char* key) const {
    if (!has(key)) refuse(std::string("lacks '") + key + "'");
    return object_.at(key);
  }
  [[nodiscard]] const ParsedJson& array(const char* key) const {
    if (!at(key).is_array()) refuse(std::string("has a '") + key + "' that is no array");
    return at(key);
  }
  [[nodiscard]] std::string text(const char* key) const {
    if (!at(key).is_string()) refuse(std::string("has a '") + key + "' that is no string");
    return at(key).get<std::string>();
  }
  /// An integer of at most `most`.
  [[nodiscard]] std::uint64_t integer(const char* key, std::uint64_t most) const {
    return integer(at(key), key, most);
  }
  [[nodiscard]] std::uint64_t integer(const ParsedJson& value, const char* key,
                                      std::uint64_t most) const {
    if (!value.is_number_unsigned() || value.get<std::uint64_t>() > most) {
      refuse(std::string("has a '") + key + "' that is no integer from 0 to " +
             std::to_string(most));
    }
    return value.get<std::uint64_t>();
  }
  [[nodiscard]] bool flag(const char* key) const {
    if (!has(key)) return false;
    if (!at(key).is_boolean()) refuse(std::string("has a '") + key + "' that is no bool");
    return at(key).get<bool>();
  }
  [[nodiscard]] double number(const char* key) const {
    if (!at(key).is_number()) refuse(std::string("has a '") + key + "' that is no number");
    return at(key).get<double>();
  }
  [[noreturn]] void refuse(const std::string& rule) const {
    refuse_info(file_, (where_.empty() ? "" : where_ + " ") + rule);
  }

 private:
  std::string file_;
  const ParsedJson& object_;
  std::string where_;
};

[[nodiscard]] inline Json to_json(const SavedParameter& p) {
  Json json{{"name", p.name}, {"shape", p.shape}, {"group", p.group}, {"steps", p.steps}};
  if (p.has_master) json["master"] = true;
  if (p.attributes.frozen) json["frozen"] = true;
  if (p.attributes.alias) json["alias"] = *p.attributes.alias;
  if (p.attributes.unsplittable) json["unsplittable"] = true;
  if (p.attributes.quantum != 1) json["quantum"] = p.attributes.quantum;
  if (p.attributes.unit != 0) json["unit"] = p.attributes.unit;
  return json;
}

[[nodiscard]] inline Json to_json(const CheckpointInfo& info) {
  Json json{{"format", "zero-checkpoint"},
            {"version", CheckpointInfo::version},
            {"step", info.step},
            {"world", info.world},
            {"slots", info.slots}};
  if (!info.optimizer.empty()) json["optimizer"] = info.optimizer;
  if (info.loss_scale) {
    json["loss_scale"] = {{"scale", info.loss_scale->scale},
                          {"applied_in_a_row", info.loss_scale->applied_in_a_row}};
  }
  if (info.seed) json["seed"] = *info.seed;
  if (!info.notes.empty()) json["notes"] = info.notes;
  json["groups"] = Json::array();
  for (const auto& options : info.groups) {
    Json group = Json::object();
    for (const auto& [name, value] : options) group[name] = value;
    json["groups"].push_back(std::move(group));
  }
  json["parameters"] = Json::array();
  for (const SavedParameter& p : info.parameters) json["parameters"].push_back(to_json(p));
  return json;
}

[[nodiscard]] inline SavedParameter parameter_of(const std::string& file, const ParsedJson& json,
                                                 std::size_t index) {
  constexpr std::uint64_t most = std::numeric_limits<std::size_t>::max() / 16;
  SavedParameter p;
  const std::string place = "(parameter " + std::to_string(index) + ")";
  const JsonReader reader(file, json, place);
  p.name = reader.text("name");
  const JsonReader named(file, json,
                         "(parameter " + std::to_string(index) + ", " + in_quotes(p.name) + ")");
  std::uint64_t elements = 1;
  bool empty = false;
  for (const ParsedJson& n : named.array("shape")) {
    const std::uint64_t size = named.integer(n, "shape", most);
    p.shape.push_back(static_cast<std::size_t>(size));
    empty = empty || size == 0;
    if (size != 0 && elements > most / size) named.refuse("has more elements than memory has room");
    if (size != 0) elements *= size;
  }
  p.group = static_cast<std::size_t>(named.integer("group", most));
  p.steps =
      static_cast<std::int64_t>(named.integer("steps", std::numeric_limits<std::int64_t>::max()));
  p.has_master = named.flag("master");
  p.attributes.frozen = named.flag("frozen");
  p.attributes.unsplittable = named.flag("unsplittable");
  if (named.has("alias")) {
    p.attributes.alias = static_cast<std::size_t>(named.integer("alias", most));
    if (*p.attributes.alias >= index) named.refuse("is tied to none before it");
  }
  if (named.has("quantum")) {
    p.attributes.quantum = static_cast<std::size_t>(named.integer("quantum", most));
    if (p.attributes.quantum == 0) named.refuse("has the quantum 0");
  }
  if (named.has("unit")) {
    const double unit = named.number("unit");
    if (!(std::abs(unit) <= std::numeric_limits<int>::max()) || unit != std::floor(unit)) {
      named.refuse("has a 'unit' that is no int");
    }
    p.attributes.unit = static_cast<int>(unit);
  }
  return p;
}

/// Throws `CheckpointError` for what `to_json` can't have written.
[[nodiscard]] inline CheckpointInfo info_of(const std::string& file, const ParsedJson& json) {
  const JsonReader reader(file, json, "");
  if (!reader.has("format") || reader.at("format") != "zero-checkpoint") {
    refuse_info(file, "does not say that it is a zero-checkpoint");
  }
  const std::uint64_t version = reader.integer("version", 1'000'000);
  if (version != CheckpointInfo::version) {
    throw CheckpointError(file + ": it is of version " + std::to_string(version) +
                          " of the format, but this library knows version " +
                          std::to_string(CheckpointInfo::version) +
                          " alone; use the library that wrote it, or a newer one");
  }
  CheckpointInfo info;
  info.step =
      static_cast<std::int64_t>(reader.integer("step", std::numeric_limits<std::int64_t>::max()));
  info.world = static_cast<int>(reader.integer("world", std::numeric_limits<int>::max()));
  if (reader.has("optimizer")) info.optimizer = reader.text("optimizer");
  for (const ParsedJson& slot : reader.array("slots")) {
    if (!slot.is_string()) reader.refuse("has a slot that is no string");
    info.slots.push_back(slot.get<std::string>());
  }
  if (reader.has("loss_scale")) {
    const JsonReader scale(file, reader.at("loss_scale"), "(loss_scale)");
    info.loss_scale = {scale.number("scale"),
                       static_cast<std::int32_t>(scale.integer(
                           "applied_in_a_row", std::numeric_limits<std::int32_t>::max()))};
  }
  if (reader.has("seed")) {
    info.seed = reader.integer("seed", std::numeric_limits<std::uint64_t>::max());
  }
  if (reader.has("notes")) {
    if (!reader.at("notes").is_object()) reader.refuse("has 'notes' that are no object");
    for (const auto& [name, value] : reader.at("notes").items()) {
      if (!value.is_string()) reader.refuse("has a note " + in_quotes(name) + " that is no string");
      info.notes[name] = value.get<std::string>();
    }
  }
  for (const ParsedJson& group : reader.array("groups")) {
    if (!group.is_object()) reader.refuse("has a group that is no object");
    std::map<std::string, double> options;
    for (const auto& [name, value] : group.items()) {
      if (!value.is_number()) {
        reader.refuse("has an option " + in_quotes(name) + " that is no number");
      }
      options[name] = value.get<double>();
    }
    info.groups.push_back(std::move(options));
  }
  for (const ParsedJson& parameter : reader.array("parameters")) {
    SavedParameter p = parameter_of(file, parameter, info.parameters.size());
    if (p.group >= info.groups.size()) {
      refuse_info(file, "has a parameter " + in_quotes(p.name) + " of a group that it lacks");
    }
    if (p.tied() && (info.parameters[*p.attributes.alias].tied() ||
                     info.parameters[*p.attributes.alias].elements() != p.elements())) {
      refuse_info(file,
                  "ties " + in_quotes(p.name) + " to what is tied itself, or of another size");
    }
    info.parameters.push_back(std::move(p));
  }
  return info;
}

/// Throws `CheckpointError` for what is no JSON.
[[nodiscard]] inline ParsedJson parse_json(const std::string& file, const std::string& text) {
  try {
    return ParsedJson::parse(text);
  } catch (const ParsedJson::exception& error) {
    // Without the text around it, of any length.
    const std::string_view what = error.what();
    refuse_info(file, "is no JSON (" + std::string(what.substr(0, what.find("; last read"))) + ")");
  }
}

}  // namespace detail

}  // namespace zero
