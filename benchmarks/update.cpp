// SPDX-License-Identifier: Apache-2.0
// The shipped update loop against the roof: a loop over the same arrays that only moves them.
#include <array>
#include <cstddef>
#include <zero/detail/storage.hpp>
#include <zero/detail/update_loop.hpp>
#include <zero/memory.hpp>
#include <zero/optim/adam.hpp>
#include <zero/precision.hpp>

#include "model_memory.hpp"
#include "reference_loops.hpp"
#include "table.hpp"
#include "team.hpp"

namespace bench {
namespace {

using Plain = zero::detail::Storage<float, zero::NativePrecision>;

void measure_update(Sheet& sheet, int threads, double bound) {
  const std::size_t n = std::size_t{64} << 20;  // 1 GiB in all: far more than any cache
  std::array<zero::HostArray<float>, 4> arrays;
  for (std::size_t k = 0; k < arrays.size(); ++k) {
    arrays[k] = zero::HostArray<float>(n);
    fill(arrays[k], 1e-3F);
  }
  const auto [p, g, m, v] = [&] {
    return std::array{arrays[0].data(), arrays[1].data(), arrays[2].data(), arrays[3].data()};
  }();
  const zero::Adam rule;
  const AdamScalars scalars = rule.scalars<float>(1000);
  const std::size_t share = n / static_cast<std::size_t>(threads);
  Team team(threads);

  const Pairs pairs = run_pairs(
      [&] {
        team.run([&](int rank) {
          const std::size_t at = static_cast<std::size_t>(rank) * share;
          const zero::detail::UpdateArrays<Plain, 3> mine{
              p + at, nullptr, {m + at, v + at, nullptr}};
          zero::detail::update_elements(rule, scalars, mine, g + at, share);
        });
      },
      [&] {
        team.run([&](int rank) {
          const std::size_t at = static_cast<std::size_t>(rank) * share;
          roof(p + at, g + at, m + at, v + at, share);
        });
      },
      31);
  const double bytes = roof_bytes * static_cast<double>(n);
  sheet.ratio(
      "", pairs, at_least(bound),
      "fp32 Adam's loop " + rate(bytes, pairs.subject) + ", roof " + rate(bytes, pairs.reference));
}

const Row one_thread("update/1_thread", [](Sheet& sheet) { measure_update(sheet, 1, .85); });
const Row two_threads("update/2_threads", [](Sheet& sheet) { measure_update(sheet, 2, .90); });

}  // namespace
}  // namespace bench
