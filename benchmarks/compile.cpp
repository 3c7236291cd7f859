// SPDX-License-Identifier: Apache-2.0
// What the umbrella header costs a translation unit. For information: no bound.
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <string>

#include "table.hpp"

namespace bench {
namespace {

/// A directory that is gone at the end.
struct Scratch {
  std::filesystem::path path =
      std::filesystem::temp_directory_path() / ("zero_bench_" + std::to_string(std::rand()));
  Scratch() { std::filesystem::create_directory(path); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch() {
    std::error_code ignored;
    std::filesystem::remove_all(path, ignored);
  }
};

void run(const std::string& flags, const std::string& source) {
  const std::string command = "'" ZERO_BENCH_COMPILER "' -std=c++20 -I'" ZERO_BENCH_SOURCE_DIR
                              "/include' " +
                              flags + " '" + source + "'";
  if (std::system(command.c_str()) != 0) throw std::runtime_error("failed: " + command);
}

void measure(Sheet& sheet, const std::string& part, const std::string& what,
             const std::string& flags, const std::string& subject, const std::string& reference,
             int count) {
  const Pairs pairs =
      run_pairs([&] { run(flags, subject); }, [&] { run(flags, reference); }, count);
  sheet.ratio(part, pairs, {},
              what + ": " + text(spread_of(pairs.subject).median, "s") + ", <ranges> alone " +
                  text(spread_of(pairs.reference).median, "s"));
}

const Row compile("compile", [](Sheet& sheet) {
  const Scratch scratch;
  const auto source = [&](const char* name, const char* content) {
    const std::filesystem::path path = scratch.path / name;
    std::ofstream(path) << content;
    return path.string();
  };
  const std::string ranges = source("ranges.cpp", "#include <ranges>\n");
  const std::string umbrella = source("umbrella.cpp", "#include <zero/zero.hpp>\n");
  const std::string example = ZERO_BENCH_SOURCE_DIR "/examples/quickstart.cpp";
  measure(sheet, "", "the umbrella, -fsyntax-only", "-fsyntax-only", umbrella, ranges, 5);
  measure(sheet, "quickstart", "quickstart, -O2 -c", "-O2 -c -o /dev/null", example, ranges, 3);
});

}  // namespace
}  // namespace bench
