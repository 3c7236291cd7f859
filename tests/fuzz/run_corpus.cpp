// SPDX-License-Identifier: Apache-2.0
// Runs a fuzz target once over every file of the folders that are named, where there is no
// libFuzzer.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

namespace {

int run(int folders, char** paths) {
  int inputs = 0;
  for (int i = 0; i < folders; ++i) {
    for (const auto& entry : std::filesystem::directory_iterator(paths[i])) {
      std::ifstream file(entry.path(), std::ios::binary);
      const std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
      // Of exactly that size, so that AddressSanitizer sees a byte too many.
      std::vector<std::uint8_t> input(bytes.size());
      std::ranges::transform(bytes, input.begin(),
                             [](char byte) { return static_cast<std::uint8_t>(byte); });
      std::printf("%s\n", entry.path().c_str());
      std::fflush(stdout);  // the last one is what ended it
      LLVMFuzzerTestOneInput(input.data(), input.size());
      ++inputs;
    }
  }
  std::printf("%d inputs\n", inputs);
  return inputs != 0 ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argc - 1, argv + 1);
  } catch (const std::exception& error) {
    std::printf("%s\n", error.what());
    return 1;
  }
}
