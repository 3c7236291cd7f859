// SPDX-License-Identifier: Apache-2.0
// MPI for a test program whose main is Catch's: up before main, down at exit.
#pragma once

#include <mpi.h>

/// One per program, at namespace scope.
struct MpiProcess {
  explicit MpiProcess(int level) {
    int provided = 0;
    MPI_Init_thread(nullptr, nullptr, level, &provided);
  }
  MpiProcess(const MpiProcess&) = delete;
  MpiProcess& operator=(const MpiProcess&) = delete;
  ~MpiProcess() { MPI_Finalize(); }
};
