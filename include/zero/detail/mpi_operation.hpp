// SPDX-License-Identifier: Apache-2.0
/// @file
/// What one rank wants of one operation over MPI: which bytes go to whom and come from whom, and
/// the header by which ranks see whether they want the same.
///
/// Every operation is one or two rounds. In a round each rank sends each other rank one message or
/// more, if only a header: so that all see every difference, and no rank finishes an operation
/// to which another has not come.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>

#include "zero/communicator.hpp"
#include "zero/detail/hash.hpp"
#include "zero/detail/in_process_operation.hpp"
#include "zero/detail/in_process_work.hpp"
#include "zero/element.hpp"

namespace zero::detail {

/// Which of MPI's own reductions does an operation's sum; `none` where ranks sum in their order.
enum class MpiNativeSum : std::uint8_t { none, float32, float64 };

/// The description is the in-process communicator's, as are its words in messages.
struct MpiOperation : InProcessOperation {
  /// Reduces `count` elements of each source into `out`, which may be one of the sources.
  using Reducer = void (*)(std::span<const void* const> sources, std::size_t count, void* out,
                           ReduceOp op, void* scratch) noexcept;
  Reducer reducer = nullptr;
  MpiNativeSum native = MpiNativeSum::none;
  std::uint64_t counts_hash = 0;  ///< of those counts on which all ranks must agree
};

template <Element T>
void reduce_erased(std::span<const void* const> sources, std::size_t count, void* out, ReduceOp op,
                   void* scratch) noexcept {
  auto* const typed = static_cast<const T**>(scratch);
  for (std::size_t r = 0; r < sources.size(); ++r) {
    std::construct_at(typed + r, static_cast<const T*>(sources[r]));
  }
  reduce_sources<T>(std::span<const T* const>(typed, sources.size()), count, static_cast<T*>(out),
                    op);
}

/// `T` is `void` where nothing is summed.
template <class T>
MpiOperation mpi_operation(const InProcessOperation& what, std::size_t size, bool native) {
  MpiOperation operation{what};
  if constexpr (!std::is_void_v<T>) {
    operation.reducer = &reduce_erased<T>;
    if (native && what.reduce == ReduceOp::sum) {
      if (std::is_same_v<T, float>) operation.native = MpiNativeSum::float32;
      if (std::is_same_v<T, double>) operation.native = MpiNativeSum::float64;
    }
  }
  const std::size_t* const counts = what.kind == InProcessKind::reduce_scatter_v
                                        ? what.output_counts
                                    : what.kind == InProcessKind::all_gather_v ? what.input_counts
                                                                               : nullptr;
  if (counts != nullptr) {
    Hash hash;
    hash.add(counts, size * sizeof *counts);
    operation.counts_hash = hash.value();
  }
  return operation;
}

/// What lies in front of every message's payload.
struct MpiHeader {
  static constexpr std::uint32_t magic_number = 0x5a45524fU;

  std::uint32_t magic = magic_number;
  InProcessKind kind = InProcessKind::barrier;
  ReduceOp reduce = ReduceOp::sum;
  std::uint8_t round = 0;
  MpiNativeSum native = MpiNativeSum::none;
  std::uint32_t element_bytes = 0;
  std::int32_t root = 0;
  std::uint64_t sequence = 0;
  std::uint64_t input_count = 0;
  std::uint64_t output_count = 0;
  std::uint64_t counts_hash = 0;
  std::uint64_t pair_bytes = 0;  ///< that the sender sends to this receiver in this round
  std::uint64_t offset = 0;      ///< of this message's payload in those
  std::uint32_t chunk_bytes = 0;
  std::uint32_t unused = 0;
  std::array<char, 24> name{};
  std::array<char, 16> element{};
  std::uint64_t address = 0;  ///< where those lie, for a receiver that takes them; 0: they follow
  std::array<char, 8> padding{};
};
static_assert(sizeof(MpiHeader) == 128 && std::is_trivially_copyable_v<MpiHeader>);

template <std::size_t n>
void copy_name(std::string_view from, std::array<char, n>& to) noexcept {
  to = {};
  std::copy_n(from.begin(), std::min(from.size(), n - 1), to.begin());
}

inline MpiHeader header_of(const MpiOperation& operation, std::uint64_t sequence, unsigned round,
                           std::size_t chunk_bytes) noexcept {
  MpiHeader header;
  header.kind = operation.kind;
  header.reduce = operation.reduce;
  header.round = static_cast<std::uint8_t>(round);
  header.native = operation.native;
  header.element_bytes = static_cast<std::uint32_t>(operation.element_bytes);
  header.root = operation.root;
  header.sequence = sequence;
  header.input_count = operation.input_count;
  header.output_count = operation.output_count;
  header.counts_hash = operation.counts_hash;
  header.chunk_bytes = static_cast<std::uint32_t>(chunk_bytes);
  copy_name(operation.name, header.name);
  copy_name(operation.element, header.element);
  return header;
}

/// What the sender of `header` wants, for messages. Refers to the header's memory.
inline InProcessOperation operation_of(const MpiHeader& header) noexcept {
  InProcessOperation operation;
  operation.kind = header.kind;
  operation.name = header.name.data();
  operation.element = header.element.data();
  operation.element_bytes = header.element_bytes;
  operation.input_count = header.input_count;
  operation.output_count = header.output_count;
  operation.reduce = header.reduce;
  operation.root = header.root;
  return operation;
}

/// Whether what two ranks want of one operation fits together, as far as one of them can see.
inline bool agree(const MpiHeader& mine, const MpiHeader& theirs) noexcept {
  if (theirs.sequence != mine.sequence || theirs.kind != mine.kind || theirs.name != mine.name ||
      theirs.element != mine.element || theirs.element_bytes != mine.element_bytes ||
      theirs.round != mine.round || theirs.native != mine.native ||
      theirs.counts_hash != mine.counts_hash || theirs.chunk_bytes != mine.chunk_bytes) {
    return false;
  }
  const bool reduces = mine.kind <= InProcessKind::reduce_scatter_v;
  if (reduces && theirs.reduce != mine.reduce) return false;
  if (theirs.root != mine.root) return false;
  switch (mine.kind) {
    case InProcessKind::reduce_scatter_v:  // their hashes agree
    case InProcessKind::all_gather_v:
    case InProcessKind::all_to_all_v: return true;  // whose pairs are compared by their bytes
    default: return theirs.input_count == mine.input_count;
  }
}

/// Why a round can't go on.
struct MpiTrouble {
  int peer = -1;                      ///< whose message or memory it is; -1: MPI reported an error
  std::optional<MpiHeader> theirs{};  ///< of a message that differs; none: memory can't be read
  std::size_t expected_bytes = 0;     ///< of that peer in this round
  std::string text{};                 ///< of MPI's or the system's error
};

/// @param mine the header of `rank`'s own messages in that round
inline std::string mismatch_text(std::size_t rank, const MpiOperation& operation,
                                 const MpiHeader& mine, const MpiTrouble& trouble) {
  const std::string me = std::to_string(rank), peer = std::to_string(trouble.peer);
  const MpiHeader& theirs = *trouble.theirs;
  if (theirs.magic != MpiHeader::magic_number) {
    return "rank " + me + " got a message from rank " + peer +
           " that is not zero's; give each MPI communicator one user only, and all its ranks the "
           "same MpiOptions";
  }
  std::string text = "ranks " + me + " and " + peer + " disagree: rank " + me + " called " +
                     describe(operation) + ", sequence " + std::to_string(mine.sequence) +
                     ", rank " + peer + " called " + describe(operation_of(theirs)) +
                     ", sequence " + std::to_string(theirs.sequence);
  if (theirs.pair_bytes != trouble.expected_bytes) {
    text += "; rank " + peer + " sends " + std::to_string(theirs.pair_bytes) + " bytes to rank " +
            me + ", which expects " + std::to_string(trouble.expected_bytes);
  } else if (theirs.counts_hash != mine.counts_hash) {
    text += "; their counts differ";
  } else if (theirs.chunk_bytes != mine.chunk_bytes) {
    return text + "; their MpiOptions::chunk_bytes differ: " + std::to_string(mine.chunk_bytes) +
           " and " + std::to_string(theirs.chunk_bytes) + "; give all ranks the same";
  } else if (theirs.native != mine.native) {
    return text + "; their MpiOptions::reduction differ; give all ranks the same";
  }
  return text +
         "; every rank must start the same operations in the same order, with element types "
         "and sizes that agree";
}

/// One rank's share of one round with one peer.
struct MpiShare {
  const std::byte* from = nullptr;
  std::size_t send_bytes = 0;
  std::byte* into = nullptr;  ///< unused where the round reduces
  std::size_t receive_bytes = 0;
};

/// The rounds of an operation, for `rank` of `size`.
class MpiPlan {
 public:
  /// @param piece_bytes what one message carries at most
  MpiPlan(const MpiOperation& operation, std::size_t rank, std::size_t size,
          std::size_t piece_bytes) noexcept
      : op_(&operation), rank_(rank), size_(size) {
    // One message's latency counts for more than its bytes.
    small_ = operation.input_count * operation.element_bytes <= std::min(small_bytes, piece_bytes);
    slice_ = operation.element_bytes == 0 ? 0 : slice_bytes();
  }

  [[nodiscard]] unsigned rounds() const noexcept {
    if (op_->native != MpiNativeSum::none) return 1;  // of headers; the sums go MPI's way
    const bool two =
        op_->kind == InProcessKind::all_reduce || op_->kind == InProcessKind::broadcast;
    return two && !small_ && size_ > 1 ? 2 : 1;
  }

  /// Whether some pair may have more than `bytes` for each other, as all ranks see it.
  [[nodiscard]] bool moves_more_than(std::size_t bytes) const noexcept {
    if (op_->native != MpiNativeSum::none) return false;
    return op_->kind == InProcessKind::all_to_all_v ||  // whose sums differ
           std::max(op_->input_count, op_->output_count) * op_->element_bytes > bytes;
  }

  [[nodiscard]] bool reduces(unsigned round) const noexcept {
    return op_->native == MpiNativeSum::none && round == 0 &&
           op_->kind <= InProcessKind::reduce_scatter_v;
  }

  /// Where the own input of a reducing round begins, where its result goes, and its elements.
  struct Reduction {
    const std::byte* own = nullptr;
    std::byte* out = nullptr;
    std::size_t count = 0;
  };
  [[nodiscard]] Reduction reduction() const noexcept {
    const auto [begin, bytes] = reduced_slice(rank_);
    auto* const out = static_cast<std::byte*>(op_->output);
    const bool in_place = op_->kind == InProcessKind::all_reduce;
    return {input() + begin, in_place ? out + begin : out, bytes / op_->element_bytes};
  }

  [[nodiscard]] MpiShare share(unsigned round, std::size_t peer) const noexcept {
    using enum InProcessKind;
    if (op_->native != MpiNativeSum::none) return {};
    switch (op_->kind) {
      case all_reduce:
        if (round == 1) return swap_slices(peer);
        [[fallthrough]];
      case reduce_scatter:
      case reduce_scatter_v: {
        const auto [begin, bytes] = reduced_slice(peer);
        return {input() + begin, bytes, nullptr, reduced_slice(rank_).bytes};
      }
      case all_gather:
      case all_gather_v:
      case exchange: {
        const Slice theirs = slice(op_->input_counts, op_->input_count, peer);
        return {input(), op_->input_count * op_->element_bytes, output() + theirs.begin,
                theirs.bytes};
      }
      case all_to_all:
      case all_to_all_v: {
        const Slice sent = slice(op_->input_counts, op_->input_count / size_, peer);
        const Slice received = slice(op_->output_counts, op_->output_count / size_, peer);
        return {input() + sent.begin, sent.bytes, output() + received.begin, received.bytes};
      }
      case broadcast: return broadcast_share(round, peer);
      case barrier:
      case meeting: break;
    }
    return {};
  }

  /// Copies what this rank sends to itself.
  void copy_own() const noexcept {
    using enum InProcessKind;
    const bool gathers = op_->kind == all_gather || op_->kind == all_gather_v ||
                         op_->kind == exchange || op_->kind == all_to_all ||
                         op_->kind == all_to_all_v;
    if (!gathers) return;
    const MpiShare own = share(0, rank_);
    copy_elements(own.from, own.send_bytes, own.into);
  }

  struct Slice {
    std::size_t begin = 0;
    std::size_t bytes = 0;
  };
  /// Which bytes of its input are summed on `rank`.
  [[nodiscard]] Slice reduced_slice(std::size_t rank) const noexcept {
    if (op_->kind == InProcessKind::all_reduce) {
      return small_ ? Slice{0, op_->input_count * op_->element_bytes} : even_slice(rank);
    }
    return slice(op_->output_counts, op_->output_count, rank);
  }

 private:
  static constexpr std::size_t small_bytes = 4096;

  [[nodiscard]] const std::byte* input() const noexcept {
    return static_cast<const std::byte*>(op_->input);
  }
  [[nodiscard]] std::byte* output() const noexcept { return static_cast<std::byte*>(op_->output); }

  /// `even` elements each where there are no counts.
  [[nodiscard]] Slice slice(const std::size_t* counts, std::size_t even,
                            std::size_t rank) const noexcept {
    const std::size_t bytes = op_->element_bytes;
    if (counts == nullptr) return {rank * even * bytes, even * bytes};
    return {offset_of(counts, rank) * bytes, counts[rank] * bytes};
  }

  [[nodiscard]] std::size_t slice_bytes() const noexcept {
    const std::size_t even = op_->input_count / size_ + (op_->input_count % size_ != 0 ? 1 : 0);
    return (even + 63) / 64 * 64 * op_->element_bytes;
  }
  [[nodiscard]] Slice even_slice(std::size_t rank) const noexcept {
    const std::size_t all = op_->input_count * op_->element_bytes;
    const std::size_t begin = std::min(all, rank * slice_);
    return {begin, std::min(all - begin, slice_)};
  }

  /// Each rank's slice of the data to everybody.
  [[nodiscard]] MpiShare swap_slices(std::size_t peer) const noexcept {
    const Slice mine = even_slice(rank_), theirs = even_slice(peer);
    return {output() + mine.begin, mine.bytes, output() + theirs.begin, theirs.bytes};
  }

  /// The root cuts its data into a slice a rank, which the ranks then gather: so that the root
  /// sends it twice and not once to each. Small data it sends as a whole.
  [[nodiscard]] MpiShare broadcast_share(unsigned round, std::size_t peer) const noexcept {
    const auto root = static_cast<std::size_t>(op_->root);
    MpiShare share;
    if (small_ || round == 0) {
      const Slice all{0, op_->input_count * op_->element_bytes};
      const Slice sent = small_ ? all : even_slice(peer);
      const Slice received = small_ ? all : even_slice(rank_);
      if (rank_ == root) share.from = input() + sent.begin, share.send_bytes = sent.bytes;
      if (peer == root)
        share.into = output() + received.begin, share.receive_bytes = received.bytes;
      return share;
    }
    share = swap_slices(peer);
    if (peer == root) share.send_bytes = 0;  // it has all of it
    if (rank_ == root) share.receive_bytes = 0;
    return share;
  }

  const MpiOperation* op_;
  std::size_t rank_;
  std::size_t size_;
  std::size_t slice_ = 0;
  bool small_ = false;
};

}  // namespace zero::detail
