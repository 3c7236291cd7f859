// SPDX-License-Identifier: Apache-2.0
// zero_bench [NAME…] [--json FILE] [--benchmark_…]: measures the rows whose names match one of the
// regular expressions NAME (all without one), prints their table, writes it as JSON, and returns 1
// where a bound is missed, 2 where it was called wrongly.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <cstdio>
#include <exception>
#include <string>
#include <string_view>
#include <vector>

#include "table.hpp"

int main(int argc, char** argv) {
  std::string json = ZERO_BENCH_JSON;
  std::string names;
  std::vector<char*> theirs{argv[0]};
  for (int i = 1; i < argc; ++i) {
    const std::string_view argument = argv[i];
    if (argument == "--json" && i + 1 < argc) {
      json = argv[++i];
    } else if (argument.starts_with("--json=")) {
      json = argument.substr(7);
    } else if (argument.starts_with("-")) {
      theirs.push_back(argv[i]);
    } else {
      (names += names.empty() ? "" : "|") += argument;
    }
  }
  std::string filter = "--benchmark_filter=" + names;
  if (!names.empty()) theirs.push_back(filter.data());

  int count = static_cast<int>(theirs.size());
  benchmark::Initialize(&count, theirs.data());
  if (benchmark::ReportUnrecognizedArguments(count, theirs.data())) return 2;
  if (benchmark::RunSpecifiedBenchmarks() == 0) return 2;
  benchmark::Shutdown();
  if (bench::lines().empty()) return 0;  // only listed

  bench::print_table();
  try {
    bench::write_json(json);
  } catch (const std::exception& exception) {
    std::fprintf(stderr, "%s\n", exception.what());
    return 2;
  }
  std::printf("\nwritten to %s\n", json.c_str());
  const auto missed = [](const bench::Line& line) { return !line.holds(); };
  return std::any_of(bench::lines().begin(), bench::lines().end(), missed) ? 1 : 0;
}
