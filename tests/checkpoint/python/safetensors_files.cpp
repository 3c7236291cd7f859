// SPDX-License-Identifier: Apache-2.0
// What check_safetensors.py asks for: writes files that Python reads, or checks one that Python
// wrote. Element i of every tensor is (5 i + 1) modulo 97, and 0 or 1 in BOOL; a tensor's name is
// its dtype, a dot, and anything.
#include <zero/bfloat16.hpp>
#include <zero/checkpoint/safetensors.hpp>
#include <zero/detail/checkpoint_file.hpp>
#include <zero/error.hpp>
#include <zero/float16.hpp>

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace {

static_assert(std::endian::native == std::endian::little);

template <class T>
void add(std::vector<std::byte>& bytes, T value) {
  const auto view = std::as_bytes(std::span(&value, 1));
  bytes.insert(bytes.end(), view.begin(), view.end());
}

std::vector<std::byte> values(std::string_view dtype, std::size_t elements) {
  std::vector<std::byte> bytes;
  for (std::size_t i = 0; i < elements; ++i) {
    const auto value = static_cast<std::uint8_t>((5 * i + 1) % 97);
    const auto number = static_cast<float>(value);
    if (dtype == "BOOL") {
      add<std::uint8_t>(bytes, value % 2);
    } else if (dtype == "F16") {
      add(bytes, zero::float16(number));
    } else if (dtype == "BF16") {
      add(bytes, zero::bfloat16(number));
    } else if (dtype == "F32") {
      add(bytes, number);
    } else if (dtype == "F64") {
      add<double>(bytes, value);
    } else if (dtype == "C64") {
      add(bytes, number);
      add(bytes, 0.0F);
    } else {  // an integer
      bytes.push_back(static_cast<std::byte>(value));
      bytes.resize(bytes.size() + zero::dtype_bytes(dtype) - 1);
    }
  }
  return bytes;
}

std::size_t elements_of(const std::vector<std::size_t>& shape) {
  std::size_t elements = 1;
  for (const std::size_t dimension : shape) elements *= dimension;
  return elements;
}

void write(const std::filesystem::path& path, const std::vector<std::string>& dtypes,
           const std::map<std::string, std::string>& metadata) {
  const std::vector<std::vector<std::size_t>> shapes{{}, {3, 0}, {1}, {2, 3, 5}, {1001}};
  std::vector<zero::TensorEntry> tensors;
  std::uint64_t end = 0;
  for (const std::string& dtype : dtypes) {
    for (const auto& shape : shapes) {
      const std::uint64_t bytes = elements_of(shape) * zero::dtype_bytes(dtype);
      tensors.push_back({dtype + ".Größe \"" + std::to_string(tensors.size()) + "\"", dtype, shape,
                         end, end + bytes});
      end += bytes;
    }
  }
  zero::detail::NewFile file(path);
  zero::detail::Writer writer(file, 1000);
  const std::string header = zero::format_safetensors_header(tensors, metadata);
  writer.write(std::as_bytes(std::span(header)));
  for (const zero::TensorEntry& tensor : tensors) {
    writer.write(values(tensor.dtype, elements_of(tensor.shape)));
  }
  writer.flush();
  file.commit();
}

void check(const std::filesystem::path& path, std::size_t tensors) {
  const auto require = [&](bool holds, const std::string& what) {
    if (!holds) throw zero::CheckpointError(path.string() + ": " + what);
  };
  const zero::detail::ReadFile file(path);
  const zero::SafetensorsHeader header = zero::read_safetensors_header(file);
  require(header.tensors.size() == tensors, "another number of tensors");
  require(header.metadata == std::map<std::string, std::string>{{"von", "Python \"♥\"\n"}},
          "other metadata");
  for (const zero::TensorEntry& tensor : header.tensors) {
    require(tensor.name.starts_with(tensor.dtype + "."), tensor.name + " is " + tensor.dtype);
    std::vector<std::byte> bytes(tensor.end - tensor.begin);
    file.read_at(header.data_begin + tensor.begin, bytes);
    require(bytes == values(tensor.dtype, elements_of(tensor.shape)),
            tensor.name + " has other values");
  }
}

}  // namespace

int main(int argc, char** argv) {
  const std::span words(argv, static_cast<std::size_t>(argc));
  try {
    if (words.size() == 3 && std::string_view(words[1]) == "write") {
      const std::filesystem::path folder = words[2];
      write(folder / "numbers.safetensors",
            {"F64", "F32", "F16", "I64", "U64", "I32", "U32", "I16", "U16", "I8", "U8", "BOOL",
             "C64"},
            {{"format", "np"}, {"step", "3"}});
      write(folder / "bfloat16.safetensors", {"U8", "BF16"}, {});
      write(folder / "nothing.safetensors", {}, {});
      return 0;
    }
    if (words.size() == 4 && std::string_view(words[1]) == "check") {
      check(words[2], std::stoull(words[3]));
      return 0;
    }
    std::fputs("safetensors_files write FOLDER | check FILE TENSORS\n", stderr);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
  }
  return 1;
}
