// SPDX-License-Identifier: Apache-2.0
#include <memory>
#include <vector>
#include <zero/comm/mpi.hpp>

#include "runs.hpp"
#include "train.hpp"

namespace example {

std::vector<RunReport> train_mpi(const Options& options) {
  compute_on_one_thread();
  const std::unique_ptr<Task> task = make_task(options);
  zero::MpiCommunicator comm(MPI_COMM_WORLD);
  return train_all(options, *task, comm);
}

}  // namespace example
