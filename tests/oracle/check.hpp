// SPDX-License-Identifier: Apache-2.0
// Runs drawn cases against the oracle, and says which seed differed.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "catch.hpp"
#include "oracle.hpp"

namespace oracle {

template <class Path, class Model, class Partition, class View, class Stage,
          class Precision = zero::MixedPrecision, class Opt>
void check(std::uint32_t first_seed, const std::vector<Opt>& groups, std::uint32_t seeds = 120) {
#ifdef ZERO_TEST_EACH_ONCE  // sanitizers and a second compiler: each world three times
  seeds = 24;
#endif
  for (std::uint32_t seed = first_seed; seed < first_seed + seeds; ++seed) {
    std::string found;
    try {
      found =
          run<Path, Model, Partition, View, Stage, Precision>(draw(seed, groups.size()), groups);
    } catch (const std::exception& error) {
      found = error.what();
    }
    INFO("seed " << seed);
    REQUIRE(found == "");
  }
}

}  // namespace oracle
