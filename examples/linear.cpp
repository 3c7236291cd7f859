// Linear(10000, 10000) with a bias under Adam in fp32 on two ranks: where each byte goes when the
// optimizer is replicated, sharded evenly, and dealt out in whole tensors; that an estimate said so
// before anything was allocated; and that all three step to the same bits. An argument gives
// another width. Fails where a figure is not what it must be.
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>
#include <zero/zero.hpp>

namespace {

constexpr int ranks = 2;
constexpr std::size_t slots = 2;  // Adam's

struct Rank {
  zero::ExactEstimate estimate{};  // from shapes, before
  zero::MemoryReport memory{};     // what there is, after
  float weight = 0, bias = 0;      // the last of each, stepped
};
using Report = std::array<Rank, ranks>;

/// 400040000 as 400,040,000.
std::string grouped(std::size_t number) {
  std::string text = std::to_string(number);
  for (std::size_t at = text.size(); at > 3;) text.insert(at -= 3, ",");
  return text;
}

/// Estimates, then allocates, constructs and steps; all is freed before it returns.
template <class... P>
Report run(std::size_t width, P... policies) {
  const std::vector<zero::ParamShape> shapes{{{width, width}, "weight"}, {{width}, "bias"}};
  Report report;
  zero::run_ranks(ranks, [&](zero::InProcessCommunicator& comm) {
    Rank& mine = report[static_cast<std::size_t>(comm.rank())];
    mine.estimate =
        zero::estimate<float>(zero::Adam{}, shapes, zero::EstimateFor::member(comm), policies...);
    // Each rank has a model of its own, and gradients of its own.
    std::vector<float> weight(width * width, 1.0F), bias(width, 0.0F);
    std::vector<float> weight_gradient(weight.size(), comm.rank() == 0 ? 0.5F : 0.25F);
    std::vector<float> bias_gradient(bias.size(), -1.0F);
    std::vector parameters{
        zero::ParamRef("weight", {width, width}, weight.data(), weight_gradient.data()),
        zero::ParamRef("bias", {width}, bias.data(), bias_gradient.data())};
    zero::ZeroSharded optimizer{zero::Adam{}, parameters, comm, policies...};
    optimizer.step();
    mine.memory = optimizer.memory();
    mine.weight = weight.back();
    mine.bias = bias.back();
  });
  return report;
}

bool all_right = true;
void require(bool holds, const std::string& what) {
  if (holds) return;
  all_right = false;
  std::printf("  NOT AS IT MUST BE: %s\n", what.c_str());
}

/// @param state what each rank's must be, padding aside
void show(const char* name, bool sharded, const Report& report,
          std::array<std::size_t, ranks> state, std::size_t elements) {
  std::size_t of_parameters = 0;
  for (std::size_t r = 0; r < report.size(); ++r) {
    const auto& [estimate, memory, weight, bias] = report[r];
    std::printf("%-12s %4zu %12s %12s %12s %7s %12s %8s %8s %14s\n", name, r,
                grouped(estimate.parameters).c_str(), grouped(estimate.gradients).c_str(),
                grouped(memory.state).c_str(), grouped(memory.values).c_str(),
                grouped(memory.gradients).c_str(), grouped(memory.staging).c_str(),
                grouped(estimate.padding).c_str(), grouped(estimate.total()).c_str());
    require(memory == estimate.optimizer, "the estimate differs from what was allocated");
    require(estimate.parameters == elements * sizeof(float), "the parameters' bytes");
    require(estimate.gradients == elements * sizeof(float), "the gradients' bytes");
    const std::size_t most_padding = ranks * zero::slice_alignment * slots;
    require(memory.state >= state[r] && memory.state <= state[r] + most_padding,
            "the state, which is " + grouped(memory.state) + " bytes and should be " +
                grouped(state[r]));
    of_parameters += memory.state - estimate.padding;  // sharded, nothing but state is padded
    require(weight == report[0].weight && bias == report[0].bias, "ranks differ");
  }
  require(!sharded || of_parameters == elements * slots * sizeof(float),
          "all ranks' state without padding");
}

double gigabytes(std::size_t bytes) { return static_cast<double>(bytes) / 1e9; }

}  // namespace

int main(int argc, char** argv) {
  const std::size_t width = argc > 1 ? std::strtoul(argv[1], nullptr, 10) : 10000;
  if (width == 0 || width > 100000) {
    std::printf("usage: linear [WIDTH]   (1 to 100000; 10000)\n");
    return 2;
  }
  const std::size_t weights = width * width;
  const std::size_t elements = weights + width;
  const std::size_t moments = slots * sizeof(float);
  std::printf("Linear(%zu, %zu) with bias: %s parameters, Adam in fp32, %d ranks\n", width, width,
              grouped(elements).c_str(), ranks);
  std::printf(
      "bytes        rank   parameters    gradients        state  arenas         sums  "
      "staging  padding          total\n");

  const Report replicated = run(width, zero::Replicated{});
  show("replicated", false, replicated, {elements * moments, elements * moments}, elements);
  const std::size_t half = elements / ranks;  // always even: width * (width + 1)
  const Report contiguous = run(width, zero::Stage1{}, zero::ContiguousPartition{});
  show("Contiguous", true, contiguous, {half * moments, half * moments}, elements);
  const Report balanced = run(width, zero::Stage1{}, zero::BalancedPartition{});
  show("Balanced", true, balanced, {weights * moments, width * moments}, elements);

  require(contiguous[0].weight == replicated[0].weight &&
              balanced[0].weight == replicated[0].weight &&
              contiguous[0].bias == replicated[0].bias && balanced[0].bias == replicated[0].bias,
          "the ways to shard step to different bits");
  if (width == 10000) {
    require(replicated[0].memory.state == 800'080'000, "800,080,000 bytes replicated");
    for (const Rank& rank : contiguous) {
      require(rank.memory.state == 400'040'000 && rank.estimate.padding == 0,
              "400,040,000 bytes sharded, without padding");
    }
    require(balanced[0].memory.state == 800'000'000, "800,000,000 bytes for the weight");
    require(balanced[1].memory.state == 80'000, "80,000 bytes for the bias");
  }

  const auto with_gradients = [](const Rank& rank) {
    return gigabytes(rank.estimate.gradients + rank.memory.state);
  };
  std::printf(
      "\nSums are those that ranks keep for each other where each needs all of them. Whole "
      "tensors\n"
      "leave nearly all with one rank. PyTorch's ZeroRedundancyOptimizer deals them out alike and\n"
      "keeps a step of 4 bytes a tensor besides: %s and %s bytes.\n"
      "Gradients and state: %.2f GB a rank replicated, %.2f GB sharded.%s\n%s\n",
      grouped(weights * moments + 4).c_str(), grouped(width * moments + 4).c_str(),
      with_gradients(replicated[0]), with_gradients(contiguous[0]),
      width == 10000
          ? " (The often quoted 1.52 and 0.76 GB\nare not of this model: 0.76 GB is less than its "
            "gradients and half of its state.)"
          : "",
      all_right ? "The estimates said the same before anything was allocated."
                : "Some figures are not what they must be.");
  return all_right ? 0 : 1;
}
