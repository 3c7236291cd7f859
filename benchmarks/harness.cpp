// SPDX-License-Identifier: Apache-2.0
#include <benchmark/benchmark.h>

#include <algorithm>
#include <cstdio>
#include <exception>
#include <fstream>
#include <string>
#include <string_view>
#include <vector>

#include "harness.hpp"
#include "table.hpp"

namespace bench {

int run(int argc, char** argv, std::string json, bool speaks) {
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
  benchmark::ConsoleReporter reporter;
  std::ofstream nowhere;
  if (!speaks) reporter.SetOutputStream(&nowhere), reporter.SetErrorStream(&nowhere);
  if (benchmark::RunSpecifiedBenchmarks(&reporter) == 0) return 2;
  benchmark::Shutdown();
  if (lines().empty()) return 0;  // only listed

  if (!speaks) return 0;
  print_table();
  try {
    write_json(json);
  } catch (const std::exception& exception) {
    std::fprintf(stderr, "%s\n", exception.what());
    return 2;
  }
  std::printf("\nwritten to %s\n", json.c_str());
  const auto missed = [](const Line& line) { return !line.holds(); };
  return std::any_of(lines().begin(), lines().end(), missed) ? 1 : 0;
}

}  // namespace bench
