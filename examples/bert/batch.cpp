// SPDX-License-Identifier: Apache-2.0
#include "batch.hpp"

#include <algorithm>
#include <limits>
#include <string>

#include "input_error.hpp"

namespace bert {

BatchSource::BatchSource(std::size_t vocabulary_size, std::size_t sequences, std::size_t length,
                         std::uint64_t seed)
    : vocabulary_size_(vocabulary_size), sequences_(sequences), length_(length), seed_(seed) {
  constexpr std::size_t most = std::numeric_limits<std::int32_t>::max();
  if (vocabulary_size < Vocabulary::minimum_size || vocabulary_size > most) {
    throw InputError("a vocabulary of " + std::to_string(vocabulary_size) +
                     " tokens can't be trained on: give it " +
                     std::to_string(Vocabulary::minimum_size) + " to " + std::to_string(most));
  }
  if (sequences < 1) throw InputError("a batch of 0 sequences: ask for at least 1");
  if (length < 3 || length > most) {
    throw InputError("sequences of " + std::to_string(length) +
                     " tokens can't be trained on: [CLS], a word and [SEP] make 3; ask for 3 to " +
                     std::to_string(most));
  }
}

void BatchSource::fill(Batch& batch, std::uint64_t rank, std::uint64_t step) const {
  batch.sequences = sequences_;
  batch.length = length_;
  batch.predictions = predictions_of(length_);
  batch.tokens.resize(sequences_ * length_);
  batch.segments.assign(sequences_ * length_, 0);
  batch.positions.assign(sequences_ * batch.predictions, 0);
  batch.labels.assign(sequences_ * batch.predictions, SpecialToken::pad);
  batch.weights.assign(sequences_ * batch.predictions, 0.0F);

  Random random(seed_, rank, step);
  for (std::size_t sequence = 0; sequence < sequences_; ++sequence) {
    const std::span tokens = std::span(batch.tokens).subspan(sequence * length_, length_);
    tokens.front() = SpecialToken::cls;
    tokens.back() = SpecialToken::sep;
    draw_words(tokens.subspan(1, length_ - 2), random);

    // Chooses `masked` of the words, all subsets equally likely and in ascending order (Knuth,
    // The Art of Computer Programming, volume 2, 3.4.2, algorithm S).
    std::size_t prediction = sequence * batch.predictions;
    std::size_t masked = masked_of(length_);
    for (std::size_t place = 1; masked > 0; ++place) {
      if (random.below(length_ - 1 - place) >= masked) continue;
      --masked;
      std::int32_t& token = tokens[place];
      batch.positions[prediction] = static_cast<std::int32_t>(place);
      batch.labels[prediction] = token;
      batch.weights[prediction] = 1;
      ++prediction;
      const std::uint64_t tenth = random.below(10);
      if (tenth < 8) {
        token = SpecialToken::mask;
      } else if (tenth == 8) {
        token = random_word(random);
      }
    }
  }
}

std::int32_t BatchSource::random_word(Random& random) const {
  return static_cast<std::int32_t>(special_tokens +
                                   random.below(vocabulary_size_ - special_tokens));
}

TextSource::TextSource(const Corpus& corpus, std::size_t vocabulary_size, std::size_t sequences,
                       std::size_t length, std::uint64_t seed)
    : BatchSource(vocabulary_size, sequences, length, seed), corpus_(corpus.tokens()) {
  if (corpus_.size() < length - 2) {
    throw InputError("the text has " + std::to_string(corpus_.size()) +
                     " words, too few for sequences of " + std::to_string(length) +
                     " tokens: give more text, or ask for shorter sequences");
  }
  const std::int32_t largest = *std::max_element(corpus_.begin(), corpus_.end());
  if (static_cast<std::size_t>(largest) >= vocabulary_size) {
    throw InputError("the text has a token with id " + std::to_string(largest) +
                     ", the model's vocabulary only " + std::to_string(vocabulary_size) +
                     " tokens: give both the same vocabulary");
  }
}

void TextSource::draw_words(std::span<std::int32_t> words, Random& random) const {
  const std::uint64_t begin = random.below(corpus_.size() - words.size() + 1);
  const auto run = corpus_.subspan(static_cast<std::size_t>(begin), words.size());
  std::copy(run.begin(), run.end(), words.begin());
}

void SyntheticSource::draw_words(std::span<std::int32_t> words, Random& random) const {
  for (std::int32_t& word : words) word = random_word(random);
}

}  // namespace bert
