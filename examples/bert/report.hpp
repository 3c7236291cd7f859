// SPDX-License-Identifier: Apache-2.0
// What a training run prints and writes.
#pragma once

#include <string>
#include <vector>

#include "options.hpp"
#include "training.hpp"

namespace bert {

/// Tables of memory and time, of each run and side by side.
[[nodiscard]] std::string tables(const Options& options, const std::vector<RunReport>& runs);
/// Whether both runs went the same number of steps, with the same losses and parameters.
[[nodiscard]] bool same_bits(const RunReport& a, const RunReport& b);
/// Whether all did.
[[nodiscard]] bool same_bits(const std::vector<RunReport>& runs);
/// Throws `InputError` where the file can't be written.
void write_json(const Options& options, const std::vector<RunReport>& runs);

/// One line that says how far a run is.
[[nodiscard]] std::string progress_line(const Options& options, const RunReport& run);

}  // namespace bert
