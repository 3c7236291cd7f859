// SPDX-License-Identifier: Apache-2.0
/// @file
/// What ranks on devices tell each other in a step, and what comes of it: all in device memory.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory_resource>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "zero/cuda/detail/copy.cuh"
#include "zero/cuda/detail/decide.cuh"
#include "zero/cuda/detail/fragment_table.cuh"
#include "zero/cuda/memory.hpp"
#include "zero/cuda/stream.hpp"
#include "zero/detail/agreement.hpp"
#include "zero/detail/inspect.hpp"
#include "zero/element.hpp"
#include "zero/error.hpp"
#include "zero/outcome.hpp"
#include "zero/parameter.hpp"
#include "zero/settings.hpp"

namespace zero::cuda::detail {

/// Whether some element type is computed in `A`.
template <class A, class List>
inline constexpr bool computes_in = false;
template <class A, class... T>
inline constexpr bool computes_in<A, zero::detail::TypeList<T...>> =
    (std::is_same_v<arithmetic_t<T>, A> || ...);

/// @tparam State an `EngineState`
template <class State>
class DeviceDecision {
  using Opt = typename State::optimizer_type;
  static_assert(std::is_trivially_copyable_v<Opt>,
                "zero: on a device the optimizer's options are read there, so it must be trivially "
                "copyable: numbers and flags, no containers");
  static constexpr bool floats = computes_in<float, typename State::elements>;
  static constexpr bool doubles = computes_in<double, typename State::elements>;
  template <class A, bool needed>
  using StepOf = ParameterStep<typename ScalarsIf<Opt, A, needed>::type>;
  template <class A, bool needed>
  using Steps = DeviceArray<StepOf<A, needed>>;

 public:
  /// To be followed by `rebuild`.
  explicit DeviceDecision(State& state) : state_(state) {}

  /// Prepares for the parameters, of which there are more, and for the state that the host shows.
  void rebuild() {
    const std::size_t count = state_.parameters.size();
    std::pmr::memory_resource* const memory = state_.memory();
    std::vector<ParameterFacts> facts(count);
    for (std::size_t i = 0; i < count; ++i) {
      const zero::detail::ParameterInfo& info = state_.parameters[i];
      facts[i].group = static_cast<std::uint32_t>(info.group);
      facts[i].steps = state_.steps_alone(i) && info.elements != 0 ? 1 : 0;
      state_.for_each_lane([&]<class Lane>(Lane& lane) {
        if (lane.index != info.lane) return;
        facts[i].in_double = std::is_same_v<typename Lane::arithmetic, double> ? 1 : 0;
      });
    }
    facts_ = device_copy(std::span<const ParameterFacts>(facts), memory);
    counts_ = device_copy(std::span<const std::int64_t>(state_.step_counts), memory);
    groups_ = device_copy(std::span<const Opt>(state_.groups), memory);
    uploaded_ = 0;
    float_steps_ = Steps<float, floats>(floats ? count : 0, memory);
    double_steps_ = Steps<double, doubles>(doubles ? count : 0, memory);
    if constexpr (State::steps_tensors) {
      float_steps_on_host_.resize(float_steps_.size());
      double_steps_on_host_.resize(double_steps_.size());
    }
    words_ = message_words(count);
    message_ = DeviceArray<std::uint32_t>(words_, memory);
    messages_ = DeviceArray<std::uint32_t>(words_ * ranks(), memory);
    words_to_send_.assign(words_, 0);
    DeviceState state{};
    state.report.scale = state_.scaling.state();
    state.report.step_number = state_.step_number;
    state.report.attempt = attempts_;
    device_ = device_copy(std::span<const DeviceState>(&state, 1), memory);
  }

  [[nodiscard]] std::size_t bytes() const {
    return facts_.bytes() + counts_.bytes() + groups_.bytes() + float_steps_.bytes() +
           double_steps_.bytes() + message_.bytes() + messages_.bytes() + device_.bytes();
  }

  // In the order of a step.

  /// Options go to the device only when they have changed, or `always`. Not those of a refused
  /// step, which have no fingerprint.
  void upload_options(bool always, StreamView stream) {
    if (state_.options == uploaded_ && !always) return;
    detail::upload(groups_.data(), std::as_bytes(std::span<const Opt>(state_.groups)), stream);
    uploaded_ = state_.options;
  }

  /// Writes this rank's words, but for what it finds.
  /// @param units what it has acquired, and in which order
  void tell(const std::string& refusal, std::uint64_t units, StreamView stream) {
    StepMessage mine{};
    mine.identity = state_.identity;
    mine.options = state_.options;
    mine.units = units;
    mine.refused = refusal.empty() ? 0 : 1;
    const zero::detail::Text text = zero::detail::to_text(refusal);
    static_assert(sizeof mine.refusal == sizeof text);
    std::memcpy(mine.refusal, text.data(), sizeof text);
    std::memcpy(words_to_send_.data(), &mine, sizeof mine);
    std::uint32_t* const bits = words_to_send_.data() + sizeof mine / 4;
    std::fill(bits, words_to_send_.data() + words_, 0U);
    for (std::size_t i = 0; i < state_.present.size(); ++i) {
      if (state_.present[i] != 0) bits[i / 32] |= std::uint32_t{1} << (i % 32);
    }
    constexpr std::size_t found = sizeof mine.digits / 4;  // the device's own
    detail::upload(message_.data() + found, std::as_bytes(std::span(words_to_send_).subspan(found)),
                   stream);
  }

  /// Where kernels add what they find.
  [[nodiscard]] DeviceDigits* digits() { return &own_message()->digits; }

  /// All ranks' words, over the communicator.
  void gather() { state_.comm().all_gather(as_floats(message_), as_floats(messages_)).enqueue(); }

  void decide(StreamView stream) {
    const bool alone = state_.alone();
    detail::decide(
        DecideTask<Opt, floats, doubles>{.messages = alone ? message_.data() : messages_.data(),
                                         .words = words_,
                                         .ranks = static_cast<std::uint32_t>(ranks()),
                                         .rank = static_cast<std::uint32_t>(state_.rank()),
                                         .reduced = state_.settings.gradients == Gradients::reduced,
                                         .of_sums = state_.scaling.of_sums(),
                                         .rule = state_.scaling.rule(),
                                         .groups = groups_.data(),
                                         .facts = facts_.data(),
                                         .counts = counts_.data(),
                                         .parameters = state_.parameters.size(),
                                         .float_steps = float_steps_.data(),
                                         .double_steps = double_steps_.data(),
                                         .state = device_.data(),
                                         .own = own_message(),
                                         .told = told_},
        stream);
  }

  // What kernels go by.

  [[nodiscard]] const StepState* step() const { return &device_.data()->step; }
  /// By parameter.
  template <class A>
  [[nodiscard]] const auto* steps() const {
    if constexpr (std::is_same_v<A, double>) {
      return double_steps_.data();
    } else {
      return float_steps_.data();
    }
  }
  [[nodiscard]] const StepReport* device_report() const { return &device_.data()->report; }

  // What the host learns, once it has waited for the step.

  /// For an optimizer that the host calls.
  void learn() {
    using Memory = typename State::Memory;
    Memory::copy(&device_.data()->step, 1, &step_on_host_);
    if (step_on_host_.skip != 0) return;
    if constexpr (floats) {
      Memory::copy(float_steps_.data(), float_steps_.size(), float_steps_on_host_.data());
    }
    if constexpr (doubles) {
      Memory::copy(double_steps_.data(), double_steps_.size(), double_steps_on_host_.data());
    }
  }

  /// Whether the step is applied.
  [[nodiscard]] bool known_to_apply() const { return step_on_host_.skip == 0; }
  /// By parameter.
  template <class A>
  [[nodiscard]] const auto& known() const {
    if constexpr (std::is_same_v<A, double>) {
      return double_steps_on_host_;
    } else {
      return float_steps_on_host_;
    }
  }

  /// Shows in the engine's state where the device stands.
  void show() {
    using Memory = typename State::Memory;
    StepReport report{};
    Memory::copy(device_report(), 1, &report);
    Memory::copy(counts_.data(), counts_.size(), state_.step_counts.data());
    state_.step_number = report.step_number;
    attempts_ = report.attempt;
    state_.scaling.adopt(report.scale, report.measured != 0);
  }

  [[nodiscard]] Outcome outcome_of(const StepReport& report) {
    if (report.last.problem != StepProblem::none) told_ = std::max(told_, report.last.attempt);
    tell_of(report.last);
    Outcome outcome{report.applied != 0, report.step_number};
    if (report.measured != 0) outcome.gradient_norm = report.scale.norm;
    return outcome;
  }

  /// Throws `UsageError` where a step was not taken and nobody here has been told.
  void require_told(const StepReport& report) {
    const StepTrouble& trouble = report.untold;
    if (trouble.problem == StepProblem::none || trouble.attempt <= told_) return;
    told_ = trouble.attempt;
    try {
      tell_of(trouble);
    } catch (const UsageError& error) {
      throw UsageError("step: this one has been enqueued, but an earlier one, number " +
                       std::to_string(trouble.attempt) +
                       " of those tried, was not taken: " + error.what());
    }
  }

 private:
  void tell_of(const StepTrouble& trouble) const {
    const auto rank = static_cast<int>(trouble.rank);
    switch (trouble.problem) {
      case StepProblem::none: break;
      case StepProblem::another_optimizer:
        throw UsageError("step: rank " + std::to_string(rank) +
                         " stepped another optimizer over this communicator; step the same ones "
                         "in the same order on all ranks. Nothing was stepped");
      case StepProblem::refused:
        zero::detail::require_agreement_to_step(rank, trouble.refusal, 0, 0, false, true);
        break;
      case StepProblem::units:
        throw UsageError(
            "step: rank " + std::to_string(rank) +
            " has acquired or released other units than rank 0, or in another order, so what was "
            "gathered is not what was asked for; acquire and release the same units in the same "
            "order on all ranks. Nothing was stepped, and this optimizer can't go on");
      case StepProblem::options:
        zero::detail::require_agreement_to_step(rank, "", 1, 0, false, true);
        break;
      case StepProblem::presence:
        throw UsageError("step: " + state_.name_of(trouble.rank) +
                         " has a gradient on some ranks only; reduced gradients must be the same "
                         "on all. Nothing was stepped");
    }
  }

  [[nodiscard]] std::size_t ranks() { return static_cast<std::size_t>(state_.world()); }
  [[nodiscard]] StepMessage* own_message() {
    return reinterpret_cast<StepMessage*>(message_.data());
  }
  [[nodiscard]] static std::span<const float> as_floats(const DeviceArray<std::uint32_t>& words) {
    return {reinterpret_cast<const float*>(words.data()), words.size()};
  }
  [[nodiscard]] static std::span<float> as_floats(DeviceArray<std::uint32_t>& words) {
    return {reinterpret_cast<float*>(words.data()), words.size()};
  }

  State& state_;
  DeviceArray<ParameterFacts> facts_{};
  DeviceArray<std::int64_t> counts_{};
  DeviceArray<Opt> groups_{};
  std::uint64_t attempts_ = 0;  ///< steps tried, when the host last looked
  std::uint64_t told_ = 0;      ///< up to which attempt the host knows of trouble
  std::uint64_t uploaded_ = 0;  ///< fingerprint of what is in `groups_`
  Steps<float, floats> float_steps_{};
  Steps<double, doubles> double_steps_{};
  // Of whole-tensor optimizers.
  StepState step_on_host_{};
  std::vector<StepOf<float, floats>> float_steps_on_host_{};
  std::vector<StepOf<double, doubles>> double_steps_on_host_{};
  std::size_t words_ = 0;
  std::vector<std::uint32_t> words_to_send_{};
  DeviceArray<std::uint32_t> message_{};
  DeviceArray<std::uint32_t> messages_{};
  DeviceArray<DeviceState> device_{};
};

}  // namespace zero::cuda::detail
