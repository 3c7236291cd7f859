// SPDX-License-Identifier: Apache-2.0
// What stages 0 to 3 cost: memory of a rank against the formulas, and traffic that computation
// hides.
#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>
#include <zero/zero.hpp>

#include "../examples/bert/process_memory.hpp"
#include "bert_shapes.hpp"
#include "child.hpp"
#include "model_memory.hpp"
#include "reference_loops.hpp"
#include "table.hpp"
#include "team.hpp"

namespace bench {
namespace {

using Store = std::vector<zero::ShapedParam<float>>;

/// A BERT without memory. Units: the embeddings, each layer, the head.
class Model {
 public:
  Model(std::string_view size, bert::Head head) {
    const bert::Config config = bert::config_of(size);
    const int last = static_cast<int>(config.layers) + 1;
    units_.resize(static_cast<std::size_t>(last) + 1);
    const auto add = [&](const std::string& name, const std::vector<std::size_t>& extents,
                         zero::Attributes attributes) {
      units_[static_cast<std::size_t>(attributes.unit)].push_back(store_.size());
      store_.emplace_back(name, extents, attributes);
    };
    for (const Shape& shape : bert::shapes_of(config, head)) {
      const std::string layer = "bert.encoder.layer.";
      int unit = shape.name.starts_with("bert.embeddings.") ? 0 : last;
      if (shape.name.starts_with(layer)) unit = 1 + std::stoi(shape.name.substr(layer.size()));
      add(shape.name, shape.extents, {.unit = unit});
    }
    tied_ = head == bert::Head::masked_lm;
    if (tied_) {
      const std::span<const std::size_t> words = store_[0].shape();
      add("cls.predictions.decoder.weight", {words.begin(), words.end()},
          {.alias = std::size_t{0}, .unit = last});
    }
  }

  [[nodiscard]] Store store() const { return store_; }
  [[nodiscard]] int units() const { return static_cast<int>(units_.size()); }
  [[nodiscard]] const std::vector<std::size_t>& parameters_of(int unit) const {
    return units_[static_cast<std::size_t>(unit)];
  }
  /// Whether the head works with the word embedding, parameter 0 in unit 0.
  [[nodiscard]] bool tied() const { return tied_; }
  [[nodiscard]] std::size_t elements_of(std::size_t parameter) const {
    std::size_t product = 1;
    for (const std::size_t extent : store_[parameter].shape()) product *= extent;
    return product;
  }
  /// Of the values that a unit has of its own.
  [[nodiscard]] std::size_t bytes_of(int unit) const {
    std::size_t sum = 0;
    for (const std::size_t i : parameters_of(unit)) {
      if (!store_[i].attributes().alias) sum += elements_of(i) * sizeof(float);
    }
    return sum;
  }
  [[nodiscard]] std::size_t tied_bytes() const {
    return tied_ ? elements_of(0) * sizeof(float) : 0;
  }
  /// The most that is gathered at once: what the loop below holds, and one unit ahead.
  [[nodiscard]] std::size_t bytes_in_flight() const {
    std::size_t most = 0;
    for (int u = 0; u + 1 < units(); ++u) most = std::max(most, bytes_of(u) + bytes_of(u + 1));
    // The head holds the embeddings too, while the last layer is gathered for the way back.
    if (tied_) most = std::max(most, bytes_of(0) + bytes_of(units() - 1) + bytes_of(units() - 2));
    return most;
  }

 private:
  Store store_{};
  std::vector<std::vector<std::size_t>> units_{};
  bool tied_ = false;
};

/// Stages 0 and 1 keep all gradients, so the optimizer has them, too: it then reports all memory.
template <class Stage>
using ViewOf = std::conditional_t<Stage::shards_gradients, zero::ParamView, zero::ParamAndGradView>;

template <class Stage>
using StageOptimizer = zero::ZeroSharded<zero::Adam, Store&, zero::InProcessCommunicator,
                                         zero::ContiguousPartition, ViewOf<Stage>, Stage>;

/// What stands for a unit's computation: the time that it takes.
struct Work {
  std::vector<double> forward{}, backward{};  ///< seconds by unit; none: nothing is computed
  static void pass(const std::vector<double>& times, int unit) {
    if (times.empty()) return;
    std::this_thread::sleep_for(
        std::chrono::duration<double>(times[static_cast<std::size_t>(unit)]));
  }
};

/// Forward and backward, in which every element of every gradient is written.
template <class Optimizer>
void compute(Optimizer& optimizer, const Model& model, const Work& work) {
  const auto holding = [&](int unit, const auto& body) {
    optimizer.acquire(unit);
    body();
    optimizer.release(unit);
  };
  const auto backward = [&](int unit) {
    Work::pass(work.backward, unit);
    const std::vector<std::size_t>& parameters = model.parameters_of(unit);
    for (std::size_t k = parameters.size(); k-- > 0;) {
      {
        const auto lease = optimizer.gradient(parameters[k]);
        const std::span<float> gradient = lease.values();
        if (lease.adds()) {
          for (float& g : gradient) g += 1e-3F;
        } else {
          std::fill(gradient.begin(), gradient.end(), 1e-3F);
        }
      }
      optimizer.mark_ready(parameters[k]);
    }
  };
  const int head = model.units() - 1;
  for (int u = 0; u < head; ++u) holding(u, [&] { Work::pass(work.forward, u); });
  if (model.tied()) {
    holding(head, [&] {
      holding(0, [&] {
        Work::pass(work.forward, head);
        backward(head);
      });
    });
  } else {
    holding(head, [&] { Work::pass(work.forward, head); });
    holding(head, [&] { backward(head); });
  }
  for (int u = head; u-- > 0;) holding(u, [&] { backward(u); });
}

/// A world of in-process ranks that train one model, each a thread of the team.
template <class Stage>
class Trainers {
 public:
  Trainers(Team& team, int world, const Model& model)
      : team_(&team), model_(&model), shared_(world), ranks_(static_cast<std::size_t>(world)) {
    team_->run([&](int r) {
      zero::Settings settings;
      settings.check_values = false;  // they are equal, and reading them all takes a while
      settings.initial_value = [](std::string_view, std::size_t) { return 1e-2; };
      Rank& rank = (*this)[r];
      rank.store = model.store();
      rank.optimizer.emplace(zero::Adam{}, rank.store, shared_.communicator(r), settings);
    });
  }

  /// Forward and backward, and a step.
  void run(const Work& work) {
    team_->run([&](int r) {
      compute(*(*this)[r].optimizer, *model_, work);
      (*this)[r].optimizer->step();
    });
  }
  void step_alone() {
    team_->run([&](int r) { (*this)[r].optimizer->step(); });
  }

  [[nodiscard]] StageOptimizer<Stage>& optimizer(int r) { return *(*this)[r].optimizer; }
  /// The ranks' mean.
  [[nodiscard]] zero::TrafficReport traffic() {
    zero::TrafficReport mean;
    const auto add = [&](zero::TrafficReport::Kind& sum, const zero::TrafficReport::Kind& part) {
      sum.busy += part.busy / static_cast<double>(ranks_.size());
      sum.exposed += part.exposed / static_cast<double>(ranks_.size());
      sum.bytes += part.bytes;
    };
    for (Rank& rank : ranks_) {
      const zero::TrafficReport report = rank.optimizer->traffic();
      add(mean.reduce, report.reduce);
      add(mean.gather, report.gather);
    }
    mean.reduce.bytes /= ranks_.size();
    mean.gather.bytes /= ranks_.size();
    return mean;
  }

 private:
  struct Rank {
    Store store{};
    std::optional<StageOptimizer<Stage>> optimizer{};
  };
  [[nodiscard]] Rank& operator[](int r) { return ranks_[static_cast<std::size_t>(r)]; }

  Team* team_;
  const Model* model_;
  zero::InProcessWorld shared_;
  std::vector<Rank> ranks_;
};

// Memory.

/// What is in the formulas, in bytes.
struct Terms {
  std::size_t values = 0;  ///< of the model, padding included; gradients and each slot likewise
  std::size_t bucket = 0;
  std::size_t tied = 0;
  std::size_t in_flight = 0;  ///< units acquired and gathered ahead
};

/// Bytes of a rank, for float Adam.
double formula(int stage, int world, const Terms& terms) {
  const auto whole = static_cast<double>(terms.values);
  const double part = whole / world;
  const auto waiting = static_cast<double>(2 * terms.bucket + terms.tied);
  if (world == 1) return 4 * whole;  // nothing is sent, so nothing waits
  switch (stage) {
    case 0: return 4 * whole + part;  // each rank keeps the sums of its part for its peers
    case 1: return 2 * whole + 2 * part;
    case 2: return whole + 3 * part + waiting;
    default: return 4 * part + static_cast<double>(terms.in_flight) + waiting;
  }
}

struct Measured {
  Terms terms{};
  std::size_t accounted = 0;  ///< by `memory()`, with the peaks; of the rank with most
  std::size_t pooled = 0;     ///< of that, the most that waited to be reduced
  std::size_t gathered = 0;   ///< of that, the most that was gathered
  std::size_t system = 0;     ///< the process's peak less what was there before, by ranks
  std::size_t reduce_bytes = 0, gather_bytes = 0;  ///< payload of the last step, of rank 0
};

template <class Stage>
Measured measure_memory(int world, const Model& model) {
  const std::uint64_t before = bert::resident_bytes().value_or(0);
  if (before == 0 || !bert::reset_peak()) {
    throw std::runtime_error("the system doesn't tell this process's memory");
  }
  Team team(world);
  Trainers<Stage> trainers(team, world, model);
  for (int step = 0; step < 2; ++step) trainers.run({});
  const zero::TrafficReport earlier = trainers.traffic();
  trainers.run({});
  const zero::TrafficReport traffic = trainers.traffic();

  Measured measured;
  const auto peak = bert::peak_resident_bytes().value_or(0);
  measured.system = (peak - before) / static_cast<std::size_t>(world);
  for (int r = 0; r < world; ++r) {
    const zero::MemoryReport report = trainers.optimizer(r).memory();
    const std::size_t sum = report.total() - report.pooled - report.gathered + report.pooled_peak +
                            report.gathered_peak;
    if (sum <= measured.accounted) continue;
    measured.accounted = sum;
    measured.pooled = report.pooled_peak;
    measured.gathered = report.gathered_peak;
  }
  measured.reduce_bytes = traffic.reduce.bytes - earlier.reduce.bytes;
  measured.gather_bytes = traffic.gather.bytes - earlier.gather.bytes;
  const auto& layout = trainers.optimizer(0).layout();
  measured.terms.values = layout.extent(0) * sizeof(float);
  for (std::size_t b = 0; b < layout.buckets(0); ++b) {
    measured.terms.bucket =
        std::max(measured.terms.bucket, layout.bucket(0, b).size() * sizeof(float));
  }
  measured.terms.tied = model.tied_bytes();
  measured.terms.in_flight = model.bytes_in_flight();
  return measured;
}

Measured measure_memory(int stage, int world, const Model& model) {
  return in_child([&] {
    switch (stage) {
      case 0: return measure_memory<zero::Replicated>(world, model);
      case 1: return measure_memory<zero::Stage1>(world, model);
      case 2: return measure_memory<zero::Stage2>(world, model);
      default: return measure_memory<zero::Stage3>(world, model);
    }
  });
}

std::string megabytes(double bytes) { return text(bytes / 1e6, "MB"); }
std::string megabytes(std::size_t bytes) { return megabytes(static_cast<double>(bytes)); }

const Row memory("stages/memory", [](Sheet& sheet) {
  const Model model("base", bert::Head::masked_lm);
  nlohmann::ordered_json points = nlohmann::ordered_json::array();
  Terms terms;
  for (int stage = 0; stage <= 3; ++stage) {
    std::vector<double> accounted;
    for (const int world : {1, 2, 4, 8}) {
      const Measured measured = measure_memory(stage, world, model);
      terms = measured.terms;
      const double wanted = formula(stage, world, terms);
      accounted.push_back(static_cast<double>(measured.accounted) / wanted);
      const double system = static_cast<double>(measured.system) / wanted;
      std::string remark = "formula " + megabytes(wanted) + ", accounted " +
                           megabytes(measured.accounted) + ", system " + megabytes(measured.system);
      if (measured.pooled > 0) remark += "; pooled " + megabytes(measured.pooled);
      if (measured.gathered > 0) remark += ", gathered " + megabytes(measured.gathered);
      const std::string name = "stage" + std::to_string(stage);
      sheet.value(name + "/K=" + std::to_string(world), "", {system, system, system}, at_most(1.02),
                  remark);
      points.push_back({{"stage", stage},
                        {"ranks", world},
                        {"formula", wanted},
                        {"accounted", measured.accounted},
                        {"pooled", measured.pooled},
                        {"gathered", measured.gathered},
                        {"system", measured.system},
                        {"reduced", measured.reduce_bytes},
                        {"fetched", measured.gather_bytes}});
    }
    // The bound is for the worst K.
    const Spread spread = spread_of(accounted);
    sheet.value("stage" + std::to_string(stage) + "/accounted", "",
                {spread.max, spread.min, spread.max}, at_most(1.0),
                "what memory() reports against the formula, the worst K");
  }
  sheet.note("terms", "BERT-base, tied, float Adam: values " + megabytes(terms.values) +
                          ", two buckets " + megabytes(2 * terms.bucket) + ", tied " +
                          megabytes(terms.tied) + ", units in flight " +
                          megabytes(terms.in_flight));
  std::ofstream file(ZERO_BENCH_MEMORY_JSON);
  file << nlohmann::ordered_json{{"model", "base"},        {"optimizer", "Adam"},
                                 {"values", terms.values}, {"bucket", terms.bucket},
                                 {"tied", terms.tied},     {"in_flight", terms.in_flight},
                                 {"points", points}}
              .dump(2)
       << '\n';
  if (!file.flush()) throw std::runtime_error("can't write " ZERO_BENCH_MEMORY_JSON);
});

// Time.

constexpr int pair_of_ranks = 2;

/// Adam's loop over a rank's share of the model, on all threads: what a step takes that has nothing
/// to send. Measured on fewer elements than the share has, since it is linear.
class PureUpdate {
 public:
  PureUpdate(Team& team, std::size_t share) : team_(&team), share_(share) {
    team_->run([&](int r) {
      for (zero::HostArray<float>& array : arrays_[static_cast<std::size_t>(r)]) {
        array = zero::HostArray<float>(sample);
        fill(array, 1e-3F);
      }
    });
  }
  double operator()() {
    const AdamScalars scalars = zero::Adam{}.scalars<float>(++steps_);
    const double time = seconds([&] {
      team_->run([&](int r) {
        auto& [p, g, m, v] = arrays_[static_cast<std::size_t>(r)];
        adam(p.data(), g.data(), m.data(), v.data(), sample, scalars);
      });
    });
    return time * static_cast<double>(share_) / static_cast<double>(sample);
  }

 private:
  static constexpr std::size_t sample = std::size_t{16} << 20;
  Team* team_;
  std::size_t share_;
  std::int64_t steps_ = 0;
  std::array<std::array<zero::HostArray<float>, 4>, pair_of_ranks> arrays_{};
};

std::string milliseconds(const std::vector<double>& times) {
  return text(1e3 * spread_of(times).median, "ms");
}
Spread in_milliseconds(std::vector<double> times) {
  for (double& time : times) time *= 1e3;
  return spread_of(std::move(times));
}

/// What each step of a stage that overlaps took.
struct Steps {
  std::vector<double> exposed{}, reduce_exposed{}, gather_exposed{};
  std::vector<double> reduce_busy{}, gather_busy{}, reduce_hidden{};
  std::vector<double> whole{};  ///< of the loop
  std::size_t bytes = 0;        ///< payload of a step

  void add(const zero::TrafficReport& before, const zero::TrafficReport& after) {
    const auto difference = [](auto& a, auto& b) {
      return zero::TrafficReport::Kind{a.busy - b.busy, a.exposed - b.exposed, a.bytes - b.bytes};
    };
    const auto reduce = difference(after.reduce, before.reduce);
    const auto gather = difference(after.gather, before.gather);
    reduce_exposed.push_back(reduce.exposed);
    gather_exposed.push_back(gather.exposed);
    exposed.push_back(reduce.exposed + gather.exposed);
    reduce_busy.push_back(reduce.busy);
    gather_busy.push_back(gather.busy);
    reduce_hidden.push_back(reduce.hidden());
    bytes = reduce.bytes + gather.bytes;
  }
};

/// Computation that takes 1.5 times as long as the traffic beside it takes with nothing to compute:
/// at stage 3, which has most.
Work work_beside(Team& team, const Model& model) {
  Trainers<zero::Stage3> trainers(team, pair_of_ranks, model);
  for (int k = 0; k < 2; ++k) trainers.run({});
  Steps steps;
  for (int k = 0; k < 5; ++k) {
    const zero::TrafficReport before = trainers.traffic();
    trainers.run({});
    steps.add(before, trainers.traffic());
  }
  std::size_t all = 0;
  for (int u = 0; u < model.units(); ++u) all += model.bytes_of(u);
  // Gathers go there and back.
  const double gather = spread_of(steps.gather_busy).median / 2 / static_cast<double>(all);
  const double reduce = spread_of(steps.reduce_busy).median / static_cast<double>(all);
  Work work;
  for (int u = 0; u < model.units(); ++u) {
    const auto bytes = static_cast<double>(model.bytes_of(u));
    work.forward.push_back(1.5 * gather * bytes);
    work.backward.push_back(1.5 * (gather + reduce) * bytes);
  }
  return work;
}

class Times {
 public:
  explicit Times(Sheet& sheet) : sheet_(&sheet) {
    work_ = work_beside(team_, model_);
    stage1_.emplace(team_, pair_of_ranks, model_);
    stage1_->run({});
    const auto& layout = stage1_->optimizer(0).layout();
    elements_ = layout.extent(0);
    update_.emplace(team_, elements_ / pair_of_ranks);
    for (std::size_t b = 0; b < layout.buckets(0); ++b) {
      const auto of = [&](auto interval) { return interval.size() * sizeof(float); };
      const std::size_t own = of(layout.slice(0, b, 0));
      stage1_bytes_ += of(layout.bucket(0, b)) - own + own * (pair_of_ranks - 1);
    }
    double sum = 0;
    for (const auto& times : {work_.forward, work_.backward}) {
      for (const double time : times) sum += time;
    }
    sheet.value("computation", "ms", in_milliseconds({sum}), {},
                "of a step: 1.5 times the traffic of each unit at stage 3");
    sheet.value("traffic/stage1", "", bytes_ratio(stage1_bytes_, 2), at_most(1.001),
                megabytes(stage1_bytes_) + " a rank and step, by the layout, against 2Ψ(K-1)/K");
  }

  template <class Stage>
  void measure(const std::string& name, int passes, double limit) {
    Trainers<Stage> trainers(team_, pair_of_ranks, model_);
    for (int k = 0; k < 2; ++k) trainers.run(work_);
    Steps steps;
    std::vector<double> stage1, update;
    for (int k = 0; k < pair_count; ++k) {
      const zero::TrafficReport before = trainers.traffic();
      steps.whole.push_back(seconds([&] { trainers.run(work_); }));
      steps.add(before, trainers.traffic());
      const double step = seconds([&] { stage1_->step_alone(); });
      update.push_back((*update_)());
      stage1.push_back(step - update.back());
    }
    // A difference may be next to nothing where the machine is disturbed; its median isn't.
    std::vector<double> ratios = steps.exposed;
    for (double& ratio : ratios) ratio /= spread_of(stage1).median;
    sheet_->value(name, "", spread_of(ratios), at_most(limit),
                  "BERT-large, K=2: exposed " + milliseconds(steps.exposed) + " (reduce " +
                      milliseconds(steps.reduce_exposed) + ", gather " +
                      milliseconds(steps.gather_exposed) + "), Stage1 step less update " +
                      milliseconds(stage1) + " (update " + milliseconds(update) + ")");
    sheet_->value(name + "/busy", "ms", in_milliseconds(steps.reduce_busy), {},
                  "reductions; gathers " + milliseconds(steps.gather_busy) + ", whole loop " +
                      milliseconds(steps.whole));
    std::optional<Bound> hidden;
    if (passes == 2) hidden = at_least(.8);
    sheet_->value(name + "/hidden", "", spread_of(steps.reduce_hidden), hidden,
                  "share of the reductions' time that computation went on in");
    sheet_->value("traffic/" + name, "", bytes_ratio(steps.bytes, passes), at_most(1.001),
                  megabytes(steps.bytes) + " a rank and step, against " + std::to_string(passes) +
                      "Ψ(K-1)/K");

    if (passes != 2) return;
    // Nothing to hide behind: what threads and fresh pages cost.
    const Work none;
    const Pairs bare = run_pairs([&] { trainers.run(none); }, [&] { stage1_->run(none); });
    sheet_->ratio(name + "/bare", bare, {},
                  "gradients written and stepped, nothing computed: " + milliseconds(bare.subject) +
                      ", Stage1 " + milliseconds(bare.reference));
  }

 private:
  [[nodiscard]] Spread bytes_ratio(std::size_t bytes, int passes) const {
    const double wanted = passes * static_cast<double>(elements_ * sizeof(float)) *
                          (pair_of_ranks - 1) / pair_of_ranks;
    const double ratio = static_cast<double>(bytes) / wanted;
    return {ratio, ratio, ratio};
  }

  Sheet* sheet_;
  Team team_{pair_of_ranks};
  Model model_{"large", bert::Head::pooler};
  Work work_{};
  std::optional<Trainers<zero::Stage1>> stage1_{};
  std::optional<PureUpdate> update_{};
  std::size_t elements_ = 0;
  std::size_t stage1_bytes_ = 0;
};

const Row exposed("stages/exposed", [](Sheet& sheet) {
  Times times(sheet);
  times.measure<zero::Stage2>("stage2", 2, 1.0);
  times.measure<zero::Stage3>("stage3", 3, 1.5);
});

}  // namespace
}  // namespace bench
