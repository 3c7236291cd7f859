// SPDX-License-Identifier: Apache-2.0
/// @file
/// What one in-process rank wants of one operation, and whether ranks' wishes fit together.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>

#include "zero/communicator.hpp"

namespace zero::detail {

enum class InProcessKind : std::uint8_t {
  all_reduce,
  reduce_scatter,
  reduce_scatter_v,
  all_gather,
  all_gather_v,
  all_to_all,
  all_to_all_v,
  broadcast,
  barrier,
  exchange,
  meeting,
};

struct InProcessSlot;

/// What one rank wants of one operation. Fixed from its arrival until the operation is over.
struct InProcessOperation {
  /// Does `rank`'s part of phase `phase`; `scratch` has room for one pointer a rank.
  using Work = void (*)(std::span<const InProcessOperation> ranks, std::size_t rank, unsigned phase,
                        void* scratch) noexcept;
  /// Waits until what `rank`'s peers have enqueued on devices reads its memory no more. Called
  /// once the operation has failed and no peer is at work on it.
  using Settle = void (*)(const InProcessSlot& slot, std::size_t rank) noexcept;

  InProcessKind kind = InProcessKind::barrier;
  const char* name = "";
  std::string_view element{};  ///< the element type's name; empty where there are no elements
  std::size_t element_bytes = 0;
  std::size_t input_count = 0;
  std::size_t output_count = 0;
  ReduceOp reduce = ReduceOp::sum;
  int root = 0;
  const void* input = nullptr;
  void* output = nullptr;
  const std::size_t* input_counts = nullptr;
  const std::size_t* output_counts = nullptr;
  const void* published = nullptr;
  unsigned phases = 0;      ///< each begins when all ranks have finished the one before
  Work work = nullptr;      ///< null for a meeting: the caller does that work
  bool in_turn = false;     ///< its work waits for that of the rank's earlier ones of this kind
  Settle settle = nullptr;  ///< null where work is over when it returns
};

/// Where ranks are those of a part: who they are in the whole, for messages.
/// @param ranks by rank of the part
template <class Ranks>
std::string part_note(const Ranks& ranks) {
  std::string text;
  for (const auto rank : ranks) text += (text.empty() ? "" : ", ") + std::to_string(rank);
  return " (ranks of a part; in the whole that was split they are, in order: " + text + ")";
}

/// "reduce_scatter (sum) of 12 float32 into 3", for messages.
inline std::string describe(const InProcessOperation& op) {
  if (op.kind == InProcessKind::meeting) return "meeting \"" + std::string(op.name) + "\"";
  std::string text = op.name;
  if (op.kind <= InProcessKind::reduce_scatter_v) {
    constexpr std::array<const char*, 3> reductions{" (sum)", " (min)", " (max)"};
    text += reductions[static_cast<std::size_t>(op.reduce)];
  }
  if (op.element.empty()) return text;
  text += " of " + std::to_string(op.input_count) + " " + std::string(op.element);
  if (op.output_count != op.input_count) text += " into " + std::to_string(op.output_count);
  if (op.kind == InProcessKind::broadcast) text += " from root " + std::to_string(op.root);
  return text;
}

/// Whether what ranks `a` and `b` want of one operation fits together.
inline bool agree(std::size_t a, const InProcessOperation& left, std::size_t b,
                  const InProcessOperation& right, std::size_t size) {
  using enum InProcessKind;
  if (left.kind != right.kind || std::strcmp(left.name, right.name) != 0) return false;
  if (left.element != right.element || left.element_bytes != right.element_bytes) return false;
  switch (left.kind) {
    case all_reduce:
    case reduce_scatter:
      return left.input_count == right.input_count && left.reduce == right.reduce;
    case reduce_scatter_v:
      return left.reduce == right.reduce &&
             std::equal(left.output_counts, left.output_counts + size, right.output_counts);
    case all_gather:
    case all_to_all:
    case exchange: return left.input_count == right.input_count;
    case all_gather_v:
      return std::equal(left.input_counts, left.input_counts + size, right.input_counts);
    case all_to_all_v:
      return left.input_counts[b] == right.output_counts[a] &&
             right.input_counts[a] == left.output_counts[b];
    case broadcast: return left.input_count == right.input_count && left.root == right.root;
    case barrier:
    case meeting: return true;
  }
  return false;
}

/// Where the counts of two ranks differ, for messages; empty where something else differs.
inline std::string count_difference(std::size_t a, const InProcessOperation& left, std::size_t b,
                                    const InProcessOperation& right, std::size_t size) {
  if (left.kind != right.kind || left.element != right.element) return {};
  if (left.kind == InProcessKind::all_to_all_v) {
    const auto pair = [&](std::size_t from, const InProcessOperation& sender, std::size_t to,
                          const InProcessOperation& receiver) -> std::string {
      if (sender.input_counts[to] == receiver.output_counts[from]) return {};
      return "; rank " + std::to_string(from) + " sends " +
             std::to_string(sender.input_counts[to]) + " to rank " + std::to_string(to) +
             ", which expects " + std::to_string(receiver.output_counts[from]);
    };
    return pair(a, left, b, right) + pair(b, right, a, left);
  }
  const bool scatter = left.kind == InProcessKind::reduce_scatter_v;
  if (!scatter && left.kind != InProcessKind::all_gather_v) return {};
  const std::size_t* x = scatter ? left.output_counts : left.input_counts;
  const std::size_t* y = scatter ? right.output_counts : right.input_counts;
  for (std::size_t i = 0; i < size; ++i) {
    if (x[i] == y[i]) continue;
    return "; counts[" + std::to_string(i) + "] is " + std::to_string(x[i]) + " on rank " +
           std::to_string(a) + " and " + std::to_string(y[i]) + " on rank " + std::to_string(b);
  }
  return {};
}

}  // namespace zero::detail
