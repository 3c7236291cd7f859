// SPDX-License-Identifier: Apache-2.0
/// @file
/// Tells optimizers with different options apart by what they do.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include "zero/detail/hash.hpp"
#include "zero/error.hpp"
#include "zero/optimizer.hpp"

namespace zero::detail {

/// What an optimizer makes of a few numbers, large, tiny and zero, in its first steps and in step
/// `t`: ranks whose options differ differ in it. Of one that steps on a device, the options
/// themselves.
template <class Opt>
class Fingerprint {
 public:
  std::uint64_t operator()(const Opt& optimizer, std::int64_t t) {
    Hash hash;
    if constexpr (!Optimizer<Opt, double> && !Optimizer<Opt, float>) {  // of a device alone
      for (const double option : optimizer.options()) hash.add(&option, sizeof option);
      return hash.value();
    } else {
      add_effects(hash, optimizer, t);
      return hash.value();
    }
  }

 private:
  static constexpr bool in_double = Optimizer<Opt, double>;
  using Real = std::conditional_t<in_double, double, float>;

  void add_effects(Hash& hash, const Opt& optimizer, std::int64_t t) {
    for (const Real scale : {Real(1), Real(1e-9), Real(0)}) {
      std::array<Real, 4> values{Real(0.7), Real(-0.3), Real(0.2), Real(0.9)};
      std::array<std::array<Real, 4>, slot_count<Opt>> slots{};
      const auto update = [&](Real gradient, std::int64_t step) {
        const std::array<Real, 4> gradients{gradient * scale, gradient * gradient * scale,
                                            -gradient * scale, Real(0.1) * scale};
        step_once(optimizer, values, gradients, slots, step);
        hash.add(&values, sizeof values);
      };
      update(Real(0.3), 1);
      update(Real(-0.2), 2);
      update(Real(0.001), t);
      for (const auto& slot : slots) hash.add(&slot, sizeof slot);
    }
  }

  template <class Slots>
  void step_once(const Opt& optimizer, std::array<Real, 4>& values,
                 const std::array<Real, 4>& gradients, Slots& slots, std::int64_t t) {
    if constexpr (UpdateRule<Opt, Real>) {
      const auto scalars = optimizer.template scalars<Real>(t);
      for (std::size_t e = 0; e < values.size(); ++e) {
        [&]<std::size_t... I>(std::index_sequence<I...>) {
          Opt::update(values[e], gradients[e], slots[I][e]..., scalars);
        }(slot_indices<Opt>{});
      }
    } else {
      // A shape that the optimizer takes, if it is one of these.
      static constexpr std::array<std::size_t, 2> matrix{2, 2};
      static constexpr std::array<std::size_t, 1> vector{4};
      for (const std::span<const std::size_t> shape :
           {std::span<const std::size_t>(matrix), std::span<const std::size_t>(vector)}) {
        try {
          zero::validate(optimizer, shape);
        } catch (const UsageError&) {
          continue;
        }
        const std::size_t needed = zero::workspace_elements(optimizer, shape);
        if (needed > workspace_.size()) workspace_.resize(needed);
        std::array<std::span<Real>, slot_count<Opt>> state{};
        for (std::size_t s = 0; s < zero::used_slots(optimizer); ++s) state[s] = slots[s];
        optimizer.update(TensorRef<Real>{shape, values, gradients, workspace_}, state, t);
        return;
      }
    }
  }

  std::vector<Real> workspace_{};  ///< grows in the first step only
};

}  // namespace zero::detail
