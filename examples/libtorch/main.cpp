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
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string>
#include <vector>
#include <zero/error.hpp>

#ifdef __GLIBC__
#include <malloc.h>
#endif
#if EXAMPLE_MPI
#include <mpi.h>
#endif

#include "../bert/input_error.hpp"
#include "options.hpp"
#include "report.hpp"
#include "runs.hpp"

namespace {

using example::Options;

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
       "what ranks are: threads, or the processes that mpirun started");
  word("--mode", options.mode, {"replicated", "sharded", "compare"},
       "where the optimizer's state is: on every rank, spread over them, or one after the other");
  number("--ranks", options.ranks, 1, 64, "how many threads; over MPI as many as mpirun started");
  number("--stage", options.stage, 1, 2, "what is sharded: 1, optimizer state; 2, gradients too");
  number("--steps", options.steps, 0, 1e9, "how many; 0: enough to see that it learns");
  number("--batch", options.batch, 1, 1e6, "images, or pieces of text, a rank and step");
  number("--lr", options.lr, 0, 1e3, "learning rate");
  number("--seed", options.seed, 0, 1e15, "of weights and batches");
  number("--width", options.width, 32, 1e5, "of the transformer; a head has 32");
  number("--layers", options.layers, 1, 1000, "of the transformer");
  number("--context", options.context, 2, 1e5, "characters that the transformer sees");
  app.add_option("--digits", options.digits, "scikit-learn's digits.csv, unpacked")
      ->capture_default_str();
  app.add_option("--text", options.text,
                 "files to learn from; without: the licences that every Debian system has");
}

int run(const Options& options, bool speaks) {
  std::vector<example::RunReport> reports;
  if (options.communicator == "threads") {
    reports = example::train_threads(options);
  } else {
#if EXAMPLE_MPI
    // Stage 2 reduces from threads of its own.
    int provided = 0;
    MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &provided);
    reports = example::train_mpi(options);
    MPI_Finalize();
#else
    throw bert::InputError(
        "--communicator mpi: this was built without MPI; install one, configure "
        "anew and build again");
#endif
  }
  if (speaks) std::fputs(example::tables(options, reports).c_str(), stdout);
  return example::same_bits(reports) ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
#ifdef __GLIBC__
  // Large arrays go back to the system when they are freed, so that what is resident is what lives.
  mallopt(M_MMAP_THRESHOLD, 1 << 20);
#endif
  const bool speaks = launched("OMPI_COMM_WORLD_RANK", "PMI_RANK") == 0;
  Options options;
  if (launched("OMPI_COMM_WORLD_SIZE", "PMI_SIZE") > 1) options.communicator = "mpi";
  CLI::App app{"Trains a libtorch model on ranks, its optimizer replicated or sharded."};
  add_options(app, options);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return speaks ? app.exit(error) : error.get_exit_code();
  }
  try {
    return run(options, speaks);
  } catch (const bert::InputError& error) {  // the same on all ranks
    if (speaks) std::fprintf(stderr, "libtorch_train: %s\n", error.what());
    return 2;
  } catch (const std::exception& error) {
    // Peers may be gone, and MPI_Finalize would wait for them.
    std::fprintf(stderr, "libtorch_train: %s\n", error.what());
    std::fflush(nullptr);
    std::_Exit(1);
  }
}
