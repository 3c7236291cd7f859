// SPDX-License-Identifier: Apache-2.0
/// @file
/// The two ways of running ranks: all that the command line needs to know of training.
#pragma once

#include <vector>

#include "options.hpp"
#include "report.hpp"

namespace example {

/// Ranks are threads of this process. Throws `bert::InputError` for data that can't be used.
[[nodiscard]] std::vector<RunReport> train_threads(const Options& options);

/// Ranks are the processes that mpirun started, this one among them; `MPI_Init` has been called.
[[nodiscard]] std::vector<RunReport> train_mpi(const Options& options);

}  // namespace example
