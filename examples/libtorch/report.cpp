// SPDX-License-Identifier: Apache-2.0
#include "report.hpp"

#include <algorithm>
#include <cstdarg>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <numeric>

#include "../bert/random.hpp"

namespace example {

namespace {

/// Of all that has to be the same in every run.
std::uint64_t hash_of(const RunReport& report) {
  std::uint64_t hash = report.ranks.front().hash;
  const auto add = [&](double number) {
    std::uint64_t bits = 0;
    std::memcpy(&bits, &number, sizeof bits);
    hash = bert::mix(hash, bits);
  };
  for (const double loss : report.losses) add(loss);
  add(report.accuracy);
  return hash;
}

[[gnu::format(printf, 2, 3)]] void print(std::string& out, const char* format, ...) {
  char line[200];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(line, sizeof line, format, arguments);
  va_end(arguments);
  out += line;
}

/// A row of numbers, a column a run.
template <class Get>
void row(std::string& out, const std::vector<RunReport>& reports, std::size_t rank,
         const char* name, int digits, Get get) {
  std::vector<double> numbers;
  for (const RunReport& report : reports) numbers.push_back(get(report.ranks[rank]));
  if (std::all_of(numbers.begin(), numbers.end(), [](double x) { return x == 0; })) return;
  print(out, "%4zu  %-34s", rank, name);
  for (const double number : numbers) print(out, "%14.*f", digits, number);
  if (numbers.size() == 2 && numbers[0] != 0) print(out, "%8.2f", numbers[1] / numbers[0]);
  out += '\n';
}

}  // namespace

bool same_bits(const std::vector<RunReport>& reports) {
  return std::all_of(reports.begin(), reports.end(), [&](const RunReport& report) {
    return hash_of(report) == hash_of(reports.front()) &&
           std::all_of(report.ranks.begin(), report.ranks.end(), [&](const RankReport& rank) {
             return rank.hash == reports.front().ranks.front().hash;
           });
  });
}

std::string tables(const Options& options, const std::vector<RunReport>& reports) {
  std::string out;
  print(out, "\nrank  %-34s", "");
  for (const RunReport& report : reports) print(out, "%14s", report.mode.c_str());
  out += reports.size() == 2 ? "   ratio\n" : "\n";
  for (std::size_t r = 0; r < reports.front().ranks.size(); ++r) {
    const auto bytes = [&](const char* name, auto get) {
      row(out, reports, r, name, 0,
          [&](const RankReport& rank) { return static_cast<double>(get(rank)); });
    };
    bytes("parameters, bytes", [](auto& rank) { return rank.memory.values; });
    bytes("gradients, as torch made them", [](auto& rank) { return rank.gradients; });
    bytes("  not yet reduced, at most", [](auto& rank) { return rank.memory.pooled_peak; });
    bytes("sums of gradients", [](auto& rank) { return rank.memory.gradients; });
    bytes("optimizer state", [](auto& rank) { return rank.memory.state; });
    bytes("buckets on their way", [](auto& rank) { return rank.memory.staging; });
    if (options.communicator == "mpi") {
      bytes("growth of the process", [](auto& rank) { return rank.grown; });
    }
    row(out, reports, r, "a step, ms", 2, [](auto& rank) { return rank.step_ms; });
    row(out, reports, r, "  reduce + update + gather", 2,
        [](auto& rank) { return rank.update_ms; });
  }
  const RunReport& first = reports.front();
  const auto last = static_cast<std::ptrdiff_t>(std::min<std::size_t>(10, first.losses.size()));
  const double loss = std::accumulate(first.losses.end() - last, first.losses.end(), 0.0) /
                      static_cast<double>(last);
  print(out, "\nloss from %.4f to %.4f (mean of the last ten), accuracy on unseen data %.1f %%\n",
        first.losses.front(), loss, 100 * first.accuracy);
  if (!same_bits(reports)) {
    out += "losses or parameters DIFFER between runs or ranks\n";
  } else if (reports.size() > 1) {
    out += "losses and parameters: the same, bit for bit\n";
  }
  print(out, "hash of losses and parameters: %016llx\n",
        static_cast<unsigned long long>(hash_of(first)));
  return out;
}

}  // namespace example
