// SPDX-License-Identifier: Apache-2.0
/// @file
/// Writes the files of a checkpoint.
#pragma once

#include <algorithm>
#include <charconv>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "zero/checkpoint/checkpoint.hpp"
#include "zero/checkpoint/info.hpp"
#include "zero/checkpoint/safetensors.hpp"
#include "zero/detail/checkpoint_file.hpp"
#include "zero/detail/checkpoint_pieces.hpp"
#include "zero/detail/checksum.hpp"
#include "zero/detail/element_bytes.hpp"
#include "zero/error.hpp"

namespace zero::detail {

/// A tensor of a file that is about to be written, its bytes yet to come.
[[nodiscard]] inline TensorEntry entry_of(std::string name, ElementType type,
                                          std::vector<std::size_t> shape, std::uint64_t begin) {
  std::uint64_t bytes = bytes_of(type);
  for (const std::size_t n : shape) bytes *= n;
  return {std::move(name), std::string(dtype_of(type)), std::move(shape), begin, begin + bytes};
}

/// A safetensors file whose header holds the checksums of what comes after it: it is written last,
/// into room that was left for it.
class SummedFile {
 public:
  /// @param tensors in the order of their bytes
  SummedFile(const std::filesystem::path& path, std::vector<TensorEntry> tensors,
             std::map<std::string, std::string> metadata)
      : tensors_(std::move(tensors)),
        metadata_(std::move(metadata)),
        sums_(tensors_.size(), Checksum().text()),
        file_(path),
        header_bytes_(header().size()) {}

  [[nodiscard]] const std::vector<TensorEntry>& tensors() const noexcept { return tensors_; }
  [[nodiscard]] NewFile& file() noexcept { return file_; }
  /// Where in the file the tensors begin.
  [[nodiscard]] std::uint64_t data_begin() const noexcept { return header_bytes_; }
  void set_checksum(std::size_t tensor, const Checksum& sum) { sums_[tensor] = sum.text(); }

  /// After all tensors: makes the file last, under its name. Returns the header's checksum.
  std::string commit() {
    const std::string text = header();
    file_.write_at(0, std::as_bytes(std::span(text)));
    file_.commit();
    Checksum sum;
    sum.add(std::as_bytes(std::span(text)));
    return sum.text();
  }
  /// Of the whole file.
  [[nodiscard]] std::uint64_t bytes() const noexcept {
    return header_bytes_ + (tensors_.empty() ? 0 : tensors_.back().end);
  }

 private:
  [[nodiscard]] std::string header() {
    std::string all;
    for (const std::string& sum : sums_) all += (all.empty() ? "" : " ") + sum;
    metadata_[checksums_key] = std::move(all);
    return format_safetensors_header(tensors_, metadata_);
  }

  std::vector<TensorEntry> tensors_;
  std::map<std::string, std::string> metadata_;
  std::vector<std::string> sums_;
  NewFile file_;
  std::uint64_t header_bytes_;
};

/// A file of a checkpoint as its index lists it.
struct ShardFile {
  std::string name{};
  std::uint64_t bytes = 0;
  std::string header_checksum{};
};

/// Of the `generation`-th checkpoint in a folder: no two have a file of one name.
[[nodiscard]] inline std::string shard_name(std::uint64_t generation, int rank, int world) {
  char name[80];
  std::snprintf(name, sizeof name, "shard-%08llu-%05d-of-%05d.safetensors",
                static_cast<unsigned long long>(generation), rank, world);
  return name;
}
/// Which generation a file belongs to; 0 where it is no shard, whole or half written. The name must
/// be one that `shard_name` makes: other programs have files that are called "shard-", too.
[[nodiscard]] inline std::uint64_t generation_of(std::string_view name) {
  std::string_view rest = name;
  const auto number = [&rest](std::string_view before, auto& value) {
    if (!rest.starts_with(before)) return false;
    rest.remove_prefix(before.size());
    const auto [end, error] = std::from_chars(rest.data(), rest.data() + rest.size(), value);
    rest.remove_prefix(static_cast<std::size_t>(end - rest.data()));
    return error == std::errc{};
  };
  std::uint64_t generation = 0;
  int rank = 0;
  int world = 0;
  if (!number("shard-", generation) || !number("-", rank) || !number("-of-", world)) return 0;
  const std::string whole = shard_name(generation, rank, world);
  return name == whole || name == whole + ".tmp" ? generation : 0;
}
/// One that no file in the folder has.
[[nodiscard]] inline std::uint64_t next_generation(const std::filesystem::path& folder) {
  std::uint64_t last = 0;
  std::error_code error;
  std::filesystem::directory_iterator entry(folder, error);
  for (; !error && entry != std::filesystem::directory_iterator(); entry.increment(error)) {
    last = std::max(last, generation_of(entry->path().filename().string()));
  }
  if (error) throw_file_error(folder, "reading the folder", error.value());
  return last + 1;
}
/// Removes what the folder's index doesn't name any more, as far as that can be.
inline void remove_older_shards(const std::filesystem::path& folder, std::uint64_t generation) {
  std::error_code ignored;
  std::vector<std::filesystem::path> old;
  for (const auto& entry : std::filesystem::directory_iterator(folder, ignored)) {
    const std::uint64_t of = generation_of(entry.path().filename().string());
    if (of != 0 && of < generation) old.push_back(entry.path());
  }
  for (const std::filesystem::path& path : old) std::filesystem::remove(path, ignored);
}

/// Writes one tensor a piece. `read(piece, sink)` calls `sink(bytes)` for its bytes, in order.
template <class Read>
[[nodiscard]] ShardFile write_shard(const std::filesystem::path& folder, const std::string& name,
                                    const CheckpointInfo& info, std::span<const MemoryPiece> pieces,
                                    const Read& read) {
  std::vector<TensorEntry> tensors;
  tensors.reserve(pieces.size());
  for (const MemoryPiece& piece : pieces) {
    tensors.push_back(
        entry_of(run_name(array_name(info, piece.parameter, piece.array), piece.elements),
                 piece.type, {piece.elements.size()}, tensors.empty() ? 0 : tensors.back().end));
  }
  SummedFile file(folder / name, std::move(tensors), {{"format", shard_format}});
  Writer writer(file.file(), transfer_bytes, file.data_begin());
  for (std::size_t t = 0; t < pieces.size(); ++t) {
    writer.start_tensor();
    read(pieces[t], [&](std::span<const std::byte> bytes) {
      while (!bytes.empty()) {  // in parts that are in a cache when they are written
        const std::size_t count = std::min(bytes.size(), transfer_bytes);
        writer.write(bytes.first(count));
        bytes = bytes.subspan(count);
      }
    });
    file.set_checksum(t, writer.checksum());
  }
  writer.flush();
  std::string sum = file.commit();
  return {name, file.bytes(), std::move(sum)};
}

/// Writes the index of a folder, which makes its files a checkpoint.
inline void write_index(NewFile& index, const CheckpointInfo& info,
                        const std::vector<ShardFile>& files) {
  Json json = to_json(info);
  json["files"] = Json::array();
  for (const ShardFile& file : files) {
    json["files"].push_back(
        {{"name", file.name}, {"bytes", file.bytes}, {"header_xxh3_64", file.header_checksum}});
  }
  std::string text = json.dump(1);
  text.resize(text.size() - 2);  // without "\n}", which comes after the checksum
  text += index_end(text);
  if (text.size() > safetensors_header_limit) {
    throw CheckpointError("checkpoint file " + index.path().string() + ": it would have " +
                          std::to_string(text.size()) +
                          " bytes, more than the 100 MB that are read; keep less in notes");
  }
  index.write_at(0, std::as_bytes(std::span(text)));
  index.commit();
}

/// Makes a folder, and those it lies in, so that they last. What is there already may lie in one
/// that this user can't read.
inline void make_folder(const std::filesystem::path& folder) {
  std::error_code error;
  std::vector<std::filesystem::path> missing;
  for (std::filesystem::path at = folder; !at.empty() && !std::filesystem::exists(at, error);
       at = at.parent_path()) {
    if (at.has_filename()) missing.push_back(at);
  }
  for (std::filesystem::path at = folder; !at.empty(); at = at.parent_path()) {
    if (std::filesystem::exists(at, error) && !std::filesystem::is_directory(at, error)) {
      throw CheckpointError(folder.string() + " can't be a folder, since " + at.string() +
                            " is a file; choose another path");
    }
    if (at == at.parent_path()) break;
  }
  std::filesystem::create_directories(folder, error);
  if (error) throw_file_error(folder, "making the folder", error.value());
  for (const std::filesystem::path& made : missing) sync_folder(made.parent_path());
}

}  // namespace zero::detail
