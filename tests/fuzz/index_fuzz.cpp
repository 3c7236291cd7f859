// SPDX-License-Identifier: Apache-2.0
// What a checkpoint's files say of it, as any bytes: a folder's index and the headers of its
// shards, or a single file. They are read, or refused by a CheckpointError; what was read is there
// in full, and can be written and read again.
//
// An input is one letter, and parts with the byte 0x1e between:
//   f  a folder: index.json without its checksum and last brace, where "#0" stands for the bytes of
//      shard 0 and "$0" for its header's checksum, and then the shards "0", "1", ...
//   s  a single file's metadata "zero-checkpoint", and then the rest of the file, where '$' stands
//      for that with its key and with its checksum
//   r  a single file as it is
// A shard, or the rest of a file, is a number, how many zero bytes of data it has, and then the
// header's JSON.
#include <zero/checkpoint.hpp>
#include <zero/error.hpp>

#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

namespace {

namespace fs = std::filesystem;

void require(bool holds) {
  if (!holds) std::abort();
}

/// In memory where the system has such a place.
class Folder {
 public:
  Folder() {
    const fs::path memory = "/dev/shm";
    std::error_code error;
    const bool is_there = fs::is_directory(memory, error);
    std::string name = ((is_there ? memory : fs::temp_directory_path()) / "zero_XXXXXX").string();
    require(::mkdtemp(name.data()) != nullptr);
    path_ = name;
  }
  ~Folder() {
    std::error_code ignored;
    fs::remove_all(path_, ignored);
  }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;
  [[nodiscard]] fs::path operator/(std::string_view name) const { return path_ / name; }

 private:
  fs::path path_;
};

void make_file(const fs::path& path, std::string_view text) {
  std::ofstream file(path, std::ios::binary);
  file << text;
  require(static_cast<bool>(file.flush()));
}

std::string checksum_of(std::string_view text) {
  zero::detail::Checksum sum;
  sum.add(std::as_bytes(std::span(text)));
  return sum.text();
}

void replace_all(std::string& text, std::string_view what, const std::string& by) {
  for (std::size_t at = 0; (at = text.find(what, at)) != std::string::npos; at += by.size()) {
    text.replace(at, what.size(), by);
  }
}

std::vector<std::string> parts_of(std::string_view text) {
  constexpr std::size_t most = 4;
  std::vector<std::string> parts;
  while (parts.size() < most) {
    const std::size_t end = text.find('\x1e');
    parts.emplace_back(text.substr(0, end));
    if (end == std::string_view::npos) break;
    text.remove_prefix(end + 1);
  }
  return parts;
}

/// A safetensors file in two parts.
struct Tensors {
  std::string header;
  std::string data;
};
Tensors tensors_of(const std::string& part) {
  std::size_t bytes = 0;
  const char* const begin = part.data();
  const auto [header, error] = std::from_chars(begin, begin + part.size(), bytes);
  if (error != std::errc{}) bytes = 0;
  Tensors tensors{std::string(8, '\0') + part.substr(static_cast<std::size_t>(header - begin)),
                  std::string(std::min<std::size_t>(bytes, 4096), '\0')};
  std::size_t length = tensors.header.size() - 8;
  for (std::size_t i = 0; i < 8; ++i, length >>= 8U) {
    tensors.header[i] = static_cast<char>(length & 0xffU);
  }
  return tensors;
}

fs::path make_folder(const Folder& folder, std::vector<std::string> parts) {
  fs::path path = folder / "folder";
  fs::create_directories(path);
  std::string& index = parts[0];
  for (std::size_t k = 0; k < 3; ++k) {
    const std::string name = std::to_string(k);
    fs::remove(path / name);
    if (k + 1 >= parts.size()) continue;
    const Tensors tensors = tensors_of(parts[k + 1]);
    make_file(path / name, tensors.header + tensors.data);
    replace_all(index, "#" + name, std::to_string(tensors.header.size() + tensors.data.size()));
    replace_all(index, "$" + name, checksum_of(tensors.header));
  }
  make_file(path / "index.json", index + zero::detail::index_end(index));
  return path;
}

fs::path make_single(const Folder& folder, std::vector<std::string> parts) {
  fs::path path = folder / "single";
  parts.resize(2);
  using zero::detail::Json;
  const std::string text = Json(parts[0]).dump(-1, ' ', false, Json::error_handler_t::ignore);
  const std::string metadata = "\"zero-checkpoint\":" + text + ",\"zero-checkpoint xxh3_64\":\"" +
                               checksum_of(parts[0]) + "\"";
  replace_all(parts[1], "$", metadata);
  const Tensors tensors = tensors_of(parts[1]);
  make_file(path, tensors.header + tensors.data);
  return path;
}

std::string description_of(zero::CheckpointInfo info) {
  info.world = 1;
  return zero::detail::to_json(info).dump();
}

/// That every element is there, and can be read where it is asked for.
void check_arrays(const zero::Checkpoint& checkpoint) {
  const zero::CheckpointInfo& info = checkpoint.info();
  std::vector<std::byte> bytes;
  for (std::size_t i = 0; i < info.parameters.size(); ++i) {
    const std::size_t elements = info.parameters[i].elements();
    for (std::size_t a = 0; a < checkpoint.arrays(); ++a) {
      std::size_t at = 0;
      for (const auto& piece : checkpoint.array(i, a).pieces) {
        require(piece.elements.begin == at && piece.elements.end > at);
        at = piece.elements.end;
      }
      require(at == (zero::detail::has_array(info.parameters[i], a) ? elements : 0));
      for (const zero::ElementType type :
           {zero::ElementType::float64, zero::ElementType::float16, zero::ElementType::float32}) {
        for (const std::size_t begin : {std::size_t{0}, at / 3, at}) {
          bytes.assign((at - begin) * zero::detail::bytes_of(type), std::byte{1});
          checkpoint.read(i, a, begin, type, bytes);
        }
      }
    }
  }
}

void check(const Folder& folder, const zero::Checkpoint& checkpoint, bool is_whole) {
  check_arrays(checkpoint);
  const std::string description = description_of(checkpoint.info());
  const auto again = zero::detail::info_of("", zero::detail::parse_json("", description));
  require(description_of(again) == description);
  if (!is_whole) return;
  zero::consolidate(checkpoint, folder / "again");
  const zero::Checkpoint single(folder / "again");
  single.verify();
  require(description_of(single.info()) == description);
  zero::split(single, folder / "parts", 2);
  const zero::Checkpoint parts(folder / "parts");
  parts.verify();
  require(description_of(parts.info()) == description);
  check_arrays(parts);
}

/// Whether its arrays are those that were written.
bool is_whole(const zero::Checkpoint& checkpoint) {
  try {
    checkpoint.verify();
  } catch (const zero::CheckpointError& error) {
    require(*error.what() != '\0');
    return false;
  }
  return true;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const Folder folder;
  const std::string_view input(reinterpret_cast<const char*>(data), size);
  if (input.empty()) return 0;
  fs::path path = folder / "single";
  if (input[0] == 'f') {
    path = make_folder(folder, parts_of(input.substr(1)));
  } else if (input[0] == 's') {
    path = make_single(folder, parts_of(input.substr(1)));
  } else {
    make_file(path, input.substr(1));
  }
  try {
    const zero::Checkpoint checkpoint(path);
    check(folder, checkpoint, is_whole(checkpoint));
  } catch (const zero::CheckpointError& error) {
    require(std::string_view(error.what()).find(path.string()) != std::string_view::npos);
  }
  return 0;
}
