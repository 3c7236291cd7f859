// SPDX-License-Identifier: Apache-2.0
// Full steps over BERT-large's tensors.
#include <array>
#include <barrier>
#include <chrono>
#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>
#include <zero/zero.hpp>

#include "bert_shapes.hpp"
#include "given_memory.hpp"
#include "model_memory.hpp"
#include "reference_loops.hpp"
#include "table.hpp"
#include "team.hpp"

namespace bench {
namespace {

constexpr int world = 2;

/// Observes how long each part of a step took.
class PartTimes {
 public:
  using Clock = std::chrono::steady_clock;
  void begin(const zero::Event&) noexcept { begun_ = Clock::now(); }
  void end(const zero::Event& event) noexcept {
    seconds_[static_cast<std::size_t>(event.phase)] +=
        std::chrono::duration<double>(Clock::now() - begun_).count();
  }
  [[nodiscard]] double of(zero::Phase phase) const {
    return seconds_[static_cast<std::size_t>(phase)];
  }
  void reset() { seconds_ = {}; }

 private:
  std::array<double, 3> seconds_{};
  Clock::time_point begun_{};
};

template <class Stage>
using BertOptimizer = zero::ZeroSharded<zero::Adam, std::vector<zero::ParamRef<float>>&,
                                        zero::InProcessCommunicator, zero::ContiguousPartition,
                                        zero::NoView, Stage, zero::MixedPrecision, PartTimes>;

zero::Settings settings_with(GivenMemory& memory) {
  zero::Settings settings;
  settings.check_values = false;  // they are equal, and reading them all takes a while
  settings.memory = &memory;
  return settings;
}

/// Two ranks, each a thread with a whole model, and room for what their optimizers keep.
class Ranks {
 public:
  /// @param slot_elements room for each of a rank's moments
  /// @param sum_elements room for gradient sums, if any
  Ranks(std::size_t slot_elements, std::size_t sum_elements) {
    const std::vector<Shape> shapes = bert_large_shapes();
    team.run([&](int r) {
      Rank& rank = ranks_[static_cast<std::size_t>(r)];
      rank.model.emplace(shapes);
      rank.exp_avg = zero::HostArray<float>(slot_elements);
      rank.exp_avg_sq = zero::HostArray<float>(slot_elements);
      rank.sums = zero::HostArray<float>(sum_elements);
    });
  }

  struct Rank {
    std::optional<ModelMemory> model{};
    zero::HostArray<float> exp_avg{}, exp_avg_sq{}, sums{};
  };
  [[nodiscard]] Rank& operator[](int r) { return ranks_[static_cast<std::size_t>(r)]; }

  Team team{world};

 private:
  std::array<Rank, world> ranks_{};
};

/// A world of optimizers over the ranks' models.
template <class Stage>
class Optimizers {
 public:
  explicit Optimizers(Ranks& ranks, std::optional<double> max_norm = std::nullopt)
      : ranks_(&ranks) {
    for (int r = 0; r < world; ++r) {
      memory_[r].emplace(std::vector{&ranks[r].exp_avg, &ranks[r].exp_avg_sq, &ranks[r].sums});
    }
    ranks.team.run([&](int r) {
      optimizer_[r].emplace(zero::Adam{}, ranks[r].model->store(), world_.communicator(r),
                            zero::NoView{}, settings_with(*memory_[r]), PartTimes{});
      optimizer_[r]->clip_grad_norm(max_norm);
    });
  }

  void step() {
    ranks_->team.run([&](int r) { optimizer_[r]->step(); });
  }

  /// The mean over ranks of a part of all steps so far, divided by their number.
  [[nodiscard]] double seconds_of(zero::Phase phase) {
    double sum = 0;
    for (auto& optimizer : optimizer_) {
      sum += optimizer->observer().of(phase) / static_cast<double>(optimizer->steps());
    }
    return sum / world;
  }

 private:
  Ranks* ranks_;
  zero::InProcessWorld world_{world};
  std::array<std::optional<GivenMemory>, world> memory_{};
  std::array<std::optional<BertOptimizer<Stage>>, world> optimizer_{};
};

/// Two threads over plain arrays: each sums the gradients of its half of every tensor, steps them
/// and fetches the other half, with barriers between.
class BareLoop {
 public:
  explicit BareLoop(Ranks& ranks) : ranks_(&ranks) {}

  void step() {
    const AdamScalars scalars = zero::Adam{}.scalars<float>(++steps_);
    ranks_->team.run([&](int r) {
      Times& times = times_[r];
      times.sum += seconds([&] {
        for_each_half(r, [&](Half own, Half other, std::size_t n) {
          mean_into(own.gradient, other.gradient, n);
        });
        barrier_.arrive_and_wait();
      });
      times.update += seconds([&] {
        float* m = (*ranks_)[r].exp_avg.data();
        float* v = (*ranks_)[r].exp_avg_sq.data();
        for_each_half(r, [&](Half own, Half, std::size_t n) {
          adam(own.values, own.gradient, m, v, n, scalars);
          m += n;
          v += n;
        });
        barrier_.arrive_and_wait();
      });
      times.copy += seconds([&] { fetch(r); });
    });
  }

  /// The same with the sum folded into the update.
  void folded_step() {
    const AdamScalars scalars = zero::Adam{}.scalars<float>(++steps_);
    ranks_->team.run([&](int r) {
      float* m = (*ranks_)[r].exp_avg.data();
      float* v = (*ranks_)[r].exp_avg_sq.data();
      for_each_half(r, [&](Half own, Half other, std::size_t n) {
        adam_of_mean(own.values, own.gradient, other.gradient, m, v, n, scalars);
        m += n;
        v += n;
      });
      barrier_.arrive_and_wait();
      fetch(r);
    });
  }

  struct Times {
    double sum = 0, update = 0, copy = 0;
  };
  [[nodiscard]] Times times(int rank) const { return times_[static_cast<std::size_t>(rank)]; }

 private:
  struct Half {
    float* values;
    float* gradient;
  };
  /// `f(own, other, n)`: half `which` of every tensor on rank `which` and on the other one.
  template <class F>
  void for_each_half(int which, const F& f) {
    ModelMemory& own = *(*ranks_)[which].model;
    ModelMemory& other = *(*ranks_)[1 - which].model;
    for (std::size_t i = 0; i < own.tensors(); ++i) {
      const std::size_t middle = own.elements(i) / 2;
      const std::size_t at = which == 0 ? 0 : middle;
      const std::size_t n = which == 0 ? middle : own.elements(i) - middle;
      f(Half{own.values(i) + at, own.gradient(i) + at},
        Half{other.values(i) + at, other.gradient(i) + at}, n);
    }
  }
  void fetch(int rank) {
    for_each_half(1 - rank, [](Half theirs, Half mine, std::size_t n) {
      copy(mine.values, theirs.values, n);
    });
  }

  Ranks* ranks_;
  std::barrier<> barrier_{world};
  std::int64_t steps_ = 0;
  std::array<Times, world> times_{};
};

std::size_t bert_elements() { return elements_of(bert_large_shapes()); }

/// Room for the padding of a few buckets.
constexpr std::size_t spare = 1024;

std::string milliseconds(double seconds) { return text(1e3 * seconds, "ms"); }
std::string milliseconds(const std::vector<double>& times) {
  return milliseconds(spread_of(times).median);
}

Spread in_milliseconds(std::vector<double> times) {
  for (double& time : times) time *= 1e3;
  return spread_of(std::move(times));
}

/// A part that is done within another one takes no time of its own.
template <class Stage>
std::string parts_of(Optimizers<Stage>& optimizers) {
  std::string parts;
  const auto add = [&](const char* name, zero::Phase phase) {
    const double seconds = optimizers.seconds_of(phase);
    if (seconds > 0) parts += (parts.empty() ? "" : ", ") + (name + milliseconds(seconds));
  };
  add("reduce ", zero::Phase::reduce);
  add("update ", zero::Phase::update);
  add("gather ", zero::Phase::gather);
  return parts;
}

const Row one_rank("step/1_rank", [](Sheet& sheet) {
  ModelMemory model(bert_large_shapes());
  zero::HostArray<float> m(bert_elements() + spare), v(bert_elements() + spare);
  GivenMemory memory({&m, &v});
  zero::InProcessWorld alone(1);
  zero::ZeroSharded optimizer{zero::Adam{}, model.store(), alone.communicator(0),
                              settings_with(memory)};
  std::int64_t steps = 0;
  const auto by_hand = [&] {
    const AdamScalars scalars = zero::Adam{}.scalars<float>(++steps);
    std::size_t at = 0;
    for (std::size_t i = 0; i < model.tensors(); ++i) {
      adam(model.values(i), model.gradient(i), m.data() + at, v.data() + at, model.elements(i),
           scalars);
      at += model.elements(i);
    }
  };
  const Pairs pairs = run_pairs([&] { optimizer.step(); }, by_hand, 21);
  sheet.ratio("", pairs, at_most(1.05),
              "BERT-large, K=1: " + milliseconds(pairs.subject) + ", hand-written loop " +
                  milliseconds(pairs.reference));
});

const Row against_replicated("step/replicated", [](Sheet& sheet) {
  Ranks ranks(bert_elements() + spare, bert_elements() / world + spare);
  Optimizers<zero::Stage1> sharded(ranks);
  Optimizers<zero::Replicated> replicated(ranks);
  const Pairs pairs = run_pairs([&] { sharded.step(); }, [&] { replicated.step(); });
  sheet.ratio("", pairs, at_most(1.0),
              "BERT-large, K=2: Stage1 " + milliseconds(pairs.subject) + ", Replicated " +
                  milliseconds(pairs.reference));
  sheet.value("stage1", "ms", in_milliseconds(pairs.subject), {}, parts_of(sharded));
  sheet.value("replicated", "ms", in_milliseconds(pairs.reference), {}, parts_of(replicated));
});

const Row clipped_alone("step/clipped_1_rank", [](Sheet& sheet) {
  ModelMemory model(bert_large_shapes());
  zero::HostArray<float> m(bert_elements() + spare), v(bert_elements() + spare);
  GivenMemory memory({&m, &v});
  zero::InProcessWorld alone(1);
  zero::ZeroSharded optimizer{zero::Adam{}, model.store(), alone.communicator(0),
                              settings_with(memory)};
  const auto step = [&](std::optional<double> max_norm) {
    optimizer.clip_grad_norm(max_norm);
    optimizer.step();
  };
  const Pairs pairs = run_pairs([&] { step(1.0); }, [&] { step(std::nullopt); }, 21);
  sheet.ratio("", pairs, at_most(1.25),
              "BERT-large, K=1: clipped " + milliseconds(pairs.subject) + ", unclipped " +
                  milliseconds(pairs.reference));
});

const Row clipped("step/clipped", [](Sheet& sheet) {
  Ranks ranks(bert_elements() / world + spare, bert_elements() / world + spare);
  Optimizers<zero::Stage1> clips(ranks, 1.0);
  Optimizers<zero::Stage1> plain(ranks);
  const Pairs pairs = run_pairs([&] { clips.step(); }, [&] { plain.step(); }, 21);
  sheet.ratio("", pairs, at_most(1.25),
              "BERT-large, K=2: clipped " + milliseconds(pairs.subject) + ", unclipped " +
                  milliseconds(pairs.reference));
  sheet.value("clipped", "ms", in_milliseconds(pairs.subject), {}, parts_of(clips));
  sheet.value("unclipped", "ms", in_milliseconds(pairs.reference), {}, parts_of(plain));
});

const Row against_bare("step/bare_loop", [](Sheet& sheet) {
  Ranks ranks(bert_elements() / world + spare, 0);
  Optimizers<zero::Stage1> sharded(ranks);
  BareLoop bare(ranks);
  const Pairs pairs = run_pairs([&] { sharded.step(); }, [&] { bare.step(); });
  sheet.ratio("", pairs, at_most(1.10),
              "BERT-large, K=2: Stage1 " + milliseconds(pairs.subject) + ", two bare threads " +
                  milliseconds(pairs.reference));
  const BareLoop::Times times = bare.times(0);
  const double steps = pair_count + 1;
  sheet.value("stage1", "ms", in_milliseconds(pairs.subject), {}, parts_of(sharded));
  sheet.value("bare", "ms", in_milliseconds(pairs.reference), {},
              "sum " + milliseconds(times.sum / steps) + ", update " +
                  milliseconds(times.update / steps) + ", copy " +
                  milliseconds(times.copy / steps));
  const Pairs folded = run_pairs([&] { sharded.step(); }, [&] { bare.folded_step(); });
  sheet.ratio("folded", folded, {},
              "against the bare loop with the sum folded into the update: " +
                  milliseconds(folded.subject) + ", " + milliseconds(folded.reference));
});

}  // namespace
}  // namespace bench
