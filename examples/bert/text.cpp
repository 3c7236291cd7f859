// SPDX-License-Identifier: Apache-2.0
#include "text.hpp"

#include <algorithm>
#include <cerrno>
#include <fstream>
#include <iterator>
#include <system_error>
#include <utility>

#include "input_error.hpp"

namespace bert {

namespace {

// Not <cctype>: the program's locale must not change what a word is.
bool is_letter(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
         static_cast<unsigned char>(c) >= 0x80;
}

bool is_separator(char c) { return static_cast<unsigned char>(c) <= ' ' || c == '\x7f'; }

char lower(char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c; }

std::string read_text(const std::filesystem::path& path) {
  const auto fail = [&](const std::string& reason) {
    return InputError("can't read the text '" + path.string() + "': " + reason);
  };
  std::error_code ignored;
  if (std::filesystem::is_directory(path, ignored)) {
    throw fail("it is a directory; name the files in it");
  }
  errno = 0;
  std::ifstream file(path, std::ios::binary);
  if (!file) {
    throw fail(errno != 0 ? std::generic_category().message(errno) : "it can't be opened");
  }
  constexpr std::size_t most = std::size_t{1} << 30;
  std::string text, piece(std::size_t{1} << 20, '\0');
  while (file.read(piece.data(), static_cast<std::streamsize>(piece.size())), file.gcount() > 0) {
    text.append(piece, 0, static_cast<std::size_t>(file.gcount()));
    if (text.size() > most) throw fail("it has more than 1 GiB; give a part of it");
  }
  if (file.bad()) throw fail("reading it failed");
  if (text.empty()) throw fail("it is empty");
  return text;
}

}  // namespace

std::vector<std::string> words_of(std::string_view text) {
  std::vector<std::string> words;
  for (std::size_t i = 0; i < text.size();) {
    const std::size_t begin = i++;
    if (is_separator(text[begin])) continue;
    if (is_letter(text[begin])) {
      while (i < text.size() && is_letter(text[i])) ++i;
    }
    std::string& word = words.emplace_back(text.substr(begin, i - begin));
    std::transform(word.begin(), word.end(), word.begin(), lower);
  }
  return words;
}

std::string read_texts(std::span<const std::filesystem::path> paths) {
  if (paths.empty()) throw InputError("no text to read: name at least one file");
  std::string texts;
  for (const std::filesystem::path& path : paths) {
    if (!texts.empty()) texts += '\n';
    texts += read_text(path);
  }
  return texts;
}

std::vector<std::filesystem::path> default_texts(const std::filesystem::path& folder) {
  std::vector<std::filesystem::path> paths;
  std::error_code error;
  for (std::filesystem::directory_iterator entry(folder, error), end; !error && entry != end;
       entry.increment(error)) {
    std::error_code unknown;  // of what vanishes meanwhile: not a file to read then
    if (entry->symlink_status(unknown).type() == std::filesystem::file_type::regular) {
      paths.push_back(entry->path());
    }
  }
  if (paths.empty() || error) {
    throw InputError("no text to train on in '" + folder.string() + "' (" +
                     (error ? error.message() : "no regular file there") +
                     "): name a file of your own with --text FILE");
  }
  std::sort(paths.begin(), paths.end());
  return paths;
}

Vocabulary::Vocabulary(std::span<const std::string> words, std::size_t size, std::size_t at_most)
    : tokens_{"[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"} {
  std::map<std::string_view, std::size_t> counts;
  for (const std::string& word : words) ++counts[word];

  const std::size_t available = special_tokens + counts.size();
  const std::size_t wanted = size == 0 ? std::min(available, at_most) : size;
  if (available < minimum_size) {
    throw InputError("the text has " + std::to_string(counts.size()) +
                     " distinct words, and a vocabulary needs at least " +
                     std::to_string(minimum_size - special_tokens) + ": give more text");
  }
  if (wanted < minimum_size) {
    throw InputError("a vocabulary of " + std::to_string(wanted) + " tokens is too small: " +
                     std::to_string(special_tokens) + " are special, so ask for at least " +
                     std::to_string(minimum_size) + ", or for 0 to have all words of the text");
  }
  if (wanted > available) {
    throw InputError("a vocabulary of " + std::to_string(wanted) +
                     " tokens needs more text: this one has " + std::to_string(counts.size()) +
                     " distinct words and " + std::to_string(special_tokens) +
                     " special tokens; ask for at most " + std::to_string(available) +
                     ", or for 0 to have all of them, or give more text");
  }

  std::vector<std::pair<std::string_view, std::size_t>> ranking(counts.begin(), counts.end());
  // Stable, and the map was in alphabetical order: it remains so among equals.
  std::stable_sort(ranking.begin(), ranking.end(),
                   [](const auto& a, const auto& b) { return a.second > b.second; });
  ranking.resize(wanted - special_tokens);
  for (const auto& [word, count] : ranking) tokens_.emplace_back(word);
  for (std::size_t i = 0; i < tokens_.size(); ++i) {
    ids_.emplace(tokens_[i], static_cast<std::int32_t>(i));
  }
}

std::int32_t Vocabulary::id(std::string_view word) const {
  const auto found = ids_.find(word);
  return found == ids_.end() ? SpecialToken::unk : found->second;
}

const std::string& Vocabulary::token(std::int32_t id) const {
  return tokens_.at(static_cast<std::size_t>(id));
}

Corpus::Corpus(std::span<const std::string> words, const Vocabulary& vocabulary) {
  tokens_.reserve(words.size());
  for (const std::string& word : words) tokens_.push_back(vocabulary.id(word));
}

}  // namespace bert
