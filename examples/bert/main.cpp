// SPDX-License-Identifier: Apache-2.0
// The main job: the same BERT trained with its optimizer replicated on every rank, then sharded
// over them. Losses and weights agree to the last bit; memory and time are printed side by side.
//
//     bert                                              the demo: mini, on the licence texts
//     bert --model large --synthetic --steps 5          BERT-large, two ranks: 16 GB
//     bert --help
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstdio>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>
#include <zero/error.hpp>

#ifdef __GLIBC__
#include <malloc.h>
#endif

#include "batch.hpp"
#include "config.hpp"
#include "input_error.hpp"
#include "options.hpp"
#include "process_memory.hpp"
#include "report.hpp"
#include "text.hpp"
#include "trace.hpp"
#include "training.hpp"

namespace {

std::atomic<bool> interrupted{false};
static_assert(std::atomic<bool>::is_always_lock_free);

extern "C" void interrupt(int) {
  interrupted = true;
  std::signal(SIGINT, SIG_DFL);  // the second ends the program
}

/// What batches are made of, and what has to stay for them.
struct Data {
  std::optional<bert::Corpus> corpus;
  std::unique_ptr<bert::BatchSource> source;
  std::string description;
};

Data load(bert::Options& options) {
  using bert::InputError;
  Data data;
  std::size_t& vocabulary = options.model.vocabulary;
  if (options.synthetic) {
    if (options.vocabulary > vocabulary) {
      throw InputError("--vocabulary " + std::to_string(options.vocabulary) + ": the model has " +
                       std::to_string(vocabulary) + "; give no more");
    }
    if (options.vocabulary > 0) vocabulary = options.vocabulary;
    data.source = std::make_unique<bert::SyntheticSource>(vocabulary, options.batch,
                                                          options.sequence, options.seed);
    data.description = "random words of " + std::to_string(vocabulary);
    return data;
  }
  const auto files = options.text.empty() ? bert::default_texts() : options.text;
  const std::string text = bert::read_texts(files);
  const std::vector<std::string> words = bert::words_of(text);
  const bert::Vocabulary known(words, options.vocabulary, vocabulary);
  vocabulary = known.size();
  data.corpus.emplace(words, known);
  data.source = std::make_unique<bert::TextSource>(*data.corpus, vocabulary, options.batch,
                                                   options.sequence, options.seed);
  data.description = std::to_string(files.size()) + (files.size() == 1 ? " file, " : " files, ") +
                     std::to_string(text.size()) + " bytes, " + std::to_string(words.size()) +
                     " words, a vocabulary of " + std::to_string(vocabulary);
  return data;
}

/// On a terminal one line that changes; elsewhere a tenth of the lines.
void show_progress(const bert::Options& options, const bert::RunReport& run) {
  static const bool terminal = ::isatty(STDOUT_FILENO) != 0;
  const std::size_t done = run.losses.size(), every = (options.steps + 9) / 10;
  const bool last = done == options.steps || run.interrupted;
  if (!terminal && !last && done % every != 0 && done != 1) return;
  const bool kept = last || done % every == 0 || done == 1;
  std::printf("%s%s%s", terminal ? "\r\033[K" : "", bert::progress_line(options, run).c_str(),
              kept || !terminal ? "\n" : "");
  std::fflush(stdout);
}

int run(int argc, char** argv) {
  std::optional<bert::Options> parsed = bert::parse(argc, argv);
  if (!parsed) return 0;
  bert::Options& options = *parsed;
  if (options.describe) {
    for (const bert::Head head : {bert::Head::masked_lm, bert::Head::pooler}) {
      std::fputs(bert::describe(options.model, head).c_str(), stdout);
    }
    return 0;
  }
  const bert::Combination& combination = bert::choose(options);
  const Data data = load(options);
  bert::require_memory(options, combination, bert::available_bytes());

  std::fputs(bert::describe(options.model, bert::Head::masked_lm).c_str(), stdout);
  std::printf(
      "data: %s\n%d ranks, each %zu sequences of %zu tokens a step; %s, %s, partition %s, "
      "bucket view %s\n\n",
      data.description.c_str(), options.ranks, options.batch, options.sequence,
      options.optimizer.c_str(), options.precision.c_str(), options.partition.c_str(),
      options.bucket_view.c_str());

  std::signal(SIGINT, interrupt);
  std::vector<bert::RunReport> runs;
  std::vector<std::vector<bert::Recorder>> recorders;
  for (const bool sharded : bert::modes_of(options)) {
    bert::Job job{&options, data.source.get(), &interrupted};
    job.progress = [&](const bert::RunReport& report) { show_progress(options, report); };
    if (!options.trace.empty()) {
      recorders.emplace_back(static_cast<std::size_t>(options.ranks), bert::Recorder(1U << 20));
      job.recorders = &recorders.back();
    }
    runs.push_back(combination.train(job, sharded));
    for (int rank = 0; rank < options.ranks; ++rank) {
      runs.back().estimated.push_back(combination.estimate(options, sharded, rank));
    }
    if (interrupted) break;
  }
  std::printf("\n%s", bert::tables(options, runs).c_str());
  if (!options.json.empty()) bert::write_json(options, runs);
  if (!options.trace.empty()) {
    std::vector<bert::Track> tracks;
    for (std::size_t m = 0; m < runs.size(); ++m) {
      for (std::size_t r = 0; r < recorders[m].size(); ++r) {
        tracks.push_back({runs[m].mode, "rank " + std::to_string(r), &recorders[m][r]});
      }
    }
    bert::write_trace(options.trace, tracks);
  }
  if (interrupted) {
    std::printf("interrupted after %zu of %zu steps\n", runs.back().losses.size(), options.steps);
    return 130;
  }
  return runs.size() == 2 && !bert::same_bits(runs[0], runs[1]) ? 1 : 0;
}

}  // namespace

int main(int argc, char** argv) {
#ifdef __GLIBC__
  // Large arrays go back to the system when they are freed, so that what is resident is what lives.
  mallopt(M_MMAP_THRESHOLD, 1 << 20);
#endif
  try {
    return run(argc, argv);
  } catch (const bert::InputError& error) {
    std::fprintf(stderr, "bert: %s\n", error.what());
    return 2;
  } catch (const zero::UsageError& error) {  // options that make no sense, say a negative rate
    std::fprintf(stderr, "bert: %s\n", error.what());
    return 2;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "bert: %s\n", error.what());
    return 1;
  }
}
