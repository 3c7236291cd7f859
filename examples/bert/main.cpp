// SPDX-License-Identifier: Apache-2.0
// The main job: the same BERT trained with its optimizer replicated on every rank, then sharded
// over them. Losses and weights agree to the last bit; memory and time are printed side by side.
//
//     bert                                              the demo: mini, on the licence texts
//     bert --model large --synthetic --steps 5          BERT-large, two ranks: 16 GB
//     bert --help
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <fstream>
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
};

Data load(bert::Options& options) {
  using bert::InputError;
  Data data;
  std::size_t& vocabulary = options.model.vocabulary;
  if (options.vocabulary > vocabulary) {
    throw InputError("--vocabulary " + std::to_string(options.vocabulary) + ": the model has " +
                     std::to_string(vocabulary) + "; give no more");
  }
  if (options.synthetic) {
    if (options.vocabulary > 0) vocabulary = options.vocabulary;
    data.source = std::make_unique<bert::SyntheticSource>(vocabulary, options.batch,
                                                          options.sequence, options.seed);
    options.data = "random words of " + std::to_string(vocabulary);
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
  options.data = std::to_string(files.size()) + (files.size() == 1 ? " file, " : " files, ") +
                 std::to_string(text.size()) + " bytes, " + std::to_string(words.size()) +
                 " words, a vocabulary of " + std::to_string(vocabulary);
  return data;
}

/// So that nobody trains for an hour and then can't write what came of it.
void require_writable(const char* option, const std::filesystem::path& file) {
  if (file.empty() || std::ofstream(file, std::ios::app)) return;
  throw bert::InputError(std::string(option) + " " + file.string() +
                         ": can't be written; name a file in a folder that exists and that you "
                         "may write to");
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
  bert::require_memory(options, combination, bert::available_bytes(), bert::address_space_left());
  require_writable("--json", options.json);
  require_writable("--trace", options.trace);
  if (!options.json.empty() && options.json == options.trace) {
    throw bert::InputError("--json and --trace name the same file; name two");
  }

  std::fputs(bert::describe(options.model, bert::Head::masked_lm).c_str(), stdout);
  std::printf(
      "data: %s\n%d x %zu sequences of %zu tokens a step (ranks x batch); %s, %s, partition %s, "
      "bucket view %s\n\n",
      options.data.c_str(), options.ranks, options.batch, options.sequence,
      options.optimizer.c_str(), options.precision.c_str(), options.partition.c_str(),
      options.bucket_view.c_str());

  if (std::signal(SIGINT, interrupt) == SIG_IGN) std::signal(SIGINT, SIG_IGN);  // as with nohup
  std::vector<bert::RunReport> runs;
  std::vector<std::vector<bert::Recorder>> recorders;
  for (const bool sharded : bert::modes_of(options)) {
    bert::Job job{&options, data.source.get(), &interrupted};
    job.progress = [&](const bert::RunReport& report) { show_progress(options, report); };
    if (!options.trace.empty()) {
      // Three spans a step, and three a bucket; there are about as many as the bytes make.
      const std::size_t bytes = combination.estimate(options, sharded, 0).parameters;
      const std::size_t spans = options.steps * (3 + 3 * (bytes / options.bucket_bytes + 2));
      std::vector<bert::Recorder>& of_mode = recorders.emplace_back();
      of_mode.reserve(static_cast<std::size_t>(options.ranks));
      for (int rank = 0; rank < options.ranks; ++rank) {
        of_mode.emplace_back(std::min<std::size_t>(spans, 1U << 20));
      }
      job.recorders = &of_mode;
    }
    runs.push_back(combination.train(job, sharded));
    for (int rank = 0; rank < options.ranks; ++rank) {
      runs.back().estimated.push_back(combination.estimate(options, sharded, rank));
    }
    if (interrupted) break;
  }
  std::printf("\n%s", bert::tables(options, runs).c_str());
  if (!options.trace.empty()) {
    std::vector<bert::Track> tracks;
    for (std::size_t m = 0; m < runs.size(); ++m) {
      for (std::size_t r = 0; r < recorders[m].size(); ++r) {
        tracks.push_back({runs[m].mode, "rank " + std::to_string(r), &recorders[m][r]});
      }
    }
    bert::write_trace(options.trace, tracks);
  }
  if (!options.json.empty()) bert::write_json(options, runs);
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
    const int code = run(argc, argv);
    if (std::fflush(stdout) != 0 || std::ferror(stdout) != 0) {
      std::fputs("bert: the output can't be written\n", stderr);
      return 1;
    }
    return code;
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
