// SPDX-License-Identifier: Apache-2.0
/// @file
/// How ranks step that can read each other's memory.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <span>
#include <string>
#include <tuple>

#include "zero/detail/agreement.hpp"
#include "zero/detail/lane.hpp"
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
  void give_up() noexcept {}
  [[nodiscard]] std::size_t staging_bytes() const noexcept { return 0; }

  /// Every rank reads its peers' gradients, sums and updates its own slices in one pass, and copies
  /// the others' slices from where they were updated.
  void step(const std::string& refusal, bool& updating) {
    state_.step_refusal = refusal;
    auto entered = state_.comm().meet("step", shown());
    const std::span<const void* const> published = entered.peers();
    const auto peer = [&](std::size_t r) -> const State& { return state_of(published[r]); };
    try {
      for (std::size_t r = 0; r < published.size(); ++r) {
        require_same_optimizer(static_cast<int>(r), identity_of(published[r]).identity,
                               state_.identity);
      }
      for (std::size_t r = 0; r < published.size(); ++r) {
        require_agreement_to_step(static_cast<int>(r), peer(r).step_refusal.c_str(),
                                  peer(r).options, peer(0).options);
      }
      state_.agree_on_presence([&](std::size_t i) {
        typename State::Presence presence{false, true};
        for (std::size_t r = 0; r < published.size(); ++r) {
          const bool there = peer(r).present[i] != 0;
          presence.somewhere = presence.somewhere || there;
          presence.everywhere = presence.everywhere && there;
        }
        return presence;
      });
    } catch (const UsageError&) {  // the same on all ranks
      entered.leave();
      entered.wait();
      throw;
    }
    if (State::Stage::shards_state || state_.settings.gradients == Gradients::reduced)
      state_.begin_update(updating);
    if (state_.settings.gradients == Gradients::reduced) {
      state_.update_from_own_gradients();
    } else if constexpr (State::Stage::shards_state) {
      state_.for_each_lane([&]<class T>(HostLane<T, State::slots>& lane) {
        const auto gradient = peers_gradients(lane, published);
        for (std::size_t b = 0; b < state_.layout->buckets(lane.index); ++b) {
          state_.update_bucket(lane, b, gradient);
        }
      });
    } else {
      sum_own_slices(published);
    }
    entered.leave();
    if constexpr (State::Stage::shards_state) {
      auto updated = state_.comm().meet("gather", shown());
      gather_from(updated.peers());
      updated.leave();
      updated.wait();
    } else if (state_.settings.gradients == Gradients::local) {
      auto summed = state_.comm().meet("sums", shown());
      const std::span<const void* const> sums = summed.peers();
      state_.begin_update(updating);
      update_from_sums(sums);
      summed.leave();
      summed.wait();
    }
    entered.wait();
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

  template <class T>
  static const HostLane<T, State::slots>& lane_of_peer(const void* published) {
    return std::get<HostLane<T, State::slots>>(state_of(published).lanes);
  }

  template <class T>
  [[nodiscard]] auto peers_gradients(HostLane<T, State::slots>& lane,
                                     std::span<const void* const> published) {
    return [&lane, published, scale = static_cast<arithmetic_t<T>>(state_.gradient_scale())](
               const Fragment& f, std::size_t) {
      for (std::size_t r = 0; r < published.size(); ++r) {
        lane.sources[r] = lane_of_peer<T>(published[r]).gradient_at(f);
      }
      return GradientSum<T>{lane.sources, scale};
    };
  }

  /// Copies every peer's slices, starting behind the own ones so that ranks read different peers.
  void gather_from(std::span<const void* const> published) {
    state_.for_each_lane([&]<class T>(HostLane<T, State::slots>& lane) {
      // However small its fragments are: what counts is whether the caches hold them all.
      const bool streams = state_.layout->extent(lane.index) * sizeof(T) >= streamed_bytes;
      for (std::size_t b = 0; b < state_.layout->buckets(lane.index); ++b) {
        state_.observe(Phase::gather, lane.index, b, [&] {
          for (std::size_t k = 1; k < published.size(); ++k) {
            const std::size_t r = (static_cast<std::size_t>(state_.rank()) + k) % published.size();
            const HostLane<T, State::slots>& theirs = lane_of_peer<T>(published[r]);
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
    state_.for_each_lane([&]<class T>(HostLane<T, State::slots>& lane) {
      const auto gradient = peers_gradients(lane, published);
      for (std::size_t b = 0; b < state_.layout->buckets(lane.index); ++b) {
        state_.observe(Phase::reduce, lane.index, b, [&] {
          for (std::size_t o = lane.owned_begin[b]; o < lane.owned_begin[b + 1]; ++o) {
            const OwnedFragment& owned = lane.owned[o];
            if (state_.stepping[owned.fragment.parameter] == 0) continue;
            const GradientSum<T> sum = gradient(owned.fragment, 0);
            for (std::size_t at = 0; at < owned.fragment.elements; at += sum_chunk) {
              sum_chunk_of<T>(sum.sources, at, std::min(sum_chunk, owned.fragment.elements - at),
                              lane.reduced.data() + owned.shard_begin + at, lane.scratch);
            }
          }
        });
      }
    });
  }

  void update_from_sums(std::span<const void* const> published) {
    state_.for_each_lane([&]<class T>(HostLane<T, State::slots>& lane) {
      const auto scale = static_cast<arithmetic_t<T>>(state_.gradient_scale());
      typename State::template Constants<T> constants(state_);
      for (std::size_t b = 0; b < state_.layout->buckets(lane.index); ++b) {
        state_.observe(Phase::update, lane.index, b, [&] {
          for (const void* of : published) {
            const HostLane<T, State::slots>& theirs = lane_of_peer<T>(of);
            for (std::size_t o = theirs.owned_begin[b]; o < theirs.owned_begin[b + 1]; ++o) {
              const Fragment& f = theirs.owned[o].fragment;
              if (state_.stepping[f.parameter] == 0) continue;
              lane.sources[0] = theirs.reduced.data() + theirs.owned[o].shard_begin;
              update_fragment(state_.groups[state_.parameters[f.parameter].group],
                              constants.of(f.parameter), lane, f, f.lane_begin,
                              GradientSum<T>{{lane.sources.data(), 1}, scale});
            }
          }
        });
      }
    });
  }

  State& state_;
};

}  // namespace zero::detail
