// SPDX-License-Identifier: Apache-2.0
// What the CUDA benchmarks print: one row a line, as JSON, for tests/cuda/gpu_check.py to collect.
#pragma once

#include <cstdio>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "../pairs.hpp"

namespace bench {

/// A string literal of JSON.
inline std::string quoted(std::string_view text) {
  std::string literal = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') literal += '\\';
    literal += static_cast<unsigned char>(c) < 0x20 ? ' ' : c;
  }
  return literal + '"';
}

/// @param at_least what the median must reach; none: for information
inline void print_row(const std::string& name, const std::string& unit, const Spread& value,
                      std::optional<double> at_least = {}, const std::string& remark = {}) {
  std::printf(R"({"name": %s, "unit": %s, "median": %.6g, "min": %.6g, "max": %.6g)",
              quoted(name).c_str(), quoted(unit).c_str(), value.median, value.min, value.max);
  if (at_least) std::printf(R"(, "at_least": %.6g)", *at_least);
  if (!remark.empty()) std::printf(R"(, "remark": %s)", quoted(remark).c_str());
  std::printf("}\n");
  std::fflush(stdout);  // whoever runs out of time still has the rows before
}

inline void print_skipped(const std::string& name, const std::string& why) {
  std::printf(R"({"name": %s, "skipped": %s})"
              "\n",
              quoted(name).c_str(), quoted(why).c_str());
  std::fflush(stdout);
}

inline void print_failed(const std::string& name, const std::string& why) {
  std::printf(R"({"name": %s, "error": %s})"
              "\n",
              quoted(name).c_str(), quoted(why).c_str());
  std::fflush(stdout);
}

/// "4301 GB/s" of bytes moved in a median time.
inline std::string rate(double bytes, const std::vector<double>& seconds) {
  char text[32];
  std::snprintf(text, sizeof text, "%.4g GB/s", bytes / spread_of(seconds).median / 1e9);
  return text;
}

}  // namespace bench
