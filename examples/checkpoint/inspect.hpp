// SPDX-License-Identifier: Apache-2.0
// What a checkpoint holds, in words.
#pragma once

#include <string>
#include <zero/checkpoint/checkpoint.hpp>

namespace checkpoint_tool {

/// One line: step, ranks, parameters, bytes.
[[nodiscard]] std::string summary_of(const zero::Checkpoint& checkpoint);

/// Groups' options, a table of parameters and their totals, and the files.
[[nodiscard]] std::string table_of(const zero::Checkpoint& checkpoint);

/// The same, for programs.
[[nodiscard]] std::string json_of(const zero::Checkpoint& checkpoint);

}  // namespace checkpoint_tool
