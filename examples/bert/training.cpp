// SPDX-License-Identifier: Apache-2.0
#include "training.hpp"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <numeric>

#include "input_error.hpp"

namespace bert {

const StepTime& RunReport::slowest() const {
  return *std::max_element(time.begin(), time.end(), [](const StepTime& a, const StepTime& b) {
    return a.step - a.wait < b.step - b.wait;
  });
}

bool Combination::has_stages(const Options& options) const {
  const auto wanted = static_cast<std::size_t>(options.stages.back());
  return wanted < stages.size() &&
         (options.communicator != Ranks::mpi || stages[wanted].train_over_mpi != nullptr);
}

const Combination& choose(const Options& options) {
  const bool over_mpi = options.communicator == Ranks::mpi;
  const int stage = options.stages.back();
  bool known = false;
  std::string optimizers, there_are, with_stage;
  for (const Combination& c : combinations()) {
    if (&c == &combinations().front() || std::string((&c)[-1].optimizer) != c.optimizer) {
      optimizers += std::string(optimizers.empty() ? "" : ", ") + c.optimizer;
    }
    const std::string choice = std::string("\n  --precision ") + c.precision + " --partition " +
                               c.partition + " --bucket-view " + c.bucket_view;
    if (c.has_stages(options)) {
      with_stage += std::string("\n  --optimizer ") + c.optimizer + choice.substr(2);
    }
    if (c.optimizer != options.optimizer) continue;
    known = true;
    if (!c.has_stages(options)) continue;
    if (c.precision == options.precision && c.partition == options.partition &&
        c.bucket_view == options.bucket_view) {
      return c;
    }
    there_are += choice;
  }
  if (!known) {
    throw InputError("--optimizer " + options.optimizer +
                     ": there is no such optimizer; there are " + optimizers);
  }
  const std::string where = "--optimizer " + options.optimizer +
                            (over_mpi ? " --communicator mpi" : "") +
                            (stage > 1 ? " --stage " + std::to_string(stage) : "");
  if (there_are.empty()) {
    throw InputError(where + " was not compiled; " +
                     (with_stage.empty() ? "no optimizer was" : "there are" + with_stage));
  }
  throw InputError("--precision " + options.precision + " --partition " + options.partition +
                   " --bucket-view " + options.bucket_view + " was not compiled for " + where +
                   "; there are" + there_are);
}

Process this_process() {
  Process process;
  process.id = ::getpid();
  // A name that is too long is cut, and then nobody promises the 0 at its end.
  if (::gethostname(process.host.data(), process.host.size()) != 0) process.host[0] = '?';
  process.host.back() = 0;
  return process;
}

std::vector<int> stages_of(const Options& options) {
  std::vector<int> stages{0};
  if (options.mode == Mode::replicated) return stages;
  if (options.mode == Mode::sharded) stages.clear();
  stages.insert(stages.end(), options.stages.begin(), options.stages.end());
  return stages;
}

std::string mode_of(const Options& options, int stage) {
  if (stage == 0) return "replicated";
  if (stage == 1 && options.stages.size() == 1) return "sharded";
  return "stage " + std::to_string(stage);
}

std::size_t memory_needed(const Options& options, const Combination& combination, int stage,
                          std::span<const int> here) {
  std::vector<int> all(here.empty() ? static_cast<std::size_t>(options.ranks) : 0);
  std::iota(all.begin(), all.end(), 0);
  std::size_t sum = 0;
  for (const int rank : here.empty() ? std::span<const int>(all) : here) {
    const RankMemory memory = combination.at(stage).estimate(options, rank);
    // While they are moved, parameters and gradients may be there twice; activations come later.
    sum += memory.model_state() + std::max(memory.activations, memory.moved);
  }
  return sum;
}

void require_memory(const Options& options, const Combination& combination,
                    std::optional<std::uint64_t> available,
                    std::optional<std::uint64_t> address_space, std::span<const int> here) {
  const std::size_t ranks = here.empty() ? static_cast<std::size_t>(options.ranks) : here.size();
  // OpenBLAS maps 128 MiB for a thread, and where it can't, it tries for ever.
  if (address_space) {
    const std::size_t maps = (ranks + 1) * (256U << 20);
    const std::uint64_t left = *address_space > maps ? *address_space - maps : 0;
    available = std::min(available.value_or(left), left);
  }
  if (!available) return;
  for (const int stage : stages_of(options)) {
    const std::size_t needed = memory_needed(options, combination, stage, here);
    if (needed <= *available) continue;
    const RankMemory rank = combination.at(stage).estimate(options, here.empty() ? 0 : here[0]);
    const auto gb = [](std::size_t bytes) { return 1e-9 * static_cast<double>(bytes); };
    const auto fits = [&](int other) {
      return memory_needed(options, combination, other, here) <= *available;
    };
    std::string instead;
    for (int other = static_cast<int>(combination.stages.size()) - 1; other > stage; --other) {
      if (!fits(other)) break;
      instead = "--mode sharded" + (other > 1 ? " --stage " + std::to_string(other) : "") + ", ";
    }
    const std::string where = here.empty()       ? ""
                              : here.size() == 1 ? " for a process"
                                                 : " for " + std::to_string(ranks) + " on a host";
    char gradients[32] = "as much";
    if (rank.gradients != rank.parameters) {
      std::snprintf(gradients, sizeof gradients, "%.2f GB", gb(rank.gradients));
    }
    char text[640];
    std::snprintf(
        text, sizeof text,
        "%s, BERT-%s on %d ranks needs %.1f GB%s, but only %.1f GB are available: a rank "
        "keeps %.2f GB of parameters, %s of gradients, %.2f GB of optimizer state and "
        "%.2f GB of buckets, and besides %.2f GB %s; take %sa smaller --model, --batch or "
        "--seq, or fewer --ranks",
        mode_of(options, stage).c_str(), options.model.name.c_str(), options.ranks, gb(needed),
        where.c_str(), gb(static_cast<std::size_t>(*available)), gb(rank.parameters), gradients,
        gb(rank.state), gb(rank.buckets + rank.pool + rank.gathered),
        gb(std::max(rank.activations, rank.moved)),
        rank.activations > rank.moved ? "of activations" : "while parameters move into buckets",
        instead.c_str());
    throw InputError(text);
  }
}

}  // namespace bert
