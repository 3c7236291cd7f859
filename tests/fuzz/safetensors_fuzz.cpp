// SPDX-License-Identifier: Apache-2.0
// Any bytes as a whole safetensors file: its header is read, or refused by a CheckpointError, and
// what was read can be written and read again.
#include <zero/checkpoint/safetensors.hpp>
#include <zero/error.hpp>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <span>
#include <string>

#include "checkpoint/memory_file.hpp"

namespace {

void require(bool holds) {
  if (!holds) std::abort();
}

void check(const zero::SafetensorsHeader& header, std::uint64_t file_bytes) {
  std::uint64_t filled = 0;
  for (const zero::TensorEntry& tensor : header.tensors) {
    require(tensor.begin == filled && tensor.end >= tensor.begin);
    std::uint64_t bytes = zero::dtype_bytes(tensor.dtype);
    require(bytes != 0);
    for (const std::size_t dimension : tensor.shape) bytes *= dimension;
    require(tensor.end - tensor.begin == bytes);
    filled = tensor.end;
  }
  require(header.data_begin + filled == file_bytes);

  std::string again = zero::format_safetensors_header(header.tensors, header.metadata);
  require(again.size() % 8 == 0);
  zero::SafetensorsHeader expected = header;
  expected.data_begin = again.size();
  again.resize(again.size() + filled);
  require(zero::read_safetensors_header(MemoryFile(std::as_bytes(std::span(again)))) == expected);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  zero::SafetensorsHeader header;
  try {
    header = zero::read_safetensors_header(MemoryFile(std::as_bytes(std::span(data, size))));
  } catch (const zero::CheckpointError& error) {
    require(*error.what() != '\0');
    return 0;
  }
  check(header, size);
  return 0;
}
