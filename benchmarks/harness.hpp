// SPDX-License-Identifier: Apache-2.0
// What a program of benchmarks does with its arguments.
#pragma once

#include <string>

namespace bench {

/// [NAME…] [--json FILE] [--benchmark_…]: measures the rows whose names match one of the regular
/// expressions NAME (all without one), prints their table, and writes it as JSON (to `json`, unless
/// told otherwise). Returns 1 where a bound is missed, 2 where it was called wrongly.
/// @param speaks whether this process prints and writes; of several one does
int run(int argc, char** argv, std::string json, bool speaks = true);

}  // namespace bench
