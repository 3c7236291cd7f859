// SPDX-License-Identifier: Apache-2.0
/// @file
/// A checkpoint that was saved, to read from: at any interval of any array.
#pragma once

#include <algorithm>
#include <charconv>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "zero/checkpoint/info.hpp"
#include "zero/checkpoint/safetensors.hpp"
#include "zero/detail/checkpoint_file.hpp"
#include "zero/detail/checksum.hpp"
#include "zero/detail/element_bytes.hpp"
#include "zero/element.hpp"
#include "zero/error.hpp"
#include "zero/fragment.hpp"

namespace zero {

namespace detail {

class TorchReader;

/// The file that makes a folder a checkpoint.
inline constexpr const char* index_name = "index.json";
/// Metadata of the library's own files.
inline constexpr const char* shard_format = "zero-checkpoint shard";
inline constexpr const char* checksums_key = "xxh3_64";
inline constexpr const char* info_key = "zero-checkpoint";
inline constexpr const char* info_checksum_key = "zero-checkpoint xxh3_64";

/// How many bytes are read and summed up in one go: few enough to stay in a cache.
inline constexpr std::size_t transfer_bytes = std::size_t{1} << 20;

/// A run of elements of one array, in one file.
struct SavedPiece {
  std::size_t file = 0;
  std::uint64_t offset = 0;  ///< in the file, of its first byte
  Interval elements{};       ///< counted in the parameter
  std::optional<std::uint64_t> checksum{};
};

/// All of one array, in the order of its elements; without pieces: zeros.
struct SavedArray {
  ElementType type = ElementType::float32;
  std::vector<SavedPiece> pieces{};
};

/// The 16 hexadecimal digits of a checksum.
[[nodiscard]] inline std::optional<std::uint64_t> checksum_of(std::string_view text) {
  std::uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value, 16);
  if (text.size() != 16 || error != std::errc{} || end != text.data() + text.size()) {
    return std::nullopt;
  }
  return value;
}

/// What an index ends with, given all before it: its checksum, in a way that leaves it JSON.
[[nodiscard]] inline std::string index_end(std::string_view before) {
  Checksum sum;
  sum.add(std::as_bytes(std::span(before)));
  return ",\n \"xxh3_64\": \"" + sum.text() + "\"\n}\n";
}
[[nodiscard]] inline bool has_its_checksum(std::string_view index) {
  const std::size_t bytes = index_end({}).size();
  return index.size() >= bytes &&
         index.substr(index.size() - bytes) == index_end(index.substr(0, index.size() - bytes));
}

/// A run of elements that a tensor's name ends with: "[begin:end]".
struct NamedRun {
  std::string array;
  Interval elements;
};
[[nodiscard]] inline std::string run_name(const std::string& array, Interval elements) {
  return array + "[" + std::to_string(elements.begin) + ":" + std::to_string(elements.end) + "]";
}
[[nodiscard]] inline std::optional<NamedRun> named_run(const std::string& name) {
  const std::size_t open = name.rfind('[');
  if (open == std::string::npos || name.back() != ']') return std::nullopt;
  NamedRun run{name.substr(0, open), {}};
  const char* const last = name.data() + name.size() - 1;
  const auto begin = std::from_chars(name.data() + open + 1, last, run.elements.begin);
  if (begin.ec != std::errc{} || begin.ptr == last || *begin.ptr != ':') return std::nullopt;
  const auto end = std::from_chars(begin.ptr + 1, last, run.elements.end);
  if (end.ec != std::errc{} || end.ptr != last || run.elements.end <= run.elements.begin) {
    return std::nullopt;
  }
  return run;
}

}  // namespace detail

/// A folder that `save` has written, or a single file of `consolidate`'s. What its files say of
/// themselves is read and checked when it is made; `verify` checks the arrays. Const members may be
/// called by several threads at once.
class Checkpoint {
 public:
  /// Throws `CheckpointError` naming file, tensor and rule for what is no whole checkpoint.
  explicit Checkpoint(std::filesystem::path path) : path_(std::move(path)) {
    std::error_code error;
    if (!std::filesystem::exists(path_, error) && !error) {
      throw CheckpointError("nothing is at " + (path_.empty() ? "an empty path" : path_.string()) +
                            "; check the path");
    }
    if (std::filesystem::is_directory(path_, error)) {
      open_folder();
    } else {
      open_single();
    }
    require_complete();
  }

  [[nodiscard]] const CheckpointInfo& info() const noexcept { return info_; }
  [[nodiscard]] const std::filesystem::path& path() const noexcept { return path_; }
  /// Of all of its files.
  [[nodiscard]] std::uint64_t bytes() const noexcept {
    std::uint64_t sum = 0;
    for (const detail::ReadFile& file : *files_) sum += file.bytes();
    return sum;
  }
  /// Differs, almost surely, from that of any other checkpoint.
  [[nodiscard]] std::uint64_t fingerprint() const noexcept { return fingerprint_.value(); }

  /// The arrays of one parameter, by number: its values, its master copy, its slots.
  static constexpr std::size_t values = detail::value_array;
  static constexpr std::size_t master = detail::master_array;
  static constexpr std::size_t first_slot = detail::first_slot_array;
  [[nodiscard]] std::size_t arrays() const noexcept { return first_slot + info_.slots.size(); }

  /// What a parameter's array consists of.
  [[nodiscard]] const detail::SavedArray& array(std::size_t parameter, std::size_t array) const {
    return arrays_[parameter * arrays() + array];
  }

  /// Reads the elements `[begin, begin + n)` of an array, n being as many of `type` as `to` has
  /// bytes for. What is stored in another type is rounded to nearest (to float first, on the way
  /// from double to 16 bits). Throws `CheckpointError` where a file can't be read.
  void read(std::size_t parameter, std::size_t number, std::size_t begin, ElementType type,
            std::span<std::byte> to) const {
    const ElementType from = array(parameter, number).type;
    const std::size_t width = detail::bytes_of(type);
    if (array(parameter, number).pieces.empty()) {
      std::fill(to.begin(), to.end(), std::byte{0});
      return;
    }
    for_each_part(parameter, number, {begin, begin + to.size() / width},
                  [&](const detail::SavedPiece& piece, std::uint64_t offset, Interval elements) {
                    const std::span<std::byte> part =
                        to.subspan((elements.begin - begin) * width, elements.size() * width);
                    if (from == type) {
                      (*files_)[piece.file].read_at(offset, part);
                    } else {
                      read_as(piece, offset, from, type, part);
                    }
                  });
  }

  /// `f(piece, offset, elements)` for each run of an array's `wanted` elements that lies in one
  /// piece: which it is, where it begins in the file, and the elements.
  template <class F>
  void for_each_part(std::size_t parameter, std::size_t number, Interval wanted, F&& f) const {
    const detail::SavedArray& from = array(parameter, number);
    const std::size_t stored = detail::bytes_of(from.type);
    auto piece = std::partition_point(
        from.pieces.begin(), from.pieces.end(),
        [&](const detail::SavedPiece& p) { return p.elements.end <= wanted.begin; });
    for (std::size_t at = wanted.begin; at < wanted.end; ++piece) {
      const std::size_t end = std::min(wanted.end, piece->elements.end);
      f(*piece, piece->offset + (at - piece->elements.begin) * stored, Interval{at, end});
      at = end;
    }
  }

  /// Reads all arrays, or the share of one of several that share the work, and compares their
  /// checksums. Throws `CheckpointError` naming file and tensor. (A file that another library wrote
  /// may have none.)
  void verify(std::size_t share = 0, std::size_t shares = 1) const {
    std::uint64_t total = 0;
    for_each_piece([&](std::size_t, std::size_t, const detail::SavedPiece&, std::uint64_t bytes) {
      total += bytes;
    });
    // In a core's own cache it is copied to, and summed up out of, faster than in one that is
    // shared.
    std::vector<std::byte> part(std::size_t{64} << 10);
    std::uint64_t before = 0;
    const auto is_mine = [&](std::uint64_t bytes) {
      const std::uint64_t middle = before + bytes / 2;
      before += bytes;
      // By the quotient, since a product might overflow.
      const std::uint64_t each = std::max<std::uint64_t>(1, (total + shares - 1) / shares);
      return std::min<std::uint64_t>(middle / each, shares - 1) == share;
    };
    for_each_piece([&](std::size_t parameter, std::size_t number, const detail::SavedPiece& piece,
                       std::uint64_t bytes) {
      if (!is_mine(bytes) || !piece.checksum) return;
      detail::Checksum sum;
      for (std::uint64_t at = 0; at < bytes;) {
        const auto count =
            static_cast<std::size_t>(std::min<std::uint64_t>(part.size(), bytes - at));
        (*files_)[piece.file].read_at(piece.offset + at, std::span(part).first(count));
        sum.add(std::span<const std::byte>(part).first(count));
        at += count;
      }
      if (sum.value() == *piece.checksum) return;
      throw CheckpointError((*files_)[piece.file].name() + ": tensor " +
                            detail::in_quotes(detail::run_name(
                                detail::array_name(info_, parameter, number), piece.elements)) +
                            " has other bytes than were written: its checksum does not match; "
                            "load another checkpoint");
    });
  }

  /// `f(parameter, array, piece, bytes)` for all that is stored.
  template <class F>
  void for_each_piece(F&& f) const {
    for (std::size_t i = 0; i < info_.parameters.size(); ++i) {
      for (std::size_t a = 0; a < arrays(); ++a) {
        for (const detail::SavedPiece& piece : array(i, a).pieces) {
          f(i, a, piece, piece.elements.size() * detail::bytes_of(array(i, a).type));
        }
      }
    }
  }

  /// The files, for those who ask where a piece lies.
  [[nodiscard]] const std::deque<detail::ReadFile>& files() const noexcept { return *files_; }

 private:
  friend class detail::TorchReader;

  /// Of nothing yet.
  Checkpoint() = default;

  [[nodiscard]] std::string index_text() const {
    const std::filesystem::path index_path = path_ / detail::index_name;
    std::error_code missing;
    if (!std::filesystem::exists(index_path, missing)) {
      throw CheckpointError(path_.string() + ": it has no " + detail::index_name +
                            ", so no save into it was ever finished; check the path");
    }
    const detail::ReadFile index(index_path);
    if (index.bytes() > safetensors_header_limit) {
      detail::refuse_info(index.name(), "is larger than any that was written");
    }
    std::string text(static_cast<std::size_t>(index.bytes()), '\0');
    index.read_at(0, std::as_writable_bytes(std::span(text)));
    return text;
  }

  /// Opens the shards too. A save that ends meanwhile removes those of the index before: then the
  /// folder has another, which is read in its place. Once open, no save can take them away.
  [[nodiscard]] detail::ParsedJson open_index(const std::string& name, CheckpointInfo& info) {
    for (;;) {
      const std::string text = index_text();
      if (!detail::has_its_checksum(text)) {
        detail::refuse_info(name, "has another checksum than was written");
      }
      detail::ParsedJson json = detail::parse_json(name, text);
      info = detail::info_of(name, json);
      const detail::JsonReader reader(name, json, "");
      try {
        for (const detail::ParsedJson& file : reader.array("files")) {
          open_shard(name, detail::JsonReader(name, file, "(files)"));
        }
        fingerprint_.add(std::as_bytes(std::span(text)));
        return json;
      } catch (const CheckpointError&) {
        if (index_text() == text) throw;
        files_->clear();
      }
    }
  }

  void open_folder() {
    const std::string index = (path_ / detail::index_name).string();
    CheckpointInfo info;
    const detail::ParsedJson json = open_index(index, info);
    const detail::JsonReader reader(index, json, "");
    const detail::ArrayNames names = adopt(std::move(info), index);
    for (std::size_t k = 0; k < files_->size(); ++k) {
      read_shard(k, index, reader.array("files")[k].at("header_xxh3_64"), names);
    }
  }

  void open_shard(const std::string& index, const detail::JsonReader& of) {
    const std::string name = of.text("name");
    if (name.empty() || name.find('/') != std::string::npos || name == "..") {
      of.refuse("names a file outside of its folder");
    }
    std::error_code error;
    if (!std::filesystem::exists(path_ / name, error) && !error) {
      throw CheckpointError((path_ / name).string() + ": it is gone, though " + index +
                            " names it; load another checkpoint");
    }
    files_->emplace_back(path_ / name);
    const detail::ReadFile& file = files_->back();
    if (file.bytes() != of.integer("bytes", std::uint64_t{1} << 62)) {
      throw CheckpointError(file.name() + ": it has " + std::to_string(file.bytes()) +
                            " bytes, but " + index + " says " + of.at("bytes").dump() +
                            "; it was cut off or replaced, so load another checkpoint");
    }
    (void)of.text("header_xxh3_64");
  }

  void read_shard(std::size_t number, const std::string& index, const std::string& expected,
                  const detail::ArrayNames& names) {
    const detail::ReadFile& file = (*files_)[number];
    const SafetensorsHeader header = read_safetensors_header(file);
    if (header_checksum(file, header) != expected) {
      throw CheckpointError(file.name() + ": its header is not the one that was written: its " +
                            "checksum does not match that in " + index +
                            "; load another checkpoint");
    }
    const std::vector<std::optional<std::uint64_t>> sums = checksums(file, header);
    for (std::size_t t = 0; t < header.tensors.size(); ++t) {
      const TensorEntry& tensor = header.tensors[t];
      const auto run = detail::named_run(tensor.name);
      if (!run || tensor.shape.size() != 1 || tensor.shape[0] != run->elements.size()) {
        refuse_tensor(file, tensor,
                      "must be called ARRAY[BEGIN:END] and have END - BEGIN elements");
      }
      add_piece(number, header, tensor, names.find(run->array), run->elements, sums[t]);
    }
  }

  void open_single() {
    if (path_.filename() == detail::index_name) refuse_part("the index");
    files_->emplace_back(path_);
    const detail::ReadFile& file = files_->back();
    const SafetensorsHeader header = read_safetensors_header(file);
    (void)header_checksum(file, header);
    const auto format = header.metadata.find("format");
    if (format != header.metadata.end() && format->second == detail::shard_format) {
      refuse_part("one rank's file");
    }
    const auto text = header.metadata.find(detail::info_key);
    if (text == header.metadata.end()) {
      throw CheckpointError(file.name() + ": it is a safetensors file, but no checkpoint of this " +
                            "library: its metadata has no '" + detail::info_key + "'");
    }
    const auto expected = header.metadata.find(detail::info_checksum_key);
    detail::Checksum sum;
    sum.add(std::as_bytes(std::span(text->second)));
    if (expected == header.metadata.end() || expected->second != sum.text()) {
      detail::refuse_info(file.name(), "has another checksum than was written");
    }
    const detail::ArrayNames names = adopt(
        detail::info_of(file.name(), detail::parse_json(file.name(), text->second)), file.name());
    const std::vector<std::optional<std::uint64_t>> sums = checksums(file, header);
    for (std::size_t t = 0; t < header.tensors.size(); ++t) {
      const TensorEntry& tensor = header.tensors[t];
      const auto array = names.find(tensor.name);
      if (array && tensor.shape != info_.parameters[array->parameter].shape) {
        refuse_tensor(file, tensor, "has another shape than its parameter");
      }
      const std::size_t elements = array ? info_.parameters[array->parameter].elements() : 0;
      add_piece(0, header, tensor, array, {0, elements}, sums[t]);
    }
  }

  [[noreturn]] void refuse_part(const std::string& part) const {
    throw CheckpointError(path_.string() + ": it is " + part +
                          " of a checkpoint that is a folder; give the path of the folder");
  }

  detail::ArrayNames adopt(CheckpointInfo info, const std::string& file) {
    info_ = std::move(info);
    // An array has two bytes in some file, unless its parameter is empty: before there is memory
    // for all of them.
    if (info_.parameters.size() > ((std::uint64_t{1} << 20) + bytes()) / arrays()) {
      detail::refuse_info(file, "has more parameters and slots than its files have bytes for");
    }
    try {
      detail::ArrayNames names(info_);
      arrays_.resize(info_.parameters.size() * arrays());
      return names;
    } catch (const UsageError& error) {
      detail::refuse_info(file,
                          std::string("has arrays that can't be told apart: ") + error.what());
    }
  }

  [[noreturn]] static void refuse_tensor(const detail::ReadFile& file, const TensorEntry& tensor,
                                         const std::string& rule) {
    throw CheckpointError(file.name() + ": tensor " + detail::in_quotes(tensor.name) + " " + rule +
                          "; the file is damaged, or of another library");
  }

  /// Also makes it part of the fingerprint.
  std::string header_checksum(const detail::ReadFile& file, const SafetensorsHeader& header) {
    std::vector<std::byte> bytes(static_cast<std::size_t>(header.data_begin));
    file.read_at(0, bytes);
    detail::Checksum sum;
    sum.add(bytes);
    fingerprint_.add(bytes);
    return sum.text();
  }

  /// By tensor; none where the file has no checksums.
  [[nodiscard]] static std::vector<std::optional<std::uint64_t>> checksums(
      const detail::ReadFile& file, const SafetensorsHeader& header) {
    std::vector<std::optional<std::uint64_t>> sums(header.tensors.size());
    const auto found = header.metadata.find(detail::checksums_key);
    if (found == header.metadata.end()) {
      throw CheckpointError(file.name() + ": its metadata lacks '" + detail::checksums_key +
                            "', the checksums of its tensors; the file is damaged, or not of this "
                            "library");
    }
    const std::string_view text = found->second;
    constexpr std::size_t each = 17;  // with the blank after it
    bool well_formed = text.size() + (sums.empty() ? 0 : 1) == sums.size() * each;
    for (std::size_t t = 0; well_formed && t < sums.size(); ++t) {
      sums[t] = detail::checksum_of(text.substr(t * each, each - 1));
      well_formed = sums[t] && (t == 0 || text[t * each - 1] == ' ');
    }
    if (well_formed) return sums;
    throw CheckpointError(file.name() + ": '" + detail::checksums_key +
                          "' must be 16 hexadecimal digits a tensor, with blanks between; the "
                          "file is damaged");
  }

  void add_piece(std::size_t number, const SafetensorsHeader& header, const TensorEntry& tensor,
                 std::optional<detail::ArrayNames::Array> array, Interval elements,
                 std::optional<std::uint64_t> checksum) {
    const detail::ReadFile& file = (*files_)[number];
    if (!array || !detail::has_array(info_.parameters[array->parameter], array->array)) {
      refuse_tensor(file, tensor, "belongs to no parameter of the checkpoint");
    }
    const auto type = detail::element_type_of(tensor.dtype);
    if (!type) refuse_tensor(file, tensor, "has the type " + tensor.dtype + ", which no array has");
    if (elements.end > info_.parameters[array->parameter].elements()) {
      refuse_tensor(file, tensor, "has more elements than its parameter");
    }
    detail::SavedArray& to = arrays_[array->parameter * arrays() + array->array];
    if (elements.empty()) return;
    if (!to.pieces.empty() && to.type != *type) {
      refuse_tensor(file, tensor, "has another type than the rest of its array");
    }
    to.type = *type;
    to.pieces.push_back({number, header.data_begin + tensor.begin, elements, checksum});
  }

  /// Every element of every array is there once.
  void require_complete() {
    for (std::size_t i = 0; i < info_.parameters.size(); ++i) {
      for (std::size_t a = 0; a < arrays(); ++a) {
        if (!detail::has_array(info_.parameters[i], a)) continue;
        std::vector<detail::SavedPiece>& pieces = arrays_[i * arrays() + a].pieces;
        std::sort(pieces.begin(), pieces.end(),
                  [](const detail::SavedPiece& x, const detail::SavedPiece& y) {
                    return x.elements.begin < y.elements.begin;
                  });
        std::size_t at = 0;
        for (const detail::SavedPiece& piece : pieces) {
          if (piece.elements.begin != at) refuse_cover(i, a, at, piece.elements.begin < at);
          at = piece.elements.end;
        }
        if (at != info_.parameters[i].elements()) refuse_cover(i, a, at, false);
      }
    }
  }

  [[noreturn]] void refuse_cover(std::size_t parameter, std::size_t number, std::size_t at,
                                 bool twice) const {
    throw CheckpointError(path_.string() + ": the tensor " +
                          detail::in_quotes(detail::array_name(info_, parameter, number)) +
                          (twice ? " is there twice before" : " is not there from") + " element " +
                          std::to_string(at) + (twice ? "" : " on") +
                          "; the checkpoint is damaged");
  }

  void read_as(const detail::SavedPiece& piece, std::uint64_t offset, ElementType from,
               ElementType type, std::span<std::byte> to) const {
    const std::size_t stored = detail::bytes_of(from);
    const std::size_t width = detail::bytes_of(type);
    std::vector<std::byte> part(std::min(to.size() / width * stored, detail::transfer_bytes));
    for (std::size_t done = 0; done < to.size();) {
      const std::size_t count = std::min(part.size() / stored, (to.size() - done) / width);
      const std::span<std::byte> raw = std::span(part).first(count * stored);
      (*files_)[piece.file].read_at(offset, raw);
      detail::convert_elements(raw, from, to.subspan(done, count * width), type);
      offset += raw.size();
      done += count * width;
    }
  }

  std::filesystem::path path_;
  CheckpointInfo info_{};
  std::vector<detail::SavedArray> arrays_{};
  std::shared_ptr<std::deque<detail::ReadFile>> files_ =
      std::make_shared<std::deque<detail::ReadFile>>();
  detail::Checksum fingerprint_{};
};

}  // namespace zero
