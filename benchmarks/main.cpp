// SPDX-License-Identifier: Apache-2.0
// zero_bench: what needs one process. zero_mpi_bench (mpi.cpp) is the other one.
#include "harness.hpp"

int main(int argc, char** argv) { return bench::run(argc, argv, ZERO_BENCH_JSON); }
