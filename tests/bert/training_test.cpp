// SPDX-License-Identifier: Apache-2.0
// The trainer of examples/bert: under every combination of policies that it was compiled for,
// replicated and sharded training end on the same bits, and memory is what was estimated.
#include "bert/training.hpp"

#include <atomic>
#include <cmath>
#include <cstddef>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "bert/batch.hpp"
#include "bert/input_error.hpp"
#include "bert/options.hpp"
#include "bert/report.hpp"
#include "bert/text.hpp"
#include "catch.hpp"

namespace {

bert::Options options_of(const bert::Combination& c) {
  bert::Options options;
  options.model = {.name = "test",
                   .layers = 2,
                   .hidden = 16,
                   .heads = 2,
                   .intermediate = 36,
                   .vocabulary = 43,
                   .positions = 16};
  options.ranks = 3;
  options.optimizer = c.optimizer;
  options.precision = c.precision;
  options.partition = c.partition;
  options.bucket_view = c.bucket_view;
  options.bucket_bytes = 8192;
  options.batch = 2;
  options.sequence = 12;
  options.steps = 3;
  options.warmup = 1;
  options.clip = 0.5;
  options.dropout = 0.1;
  return options;
}

bert::RunReport train(const bert::Options& options, const bert::Combination& combination,
                      bool sharded, std::function<void(const bert::RunReport&)> progress = {},
                      const std::atomic<bool>* interrupted = nullptr) {
  static const std::atomic<bool> never{false};
  const bert::SyntheticSource source(options.model.vocabulary, options.batch, options.sequence,
                                     options.seed);
  return combination.train({.options = &options,
                            .source = &source,
                            .interrupted = interrupted == nullptr ? &never : interrupted,
                            .recorders = nullptr,
                            .progress = std::move(progress)},
                           sharded);
}

bool same_memory(const bert::RankMemory& a, const bert::RankMemory& b) {
  return a.parameters == b.parameters && a.gradients == b.gradients && a.state == b.state &&
         a.buckets == b.buckets && a.activations == b.activations;
}

}  // namespace

TEST_CASE("replicated and sharded training end on the same bits", "[bert]") {
  for (const bert::Combination& c : bert::combinations()) {
    INFO(c.optimizer << ", " << c.precision << ", " << c.partition << ", " << c.bucket_view);
    const bert::Options options = options_of(c);
    const bert::RunReport replicated = train(options, c, false);
    const bert::RunReport sharded = train(options, c, true);
    REQUIRE(replicated.losses.size() == options.steps);
    CHECK(std::isfinite(replicated.losses.back()));
    CHECK(replicated.hash != 0);
    CHECK(bert::same_bits(replicated, sharded));
    CHECK(replicated.norms == sharded.norms);
    std::size_t state = 0;
    for (std::size_t rank = 0; rank < 3; ++rank) {
      const int r = static_cast<int>(rank);
      CHECK(same_memory(replicated.memory[rank], c.estimate(options, false, r)));
      CHECK(same_memory(sharded.memory[rank], c.estimate(options, true, r)));
      state += sharded.memory[rank].state;
    }
    // Together the ranks keep the state once, but for padding.
    CHECK(static_cast<double>(state) < 1.1 * static_cast<double>(replicated.memory.front().state));
  }
}

TEST_CASE("training depends on the seed, and on nothing else", "[bert]") {
  const bert::Combination& c = bert::combinations().front();
  bert::Options options = options_of(c);
  const bert::RunReport first = train(options, c, true);
  CHECK(bert::same_bits(first, train(options, c, true)));
  options.seed = 2;
  CHECK_FALSE(bert::same_bits(first, train(options, c, true)));
}

TEST_CASE("an interrupt ends all ranks at the same step", "[bert]") {
  const bert::Combination& c = bert::combinations().front();
  bert::Options options = options_of(c);
  options.steps = 1000;
  std::atomic<bool> interrupted{false};
  const bert::RunReport run = train(
      options, c, true,
      [&](const bert::RunReport& report) {
        if (report.losses.size() == 2) interrupted = true;
      },
      &interrupted);
  CHECK(run.interrupted);
  CHECK(run.losses.size() == 3);
  CHECK(run.memory.back().state > 0);

  // Side by side with a run that went on there is nothing to compare.
  bert::RunReport whole = run;
  whole.mode = "replicated";
  whole.losses.push_back(1);
  const std::string text = bert::tables(options, {whole, run});
  CHECK(text.find("not compared, since the replicated run ended after 4 steps") !=
        std::string::npos);
  CHECK(text.find("DIFFERENT") == std::string::npos);
}

TEST_CASE("what has become of losses is said", "[bert]") {
  const bert::Combination& c = bert::combinations().front();
  bert::Options options = options_of(c);
  options.clip.reset();
  options.lr = 1e30;
  options.warmup = 0;
  options.steps = 4;
  const bert::RunReport run = train(options, c, true);
  CHECK(bert::tables(options, {run}).find("not a finite number from step") != std::string::npos);
}

TEST_CASE("what was not compiled is refused with what there is", "[bert]") {
  bert::Options options = options_of(bert::combinations().front());
  CHECK_NOTHROW(bert::choose(options));
  options.precision = "fp8";
  CHECK_THROWS_AS(bert::choose(options), bert::InputError);
  CHECK_THROWS_WITH(
      bert::choose(options),
      Catch::Matchers::ContainsSubstring(
          "there are\n  --precision fp32 --partition contiguous --bucket-view param"));
  options.optimizer = "muon";
  CHECK_THROWS_WITH(bert::choose(options),
                    Catch::Matchers::ContainsSubstring("no such optimizer; there are "));
}

TEST_CASE("a run that can't fit is refused with the estimate", "[bert]") {
  const bert::Combination& c = bert::combinations().front();
  bert::Options options = options_of(c);
  options.model = bert::config_of("large");
  options.batch = 8;
  options.sequence = 128;
  options.ranks = 2;
  options.mode = bert::Mode::compare;
  const std::uint64_t needed = bert::memory_needed(options, c, false);
  const bert::RankMemory rank = c.estimate(options, false, 0);
  CHECK(rank.parameters == 4 * std::size_t{335174458});
  CHECK(needed >= 2 * rank.total());
  CHECK(bert::memory_needed(options, c, true) < needed);
  CHECK_NOTHROW(bert::require_memory(options, c, needed));
  CHECK_NOTHROW(bert::require_memory(options, c, std::nullopt));
  CHECK_NOTHROW(bert::require_memory(options, c, needed, needed + (std::uint64_t{1} << 30)));
  CHECK_THROWS_AS(bert::require_memory(options, c, needed, needed), bert::InputError);
  CHECK_THROWS_AS(bert::require_memory(options, c, needed - 1), bert::InputError);
  CHECK_THROWS_WITH(bert::require_memory(options, c, 1'000'000'000U),
                    Catch::Matchers::ContainsSubstring("keeps 1.34 GB of parameters"));
  // Of ranks that are processes, a host has to hold its own.
  const std::vector<int> first{0}, second{1};
  const std::size_t half = bert::memory_needed(options, c, false, first);
  CHECK(half + bert::memory_needed(options, c, false, second) == needed);
  CHECK_NOTHROW(bert::require_memory(options, c, half, {}, first));
  CHECK_THROWS_AS(bert::require_memory(options, c, half - 1, {}, first), bert::InputError);
  options.mode = bert::Mode::sharded;
  CHECK_NOTHROW(bert::require_memory(options, c, needed - 1));
}
