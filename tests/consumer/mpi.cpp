// SPDX-License-Identifier: Apache-2.0
// A user of zero's component mpi. Refused without MPI_Init, so that it needs no mpirun.
#include <mpi.h>

#include <zero/comm/mpi.hpp>

int main() {
  try {
    const zero::MpiCommunicator comm(MPI_COMM_WORLD);
  } catch (const zero::UsageError&) {
    return 0;
  }
  return 1;
}
