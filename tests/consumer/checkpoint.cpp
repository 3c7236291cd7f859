// SPDX-License-Identifier: Apache-2.0
#include <zero/checkpoint/safetensors.hpp>
#include <zero/detail/checkpoint_file.hpp>

int main() {
  const zero::TensorEntry tensor{.name = "a", .dtype = "F32", .shape = {2}, .begin = 0, .end = 8};
  const std::string header = zero::format_safetensors_header(std::span(&tensor, 1), {});
  zero::detail::Checksum sum;
  sum.add(std::as_bytes(std::span(header)));
  return sum.text().size() == 16 ? 0 : 1;
}
