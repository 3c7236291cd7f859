// SPDX-License-Identifier: Apache-2.0
#include "table.hpp"

#include <benchmark/benchmark.h>

#include <array>
#include <cstdio>
#include <exception>
#include <fstream>
#include <nlohmann/json.hpp>
#include <stdexcept>

namespace bench {

namespace {

std::vector<Line>& all_lines() {
  static std::vector<Line> all;
  return all;
}

void count(benchmark::State& state, const Line& line) {
  state.counters["median"] = line.value.median;
  state.counters["min"] = line.value.min;
  state.counters["max"] = line.value.max;
  if (!line.bound) return;
  state.counters["bound"] = line.bound->limit;
  state.counters["holds"] = line.holds() ? 1 : 0;
}

std::string bound_text(const Line& line) {
  if (!line.bound) return "";
  return (line.bound->at_least ? ">= " : "<= ") + text(line.bound->limit);
}

const char* verdict(const Line& line) {
  if (!line.error.empty()) return "FAILED";
  if (!line.bound) return "";
  return line.holds() ? "yes" : "NO";
}

}  // namespace

const std::vector<Line>& lines() { return all_lines(); }

std::string text(double value, const char* unit) {
  std::array<char, 64> buffer{};
  const int digits = value >= 100 ? 0 : value >= 10 ? 1 : value >= .1 ? 2 : 4;
  std::snprintf(buffer.data(), buffer.size(), "%.*f%s%s", digits, value, *unit != '\0' ? " " : "",
                unit);
  return buffer.data();
}

std::string rate(double bytes, const std::vector<double>& times) {
  return text(bytes / spread_of(times).median / 1e9, "GB/s");
}

void Sheet::ratio(const std::string& part, const Pairs& pairs, std::optional<Bound> bound,
                  std::string remark) {
  const bool speed = bound && bound->at_least;
  lines_.push_back({name(part), "", speed ? pairs.speed_ratio() : pairs.time_ratio(), bound,
                    std::move(remark), ""});
}

void Sheet::value(const std::string& part, std::string unit, Spread value,
                  std::optional<Bound> bound, std::string remark) {
  lines_.push_back({name(part), std::move(unit), value, bound, std::move(remark), ""});
}

void Sheet::error(std::string what) { lines_.push_back({row_, "", {}, {}, "", std::move(what)}); }

void Sheet::note(const std::string& part, std::string what) {
  lines_.push_back({name(part), "none", {}, {}, std::move(what), ""});
}

Row::Row(std::string name, std::function<void(Sheet&)> body) {
  benchmark::RegisterBenchmark(name.c_str(),
                               [name, body](benchmark::State& state) {
                                 Sheet sheet(name);
                                 for ([[maybe_unused]] auto _ : state) {
                                   try {
                                     body(sheet);
                                   } catch (const std::exception& exception) {
                                     sheet.error(exception.what());
                                     state.SkipWithError(exception.what());
                                     break;
                                   }
                                 }
                                 if (!sheet.lines().empty()) count(state, sheet.lines().front());
                                 all_lines().insert(all_lines().end(), sheet.lines().begin(),
                                                    sheet.lines().end());
                               })
      ->Iterations(1)
      ->Unit(benchmark::kSecond);
}

void print_table() {
  std::size_t width = 4;
  for (const Line& line : lines()) width = std::max(width, line.name.size());
  const auto print = [&](const char* name, const char* median, const char* spread,
                         const char* bound, const char* holds, const char* remark) {
    std::printf("%-*s  %10s  %-15s %-8s %-6s %s\n", static_cast<int>(width), name, median, spread,
                bound, holds, remark);
  };
  std::printf("\n");
  print("name", "median", "min .. max", "bound", "holds", "");
  for (const Line& line : lines()) {
    if (!line.error.empty()) {
      print(line.name.c_str(), "", "", "", verdict(line), line.error.c_str());
      continue;
    }
    if (line.unit == "none") {
      print(line.name.c_str(), "", "", "", "", line.remark.c_str());
      continue;
    }
    const std::string spread = text(line.value.min) + " .. " + text(line.value.max);
    print(line.name.c_str(), text(line.value.median, line.unit.c_str()).c_str(), spread.c_str(),
          bound_text(line).c_str(), verdict(line), line.remark.c_str());
  }
}

void write_json(const std::string& path) {
  nlohmann::ordered_json rows = nlohmann::ordered_json::array();
  for (const Line& line : lines()) {
    nlohmann::ordered_json row{{"name", line.name},
                               {"unit", line.unit.empty() ? "ratio" : line.unit}};
    if (!line.error.empty()) {
      row["error"] = line.error;
    } else if (line.unit != "none") {
      row["median"] = line.value.median;
      row["min"] = line.value.min;
      row["max"] = line.value.max;
    }
    if (line.bound) row[line.bound->at_least ? "at_least" : "at_most"] = line.bound->limit;
    row["holds"] = line.holds();
    row["remark"] = line.remark;
    rows.push_back(std::move(row));
  }
  std::ofstream file(path);
  file << nlohmann::ordered_json{{"rows", rows}}.dump(2) << '\n';
  if (!file.flush()) throw std::runtime_error("can't write " + path);
}

}  // namespace bench
