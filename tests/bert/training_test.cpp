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

bert::RunReport train(const bert::Options& options, const bert::Combination& combination, int stage,
                      std::function<void(const bert::RunReport&)> progress = {},
                      const std::atomic<bool>* interrupted = nullptr) {
  static const std::atomic<bool> never{false};
  const bert::SyntheticSource source(options.model.vocabulary, options.batch, options.sequence,
                                     options.seed);
  const std::string mode = bert::mode_of(options, stage);
  return combination.at(stage).train({.options = &options,
                                      .source = &source,
                                      .interrupted = interrupted == nullptr ? &never : interrupted,
                                      .mode = mode.c_str(),
                                      .recorders = nullptr,
                                      .progress = std::move(progress)});
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
    const bert::RunReport replicated = train(options, c, 0);
    const bert::RunReport sharded = train(options, c, 1);
    REQUIRE(replicated.losses.size() == options.steps);
    CHECK(std::isfinite(replicated.losses.back()));
    CHECK(replicated.hash != 0);
    CHECK(bert::same_bits(replicated, sharded));
    CHECK(replicated.norms == sharded.norms);
    std::size_t state = 0;
    for (std::size_t rank = 0; rank < 3; ++rank) {
      const int r = static_cast<int>(rank);
      CHECK(same_memory(replicated.memory[rank], c.at(0).estimate(options, r)));
      CHECK(same_memory(sharded.memory[rank], c.at(1).estimate(options, r)));
      state += sharded.memory[rank].state;
    }
    // Together the ranks keep the state once, but for padding.
    CHECK(static_cast<double>(state) < 1.1 * static_cast<double>(replicated.memory.front().state));
  }
}

TEST_CASE("all stages end on the same bits, whatever the number of ranks", "[bert]") {
  for (const bert::Combination& c : bert::combinations()) {
    if (c.stages.size() <= 2) continue;
    for (const int ranks : {1, 2, 3}) {
      for (const bool clips : {false, true}) {
        INFO(c.optimizer << ", " << c.precision << ", " << ranks << " ranks, clips " << clips);
        bert::Options options = options_of(c);
        options.ranks = ranks;
        if (!clips) options.clip.reset();
        const bert::RunReport replicated = train(options, c, 0);
        REQUIRE(std::isfinite(replicated.losses.back()));
        for (int stage = 1; stage < static_cast<int>(c.stages.size()); ++stage) {
          INFO("stage " << stage);
          const bert::RunReport run = train(options, c, stage);
          CHECK(run.stage == stage);
          CHECK(bert::same_bits(replicated, run));
          CHECK(run.norms == replicated.norms);
          CHECK(run.sent.size() == (stage > 1 ? run.memory.size() : 0));
          if (ranks == 1) continue;
          for (std::size_t rank = 0; rank < run.memory.size(); ++rank) {
            const bert::RankMemory &kept = run.memory[rank], &all = replicated.memory[rank];
            const bert::RankMemory estimated =
                c.at(stage).estimate(options, static_cast<int>(rank));
            CHECK(same_memory(kept, estimated));
            // A part, but for padding.
            const auto part = [&](std::size_t whole) { return whole / options.ranks * 5 / 4; };
            CHECK(kept.state < part(all.state));
            if (stage >= 2) {
              const std::size_t wider = options.precision == "bf16" ? 2 : 1;  // sums are float
              CHECK(kept.gradients < wider * part(all.gradients));
              // More than was estimated only until the order of gradients has been learned.
              CHECK(kept.pool < all.gradients * 5 / 4);
            } else {
              CHECK(kept.gradients == all.gradients);
              CHECK(kept.pool + kept.gathered == 0);
            }
            if (stage >= 3) CHECK(kept.gathered <= estimated.gathered);
            CHECK((kept.parameters < part(all.parameters)) == (stage >= 3));
          }
        }
      }
    }
  }
}

TEST_CASE("training goes on where it was saved as if it had not ended", "[bert]") {
  const std::filesystem::path folder =
      std::filesystem::temp_directory_path() / "zero-bert-training-test";
  for (const bert::Combination& c : bert::combinations()) {
    INFO(c.optimizer << ", " << c.precision << ", " << c.partition << ", " << c.bucket_view);
    bert::Options options = options_of(c);
    const bert::RunReport whole = train(options, c, 1);
    options.until = 2;
    options.save = folder;
    REQUIRE(train(options, c, static_cast<int>(c.stages.size()) - 1).losses.size() == 2);
    options.until = 0;
    options.save.clear();
    options.resume = folder;
    options.seen = 2;
    for (int stage = 0; stage < static_cast<int>(c.stages.size()); ++stage) {
      const bert::RunReport rest = train(options, c, stage);
      CHECK(rest.losses == std::vector<float>{whole.losses.back()});
      CHECK(rest.norms == std::vector<double>{whole.norms.back()});
      CHECK(rest.hash == whole.hash);
    }
  }
  std::filesystem::remove_all(folder);
}

TEST_CASE("training depends on the seed, and on nothing else", "[bert]") {
  const bert::Combination& c = bert::combinations().front();
  bert::Options options = options_of(c);
  const bert::RunReport first = train(options, c, 1);
  CHECK(bert::same_bits(first, train(options, c, 1)));
  options.seed = 2;
  CHECK_FALSE(bert::same_bits(first, train(options, c, 1)));
}

TEST_CASE("an interrupt ends all ranks at the same step", "[bert]") {
  const bert::Combination& c = bert::combinations().front();
  bert::Options options = options_of(c);
  options.steps = 1000;
  std::atomic<bool> interrupted{false};
  const bert::RunReport run = train(
      options, c, 1,
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
  const bert::RunReport run = train(options, c, 1);
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
  options = options_of(bert::combinations().back());
  if (bert::combinations().back().stages.size() == 2) {
    options.stages = {3};
    CHECK_THROWS_WITH(bert::choose(options),
                      Catch::Matchers::ContainsSubstring("--optimizer " + options.optimizer +
                                                         " --stage 3 was not compiled; "));
  }
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
  const std::uint64_t needed = bert::memory_needed(options, c, 0);
  const bert::RankMemory rank = c.at(0).estimate(options, 0);
  CHECK(rank.parameters == 4 * std::size_t{335174458});
  CHECK(needed >= 2 * rank.total());
  CHECK(bert::memory_needed(options, c, 1) < needed);
  CHECK_NOTHROW(bert::require_memory(options, c, needed));
  CHECK_NOTHROW(bert::require_memory(options, c, std::nullopt));
  CHECK_NOTHROW(bert::require_memory(options, c, needed, needed + (std::uint64_t{1} << 30)));
  CHECK_THROWS_AS(bert::require_memory(options, c, needed, needed), bert::InputError);
  CHECK_THROWS_AS(bert::require_memory(options, c, needed - 1), bert::InputError);
  CHECK_THROWS_WITH(bert::require_memory(options, c, 1'000'000'000U),
                    Catch::Matchers::ContainsSubstring("keeps 1.34 GB of parameters"));
  // Of ranks that are processes, a host has to hold its own.
  const std::vector<int> first{0}, second{1};
  const std::size_t half = bert::memory_needed(options, c, 0, first);
  CHECK(half + bert::memory_needed(options, c, 0, second) == needed);
  CHECK_NOTHROW(bert::require_memory(options, c, half, {}, first));
  CHECK_THROWS_AS(bert::require_memory(options, c, half - 1, {}, first), bert::InputError);
  options.mode = bert::Mode::sharded;
  CHECK_NOTHROW(bert::require_memory(options, c, needed - 1));
}
