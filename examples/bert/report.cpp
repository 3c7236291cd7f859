// SPDX-License-Identifier: Apache-2.0
#include "report.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>
#include <numeric>
#include <thread>
#include <utility>

#include "input_error.hpp"

namespace bert {

namespace {

#ifdef __GNUC__
[[gnu::format(printf, 1, 2)]]
#endif
std::string formatted(const char* format, ...) {
  char line[512];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(line, sizeof line, format, arguments);
  va_end(arguments);
  return line;
}

constexpr std::array<std::pair<const char*, std::size_t RankMemory::*>, 7> memory_parts{
    {{"parameters", &RankMemory::parameters},
     {"gradients", &RankMemory::gradients},
     {"state", &RankMemory::state},
     {"buckets", &RankMemory::buckets},
     {"pool", &RankMemory::pool},
     {"gathered", &RankMemory::gathered},
     {"activations", &RankMemory::activations}}};

constexpr std::array<std::pair<const char*, double StepTime::*>, 9> time_parts{
    {{"forward", &StepTime::forward},
     {"backward", &StepTime::backward},
     {"wait", &StepTime::wait},
     {"reduce", &StepTime::reduce},
     {"update", &StepTime::update},
     {"gather", &StepTime::gather},
     {"step", &StepTime::step},
     {"traffic", &StepTime::traffic},
     {"exposed", &StepTime::exposed}}};

double ratio(double a, double b) { return b == 0 ? 1 : a / b; }
double ratio(std::size_t a, std::size_t b) {
  return ratio(static_cast<double>(a), static_cast<double>(b));
}
double megabytes(std::uint64_t bytes) { return 1e-6 * static_cast<double>(bytes); }

/// The rank that keeps most.
const RankMemory& fullest(const RunReport& run) {
  return *std::max_element(
      run.memory.begin(), run.memory.end(),
      [](const RankMemory& a, const RankMemory& b) { return a.total() < b.total(); });
}

// Linux counts both lazily, so that the peak may seem lower than the end.
std::uint64_t peak_of(const Resident& seen) { return std::max(*seen.peak, *seen.after); }

/// Of the process whose threads all ranks are.
std::string process_line(const RunReport& run) {
  const Resident& seen = run.processes.front().resident;
  if (!seen.before || !seen.built || !seen.after) return "";
  std::string text = formatted(
      "  the process, %zu rank%s, resident MB: before %.1f, models and optimizers "
      "built %.1f, at the end %.1f",
      run.memory.size(), run.memory.size() == 1 ? "" : "s", megabytes(*seen.before),
      megabytes(*seen.built), megabytes(*seen.after));
  if (seen.peak) text += formatted(", peak %.1f", megabytes(peak_of(seen)));
  std::size_t estimated = 0;
  for (const RankMemory& m : run.estimated) estimated += m.built();
  if (estimated > 0 && *seen.built >= *seen.before) {
    text += formatted("\n  built: grown by %.1f, estimated before %.1f: ratio %.4f",
                      megabytes(*seen.built - *seen.before), megabytes(estimated),
                      ratio(*seen.built - *seen.before, estimated));
  }
  return text + "\n";
}

/// Of processes that are ranks.
std::string process_table(const RunReport& run) {
  std::string text =
      "  a process a rank, resident MB; built: models and optimizers are there, grown since "
      "before\n"
      "  rank      process     before      built      grown  estimated   ratio     at end"
      "       peak  host\n";
  for (std::size_t r = 0; r < run.processes.size(); ++r) {
    const Process& process = run.processes[r];
    const Resident& seen = process.resident;
    text += formatted("  %4zu  %11lld", r, static_cast<long long>(process.id));
    if (seen.before && seen.built && seen.after) {
      const double grown = megabytes(*seen.built) - megabytes(*seen.before);
      const double estimated = r < run.estimated.size() ? megabytes(run.estimated[r].built()) : 0;
      text += formatted(" %10.1f %10.1f %10.1f %10.1f  %.4f %10.1f", megabytes(*seen.before),
                        megabytes(*seen.built), grown, estimated, ratio(grown, estimated),
                        megabytes(*seen.after));
      text += seen.peak ? formatted(" %10.1f", megabytes(peak_of(seen))) : formatted(" %10s", "?");
    }
    text += formatted("  %s\n", process.host.data());
  }
  return text;
}

std::string memory_table(const RunReport& run) {
  std::string text = run.mode + ", bytes per rank\n";
  text +=
      "  rank  parameters    gradients  optimizer state     buckets        pool    gathered"
      "  activations          sum\n";
  for (std::size_t r = 0; r < run.memory.size(); ++r) {
    const RankMemory& m = run.memory[r];
    text += formatted("  %4zu %11zu  %11zu      %11zu %11zu %11zu %11zu  %11zu  %11zu\n", r,
                      m.parameters, m.gradients, m.state, m.buckets, m.pool, m.gathered,
                      m.activations, m.total());
  }
  const bool share_memory = run.processes.size() == 1;
  text += formatted(
      "  buckets: what views and traffic add: padding, and sums that ranks keep for each other%s\n",
      share_memory ? "" : ", and\n  buckets on their way");
  if (run.stage > 1) {
    text +=
        formatted("  the most that came and went: pool: of gradients before they are reduced%s\n",
                  run.stage > 2 ? "; gathered: of units" : "");
  }
  return text + (share_memory ? process_line(run) : process_table(run));
}

std::string time_table(const std::vector<RunReport>& runs) {
  std::string text = "ms per step: of each column the median, without the first step";
  text += "\n             rank";
  for (const auto& [name, part] : time_parts) text += formatted("  %9s", name);
  text += "     hidden  products\n";
  for (const RunReport& run : runs) {
    for (std::size_t r = 0; r < run.time.size(); ++r) {
      const StepTime& t = run.time[r];
      text += formatted("  %-10s %4zu", run.mode.c_str(), r);
      for (const auto& [name, part] : time_parts) text += formatted("  %9.2f", 1e3 * t.*part);
      text +=
          formatted("     %5.1f%%    %5.1f%%\n", 100 * t.hidden(), 100 * ratio(t.products, t.step));
    }
  }
  text +=
      "  wait: for slower ranks and to agree; reduce: 0 where sums are taken as part of the "
      "update;\n"
      "  traffic: in which gradients or values were on their way, exposed: of it waited for, in\n"
      "  forward and backward too, hidden: the share that was not; products: share of the step\n"
      "  spent in matrix products\n";
  return text;
}

/// The most that a process had, which is all ranks where they are threads.
std::string peak_text(const RunReport& run) {
  std::uint64_t most = 0;
  for (const Process& process : run.processes) {
    if (!process.resident.peak || !process.resident.after) return "?";
    most = std::max(most, peak_of(process.resident));
  }
  return formatted("%.1f", megabytes(most));
}

/// A row a run, of what its fullest rank keeps and its slowest takes.
std::string comparison(const std::vector<RunReport>& runs) {
  const RankMemory& first = fullest(runs.front());
  std::string text =
      "side by side, MB of the fullest rank; estimated: before the run; peak: of the process\n"
      "              parameters  gradients  optimizer state    buckets       pool   gathered  all "
      "but "
      "activations  ratio  estimated       peak\n";
  for (const RunReport& run : runs) {
    const RankMemory& m = fullest(run);
    std::size_t estimated = 0;
    for (const RankMemory& rank : run.estimated) {
      estimated = std::max(estimated, rank.model_state());
    }
    text += formatted(
        "  %-10s  %10.1f %10.1f       %10.1f %10.1f %10.1f %10.1f           %10.1f  %.3f",
        run.mode.c_str(), megabytes(m.parameters), megabytes(m.gradients), megabytes(m.state),
        megabytes(m.buckets), megabytes(m.pool), megabytes(m.gathered), megabytes(m.model_state()),
        ratio(m.model_state(), first.model_state()));
    text += formatted(" %10.1f %10s\n", megabytes(estimated), peak_text(run).c_str());
  }
  text +=
      "side by side, ms of the slowest rank\n              reduce + update + gather  ratio"
      "       step  ratio    traffic    exposed   hidden\n";
  const StepTime& before = runs.front().slowest();
  for (const RunReport& run : runs) {
    const StepTime& t = run.slowest();
    text +=
        formatted("  %-10s                %10.2f  %.3f %10.2f  %.3f %10.2f %10.2f   %5.1f%%\n",
                  run.mode.c_str(), 1e3 * t.optimizer(), ratio(t.optimizer(), before.optimizer()),
                  1e3 * t.step, ratio(t.step, before.step), 1e3 * t.traffic, 1e3 * t.exposed,
                  100 * t.hidden());
  }
  return text;
}

std::string ending(const std::vector<RunReport>& runs) {
  const std::vector<float>& losses = runs.front().losses;
  const std::size_t last = std::min<std::size_t>(losses.size(), 10);
  const float sum =
      std::accumulate(losses.end() - static_cast<std::ptrdiff_t>(last), losses.end(), 0.0F);
  std::string text = formatted("loss: %.4f in the first step, %.4f in the last %zu (mean)\n",
                               static_cast<double>(losses.front()),
                               static_cast<double>(sum) / static_cast<double>(last), last);
  const RunReport& shortest = runs.back();  // if any was interrupted
  if (runs.front().losses.size() != shortest.losses.size()) {
    return text + formatted(
                      "losses and parameters: not compared, since the %s run ended after "
                      "%zu steps and the %s one after %zu\n",
                      runs.front().mode.c_str(), runs.front().losses.size(), shortest.mode.c_str(),
                      shortest.losses.size());
  }
  const auto finite = [](float loss) { return std::isfinite(loss); };
  const auto lost = std::find_if_not(losses.begin(), losses.end(), finite);
  if (lost != losses.end()) {
    text += formatted(
        "the loss is not a finite number from step %zu on, so there is nothing to "
        "compare; take a smaller --lr\n",
        static_cast<std::size_t>(lost - losses.begin()) + 1);
  }
  text += "losses and parameters: ";
  if (runs.size() > 1) text += same_bits(runs) ? "the same, bit for bit; " : "DIFFERENT; ";
  text += "hash of the parameters";
  for (const RunReport& run : runs) {
    text += formatted(" %016llx", static_cast<unsigned long long>(run.hash));
  }
  return text + "\n";
}

}  // namespace

bool same_bits(const RunReport& a, const RunReport& b) {
  return a.hash == b.hash && a.losses.size() == b.losses.size() &&
         std::memcmp(a.losses.data(), b.losses.data(), a.losses.size() * sizeof(float)) == 0;
}

bool same_bits(const std::vector<RunReport>& runs) {
  return std::all_of(runs.begin(), runs.end(),
                     [&](const RunReport& run) { return same_bits(runs.front(), run); });
}

std::string tables(const Options& options, const std::vector<RunReport>& runs) {
  std::string text;
  for (const RunReport& run : runs) {
    text += memory_table(run);
    if (run.skipped > 0) {
      text += formatted("  %zu of %zu steps were skipped: gradients were not finite\n", run.skipped,
                        run.losses.size());
    }
    text += "\n";
  }
  text += time_table(runs);
  const auto cores = static_cast<int>(std::thread::hardware_concurrency());
  if (cores > 0 && options.ranks > cores) {
    text += formatted("  (%d ranks take turns on %d processors, so the times say little)\n",
                      options.ranks, cores);
  }
  text += "\n";
  if (runs.size() > 1 && runs.front().losses.size() == runs.back().losses.size()) {
    text += comparison(runs);
  }
  return text + ending(runs);
}

std::string progress_line(const Options& options, const RunReport& run) {
  const std::size_t done = options.seen + run.losses.size();
  const double each = run.seconds / static_cast<double>(run.losses.size());
  const double tokens =
      static_cast<double>(options.batch_size().tokens() * static_cast<std::size_t>(options.ranks));
  std::string text = formatted("%-10s step %4zu/%zu  loss %.4f", run.mode.c_str(), done,
                               options.steps, static_cast<double>(run.losses.back()));
  if (!run.norms.empty()) text += formatted("  norm %.3f", run.norms.back());
  text += formatted("  %.0f tokens/s  %.0f s left", tokens / each,
                    each * static_cast<double>(options.end() - done));
  return text;
}

void write_json(const Options& options, const std::vector<RunReport>& runs) {
  const bool over_mpi = options.communicator == Ranks::mpi;
  const auto given = [](std::optional<double> number) {
    return number ? nlohmann::ordered_json(*number) : nlohmann::ordered_json();
  };
  nlohmann::ordered_json all{{"model", options.model.name},
                             {"vocabulary", options.model.vocabulary},
                             {"optimizer", options.optimizer},
                             {"precision", options.precision},
                             {"partition", options.partition},
                             {"bucket_view", options.bucket_view},
                             {"bucket_bytes", options.bucket_bytes},
                             {"communicator", over_mpi ? "mpi" : "in-process"},
                             {"ranks", options.ranks},
                             {"batch", options.batch},
                             {"sequence", options.sequence},
                             {"steps", options.steps},
                             {"data", options.data},
                             {"lr", options.lr},
                             {"warmup", options.warmup},
                             {"clip", given(options.clip)},
                             {"weight_decay", given(options.weight_decay)},
                             {"dropout", options.dropout},
                             {"seed", options.seed},
                             {"modes", nlohmann::ordered_json::array()}};
  const auto times_of = [](const StepTime& time) {
    nlohmann::ordered_json seconds;
    for (const auto& [name, part] : time_parts) seconds[name] = time.*part;
    seconds["products"] = time.products;
    seconds["hidden"] = time.hidden();
    return seconds;
  };
  const auto memory_of = [](const RankMemory& memory) {
    nlohmann::ordered_json bytes;
    for (const auto& [name, part] : memory_parts) bytes[name] = memory.*part;
    return bytes;
  };
  const auto known = [](std::optional<std::uint64_t> bytes) {
    return bytes ? nlohmann::ordered_json(*bytes) : nlohmann::ordered_json();
  };
  for (const RunReport& run : runs) {
    nlohmann::ordered_json mode{{"mode", run.mode}, {"stage", run.stage}};
    for (const RankMemory& rank : run.memory) mode["memory"].push_back(memory_of(rank));
    for (const RankMemory& rank : run.estimated) mode["estimated"].push_back(memory_of(rank));
    for (const Process& process : run.processes) {
      const Resident& seen = process.resident;
      nlohmann::ordered_json resident{{"before", known(seen.before)},
                                      {"built", known(seen.built)},
                                      {"after", known(seen.after)},
                                      {"peak", known(seen.peak)}};
      if (over_mpi) {
        resident.update({{"host", process.host.data()}, {"process", process.id}});
        mode["resident_by_rank"].push_back(std::move(resident));
      } else {
        mode["resident"] = std::move(resident);
      }
    }
    mode["seconds"] = times_of(run.slowest());
    for (const StepTime& rank : run.time) mode["seconds_by_rank"].push_back(times_of(rank));
    if (!run.sent.empty()) mode["sent_bytes_by_rank"] = run.sent;
    mode["losses"] = run.losses;
    if (!run.norms.empty()) mode["norms"] = run.norms;
    mode["skipped"] = run.skipped;
    mode["interrupted"] = run.interrupted;
    mode["hash"] = formatted("%016llx", static_cast<unsigned long long>(run.hash));
    all["modes"].push_back(std::move(mode));
  }
  if (runs.size() > 1 && runs.front().losses.size() == runs.back().losses.size()) {
    all["same_bits"] = same_bits(runs);
  }
  std::ofstream file(options.json);
  // A loss may be NaN, which JSON has no number for: it is written as null.
  file << all.dump(2) << "\n";
  file.close();
  if (!file) throw InputError("--json " + options.json.string() + ": can't be written");
}

}  // namespace bert
