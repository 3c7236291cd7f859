// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace example {

/// What the command line says.
struct Options {
  std::string model = "conv", communicator = "threads", mode = "compare", optimizer = "adamw";
  int ranks = 2;
  int stage = 1;
  std::int64_t steps = 0;  ///< 0: the model's own
  std::int64_t batch = 32;
  std::int64_t width = 128, layers = 2, context = 64;  ///< of the transformer
  double lr = 2e-3;
  std::uint64_t seed = 1;
  std::filesystem::path digits = "build/data/digits.csv";
  std::vector<std::filesystem::path> text{};
};

}  // namespace example
