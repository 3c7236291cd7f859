// SPDX-License-Identifier: Apache-2.0
// Batches for masked language modelling as BERT's pre-training has them (Devlin et al.,
// arXiv:1810.04805, section 3.1 and appendix A.1), out of a corpus or of random tokens.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "random.hpp"
#include "text.hpp"

namespace bert {

/// What one rank trains on in one step; arrays are row-major, a row per sequence.
struct Batch {
  std::size_t sequences = 0;    ///< B
  std::size_t length = 0;       ///< S, tokens of a sequence with [CLS] and [SEP]
  std::size_t predictions = 0;  ///< P, places of a sequence to predict, padded ones included

  std::vector<std::int32_t> tokens;     ///< [B, S], after masking
  std::vector<std::int32_t> segments;   ///< [B, S], the token type: always 0
  std::vector<std::int32_t> positions;  ///< [B, P], places within the sequence, ascending
  std::vector<std::int32_t> labels;     ///< [B, P], the tokens that were there before masking
  std::vector<float> weights;           ///< [B, P], 1, or 0 for a padded prediction
};

/// P of sequences of `length` tokens: 15 % of them, rounded up (20 for 128, as BERT has it).
[[nodiscard]] constexpr std::size_t predictions_of(std::size_t length) {
  return length == 0 ? 1 : (15 * length + 99) / 100;
}

/// How many of the P are real: 15 % rounded to nearest, at least one. It is the same for every
/// sequence, so the mean over ranks of mean losses is the mean over all predictions.
[[nodiscard]] constexpr std::size_t masked_of(std::size_t length) {
  return length < 4 ? 1 : (15 * length + 50) / 100;
}

/// Fills batches: each sequence is [CLS], words, [SEP], and of its words some are masked. Of those
/// 80 % become [MASK], 10 % a random word and 10 % stay as they are. [CLS] and [SEP] are never
/// masked, and no special token is drawn as a random word; an [UNK] of the text counts as a word.
///
/// A batch is a function of seed, rank and step alone. Ranks may share a source: filling a batch
/// changes nothing in it.
class BatchSource {
 public:
  BatchSource(const BatchSource&) = delete;
  BatchSource& operator=(const BatchSource&) = delete;
  virtual ~BatchSource() = default;

  /// Allocates only where `batch` is smaller than what it gets.
  void fill(Batch& batch, std::uint64_t rank, std::uint64_t step) const;

 protected:
  /// @param vocabulary_size of the model: tokens are below it
  /// @param sequences of a batch
  /// @param length of a sequence, with [CLS] and [SEP]
  /// Throws InputError for a vocabulary without words, no sequences, or sequences without a word.
  BatchSource(std::size_t vocabulary_size, std::size_t sequences, std::size_t length,
              std::uint64_t seed);

  /// Any of the vocabulary but the special tokens.
  [[nodiscard]] std::int32_t random_word(Random& random) const;

 private:
  virtual void draw_words(std::span<std::int32_t> words, Random& random) const = 0;

  std::size_t vocabulary_size_, sequences_, length_;
  std::uint64_t seed_;
};

/// Sequences from uniformly random places of a corpus, which must outlive the source.
class TextSource final : public BatchSource {
 public:
  /// As BatchSource; throws InputError also for a corpus shorter than a sequence, or with tokens
  /// that are not below `vocabulary_size`.
  TextSource(const Corpus& corpus, std::size_t vocabulary_size, std::size_t sequences,
             std::size_t length, std::uint64_t seed);

 private:
  void draw_words(std::span<std::int32_t> words, Random& random) const override;

  std::span<const std::int32_t> corpus_;
};

/// Random words, for measurements that need no text.
class SyntheticSource final : public BatchSource {
 public:
  SyntheticSource(std::size_t vocabulary_size, std::size_t sequences, std::size_t length,
                  std::uint64_t seed)
      : BatchSource(vocabulary_size, sequences, length, seed) {}

 private:
  void draw_words(std::span<std::int32_t> words, Random& random) const override;
};

}  // namespace bert
