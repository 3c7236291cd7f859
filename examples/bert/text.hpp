// SPDX-License-Identifier: Apache-2.0
// Text for masked language modelling: files, words, a vocabulary of them, and a corpus of its ids.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <limits>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace bert {

/// Lower-cased words and punctuation marks, as BERT's basic tokenizer splits text: each ASCII
/// punctuation mark is a token, and so is each run of letters and digits. Bytes from 0x80 on count
/// as letters, so that UTF-8 survives (its capitals too); ASCII control characters separate.
[[nodiscard]] std::vector<std::string> words_of(std::string_view text);

/// The files' contents, one after the other, with a newline between them. Throws InputError for a
/// file that is missing, unreadable, empty or a directory, and for no file at all.
[[nodiscard]] std::string read_texts(std::span<const std::filesystem::path> paths);

/// What to train on where the user names no file: the licenses that every Debian system has, about
/// 260 KB of English. The regular files of `folder`, without links to them, sorted by name; throws
/// InputError where there are none.
[[nodiscard]] std::vector<std::filesystem::path> default_texts(
    const std::filesystem::path& folder = "/usr/share/common-licenses");

/// The tokens that are not words, under the ids they have in every vocabulary.
struct SpecialToken {
  static constexpr std::int32_t pad = 0, unk = 1, cls = 2, sep = 3, mask = 4;
};
inline constexpr std::size_t special_tokens = 5;

/// Ids of tokens: the special ones, then words, the most frequent first and those equally frequent
/// in alphabetical order, so that the same text has the same ids everywhere.
class Vocabulary {
 public:
  /// With fewer words than two there is nothing to predict.
  static constexpr std::size_t minimum_size = special_tokens + 2;
  /// @param words a text's, each as often as it occurs there
  /// @param size how many tokens to have, special ones included; 0: one for each distinct word
  /// @param at_most bounds the size where `size` is 0
  /// Throws InputError where the text has too few words for `size`, or that is below minimum_size.
  explicit Vocabulary(std::span<const std::string> words, std::size_t size = 0,
                      std::size_t at_most = std::numeric_limits<std::size_t>::max());

  [[nodiscard]] std::size_t size() const { return tokens_.size(); }
  /// The id of a word, SpecialToken::unk for one that isn't in the vocabulary.
  [[nodiscard]] std::int32_t id(std::string_view word) const;
  /// The word, or a special token's name such as "[MASK]"; `id` is below size().
  [[nodiscard]] const std::string& token(std::int32_t id) const;

 private:
  std::vector<std::string> tokens_;
  std::map<std::string, std::int32_t, std::less<>> ids_;
};

/// A text as ids of a vocabulary.
class Corpus {
 public:
  Corpus(std::span<const std::string> words, const Vocabulary& vocabulary);

  [[nodiscard]] std::span<const std::int32_t> tokens() const { return tokens_; }

 private:
  std::vector<std::int32_t> tokens_;
};

}  // namespace bert
