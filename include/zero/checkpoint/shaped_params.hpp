// SPDX-License-Identifier: Apache-2.0
/// @file
/// A model made of nothing but a checkpoint, which at stage 3 needs memory for its units alone.
#pragma once

#include <cstddef>
#include <string_view>
#include <vector>

#include "zero/checkpoint/info.hpp"
#include "zero/checkpoint/safetensors.hpp"
#include "zero/element.hpp"
#include "zero/error.hpp"
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
/// At stage 3 a rank keeps its own part and what units are gathered, so it never has the model
/// where that has several units (`Attributes::unit`, as the saved model had them). For others,
/// change a copy of what is given: `info.parameters[i].attributes.unit = layer`. Where the
/// checkpoint has several groups, give as many options (`zero::Groups`).
///
/// Throws `UsageError` for a frozen parameter, which needs memory of the caller's: for these make
/// the store yourself, and `rebind` the frozen ones to that memory before the optimizer is made.
template <Element T = float>
[[nodiscard]] std::vector<ShapedParam<T>> shaped_params(const CheckpointInfo& info) {
  std::vector<ShapedParam<T>> store;
  store.reserve(info.parameters.size());
  for (const SavedParameter& p : info.parameters) {
    if (p.attributes.frozen) {
      throw UsageError("shaped_params: the parameter " + detail::in_quotes(p.name) +
                       " is frozen, so its values need memory of yours; make the store "
                       "yourself, of ShapedParams, and rebind the frozen ones to that memory");
    }
    store.emplace_back(p.name, p.shape, p.attributes, p.group);
  }
  return store;
}

/// For `Settings::initial_value`: zeros, since a checkpoint is loaded before values are used.
[[nodiscard]] inline double to_be_loaded(std::string_view, std::size_t) { return 0; }

}  // namespace zero
