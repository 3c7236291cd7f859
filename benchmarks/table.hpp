// SPDX-License-Identifier: Apache-2.0
// The one table that zero_bench prints, and the rows that fill it.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "pairs.hpp"

namespace bench {

/// What a line promises.
struct Bound {
  double limit;
  bool at_least;
  [[nodiscard]] bool holds(double value) const {
    return at_least ? value >= limit : value <= limit;
  }
};
inline Bound at_least(double limit) { return {limit, true}; }
inline Bound at_most(double limit) { return {limit, false}; }

/// One line of the table.
struct Line {
  std::string name;
  std::string unit;  ///< empty: a ratio
  Spread value;
  std::optional<Bound> bound;  ///< none: for information
  std::string remark;
  std::string error;  ///< why there is no value
  [[nodiscard]] bool holds() const {
    return error.empty() && (!bound || bound->holds(value.median));
  }
};

/// What a row writes its lines to.
class Sheet {
 public:
  explicit Sheet(std::string row) : row_(std::move(row)) {}

  /// The pairs' ratio: of speed where a bound asks for at least so much, of time otherwise.
  /// @param part appended to the row's name; empty for the row's first line
  void ratio(const std::string& part, const Pairs& pairs, std::optional<Bound> bound,
             std::string remark);
  /// A number with a unit.
  void value(const std::string& part, std::string unit, Spread value, std::optional<Bound> bound,
             std::string remark);
  void error(std::string what);
  /// A line without a value, which is no failure.
  void note(const std::string& part, std::string what);

  [[nodiscard]] const std::vector<Line>& lines() const { return lines_; }

 private:
  [[nodiscard]] std::string name(const std::string& part) const {
    return part.empty() ? row_ : row_ + "/" + part;
  }
  std::string row_;
  std::vector<Line> lines_{};
};

/// Registers a benchmark whose body measures, and writes lines to the sheet. Define one at
/// namespace scope for each row.
struct Row {
  Row(std::string name, std::function<void(Sheet&)> body);
};

/// The lines of all rows that have run.
const std::vector<Line>& lines();
void print_table();
/// Throws `std::runtime_error` where the file can't be written.
void write_json(const std::string& path);

/// "%.3g" of a number, and the unit.
std::string text(double value, const char* unit = "");
/// "48 GB/s" for bytes moved in a median time.
std::string rate(double bytes, const std::vector<double>& times);

}  // namespace bench
