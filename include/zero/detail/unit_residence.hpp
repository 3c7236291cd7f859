// SPDX-License-Identifier: Apache-2.0
/// @file
/// Which units' values are on this rank.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "zero/detail/agreement.hpp"
#include "zero/detail/units.hpp"
#include "zero/error.hpp"

namespace zero::detail {

/// Counts who holds a unit, and asks for units ahead of time: after a pair of units that were
/// acquired one after the other comes what came after it the last time. A loop over layers, there
/// and back, is predicted from its second round on; whatever is predicted, only time depends on it.
/// All ranks acquire alike, so all predict alike.
class UnitResidence {
 public:
  /// @param ahead how many units to ask for ahead
  void rebuild(std::vector<Unit> units, std::size_t ahead) {
    units_.clear();
    for (Unit& unit : units) units_.push_back({.unit = std::move(unit)});
    ahead_ = ahead;
    followers_.clear();
    last_.fill(-1);
  }

  /// Of a unit that exists.
  [[nodiscard]] std::size_t find(int id) const {
    const auto at = std::lower_bound(units_.begin(), units_.end(), id,
                                     [](const Held& u, int wanted) { return u.unit.id < wanted; });
    return static_cast<std::size_t>(at - units_.begin());
  }

  /// `fetch(unit)` starts to gather a unit and returns what `wait` is to be given.
  template <class Fetch, class Wait>
  void acquire(int id, const Fetch& fetch, const Wait& wait) {
    const std::size_t u = find(id);
    Held& held = units_[u];
    if (held.holds == 0 && comes_and_goes(u)) {
      if (!held.arrival) held.arrival = fetch(held.unit);
      note(static_cast<std::ptrdiff_t>(u));
      wait(*held.arrival);
      ++held.holds;
      fetch_ahead(fetch);
      return;
    }
    if (held.arrival) wait(*held.arrival);  // whoever holds it too, elsewhere, may have to
    ++held.holds;
  }

  /// `let_go(unit)` frees its memory.
  template <class LetGo, class Fetch>
  void release(int id, const LetGo& let_go, const Fetch& fetch) {
    const std::size_t u = find(id);
    Held& held = units_[u];
    if (held.holds == 0) {
      throw AgreedRefusal("release: unit " + std::to_string(id) +
                          " is not acquired; release a unit as often as it was acquired");
    }
    if (--held.holds > 0 || !comes_and_goes(u)) return;
    let_go(held.unit);
    held.arrival.reset();
    // The way back begins with the unit that the way there ended with.
    if (ahead_ == 0 || last_[1] != static_cast<std::ptrdiff_t>(u)) return;
    if (follower(last_) == u) held.arrival = fetch(held.unit);
  }

  /// Whether a unit's values are in their place: it is held, or stays.
  [[nodiscard]] bool is_there(int id) const {
    const std::size_t u = find(id);
    return units_[u].holds > 0 || !comes_and_goes(u);
  }

  /// Throws `UsageError` where a unit is still held.
  void require_none_held(const char* verb) const {
    for (const Held& held : units_) {
      if (held.holds == 0) continue;
      throw UsageError(std::string(verb) + ": unit " + std::to_string(held.unit.id) +
                       " is still acquired; release every unit first, since its values change");
    }
  }

  [[nodiscard]] bool any_held() const noexcept {
    return std::any_of(units_.begin(), units_.end(), [](const Held& u) { return u.holds > 0; });
  }

  /// What was gathered for nothing. Everything must have arrived.
  template <class LetGo>
  void drop_what_is_ahead(const LetGo& let_go) {
    for (Held& held : units_) {
      if (held.holds > 0 || !held.arrival) continue;
      let_go(held.unit);
      held.arrival.reset();
    }
  }

  /// A step is no part of a loop over units: what is asked for ahead of it would be outdated.
  void end_round() noexcept { last_.fill(-1); }

 private:
  struct Held {
    Unit unit{};
    std::size_t holds = 0;
    std::optional<std::uint64_t> arrival{};  ///< of what was asked for
  };

  [[nodiscard]] bool comes_and_goes(std::size_t u) const {
    return !units_[u].unit.resident && !units_[u].unit.parts.empty();
  }

  void note(std::ptrdiff_t u) {
    followers_[{last_[0], last_[1]}] = u;
    last_ = {last_[1], u};
  }
  [[nodiscard]] std::optional<std::size_t> follower(std::array<std::ptrdiff_t, 2> pair) const {
    const auto found = followers_.find({pair[0], pair[1]});
    if (found == followers_.end()) return std::nullopt;
    return static_cast<std::size_t>(found->second);
  }

  template <class Fetch>
  void fetch_ahead(const Fetch& fetch) {
    std::array<std::ptrdiff_t, 2> pair = last_;
    // After so many what follows is a circle, and has been asked for.
    const std::size_t most = std::min(ahead_, followers_.size());
    for (std::size_t k = 0; k < most; ++k) {
      const auto next = follower(pair);
      if (!next) return;
      Held& held = units_[*next];
      if (held.holds > 0) return;  // its turn comes when it has been released
      if (!held.arrival) held.arrival = fetch(held.unit);
      pair = {pair[1], static_cast<std::ptrdiff_t>(*next)};
    }
  }

  std::vector<Held> units_{};
  std::size_t ahead_ = 1;
  std::map<std::pair<std::ptrdiff_t, std::ptrdiff_t>, std::ptrdiff_t> followers_{};
  std::array<std::ptrdiff_t, 2> last_{-1, -1};  ///< acquired: the one before, and this
};

}  // namespace zero::detail
