// SPDX-License-Identifier: Apache-2.0
// The libtorch example's data: what is read, and what is refused. No torch, no threads.
#include "../../examples/libtorch/data.hpp"

#include <stdlib.h>  // mkdtemp

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "../../examples/bert/input_error.hpp"
#include "catch.hpp"

namespace {

using bert::InputError;
using Catch::Matchers::ContainsSubstring;
using std::filesystem::path;

/// A file of this test's own, gone with it.
class File {
 public:
  explicit File(const std::string& text) {
    std::string name = (std::filesystem::temp_directory_path() / "libtorch_data.XXXXXX").string();
    if (mkdtemp(name.data()) == nullptr) throw std::runtime_error("no temporary folder");
    folder_ = name;
    std::ofstream(at(), std::ios::binary) << text;
  }
  ~File() { std::filesystem::remove_all(folder_); }
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  [[nodiscard]] path at() const { return folder_ / "given"; }

 private:
  path folder_;
};

/// An image whose pixels are all `pixel`.
std::string line(const std::string& pixel, const std::string& label) {
  std::string text;
  for (int i = 0; i < 64; ++i) text += pixel + ',';
  return text + label;
}

std::vector<std::string> good_lines() {
  std::vector<std::string> lines;
  for (int i = 0; i < 100; ++i)
    lines.push_back(line(std::to_string(i % 17), std::to_string(i % 10)));
  return lines;
}

std::string joined(const std::vector<std::string>& lines, const std::string& end = "\n") {
  std::string text;
  for (const std::string& one : lines) text += one + end;
  return text;
}

/// What is said of a file whose 42nd line is `text`.
std::string refusal_of_line(const std::string& text) {
  std::vector<std::string> lines = good_lines();
  lines[41] = text;
  const File file(joined(lines));
  try {
    (void)example::read_digits(file.at());
  } catch (const InputError& error) {
    return error.what();
  }
  return "";
}

}  // namespace

TEST_CASE("digits are read as numbers from 0 to 1 and labels") {
  const std::string end = GENERATE("\n", "\r\n");
  const File file(joined(good_lines(), end));
  const example::Digits digits = example::read_digits(file.at());
  REQUIRE(digits.labels.size() == 100);
  REQUIRE(digits.pixels.size() == 100 * 64);
  CHECK(digits.labels[37] == 7);
  CHECK(digits.pixels[16 * 64] == 1.0F);
  CHECK(digits.pixels[8 * 64 + 63] == 0.5F);
  CHECK(digits.pixels[17 * 64] == 0.0F);
}

TEST_CASE("the last line needs no end") {
  std::string text = joined(good_lines());
  text.pop_back();
  CHECK(example::read_digits(File(text).at()).labels.size() == 100);
}

TEST_CASE("a line that is no image is named") {
  struct Case {
    std::string line, said;
  };
  const auto [given, said] = GENERATE(
      Case{line("17", "3"), "column 1 is no pixel"}, Case{line("-1", "3"), "column 1 is no pixel"},
      Case{line("1.5", "3"), "column 1 is no pixel"}, Case{line("", "3"), "column 1 is no pixel"},
      Case{line("99999999999", "3"), "column 1 is no pixel"}, Case{"", "column 1 is no pixel"},
      Case{"1,2,3", "column 3 is no pixel"}, Case{line("1", "10"), "column 65 is no label"},
      Case{line("1", "-1"), "column 65 is no label"}, Case{line("1", ""), "column 65 is no label"},
      Case{line("1", "3,"), "column 65 is no label"},
      Case{line("1", "3 "), "column 65 is no label"},
      Case{line("1", "x"), "column 65 is no label"});
  INFO(given);
  CHECK_THAT(refusal_of_line(given), ContainsSubstring("given, line 42: " + said));
}

TEST_CASE("files that are no digits are refused") {
  CHECK_THROWS_WITH(example::read_digits("nowhere/digits.csv"),
                    ContainsSubstring("nowhere/digits.csv: there is no such file; ./dev demo"));
  CHECK_THROWS_AS(example::read_digits(std::filesystem::temp_directory_path()), InputError);
  CHECK_THROWS_WITH(example::read_digits(File("").at()), ContainsSubstring("it is empty"));
  CHECK_THROWS_WITH(example::read_digits(File("\x1f\x8b\x08").at()), ContainsSubstring("gunzip"));
  std::vector<std::string> lines = good_lines();
  lines.pop_back();
  CHECK_THROWS_WITH(example::read_digits(File(joined(lines)).at()),
                    ContainsSubstring("line 99: the file ends after 99 images"));
}

TEST_CASE("a text becomes the places of its characters among those that it has") {
  std::string text;
  while (text.size() < 10'000) text += "caf\xc3\xa9 ";
  const File file(text);
  const example::Characters characters = example::read_characters(std::vector{file.at()});
  CHECK(characters.known == " acf\xa9\xc3");
  REQUIRE(characters.ids.size() == text.size());
  CHECK(std::vector(characters.ids.begin(), characters.ids.begin() + 7) ==
        std::vector<std::int64_t>{2, 1, 3, 5, 4, 0, 2});
}

TEST_CASE("a text that is missing or too short is refused") {
  CHECK_THROWS_WITH(example::read_characters(std::vector<path>{"nowhere.txt"}),
                    ContainsSubstring("nowhere.txt"));
  const File file(std::string(9999, 'x'));
  CHECK_THROWS_WITH(example::read_characters(std::vector{file.at()}),
                    ContainsSubstring("9999 characters; give at least 10000"));
}
