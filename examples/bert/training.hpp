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
  std::size_t state = 0;     ///< slots and master copies
  std::size_t buckets = 0;   ///< what views and traffic add: padding, sums, buckets on their way
  std::size_t pool = 0;      ///< of gradients that are not reduced yet, at its peak
  std::size_t gathered = 0;  ///< units that are used or soon will be, at their peak
  std::size_t activations = 0;
  /// Of parameters and gradients, what is there twice while an optimizer is made and moves it.
  std::size_t moved = 0;

  /// What is there before the first step.
  [[nodiscard]] std::size_t built() const { return parameters + gradients + state + buckets; }
  /// What training needs whatever the batch.
  [[nodiscard]] std::size_t model_state() const { return built() + pool + gathered; }
  [[nodiscard]] std::size_t total() const { return model_state() + activations; }
};

/// Seconds of one step on one rank.
struct StepTime {
  double forward = 0, backward = 0;
  double products = 0;                        ///< of both, spent in matrix products
  double wait = 0;                            ///< for slower ranks, and for agreeing with them
  double reduce = 0, update = 0, gather = 0;  ///< what the optimizer's step takes, one by one
  double traffic = 0;  ///< in which gradients or values were on their way, some while it computed
  double exposed = 0;  ///< of it, in which the rank waited for them, in forward and backward too
  double step = 0;     ///< all of it

  [[nodiscard]] double optimizer() const { return reduce + update + gather; }
  /// The share of traffic that computation went on in.
  [[nodiscard]] double hidden() const {
    return traffic > exposed ? (traffic - exposed) / traffic : traffic > 0 ? 0 : 1;
  }
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
  std::string mode;  ///< "replicated", "sharded" or, where there are several, "stage 2"
  int stage = 0;     ///< 0: replicated
  std::vector<RankMemory> memory{};     ///< by rank
  std::vector<RankMemory> estimated{};  ///< by rank, before the run
  std::vector<StepTime> time{};         ///< by rank; of each number the median over the steps
  std::vector<std::uint64_t> sent{};    ///< by rank: bytes a step, where the optimizer counts them
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
  const char* mode = "";  ///< what the report is to call it
  /// One a rank of this process, or none; and as many of what its communication threads do.
  std::vector<Recorder>* recorders = nullptr;
  std::vector<Recorder>* traffic_recorders = nullptr;
  /// Called on rank 0 after each step with what there is so far: losses, norms and seconds.
  std::function<void(const RunReport&)> progress{};
};

/// What a checkpoint's note says: the steps gone, skipped ones among them.
inline constexpr const char* steps_note = "bert steps";

/// One choice of policies and one stage, instantiated.
struct Trainer {
  /// How parameters of these shapes would be kept; activations too.
  RankMemory (*estimate)(const Options& options, int rank);
  RunReport (*train)(const Job& job);
  /// The same with this process as a rank; the report is the same on all. Null where it was not
  /// compiled over MPI.
  RunReport (*train_over_mpi)(const Job& job, zero::MpiCommunicator& comm) = nullptr;
};

/// One choice of policies, of which at least stages 0 and 1 were instantiated.
struct Combination {
  const char *optimizer, *precision, *partition, *bucket_view;
  std::vector<Trainer> stages;  ///< by number; 0: replicated

  [[nodiscard]] const Trainer& at(int stage) const {
    return stages.at(static_cast<std::size_t>(stage));
  }
  /// Whether it can do all that the options ask for.
  [[nodiscard]] bool has_stages(const Options& options) const;
};

// One translation unit an optimizer.
[[nodiscard]] std::vector<Combination> adam_combinations();
[[nodiscard]] std::vector<Combination> adamw_combinations();
[[nodiscard]] std::vector<Combination> sgd_combinations();
[[nodiscard]] std::vector<Combination> lion_combinations();
[[nodiscard]] std::vector<Combination> lamb_combinations();
/// Stages 2 and 3 of Adam, apart since they take as long again to compile.
[[nodiscard]] std::vector<Trainer> adam_stages_fp32();
[[nodiscard]] std::vector<Trainer> adam_stages_bf16();

[[nodiscard]] const std::vector<Combination>& combinations();
/// Throws `InputError` that lists what there is.
[[nodiscard]] const Combination& choose(const Options& options);
/// Bytes that ranks need at most at one time; with what threads, BLAS and bookkeeping take.
/// @param here those that count; empty: all
[[nodiscard]] std::size_t memory_needed(const Options& options, const Combination& combination,
                                        int stage, std::span<const int> here = {});
/// Throws `InputError` with the estimate where a mode needs more than is available.
/// @param address_space what a limit on it leaves, where there is one
/// @param here the ranks that share what is available; empty: all
void require_memory(const Options& options, const Combination& combination,
                    std::optional<std::uint64_t> available,
                    std::optional<std::uint64_t> address_space = std::nullopt,
                    std::span<const int> here = {});
/// This process by name and id.
[[nodiscard]] Process this_process();
/// The stages that the options ask for, in the order in which they run; 0: replicated.
[[nodiscard]] std::vector<int> stages_of(const Options& options);
/// What a run of a stage is called.
[[nodiscard]] std::string mode_of(const Options& options, int stage);

}  // namespace bert
