// SPDX-License-Identifier: Apache-2.0
// The processes that train together, where ranks are processes: MPI from its beginning to its end.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "trace.hpp"

namespace zero {
class MpiCommunicator;
}  // namespace zero

namespace bert {

/// How many processes a launcher such as mpirun started, this one among them; 0 without one.
[[nodiscard]] int launched_processes();

/// This process and those that were started with it; until `begin` it is alone, and rank 0. At its
/// end MPI is finalised, which waits for the others: where one is gone, leave by `std::_Exit`.
class Processes {
 public:
  Processes();
  Processes(const Processes&) = delete;
  Processes& operator=(const Processes&) = delete;
  ~Processes();

  /// Whether the program was built with MPI.
  [[nodiscard]] static bool compiled();
  /// Starts MPI, once. Throws `InputError` where the program was built without.
  void begin();
  [[nodiscard]] bool begun() const { return mpi_ != nullptr; }
  [[nodiscard]] int rank() const;
  [[nodiscard]] int size() const;

  // Collective from here on, and of all a process that is alone only agrees, with itself. They
  // throw `zero::CommunicatorError`.

  void connect(std::chrono::seconds timeout);
  /// The one that `connect` made.
  [[nodiscard]] zero::MpiCommunicator& communicator();
  /// Those that share this process's host, itself among them.
  [[nodiscard]] const std::vector<int>& ranks_of_host() const;
  /// Where a process has a refusal, which is not empty, throws the first one's on all, as
  /// `InputError`: none goes on without the others.
  void agree(const std::string& refusal);
  /// Throws `InputError` on all where one was started with other arguments.
  void require_same(int argc, const char* const* argv);
  /// Makes this process's recorder those of all ranks, on rank 0. Times of other hosts are as good
  /// as a barrier is simultaneous.
  void gather(std::vector<Recorder>& recorders);

  /// Tells the others that this process goes no further; not collective.
  void abort(const char* why) noexcept;

 private:
  struct Mpi;
  std::unique_ptr<Mpi> mpi_;
};

}  // namespace bert
