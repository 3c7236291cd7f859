// SPDX-License-Identifier: Apache-2.0
/// @file
/// What all ranks know of a step before they update, and the kernel that decides by it whether and
/// how each parameter steps: the host learns of it later, if it asks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>
#include <utility>

#include "zero/config.hpp"
#include "zero/cuda/detail/block_reduce.cuh"
#include "zero/cuda/detail/fragments.cuh"
#include "zero/cuda/detail/launch.cuh"
#include "zero/cuda/detail/look.cuh"
#include "zero/cuda/stream.hpp"
#include "zero/detail/exact_sum.hpp"
#include "zero/detail/scale_state.hpp"
#include "zero/optimizer.hpp"

namespace zero::cuda::detail {

/// Why no rank took a step.
enum class StepProblem : std::uint32_t {
  none,
  another_optimizer,  ///< ranks stepped different ones over one communicator
  refused,            ///< some rank refused, for the reason that it gives
  units,              ///< ranks have gathered different units for each other
  options,            ///< ranks have different options
  presence,           ///< a reduced gradient is on some ranks only
};

/// What one rank tells the others in a step. One bit a parameter follows, whether its gradient is
/// there, in whole words.
struct StepMessage {
  DeviceDigits digits;  ///< of its own slices' sums; kernels add to it
  std::uint64_t identity;
  std::uint64_t options;  ///< fingerprint of all groups
  std::uint64_t units;    ///< and of which units have been gathered so far, in which order
  std::uint64_t refused;
  char refusal[240];
};
static_assert(sizeof(StepMessage) % sizeof(std::uint64_t) == 0);

/// In words of a message, with `parameters` bits behind it; whole 16 bytes.
[[nodiscard]] constexpr std::size_t message_words(std::size_t parameters) {
  const std::size_t words = sizeof(StepMessage) / 4 + (parameters + 31) / 32;
  return (words + 3) / 4 * 4;
}

/// A step that no rank took.
struct StepTrouble {
  StepProblem problem;
  std::uint32_t rank;     ///< whose, or the parameter of `StepProblem::presence`
  std::uint64_t attempt;  ///< which step, of all that were tried, from 1
  char refusal[240];
};

/// Where a rank stands after a step. The host reads a copy.
struct StepReport {
  zero::detail::ScaleState scale;
  std::int64_t step_number;  ///< steps applied
  std::uint64_t attempt;     ///< steps tried
  std::uint32_t applied;     ///< the last one was
  std::uint32_t measured;    ///< `ScaleState::norm`
  StepTrouble last;          ///< of the last one
  StepTrouble untold;        ///< the first that the host knew nothing of
};

/// All that a rank keeps on the device of steps.
struct DeviceState {
  StepState step;
  StepReport report;
  // Of the step under way: digits of all ranks, summed by halves so that none overflows.
  std::uint64_t low[DeviceDigits::count];
  std::uint64_t high[DeviceDigits::count];
  unsigned flags;
  unsigned split;  ///< the first parameter of `StepProblem::presence`, or all ones
};

/// What is known of a parameter for good.
struct ParameterFacts {
  std::uint32_t group;
  std::uint32_t in_double;  ///< what it is computed in
  std::uint32_t steps;      ///< 0: frozen, tied to another, or empty
};

/// A rule's scalars for arithmetic type `A`.
template <class Rule, class A>
using scalars_of = decltype(std::declval<const Rule&>().template scalars<A>(std::int64_t{1}));

struct NoScalars {};
/// The same, where some parameter is computed in `A`. Whole-tensor optimizers have none.
template <class Rule, class A, bool needed>
struct ScalarsIf {
  using type = NoScalars;
};
template <class Rule, class A>
  requires UpdateRule<Rule, A>
struct ScalarsIf<Rule, A, true> {
  using type = scalars_of<Rule, A>;
};

/// @tparam floats whether some parameter is computed in float
/// @tparam doubles in double
template <class Rule, bool floats, bool doubles>
struct DecideTask {
  const std::uint32_t* messages;  ///< one a rank, in rank order
  std::size_t words;              ///< of each
  std::uint32_t ranks;
  std::uint32_t rank;
  bool reduced;  ///< gradients must be on all ranks or on none
  double of_sums;
  zero::detail::ScaleRule rule;
  const Rule* groups;
  const ParameterFacts* facts;
  std::int64_t* counts;  ///< by parameter: how often it was stepped
  std::size_t parameters;
  ParameterStep<typename ScalarsIf<Rule, float, floats>::type>* float_steps;  ///< by parameter
  ParameterStep<typename ScalarsIf<Rule, double, doubles>::type>* double_steps;
  DeviceState* state;
  StepMessage* own;    ///< whose digits are taken back to zero for the next step
  std::uint64_t told;  ///< up to which attempt the host knows of trouble
};

template <class Rule, bool floats, bool doubles>
class Decision {
  using Task = DecideTask<Rule, floats, doubles>;

 public:
  __device__ explicit Decision(const Task& task) : task_(task) {}

  __device__ void clear() {
    if (threadIdx.x != 0) return;
    task_.state->flags = 0;
    task_.state->split = ~0U;
  }

  /// Takes all ranks' findings together, and looks at who has which gradients.
  __device__ void gather() {
    DeviceState& state = *task_.state;
    for (unsigned d = threadIdx.x; d < DeviceDigits::count; d += blockDim.x) {
      std::uint64_t low = 0, high = 0;
      for (unsigned r = 0; r < task_.ranks; ++r) {
        const std::uint64_t digit = message(r).digits.digit[d];
        low += digit & 0xffffffffU;
        high += digit >> 32;
      }
      state.low[d] = low;
      state.high[d] = high;
    }
    for (unsigned r = threadIdx.x; r < task_.ranks; r += blockDim.x) {
      atomicOr(&state.flags, static_cast<unsigned>(message(r).digits.flags));
    }
    if (!task_.reduced) return;
    for (std::size_t i = threadIdx.x; i < task_.parameters; i += blockDim.x) {
      if (task_.facts[i].steps == 0) continue;
      bool any = false, all = true;
      for (unsigned r = 0; r < task_.ranks; ++r) {
        any = any || present(r, i);
        all = all && present(r, i);
      }
      if (any != all) atomicMin(&state.split, static_cast<unsigned>(i));
    }
  }

  /// By one thread.
  __device__ void decide() {
    if (threadIdx.x != 0) return;
    DeviceState& state = *task_.state;
    StepReport& report = state.report;
    report.last.problem = find_problem(report.last.rank);
    report.last.attempt = ++report.attempt;
    const bool in_trouble = report.last.problem != StepProblem::none;
    if (report.untold.attempt <= task_.told) report.untold.problem = StepProblem::none;
    const bool told = message(task_.rank).refused != 0;  // its host has thrown
    if (in_trouble && !told && report.untold.problem == StepProblem::none) {
      report.untold = report.last;
    }
    report.measured = 0;
    report.applied = 0;
    if (!in_trouble) {
      report.scale.begin_step(task_.of_sums);
      const bool finite = state.flags == 0;
      const double squares = task_.rule.measures ? sum().value() : 0;
      report.measured = task_.rule.measures ? 1 : 0;
      if (report.scale.decide(task_.rule, squares, finite)) {
        report.applied = 1;
        ++report.step_number;
        report.scale.applied(task_.rule);
      }
    }
    state.step.skip = report.applied == 0 ? 1 : 0;
    state.step.scale = report.scale.of_step;
  }

  /// Counts and scalars of what steps.
  __device__ void prepare() {
    const bool applied = task_.state->report.applied != 0;
    for (std::size_t i = threadIdx.x; i < task_.parameters; i += blockDim.x) {
      const ParameterFacts facts = task_.facts[i];
      bool steps = false;
      if (applied && facts.steps != 0) {
        for (unsigned r = 0; r < task_.ranks && !steps; ++r) steps = present(r, i);
      }
      if (steps) ++task_.counts[i];
      if constexpr (floats) {
        if (facts.in_double == 0) write<float>(task_.float_steps[i], i, facts.group, steps);
      }
      if constexpr (doubles) {
        if (facts.in_double != 0) write<double>(task_.double_steps[i], i, facts.group, steps);
      }
    }
    for (unsigned d = threadIdx.x; d < DeviceDigits::count; d += blockDim.x) {
      task_.own->digits.digit[d] = 0;
    }
    if (threadIdx.x == 0) task_.own->digits.flags = 0;
  }

 private:
  [[nodiscard]] __device__ const StepMessage& message(std::size_t rank) const {
    return *reinterpret_cast<const StepMessage*>(task_.messages + rank * task_.words);
  }
  [[nodiscard]] __device__ bool present(std::size_t rank, std::size_t i) const {
    const std::uint32_t* const bits = task_.messages + rank * task_.words + sizeof(StepMessage) / 4;
    return (bits[i / 32] >> (i % 32) & 1U) != 0;
  }

  [[nodiscard]] __device__ StepProblem find_problem(std::uint32_t& rank) const {
    for (rank = 0; rank < task_.ranks; ++rank) {
      if (message(rank).identity != message(task_.rank).identity) {
        return StepProblem::another_optimizer;
      }
    }
    for (rank = 0; rank < task_.ranks; ++rank) {
      const StepMessage& theirs = message(rank);
      if (theirs.refused == 0) continue;
      for (unsigned c = 0; c < sizeof theirs.refusal; ++c) {
        task_.state->report.last.refusal[c] = theirs.refusal[c];
      }
      return StepProblem::refused;
    }
    for (rank = 0; rank < task_.ranks; ++rank) {
      if (message(rank).units != message(0).units) return StepProblem::units;
    }
    for (rank = 0; rank < task_.ranks; ++rank) {
      if (message(rank).options != message(0).options) return StepProblem::options;
    }
    rank = task_.state->split;
    return rank == ~0U ? StepProblem::none : StepProblem::presence;
  }

  [[nodiscard]] __device__ zero::detail::ExactSum sum() const {
    const DeviceState& state = *task_.state;
    zero::detail::ExactSum all;
    for (int d = 0; d < DeviceDigits::count; ++d) {
      const int exponent = 32 * d + DeviceDigits::lowest_exponent;
      if (state.low[d] != 0) all.add_integer(state.low[d], exponent);
      if (state.high[d] != 0) all.add_integer(state.high[d], exponent + 32);
    }
    if ((state.flags & DeviceDigits::infinite) != 0) all.add_infinity();
    if ((state.flags & DeviceDigits::nan) != 0) all.add_nan();
    return all;
  }

  template <class A>
  __device__ void write(ParameterStep<typename ScalarsIf<Rule, A, true>::type>& to, std::size_t i,
                        [[maybe_unused]] std::size_t group, bool steps) const {
    to.stepping = steps ? 1 : 0;
    if (!steps) return;
    to.t = task_.counts[i];
    if constexpr (UpdateRule<Rule, A>) {
      to.scalars = task_.groups[group].template scalars<A>(task_.counts[i]);
    }
  }

  const Task& task_;
};

template <class Rule, bool floats, bool doubles>
__global__ void decide_kernel(DecideTask<Rule, floats, doubles> task) {
  Decision<Rule, floats, doubles> decision(task);
  decision.clear();
  __syncthreads();
  decision.gather();
  __syncthreads();
  decision.decide();
  __syncthreads();
  decision.prepare();
}

/// One block, whose threads wait for each other.
template <class Rule, bool floats, bool doubles>
void decide(const DecideTask<Rule, floats, doubles>& task, StreamView stream) {
  launch("decide", &decide_kernel<Rule, floats, doubles>, {1, reducing_threads}, stream, task);
}

}  // namespace zero::cuda::detail
