// SPDX-License-Identifier: Apache-2.0
// A training run: what goes in, what comes out, and the combinations of policies that there are.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "batch.hpp"
#include "options.hpp"
#include "trace.hpp"

namespace zero {
class MpiCommunicator;
}  // namespace zero

namespace bert {

/// Bytes of one rank, from accounting.
struct RankMemory {
  std::size_t parameters = 0;
  std::size_t gradients = 0;
  std::size_t state = 0;    ///< slots and master copies
  std::size_t buckets = 0;  ///< what views and traffic add: padding, sums, buckets on their way
  std::size_t activations = 0;
  /// Of parameters and gradients, what is there twice while an optimizer is made and moves it.
  std::size_t moved = 0;

  /// What training keeps whatever the batch.
  [[nodiscard]] std::size_t model_state() const { return parameters + gradients + state + buckets; }
  [[nodiscard]] std::size_t total() const { return model_state() + activations; }
};

/// Seconds of one step on one rank.
struct StepTime {
  double forward = 0, backward = 0;
  double products = 0;  ///< of both, spent in matrix products
  double wait = 0;      ///< for slower ranks, and for agreeing with them
  double reduce = 0, update = 0, gather = 0;
  double step = 0;  ///< all of it

  [[nodiscard]] double optimizer() const { return reduce + update + gather; }
};

/// Resident memory of a whole process, where the system tells: of all ranks that are its threads.
struct Resident {
  std::optional<std::uint64_t> before;  ///< before the run
  std::optional<std::uint64_t> built;   ///< models and optimizers are there, activations not
  std::optional<std::uint64_t> after;   ///< at its end, before anything is freed
  std::optional<std::uint64_t> peak;
};

/// A process that ranks are in, or that is one.
struct Process {
  std::array<char, 64> host{};  ///< its name, ended by a 0
  std::int64_t id = 0;
  Resident resident{};
};

struct RunReport {
  std::string mode;
  std::vector<RankMemory> memory{};     ///< by rank
  std::vector<RankMemory> estimated{};  ///< by rank, before the run
  std::vector<StepTime> time{};         ///< by rank; of each number the median over the steps
  std::vector<float> losses{};          ///< means over ranks
  std::vector<double> norms{};          ///< of gradients, where they are clipped
  std::size_t skipped = 0;              ///< steps
  std::uint64_t hash = 0;               ///< of all parameters, which are the same on all ranks
  bool interrupted = false;
  double seconds = 0;  ///< of all steps
  /// The one of all ranks, or by rank, where each is one.
  std::vector<Process> processes{};

  /// Of the rank that has to be waited for.
  [[nodiscard]] const StepTime& slowest() const;
};

/// What a run needs besides its policies.
struct Job {
  const Options* options;
  const BatchSource* source;
  const std::atomic<bool>* interrupted;
  /// One a rank of this process, or none.
  std::vector<Recorder>* recorders = nullptr;
  /// Called on rank 0 after each step with what there is so far: losses, norms and seconds.
  std::function<void(const RunReport&)> progress{};
};

/// One choice of policies that was instantiated.
struct Combination {
  const char *optimizer, *precision, *partition, *bucket_view;
  /// How parameters of these shapes would be kept; activations too.
  RankMemory (*estimate)(const Options& options, bool sharded, int rank);
  RunReport (*train)(const Job& job, bool sharded);
  /// The same with this process as a rank; the report is the same on all. Null where it was not
  /// compiled over MPI.
  RunReport (*train_over_mpi)(const Job& job, bool sharded, zero::MpiCommunicator& comm);
};

// One translation unit an optimizer.
[[nodiscard]] std::vector<Combination> adam_combinations();
[[nodiscard]] std::vector<Combination> adamw_combinations();
[[nodiscard]] std::vector<Combination> sgd_combinations();
[[nodiscard]] std::vector<Combination> lion_combinations();
[[nodiscard]] std::vector<Combination> lamb_combinations();

[[nodiscard]] const std::vector<Combination>& combinations();
/// Throws `InputError` that lists what there is.
[[nodiscard]] const Combination& choose(const Options& options);
/// Bytes that ranks need at most at one time; with what threads, BLAS and bookkeeping take.
/// @param here those that count; empty: all
[[nodiscard]] std::size_t memory_needed(const Options& options, const Combination& combination,
                                        bool sharded, std::span<const int> here = {});
/// Throws `InputError` with the estimate where a mode needs more than is available.
/// @param address_space what a limit on it leaves, where there is one
/// @param here the ranks that share what is available; empty: all
void require_memory(const Options& options, const Combination& combination,
                    std::optional<std::uint64_t> available,
                    std::optional<std::uint64_t> address_space = std::nullopt,
                    std::span<const int> here = {});
/// This process by name and id.
[[nodiscard]] Process this_process();
/// The modes that the options ask for, in the order in which they run: whether each is sharded.
[[nodiscard]] std::vector<bool> modes_of(const Options& options);
}  // namespace bert
