// SPDX-License-Identifier: Apache-2.0
/// @file
/// A model made of nothing but a checkpoint, so that at stage 3 it never stands in one memory.
#pragma once

#include <cstddef>
#include <string_view>
#include <vector>

#include "zero/checkpoint/info.hpp"
#include "zero/element.hpp"
#include "zero/shaped_param.hpp"

namespace zero {

/// A store of a checkpoint's parameters, in its order, with its names, shapes, groups and
/// attributes. They have no memory until an optimizer gives them some:
///
/// @code
/// auto store = zero::shaped_params<float>(zero::Checkpoint(path).info());
/// zero::Settings settings;
/// settings.initial_value = zero::to_be_loaded;
/// zero::ZeroSharded optimizer{zero::Adam{}, store, comm, settings, zero::Stage3{}};
/// zero::load(optimizer, path);
/// @endcode
///
/// Frozen parameters are refused at construction, as they need memory of the caller's. Where the
/// checkpoint has several groups, give as many options (`zero::Groups`).
template <Element T = float>
[[nodiscard]] std::vector<ShapedParam<T>> shaped_params(const CheckpointInfo& info) {
  std::vector<ShapedParam<T>> store;
  store.reserve(info.parameters.size());
  for (const SavedParameter& p : info.parameters) {
    store.emplace_back(p.name, p.shape, p.attributes, p.group);
  }
  return store;
}

/// For `Settings::initial_value`: zeros, since a checkpoint is loaded before values are used.
[[nodiscard]] inline double to_be_loaded(std::string_view, std::size_t) { return 0; }

}  // namespace zero
