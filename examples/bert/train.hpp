// SPDX-License-Identifier: Apache-2.0
// The training loop, generic in optimizer and policies. Included by the translation unit of each
// optimizer.
#pragma once

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>
#include <zero/checkpoint.hpp>
#include <zero/zero.hpp>

#ifdef __GLIBC__
#include <malloc.h>
#endif
#if BERT_MPI
#include <zero/comm/mpi.hpp>
#endif

#include "keeper.hpp"
#include "kernels.hpp"
#include "model.hpp"
#include "process_memory.hpp"
#include "step_clock.hpp"
#include "store.hpp"
#include "training.hpp"

namespace bert {

/// Sets what dropout draws from apart from what weights and batches do.
inline constexpr std::uint64_t dropout_stream = 0x64726f70;

/// Rises to 1 over the warm-up, then falls to 0: what BERT was trained with.
inline double schedule(const Options& options, std::size_t step) {
  const auto part = [](std::size_t a, std::size_t b) {
    return static_cast<double>(a) / static_cast<double>(b);
  };
  if (step < options.warmup) return part(step + 1, options.warmup + 1);
  return part(options.steps - std::min(step, options.steps - 1),
              options.steps - std::min(options.warmup, options.steps - 1));
}

/// Of all values, in order, whoever keeps them.
template <class T>
std::uint64_t hash_of(const std::vector<Tensor<T>>& tensors, Keeper<T>& keeper) {
  std::uint64_t hash = 0;
  for (std::size_t t = 0; t < tensors.size(); ++t) {
    const Tensor<T>& tensor = tensors[t];
    const int unit = tensor.shape.unit;
    if (t == 0 || tensors[t - 1].shape.unit != unit) keeper.acquire(unit);
    const auto* bytes = reinterpret_cast<const unsigned char*>(tensor.values.get());
    const std::size_t size = tensor.size * sizeof(T);
    for (std::size_t i = 0; i < size; i += sizeof(std::uint64_t)) {
      std::uint64_t word = 0;
      std::memcpy(&word, bytes + i, std::min(sizeof word, size - i));
      hash = mix(hash, word);
    }
    if (t + 1 == tensors.size() || tensors[t + 1].shape.unit != unit) keeper.release(unit);
  }
  return hash;
}

/// The options of the groups that `Parameter::group` names.
template <class Opt>
zero::Groups<Opt> groups_of(const Options& options) {
  Opt decaying{.lr = options.lr};
  if (options.weight_decay) decaying.weight_decay = *options.weight_decay;
  if constexpr (requires { decaying.momentum; }) decaying.momentum = 0.9;
  Opt other = decaying;
  other.weight_decay = 0;
  return zero::Groups<Opt>{decaying, other};
}

/// Of a rank's shapes, as zero asks for them.
struct Shapes {
  std::vector<zero::ParamShape> shapes{};
  std::size_t elements = 0;

  Shapes(const Config& config, bool in_units) {
    for (const Shape& shape : shapes_of(config)) {
      shapes.push_back({.shape = shape.extents,
                        .name = shape.name,
                        .attributes = attributes_of(shape, in_units),
                        .group = group_of(shape)});
      elements += shape.elements();
    }
  }
};

/// What a rank keeps, of which the optimizer's report tells a part.
/// @param value_bytes of all parameters, of which the optimizer may have moved some or all
template <class View, class Stage>
RankMemory memory_of(std::size_t value_bytes, const zero::MemoryReport& report,
                     std::size_t activations) {
  const auto moved = [value_bytes](zero::Residency residency) {
    return residency == zero::Residency::arena ? value_bytes : 0;
  };
  RankMemory memory;
  memory.state = report.state + report.master;
  memory.pool = report.pooled_peak;
  memory.gathered = report.gathered_peak;
  memory.activations = activations;
  std::size_t others = memory.state + report.pooled + report.gathered;
  if constexpr (Stage::shards_values) {
    memory.parameters = report.values;
    others += report.values;
  } else {
    memory.parameters = value_bytes;
    memory.moved = moved(View::values);
  }
  if constexpr (Stage::shards_gradients) {
    memory.gradients = report.gradients;
    others += report.gradients;
  } else {
    memory.gradients = value_bytes;
    memory.moved += moved(View::gradients);
  }
  memory.buckets = report.total() - others - memory.moved;
  return memory;
}

/// Policies as the command line names them.
template <class T>
inline constexpr const char* precision_name = "fp32";
template <>
inline constexpr const char* precision_name<zero::bfloat16> = "bf16";
template <>
inline constexpr const char* precision_name<zero::float16> = "fp16";
template <class Partition>
inline constexpr const char* partition_name =
    std::is_same_v<Partition, zero::BalancedPartition> ? "balanced" : "contiguous";
template <class View>
inline constexpr const char* view_name =
    View::gradients == zero::Residency::arena ? "param-and-grad"
    : View::values == zero::Residency::arena  ? "param"
                                              : "none";

/// What of this process is resident, but for small blocks that were freed.
inline std::optional<std::uint64_t> trimmed_bytes() {
#ifdef __GLIBC__
  malloc_trim(0);
#endif
  return resident_bytes();
}

/// What is resident before a run; the peak counts from here.
inline Process begin_of_process() {
  Process process = this_process();
  process.resident.before = trimmed_bytes();
  // Where the system won't, the peak is not that of this run.
  process.resident.peak = reset_peak() ? process.resident.before : std::nullopt;
  return process;
}

/// An optimizer as the keeper of a model's gradients: they are written where it says, and
/// communicated as soon as they are complete.
template <class Optimizer, class T>
class OptimizerKeeper final : public Keeper<T> {
 public:
  OptimizerKeeper(Optimizer& optimizer, std::size_t tensors)
      : optimizer_(optimizer), leases_(tensors) {}

  void acquire(int unit) override {
    if constexpr (Optimizer::stage_type::shards_values) optimizer_.acquire(unit);
  }
  void release(int unit) override {
    if constexpr (Optimizer::stage_type::shards_values) optimizer_.release(unit);
  }
  T* gradient(std::size_t i) override {
    leases_[i].emplace(optimizer_.template gradient<T>(i));
    return leases_[i]->values().data();
  }
  void complete(std::size_t i) override {
    leases_[i].reset();
    optimizer_.mark_ready(i);
  }

 private:
  using Lease = decltype(std::declval<Optimizer&>().template gradient<T>(0));

  Optimizer& optimizer_;
  std::vector<std::optional<Lease>> leases_;  ///< by tensor
};

/// Trains one rank. Whatever the communicator, the report is the same on all ranks.
template <class Opt, class T, class Partition, class View, class Stage, class Comm>
class RankTrainer {
 public:
  RankTrainer(const Job& job, Comm& comm, const Process& process)
      : job_(job), options_(*job.options), comm_(comm), result_{.process = process} {
    report_.mode = job.mode;
    report_.stage = zero::StageNumber(Stage{}).value();
  }

  RunReport run() {
    const auto rank = static_cast<std::size_t>(comm_.rank());
    const auto recorder = [&](std::vector<Recorder>* of_ranks) {
      return of_ranks == nullptr ? nullptr : &(*of_ranks)[is_process ? 0 : rank];
    };
    StepClock clock(recorder(job_.recorders));
    Model<T> model(options_.model, options_.batch_size(), options_.seed,
                   {.values = !Stage::shards_values, .gradients = !overlaps});
    auto store = store_of<Stage::shards_values>(model.tensors());
    zero::Settings settings;
    if constexpr (Stage::shards_values) {
      settings.initial_value = InitialValues<T>(shapes_of(options_.model), options_.seed);
    }
    if (std::is_same_v<T, zero::float16>) settings.loss_scale = zero::LossScale::dynamic();
    zero::ZeroSharded optimizer{
        groups_of<Opt>(options_),
        store,
        comm_,
        Partition{},
        View{options_.bucket_bytes},
        Stage{},
        settings,
        overlaps ? StepObserver{clock, recorder(job_.traffic_recorders)} : StepObserver{clock}};
    if (options_.clip) optimizer.clip_grad_norm(options_.clip);
    OptimizerKeeper<decltype(optimizer), T> keeper(optimizer, model.tensors().size());
    model.keep_by(&keeper);
    if (!options_.resume.empty()) zero::load(optimizer, options_.resume);
    look_at_memory(&Resident::built);

    Batch batch;
    const auto begin = Clock::now();
    for (std::size_t step = options_.seen; step < options_.end(); ++step) {
      job_.source->fill(batch, rank, step);
      for (Opt& group : optimizer.groups()) group.lr = options_.lr * schedule(options_, step);

      clock.begin(model.product_seconds());
      const std::uint64_t key = mix(mix(mix(options_.seed, dropout_stream), rank), step);
      const float loss = model.forward(batch, options_.dropout, key);
      clock.was(&StepTime::forward, "forward");
      model.backward(static_cast<float>(optimizer.loss_scale()));
      clock.was(&StepTime::backward, "backward");
      comm_.barrier().wait();  // only so that waiting is not taken for stepping
      clock.was(&StepTime::wait, "wait");
      const zero::Outcome outcome = step_of(optimizer, clock);
      clock.end(model.product_seconds());

      std::array<float, 2> shared{loss, job_.interrupted->load() ? 1.0F : 0.0F};
      comm_.all_reduce(std::span<float>(shared)).wait();
      report_.losses.push_back(shared[0] / static_cast<float>(options_.ranks));
      if (outcome.gradient_norm) report_.norms.push_back(*outcome.gradient_norm);
      if (!outcome.applied) ++report_.skipped;
      report_.seconds = seconds_between(begin, Clock::now());
      report_.interrupted = shared[1] > 0;
      save(optimizer, step + 1);
      if (rank == 0 && job_.progress) job_.progress(report_);
      if (report_.interrupted) break;
    }
    look_at_memory(&Resident::after);
    std::size_t value_bytes = 0;
    for (const Tensor<T>& tensor : model.tensors()) value_bytes += tensor.size * sizeof(T);
    result_.memory =
        memory_of<View, Stage>(value_bytes, optimizer.memory(), model.activation_bytes());
    result_.time = clock.median();
    result_.sent = report_.losses.empty() ? 0 : sent_ / report_.losses.size();
    result_.hash = hash_of(model.tensors(), keeper);
    gather();
    return std::move(report_);
  }

 private:
  /// Or a thread among the ranks of a process.
  static constexpr bool is_process = !zero::SharedMemoryCommunicator<Comm>;
  /// Traffic has threads of its own, and gradients have no memory but the optimizer's.
  static constexpr bool overlaps = Stage::shards_gradients;

  /// Sent as bytes.
  struct Result {
    RankMemory memory{};
    StepTime time{};
    std::uint64_t sent = 0;
    std::uint64_t hash = 0;
    Process process{};
  };
  static_assert(std::is_trivially_copyable_v<Result>);

  /// Where a checkpoint is due after so many steps.
  template <class Optimizer>
  void save(Optimizer& optimizer, std::size_t steps) const {
    const bool last = steps == options_.end() || report_.interrupted;
    const bool due = options_.save_every > 0 && steps % options_.save_every == 0;
    if (options_.save.empty() || !(last || due)) return;
    zero::save(optimizer, options_.save, {{steps_note, std::to_string(steps)}});
  }

  /// Steps. Where traffic has threads of its own, what the step waits for it is its reduce and
  /// gather; what forward and backward wait for it is in `exposed` alone.
  template <class Optimizer>
  zero::Outcome step_of(Optimizer& optimizer, StepClock& clock) {
    if constexpr (overlaps) {
      const zero::TrafficReport before = optimizer.traffic();
      const zero::Outcome outcome = optimizer.step().outcome();
      const zero::TrafficReport after = optimizer.traffic();
      const auto waited = [&](double StepTime::* part, double seconds) {
        clock.add_seconds(part, seconds);
      };
      waited(&StepTime::reduce, after.reduce.exposed - before.reduce.exposed);
      waited(&StepTime::gather, after.gather.exposed - before.gather.exposed);
      const auto sum = [](const zero::TrafficReport& report,
                          double zero::TrafficReport::Kind::* of) {
        return report.reduce.*of + report.gather.*of;
      };
      clock.traffic(sum(after, &zero::TrafficReport::Kind::busy) - busy_,
                    sum(after, &zero::TrafficReport::Kind::exposed) - exposed_);
      busy_ = sum(after, &zero::TrafficReport::Kind::busy);
      exposed_ = sum(after, &zero::TrafficReport::Kind::exposed);
      sent_ = after.reduce.bytes + after.gather.bytes;
      return outcome;
    } else {
      return optimizer.step().outcome();
    }
  }

  /// What is resident while all ranks stand still; of a process one looks.
  void look_at_memory(std::optional<std::uint64_t> Resident::* when) {
    comm_.barrier().wait();
    if (is_process || comm_.rank() == 0) {
      Resident& resident = result_.process.resident;
      resident.*when = trimmed_bytes();
      if (resident.peak) resident.peak = peak_resident_bytes();
    }
    comm_.barrier().wait();
  }

  void gather() {
    std::vector<Result> all(static_cast<std::size_t>(comm_.size()));
    comm_.exchange(std::as_bytes(std::span(&result_, 1)), std::as_writable_bytes(std::span(all)))
        .wait();
    for (const Result& rank : all) {
      report_.memory.push_back(rank.memory);
      report_.time.push_back(rank.time);
      if (overlaps) report_.sent.push_back(rank.sent);
      if (is_process || report_.processes.empty()) report_.processes.push_back(rank.process);
      if (rank.hash != result_.hash) {
        throw std::logic_error("ranks ended with different parameters");
      }
    }
    report_.hash = result_.hash;
  }

  const Job& job_;
  const Options& options_;
  Comm& comm_;
  Result result_;
  double busy_ = 0, exposed_ = 0;  ///< of traffic, until the last step
  std::uint64_t sent_ = 0;
  RunReport report_{};
};

/// Ranks as threads of this process.
template <class Opt, class T, class Partition, class View, class Stage>
RunReport train_threads(const Job& job) {
  use_one_thread_a_product();
  const Process process = begin_of_process();
  RunReport report;
  zero::run_ranks(job.options->ranks,
                  [&](zero::InProcessCommunicator& comm) {
                    using Rank =
                        RankTrainer<Opt, T, Partition, View, Stage, zero::InProcessCommunicator>;
                    RunReport of_rank = Rank(job, comm, process).run();
                    if (comm.rank() == 0) report = std::move(of_rank);
                  },
                  {.timeout = job.options->timeout});
  return report;
}

#if BERT_MPI
/// This process as a rank.
template <class Opt, class T, class Partition, class View, class Stage>
RunReport train_process(const Job& job, zero::MpiCommunicator& comm) {
  use_one_thread_a_product();
  using Rank = RankTrainer<Opt, T, Partition, View, Stage, zero::MpiCommunicator>;
  return Rank(job, comm, begin_of_process()).run();
}
#endif

template <class Opt, class T, class Partition, class View, class Stage>
RankMemory estimate_rank(const Options& options, int rank) {
  const Shapes all(options.model, Stage::shards_values);
  const zero::EstimateFor member{.world = options.ranks,
                                 .rank = rank,
                                 .share_memory = options.communicator == Ranks::in_process,
                                 .clips = options.clip.has_value()};
  const zero::ExactEstimate exact =
      zero::estimate<T>(groups_of<Opt>(options), all.shapes, member, Partition{},
                        View{options.bucket_bytes}, Stage{});
  return memory_of<View, Stage>(all.elements * sizeof(T), exact.optimizer,
                                Model<T>::activation_bytes(options.model, options.batch_size()));
}

/// What a combination's ranks may be. Processes are compiled only where there is MPI, and for few,
/// since that takes as long again.
enum class Over { threads, processes_too };

template <class Opt, class T, class Partition, class View, class Stage, Over over>
Trainer trainer() {
  Trainer result{estimate_rank<Opt, T, Partition, View, Stage>,
                 train_threads<Opt, T, Partition, View, Stage>};
#if BERT_MPI
  if constexpr (over == Over::processes_too) {
    result.train_over_mpi = train_process<Opt, T, Partition, View, Stage>;
  }
#endif
  return result;
}

/// @param further of stages 2 and 3, where they are compiled
template <class Opt, class T, class Partition, class View, Over over>
Combination combination(const char* optimizer, const std::vector<Trainer>& further = {}) {
  Combination result{optimizer,
                     precision_name<T>,
                     partition_name<Partition>,
                     view_name<View>,
                     {trainer<Opt, T, Partition, View, zero::Replicated, over>(),
                      trainer<Opt, T, Partition, View, zero::Stage1, over>()}};
  result.stages.insert(result.stages.end(), further.begin(), further.end());
  return result;
}

}  // namespace bert
