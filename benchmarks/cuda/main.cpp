// SPDX-License-Identifier: Apache-2.0
// zero_cuda_bench [--tiny] update|step|norm|memory|shapes: prints rows as JSON, one a line.
// `shapes` prints the models' tensors instead, for peers that are no part of this program.
#include <cuda_runtime_api.h>

#include <cstdio>
#include <exception>
#include <functional>
#include <map>
#include <string>
#include <string_view>

#include "benchmarks.hpp"
#include "models.hpp"
#include "rows.hpp"
#include "zero/cuda/error.hpp"

namespace {

void print_shapes(bool tiny) {
  for (const bench::Model& model : bench::update_models(tiny)) {
    std::printf("{\"name\": %s, \"tensors\": [", bench::quoted(model.name).c_str());
    for (std::size_t k = 0; k < model.tensors.size(); ++k) {
      std::printf("%s%zu", k == 0 ? "" : ", ", model.tensors[k]);
    }
    std::printf("]}\n");
  }
}

}  // namespace

int main(int argc, char** argv) {
  const std::map<std::string, std::function<void(bool)>, std::less<>> benchmarks{
      {"update", bench::update}, {"step", bench::step},    {"norm", bench::norm},
      {"memory", bench::memory}, {"shapes", print_shapes},
  };
  bool tiny = false;
  int status = 0;
  for (int k = 1; k < argc; ++k) {
    const std::string_view argument = argv[k];
    if (argument == "--tiny") {
      tiny = true;
      continue;
    }
    const auto benchmark = benchmarks.find(argument);
    if (benchmark == benchmarks.end()) {
      std::fprintf(stderr, "usage: %s [--tiny] update|step|norm|memory|shapes ...\n", argv[0]);
      return 2;
    }
    try {
      benchmark->second(tiny);
    } catch (const std::exception& error) {
      bench::print_failed(benchmark->first, error.what());
      status = 1;
    }
  }
  return status;
}
