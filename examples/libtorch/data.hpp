// SPDX-License-Identifier: Apache-2.0
/// @file
/// What the models learn from, as plain numbers: images of digits, and text as characters.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <vector>

namespace example {

/// Images of handwritten digits.
struct Digits {
  /// One side of an image, in pixels.
  static constexpr std::size_t side = 8;

  std::vector<float> pixels;         ///< image by image, row by row, 0 to 1
  std::vector<std::int64_t> labels;  ///< 0 to 9, one an image
};

/// Reads what scikit-learn ships as sklearn/datasets/data/digits.csv.gz, unpacked: a line an image,
/// 64 pixels of 0 to 16 and the digit, with commas between them. Throws `bert::InputError`, which
/// names file and line, for anything else, and for fewer than 100 images.
[[nodiscard]] Digits read_digits(const std::filesystem::path& file);

/// A text as numbers, one a character (a byte).
struct Characters {
  std::vector<std::int64_t> ids;  ///< places in `known`
  std::string known;              ///< the different characters, in the order of their codes
};

/// Throws `bert::InputError` for files that can't be read, as `bert::read_texts` does, and for less
/// than 10,000 characters. Without files: the licences that every Debian system has.
[[nodiscard]] Characters read_characters(std::span<const std::filesystem::path> files);

}  // namespace example
