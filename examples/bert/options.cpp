// SPDX-License-Identifier: Apache-2.0
#include "options.hpp"

#include <CLI/CLI.hpp>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>

#include "input_error.hpp"

namespace bert {

namespace {

void require(bool holds, const std::string& sentence) {
  if (!holds) throw InputError(sentence);
}

}  // namespace

std::optional<Options> parse(int argc, const char* const* argv, bool speaks) {
  Options options;
  std::string model = "mini", mode = "compare", communicator = "in-process", stage = "1";
  double bucket_mib = static_cast<double>(options.bucket_bytes) / (1 << 20);
  // Signed, so that what is below 0 is seen.
  std::int64_t ranks = options.ranks, batch = static_cast<std::int64_t>(options.batch),
               sequence = static_cast<std::int64_t>(options.sequence),
               steps = static_cast<std::int64_t>(options.steps),
               warmup = static_cast<std::int64_t>(options.warmup),
               vocabulary = static_cast<std::int64_t>(options.vocabulary),
               seed = static_cast<std::int64_t>(options.seed), until = 0, save_every = 0,
               timeout = std::int64_t{options.timeout.count()};
  double clip = 0, weight_decay = 0;

  CLI::App app{
      "Trains BERT on ranks that are threads of this process, or processes under mpirun, with its "
      "optimizer replicated or sharded, and shows memory and time side by side."};
  app.add_option("--model", model, "tiny, mini, base or large")->capture_default_str();
  app.add_option("--communicator", communicator,
                 "in-process: ranks are threads; mpi: they are the processes that mpirun started")
      ->capture_default_str();
  CLI::Option* ranks_given =
      app.add_option("--ranks", ranks, "how many; over MPI as many as mpirun started")
          ->capture_default_str();
  app.add_option("--timeout", timeout, "seconds that a rank waits for another")
      ->capture_default_str();
  app.add_option("--mode", mode, "replicated, sharded, or compare: one after the other")
      ->capture_default_str();
  CLI::Option* stage_given =
      app.add_option("--stage", stage,
                     "what is sharded: 1, the optimizer's state; 2, gradients too; 3, parameters "
                     "too; all: one after the other")
          ->capture_default_str();
  app.add_option("--optimizer", options.optimizer, "adam, adamw, sgd, lion or lamb")
      ->capture_default_str();
  app.add_option("--partition", options.partition, "contiguous or balanced");
  app.add_option("--bucket-view", options.bucket_view, "none, param or param-and-grad")
      ->capture_default_str();
  app.add_option("--bucket-mib", bucket_mib, "size of a bucket in MiB")->capture_default_str();
  app.add_option("--precision", options.precision,
                 "of parameters and gradients: fp32, bf16 or fp16")
      ->capture_default_str();
  app.add_option("--batch", batch, "sequences a rank and step")->capture_default_str();
  app.add_option("--seq", sequence, "tokens in a sequence")->capture_default_str();
  app.add_option("--steps", steps, "how many")->capture_default_str();
  app.add_option("--lr", options.lr, "learning rate at the end of the warm-up; it then falls to 0")
      ->capture_default_str();
  app.add_option("--warmup", warmup, "steps over which the learning rate rises")
      ->capture_default_str();
  CLI::Option* clips = app.add_option("--clip", clip, "the largest gradient norm");
  CLI::Option* decays =
      app.add_option("--weight-decay", weight_decay, "of matrices; without: the optimizer's own");
  app.add_option("--dropout", options.dropout, "share of activations dropped")
      ->capture_default_str();
  CLI::Option* text = app.add_option("--text", options.text,
                                     "files to train on; without: the licence texts that every "
                                     "Debian system has");
  app.add_flag("--synthetic", options.synthetic, "train on random words instead")->excludes(text);
  app.add_option("--vocabulary", vocabulary, "how many tokens; without: the text's");
  app.add_option("--seed", seed, "of weights, batches and dropout")->capture_default_str();
  app.add_option("--save", options.save, "folder for a checkpoint, at the end or when interrupted");
  app.add_option("--save-every", save_every, "steps between checkpoints before that; 0: none")
      ->capture_default_str();
  app.add_option("--resume", options.resume,
                 "go on from this checkpoint, on as many ranks and at whatever stage you like");
  app.add_option("--until", until,
                 "end after this step, though the learning rate falls over --steps; 0: don't")
      ->capture_default_str();
  app.add_option("--json", options.json, "write the results there");
  app.add_option("--trace", options.trace, "write a trace there, for ui.perfetto.dev");
  app.add_flag("--describe", options.describe, "only print what the model is made of");
  app.footer(
      "Not every optimizer was compiled for every combination of --precision, --partition, "
      "--bucket-view and --stage; what there is, the message says that refuses another.");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() != 0) throw InputError(error.what());
    if (speaks) app.exit(error);
    return std::nullopt;
  }

  options.model = config_of(model);
  if (mode == "replicated") {
    options.mode = Mode::replicated;
  } else if (mode == "sharded") {
    options.mode = Mode::sharded;
  } else {
    require(mode == "compare",
            "--mode " + mode + ": there is no such mode; there are replicated, sharded, compare");
  }
  if (stage == "all") {
    options.stages = {1, 2, 3};
  } else {
    require(
        stage == "1" || stage == "2" || stage == "3",
        "--stage " + stage + ": there is no such stage; there are 1, 2, 3, and all of them: all");
    options.stages = {stage.front() - '0'};
  }
  require(options.mode != Mode::replicated || stage_given->count() == 0,
          "--stage " + stage + ": --mode replicated shards nothing; take sharded or compare");
  options.communicator = communicator == "mpi" ? Ranks::mpi : Ranks::in_process;
  require(communicator == "mpi" || communicator == "in-process",
          "--communicator " + communicator +
              ": there is no such communicator; there are in-process, mpi");
  const auto within = [](const char* name, std::int64_t number, std::int64_t least,
                         std::int64_t most) {
    require(number >= least && number <= most, std::string(name) + " " + std::to_string(number) +
                                                   ": give a number from " + std::to_string(least) +
                                                   " to " + std::to_string(most));
  };
  within("--ranks", ranks, 1, 1024);
  within("--timeout", timeout, 1, 1 << 30);
  within("--batch", batch, 1, 1 << 20);
  within("--steps", steps, 1, 1 << 30);
  within("--until", until, 0, 1 << 30);
  within("--save-every", save_every, 0, 1 << 30);
  require(save_every == 0 || !options.save.empty(), "--save-every: name a folder with --save, too");
  require(options.save.empty() || options.mode == Mode::replicated ||
              (options.mode == Mode::sharded && options.stages.size() == 1),
          "--save " + options.save.string() +
              ": this is to be one run's; give --mode sharded or replicated, and one --stage");
  within("--warmup", warmup, 0, 1 << 30);
  within("--vocabulary", vocabulary, 0, 1 << 30);
  within("--seed", seed, 0, std::numeric_limits<std::int64_t>::max());
  require(!(clips->count() > 0) || clip > 0,
          "--clip " + std::to_string(clip) + ": give a norm above 0");
  require(std::isfinite(options.lr) && options.lr >= 0,
          "--lr " + std::to_string(options.lr) + ": give a finite number that is not negative");
  require(sequence >= 3 && sequence <= static_cast<std::int64_t>(options.model.positions),
          "--seq " + std::to_string(sequence) + ": a sequence has 3 to " +
              std::to_string(options.model.positions) + " tokens in this model");
  require(bucket_mib >= 0.001 && bucket_mib <= 1 << 20,
          "--bucket-mib " + std::to_string(bucket_mib) + ": give a size from 0.001 to 1048576");
  require(options.dropout >= 0 && options.dropout < 1,
          "--dropout " + std::to_string(options.dropout) + ": give a share from 0 to below 1");
  options.ranks = static_cast<int>(ranks);
  options.ranks_given = ranks_given->count() > 0;
  options.timeout = std::chrono::seconds(timeout);
  options.batch = static_cast<std::size_t>(batch);
  options.sequence = static_cast<std::size_t>(sequence);
  options.steps = static_cast<std::size_t>(steps);
  options.until = static_cast<std::size_t>(until);
  options.save_every = static_cast<std::size_t>(save_every);
  options.seed = static_cast<std::uint64_t>(seed);
  options.warmup = static_cast<std::size_t>(warmup);
  options.vocabulary = static_cast<std::size_t>(vocabulary);
  options.bucket_bytes = static_cast<std::size_t>(bucket_mib * (1 << 20));
  if (clips->count() > 0) options.clip = clip;
  if (decays->count() > 0) options.weight_decay = weight_decay;
  if (options.partition.empty()) {
    options.partition = options.optimizer == "lamb" ? "balanced" : "contiguous";
  }
  return options;
}

}  // namespace bert
