// SPDX-License-Identifier: Apache-2.0
#include "inspect.hpp"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>
#include <zero/checkpoint/checkpoint.hpp>
#include <zero/checkpoint/info.hpp>
#include <zero/detail/element_bytes.hpp>

namespace checkpoint_tool {

namespace {

using Json = nlohmann::ordered_json;

std::string bytes_text(std::uint64_t bytes) {
  constexpr std::array units{"KiB", "MiB", "GiB", "TiB"};
  if (bytes < 1024) return std::to_string(bytes) + " bytes";
  double amount = static_cast<double>(bytes) / 1024;
  std::size_t unit = 0;
  while (amount >= 1024 && unit + 1 < units.size()) {
    amount /= 1024;
    ++unit;
  }
  char text[40];
  std::snprintf(text, sizeof text, "%.1f %s", amount, units[unit]);
  return text;
}

std::string number_text(double value) { return Json(value).dump(); }

std::string counted(std::size_t count, const char* what) {
  return std::to_string(count) + " " + what + (count == 1 ? "" : "s");
}

/// A name out of a file, for a terminal: it may have any characters.
std::string shown(const std::string& name) {
  std::string text = Json(name).dump(-1, ' ', false, Json::error_handler_t::replace);
  return text.substr(1, text.size() - 2);
}

std::string shape_text(const std::vector<std::size_t>& shape) { return Json(shape).dump(); }

/// One stored array of a parameter.
struct Array {
  std::string name;  ///< "values", "master" or the slot's
  std::string type;
  std::uint64_t bytes;
};

std::vector<Array> arrays_of(const zero::Checkpoint& checkpoint, std::size_t parameter) {
  const zero::CheckpointInfo& info = checkpoint.info();
  std::vector<Array> arrays;
  for (std::size_t a = 0; a < checkpoint.arrays(); ++a) {
    if (!zero::detail::has_array(info.parameters[parameter], a)) continue;
    const zero::ElementType type = checkpoint.array(parameter, a).type;
    std::string name = "values";
    if (a == zero::Checkpoint::master) name = "master";
    if (a >= zero::Checkpoint::first_slot) name = info.slots[a - zero::Checkpoint::first_slot];
    arrays.push_back({std::move(name), std::string(zero::detail::dtype_of(type)),
                      info.parameters[parameter].elements() * zero::detail::bytes_of(type)});
  }
  return arrays;
}

/// Columns as wide as they need to be.
std::string aligned(const std::vector<std::vector<std::string>>& rows) {
  std::vector<std::size_t> widths(rows.front().size());
  for (const auto& row : rows) {
    for (std::size_t c = 0; c < row.size(); ++c) widths[c] = std::max(widths[c], row[c].size());
  }
  std::string text;
  for (const auto& row : rows) {
    std::string line;
    for (std::size_t c = 0; c < row.size(); ++c) {
      line += row[c] + std::string(widths[c] - row[c].size() + 2, ' ');
    }
    line.erase(line.find_last_not_of(' ') + 1);
    text += line + "\n";
  }
  return text;
}

std::string notes_of(const zero::CheckpointInfo& info, const zero::SavedParameter& parameter) {
  if (parameter.tied()) {
    return "tied to " + shown(info.parameters[*parameter.attributes.alias].name);
  }
  return parameter.attributes.frozen ? "frozen" : "";
}

}  // namespace

std::string summary_of(const zero::Checkpoint& checkpoint) {
  const zero::CheckpointInfo& info = checkpoint.info();
  return "step " + std::to_string(info.step) + ", " + counted(info.parameters.size(), "parameter") +
         ", " + counted(checkpoint.files().size(), "file") + ", " + bytes_text(checkpoint.bytes()) +
         ", of " + counted(static_cast<std::size_t>(info.world), "rank");
}

std::string table_of(const zero::Checkpoint& checkpoint) {
  const zero::CheckpointInfo& info = checkpoint.info();
  std::string text = checkpoint.path().string() + ": " + summary_of(checkpoint) + "\n";
  if (info.loss_scale) {
    text += "loss scale " + number_text(info.loss_scale->scale) + ", " +
            counted(static_cast<std::size_t>(info.loss_scale->applied_in_a_row), "step") +
            " in a row\n";
  }
  if (info.seed) text += "stochastic rounding, seed " + std::to_string(*info.seed) + "\n";
  for (const auto& [name, note] : info.notes) {
    text += "note " + shown(name) + ": " + shown(note) + "\n";
  }
  for (std::size_t g = 0; g < info.groups.size(); ++g) {
    text += "group " + std::to_string(g) + ":";
    for (const auto& [name, value] : info.groups[g]) {
      text += " " + shown(name) + "=" + number_text(value);
    }
    text += "\n";
  }

  std::size_t elements = 0;
  std::uint64_t all_bytes = 0;
  std::vector<std::vector<std::string>> rows{
      {"parameter", "shape", "group", "steps", "bytes", "arrays", ""}};
  for (std::size_t i = 0; i < info.parameters.size(); ++i) {
    const zero::SavedParameter& parameter = info.parameters[i];
    std::string arrays;
    std::uint64_t bytes = 0;
    for (const Array& array : arrays_of(checkpoint, i)) {
      arrays += (arrays.empty() ? "" : " ") + shown(array.name) + ":" + array.type;
      bytes += array.bytes;
    }
    if (!parameter.tied()) elements += parameter.elements();
    all_bytes += bytes;
    rows.push_back({shown(parameter.name), shape_text(parameter.shape),
                    std::to_string(parameter.group), std::to_string(parameter.steps),
                    std::to_string(bytes), arrays, notes_of(info, parameter)});
  }
  text += "\n" + aligned(rows);
  text += "all: " + counted(info.parameters.size(), "parameter") + " of " +
          counted(elements, "element") + ", arrays of " + counted(all_bytes, "byte") + "\n\n";

  rows = {{"file", "bytes"}};
  for (const auto& file : checkpoint.files()) {
    rows.push_back({file.name(), std::to_string(file.bytes())});
  }
  return text + aligned(rows);
}

std::string json_of(const zero::Checkpoint& checkpoint) {
  Json json = zero::detail::to_json(checkpoint.info());
  for (std::size_t i = 0; i < checkpoint.info().parameters.size(); ++i) {
    Json& arrays = json["parameters"][i]["arrays"] = Json::object();
    for (const Array& array : arrays_of(checkpoint, i)) {
      arrays[array.name] = {{"dtype", array.type}, {"bytes", array.bytes}};
    }
  }
  json["files"] = Json::array();
  for (const auto& file : checkpoint.files()) {
    json["files"].push_back({{"name", file.name()}, {"bytes", file.bytes()}});
  }
  return json.dump(1, ' ', false, Json::error_handler_t::replace) + "\n";
}

}  // namespace checkpoint_tool
