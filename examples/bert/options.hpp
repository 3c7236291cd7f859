// SPDX-License-Identifier: Apache-2.0
// What the command line says.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "batch.hpp"
#include "config.hpp"
#include "model.hpp"

namespace bert {

enum class Mode { replicated, sharded, compare };

/// What ranks are: threads of this process, or processes that a launcher such as mpirun started.
enum class Ranks { in_process, mpi };

/// Its defaults are the command line's.
struct Options {
  Config model;  ///< with the vocabulary that is trained on
  Ranks communicator = Ranks::in_process;
  int ranks = 2;
  bool ranks_given = false;
  /// How long a rank waits for another: where they take turns on few processors, for a whole step.
  std::chrono::seconds timeout{3600};
  Mode mode = Mode::compare;
  std::vector<int> stages{1};  ///< those that are trained where the mode shards
  std::string optimizer = "adam";
  std::string partition;  ///< empty: what the optimizer works best with
  std::string bucket_view = "param";
  std::string precision = "fp32";
  std::size_t bucket_bytes = 25U << 20;
  std::size_t batch = 8;  ///< sequences a rank and step
  std::size_t sequence = 128;
  std::size_t steps = 60;  ///< the schedule's, those before `resume` among them
  std::size_t until = 0;   ///< end after this one; 0: after the last
  std::filesystem::path save, resume;
  std::size_t save_every = 0;  ///< steps; 0: only at the end
  std::size_t seen = 0;        ///< steps that `resume` has gone already
  double lr = 1e-3;
  std::size_t warmup = 6;
  std::optional<double> clip;
  std::optional<double> weight_decay;  ///< none: the optimizer's own
  double dropout = 0;
  bool synthetic = false;
  std::vector<std::filesystem::path> text;
  std::size_t vocabulary = 0;  ///< wanted; 0: all words, as far as the model goes
  std::string data;            ///< what was read, in words
  std::uint64_t seed = 1;
  std::filesystem::path json, trace;
  bool describe = false;

  /// The last step of this run.
  [[nodiscard]] std::size_t end() const { return until == 0 ? steps : std::min(until, steps); }
  [[nodiscard]] BatchSize batch_size() const { return {batch, sequence, predictions_of(sequence)}; }
};

/// Nothing where only help was asked for, and has been printed where this process `speaks`. Throws
/// `InputError`. Of the model, the vocabulary is not yet that of the text.
[[nodiscard]] std::optional<Options> parse(int argc, const char* const* argv, bool speaks = true);

}  // namespace bert
