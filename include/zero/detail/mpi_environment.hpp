// SPDX-License-Identifier: Apache-2.0
/// @file
/// Whether MPI may be called, here and now.
#pragma once

#include <mpi.h>

#include <cstddef>
#include <string>

#include "zero/error.hpp"

namespace zero::detail {

/// Between MPI_Init and MPI_Finalize.
inline bool mpi_is_up() noexcept {
  int initialized = 0, finalized = 0;
  MPI_Initialized(&initialized);
  MPI_Finalized(&finalized);
  return initialized != 0 && finalized == 0;
}

inline int mpi_thread_level() noexcept {
  int level = MPI_THREAD_SINGLE;
  MPI_Query_thread(&level);
  return level;
}

/// Whether this thread may call MPI. With MPI_THREAD_SERIALIZED that is the caller's promise.
inline bool may_call_mpi() noexcept {
  if (!mpi_is_up()) return false;
  if (mpi_thread_level() >= MPI_THREAD_SERIALIZED) return true;
  int main = 0;
  MPI_Is_thread_main(&main);
  return main != 0;
}

/// Whether this thread may call MPI although another one of this process may be doing so.
inline bool any_thread_may_call_mpi() noexcept {
  if (!mpi_is_up()) return false;
  const int level = mpi_thread_level();
  return level == MPI_THREAD_MULTIPLE || (level < MPI_THREAD_SERIALIZED && may_call_mpi());
}

inline std::string mpi_error(const char* call, int code) {
  char text[MPI_MAX_ERROR_STRING] = "";
  int length = 0;
  MPI_Error_string(code, text, &length);
  return std::string(call) + ": " + std::string(text, static_cast<std::size_t>(length));
}

/// Throws a `UsageError` that says why MPI may not be called.
inline void require_mpi(const char* operation) {
  if (may_call_mpi()) return;
  int initialized = 0, finalized = 0;
  MPI_Initialized(&initialized);
  MPI_Finalized(&finalized);
  const std::string what = std::string(operation) + " over MPI: ";
  if (initialized == 0) {
    throw UsageError(what + "MPI is not initialised; call MPI_Init or MPI_Init_thread first.");
  }
  if (finalized != 0) {
    throw UsageError(what +
                     "MPI has been finalised; destroy every communicator before "
                     "MPI_Finalize, and use none after it.");
  }
  throw UsageError(what +
                   "MPI was initialised for calls from its main thread alone (MPI_THREAD_SINGLE or "
                   "MPI_THREAD_FUNNELED), and this is another one; initialise it by "
                   "MPI_Init_thread with MPI_THREAD_MULTIPLE, or call from the main thread.");
}

/// `comm`, which must be a communicator with ranks on one side.
inline MPI_Comm require_comm(MPI_Comm comm, const char* operation) {
  require_mpi(operation);
  int inter = 0;
  if (comm != MPI_COMM_NULL) MPI_Comm_test_inter(comm, &inter);
  if (comm == MPI_COMM_NULL || inter != 0) {
    throw UsageError(std::string(operation) + ": the MPI_Comm is " +
                     (inter != 0 ? "an inter-communicator; merge it (MPI_Intercomm_merge) first."
                                 : "MPI_COMM_NULL; this process is no member of it."));
  }
  return comm;
}

inline std::size_t rank_in(MPI_Comm comm) {
  int rank = 0;
  MPI_Comm_rank(comm, &rank);
  return static_cast<std::size_t>(rank);
}

/// Of this process's host, as MPI has it.
inline std::string processor_name() {
  char name[MPI_MAX_PROCESSOR_NAME] = "";
  int length = 0;
  MPI_Get_processor_name(name, &length);
  return {name, static_cast<std::size_t>(length)};
}

inline std::size_t size_of(MPI_Comm comm) {
  int size = 1;
  MPI_Comm_size(comm, &size);
  return static_cast<std::size_t>(size);
}

}  // namespace zero::detail
