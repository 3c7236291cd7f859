// SPDX-License-Identifier: Apache-2.0
#include "training.hpp"

#include <algorithm>
#include <cstdio>

#include "input_error.hpp"

namespace bert {

const StepTime& RunReport::slowest() const {
  return *std::max_element(time.begin(), time.end(), [](const StepTime& a, const StepTime& b) {
    return a.total() - a.wait < b.total() - b.wait;
  });
}

std::size_t RunReport::most(std::size_t (RankMemory::*bytes)() const) const {
  std::size_t most = 0;
  for (const RankMemory& rank : memory) most = std::max(most, (rank.*bytes)());
  return most;
}

const Combination& choose(const Options& options) {
  std::string there_are;
  for (const Combination& c : combinations()) {
    if (c.optimizer == options.optimizer && c.precision == options.precision &&
        c.partition == options.partition && c.bucket_view == options.bucket_view) {
      return c;
    }
    there_are += std::string("\n  --optimizer ") + c.optimizer + " --precision " + c.precision +
                 " --partition " + c.partition + " --bucket-view " + c.bucket_view;
  }
  throw InputError("--optimizer " + options.optimizer + " --precision " + options.precision +
                   " --partition " + options.partition + " --bucket-view " + options.bucket_view +
                   " was not compiled into this program; there are" + there_are);
}

std::vector<bool> modes_of(const Options& options) {
  if (options.mode == Mode::compare) return {false, true};
  return {options.mode == Mode::sharded};
}

std::size_t memory_needed(const Options& options, const Combination& combination, bool sharded) {
  std::size_t sum = 0;
  for (int rank = 0; rank < options.ranks; ++rank) {
    const RankMemory memory = combination.estimate(options, sharded, rank);
    // While they are moved, parameters and gradients may be there twice; activations come later.
    sum +=
        memory.model_state() + std::max(memory.activations, memory.parameters + memory.gradients);
  }
  return sum;
}

void require_memory(const Options& options, const Combination& combination,
                    std::optional<std::uint64_t> available) {
  if (!available) return;
  for (const bool sharded : modes_of(options)) {
    const std::size_t needed = memory_needed(options, combination, sharded);
    if (needed <= *available) continue;
    const RankMemory rank = combination.estimate(options, sharded, 0);
    char text[512];
    std::snprintf(text, sizeof text,
                  "%s, BERT-%s on %d ranks needs %.1f GB, but only %.1f GB are available: a rank "
                  "keeps %.2f GB of parameters, as much of gradients, %.2f GB of optimizer state, "
                  "%.2f GB of buckets and %.2f GB of activations; take a smaller --model, --batch "
                  "or --seq, or fewer --ranks",
                  sharded ? "sharded" : "replicated", options.model.name.c_str(), options.ranks,
                  1e-9 * static_cast<double>(needed), 1e-9 * static_cast<double>(*available),
                  1e-9 * static_cast<double>(rank.parameters),
                  1e-9 * static_cast<double>(rank.state), 1e-9 * static_cast<double>(rank.buckets),
                  1e-9 * static_cast<double>(rank.activations));
    throw InputError(text);
  }
}

}  // namespace bert
