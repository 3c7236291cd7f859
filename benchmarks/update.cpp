// SPDX-License-Identifier: Apache-2.0
// The shipped update loop against the roof, a loop over the same arrays that only moves them, and
// against itself.
#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <zero/bfloat16.hpp>
#include <zero/detail/denormals.hpp>
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

/// bfloat16 parameters and gradients, and what is kept of them in float.
struct HalfArrays {
  explicit HalfArrays(std::size_t n) : values(n), gradient(n), master(n), m(n), v(n) {
    for (std::size_t i = 0; i < n; ++i) {
      values.data()[i] = zero::bfloat16(1e-2F);
      gradient.data()[i] = zero::bfloat16(1e-3F * static_cast<float>(1 + i % 7));
    }
    fill(master, 1e-2F);
    fill(m, 1e-3F);
    fill(v, 1e-3F);
  }
  zero::HostArray<zero::bfloat16> values, gradient;
  zero::HostArray<float> master, m, v;
};

template <zero::Rounding rounding>
void update_half(HalfArrays& arrays, const zero::Adam& rule, const AdamScalars& scalars,
                 std::size_t at, std::size_t count) {
  using Precision = zero::BasicPrecision<float, float, rounding>;
  const zero::detail::UpdateArrays<zero::detail::Storage<zero::bfloat16, Precision>, 3> mine{
      arrays.values.data() + at,
      arrays.master.data() + at,
      {arrays.m.data() + at, arrays.v.data() + at, nullptr},
      zero::detail::noise_key(1, 2, 3),
      static_cast<std::uint32_t>(at)};
  const zero::bfloat16* const gradient = arrays.gradient.data() + at;
  zero::detail::update_elements(
      rule, scalars, mine, zero::detail::GradientSum<zero::bfloat16>{{&gradient, 1}, 1.0F}, count);
}

constexpr std::size_t half_elements = std::size_t{64} << 20;  // 1 GiB in all

void measure_half(Sheet& sheet, int threads, double bound) {
  HalfArrays arrays(half_elements);
  const zero::Adam rule;
  const AdamScalars scalars = rule.scalars<float>(1000);
  const std::size_t share = half_elements / static_cast<std::size_t>(threads);
  Team team(threads);
  const auto place = [&](int rank) { return static_cast<std::size_t>(rank) * share; };
  const Pairs pairs = run_pairs(
      [&] {
        team.run([&](int rank) {
          update_half<zero::Rounding::nearest>(arrays, rule, scalars, place(rank), share);
        });
      },
      [&] {
        team.run([&](int rank) {
          const std::size_t at = place(rank);
          roof_16(reinterpret_cast<std::uint16_t*>(arrays.values.data()) + at,
                  reinterpret_cast<const std::uint16_t*>(arrays.gradient.data()) + at,
                  arrays.master.data() + at, arrays.m.data() + at, arrays.v.data() + at, share);
        });
      },
      21);
  const double bytes = roof_16_bytes * static_cast<double>(half_elements);
  sheet.ratio("", pairs, at_least(bound),
              "bf16 with float masters, Adam: " + rate(bytes, pairs.subject) + ", roof " +
                  rate(bytes, pairs.reference));
}

const Row stochastic("update/stochastic", [](Sheet& sheet) {
  HalfArrays arrays(half_elements);
  const zero::Adam rule;
  const AdamScalars scalars = rule.scalars<float>(1000);
  const Pairs pairs = run_pairs(
      [&] { update_half<zero::Rounding::stochastic>(arrays, rule, scalars, 0, half_elements); },
      [&] { update_half<zero::Rounding::nearest>(arrays, rule, scalars, 0, half_elements); }, 21);
  const double bytes = roof_16_bytes * static_cast<double>(half_elements);
  sheet.ratio("", pairs, at_most(1.3),
              "bf16 with float masters, 1 thread: stochastic " + rate(bytes, pairs.subject) +
                  ", to nearest " + rate(bytes, pairs.reference));
});

/// State that has decayed below the smallest normal number, as of parameters that get no gradient.
void measure_denormal(Sheet& sheet, int threads, bool flushes, std::optional<Bound> bound) {
  const std::size_t n = std::size_t{32} << 20;
  struct State {
    explicit State(std::size_t count, float size, float slope)
        : p(count), g(count), m(count), v(count) {
      fill(p, 1e-2F);
      fill(g, slope);
      fill(m, size);
      fill(v, size);
    }
    zero::HostArray<float> p, g, m, v;
  };
  State tiny(n, 1e-39F, 0), normal(n, 1e-3F, 1e-3F);
  const zero::Adam rule;
  const AdamScalars scalars = rule.scalars<float>(1000);
  const std::size_t share = n / static_cast<std::size_t>(threads);
  Team team(threads);
  const auto step = [&](State& of) {
    team.run([&](int rank) {
      const zero::detail::FlushDenormals flush(flushes);
      const std::size_t at = static_cast<std::size_t>(rank) * share;
      const zero::detail::UpdateArrays<Plain, 3> mine{
          of.p.data() + at, nullptr, {of.m.data() + at, of.v.data() + at, nullptr}};
      zero::detail::update_elements(rule, scalars, mine, of.g.data() + at, share);
    });
  };
  const Pairs pairs = run_pairs([&] { step(tiny); }, [&] { step(normal); }, 21);
  const double bytes = roof_bytes * static_cast<double>(n);
  sheet.ratio("", pairs, bound,
              "fp32 Adam: denormal moments " + rate(bytes, pairs.subject) + ", normal ones " +
                  rate(bytes, pairs.reference));
}

const Row denormal("update/denormal",
                   [](Sheet& sheet) { measure_denormal(sheet, 2, false, at_most(1.2)); });
const Row denormal_alone("update/denormal_1_thread",
                         [](Sheet& sheet) { measure_denormal(sheet, 1, false, {}); });
const Row denormal_flushed("update/denormal_flushed",
                           [](Sheet& sheet) { measure_denormal(sheet, 1, true, at_most(1.2)); });

const Row half_one_thread("update/bf16_1_thread", [](Sheet& s) { measure_half(s, 1, .85); });
const Row half_two_threads("update/bf16_2_threads", [](Sheet& s) { measure_half(s, 2, .85); });

const Row one_thread("update/1_thread", [](Sheet& sheet) { measure_update(sheet, 1, .85); });
const Row two_threads("update/2_threads", [](Sheet& sheet) { measure_update(sheet, 2, .90); });

}  // namespace
}  // namespace bench
