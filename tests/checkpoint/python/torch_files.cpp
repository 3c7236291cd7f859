// SPDX-License-Identifier: Apache-2.0
// torch_files FOLDER: goes on from each of PyTorch's states there, which data/torch/generate.py has
// written, and writes beside it the state as loaded and after some steps.
#include <cstdio>
#include <exception>
#include <filesystem>

#include "../torch_cases.hpp"

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fputs("usage: torch_files FOLDER\n", stderr);
    return 2;
  }
  const std::filesystem::path folder = argv[1];
  try {
    torch_cases::for_each(
        [&](const auto& of) { (void)torch_cases::go_on(of, folder, 3, folder, [](auto&) {}); });
  } catch (const std::exception& error) {
    std::fprintf(stderr, "torch_files: %s\n", error.what());
    return 1;
  }
  return 0;
}
