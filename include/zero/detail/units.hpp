// SPDX-License-Identifier: Apache-2.0
/// @file
/// Which buckets a unit consists of.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <limits>
#include <span>
#include <vector>

#include "zero/fragment.hpp"
#include "zero/layout.hpp"
#include "zero/parameter.hpp"
#include "zero/stage.hpp"

namespace zero::detail {

/// Buckets of one lane that belong together.
struct UnitBuckets {
  std::size_t lane;
  Interval buckets;
};

template <class... T>
[[nodiscard]] constexpr std::array<std::size_t, sizeof...(T)> element_bytes(TypeList<T...>) {
  return {sizeof(T)...};
}

/// A run of buckets, in each lane, that are gathered and let go together.
struct Unit {
  int id = 0;             ///< `Attributes::unit`
  std::size_t bytes = 0;  ///< of its values, padding included
  bool resident = false;  ///< whether it stays whole on every rank
  std::vector<UnitBuckets> parts{};
};

/// Up to which size units stay: all of them where values aren't sharded, or there is nobody else.
template <class Stage>
[[nodiscard]] std::size_t resident_limit(const Stage& stage, bool alone) {
  if (!Stage::shards_values || alone) return std::numeric_limits<std::size_t>::max();
  return resident_bytes(stage);
}

/// All units, by rising id.
/// @param unit_of the unit of parameter i
/// @param element_bytes by lane
/// @param resident_bytes up to which size a unit stays
template <class Partition, class F>
[[nodiscard]] std::vector<Unit> units_of(const Layout<Partition>& layout, const F& unit_of,
                                         std::span<const std::size_t> element_bytes,
                                         std::size_t resident_bytes) {
  std::vector<Unit> units;
  const auto unit = [&](int id) -> Unit& {
    const auto at = std::lower_bound(units.begin(), units.end(), id,
                                     [](const Unit& u, int wanted) { return u.id < wanted; });
    if (at != units.end() && at->id == id) return *at;
    return *units.insert(at, Unit{.id = id});
  };
  for (std::size_t i = 0; i < layout.parameters(); ++i) (void)unit(unit_of(i));
  for (std::size_t lane = 0; lane < layout.lanes(); ++lane) {
    for (std::size_t b = 0; b < layout.buckets(lane); ++b) {
      const Interval whole = layout.bucket(lane, b);
      const auto fragments = layout.fragments(lane, whole);
      if (fragments.begin() == fragments.end()) continue;  // moved cuts have left it empty
      Unit& of = unit(unit_of((*fragments.begin()).parameter));
      of.bytes += whole.size() * element_bytes[lane];
      if (!of.parts.empty() && of.parts.back().lane == lane && of.parts.back().buckets.end == b) {
        ++of.parts.back().buckets.end;
      } else {
        of.parts.push_back({lane, {b, b + 1}});
      }
    }
  }
  for (Unit& u : units) u.resident = u.bytes <= resident_bytes;
  return units;
}

}  // namespace zero::detail
