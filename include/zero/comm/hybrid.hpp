// SPDX-License-Identifier: Apache-2.0
/// @file
/// Groups of ranks: optimizer state is spread over the ranks of one group (of one host, say), and
/// each group trains a replica of the model.
///
///     zero::HybridCommunicator groups(comm, 8);  // state over 8 ranks, comm.size() / 8 replicas
///     zero::ZeroSharded optimizer{zero::Adam{}, store, groups};
///     // which data is this rank's own, and who prints, groups.world().rank() says
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "zero/comm/in_process.hpp"
#include "zero/communicator.hpp"
#include "zero/detail/agreement.hpp"
#include "zero/element.hpp"
#include "zero/error.hpp"
#include "zero/memory.hpp"

namespace zero {

/// A world cut into shard groups of consecutive ranks, each of which keeps one whole set of state.
/// All operations are those of this rank's shard group, as are `rank` and `size`; the ranks in the
/// same place of all groups are `replicas`.
///
/// `ZeroSharded` sums gradients over both, in a fixed order: first over the ranks of a group, in
/// rank order, then those sums over the groups, in the order of groups, and multiplies once, by
/// default by 1 / all ranks. State, and the gathering of parameters, stay within a group.
///
/// Refers to the world, which must outlive it and the optimizers over it; a duplicate has its own.
/// Meanwhile others may use the world too, in the same order on all ranks. Ranks that are threads
/// don't step in each other's memory here (`meet`), as they do without groups: buckets go through
/// the communicators.
template <class World>
class HybridCommunicator {
  static_assert(Ranked<World> && Capable<World> && HostExchange<World> && Abortable<World>,
                "zero: the world of a HybridCommunicator must model zero::Communicator; see "
                "zero/communicator.hpp");
  static_assert(
      requires(World& world) {
        { world.split(0, 0) } -> Ranked;
      },
      "zero: a HybridCommunicator needs a world that can be split: split(color, key), as "
      "zero::InProcessCommunicator and zero::MpiCommunicator have");

 public:
  /// A part of the world.
  using part_type = decltype(std::declval<World&>().split(0, 0));

  static constexpr MemorySpace memory_space = World::memory_space;
  [[nodiscard]] static constexpr bool supports(ElementType type) { return World::supports(type); }
  [[nodiscard]] static constexpr bool supports(ReduceOp op) { return World::supports(op); }

  /// Collective over the world. Ranks 0, …, shard_size - 1 are the first group, and so on. Throws
  /// `UsageError` on all ranks where `shard_size` doesn't divide the world or is not the same on
  /// all, and what `split` throws.
  HybridCommunicator(World& world, int shard_size)
      : world_(&checked(world, shard_size)),
        shards_(world.split(world.rank() / shard_size, world.rank())),
        replicas_(world.split(world.rank() % shard_size, world.rank())) {}

  /// Collective over the world, from parts of it that were made elsewhere: this rank's shard group,
  /// and the ranks in the same place of all groups. Throws `UsageError` on all ranks where these
  /// don't form a grid, each group being in the same place of all its ranks' `replicas`.
  HybridCommunicator(World& world, part_type shards, part_type replicas)
      : world_(&world), shards_(std::move(shards)), replicas_(std::move(replicas)) {
    require_grid();
  }

  /// Duplicates of all three, which this one keeps. Collective over the world. Throws what the
  /// world's `duplicate` throws.
  [[nodiscard]] HybridCommunicator duplicate()
    requires Duplicable<World> && Duplicable<part_type>
  {
    return HybridCommunicator(std::make_shared<World>(world_->duplicate()), *this);
  }
  /// As the world's.
  [[nodiscard]] bool concurrent() const
    requires Duplicable<World>
  {
    return world_->concurrent();
  }

  /// In the shard group.
  [[nodiscard]] int rank() const { return shards_.rank(); }
  /// Of the shard group.
  [[nodiscard]] int size() const { return shards_.size(); }
  /// This rank's shard group, whose operations these are.
  [[nodiscard]] part_type& shards() { return shards_; }
  /// The ranks that keep the same shard, one of each group; the rank in it is the group's number.
  [[nodiscard]] part_type& replicas() { return replicas_; }
  [[nodiscard]] const part_type& replicas() const { return replicas_; }
  /// All ranks of all groups.
  [[nodiscard]] World& world() const { return *world_; }

  /// What the ranks of the shard group read where it lies; null where there is no such memory.
  [[nodiscard]] auto shared_memory() const
    requires SharedMemoryProvider<part_type>
  {
    return shards_.shared_memory();
  }

  template <Element T>
  [[nodiscard]] auto all_reduce(std::span<T> data, ReduceOp op = ReduceOp::sum) {
    return shards_.all_reduce(data, op);
  }

  template <Element T>
  [[nodiscard]] auto reduce_scatter(std::span<const std::type_identity_t<T>> input,
                                    std::span<T> output, ReduceOp op = ReduceOp::sum) {
    return shards_.reduce_scatter(input, output, op);
  }

  template <Element T>
  [[nodiscard]] auto reduce_scatter_v(std::span<const std::type_identity_t<T>> input,
                                      std::span<T> output, std::span<const std::size_t> counts,
                                      ReduceOp op = ReduceOp::sum) {
    return shards_.reduce_scatter_v(input, output, counts, op);
  }

  template <Element T>
  [[nodiscard]] auto all_gather(std::span<const std::type_identity_t<T>> input,
                                std::span<T> output) {
    return shards_.all_gather(input, output);
  }

  template <Element T>
  [[nodiscard]] auto all_gather_v(std::span<const std::type_identity_t<T>> input,
                                  std::span<T> output, std::span<const std::size_t> counts) {
    return shards_.all_gather_v(input, output, counts);
  }

  template <Element T>
  [[nodiscard]] auto all_to_all(std::span<const std::type_identity_t<T>> input,
                                std::span<T> output) {
    return shards_.all_to_all(input, output);
  }

  template <Element T>
  [[nodiscard]] auto all_to_all_v(std::span<const std::type_identity_t<T>> input,
                                  std::span<const std::size_t> send_counts, std::span<T> output,
                                  std::span<const std::size_t> receive_counts) {
    return shards_.all_to_all_v(input, send_counts, output, receive_counts);
  }

  template <Element T>
  [[nodiscard]] auto broadcast(std::span<T> data, int root) {
    return shards_.broadcast(data, root);
  }

  [[nodiscard]] auto barrier() { return shards_.barrier(); }

  [[nodiscard]] auto exchange(std::span<const std::byte> mine, std::span<std::byte> all) {
    return shards_.exchange(mine, all);
  }

  /// Of everything: the shard group, its replicas and the world, so that all ranks of all groups
  /// hear of it. From any thread.
  void abort(std::string_view reason) {
    shards_.abort(std::string(reason));
    replicas_.abort(std::string(reason));
    world_->abort(std::string(reason));
  }

  [[nodiscard]] auto batch() { return shards_.batch(); }

 private:
  HybridCommunicator(std::shared_ptr<World> world, HybridCommunicator& original)
      : own_world_(std::move(world)),
        world_(own_world_.get()),
        shards_(original.shards_.duplicate()),
        replicas_(original.replicas_.duplicate()) {}

  /// The world, once all its ranks have asked for the same groups.
  static World& checked(World& world, int shard_size) {
    const auto asked = detail::exchange_all(world, std::span<const int>(&shard_size, 1));
    for (std::size_t r = 0; r < asked.size(); ++r) {
      if (asked[r] != asked[0]) {
        throw UsageError("HybridCommunicator: rank " + std::to_string(r) +
                         " asks for shard groups of " + std::to_string(asked[r]) +
                         " ranks, but rank 0 of " + std::to_string(asked[0]) +
                         "; give all ranks the same");
      }
    }
    if (shard_size < 1 || world.size() % shard_size != 0) {
      throw UsageError("HybridCommunicator: " + std::to_string(world.size()) +
                       " ranks can't be cut into shard groups of " + std::to_string(shard_size) +
                       "; give it a divisor of the number of ranks");
    }
    return world;
  }

  void require_grid() {
    struct Position {
      int shard, shards, replica, replicas;
    };
    const Position mine{shards_.rank(), shards_.size(), replicas_.rank(), replicas_.size()};
    const int rank = world_->rank();
    const auto places = detail::exchange_all(*world_, std::span<const Position>(&mine, 1));
    const auto group = detail::exchange_all(shards_, std::span<const int>(&rank, 1));
    const auto others = detail::exchange_all(replicas_, std::span<const int>(&rank, 1));
    const auto all_are = [&](const std::vector<int>& members, int Position::* index,
                             int Position::* same) {
      for (std::size_t i = 0; i < members.size(); ++i) {
        if (members[i] < 0 || members[i] >= world_->size()) return false;
        const Position& theirs = places[static_cast<std::size_t>(members[i])];
        if (theirs.*index != static_cast<int>(i) || theirs.*same != mine.*same) return false;
      }
      return true;
    };
    const std::uint8_t wrong = std::int64_t{mine.shards} * mine.replicas != world_->size() ||
                               places[0].shards != mine.shards ||
                               !all_are(group, &Position::shard, &Position::replica) ||
                               !all_are(others, &Position::replica, &Position::shard);
    const auto all_wrong = detail::exchange_all(*world_, std::span<const std::uint8_t>(&wrong, 1));
    for (std::size_t r = 0; r < all_wrong.size(); ++r) {
      if (all_wrong[r] == 0) continue;
      throw UsageError("HybridCommunicator: the shard group and the replicas given on rank " +
                       std::to_string(r) + " are no row and column of a grid of all " +
                       std::to_string(all_wrong.size()) +
                       " ranks; split the world by rank / N and by rank % N, or give N alone");
    }
  }

  std::shared_ptr<World> own_world_{};  // a duplicate's
  World* world_;
  part_type shards_;
  part_type replicas_;
};

static_assert(Communicator<HybridCommunicator<InProcessCommunicator>, float> &&
              ReplicatedCommunicator<HybridCommunicator<InProcessCommunicator>> &&
              Duplicable<HybridCommunicator<InProcessCommunicator>>);

}  // namespace zero
