// SPDX-License-Identifier: Apache-2.0
/// @file
/// The oracle (tests/oracle) over CUDA memory: gradients are made in several streams, steps are
/// enqueued one after the other, and the host looks when all is done.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <random>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "catch.hpp"
#include "cuda/device_array.hpp"
#include "oracle/oracle.hpp"
#include "zero/cuda.cuh"
#if ZERO_CUDA_EMULATED
#include "fake/cuda_runtime.hpp"
#endif

namespace oracle {

/// Device memory, as a framework may hand it over: also in the middle of a vector access.
struct DeviceMemory {
  static constexpr zero::MemorySpace space = zero::MemorySpace::cuda;
  template <class T>
  class Array : public DeviceArray<T> {
   public:
    explicit Array(const std::vector<T>& contents)
        : DeviceArray<T>(contents, contents.size() % 3) {}
  };
  template <class T>
  using FlatParams = zero::cuda::FlatParams<T>;
  static void copy(void* to, const void* from, std::size_t bytes) {
    zero::cuda::check(cudaMemcpy(to, from, bytes, cudaMemcpyDeviceToHost), "cudaMemcpy");
  }
};

template <class Span>
using DeviceTensor = TensorIn<Span, DeviceMemory>;
template <class Span>
using FixedDeviceTensor = FixedTensorIn<Span, DeviceMemory>;

/// What a rank has of its first `passes` backward passes of a step.
template <class T>
std::vector<T> gradient_after(Case c, int passes, int rank, int step, std::size_t i) {
  c.backwards = passes;
  std::vector<T> sum(c.shapes[i].elements);
  for (std::size_t e = 0; e < sum.size(); ++e) {
    using S = zero::detail::Storage<T, zero::MixedPrecision>;
    sum[e] = SerialLane<S>::local_sum(c, rank, step, i, e);
  }
  return sum;
}

/// One rank's backward passes and steps. The caller's own streams: one that steps, and others that
/// make gradients; the latter wait for the former's last step, and for nothing else.
template <class Optimizer, class Model>
class DeviceRank {
 public:
  DeviceRank(Optimizer& optimizer, Model& model, const Case& c, int rank)
      : optimizer_(optimizer),
        model_(model),
        c_(c),
        rank_(rank),
        random_(c.seed * 8 + static_cast<std::uint32_t>(rank)) {}

  void take_steps() {
    std::vector<zero::cuda::Step> steps;
    for (int step = 0; step < c_.steps; ++step) {
      for (int pass = 0; pass < c_.backwards; ++pass) {
        std::optional<decltype(optimizer_.accumulate())> scope;
        if (pass + 1 < c_.backwards) scope.emplace(optimizer_.accumulate());
        backward(step, pass);
      }
      steps.push_back(optimizer_.step(stepping_));
      stepped_.record(stepping_);
      if (random_() % 3 == 0) require_outcome(steps.back(), step);
    }
    for (int step = 0; step < c_.steps; ++step) {
      require_outcome(steps[static_cast<std::size_t>(step)], step);
    }
    if (optimizer_.last_outcome().step != c_.steps) throw std::runtime_error("last outcome");
  }

 private:
  void require_outcome(const zero::cuda::Step& step, int number) const {
    const zero::Outcome outcome = step.outcome();
    if (!outcome.applied || outcome.step != number + 1) throw std::runtime_error("step number");
    if (outcome.gradient_norm.has_value() != c_.max_norm.has_value()) {
      throw std::runtime_error("norm");
    }
  }

  /// Whether the gradients of some pass up to this one are there.
  [[nodiscard]] bool any(int step, int pass, std::size_t leader) const {
    for (int k = 0; k <= pass; ++k) {
      if (c_.present(rank_, Case::backward(step, k), leader)) return true;
    }
    return false;
  }

  void backward(int step, int pass) {
    const bool last = pass + 1 == c_.backwards;
    std::vector<std::size_t> order;
    for (std::size_t i = 0; i < c_.shapes.size(); ++i) {
      if (!c_.shapes[i].attributes.frozen) order.push_back(i);
    }
    std::shuffle(order.begin(), order.end(), random_);
    std::map<std::size_t, std::size_t> streams;  // by leader
    for (const zero::cuda::Stream& stream : making_) stream.view().wait(stepped_);
    if (pass > 0) begin_another_pass();
    for (const std::size_t i : order) {
      const std::size_t leader = c_.leader(i);
      const bool ready = any(step, pass, leader);
      const auto [found, first] = streams.emplace(leader, random_() % (making_.size() + 1));
      // What is not marked with a stream is there when the stepping stream comes to the step.
      const bool own = found->second < making_.size();
      const zero::cuda::StreamView stream = own ? making_[found->second] : stepping_;
      model_.set_present(leader, ready);
      if (first && ready) write(i, leader, step, pass, stream);
      if (!last || (!own && !is_flat<Model> && random_() % 2 == 0)) continue;
      if (!ready) {
        optimizer_.mark_absent(i);
      } else if (own) {
        optimizer_.mark_ready(i, stream);
      } else if (random_() % 2 == 0) {
        optimizer_.mark_ready(i);
      }
    }
  }

  /// Every stream comes after what all have made.
  void begin_another_pass() {
    for (const zero::cuda::Stream& stream : making_) {
      made_.record(stream);
      stepping_.view().wait(made_);
    }
    made_.record(stepping_);
    for (const zero::cuda::Stream& stream : making_) stream.view().wait(made_);
  }

  void write(std::size_t i, std::size_t leader, int step, int pass, zero::cuda::StreamView stream) {
    zero::detail::visit_span(model_.memory(leader), [&]<class T>(std::span<T> memory) {
      const std::vector<T> gradient = gradient_after<T>(c_, pass + 1, rank_, step, leader);
      if (random_() % 2 == 0) {
        const auto lease = optimizer_.template gradient<T>(i);
        if (lease.values().data() != memory.data()) throw std::runtime_error("place of a lease");
      }
      if (memory.empty()) return;
      zero::cuda::check(cudaMemcpyAsync(memory.data(), gradient.data(), memory.size_bytes(),
                                        cudaMemcpyHostToDevice, stream.get()),
                        "cudaMemcpyAsync");
    });
  }

  Optimizer& optimizer_;
  Model& model_;
  const Case& c_;
  int rank_;
  std::mt19937 random_;
  zero::cuda::Stream stepping_{};
  std::vector<zero::cuda::Stream> making_{2};
  zero::cuda::Event stepped_{};
  zero::cuda::Event made_{};
};

/// Ranks that reach each other in CUDA memory.
struct OnDevice {
  static zero::cuda::InProcessCommunicator of(zero::cuda::InProcessCommunicator& comm) {
    return comm;
  }
  template <class F>
  static void run_ranks(int world, F&& rank_main) {
    zero::cuda::run_ranks(world, rank_main);
  }
  template <class Optimizer, class Model>
  static void take_steps(Optimizer& optimizer, Model& model, const Case& c, int rank,
                         const std::vector<std::map<std::size_t, std::string>>&) {
    DeviceRank<Optimizer, Model>(optimizer, model, c, rank).take_steps();
  }
};

/// Worlds of 1 to 6, up to three backward passes a step, streams that lag.
template <class Model, class Partition, class View, class Stage,
          class Precision = zero::MixedPrecision, class Opt>
void check_on_device(std::uint32_t first_seed, const std::vector<Opt>& groups) {
#ifdef ZERO_TEST_EACH_ONCE
  constexpr std::uint32_t seeds = 6;  // every world, and every number of passes
#else
  constexpr std::uint32_t seeds = 18;  // the one with the other
#endif
  for (std::uint32_t seed = first_seed; seed < first_seed + seeds; ++seed) {
    Case c = draw(seed, groups.size());
    c.world = 1 + static_cast<int>(seed % 6);
    c.backwards = 1 + static_cast<int>((seed + seed / 6) % 3);
    if (c.settings.gradients == zero::Gradients::reduced) c.backwards = 1;
#if ZERO_CUDA_EMULATED
    zero_emulation::delay(seed, seed % 4 == 0 ? 100 : 0);
    zero_emulation::scramble_blocks(seed % 3);
#endif
    std::string found;
    try {
      found = run<OnDevice, Model, Partition, View, Stage, Precision>(c, groups);
    } catch (const std::exception& error) {
      found = error.what();
    }
    INFO("seed " << seed);
    REQUIRE(found == "");
  }
#if ZERO_CUDA_EMULATED
  zero_emulation::reset();
#endif
}

}  // namespace oracle
