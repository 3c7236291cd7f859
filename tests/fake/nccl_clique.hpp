// SPDX-License-Identifier: Apache-2.0
/// @file
/// What the ranks of one communicator of the fake NCCL share, and how their streams meet in it.
#pragma once

#include <nccl.h>

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "fake/nccl_arithmetic.hpp"

namespace zero_emulation::nccl {

enum class Kind { all_reduce, broadcast, reduce, all_gather, reduce_scatter, send, recv };

[[nodiscard]] inline bool is_collective(Kind kind) { return kind < Kind::send; }

/// One call, ready for a stream.
struct Operation {
  Kind kind;
  const void* send = nullptr;
  void* recv = nullptr;
  std::size_t count = 0;
  ncclDataType_t type = ncclFloat32;
  ncclRedOp_t op = ncclSum;  ///< ncclNumOps for any pre-multiplied sum
  int root = 0;              ///< or the peer
  Scalar scale{};            ///< of a pre-multiplied sum, unless on the device
  const void* device_scale = nullptr;
  ncclResult_t fault = ncclSuccess;
  bool lost = false;
};

inline std::string describe(const Operation& operation) {
  static constexpr const char* kinds[] = {"AllReduce",     "Broadcast", "Reduce", "AllGather",
                                          "ReduceScatter", "Send",      "Recv"};
  static constexpr const char* types[] = {"int8",    "uint8",    "int32",   "uint32",
                                          "int64",   "uint64",   "float16", "float32",
                                          "float64", "bfloat16", "fp8e4m3", "fp8e5m2"};
  static constexpr const char* ops[] = {"sum", "prod", "max", "min", "avg", "premulsum"};
  std::string text = std::string("nccl") + kinds[static_cast<int>(operation.kind)] + " of " +
                     std::to_string(operation.count) + " " + types[operation.type];
  switch (operation.kind) {
    case Kind::all_reduce:
    case Kind::reduce_scatter: return text + ", " + ops[operation.op];
    case Kind::reduce:
      return text + ", " + ops[operation.op] + ", root " + std::to_string(operation.root);
    case Kind::broadcast: return text + ", root " + std::to_string(operation.root);
    default: return text;
  }
}

/// Whether two ranks that meet in a collective operation mean the same.
inline bool agree(const Operation& a, const Operation& b) {
  return a.kind == b.kind && a.count == b.count && a.type == b.type && a.op == b.op &&
         a.root == b.root;
}

/// The last thing that went wrong anywhere, as `ncclGetLastError` tells it, and on stderr.
class LastError {
 public:
  static void set(const std::string& text) {
    std::fprintf(stderr, "fake NCCL: %s\n", text.c_str());
    const std::lock_guard lock(mutex());
    text_ = text;
  }
  static std::string get() {
    const std::lock_guard lock(mutex());
    return text_;
  }

 private:
  static std::mutex& mutex() {
    static std::mutex mutex;
    return mutex;
  }
  static inline std::string text_;
};

/// Ranks that have found each other. Streams of all ranks order each other in collective
/// operations, those of two ranks in a send and receive, and nothing else here orders anything that
/// CUDA wouldn't: a host that polls reads atomics, relaxed.
class Clique {
 public:
  explicit Clique(std::size_t size) : ranks_(size), channels_(size * size) {}

  [[nodiscard]] int size() const { return static_cast<int>(ranks_.size()); }
  /// Different for all cliques of the process.
  [[nodiscard]] std::uint64_t serial() const { return serial_; }

  [[nodiscard]] ncclResult_t error(int rank) const {
    return at(rank).error.load(std::memory_order_relaxed);
  }

  /// A rank that needs nothing from its peers any more is told of nothing any more.
  void leave(int rank) { at(rank).left.store(true, std::memory_order_relaxed); }

  /// Ends what rank `rank` has in streams, now and later; tells its peers.
  void abort(int rank) {
    {
      const std::lock_guard lock(mutex_);
      at(rank).aborted = true;
      fail(rank, ncclSuccess);
      changed_.notify_all();
    }
    for (int peer = 0; peer < size(); ++peer) {
      channel(rank, peer).wake();
      channel(peer, rank).wake();
    }
  }

  /// An operation that waits in a stream for its peers.
  struct Pending {
    const Operation* operation = nullptr;
    std::uint64_t number = 0;  ///< of a collective operation
    bool announced = false;
    bool done = false;  ///< of a send or receive; guarded by its channel
  };

  /// Begins a rank's operations in a stream's thread, without waiting, so that their order among
  /// themselves can't matter. `await` ends them; `operations` must live until then.
  [[nodiscard]] std::vector<Pending> announce(int rank, const std::vector<Operation>& operations) {
    for (const Operation& operation : operations) {
      if (operation.lost) return {};
      if (operation.fault != ncclSuccess) {
        const std::lock_guard lock(mutex_);
        if (!at(rank).aborted) {
          LastError::set("rank " + std::to_string(rank) + " failed in " + describe(operation) +
                         ", as a test asked");
          fail(rank, operation.fault);
        }
        return {};
      }
    }
    std::vector<Pending> pending(operations.size());
    for (std::size_t i = 0; i < operations.size(); ++i) announce(rank, operations[i], pending[i]);
    return pending;
  }

  /// Returns when all operations are done, or when the rank is aborted.
  void await(int rank, const std::vector<Pending>& pending) {
    for (const Pending& one : pending) await(rank, one);
    if (!pending.empty()) return;
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return at(rank).aborted.load(); });
  }

 private:
  struct Rank {
    std::atomic<ncclResult_t> error{ncclSuccess};
    std::atomic<bool> aborted{false};
    std::atomic<bool> left{false};
    std::uint64_t collectives = 0;  ///< announced so far; guarded by mutex_
  };
  struct Meeting {
    std::vector<const Operation*> operations;
    int first = -1;  ///< the rank that came first
    int arrived = 0;
    int gone = 0;
    bool done = false;
  };
  struct Channel {
    void wake() {
      const std::lock_guard lock(mutex);
      changed.notify_all();
    }
    std::mutex mutex;
    std::condition_variable changed;
    std::deque<Pending*> waiting;  ///< all sends, or all receives
  };

  [[nodiscard]] Rank& at(int rank) { return ranks_[static_cast<std::size_t>(rank)]; }
  [[nodiscard]] const Rank& at(int rank) const { return ranks_[static_cast<std::size_t>(rank)]; }
  [[nodiscard]] Channel& channel(int from, int to) {
    return channels_[static_cast<std::size_t>(from) * ranks_.size() + static_cast<std::size_t>(to)];
  }

  /// From now on nothing is announced here, so no one's memory is used by others.
  void fail(int rank, ncclResult_t error, ncclResult_t peers = ncclRemoteError) {
    broken_ = true;
    for (int r = 0; r < size(); ++r) {
      ncclResult_t none = ncclSuccess;
      if (!at(r).left) {
        at(r).error.compare_exchange_strong(none, r == rank ? error : peers,
                                            std::memory_order_relaxed);
      }
    }
  }

  void announce(int rank, const Operation& operation, Pending& pending) {
    pending.operation = &operation;
    if (is_collective(operation.kind)) {
      announce_collective(rank, operation, pending);
    } else {
      announce_transfer(rank, operation, pending);
    }
  }

  void announce_collective(int rank, const Operation& operation, Pending& pending) {
    const std::lock_guard lock(mutex_);
    if (broken_) return;
    pending.announced = true;
    pending.number = at(rank).collectives++;
    Meeting& meeting = meetings_[pending.number];
    if (meeting.arrived == 0) {
      meeting.first = rank;
      meeting.operations.resize(ranks_.size());
    } else if (const Operation& other =
                   *meeting.operations[static_cast<std::size_t>(meeting.first)];
               !agree(operation, other)) {
      LastError::set("ranks disagree: rank " + std::to_string(meeting.first) + " called " +
                     describe(other) + ", rank " + std::to_string(rank) + " called " +
                     describe(operation) + " (each its collective operation " +
                     std::to_string(pending.number) + ", from 0)");
      fail(rank, ncclInvalidUsage, ncclInvalidUsage);
      return;
    }
    meeting.operations[static_cast<std::size_t>(rank)] = &operation;
    if (++meeting.arrived == size()) {
      perform(meeting.operations);
      meeting.done = true;
      changed_.notify_all();
    }
  }

  void announce_transfer(int rank, const Operation& operation, Pending& pending) {
    const bool sends = operation.kind == Kind::send;
    Channel& between = sends ? channel(rank, operation.root) : channel(operation.root, rank);
    const std::lock_guard lock(between.mutex);
    if (broken_) return;
    if (between.waiting.empty() || between.waiting.front()->operation->kind == operation.kind) {
      between.waiting.push_back(&pending);
      return;
    }
    Pending& other = *between.waiting.front();
    if (other.operation->count != operation.count || other.operation->type != operation.type) {
      LastError::set("ranks disagree: rank " + std::to_string(rank) + " called " +
                     describe(operation) + " with rank " + std::to_string(operation.root) +
                     ", which called " + describe(*other.operation));
      fail(rank, ncclInvalidUsage, ncclInvalidUsage);
      return;
    }
    const Operation& from = sends ? operation : *other.operation;
    const Operation& to = sends ? *other.operation : operation;
    copy(to.recv, from.send, from.count * size_of(from.type));
    between.waiting.pop_front();
    other.done = pending.done = true;
    between.changed.notify_all();
  }

  void await(int rank, const Pending& pending) {
    const Operation& operation = *pending.operation;
    if (!is_collective(operation.kind)) {
      Channel& between = operation.kind == Kind::send ? channel(rank, operation.root)
                                                      : channel(operation.root, rank);
      std::unique_lock lock(between.mutex);
      between.changed.wait(lock, [&] { return pending.done || at(rank).aborted; });
      return;
    }
    std::unique_lock lock(mutex_);
    if (!pending.announced) {
      changed_.wait(lock, [&] { return at(rank).aborted.load(); });
      return;
    }
    const auto meeting = meetings_.find(pending.number);
    changed_.wait(lock, [&] { return at(rank).aborted || meeting->second.done; });
    if (meeting->second.done && ++meeting->second.gone == size()) meetings_.erase(meeting);
  }

  static void copy(void* to, const void* from, std::size_t bytes) {
    if (to != from && bytes != 0) std::memcpy(to, from, bytes);
  }

  /// Does a collective operation for all ranks, in the thread of the last.
  static void perform(const std::vector<const Operation*>& operations) {
    const Operation& common = *operations.front();
    const std::size_t ranks = operations.size();
    const std::size_t bytes = common.count * size_of(common.type);
    const auto root = static_cast<std::size_t>(common.root);
    const auto input = [&](std::size_t r) {
      return static_cast<const std::byte*>(operations[r]->send);
    };
    const auto output = [&](std::size_t r) { return static_cast<std::byte*>(operations[r]->recv); };

    std::vector<const std::byte*> inputs(ranks);
    std::vector<std::byte*> outputs(ranks);
    switch (common.kind) {
      case Kind::all_reduce:
        for (std::size_t r = 0; r < ranks; ++r) {
          inputs[r] = input(r);
          outputs[r] = output(r);
        }
        return perform_reduction(operations, 0, inputs, outputs);
      case Kind::reduce:
        for (std::size_t r = 0; r < ranks; ++r) inputs[r] = input(r);
        return perform_reduction(operations, 0, inputs, {output(root)});
      case Kind::reduce_scatter:
        for (std::size_t to = 0; to < ranks; ++to) {
          for (std::size_t r = 0; r < ranks; ++r) inputs[r] = input(r) + to * bytes;
          perform_reduction(operations, to * common.count, inputs, {output(to)});
        }
        return;
      case Kind::broadcast:
        for (std::size_t r = 0; r < ranks; ++r) copy(output(r), input(root), bytes);
        return;
      default:
        for (std::size_t r = 0; r < ranks; ++r) {
          for (std::size_t to = 0; to < ranks; ++to) copy(output(to) + r * bytes, input(r), bytes);
        }
        return;
    }
  }

  static void perform_reduction(const std::vector<const Operation*>& operations, std::size_t first,
                                const std::vector<const std::byte*>& inputs,
                                const std::vector<std::byte*>& outputs) {
    const Operation& common = *operations.front();
    std::vector<Scalar> scales;
    if (common.op == ncclNumOps) {
      for (const Operation* operation : operations) {
        Scalar scale = operation->scale;
        if (operation->device_scale != nullptr) {
          std::memcpy(scale.data(), operation->device_scale, size_of(common.type));
        }
        scales.push_back(scale);
      }
    } else if (common.op == ncclAvg && common.type >= ncclFloat16) {
      scales.assign(operations.size(), reciprocal(common.type, operations.size()));
    }
    with_type(common.type, [&](auto zero) {
      reduce<decltype(zero)>(common.op, first, common.count, inputs, scales, outputs);
    });
  }

  static inline std::atomic<std::uint64_t> last_serial_{0};
  const std::uint64_t serial_ = ++last_serial_;
  std::vector<Rank> ranks_;
  std::vector<Channel> channels_;
  std::atomic<bool> broken_{false};
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::uint64_t, Meeting> meetings_;
};

}  // namespace zero_emulation::nccl
