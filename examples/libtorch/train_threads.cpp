// SPDX-License-Identifier: Apache-2.0
#include <memory>
#include <utility>
#include <vector>

#include "runs.hpp"
#include "train.hpp"

namespace example {

std::vector<RunReport> train_threads(const Options& options) {
  compute_on_one_thread();
  const std::unique_ptr<Task> task = make_task(options);
  std::vector<RunReport> reports;
  zero::run_ranks(options.ranks, [&](zero::InProcessCommunicator& comm) {
    std::vector<RunReport> mine = train_all(options, *task, comm);
    if (comm.rank() == 0) reports = std::move(mine);
  });
  return reports;
}

}  // namespace example
