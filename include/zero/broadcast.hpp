// SPDX-License-Identifier: Apache-2.0
/// @file
/// Makes all ranks' parameters those of one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <ranges>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>

#include "zero/communicator.hpp"
#include "zero/detail/agreement.hpp"
#include "zero/detail/hash.hpp"
#include "zero/detail/inspect.hpp"
#include "zero/parameter.hpp"

namespace zero {

/// Collective: every parameter's values become those of rank `root`, frozen ones' too. Optimizers
/// ask for equal values; this makes them so where ranks initialised theirs by chance. To be called
/// before the optimizer is made. With groups of replicas `root` counts in all ranks.
///
/// Throws `UsageError` on all ranks, and changes nothing, where their stores differ in names,
/// shapes, element types or ties; and what the communicator throws.
template <class Store, class Comm>
  requires ParamStore<std::remove_reference_t<Store>>
void broadcast_values(Store&& store, Comm& comm, int root = 0) {
  using Param = parameter_t<std::remove_reference_t<Store>>;
  static_assert(memory_space_of<Param> == MemorySpace::host,
                "zero: broadcast_values takes parameters in host memory");
  auto& everyone = detail::all_ranks_of(comm);
  const std::size_t count = std::ranges::size(store);
  detail::Hash shapes;
  for (std::size_t i = 0; i < count; ++i) {
    auto&& parameter = detail::parameter_at(store, i);
    const std::string name{std::string_view(parameter.name())};
    shapes.add(name.data(), name.size());
    const auto shape = parameter.shape();
    shapes.add(std::ranges::size(shape));
    for (const auto extent : shape) shapes.add(static_cast<std::uint64_t>(extent));
    // Ties aren't sent, so they must be the same everywhere.
    const auto alias = attributes_of(parameter).alias;
    shapes.add(alias ? *alias + 1 : 0);
    detail::visit_span(parameter.values(), [&](auto values) {
      using T = typename decltype(values)::value_type;
      shapes.add(static_cast<std::uint64_t>(element_traits<T>::type));
      shapes.add(values.size());
    });
  }
  detail::require_alike(everyone, shapes.value(),
                        "broadcast_values: the parameters' names, shapes, types or ties");
  for (std::size_t i = 0; i < count; ++i) {
    auto&& parameter = detail::parameter_at(store, i);
    if (attributes_of(parameter).alias) continue;  // the same memory, or moved to it
    detail::visit_span(parameter.values(),
                       [&](auto values) { everyone.broadcast(values, root).wait(); });
  }
}

}  // namespace zero
