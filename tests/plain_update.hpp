// SPDX-License-Identifier: Apache-2.0
// The update loop over plain arrays that are stored as they are computed in.
#pragma once

#include <array>
#include <cstddef>
#include <zero/detail/storage.hpp>
#include <zero/detail/update_loop.hpp>
#include <zero/precision.hpp>

namespace plain {

/// All start at the same element.
template <class T, std::size_t slots>
struct Arrays {
  T* values;
  const T* gradient;
  std::array<T*, slots> state;  ///< null beyond the used slots
};

template <class Rule, class Scalars, class T, std::size_t slots>
void update(const Rule& rule, const Scalars& scalars, const Arrays<T, slots>& arrays,
            std::size_t count) {
  const zero::detail::UpdateArrays<zero::detail::Storage<T, zero::NativePrecision>, slots> all{
      arrays.values, nullptr, arrays.state};
  zero::detail::update_elements(rule, scalars, all, arrays.gradient, count);
}

}  // namespace plain
