// SPDX-License-Identifier: Apache-2.0
/// @file
/// What the library throws. A caller who wants one handler catches `zero::Error`.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

namespace zero {

/// The root of all exceptions thrown by the library.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// The caller asked for something that can't be done; the message names what was wrong, where, and
/// what to do. Unless the message says otherwise, nothing has changed.
class UsageError : public Error {
 public:
  using Error::Error;
};

/// Gradients need more memory before they can be reduced than `Stage2::pool_bytes` (or `Stage3`'s)
/// allows. The step can't be finished and the optimizer can't go on; peers are told, and parameters
/// have not changed. Make a new one, over a new communicator, with a larger pool.
class PoolExhausted : public UsageError {
 public:
  /// @param needed bytes that were needed at that moment; in another order it may be less
  /// @param pool bytes that the pool has
  PoolExhausted(std::size_t needed, std::size_t pool, const std::string& what)
      : UsageError(what), needed_(needed), pool_(pool) {}

  [[nodiscard]] std::size_t needed() const noexcept { return needed_; }
  [[nodiscard]] std::size_t pool() const noexcept { return pool_; }

 private:
  std::size_t needed_;
  std::size_t pool_;
};

/// A step of a `join` with `JoinEnd::raise` in which some rank has no more input. All ranks throw
/// it in the same step, which has changed nothing; optimizers and communicator stay usable.
class InputsEnded : public Error {
 public:
  /// @param rank the lowest rank that has no more input
  InputsEnded(int rank, const std::string& what) : Error(what), rank_(rank) {}

  [[nodiscard]] int rank() const noexcept { return rank_; }

 private:
  int rank_;
};

/// A checkpoint can't be read or written: a file that breaks a rule of its format, a sum that does
/// not match, a disk that is full. The message names the file, where in it, what was wrong and what
/// to do. Nothing that the checkpoint would have been loaded into has changed, and an earlier
/// checkpoint is as it was.
class CheckpointError : public Error {
 public:
  using Error::Error;
};

/// Why an operation among ranks failed.
enum class CommunicatorFailure : std::uint8_t {
  timeout,    ///< a rank did not arrive, or did not finish, within the timeout
  mismatch,   ///< ranks called different operations, element types or sizes
  aborted,    ///< some rank called `abort`
  rank_left,  ///< a rank gave its communicator up while others still needed it
  injected,   ///< a test asked for this failure
  transport,  ///< what carries the messages (MPI, the network) reported an error
};

[[nodiscard]] constexpr std::string_view to_string(CommunicatorFailure failure) noexcept {
  switch (failure) {
    case CommunicatorFailure::timeout: return "timeout";
    case CommunicatorFailure::mismatch: return "mismatch";
    case CommunicatorFailure::aborted: return "aborted";
    case CommunicatorFailure::rank_left: return "rank left";
    case CommunicatorFailure::injected: return "injected failure";
    case CommunicatorFailure::transport: return "transport error";
  }
  return "unknown";
}

/// An operation among ranks failed. The communicator is poisoned from then on: every later
/// operation on it throws at once with the same cause. Build a new communicator to go on.
class CommunicatorError : public Error {
 public:
  /// @param rank the rank whose call throws
  /// @param operation e.g. "reduce_scatter"
  /// @param sequence how many operations this communicator had started before that one
  /// @param what the whole message: cause, sizes, ranks that are missing or differ, remedy
  CommunicatorError(CommunicatorFailure failure, int rank, std::string operation,
                    std::uint64_t sequence, const std::string& what)
      : Error(what),
        failure_(failure),
        rank_(rank),
        operation_(std::move(operation)),
        sequence_(sequence) {}

  [[nodiscard]] CommunicatorFailure failure() const noexcept { return failure_; }
  [[nodiscard]] int rank() const noexcept { return rank_; }
  [[nodiscard]] const std::string& operation() const noexcept { return operation_; }
  [[nodiscard]] std::uint64_t sequence() const noexcept { return sequence_; }

 private:
  CommunicatorFailure failure_;
  int rank_;
  std::string operation_;
  std::uint64_t sequence_;
};

}  // namespace zero
