// The same training under many combinations of policies, chosen at compile time: what each rank
// keeps differs, and how long a step takes; what comes out doesn't, to the last bit.
#include <algorithm>
#include <array>
#include <chrono>
#include <cinttypes>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <random>
#include <span>
#include <string>
#include <thread>
#include <vector>
#include <zero/comm/fault_injector.hpp>
#include <zero/zero.hpp>

#include "own_policies.hpp"
#include "perceptron.hpp"

namespace {

using namespace zero::literals;  // 4_KiB

constexpr int ranks = 4;
constexpr int steps = 20;

// Ranks that read each other's memory, and ranks that know nothing but collectives, as over a
// network: the fault injector, without faults, hides that memory is shared.
using SharedMemory = zero::InProcessCommunicator;
using Collectives = zero::FaultInjector<zero::InProcessCommunicator, false>;

// Names for the table.
template <class Policy>
constexpr const char* name = nullptr;
template <>
constexpr const char* name<SharedMemory> = "shared memory";
template <>
constexpr const char* name<Collectives> = "collectives";
template <>
constexpr const char* name<zero::ContiguousPartition> = "ContiguousPartition";
template <>
constexpr const char* name<zero::BalancedPartition> = "BalancedPartition";
template <>
constexpr const char* name<HalfOnRankZero> = "HalfOnRankZero *";
template <>
constexpr const char* name<RoundRobin> = "RoundRobin *";
template <>
constexpr const char* name<zero::NoView> = "NoView";
template <>
constexpr const char* name<zero::ParamView> = "ParamView";
template <>
constexpr const char* name<zero::ParamAndGradView> = "ParamAndGradView";
template <>
constexpr const char* name<GradView> = "GradView *";
template <>
constexpr const char* name<zero::Stage1> = "Stage1";
template <>
constexpr const char* name<zero::Replicated> = "Replicated";
template <>
constexpr const char* name<zero::MixedPrecision> = "Mixed";
template <>
constexpr const char* name<zero::NativePrecision> = "Native";

/// FNV-1a, 64 bits.
std::uint64_t hash_of(const std::vector<Tensor>& tensors) {
  std::uint64_t hash = 0xcbf29ce484222325U;
  for (const Tensor& tensor : tensors) {
    for (const std::byte byte : std::as_bytes(tensor.values())) {
      hash = (hash ^ static_cast<std::uint64_t>(byte)) * 0x100000001b3U;
    }
  }
  return hash;
}

struct Report {
  std::array<zero::MemoryReport, ranks> memory;  // by rank, as the hashes
  std::array<std::uint64_t, ranks> hash{};
  double step_ms = 0;  // median of rank 0's optimizer steps
};

template <class Partition, class View, class Stage, class Precision, class Comm>
Report train(std::size_t bucket_bytes) {
  Report report;
  zero::run_ranks(ranks, [&](zero::InProcessCommunicator& in_process) {
    Comm comm(in_process);
    Perceptron network(1), teacher(2);
    zero::ZeroSharded optimizer{
        zero::Groups{zero::AdamW{}, zero::AdamW{.weight_decay = 0}},  // biases don't decay
        network.tensors,
        comm,
        Partition{},
        View{bucket_bytes},
        Stage{},
        Precision{}};

    std::mt19937 random(100 + static_cast<unsigned>(comm.rank()));  // each rank its own data
    std::normal_distribution<float> normal;
    std::vector<float> input(4 * Perceptron::inputs);
    std::vector<double> times;
    for (int step = 0; step < steps; ++step) {
      std::generate(input.begin(), input.end(), [&] { return normal(random); });
      optimizer.zero_grad();
      network.backward(input, teacher.forward(input),
                       [&](std::size_t i) { optimizer.mark_ready(i); });
      comm.barrier().wait();  // so that waiting for a slower rank's backward is not timed
      const auto begin = std::chrono::steady_clock::now();
      optimizer.step();
      const std::chrono::duration<double, std::milli> took =
          std::chrono::steady_clock::now() - begin;
      times.push_back(took.count());
    }
    const auto rank = static_cast<std::size_t>(comm.rank());
    report.memory[rank] = optimizer.memory();
    report.hash[rank] = hash_of(network.tensors);
    if (rank == 0) {
      std::nth_element(times.begin(), times.begin() + steps / 2, times.end());
      report.step_ms = times[steps / 2];
    }
  });
  return report;
}

/// Trains, prints a row, and says whether all ranks' parameters have this hash (0: any, and from
/// then on that one).
template <class Partition, class View, class Stage, class Precision, class Comm>
bool row(std::size_t bucket_bytes, std::uint64_t& wanted) {
  const Report report = train<Partition, View, Stage, Precision, Comm>(bucket_bytes);
  const auto most = [&](std::size_t zero::MemoryReport::* what) {
    std::size_t bytes = 0;
    for (const zero::MemoryReport& of : report.memory) bytes = std::max(bytes, of.*what);
    return bytes;
  };
  const std::string bucket =
      bucket_bytes == zero::PerTensor{} ? "tensor" : std::to_string(bucket_bytes >> 10) + " KiB";
  if (wanted == 0) wanted = report.hash[0];
  const bool same = std::all_of(report.hash.begin(), report.hash.end(),
                                [&](std::uint64_t hash) { return hash == wanted; });
  std::printf("%-19s %-16s %9s  %-10s %-6s %-13s %7zu %7zu %9zu %8zu %8.3f  %016" PRIx64 "%s\n",
              name<Partition>, name<View>, bucket.c_str(), name<Stage>, name<Precision>, name<Comm>,
              most(&zero::MemoryReport::state), most(&zero::MemoryReport::values),
              most(&zero::MemoryReport::gradients), most(&zero::MemoryReport::staging),
              report.step_ms, report.hash[0], same ? "" : "  DIFFERENT");
  return same;
}

}  // namespace

int main() {
  std::size_t elements = 0;
  for (const Tensor& tensor : Perceptron(1).tensors) elements += tensor.values().size();
  std::printf(
      "%zu parameters in float, AdamW, %d ranks, %d steps; * is this example's own\n"
      "bytes: what the optimizer keeps on the rank where it is most; values and gradients that a "
      "view moves\nare in place of the framework's\n\n",
      elements, ranks, steps);
  std::printf("%-19s %-16s %9s  %-10s %-6s %-13s %7s %7s %9s %8s %8s  %s\n", "partition", "view",
              "bucket", "stage", "prec.", "through", "state", "values", "gradients", "staging",
              "ms/step", "parameters' hash");

  using zero::BalancedPartition, zero::ContiguousPartition, zero::PerTensor;
  using zero::MixedPrecision, zero::NativePrecision, zero::Replicated, zero::Stage1;
  using zero::NoView, zero::ParamAndGradView, zero::ParamView;
  std::uint64_t hash = 0;  // of the first row, plain data parallelism
  bool same = true;
  // clang-format off
  same &= row<ContiguousPartition, NoView, Replicated, NativePrecision, SharedMemory>(25_MiB, hash);
  same &= row<ContiguousPartition, NoView, Replicated, MixedPrecision, Collectives>(4_KiB, hash);
  same &= row<ContiguousPartition, NoView, Stage1, MixedPrecision, SharedMemory>(25_MiB, hash);
  same &= row<ContiguousPartition, NoView, Stage1, NativePrecision, Collectives>(PerTensor{}, hash);
  same &= row<ContiguousPartition, ParamView, Stage1, NativePrecision, Collectives>(4_KiB, hash);
  same &= row<ContiguousPartition, ParamAndGradView, Stage1, MixedPrecision, Collectives>(4_KiB, hash);
  same &= row<ContiguousPartition, ParamView, Replicated, MixedPrecision, SharedMemory>(PerTensor{}, hash);
  same &= row<BalancedPartition, NoView, Stage1, MixedPrecision, Collectives>(4_KiB, hash);
  same &= row<BalancedPartition, ParamView, Stage1, NativePrecision, SharedMemory>(PerTensor{}, hash);
  same &= row<BalancedPartition, ParamAndGradView, Replicated, NativePrecision, Collectives>(25_MiB, hash);
  same &= row<HalfOnRankZero, NoView, Stage1, NativePrecision, SharedMemory>(4_KiB, hash);
  same &= row<HalfOnRankZero, GradView, Stage1, MixedPrecision, Collectives>(PerTensor{}, hash);
  same &= row<RoundRobin, ParamAndGradView, Stage1, MixedPrecision, SharedMemory>(25_MiB, hash);
  same &= row<RoundRobin, GradView, Replicated, NativePrecision, Collectives>(4_KiB, hash);
  // clang-format on

  const unsigned cores = std::thread::hardware_concurrency();
  if (cores < ranks) {
    std::printf("(%d ranks take turns on %u cores, so the times say little)\n", ranks, cores);
  }
  std::printf("\nparameters: %s\n", same ? "the same under all, bit for bit" : "DIFFERENT");
  return same ? 0 : 1;
}
