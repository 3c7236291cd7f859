// SPDX-License-Identifier: Apache-2.0
/// @file
/// The training loop of one rank, the same for ranks that are threads and ranks that are processes.
#pragma once

#include <ATen/Functions.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>
#include <zero/interop/torch.hpp>
#include <zero/zero.hpp>

#include "../bert/process_memory.hpp"
#include "../bert/random.hpp"
#include "options.hpp"
#include "report.hpp"
#include "task.hpp"

namespace example {

/// Collective: every rank's `mine`, in their order.
template <class T, class Comm>
  requires std::is_trivially_copyable_v<T>
std::vector<T> of_all_ranks(const T& mine, Comm& comm) {
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

/// Collective. How many of a rank's test items the model tells right, over all of them.
template <class Comm>
double accuracy(Model& model, const Task& task, Comm& comm) {
  zero::broadcast_buffers(model, comm);  // batch norms' statistics were each rank's own
  const at::NoGradGuard no_gradients;
  model.eval();
  const Batch batch = task.test(comm.rank(), comm.size());
  const double items = static_cast<double>(batch.target.numel());
  double right = 0;
  if (items > 0) right = model.forward(batch.input).argmax(1).eq(batch.target).sum().item<double>();
  return sum_over_ranks(right, comm) / sum_over_ranks(items, comm);
}

/// Collective: trains and tells how it went; rank 0 prints losses meanwhile.
template <class Comm, class Stage>
RunReport train(const Options& options, const Task& task, Comm& comm, Stage stage) {
  using Clock = std::chrono::steady_clock;
  const std::size_t before = bert::resident_bytes().value_or(0);

  // Every rank draws weights of its own, as one would without ranks; then all take those of rank 0.
  const auto rank = static_cast<std::uint64_t>(comm.rank());
  const std::shared_ptr<Model> model = task.make_model(options.seed + rank);
  zero::BasicTorchParams<float> params{*model};
  for (auto& parameter : params) {
    if (parameter.tensor().dim() < 2) parameter.set_group(1);
  }
  zero::broadcast_values(params, comm);
  zero::broadcast_buffers(*model, comm);

  const zero::AdamW decayed{.lr = options.lr, .weight_decay = 0.01};
  const zero::AdamW plain{.lr = options.lr, .weight_decay = 0};  // biases and norms
  zero::ZeroSharded optimizer{zero::Groups{decayed, plain}, params, comm, stage};
  zero::TorchHooks hooks{optimizer};

  const std::int64_t steps = options.steps > 0 ? options.steps : task.default_steps();
  const std::int64_t every = std::max<std::int64_t>(1, steps / 5);
  RunReport report;
  RankReport mine;
  Clock::duration in_step{};
  Clock::time_point begin;  // of the second step, since the first one takes memory
  for (std::int64_t step = 0; step < steps; ++step) {
    if (step == 1) begin = Clock::now(), in_step = {};
    model->zero_grad();
    const Batch batch = task.batch(step, comm.rank());
    const at::Tensor loss = at::cross_entropy_loss(model->forward(batch.input), batch.target);
    loss.backward();
    const auto backward_done = Clock::now();
    optimizer.step();
    in_step += Clock::now() - backward_done;

    report.losses.push_back(sum_over_ranks(loss.item<double>(), comm) / comm.size());
    if (comm.rank() == 0 && (step == 0 || (step + 1) % every == 0)) {
      std::printf("  step %5lld   loss %.4f\n", static_cast<long long>(step + 1),
                  report.losses.back());
      std::fflush(stdout);
    }
  }
  const double timed = static_cast<double>(std::max<std::int64_t>(1, steps - 1));
  const auto milliseconds = [&](Clock::duration time) {
    return std::chrono::duration<double, std::milli>(time).count() / timed;
  };
  if (steps > 1) {
    mine.step_ms = milliseconds(Clock::now() - begin);
    mine.update_ms = milliseconds(in_step);
  }
  mine.grown = static_cast<std::int64_t>(bert::resident_bytes().value_or(0)) -
               static_cast<std::int64_t>(before);
  mine.memory = optimizer.memory();
  mine.hash = options.seed;
  for (const auto& parameter : params) {
    const at::Tensor& gradient = parameter.tensor().grad();
    if (gradient.defined()) mine.gradients += gradient.nbytes();
    const auto* values = parameter.tensor().template data_ptr<float>();
    for (std::int64_t i = 0; i < parameter.tensor().numel(); ++i) {
      std::uint32_t bits = 0;
      std::memcpy(&bits, values + i, sizeof bits);
      mine.hash = bert::mix(mine.hash, bits);
    }
  }
  report.ranks = of_all_ranks(mine, comm);
  report.accuracy = accuracy(*model, task, comm);
  return report;
}

/// As the options say: replicated, sharded, or one after the other.
template <class Comm>
std::vector<RunReport> train_all(const Options& options, const Task& task, Comm& comm) {
  std::vector<RunReport> reports;
  if (comm.rank() == 0) {
    std::printf("%s: %s, on each of %d ranks (%s)\n", options.model.c_str(),
                task.describe().c_str(), comm.size(), options.communicator.c_str());
  }
  const auto run = [&](const char* mode, auto stage) {
    if (comm.rank() == 0) std::printf("%s\n", mode);
    reports.push_back(train(options, task, comm, stage));
    reports.back().mode = mode;
  };
  if (options.mode != "sharded") run("replicated", zero::Replicated{});
  if (options.mode != "replicated" && options.stage == 1) run("stage 1", zero::Stage1{});
  if (options.mode != "replicated" && options.stage == 2) run("stage 2", zero::Stage2{});
  return reports;
}

}  // namespace example
