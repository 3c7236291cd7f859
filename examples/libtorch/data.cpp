// SPDX-License-Identifier: Apache-2.0
#include "data.hpp"

#include <algorithm>
#include <charconv>
#include <cstddef>
#include <string_view>
#include <system_error>

#include "../bert/input_error.hpp"
#include "../bert/text.hpp"

namespace example {

using bert::InputError;

namespace {

constexpr std::size_t pixels_of_image = Digits::side * Digits::side;

/// Takes one number from the front of `line`, and the comma after it unless it is the last. False
/// where there is none, or one above `most`.
bool take(std::string_view& line, int most, bool last, int& number) {
  const auto [end, error] = std::from_chars(line.data(), line.data() + line.size(), number);
  if (error != std::errc{} || number < 0 || number > most) return false;
  line.remove_prefix(static_cast<std::size_t>(end - line.data()));
  if (last) return line.empty();
  if (line.empty() || line.front() != ',') return false;
  line.remove_prefix(1);
  return true;
}

}  // namespace

Digits read_digits(const std::filesystem::path& file) {
  std::error_code ignored;
  if (!std::filesystem::exists(file, ignored)) {
    throw InputError(file.string() +
                     ": there is no such file; ./dev demo --libtorch fetches it, or unpack "
                     "sklearn/datasets/data/digits.csv.gz of scikit-learn's package");
  }
  const std::string text = bert::read_texts(std::span(&file, 1));
  const auto fail = [&](std::size_t line, const std::string& what) {
    return InputError(file.string() + ", line " + std::to_string(line) + ": " + what);
  };
  if (text.starts_with("\x1f\x8b")) throw fail(1, "this is packed; unpack it with gunzip");
  Digits digits;
  std::size_t number_of_line = 0;
  for (std::size_t begin = 0; begin < text.size();) {
    ++number_of_line;
    const std::size_t end = std::min(text.find('\n', begin), text.size());
    std::string_view line = std::string_view(text).substr(begin, end - begin);
    begin = end + 1;
    if (line.ends_with('\r')) line.remove_suffix(1);
    int number = 0;
    for (std::size_t i = 0; i < pixels_of_image; ++i) {
      if (!take(line, 16, false, number)) {
        throw fail(number_of_line, "column " + std::to_string(i + 1) +
                                       " is no pixel, which is a number from 0 to 16 before a "
                                       "comma; give scikit-learn's digits.csv");
      }
      digits.pixels.push_back(static_cast<float>(number) / 16.0F);
    }
    if (!take(line, 9, true, number)) {
      throw fail(number_of_line, "column " + std::to_string(pixels_of_image + 1) +
                                     " is no label, which is a digit at the line's end; give "
                                     "scikit-learn's digits.csv");
    }
    digits.labels.push_back(number);
  }
  if (digits.labels.size() < 100) {
    throw fail(number_of_line, "the file ends after " + std::to_string(digits.labels.size()) +
                                   " images; give at least 100");
  }
  return digits;
}

Characters read_characters(std::span<const std::filesystem::path> files) {
  const std::string text =
      files.empty() ? bert::read_texts(bert::default_texts()) : bert::read_texts(files);
  if (text.size() < 10'000) {
    throw InputError("the text has " + std::to_string(text.size()) +
                     " characters; give at least 10000");
  }
  std::array<bool, 256> seen{};
  for (const char c : text) seen[static_cast<unsigned char>(c)] = true;
  std::array<std::int64_t, 256> id{};
  Characters characters;
  for (std::size_t code = 0; code < seen.size(); ++code) {
    if (!seen[code]) continue;
    id[code] = static_cast<std::int64_t>(characters.known.size());
    characters.known += static_cast<char>(code);
  }
  characters.ids.reserve(text.size());
  for (const char c : text) characters.ids.push_back(id[static_cast<unsigned char>(c)]);
  return characters;
}

}  // namespace example
