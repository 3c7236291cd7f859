// SPDX-License-Identifier: Apache-2.0
// A libtorch model trained with its optimizer replicated on every rank, then sharded over them.
// Losses and parameters agree to the last bit; memory and time are printed side by side.
//
//     libtorch_train                                    a convolutional net, two threads
//     libtorch_train --model transformer                a transformer that learns to spell
//     mpirun -n 2 --bind-to none libtorch_train         ranks that are processes
//     libtorch_train --help
#include <CLI/App.hpp>
#include <CLI/Config.hpp>
#include <CLI/Formatter.hpp>
#include <algorithm>
#include <cstdarg>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <numeric>
#include <string>
#include <utility>
#include <vector>
#include <zero/error.hpp>

#include "../bert/input_error.hpp"
#include "../bert/random.hpp"
#include "train.hpp"

namespace {

using example::Options;
using example::RankReport;
using example::RunReport;

/// Of all that has to be the same in every run.
std::uint64_t hash_of(const RunReport& report) {
  std::uint64_t hash = report.ranks.front().hash;
  const auto add = [&](double number) {
    std::uint64_t bits = 0;
    std::memcpy(&bits, &number, sizeof bits);
    hash = bert::mix(hash, bits);
  };
  for (const double loss : report.losses) add(loss);
  add(report.accuracy);
  return hash;
}

[[gnu::format(printf, 2, 3)]] void print(std::string& out, const char* format, ...) {
  char line[200];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(line, sizeof line, format, arguments);
  va_end(arguments);
  out += line;
}

/// A row of numbers, a column a run.
template <class Get>
void row(std::string& out, const std::vector<RunReport>& reports, std::size_t rank,
         const char* name, int digits, Get get) {
  std::vector<double> numbers;
  for (const RunReport& report : reports) numbers.push_back(get(report.ranks[rank]));
  if (std::all_of(numbers.begin(), numbers.end(), [](double x) { return x == 0; })) return;
  print(out, "%4zu  %-34s", rank, name);
  for (const double number : numbers) print(out, "%14.*f", digits, number);
  if (numbers.size() == 2 && numbers[0] != 0) print(out, "%8.2f", numbers[1] / numbers[0]);
  out += '\n';
}

/// Whether all runs have the same losses, accuracy and parameters, bit for bit, on all ranks.
bool same_bits(const std::vector<RunReport>& reports) {
  return std::all_of(reports.begin(), reports.end(), [&](const RunReport& report) {
    return hash_of(report) == hash_of(reports.front()) &&
           std::all_of(report.ranks.begin(), report.ranks.end(), [&](const RankReport& rank) {
             return rank.hash == reports.front().ranks.front().hash;
           });
  });
}

/// Tables of memory and time, and what came of it.
std::string tables(const Options& options, const std::vector<RunReport>& reports) {
  std::string out;
  print(out, "\nrank  %-34s", "");
  for (const RunReport& report : reports) print(out, "%14s", report.mode.c_str());
  out += reports.size() == 2 ? "   ratio\n" : "\n";
  for (std::size_t r = 0; r < reports.front().ranks.size(); ++r) {
    const auto bytes = [&](const char* name, auto get) {
      row(out, reports, r, name, 0,
          [&](const RankReport& rank) { return static_cast<double>(get(rank)); });
    };
    bytes("parameters, bytes", [](auto& rank) { return rank.memory.values; });
    bytes("gradients, as torch made them", [](auto& rank) { return rank.gradients; });
    bytes("  not yet reduced, at most", [](auto& rank) { return rank.memory.pooled_peak; });
    bytes("sums of gradients", [](auto& rank) { return rank.memory.gradients; });
    bytes("optimizer state", [](auto& rank) { return rank.memory.state; });
    bytes("buckets on their way", [](auto& rank) { return rank.memory.staging; });
    if (options.communicator == "mpi") {
      bytes("growth of the process", [](auto& rank) { return rank.grown; });
    }
    row(out, reports, r, "a step, ms", 2, [](auto& rank) { return rank.step_ms; });
    row(out, reports, r, "  reduce + update + gather", 2,
        [](auto& rank) { return rank.update_ms; });
  }
  const RunReport& first = reports.front();
  const auto last = static_cast<std::ptrdiff_t>(std::min<std::size_t>(10, first.losses.size()));
  const double loss = std::accumulate(first.losses.end() - last, first.losses.end(), 0.0) /
                      static_cast<double>(last);
  print(out, "\nloss from %.4f to %.4f (mean of the last ten), accuracy on unseen data %.1f %%\n",
        first.losses.front(), loss, 100 * first.accuracy);
  if (!same_bits(reports)) {
    out += "losses or parameters DIFFER between runs or ranks\n";
  } else if (reports.size() > 1) {
    out += "losses and parameters: the same, bit for bit\n";
  }
  print(out, "hash of losses and parameters: %016llx\n",
        static_cast<unsigned long long>(hash_of(first)));
  return out;
}

/// What mpirun says, before MPI has begun: of Open MPI; of MPICH, its kin, and Slurm's srun.
int launched(const char* open_mpi, const char* others) {
  for (const char* name : {open_mpi, others}) {
    if (const char* text = std::getenv(name)) return std::atoi(text);
  }
  return 0;
}

void add_options(CLI::App& app, Options& options) {
  const auto number = [&](const char* name, auto& value, double least, double most,
                          const char* text) {
    app.add_option(name, value, text)->check(CLI::Range(least, most))->capture_default_str();
  };
  const auto word = [&](const char* name, std::string& value, std::vector<std::string> words,
                        const char* text) {
    app.add_option(name, value, text)
        ->check(CLI::IsMember(std::move(words)))
        ->capture_default_str();
  };
  word("--model", options.model, {"conv", "transformer"}, "what to train");
  word("--communicator", options.communicator, {"threads", "mpi"},
       "what ranks are: threads, or the processes that mpirun started (which it then is)");
  word("--mode", options.mode, {"replicated", "sharded", "compare"},
       "where the optimizer's state is: on every rank, spread over them, or one after the other");
  word("--optimizer", options.optimizer, {"adamw", "torch-adamw"},
       "zero's AdamW, or torch::optim::AdamW, which steps whole tensors");
  number("--ranks", options.ranks, 1, 64, "how many threads; over MPI as many as mpirun started");
  number("--stage", options.stage, 1, 2, "what is sharded: 1, optimizer state; 2, gradients too");
  number("--steps", options.steps, 0, 1e9, "how many; 0: enough to see that it learns");
  number("--batch", options.batch, 1, 1e6, "images, or pieces of text, a rank and step");
  number("--lr", options.lr, 0, 1e3, "learning rate");
  number("--seed", options.seed, 0, 1e15, "of weights and batches");
  number("--width", options.width, 32, 1e5,
         "of the transformer: a multiple of 32, which is a head's");
  number("--layers", options.layers, 1, 1000, "of the transformer");
  number("--context", options.context, 2, 1e5, "characters that the transformer sees");
  app.add_option("--digits", options.digits, "scikit-learn's digits.csv, unpacked")
      ->capture_default_str();
  app.add_option("--text", options.text,
                 "files to learn from; without: the licences that every Debian system has");
}

int run(const Options& options, bool speaks) {
  const std::vector<RunReport> reports = options.communicator == "threads"
                                             ? example::train_on_threads(options)
                                             : example::train_over_mpi(options);
  if (speaks) std::fputs(tables(options, reports).c_str(), stdout);
  return same_bits(reports) ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  const bool speaks = launched("OMPI_COMM_WORLD_RANK", "PMI_RANK") == 0;
  Options options;
  const int processes = launched("OMPI_COMM_WORLD_SIZE", "PMI_SIZE");
  if (processes > 1) options.communicator = "mpi";
  CLI::App app{"Trains a libtorch model on ranks, its optimizer replicated or sharded."};
  add_options(app, options);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return speaks ? app.exit(error) : error.get_exit_code();
  }
  try {
    if (processes > 0 && options.communicator == "mpi" && app.count("--ranks") > 0 &&
        options.ranks != processes) {
      throw bert::InputError("--ranks " + std::to_string(options.ranks) + ": mpirun started " +
                             std::to_string(processes) + " processes, each of which is a rank");
    }
    if (options.optimizer == "torch-adamw" && options.stage != 1) {
      throw bert::InputError("--optimizer torch-adamw was compiled for --stage 1 alone");
    }
    if (processes == 0 && options.communicator == "mpi") {
      std::fprintf(stderr, "libtorch_train: one process is one rank; for more: mpirun -n 2 %s …\n",
                   argv[0]);
    }
    return run(options, speaks);
  } catch (const bert::InputError& error) {
    std::fprintf(stderr, "libtorch_train: %s\n", error.what());
    return 2;
  } catch (const std::exception& error) {
    // Peers may be gone, and MPI_Finalize would wait for them.
    std::fprintf(stderr, "libtorch_train: %s\n", error.what());
    std::fflush(nullptr);
    std::_Exit(1);
  }
}
