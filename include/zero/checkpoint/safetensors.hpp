// SPDX-License-Identifier: Apache-2.0
/// @file
/// The header of a safetensors file: 8 bytes of length (little-endian), a JSON object, then all
/// tensors' bytes without a hole. Every rule of the format is checked, in reading and in writing.
#pragma once

#include <algorithm>
#include <array>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include "zero/error.hpp"

namespace zero {

/// One tensor of a safetensors file. Its elements lie in row-major order, little-endian.
struct TensorEntry {
  std::string name{};
  std::string dtype{};               ///< as the format calls it, e.g. "F32"
  std::vector<std::size_t> shape{};  ///< none: a scalar; a zero: no elements
  std::uint64_t begin = 0;           ///< of its bytes, counted from the begin of the data section
  std::uint64_t end = 0;             ///< one past its last byte

  friend bool operator==(const TensorEntry&, const TensorEntry&) = default;
};

/// What a safetensors file says about itself.
struct SafetensorsHeader {
  std::vector<TensorEntry> tensors{};  ///< as their bytes lie in the file; together, all of them
  std::map<std::string, std::string> metadata{};
  std::uint64_t data_begin = 0;  ///< where in the file the data section begins

  friend bool operator==(const SafetensorsHeader&, const SafetensorsHeader&) = default;
};

/// The most bytes of JSON that the format allows.
inline constexpr std::uint64_t safetensors_header_limit = 100'000'000;

/// Bytes of one element; 0 if the format has no such type, or it is smaller than a byte.
[[nodiscard]] constexpr std::size_t dtype_bytes(std::string_view dtype) noexcept {
  using Dtype = std::pair<std::string_view, std::size_t>;
  constexpr std::array dtypes{
      Dtype{"BOOL", 1},        Dtype{"U8", 1},          Dtype{"I8", 1},  Dtype{"F8_E5M2", 1},
      Dtype{"F8_E4M3", 1},     Dtype{"F8_E8M0", 1},     Dtype{"U16", 2}, Dtype{"I16", 2},
      Dtype{"F8_E4M3FNUZ", 1}, Dtype{"F8_E5M2FNUZ", 1}, Dtype{"F16", 2}, Dtype{"BF16", 2},
      Dtype{"U32", 4},         Dtype{"I32", 4},         Dtype{"F32", 4}, Dtype{"U64", 8},
      Dtype{"I64", 8},         Dtype{"F64", 8},         Dtype{"C64", 8},
  };
  for (const auto& [name, bytes] : dtypes) {
    if (name == dtype) return bytes;
  }
  return 0;
}

/// What a safetensors file is read from.
/// 1. `name()`: a text for messages, e.g. the path
/// 2. `bytes()`: how many there are
/// 3. `read_at(offset, to)`: fills all of `to`, or throws
template <class T>
concept ByteSource = requires(const T& source, std::uint64_t offset, std::span<std::byte> to) {
  { source.name() } -> std::convertible_to<std::string>;
  { source.bytes() } -> std::convertible_to<std::uint64_t>;
  source.read_at(offset, to);
};

namespace detail {

/// A text out of a file as a message shows it: in quotes, on one line and not endless.
[[nodiscard]] inline std::string in_quotes(std::string_view text) {
  constexpr std::size_t most = 80;
  constexpr std::string_view digits = "0123456789abcdef";
  std::size_t shown = std::min(text.size(), most);
  // Not in the middle of a character.
  while (shown != 0 && shown != text.size() &&
         (static_cast<unsigned char>(text[shown]) & 0xc0U) == 0x80U) {
    --shown;
  }
  std::string result = "\"";
  for (const char c : text.substr(0, shown)) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte < 0x20U || byte == 0x7fU) {
      result += "\\x";
      result += digits[byte >> 4U];
      result += digits[byte & 15U];
    } else {
      result += c;
    }
  }
  return result += shown < text.size() ? "…\"" : "\"";
}

/// @param where e.g. a tensor's name in quotes; empty: the file as a whole
[[noreturn]] inline void throw_safetensors_error(const std::string& file, std::string_view where,
                                                 std::string_view rule) {
  std::string what = "safetensors file " + file + ": ";
  if (!where.empty()) what.append(where).append(": ");
  throw CheckpointError(what.append(rule));
}

/// Takes a header's JSON as the parser reads it, and checks the form of everything as it comes, so
/// that no more is kept than a valid header has and a second value of one key is seen.
class SafetensorsSax final : public nlohmann::json_sax<nlohmann::json> {
 public:
  SafetensorsSax(const std::string& file, SafetensorsHeader& header)
      : file_(&file), header_(&header) {}

  bool null() override { return refuse("null"); }
  bool boolean(bool /*value*/) override { return refuse("true or false"); }
  bool number_integer(number_integer_t /*value*/) override { return refuse("a negative number"); }
  bool number_float(number_float_t /*value*/, const string_t& text) override {
    return refuse("the number " + in_quotes(text));
  }
  bool binary(binary_t& /*value*/) override { return refuse("bytes"); }

  bool number_unsigned(number_unsigned_t value) override {
    if (place_ == Place::dimensions) {
      if (value > std::numeric_limits<std::size_t>::max()) refuse(std::to_string(value));
      tensor().shape.push_back(static_cast<std::size_t>(value));
    } else if (place_ == Place::offsets && offsets_ < 2) {
      (offsets_++ == 0 ? tensor().begin : tensor().end) = value;
    } else {
      refuse("a number");
    }
    return true;
  }

  bool string(string_t& value) override {
    if (place_ == Place::metadata) {
      header_->metadata.emplace(std::move(key_), std::move(value));
    } else if (place_ == Place::tensor && field_ == Field::dtype) {
      if (dtype_bytes(value) == 0) {
        fail("has the dtype " + in_quotes(value) + ", which this reader doesn't know");
      }
      tensor().dtype = std::move(value);
    } else {
      refuse("a text");
    }
    return true;
  }

  bool start_object(std::size_t /*elements*/) override {
    if (place_ == Place::outside) {
      place_ = Place::header;
    } else if (place_ == Place::header && key_ == "__metadata__") {
      if (std::exchange(has_metadata_, true)) fail("is there twice");
      place_ = Place::metadata;
    } else if (place_ == Place::header) {
      header_->tensors.emplace_back().name = std::move(key_);
      seen_ = {};
      place_ = Place::tensor;
    } else {
      refuse("an object");
    }
    return true;
  }

  bool key(string_t& value) override {
    if (place_ == Place::tensor) {
      const auto it = std::ranges::find(field_names, value);
      if (it == field_names.end()) {
        fail("has the key " + in_quotes(value) + "; allowed are dtype, shape and data_offsets");
      }
      const auto index = static_cast<std::size_t>(it - field_names.begin());
      if (std::exchange(seen_[index], true)) fail("has the key " + in_quotes(value) + " twice");
      field_ = static_cast<Field>(index);
    } else if (place_ == Place::metadata && header_->metadata.contains(value)) {
      fail("has the key " + in_quotes(value) + " twice");
    } else {
      key_ = std::move(value);
    }
    return true;
  }

  bool end_object() override {
    if (place_ == Place::tensor) {
      for (std::size_t i = 0; i < field_names.size(); ++i) {
        if (!seen_[i]) fail("has no " + std::string(field_names[i]));
      }
    }
    place_ = place_ == Place::header ? Place::outside : Place::header;
    return true;
  }

  bool start_array(std::size_t /*elements*/) override {
    if (place_ == Place::tensor && field_ == Field::shape) {
      place_ = Place::dimensions;
    } else if (place_ == Place::tensor && field_ == Field::data_offsets) {
      place_ = Place::offsets;
      offsets_ = 0;
    } else {
      refuse("an array");
    }
    return true;
  }

  bool end_array() override {
    if (place_ == Place::offsets && offsets_ != 2) refuse("one number or none");
    place_ = Place::tensor;
    return true;
  }

  bool parse_error(std::size_t position, const std::string& /*last_token*/,
                   const nlohmann::json::exception& error) override {
    // Without the library's own numbers before, and the text around it, of any length, after.
    std::string_view text = error.what();
    text = text.substr(0, text.find("; last read"));
    text.remove_prefix(std::min(text.find("while "), text.size()));
    throw_safetensors_error(*file_, "byte " + std::to_string(position + 7),
                            "the header is no JSON in UTF-8: found " + std::string(text));
  }

 private:
  /// Where in the JSON the parser is.
  enum class Place : std::uint8_t { outside, header, metadata, tensor, dimensions, offsets };

  enum class Field : std::uint8_t { dtype, shape, data_offsets };  // as in `field_names`
  static constexpr std::array<std::string_view, 3> field_names{"dtype", "shape", "data_offsets"};

  [[nodiscard]] TensorEntry& tensor() const { return header_->tensors.back(); }

  [[noreturn]] void fail(std::string_view rule) const {
    std::string where;
    switch (place_) {
      case Place::outside: break;
      case Place::header: where = in_quotes(key_); break;
      case Place::metadata: where = in_quotes("__metadata__"); break;
      case Place::tensor:
      case Place::dimensions:
      case Place::offsets: where = "tensor " + in_quotes(tensor().name); break;
    }
    throw_safetensors_error(*file_, where, rule);
  }

  /// @param got what stands where something else has to
  [[noreturn]] bool refuse(const std::string& got) const {
    std::string wanted;
    switch (place_) {
      case Place::outside: wanted = "the header is one object"; break;
      case Place::header: wanted = "a tensor is an object"; break;
      case Place::metadata: wanted = "the key " + in_quotes(key_) + " has a text"; break;
      case Place::dimensions: wanted = "shape has whole numbers from 0 on that fit"; break;
      case Place::offsets: wanted = "data_offsets has two whole numbers from 0 on"; break;
      case Place::tensor:
        wanted = field_ == Field::dtype   ? "dtype is a text"
                 : field_ == Field::shape ? "shape is an array of whole numbers"
                                          : "data_offsets is an array of two whole numbers";
        break;
    }
    fail(wanted + ", not " + got);
  }

  const std::string* file_;
  SafetensorsHeader* header_;
  Place place_ = Place::outside;
  std::string key_{};  // in the header or the metadata
  bool has_metadata_ = false;
  Field field_ = Field::dtype;
  std::array<bool, 3> seen_{};  // of the tensor's fields
  int offsets_ = 0;             // so far
};

inline void require_different_names(const std::vector<TensorEntry>& tensors,
                                    const std::string& file) {
  std::vector<std::string_view> names;
  names.reserve(tensors.size());
  for (const TensorEntry& tensor : tensors) names.push_back(tensor.name);
  std::ranges::sort(names);
  const auto twice = std::ranges::adjacent_find(names);
  if (twice != names.end()) {
    throw_safetensors_error(file, "tensor " + in_quotes(*twice), "is there twice");
  }
}

/// Bytes of all its elements.
[[nodiscard]] inline std::uint64_t bytes_of(const TensorEntry& tensor, const std::string& file) {
  std::uint64_t bytes = dtype_bytes(tensor.dtype);
  for (const std::uint64_t dimension : tensor.shape) {
    // In their order, as in the format's own library: not even a later zero excuses an overflow.
    if (dimension != 0 && bytes > std::numeric_limits<std::uint64_t>::max() / dimension) {
      throw_safetensors_error(file, "tensor " + in_quotes(tensor.name),
                              "its shape has more bytes than 64 bits can count");
    }
    bytes *= dimension;
  }
  return bytes;
}

/// That they, in the order of their bytes, fill the data section.
inline void require_filled(const std::vector<TensorEntry>& tensors, std::uint64_t data_bytes,
                           const std::string& file) {
  std::uint64_t filled = 0;
  for (const TensorEntry& tensor : tensors) {
    const auto fail = [&](const std::string& rule) {
      throw_safetensors_error(file, "tensor " + in_quotes(tensor.name), rule);
    };
    const std::string range =
        "data_offsets [" + std::to_string(tensor.begin) + ", " + std::to_string(tensor.end) + "]";
    if (tensor.end < tensor.begin) fail(range + " end before they begin");
    const std::uint64_t bytes = bytes_of(tensor, file);
    if (tensor.end - tensor.begin != bytes) {
      fail(range + " are " + std::to_string(tensor.end - tensor.begin) +
           " bytes, but dtype and shape make " + std::to_string(bytes));
    }
    if (tensor.begin < filled) fail(range + " overlap another tensor's");
    if (tensor.begin > filled) {
      fail(range + " leave a hole of " + std::to_string(tensor.begin - filled) + " bytes before");
    }
    if (tensor.end > data_bytes) {
      fail(range + " go beyond the file's end: it has " + std::to_string(data_bytes) +
           " bytes of data; it may have been cut off");
    }
    filled = tensor.end;
  }
  if (filled != data_bytes) {
    throw_safetensors_error(file, "",
                            "it has " + std::to_string(data_bytes) +
                                " bytes of data, but its tensors end at " + std::to_string(filled));
  }
}

}  // namespace detail

/// Checks all rules of the format. Memory: at most some ten times that of the text.
/// @param json_text the header without its length
/// @param file_bytes of the whole file
/// @param file_name for messages
/// @throws CheckpointError naming file, tensor and rule
[[nodiscard]] inline SafetensorsHeader parse_safetensors_header(const std::string& json_text,
                                                                std::uint64_t file_bytes,
                                                                const std::string& file_name) {
  const auto fail = [&](std::string_view rule) {
    detail::throw_safetensors_error(file_name, "", rule);
  };
  if (json_text.size() > safetensors_header_limit) fail("the header is longer than 100 MB");
  if (file_bytes < 8 || json_text.size() > file_bytes - 8)
    fail("the header is longer than the file");
  if (!json_text.starts_with('{')) fail("the header does not begin with '{'");
  // The parser takes it for the text's end and would not see what follows.
  if (json_text.find('\0') != std::string::npos) fail("the header has a zero byte");

  SafetensorsHeader header;
  header.data_begin = 8 + json_text.size();
  detail::SafetensorsSax sax(file_name, header);
  nlohmann::json::sax_parse(json_text, &sax);
  detail::require_different_names(header.tensors, file_name);
  std::ranges::sort(header.tensors, {},
                    [](const TensorEntry& tensor) { return std::pair(tensor.begin, tensor.end); });
  detail::require_filled(header.tensors, file_bytes - header.data_begin, file_name);
  return header;
}

/// Reads the header of a whole file. Its length is checked before any memory is asked for.
/// @throws CheckpointError as `parse_safetensors_header`, or because reading fails
template <ByteSource Source>
[[nodiscard]] SafetensorsHeader read_safetensors_header(const Source& source) {
  const std::string name = source.name();
  const std::uint64_t bytes = source.bytes();
  if (bytes < 8) {
    detail::throw_safetensors_error(
        name, "", "it has " + std::to_string(bytes) + " bytes, too few for the header's length");
  }
  std::array<std::byte, 8> prefix{};
  source.read_at(0, prefix);
  std::uint64_t length = 0;
  for (std::size_t i = prefix.size(); i-- != 0;) {
    length = length << 8U | std::to_integer<std::uint64_t>(prefix[i]);
  }
  if (length > safetensors_header_limit) {
    detail::throw_safetensors_error(name, "",
                                    "the header's length, " + std::to_string(length) +
                                        " bytes, is more than 100 MB: this is no such file");
  }
  if (length > bytes - 8) {
    detail::throw_safetensors_error(
        name, "",
        "the header's length, " + std::to_string(length) +
            " bytes, is more than the file has: it may have been cut off");
  }
  std::string text(static_cast<std::size_t>(length), '\0');
  source.read_at(8, std::as_writable_bytes(std::span(text)));
  return parse_safetensors_header(text, bytes, name);
}

/// What a file begins with: the header's length and the header, padded with spaces so that the data
/// section begins at a multiple of 8 bytes. Tensors are listed in the order given.
/// @throws CheckpointError the tensors or the metadata break a rule of the format
[[nodiscard]] inline std::string format_safetensors_header(
    std::span<const TensorEntry> tensors, const std::map<std::string, std::string>& metadata) {
  const std::string file = "to be written";
  const auto text_of = [&](const std::string& text) {
    try {
      return nlohmann::json(text).dump();
    } catch (const nlohmann::json::exception&) {
      detail::throw_safetensors_error(file, detail::in_quotes(text), "is not UTF-8");
    }
  };
  const auto list_of = [](const auto& numbers) {
    std::string list;
    for (const auto number : numbers) {
      list += (list.empty() ? "[" : ",") + std::to_string(number);
    }
    return (list.empty() ? "[" : list) + "]";
  };

  std::string text(8, '\0');  // for the length
  char separator = '{';
  const auto add_key = [&](const std::string& key) {
    text += separator;
    text += text_of(key) + ':';
    separator = ',';
  };
  if (!metadata.empty()) {
    add_key("__metadata__");
    separator = '{';
    for (const auto& [key, value] : metadata) {
      add_key(key);
      text += text_of(value);
    }
    text += '}';
  }
  std::uint64_t data_bytes = 0;
  for (const TensorEntry& tensor : tensors) {
    if (tensor.name == "__metadata__") {
      detail::throw_safetensors_error(file, "tensor " + detail::in_quotes(tensor.name),
                                      "the format keeps this name for itself");
    }
    add_key(tensor.name);
    text += R"({"dtype":)" + text_of(tensor.dtype) + R"(,"shape":)" + list_of(tensor.shape) +
            R"(,"data_offsets":)" + list_of(std::array{tensor.begin, tensor.end}) + '}';
    data_bytes = std::max(data_bytes, tensor.end);
  }
  if (separator == '{') text += separator;
  text += '}';
  text.append((8 - text.size() % 8) % 8, ' ');

  std::uint64_t length = text.size() - 8;
  // Whatever is wrong is found by the reader's own rules.
  (void)parse_safetensors_header(text.substr(8), text.size() + data_bytes, file);
  for (std::size_t i = 0; i < 8; ++i, length >>= 8U) text[i] = static_cast<char>(length & 0xffU);
  return text;
}

}  // namespace zero
