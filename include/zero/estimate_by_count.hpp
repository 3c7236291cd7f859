// SPDX-License-Identifier: Apache-2.0
/// @file
/// Memory and traffic of one rank from nothing but a parameter count: the formulas of ZeRO
/// (Rajbhandari et al., arXiv:1910.02054), sections 5 (memory) and 7 (traffic).
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <optional>
#include <string>

#include "zero/detail/storage.hpp"
#include "zero/element.hpp"
#include "zero/error.hpp"
#include "zero/optimizer.hpp"
#include "zero/precision.hpp"
#include "zero/stage.hpp"

namespace zero {

/// Bytes that one element of a parameter costs. `element_bytes` says them of types; where there are
/// none, as on a command line, write them down: mixed precision Adam is {2, 2, 4, 8, 2}.
struct ElementBytes {
  std::size_t parameter = 4;
  std::size_t gradient = 4;
  std::size_t master = 0;  ///< of the copy that is stepped, where there is one
  std::size_t state = 8;   ///< of all slots together
  std::size_t wire = 4;    ///< of a gradient on its way
  /// What stage 1 shards; ZeRO's K.
  [[nodiscard]] constexpr std::size_t optimizer() const noexcept { return master + state; }
  [[nodiscard]] constexpr std::size_t total() const noexcept {
    return parameter + gradient + optimizer();
  }
};

/// What an element of type `T` costs under a precision with these options, which decide how many
/// slots are used (amsgrad's third, SGD's momentum).
template <Element T = float, class Precision = MixedPrecision, NamesSlots Opt>
[[nodiscard]] constexpr ElementBytes element_bytes(const Opt& options) {
  static_assert(PrecisionPolicy<Precision, T>,
                "zero: the precision must model zero::PrecisionPolicy for this element type; see "
                "zero/precision.hpp");
  using S = detail::Storage<T, Precision>;
  return {sizeof(T), sizeof(T), S::has_master ? sizeof(typename S::master) : 0,
          zero::used_slots(options) * sizeof(typename S::slot),
          sizeof(typename Precision::template Wire<T>)};
}

/// A stage as a number, 0 (replicated) to 3, or as a policy. Throws `UsageError` for other numbers.
class StageNumber {
 public:
  constexpr StageNumber(int number) : number_(number) {  // implicit: both are written as they are
    if (number < 0 || number > 3) {
      throw UsageError("estimate: there is no stage " + std::to_string(number) +
                       "; there are 0 (replicated), 1, 2 and 3");
    }
  }
  template <class S>
    requires(!std::same_as<S, StageNumber>) && StagePolicy<S>  // or it would ask about its own copy
  constexpr StageNumber(S)                                     // implicit
      : number_(int{S::shards_state} + int{S::shards_gradients} + int{S::shards_values}) {}
  [[nodiscard]] constexpr int value() const noexcept { return number_; }

 private:
  int number_;
};

/// What a rank sends in one step, and receives as much of, by algorithms that send nothing twice
/// (rings): of each reduce-scatter and all-gather all but its own part, (K-1)/K of the elements.
struct Traffic {
  std::uint64_t all_reduce = 0;      ///< elements; replicated: a reduce-scatter and an all-gather
  std::uint64_t reduce_scatter = 0;  ///< elements of gradients
  std::uint64_t all_gather = 0;      ///< elements of parameters; stage 3: in forward and backward
  std::uint64_t bytes = 0;           ///< of all of them
  [[nodiscard]] constexpr std::uint64_t elements() const noexcept {
    return all_reduce + reduce_scatter + all_gather;
  }
};

/// Bytes of one rank, and what it sends. Of what is sharded the largest part, ceil(n / K) elements.
/// No activations, no buffers, no padding: the exact figure for a layout gives `ExactEstimate`.
struct Estimate {
  std::uint64_t parameters = 0;
  std::uint64_t gradients = 0;
  std::uint64_t master = 0;  ///< copies that are stepped
  std::uint64_t state = 0;   ///< the optimizer's slots
  Traffic traffic{};
  [[nodiscard]] constexpr std::uint64_t total() const noexcept {
    return parameters + gradients + master + state;
  }
};

/// Of a model with `parameters` elements, all of one kind, on each of `world` ranks. Stage 1 shards
/// masters and slots, 2 gradients too, 3 parameters too; stages 1 and 2 send what an all-reduce
/// sends, 3 half as much again. Throws `UsageError` for a world below 1, for an element of more
/// than 1024 bytes, and where bytes overflow.
[[nodiscard]] inline Estimate estimate(const ElementBytes& bytes, std::uint64_t parameters,
                                       int world, StageNumber stage) {
  if (world < 1) {
    throw UsageError("estimate: there are " + std::to_string(world) +
                     " ranks, but there must be at least 1");
  }
  for (const std::size_t of_element :
       {bytes.parameter, bytes.gradient, bytes.master, bytes.state, bytes.wire}) {
    if (of_element > 1024) {
      throw UsageError("estimate: an element of " + std::to_string(of_element) +
                       " bytes is no element; give at most 1024");
    }
  }
  if (parameters >
      std::numeric_limits<std::uint64_t>::max() / (2 * bytes.total() + 4 * bytes.wire + 1)) {
    throw UsageError("estimate: the bytes of " + std::to_string(parameters) +
                     " parameters overflow 64 bits");
  }
  const auto ranks = static_cast<std::uint64_t>(world);
  const std::uint64_t part = parameters / ranks + (parameters % ranks != 0 ? 1 : 0);
  const auto kept = [&](int sharded_from) {
    return stage.value() >= sharded_from ? part : parameters;
  };
  Estimate of_rank{kept(3) * bytes.parameter, kept(2) * bytes.gradient, kept(1) * bytes.master,
                   kept(1) * bytes.state};
  const std::uint64_t once = parameters - parameters / ranks;
  Traffic& traffic = of_rank.traffic;
  if (stage.value() == 0) {
    traffic.all_reduce = 2 * once;
  } else {
    traffic.reduce_scatter = once;
    traffic.all_gather = stage.value() == 3 ? 2 * once : once;
  }
  traffic.bytes = (traffic.all_reduce + traffic.reduce_scatter) * bytes.wire +
                  traffic.all_gather * bytes.parameter;
  return of_rank;
}

/// The same by types: `estimate<zero::Adam>(count, 8, zero::Stage1{})`,
/// `estimate<zero::Sgd, zero::bfloat16>(count, 8, 3, {.momentum = .9})`.
template <NamesSlots Opt, Element T = float, class Precision = MixedPrecision>
[[nodiscard]] Estimate estimate(std::uint64_t parameters, int world, StageNumber stage,
                                const Opt& options = {}) {
  return estimate(element_bytes<T, Precision>(options), parameters, world, stage);
}

namespace detail {

/// "31.4 GB": three digits, in powers of 1000 as the papers count.
[[nodiscard]] inline std::string bytes_text(std::uint64_t bytes) {
  constexpr const char* units[] = {"bytes", "kB", "MB", "GB", "TB", "PB", "EB"};
  auto number = static_cast<double>(bytes);
  int unit = 0;
  for (; number >= 999.5 && unit < 6; ++unit) number /= 1000;
  char text[32];
  std::snprintf(text, sizeof text, "%.3g %s", number, units[unit]);
  return text;
}

}  // namespace detail

/// Whether sharding pays, and how much of it, in a few sentences.
/// @param memory bytes that a rank has for what is estimated; activations need more beside them
[[nodiscard]] inline std::string advice(const ElementBytes& bytes, std::uint64_t parameters,
                                        int world,
                                        std::optional<std::uint64_t> memory = std::nullopt) {
  using detail::bytes_text;
  const auto total = [&](int stage) { return estimate(bytes, parameters, world, stage).total(); };
  const std::uint64_t whole = total(0);
  const std::string replicated = "replicated it is " + bytes_text(whole) + " a rank";
  const auto beyond = [](int stage) {
    return stage > 1 ? " (which this version of zero does not shard yet)" : "";
  };
  if (world == 1) {
    std::string text = "Don't shard: one rank has nobody to shard over; " + replicated;
    if (memory && whole > *memory) text += ", more than the " + bytes_text(*memory) + " there are";
    return text + ".";
  }
  if (memory && whole > *memory) {
    for (int stage = 1; stage <= 3; ++stage) {
      if (total(stage) > *memory) continue;
      return "Shard: " + replicated + ", more than the " + bytes_text(*memory) +
             " there are; stage " + std::to_string(stage) + beyond(stage) +
             " is the first that fits, with " + bytes_text(total(stage)) + ".";
    }
    const std::uint64_t part = *memory / bytes.total();  // the elements that fit
    const std::uint64_t ranks = part == 0 ? 0 : (parameters + part - 1) / part;
    return "No stage fits into " + bytes_text(*memory) + ": even stage 3 keeps " +
           bytes_text(total(3)) + " a rank" +
           (ranks == 0 ? "" : "; it takes " + std::to_string(ranks) + " ranks") + ".";
  }
  if (memory && whole <= *memory / 4) {
    return "Don't shard: " + replicated + ", and there are " + bytes_text(*memory) +
           "; sharding would save what nobody needs.";
  }
  if (!memory && whole < 1'000'000'000) {
    return "Hardly worth it: the model is small, " + replicated + "; stage 1 would save " +
           bytes_text(whole - total(1)) + " of that.";
  }
  const std::uint64_t saved = whole - total(1);
  if (saved == 0) {
    return "Stage 1 saves nothing, since this optimizer keeps no state; " + replicated +
           ", with stage 3" + beyond(3) + " " + bytes_text(total(3)) + ".";
  }
  if (saved < whole / 3) {
    return "It saves a little: " + replicated + ", and stage 1 takes " + bytes_text(saved) +
           " off it for the same traffic; more ranks or a larger optimizer state would gain more.";
  }
  return "Shard: " + replicated + ", and stage 1 takes " + bytes_text(saved) +
         " off it for the same traffic.";
}

}  // namespace zero
