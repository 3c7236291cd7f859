// SPDX-License-Identifier: Apache-2.0
/// @file
/// How ranks step that can read each other's memory.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <optional>
#include <span>
#include <string>
#include <tuple>

#include "zero/detail/agreement.hpp"
#include "zero/detail/denormals.hpp"
#include "zero/detail/findings.hpp"
#include "zero/detail/join_scope.hpp"
#include "zero/detail/lane.hpp"
#include "zero/detail/lane_room.hpp"
#include "zero/detail/streamed_copy.hpp"
#include "zero/error.hpp"
#include "zero/layout.hpp"
#include "zero/observer.hpp"
#include "zero/settings.hpp"

namespace zero::detail {

/// Nothing is sent and nothing staged: ranks meet, and read their peers' gradients and values.
template <class State>
class SharedMemoryStep {
 public:
  explicit SharedMemoryStep(State& state) : state_(state) {}

  /// A place has its whole gradient: nothing to do before all ranks meet.
  void complete(std::size_t) noexcept {}
  void forget() noexcept {}
  void give_up(const std::string&) noexcept {}
  void drain() noexcept {}
  void settle() noexcept {}
  void rebuild() noexcept {}
  [[nodiscard]] std::size_t staging_bytes() const noexcept { return 0; }

  /// Every rank reads its peers' gradients, sums and updates its own slices in one pass, and copies
  /// the others' slices from where they were updated. Where sums must be looked at first, it is two
  /// passes with what all ranks found between them.
  StepEnd step(const std::string& refusal, bool& updating) {
    state_.step_refusal = refusal;
    auto entered = state_.comm().meet("step", shown());
    const std::span<const void* const> published = entered.peers();
    std::optional<StepEnd> ended;
    try {
      ended = agree(published);
    } catch (const AgreedRefusal&) {
      entered.leave();
      entered.wait();
      throw;
    }
    if (ended) {
      entered.leave();
      entered.wait();
      return *ended;
    }
    const bool local = state_.settings.gradients == Gradients::local;
    const bool looks = state_.scaling.looks_first();
    const bool sums_first =
        local && (keeps_sums(state_.settings, looks) || !State::Stage::shards_state);
    if (sums_first) {
      sum_own_slices(published);
    } else if (looks) {
      state_.look_at_own_gradients();
    }
    if (!sums_first && !looks) {
      state_.begin_update(updating);
      if (local) {
        update_from_peers(published);
      } else {
        state_.update_from_own_gradients();
      }
      entered.leave();
    } else {
      entered.leave();
      auto found = state_.comm().meet("sums", shown());
      const std::span<const void* const> sums = found.peers();
      const bool applies = decide(sums);
      if (applies) {
        state_.begin_update(updating);
        if (!local) {
          state_.update_from_own_gradients();
        } else {
          update_from_sums(sums);
        }
      }
      found.leave();
      found.wait();
      if (!applies) {
        entered.wait();
        return StepEnd::skipped;
      }
    }
    if constexpr (State::Stage::shards_state) {
      auto updated = state_.comm().meet("gather", shown());
      gather_from(updated.peers());
      updated.leave();
      updated.wait();
    }
    entered.wait();
    return StepEnd::applied;
  }

 private:
  [[nodiscard]] const void* shown() const { return static_cast<const EngineIdentity*>(&state_); }
  static const EngineIdentity& identity_of(const void* published) {
    return *static_cast<const EngineIdentity*>(published);
  }
  /// Only where the identity is ours: then it is of our type.
  static const State& state_of(const void* published) {
    return static_cast<const State&>(identity_of(published));
  }

  /// Throws `UsageError` on all ranks or on none. Returns what `agree_to_go_on` does.
  [[nodiscard]] std::optional<StepEnd> agree(std::span<const void* const> published) {
    const auto peer = [&](std::size_t r) -> const State& { return state_of(published[r]); };
    for (std::size_t r = 0; r < published.size(); ++r) {
      require_same_optimizer(static_cast<int>(r), identity_of(published[r]).identity,
                             state_.identity);
    }
    const auto ended =
        state_.agree_to_go_on([&](int r) { return peer(static_cast<std::size_t>(r)).join_word; });
    // Where nothing will be stepped, options may differ.
    for (std::size_t r = 0; r < published.size(); ++r) {
      require_agreement_to_step(static_cast<int>(r), peer(r).step_refusal.c_str(), peer(r).options,
                                ended ? peer(r).options : peer(0).options, state_.some_serve(),
                                true);
    }
    if (ended) return ended;
    state_.agree_on_presence([&](std::size_t i) {
      typename State::Presence presence{false, true};
      for (std::size_t r = 0; r < published.size(); ++r) {
        const bool there = peer(r).present[i] != 0;
        presence.somewhere = presence.somewhere || there;
        presence.everywhere = presence.everywhere && there;
      }
      return presence;
    });
    return std::nullopt;
  }

  bool decide(std::span<const void* const> published) {
    if (!state_.scaling.looks_first()) return true;
    Findings all;
    for (const void* of : published) all.add(state_of(of).findings);
    return state_.scaling.decide(all);
  }

  template <class Lane>
  static const Lane& lane_of_peer(const void* published) {
    return std::get<Lane>(state_of(published).lanes);
  }

  template <class Lane>
  [[nodiscard]] auto peers_gradients(Lane& lane, std::span<const void* const> published) {
    using T = typename Lane::element;
    return [&lane, published, scale = static_cast<arithmetic_t<T>>(state_.scaling.of_step())](
               const Fragment& f, std::size_t) {
      for (std::size_t r = 0; r < published.size(); ++r) {
        lane.sources[r] = lane_of_peer<Lane>(published[r]).gradient_at(f);
      }
      return GradientSum<T>{lane.sources, scale};
    };
  }

  void update_from_peers(std::span<const void* const> published) {
    state_.for_each_lane([&](auto& lane) {
      const auto gradient = peers_gradients(lane, published);
      for (std::size_t b = 0; b < state_.layout->buckets(lane.index); ++b) {
        state_.update_bucket(lane, b, gradient);
      }
    });
  }

  /// Copies every peer's slices, starting behind the own ones so that ranks read different peers.
  void gather_from(std::span<const void* const> published) {
    state_.for_each_lane([&]<class Lane>(Lane& lane) {
      using T = typename Lane::element;
      // However small its fragments are: what counts is whether the caches hold them all.
      const bool streams = state_.layout->extent(lane.index) * sizeof(T) >= streamed_bytes;
      for (std::size_t b = 0; b < state_.layout->buckets(lane.index); ++b) {
        state_.observe(Phase::gather, lane.index, b, [&] {
          for (std::size_t k = 1; k < published.size(); ++k) {
            const std::size_t r = (static_cast<std::size_t>(state_.rank()) + k) % published.size();
            const Lane& theirs = lane_of_peer<Lane>(published[r]);
            for (std::size_t o = theirs.owned_begin[b]; o < theirs.owned_begin[b + 1]; ++o) {
              const Fragment& f = theirs.owned[o].fragment;
              if (state_.stepping[f.parameter] == 0) continue;
              if (streams) {
                streamed_copy(theirs.values_at(f), f.elements, lane.values_at(f));
              } else {
                std::memcpy(lane.values_at(f), theirs.values_at(f), f.elements * sizeof(T));
              }
            }
          }
        });
      }
    });
  }

  void sum_own_slices(std::span<const void* const> published) {
    state_.for_each_lane([&](auto& lane) {
      const auto gradient = peers_gradients(lane, published);
      for (std::size_t b = 0; b < state_.layout->buckets(lane.index); ++b) {
        state_.observe(Phase::reduce, lane.index, b,
                       [&] { state_.look_at_bucket(lane, b, true, gradient); });
      }
    });
  }

  void update_from_sums(std::span<const void* const> published) {
    state_.for_each_lane([&]<class Lane>(Lane& lane) {
      const auto scale = static_cast<typename Lane::arithmetic>(state_.scaling.of_step());
      if constexpr (State::Stage::shards_state) {
        const auto gradient = [&](const Fragment&, std::size_t begin) {
          return lane.summed(lane.reduced.data() + begin, scale);
        };
        for (std::size_t b = 0; b < state_.layout->buckets(lane.index); ++b) {
          state_.update_bucket(lane, b, gradient);
        }
      } else {
        typename State::template Constants<typename Lane::arithmetic> constants(state_);
        for (std::size_t b = 0; b < state_.layout->buckets(lane.index); ++b) {
          state_.observe(Phase::update, lane.index, b, [&] {
            const FlushDenormals flush(state_.settings.flush_denormals);
            for (const void* of : published) {
              const Lane& theirs = lane_of_peer<Lane>(of);
              for (std::size_t o = theirs.owned_begin[b]; o < theirs.owned_begin[b + 1]; ++o) {
                const Fragment& f = theirs.owned[o].fragment;
                if (state_.stepping[f.parameter] == 0) continue;
                state_.step_fragment(
                    lane, constants, f, lane.values_at(f), f.lane_begin,
                    lane.summed(theirs.reduced.data() + theirs.owned[o].shard_begin, scale));
              }
            }
          });
        }
      }
    });
  }

  State& state_;
};

}  // namespace zero::detail
