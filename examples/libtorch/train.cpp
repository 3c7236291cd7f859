// SPDX-License-Identifier: Apache-2.0
// The training loop of one rank, the same for ranks that are threads and ranks that are processes.
#include "train.hpp"

// First: libtorch 1.13's other headers lack it where the compiler is clang.
#include <ATen/core/ivalue.h>
//
#include <ATen/Functions.h>
#include <c10/core/GradMode.h>
#include <torch/optim/adamw.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>
#include <zero/interop/torch.hpp>
#include <zero/interop/torch/optimizer.hpp>
#include <zero/partition/balanced.hpp>
#include <zero/zero.hpp>

#if EXAMPLE_MPI
#include <zero/comm/mpi.hpp>
#ifdef __GLIBC__
#include <malloc.h>
#endif
#endif

#include "../bert/input_error.hpp"
#include "../bert/process_memory.hpp"
#include "../bert/random.hpp"
#include "task.hpp"

namespace example {

namespace {

using Clock = std::chrono::steady_clock;

/// Collective: every rank's `mine`, in their order.
template <class T, class Comm>
std::vector<T> of_all_ranks(const T& mine, Comm& comm) {
  static_assert(std::is_trivially_copyable_v<T>);
  std::vector<T> all(static_cast<std::size_t>(comm.size()));
  comm.exchange(std::as_bytes(std::span(&mine, 1)), std::as_writable_bytes(std::span(all))).wait();
  return all;
}

/// Collective: summed in rank order, so that all have the same bits.
template <class Comm>
double sum_over_ranks(double mine, Comm& comm) {
  double sum = 0;
  for (const double one : of_all_ranks(mine, comm)) sum += one;
  return sum;
}

/// Collective: the share of the test's items that the model tells right; each rank looks at a part.
template <class Comm>
double accuracy(Model& model, const Task& task, Comm& comm) {
  zero::broadcast_buffers(model, comm);  // batch norms' statistics were each rank's own
  const at::NoGradGuard no_gradients;
  model.eval();
  const Batch batch = task.test(comm.rank(), comm.size());
  const auto items = static_cast<double>(batch.target.numel());
  double right = 0;
  if (items > 0) right = model.forward(batch.input).argmax(1).eq(batch.target).sum().item<double>();
  return sum_over_ranks(right, comm) / sum_over_ranks(items, comm);
}

std::uint64_t hash_of(const at::Tensor& tensor, std::uint64_t hash) {
  const auto* const bytes = static_cast<const unsigned char*>(tensor.data_ptr());
  for (std::size_t i = 0; i < tensor.nbytes(); ++i) hash = bert::mix(hash, bytes[i]);
  return hash;
}

/// Has torch make, once, what it keeps for as long as the process lives, so that the first run's
/// memory and time are its own.
void warm_up(const Task& task) {
  const std::shared_ptr<Model> model = task.make_model(0);
  const Batch batch = task.batch(0, 0);
  at::cross_entropy_loss(model->forward(batch.input), batch.target).backward();
}

/// Collective: trains and tells how it went. Rank 0 prints losses meanwhile.
/// @param optimizers one for matrices and one for biases and norms
template <class Comm, class Optimizer, class... Policies>
RunReport train(const Options& options, const Task& task, Comm& comm,
                const zero::Groups<Optimizer>& optimizers, Policies... policies) {
  const std::uint64_t before = bert::resident_bytes().value_or(0);

  // Every rank draws weights of its own, as one would without ranks; then all take those of rank 0.
  const std::shared_ptr<Model> model =
      task.make_model(options.seed + static_cast<std::uint64_t>(comm.rank()));
  zero::BasicTorchParams<float> params{*model};
  for (auto& parameter : params) {
    if (parameter.tensor().dim() < 2) parameter.set_group(1);
  }
  zero::broadcast_values(params, comm);
  zero::broadcast_buffers(*model, comm);

  zero::ZeroSharded optimizer{optimizers, params, comm, policies...};
  zero::TorchHooks hooks{optimizer};

  RunReport report;
  RankReport mine;
  const std::int64_t steps = options.steps > 0 ? options.steps : task.default_steps();
  const std::int64_t every = std::max<std::int64_t>(1, steps / 5);
  Clock::time_point begin;  // of the second step, since the first one takes memory
  Clock::duration updates{};
  for (std::int64_t step = 0; step < steps; ++step) {
    if (step == 1) begin = Clock::now(), updates = {};
    model->zero_grad();
    const Batch batch = task.batch(step, comm.rank());
    const at::Tensor loss = at::cross_entropy_loss(model->forward(batch.input), batch.target);
    loss.backward();
    const Clock::time_point update = Clock::now();
    optimizer.step();
    updates += Clock::now() - update;

    report.losses.push_back(sum_over_ranks(loss.item<double>(), comm) / comm.size());
    if (comm.rank() == 0 && (step == 0 || (step + 1) % every == 0)) {
      std::printf("  step %5lld   loss %.4f\n", static_cast<long long>(step + 1),
                  report.losses.back());
      std::fflush(stdout);
    }
  }
  if (steps > 1) {
    using Milliseconds = std::chrono::duration<double, std::milli>;
    mine.step_ms = Milliseconds(Clock::now() - begin).count() / static_cast<double>(steps - 1);
    mine.update_ms = Milliseconds(updates).count() / static_cast<double>(steps - 1);
  }
  mine.grown = static_cast<std::int64_t>(bert::resident_bytes().value_or(0) - before);
  mine.memory = optimizer.memory();
  for (const auto& parameter : params) {
    const at::Tensor& gradient = parameter.tensor().grad();
    if (gradient.defined()) mine.gradients += gradient.nbytes();
  }
  report.accuracy = accuracy(*model, task, comm);
  for (const at::Tensor& tensor : model->parameters()) mine.hash = hash_of(tensor, mine.hash);
  for (const at::Tensor& tensor : model->buffers()) mine.hash = hash_of(tensor, mine.hash);
  report.ranks = of_all_ranks(mine, comm);
  return report;
}

/// As the options say.
template <class Comm>
std::vector<RunReport> train_all(const Options& options, const Task& task, Comm& comm) {
  std::vector<RunReport> reports;
  const auto run = [&](const char* mode, auto... arguments) {
    if (comm.rank() == 0) std::printf("%s\n", mode);
    reports.push_back(train(options, task, comm, arguments...));
    reports.back().mode = mode;
  };
  if (comm.rank() == 0) {
    std::printf("%s: %s, on each of %d ranks (%s)\n", options.model.c_str(),
                task.describe().c_str(), comm.size(), options.communicator.c_str());
  }
  const bool replicated = options.mode != "sharded", sharded = options.mode != "replicated";
  if (options.optimizer == "adamw") {
    const zero::Groups adamw{zero::AdamW{.lr = options.lr, .weight_decay = 0.01},
                             zero::AdamW{.lr = options.lr, .weight_decay = 0}};
    if (replicated) run("replicated", adamw, zero::Replicated{});
    if (sharded && options.stage == 1) run("stage 1", adamw, zero::Stage1{});
    if (sharded && options.stage == 2) run("stage 2", adamw, zero::Stage2{});
  } else {
    // Torch's own, which steps whole tensors.
    using TorchAdamW = zero::TorchOptimizer<torch::optim::AdamW>;
    const auto with_decay = [&](double decay) {
      return TorchAdamW{torch::optim::AdamWOptions(options.lr).weight_decay(decay)};
    };
    const zero::Groups adamw{with_decay(0.01), with_decay(0)};
    if (replicated) run("replicated", adamw, zero::BalancedPartition{}, zero::Replicated{});
    if (sharded) run("stage 1", adamw, zero::BalancedPartition{}, zero::Stage1{});
  }
  return reports;
}

}  // namespace

std::vector<RunReport> train_on_threads(const Options& options) {
  compute_on_one_thread();
  const std::unique_ptr<Task> task = make_task(options);
  warm_up(*task);
  std::vector<RunReport> reports;
  zero::run_ranks(options.ranks, [&](zero::InProcessCommunicator& comm) {
    std::vector<RunReport> mine = train_all(options, *task, comm);
    if (comm.rank() == 0) reports = std::move(mine);
  });
  return reports;
}

#if EXAMPLE_MPI

std::vector<RunReport> train_over_mpi(const Options& options) {
#ifdef __GLIBC__
  // Large arrays go back to the system when they are freed, so that a process grows by what lives.
  mallopt(M_MMAP_THRESHOLD, 1 << 16);
#endif
  compute_on_one_thread();
  const std::unique_ptr<Task> task = make_task(options);
  warm_up(*task);
  int provided = 0;  // stage 2 reduces from threads of its own
  MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &provided);
  std::vector<RunReport> reports;
  {
    zero::MpiCommunicator comm(MPI_COMM_WORLD);
    reports = train_all(options, *task, comm);
  }
  MPI_Finalize();
  return reports;
}

#else

std::vector<RunReport> train_over_mpi(const Options&) {
  throw bert::InputError(
      "--communicator mpi: this was built without MPI; install one (Debian: libopenmpi-dev and "
      "openmpi-bin), configure anew and build again");
}

#endif

}  // namespace example
