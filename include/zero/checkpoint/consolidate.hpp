// SPDX-License-Identifier: Apache-2.0
/// @file
/// Saves an optimizer's state and its parameters into one file of one rank's.
#pragma once

#include <algorithm>
#include <cstddef>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "zero/checkpoint/info.hpp"
#include "zero/communicator.hpp"
#include "zero/detail/checkpoint_agreement.hpp"
#include "zero/detail/checkpoint_pieces.hpp"
#include "zero/detail/element_bytes.hpp"
#include "zero/detail/join_scope.hpp"
#include "zero/detail/lane.hpp"
#include "zero/detail/single_file.hpp"
#include "zero/error.hpp"
#include "zero/fragment.hpp"

namespace zero {

namespace detail {

/// Gathers array after array, bucket after bucket, and writes what comes.
template <class State>
class Consolidation {
 public:
  Consolidation(State& state, std::filesystem::path path, int rank)
      : state_(state), path_(std::move(path)), rank_(rank) {}

  /// Returns what went wrong on some rank, or nothing.
  std::string carry_out() {
    bool takes_part = true;  // not of further replicas, which have the same
    if constexpr (State::has_replicas) takes_part = state_.comm().replicas().rank() == 0;
    std::string mine = error_of([&] {
      if (rank_ < 0 || rank_ >= state_.world()) {
        throw UsageError("there is no rank " + std::to_string(rank_) + "; there are " +
                         std::to_string(state_.world()));
      }
      CheckpointInfo info = describe_state(state_);
      (void)ArrayNames(info);
      info.world = 1;
      if (takes_part && state_.rank() == rank_) open(std::move(info));
    });
    std::string error = first_error(exchange_words(state_, mine));
    if (!error.empty()) return error;
    if (takes_part) {
      state_.for_each_lane([&](auto& lane) { write_lane(lane); });
      attempt([&] {
        for_each_frozen(state_, [&](std::size_t i, auto values) {
          write(i, value_array, 0, values.data(), values.size());
        });
      });
      attempt([&] { file_->commit(); });
    }
    return first_error(exchange_words(state_, error_));
  }

 private:
  void open(CheckpointInfo info) {
    file_.emplace(path_, std::move(info), [&](std::size_t i, std::size_t array) {
      ElementType type = ElementType::float32;
      state_.for_each_lane([&]<class Lane>(Lane& lane) {
        if (lane.index != state_.parameters[i].lane) return;
        using S = typename Lane::storage;
        type = array == value_array    ? element_traits<typename S::value>::type
               : array == master_array ? element_traits<typename S::master>::type
                                       : element_traits<typename S::slot>::type;
      });
      return type;
    });
  }

  /// What fails on the writing rank is told at the end: until then its peers go on gathering.
  template <class F>
  void attempt(F&& body) {
    if (file_ && error_.empty()) error_ = error_of(body);
  }

  template <class Lane>
  void write_lane(Lane& lane) {
    std::size_t largest = 0;
    for (std::size_t b = 0; b < state_.layout->buckets(lane.index); ++b) {
      largest = std::max(largest, state_.layout->bucket(lane.index, b).size());
    }
    write_values(lane, largest);
    if constexpr (Lane::storage::has_master) {
      write_kept(lane, master_array, lane.master, largest);
    }
    for (std::size_t s = 0; s < state_.slots_allocated; ++s) {
      write_kept(lane, first_slot_array + s, lane.state[s], largest);
    }
  }

  template <class Lane>
  void write_values(Lane& lane, std::size_t largest) {
    using T = typename Lane::element;
    std::optional<typename Lane::template Array<T>> staging;
    for (std::size_t b = 0; b < state_.layout->buckets(lane.index); ++b) {
      const Interval whole = state_.layout->bucket(lane.index, b);
      if (lane.comes_and_goes(b)) {
        if (!staging) staging.emplace(largest, state_.memory());
        gather(lane, b, lane.shard.data() + lane.shard_values[b], *staging);
        write_bucket(lane, value_array, whole, staging->data());
      } else {
        attempt([&] {
          for (const Fragment& f : state_.layout->fragments(lane.index, whole)) {
            write(f.parameter, value_array, f.parameter_begin, lane.value_in_place(b, whole, f),
                  f.elements);
          }
        });
      }
    }
  }

  /// Of what lies as slots do.
  template <class Lane, class Array>
  void write_kept(Lane& lane, std::size_t number, Array& array, std::size_t largest) {
    if constexpr (!State::Stage::shards_state) {
      for (std::size_t b = 0; b < state_.layout->buckets(lane.index); ++b) {
        const Interval whole = state_.layout->bucket(lane.index, b);
        write_bucket(lane, number, whole, array.data() + whole.begin);
      }
    } else {
      Array staging(largest, state_.memory());
      std::size_t begin = 0;
      for (std::size_t b = 0; b < state_.layout->buckets(lane.index); ++b) {
        gather(lane, b, array.data() + begin, staging);
        begin += state_.layout->slice(lane.index, b, state_.rank()).size();
        write_bucket(lane, number, state_.layout->bucket(lane.index, b), staging.data());
      }
    }
  }

  /// All slices of a bucket, of which this rank's are at `mine`.
  template <class Lane, class Array, class U>
  void gather(Lane& lane, std::size_t bucket, const U* mine, Array& staging) {
    static_assert(AllGatherV<typename State::communicator_type, U>,
                  "zero: consolidate gathers slots in the type that they are kept in, which this "
                  "communicator's all_gather_v does not take; save, and consolidate the folder");
    counts_.clear();
    for (int r = 0; r < state_.world(); ++r) {
      counts_.push_back(state_.layout->slice(lane.index, bucket, r).size());
    }
    const std::size_t all = state_.layout->bucket(lane.index, bucket).size();
    state_.comm()
        .all_gather_v(std::span<const U>(mine, counts_[static_cast<std::size_t>(state_.rank())]),
                      staging.span().first(all), std::span<const std::size_t>(counts_))
        .wait();
  }

  /// @param from where the bucket's elements lie
  template <class Lane, class U>
  void write_bucket(Lane& lane, std::size_t number, Interval whole, const U* from) {
    attempt([&] {
      for (const Fragment& f : state_.layout->fragments(lane.index, whole)) {
        write(f.parameter, number, f.parameter_begin, from + (f.lane_begin - whole.begin),
              f.elements);
      }
    });
  }

  template <class U>
  void write(std::size_t parameter, std::size_t number, std::size_t begin, const U* from,
             std::size_t elements) {
    State::Memory::read(from, elements, [&](std::size_t at, std::span<const U> part) {
      file_->write(parameter, number, begin + at, sizeof(U), std::as_bytes(part));
    });
  }

  State& state_;
  std::filesystem::path path_;
  int rank_;
  std::optional<SingleFile> file_{};  ///< of the rank that writes
  std::string error_{};
  std::vector<std::size_t> counts_{};
};

}  // namespace detail

/// Collective, between steps: rank `rank` writes all that `save` saves into one safetensors file,
/// each parameter's values under its own name, in its own shape, and beside them
/// `PARAMETER.master` and `PARAMETER.SLOT`; `load` takes it. Nothing else is gathered than a bucket
/// at a time, on all ranks, so no rank needs memory for more than one, in the type that slots are
/// kept in. Where all ranks can reach the folder, `save` is faster.
///
/// Throws `UsageError` for a rank that doesn't exist, and else as `save`.
template <class Optimizer>
void consolidate(Optimizer& optimizer, const std::filesystem::path& file, int rank = 0) {
  std::string error;
  detail::EngineAccess::engine_of(optimizer).between_steps(
      detail::Topic::consolidation, "consolidate", [&]<class State>(State& state, bool&) {
        error = detail::Consolidation<State>(state, file, rank).carry_out();
      });
  if (!error.empty()) throw CheckpointError("consolidate: " + error);
}

}  // namespace zero
