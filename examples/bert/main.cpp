// SPDX-License-Identifier: Apache-2.0
// The main job: the same BERT trained with its optimizer replicated on every rank, then sharded
// over them. Losses and weights agree to the last bit; memory and time are printed side by side.
//
//     bert                                              the demo: mini, on the licence texts
//     bert --model large --synthetic --steps 5          BERT-large, two ranks: 16 GB
//     bert --stage all                                  gradients and parameters sharded, too
//     bert --mode sharded --until 30 --save FOLDER      half of it; the rest on three ranks:
//     bert --resume FOLDER --ranks 3 --stage all
//     mpirun -n 2 --bind-to none bert --communicator mpi    ranks that are processes
//     bert --help
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <charconv>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <fstream>
#include <memory>
#include <optional>
#include <string>
#include <system_error>
#include <utility>
#include <vector>
#include <zero/checkpoint/checkpoint.hpp>
#include <zero/error.hpp>

#ifdef __GLIBC__
#include <malloc.h>
#endif

#include "batch.hpp"
#include "config.hpp"
#include "input_error.hpp"
#include "options.hpp"
#include "process_memory.hpp"
#include "processes.hpp"
#include "report.hpp"
#include "text.hpp"
#include "trace.hpp"
#include "training.hpp"

namespace {

std::atomic<bool> interrupted{false};
static_assert(std::atomic<bool>::is_always_lock_free);

extern "C" void interrupt(int) {
  interrupted = true;
  // The second ends the program.
  std::signal(SIGINT, SIG_DFL);
  std::signal(SIGTERM, SIG_DFL);
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

/// Throws what says why a checkpoint can't be gone on from, or made.
void prepare_checkpoints(bert::Options& options, bool writes) {
  using bert::InputError;
  if (!options.resume.empty()) {
    const zero::Checkpoint from(options.resume);
    const std::string resume = "--resume " + options.resume.string();
    const auto found = from.info().notes.find(bert::steps_note);
    const std::string note = found == from.info().notes.end() ? "" : found->second;
    const auto [end, failed] =
        std::from_chars(note.data(), note.data() + note.size(), options.seen);
    if (failed != std::errc{} || end != note.data() + note.size()) {
      throw InputError(resume + ": no checkpoint of this program; give one that --save made");
    }
    if (options.seen >= options.end()) {
      throw InputError(resume + ": it is after step " + note + ", and this run ends after " +
                       std::to_string(options.end()) + "; give more --steps");
    }
  }
  if (!writes || options.save.empty()) return;
  std::error_code error;
  std::filesystem::create_directories(options.save, error);
  if (error || ::access(options.save.c_str(), W_OK | X_OK) != 0) {
    throw InputError("--save " + options.save.string() +
                     ": can't be written; name a folder that you may write to");
  }
}

/// On a terminal one line that changes; elsewhere a tenth of the lines.
void show_progress(const bert::Options& options, const bert::RunReport& run) {
  static const bool terminal = ::isatty(STDOUT_FILENO) != 0;
  const std::size_t done = options.seen + run.losses.size(), every = (options.steps + 9) / 10;
  const bool last = done == options.end() || run.interrupted, first = run.losses.size() == 1;
  const bool kept = last || first || done % every == 0;
  if (!terminal && !kept) return;
  std::printf("%s%s%s", terminal ? "\r\033[K" : "", bert::progress_line(options, run).c_str(),
              kept || !terminal ? "\n" : "");
  std::fflush(stdout);
}

/// Makes the ranks those that a launcher started. Throws `InputError` where that is not what the
/// command line says.
void settle_ranks(bert::Options& options, const bert::Processes& processes) {
  using bert::InputError;
  const int launched = bert::launched_processes();
  const std::string started = "mpirun started " + std::to_string(launched) + " processes";
  if (options.communicator == bert::Ranks::in_process) {
    if (launched <= 1) return;
    throw InputError(
        started + ", each of which would train on its own: add --communicator mpi" +
        (bert::Processes::compiled() ? "" : ", which needs a bert that was built with MPI"));
  }
  const int size = processes.size();
  if (launched > 1 && launched != size) {
    throw InputError(started + ", but MPI knows of " + std::to_string(size) +
                     ": start bert by the mpirun of the MPI that it was built with");
  }
  if (options.ranks_given && options.ranks != size) {
    throw InputError("--ranks " + std::to_string(options.ranks) + ": over MPI each process is a " +
                     "rank, and there are " + std::to_string(size) +
                     "; leave --ranks out, or give mpirun -n " + std::to_string(options.ranks));
  }
  options.ranks = size;
}

struct Plan {
  const bert::Combination* combination;
  Data data;
};

/// Throws `InputError` for all that can be seen before training.
Plan plan(bert::Options& options, const bert::Processes& processes) {
  settle_ranks(options, processes);
  Plan plan{&bert::choose(options), load(options)};
  const auto available = bert::available_bytes(), address_space = bert::address_space_left();
  if (options.communicator == bert::Ranks::mpi) {
    const std::vector<int> self{processes.rank()};
    bert::require_memory(options, *plan.combination, available, {}, processes.ranks_of_host());
    bert::require_memory(options, *plan.combination, {}, address_space, self);
  } else {
    bert::require_memory(options, *plan.combination, available, address_space);
  }
  prepare_checkpoints(options, processes.rank() == 0);
  if (processes.rank() == 0) {
    require_writable("--json", options.json);
    require_writable("--trace", options.trace);
  }
  if (!options.json.empty() && options.json == options.trace) {
    throw bert::InputError("--json and --trace name the same file; name two");
  }
  return plan;
}

/// Has `act` done, and returns what it refused.
template <class Act>
std::string refusal_of(Act&& act) {
  try {
    act();
  } catch (const bert::InputError& error) {
    return error.what();
  } catch (const zero::UsageError& error) {  // options that make no sense, say a negative rate
    return error.what();
  } catch (const zero::CheckpointError& error) {
    return error.what();
  }
  return "";
}

/// A run and its spans, by rank, where they are asked for.
struct Run {
  bert::RunReport report;
  std::vector<bert::Recorder> recorders, traffic{};
};

Run train(const bert::Options& options, const Plan& plan, bert::Processes& processes, int stage) {
  const bool over_mpi = options.communicator == bert::Ranks::mpi;
  const bert::Trainer& trainer = plan.combination->at(stage);
  const std::string mode = bert::mode_of(options, stage);
  Run run;
  bert::Job job{&options, plan.data.source.get(), &interrupted, mode.c_str()};
  job.progress = [&](const bert::RunReport& report) { show_progress(options, report); };
  if (!options.trace.empty()) {
    // Three spans a step, and three a bucket; there are about as many as the bytes make. At stage 3
    // a unit starts a bucket, and one is gathered twice a step.
    const std::size_t bytes = plan.combination->at(0).estimate(options, 0).parameters;
    const std::size_t buckets =
        bytes / options.bucket_bytes + 2 + (stage == 3 ? options.model.layers + 3 : 0);
    const std::size_t spans =
        std::min<std::size_t>(options.steps * (3 + 3 * buckets), std::size_t{1} << 20);
    const std::size_t ranks = over_mpi ? 1 : static_cast<std::size_t>(options.ranks);
    job.recorders = &run.recorders;
    if (stage > 1) job.traffic_recorders = &run.traffic;
    for (std::vector<bert::Recorder>* of_ranks : {job.recorders, job.traffic_recorders}) {
      if (of_ranks == nullptr) continue;
      of_ranks->reserve(ranks);
      for (std::size_t rank = 0; rank < ranks; ++rank) of_ranks->emplace_back(spans);
    }
  }
  run.report =
      over_mpi ? trainer.train_over_mpi(job, processes.communicator()) : trainer.train(job);
  if (over_mpi && job.recorders != nullptr) processes.gather(run.recorders);
  if (over_mpi && job.traffic_recorders != nullptr) processes.gather(run.traffic);
  for (int rank = 0; rank < options.ranks; ++rank) {
    run.report.estimated.push_back(trainer.estimate(options, rank));
  }
  return run;
}

void write_trace(const std::filesystem::path& path, const std::vector<Run>& runs) {
  std::vector<bert::Track> tracks;
  for (const Run& run : runs) {
    for (std::size_t r = 0; r < run.recorders.size(); ++r) {
      tracks.push_back({run.report.mode, "rank " + std::to_string(r), &run.recorders[r]});
    }
    for (std::size_t r = 0; r < run.traffic.size(); ++r) {
      tracks.push_back({run.report.mode, "traffic of rank " + std::to_string(r), &run.traffic[r]});
    }
  }
  bert::write_trace(path, tracks);
}

int run(int argc, char** argv, bert::Processes& processes) {
  // So that what is wrong is said once.
  if (bert::launched_processes() > 1 && bert::Processes::compiled()) processes.begin();
  std::optional<bert::Options> parsed;
  const std::string misread = refusal_of([&] {
    parsed = bert::parse(argc, argv, processes.rank() == 0);
    if (parsed && parsed->communicator == bert::Ranks::mpi) processes.begin();
  });
  processes.connect(parsed ? parsed->timeout : bert::Options{}.timeout);
  processes.require_same(argc, argv);
  processes.agree(misread);
  if (!parsed) return 0;
  bert::Options& options = *parsed;
  const bool speaks = processes.rank() == 0;
  if (options.describe) {
    for (const bert::Head head : {bert::Head::masked_lm, bert::Head::pooler}) {
      if (speaks) std::fputs(bert::describe(options.model, head).c_str(), stdout);
    }
    return 0;
  }
  std::optional<Plan> planned;
  processes.agree(refusal_of([&] { planned = plan(options, processes); }));

  if (speaks) {
    std::fputs(bert::describe(options.model, bert::Head::masked_lm).c_str(), stdout);
    std::printf(
        "data: %s\n%d x %zu sequences of %zu tokens a step (ranks x batch); %s, %s, partition %s, "
        "bucket view %s\n\n",
        options.data.c_str(), options.ranks, options.batch, options.sequence,
        options.optimizer.c_str(), options.precision.c_str(), options.partition.c_str(),
        options.bucket_view.c_str());
  }
  if (std::signal(SIGINT, interrupt) == SIG_IGN) std::signal(SIGINT, SIG_IGN);  // as with nohup
  // What mpirun makes of Ctrl-C.
  if (options.communicator == bert::Ranks::mpi) std::signal(SIGTERM, interrupt);
  std::vector<Run> runs;
  processes.agree(refusal_of([&] {
    for (const int stage : bert::stages_of(options)) {
      runs.push_back(train(options, *planned, processes, stage));
      if (runs.back().report.interrupted) break;  // on all ranks, as they have agreed
    }
  }));
  std::vector<bert::RunReport> reports;
  for (const Run& run : runs) reports.push_back(run.report);
  const bert::RunReport& last = reports.back();
  if (speaks) {
    std::printf("\n%s", bert::tables(options, reports).c_str());
    if (!options.trace.empty()) write_trace(options.trace, runs);
    if (!options.json.empty()) bert::write_json(options, reports);
    if (last.interrupted) {
      std::printf("interrupted after %zu of %zu steps\n", options.seen + last.losses.size(),
                  options.steps);
    }
  }
  if (last.interrupted) return 130;
  return bert::same_bits(reports) ? 0 : 1;
}

/// Ends a process by what not all share. Peers may be gone, and MPI_Finalize would wait for them.
int fail(bert::Processes& processes, const char* why) {
  std::fprintf(stderr, "bert: %s\n", why);
  if (processes.begun()) {
    processes.abort(why);
    std::fflush(nullptr);
    std::_Exit(1);
  }
  return 1;
}

}  // namespace

int main(int argc, char** argv) {
#ifdef __GLIBC__
  // Large arrays go back to the system when they are freed, so that what is resident is what lives.
  mallopt(M_MMAP_THRESHOLD, 1 << 20);
#endif
  bert::Processes processes;
  try {
    const int code = run(argc, argv, processes);
    if (std::fflush(stdout) != 0 || std::ferror(stdout) != 0) {
      std::fputs("bert: the output can't be written\n", stderr);
      return 1;
    }
    return code;
  } catch (const bert::InputError& error) {  // the same on all ranks
    if (processes.rank() == 0) std::fprintf(stderr, "bert: %s\n", error.what());
    return 2;
  } catch (const std::exception& error) {
    return fail(processes, error.what());
  }
}
