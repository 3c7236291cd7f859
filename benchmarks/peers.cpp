// SPDX-License-Identifier: Apache-2.0
#include "peers.hpp"

#include <array>
#include <cstdio>
#include <exception>
#include <fstream>
#include <nlohmann/json.hpp>

namespace bench {

PeerTimes torch_zero(const std::vector<Shape>& shapes) {
  const std::string file = ZERO_BENCH_JSON_PREFIX "shapes.json";
  nlohmann::json all = nlohmann::json::array();
  for (const Shape& shape : shapes) all.push_back(shape.extents);
  std::ofstream(file) << all;

  // Not as a part of this program's MPI job.
  const std::string command =
      "env -i PATH=\"$PATH\" HOME=\"$HOME\" \"${PYTHON:-python3}\" '" ZERO_BENCH_SOURCE_DIR
      "/benchmarks/peers/torch_zero.py' '" +
      file + "' 2>&1";
  std::FILE* const pipe = ::popen(command.c_str(), "r");
  if (pipe == nullptr) return {{}, "python3 could not be started"};
  std::string output;
  std::array<char, 4096> buffer{};
  while (std::fgets(buffer.data(), static_cast<int>(buffer.size()), pipe) != nullptr) {
    output += buffer.data();
  }
  if (::pclose(pipe) != 0) return {{}, output.substr(0, output.find('\n'))};
  try {
    const nlohmann::json result = nlohmann::json::parse(output);
    return {result.at("seconds").get<std::vector<double>>(),
            result.at("remark").get<std::string>()};
  } catch (const std::exception& exception) {
    return {{}, exception.what()};
  }
}

}  // namespace bench
