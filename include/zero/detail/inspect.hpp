// SPDX-License-Identifier: Apache-2.0
/// @file
/// Reads a store once: what the layout and the ranks' agreement need to know of its parameters.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <ranges>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "zero/detail/agreement.hpp"
#include "zero/detail/hash.hpp"
#include "zero/detail/space.hpp"
#include "zero/detail/store.hpp"
#include "zero/error.hpp"
#include "zero/layout.hpp"
#include "zero/optimizer.hpp"
#include "zero/parameter.hpp"

namespace zero::detail {

/// What the engine keeps of a parameter.
struct ParameterInfo {
  std::string name;
  std::size_t group = 0;
  std::size_t lane = 0;
  std::size_t elements = 0;
  std::size_t element_bytes = 0;
  std::vector<std::size_t> shape;
  Attributes attributes{};
  bool frozen = false;
  std::size_t leader = 0;  ///< itself, or the parameter that it is tied to
  std::size_t ties = 1;    ///< of a leader: how many parameters share its place, itself included
};

/// Whether parameter i has a place of its own: not frozen, not tied to another.
[[nodiscard]] inline bool stands_alone(const std::vector<ParameterInfo>& parameters,
                                       std::size_t i) {
  return !parameters[i].frozen && parameters[i].leader == i;
}

struct Inspection {
  const char* verb = "construction";  ///< on whose behalf
  std::vector<ParameterInfo> parameters{};
  std::vector<ParameterDigest> digests{};
  std::vector<LayoutParameter> places{};  ///< its names point into `parameters`
};

[[noreturn]] inline void refuse_parameter(const Inspection& seen, std::size_t index,
                                          const std::string& what) {
  throw UsageError(std::string(seen.verb) + ": " + quoted(index, seen.parameters[index].name) +
                   " " + what);
}

/// The i-th parameter of a store.
template <ParamStore S>
decltype(auto) parameter_at(S& store, std::size_t i) {
  return std::ranges::begin(store)[static_cast<std::ranges::range_difference_t<S>>(i)];
}

/// Refuses ties without shared memory. Only where values stay with the caller; elsewhere tied
/// parameters are moved to one place. The layout must have accepted the ties.
template <ParamStore S>
void refuse_separate_ties(S& store, const Inspection& seen) {
  const std::vector<ParameterInfo>& parameters = seen.parameters;
  const auto memory = [&](std::size_t i) {
    return detail::visit_span(detail::parameter_at(store, i).values(),
                              [](auto values) { return static_cast<const void*>(values.data()); });
  };
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const std::size_t leader = parameters[i].leader;
    if (leader == i || parameters[i].elements == 0 || memory(i) == memory(leader)) continue;
    refuse_parameter(seen, i,
                     "is tied to " + quoted(leader, parameters[leader].name) +
                         " but shows other memory, which nobody would step; let both show the "
                         "same, or use a view that moves them");
  }
}

/// Refuses parameters whose values share memory without being tied.
inline void refuse_overlaps(const Inspection& seen,
                            std::vector<std::array<std::uintptr_t, 3>>& begin_end_index) {
  std::sort(begin_end_index.begin(), begin_end_index.end());
  for (std::size_t k = 1; k < begin_end_index.size(); ++k) {
    if (begin_end_index[k][0] >= begin_end_index[k - 1][1]) continue;
    const auto [early, late] = std::minmax(begin_end_index[k][2], begin_end_index[k - 1][2]);
    refuse_parameter(seen, late,
                     "overlaps " + quoted(early, seen.parameters[early].name) +
                         " in memory; tie them with Attributes{.alias = " + std::to_string(early) +
                         "}");
  }
}

/// Counts ties. Throws `UsageError` naming a parameter that is tied to one of another group.
inline void require_ties_in_group(Inspection& seen) {
  for (std::size_t i = 0; i < seen.parameters.size(); ++i) {
    const std::size_t leader = seen.parameters[i].leader;
    if (leader >= i) continue;  // none, or the layout refuses it
    ++seen.parameters[leader].ties;
    if (seen.parameters[leader].group != seen.parameters[i].group) {
      refuse_parameter(seen, i,
                       "is tied to " + quoted(leader, seen.parameters[leader].name) +
                           " of another group; put both into one");
    }
  }
}

/// Throws `UsageError` naming the parameter for: an empty store, a group that doesn't exist, a
/// shape that doesn't fit the values, null values or such of another memory space, names that occur
/// twice, memory shared without a tie. Fills `out` as it goes, so that names are known to whoever
/// reports. Values before parameter `first` are not hashed.
/// @param may_be_empty whether parameters may have a shape, but no values yet
/// @param moves whether values before `first` have no place of their own, so that one parameter's
///   may be where another's were
template <ParamStore S>
void inspect(S& store, std::size_t groups, bool hash_values, std::size_t first, Inspection& out,
             bool may_be_empty = false, bool moves = false) {
  using Elements = store_elements<S>;
  const std::size_t count = std::ranges::size(store);
  if (count == 0) {
    throw UsageError(std::string(out.verb) +
                     ": the store is empty; give it at least one parameter");
  }
  out.parameters.resize(count);
  out.digests.resize(count);
  out.places.resize(count);
  std::vector<std::array<std::uintptr_t, 3>> memory;
  for (std::size_t i = 0; i < count; ++i) {
    auto&& parameter = detail::parameter_at(store, i);
    const Attributes attributes = zero::attributes_of(parameter);
    ParameterInfo& info = out.parameters[i];
    info.name = std::string(std::string_view(parameter.name()));
    info.group = zero::group_of(parameter);
    info.attributes = attributes;
    info.frozen = attributes.frozen;
    info.leader = attributes.alias.value_or(i);
    if (info.group >= groups) {
      refuse_parameter(out, i,
                       "is in group " + std::to_string(info.group) + ", but there are only " +
                           std::to_string(groups) +
                           (first == 0 ? "; give zero::Groups one set of options for each group"
                                       : ", that of the added ones included"));
    }
    Hash description;
    description.add(info.name.data(), info.name.size());
    std::size_t shaped = 1;
    const auto& shape = parameter.shape();  // kept: it may be a container returned by value
    for (const std::size_t extent : std::span<const std::size_t>(shape)) {
      if (extent != 0 && shaped > std::numeric_limits<std::size_t>::max() / extent) {
        refuse_parameter(out, i, "has a shape whose element count overflows");
      }
      shaped *= extent;
      info.shape.push_back(extent);
      description.add(extent);
    }
    detail::visit_span(parameter.values(), [&](auto values) {
      info.lane = lane_of<typename decltype(values)::value_type, Elements>::value;
      info.elements = shaped;
      info.element_bytes = sizeof(typename decltype(values)::value_type);
      if (values.empty() && may_be_empty && !info.frozen) return;
      if (values.empty() && shaped != 0) {
        refuse_parameter(out, i,
                         "has a shape of " + std::to_string(shaped) +
                             " elements but no values; give it memory, or let "
                             "Settings::initial_value make its values, which takes a view that "
                             "moves them (zero::ParamView)");
      }
      if (shaped != values.size()) {
        refuse_parameter(out, i,
                         "has " + std::to_string(values.size()) + " values, but its shape holds " +
                             std::to_string(shaped));
      }
      if (values.data() == nullptr && !values.empty()) {
        refuse_parameter(out, i, "has null values");
      }
      if (!values.empty()) {
        const std::string wrong = Space<memory_space_of<parameter_t<S>>>::unusable(values.data());
        if (!wrong.empty()) refuse_parameter(out, i, "has values " + wrong);
      }
      if (info.leader == i && !values.empty() && !(moves && i < first)) {
        const auto begin = reinterpret_cast<std::uintptr_t>(values.data());
        memory.push_back({begin, begin + values.size_bytes(), i});
      }
      if (hash_values && info.leader == i && i >= first) {
        Hash hash;
        using T = typename decltype(values)::value_type;
        Space<memory_space_of<parameter_t<S>>>::read(static_cast<const T*>(values.data()),
                                                     values.size(),
                                                     [&](std::size_t, std::span<const T> part) {
                                                       hash.add(part.data(), part.size_bytes());
                                                     });
        out.digests[i].values = hash.value();
      }
    });
    for (const std::size_t word :
         {info.group, info.lane, info.leader, attributes.quantum,
          static_cast<std::size_t>(attributes.unit), std::size_t{attributes.frozen},
          std::size_t{attributes.unsplittable}}) {
      description.add(word);
    }
    out.digests[i].elements = info.elements;
    out.digests[i].description = description.value();
    out.places[i] = {info.elements, info.lane, attributes, info.name, info.group};
  }
  require_ties_in_group(out);
  std::vector<std::size_t> by_name(count);
  for (std::size_t i = 0; i < count; ++i) by_name[i] = i;
  const auto name = [&](std::size_t i) -> const std::string& { return out.parameters[i].name; };
  std::sort(by_name.begin(), by_name.end(), [&](std::size_t a, std::size_t b) {
    return name(a) != name(b) ? name(a) < name(b) : a < b;
  });
  for (std::size_t k = 1; k < count; ++k) {
    if (name(by_name[k]) != name(by_name[k - 1])) continue;
    refuse_parameter(out, by_name[k],
                     "has the name of " + quoted(by_name[k - 1], name(by_name[k - 1])) +
                         "; names must be unique");
  }
  refuse_overlaps(out, memory);
}

/// Throws `UsageError` naming the first tensor, from `first` on, that its group's options can't
/// step.
template <class Opt>
void require_steppable(const std::vector<Opt>& groups, std::size_t first, const Inspection& seen) {
  for (std::size_t i = first; i < seen.parameters.size(); ++i) {
    const ParameterInfo& info = seen.parameters[i];
    if (!stands_alone(seen.parameters, i)) continue;
    try {
      zero::validate(groups[info.group], std::span<const std::size_t>(info.shape));
    } catch (const UsageError& error) {
      refuse_parameter(seen, i, std::string("can't be stepped: ") + error.what());
    }
  }
}

}  // namespace zero::detail
