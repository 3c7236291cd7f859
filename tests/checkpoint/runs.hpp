// SPDX-License-Identifier: Apache-2.0
// Runs that stop, are saved and go on in another world under other policies. Gradients are the
// same on all ranks (Gradients::reduced), so every run that takes the same steps ends on the same
// bits.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "catch.hpp"
#include "checkpoint/folder.hpp"
#include "oracle/oracle.hpp"
#include "zero/checkpoint.hpp"
#include "zero/comm/fault_injector.hpp"
#include "zero/comm/hybrid.hpp"
#include "zero/shaped_param.hpp"
#include "zero/zero.hpp"

namespace runs {

using oracle::Case;
using oracle::name_of;

inline constexpr int steps = 7;
inline constexpr int saved_after = 4;
/// The last parameter is there from this step on.
inline constexpr int late_step = 2;
/// Whose gradients are infinite where a loss scale is there to shrink: one before the save, one
/// after it.
inline constexpr std::array<int, 2> overflowing{1, 5};

/// One parameter of each kind.
inline Case make_case() {
  Case c;
  c.seed = 11;
  c.settings.gradients = zero::Gradients::reduced;
  c.settings.poison_padding = true;
  c.settings.poison_released = true;
  const auto add = [&](std::vector<std::size_t> extents, std::size_t group, int unit) -> auto& {
    oracle::Shape& shape = c.shapes.emplace_back();
    shape.extents = std::move(extents);
    shape.elements = 1;
    for (const std::size_t n : shape.extents) shape.elements *= n;
    shape.group = group;
    shape.attributes.unit = unit;
    return shape;
  };
  add({7, 11}, 0, 0);
  add({0}, 0, 0);
  add({}, 1, 0);
  add({13}, 0, 0).attributes.frozen = true;
  add({9, 10}, 0, 1).attributes.quantum = 10;
  add({40}, 1, 1).attributes.unsplittable = true;
  c.shapes[4].lane = 1;
  c.shapes.push_back(c.shapes[0]);
  c.shapes.back().attributes.alias = 0;
  add({301}, 1, 2).lane = 1;
  add({3, 29}, 2, 3);  // late
  return c;
}

/// All tensors as matrices, for optimizers that take nothing else.
inline Case make_matrices() {
  Case c = make_case();
  for (oracle::Shape& shape : c.shapes) {
    while (shape.extents.size() < 2) shape.extents.push_back(1);
  }
  return c;
}

/// Whether any rank has a gradient of a leader.
inline bool present(const Case& c, int step, std::size_t i) {
  return (i + 1 != c.shapes.size() || step >= late_step) && c.present(0, step, i);
}

inline bool overflows(const Case& c, int step) {
  return c.settings.loss_scale && std::count(overflowing.begin(), overflowing.end(), step) != 0;
}

template <class T>
void write_gradient(const Case& c, int step, std::size_t i, std::span<T> to) {
  for (std::size_t e = 0; e < to.size(); ++e) to[e] = c.gradient<T>(0, step, i, e);
  if (i != 7 || !overflows(c, step)) return;
  to[200] = zero::element_traits<T>::store(std::numeric_limits<zero::arithmetic_t<T>>::infinity());
}

/// Parameters without memory of their own, but for frozen ones, which no optimizer gives any.
template <class T>
struct Shaped {
  using Memory = oracle::HostMemory;
  using elements = zero::detail::TypeList<T>;
  std::vector<zero::ShapedParam<T>> tensors;

  Shaped(const Case& c, int) {
    for (std::size_t i = 0; i < c.shapes.size(); ++i) {
      tensors.emplace_back(name_of(i), c.shapes[i].extents, c.shapes[i].attributes,
                           c.shapes[i].group);
      if (!c.shapes[i].attributes.frozen) continue;
      const auto values = std::make_shared<std::vector<T>>(oracle::initial_values<T>(c, i));
      tensors.back().rebind(*values, values);
    }
  }
  [[nodiscard]] auto& store() { return tensors; }
};

template <class Span>
using Tensors = oracle::Tensors<oracle::Tensor, Span>;
template <class T>
using Flat = oracle::Flat<T>;

/// Shows what is there only from `late_step` on, where the store can grow.
template <class Model>
void add_late(Model& model, const Case& c) {
  const std::size_t i = c.shapes.size() - 1;
  if constexpr (requires { model.tensors[0].set_present(true); }) {
    using T = typename zero::detail::first_of<typename Model::elements>::type;
    model.tensors.emplace_back(name_of(i), c.shapes[i], oracle::initial_values<T>(c, i), true);
  } else if constexpr (requires { model.tensors; }) {
    model.tensors.emplace_back(name_of(i), c.shapes[i].extents, c.shapes[i].attributes,
                               c.shapes[i].group);
  } else {
    throw std::runtime_error("this store can't grow");
  }
}

/// A partition of the caller's: rank r gets r + 1 parts of all.
struct Stairs {
  static constexpr bool cuts_tensors = true;
  [[nodiscard]] constexpr std::size_t cut(std::size_t elements, std::size_t alignment, int world,
                                          int rank) const {
    const auto r = static_cast<std::size_t>(rank);
    const auto k = static_cast<std::size_t>(world);
    if (rank == world) return elements;
    return elements / alignment * (r * (r + 1)) / (k * (k + 1)) * alignment;
  }
};

// How ranks reach each other: `with(comm, world, f)` calls `f` with what the optimizer gets, of
// `ranks(world)` ranks.
struct Threads {
  static int ranks(int world) { return world; }
  template <class F>
  static void with(zero::InProcessCommunicator& comm, int, F&& f) {
    f(comm);
  }
};
struct Collectives {
  static int ranks(int world) { return world; }
  template <class F>
  static void with(zero::InProcessCommunicator& comm, int, F&& f) {
    zero::FaultInjector<zero::InProcessCommunicator, false> only(comm);
    f(only);
  }
};
/// Two replicas of the model.
struct Replicas {
  static int ranks(int world) { return 2 * world; }
  template <class F>
  static void with(zero::InProcessCommunicator& comm, int world, F&& f) {
    zero::HybridCommunicator groups(comm, world);
    f(groups);
  }
};

template <class ModelType, class PartitionType, class ViewType, class StageType,
          class PathType = Threads>
struct Way {
  using Model = ModelType;
  using Partition = PartitionType;
  using View = ViewType;
  using Stage = StageType;
  using Path = PathType;
};

/// Of one run: where it begins, and where it is saved.
struct Plan {
  std::filesystem::path load{};  ///< empty: with step 0
  std::filesystem::path save{};  ///< empty: nowhere
  std::size_t variant = 0;       ///< bucket size, and whether the last group is added or there
};

/// What a run leaves behind, by what it is.
using Trained = std::map<std::string, std::string>;

inline std::string difference(const Trained& got, const Trained& want) {
  for (const auto& [what, bytes] : want) {
    const auto found = got.find(what);
    if (found == got.end()) return "no " + what;
    if (found->second != bytes) return what + " differs";
  }
  return got.size() == want.size() ? "" : "there is more than there should be";
}

/// Adds one rank's part; throws where ranks differ in what they both have.
inline void merge(Trained& all, std::map<std::string, std::string>& known, const std::string& what,
                  std::size_t bytes, std::size_t begin, std::string_view part) {
  std::string& to = all[what];
  std::string& seen = known[what];
  to.resize(bytes);
  seen.resize(bytes);
  for (std::size_t e = 0; e < part.size(); ++e) {
    if (seen[begin + e] != 0 && to[begin + e] != part[e]) {
      throw std::runtime_error("ranks differ in " + what);
    }
    to[begin + e] = part[e];
    seen[begin + e] = 1;
  }
}
inline void require_whole(const std::map<std::string, std::string>& known) {
  for (const auto& [what, seen] : known) {
    if (std::count(seen.begin(), seen.end(), 1) != static_cast<std::ptrdiff_t>(seen.size())) {
      throw std::runtime_error("no rank has all of " + what);
    }
  }
}

/// All of this rank's state that a checkpoint brings back.
template <class Model, class Optimizer>
void collect(const Case& c, Model& model, Optimizer& optimizer, Trained& all,
             std::map<std::string, std::string>& known) {
  const std::vector<int> units = oracle::units_of(c);
  for (const int unit : units) optimizer.acquire(unit);
  for (std::size_t i = 0; i < c.shapes.size(); ++i) {
    if (c.leader(i) != i) continue;
    zero::detail::visit_span(zero::detail::parameter_at(model.store(), i).values(),
                             [&]<class T>(std::span<T> values) {
                               merge(all, known, "values of " + name_of(i), values.size_bytes(), 0,
                                     oracle::bytes_of(std::span<const T>(values)));
                             });
  }
  for (const int unit : units) optimizer.release(unit);
  const auto add = [&](const auto& slices) {
    for (const auto& slice : slices) {
      const std::size_t i = oracle::index_of(slice.parameter);
      const std::size_t width = sizeof(slice.values[0]);
      merge(all, known, std::string(slice.slot) + " of " + name_of(i), c.shapes[i].elements * width,
            slice.elements.begin * width, oracle::bytes_of(slice.values));
    }
  };
  [&]<class... T>(zero::detail::TypeList<T...>) {
    (add(optimizer.template state<T>()), ...);
    (add(optimizer.template masters<T>()), ...);
  }(typename Model::elements{});
  std::string counts = std::to_string(optimizer.steps());
  for (std::size_t i = 0; i < c.shapes.size(); ++i) {
    counts += " " + std::to_string(optimizer.steps(i));
  }
  const auto whole = [&](const std::string& what, const std::string& text) {
    merge(all, known, what, text.size(), 0, text);
  };
  whole("step counts", counts);
  whole("loss scale", std::to_string(optimizer.loss_scale()));
  std::string options;
  using Opt = typename Optimizer::optimizer_type;
  for (const Opt& group : optimizer.groups()) {
    Opt::for_each_option(group, [&](const char* name, const auto& value) {
      const auto number = static_cast<double>(value);
      options += name + oracle::bytes_of(std::span<const double>(&number, 1));
    });
  }
  whole("options", options);
}

template <class Optimizer, class Model>
void take_step(Optimizer& optimizer, Model& model, const Case& c, int step) {
  // A schedule that goes on from what the options were.
  for (std::size_t g = 0; g < optimizer.groups().size(); ++g) {
    if (g < 2 || step >= late_step) optimizer.group(g).lr *= 0.9;
  }
  const auto leader_is_here = [&](std::size_t i) { return present(c, step, c.leader(i)); };
  const std::size_t count = std::ranges::size(model.store());
  const auto write = [&](std::size_t i) {
    zero::detail::visit_span(
        zero::detail::parameter_at(model.store(), i).values(), [&]<class T>(std::span<T>) {
          if constexpr (Optimizer::stage_type::shards_gradients) {
            auto lease = optimizer.template gradient<T>(i);
            write_gradient<T>(c, step, i, lease.values());
          } else {
            model.set_present(i, true);
            zero::detail::visit_span(model.memory(i), [&]<class U>(std::span<U> to) {
              write_gradient<U>(c, step, i, to);
            });
          }
        });
  };
  for (const int unit : oracle::units_of(c)) {
    const auto is_of = [&](std::size_t i) {
      return c.shapes[i].attributes.unit == unit && !c.shapes[i].attributes.frozen;
    };
    if (unit == c.shapes.back().attributes.unit && count < c.shapes.size()) continue;
    optimizer.acquire(unit);
    for (std::size_t i = 0; i < count; ++i) {
      if (!is_of(i)) continue;
      if (!leader_is_here(i)) {
        optimizer.mark_absent(i);
      } else if (c.leader(i) == i) {
        write(i);
      }
    }
    optimizer.release(unit);
  }
  const zero::Outcome outcome = optimizer.step().outcome();
  if (outcome.applied == overflows(c, step)) throw std::runtime_error("applied or skipped");
}

/// The optimizers of one kind: what one saves another may load, bit by bit.
template <class Opt, class Precision = zero::MixedPrecision>
class Family {
 public:
  using Run = std::function<Trained(int world, const Plan&)>;

  Family(Case c, std::vector<Opt> groups, std::optional<double> max_norm = {})
      : case_(std::move(c)), groups_(std::move(groups)), max_norm_(max_norm) {
    groups_.resize(3, groups_.back());
  }

  template <class W>
  Family& add() {
    runs_.push_back([this](int world, const Plan& plan) { return run<W>(world, plan); });
    return *this;
  }

  /// Saves in worlds of 1, 2, 3, 4 and 8 ranks, loads in those of 1, 2, 3 and 5, in all ways by
  /// turns; returns what was wrong.
  std::vector<std::string> wrongs(int rounds) {
    std::vector<std::string> wrongs;
    const Trained want = run_first();
    std::size_t turn = 0;
    for (int round = 0; round < rounds; ++round) {
      for (const int from : {1, 2, 3, 4, 8}) {
        const checkpoints::Folder folder;
        const auto check = [&](int to, const Plan& plan) {
          const std::size_t way = turn % runs_.size();
          const std::string what = "saved by " + std::to_string(from) + ", " +
                                   (plan.load.empty() ? "went on" : "loaded by ") +
                                   std::to_string(to) + " in way " + std::to_string(way) +
                                   ", variant " + std::to_string(plan.variant) + ": ";
          try {
            const std::string wrong = difference(runs_[way](to, plan), want);
            if (!wrong.empty()) wrongs.push_back(what + wrong);
          } catch (const std::exception& error) {
            wrongs.push_back(what + error.what());
          }
        };
        check(from, {.load = {}, .save = folder / "saved", .variant = turn});
        for (const int to : {1, 2, 3, 5}) {
          ++turn;
          check(to, {.load = folder / "saved", .save = {}, .variant = turn / 2});
        }
        if (const std::string wrong = wrong_file(folder / "saved", want); !wrong.empty()) {
          wrongs.push_back(wrong);
        }
        turn += 2;
      }
    }
    return wrongs;
  }

 private:
  Trained run_first() { return runs_[0](1, {}); }

  /// Every element of every array is there once, and nothing else.
  static std::string wrong_file(const std::filesystem::path& folder, const Trained& want) {
    std::size_t bytes = 0;
    for (const auto& [what, text] : want) {
      if (what.find(" of p") != std::string::npos) bytes += text.size();
    }
    const zero::Checkpoint saved(folder);
    std::size_t held = 0;
    std::string wrong;
    saved.for_each_piece([&](std::size_t i, std::size_t array,
                             const zero::detail::SavedPiece& piece, std::uint64_t size) {
      held += size;
      if (piece.elements.end > saved.info().parameters[i].elements()) {
        wrong = "array " + std::to_string(array) + " of " + name_of(i) + " has too many elements";
      }
    });
    if (wrong.empty() && held != bytes) {
      wrong = std::to_string(held) + " bytes in place of " + std::to_string(bytes);
    }
    return wrong;
  }

  template <class W>
  Trained run(int world, const Plan& plan) {
    using Model = typename W::Model;
    constexpr bool grows = requires(Model& model) { model.tensors; };
    const bool loads = !plan.load.empty();
    // In a run that loads everything else begins with other numbers than were saved.
    Case all = case_;
    if (loads) all.seed += 1;
    Case early = all;
    if (grows) early.shapes.pop_back();
    const bool adds = grows && plan.variant % 2 == 0;
    std::vector<Opt> options = groups_;
    for (Opt& group : options) group.lr *= loads ? 7 : 1;
    Trained trained;
    std::map<std::string, std::string> known;
    std::mutex mutex;
    zero::run_ranks(W::Path::ranks(world), [&](zero::InProcessCommunicator& threads) {
      W::Path::with(threads, world, [&](auto& comm) {
        Model model(adds ? early : all, comm.rank());
        typename W::View view;
        view.bucket_bytes =
            std::array<std::size_t, 3>{64, zero::PerTensor{}, 1 << 20}[plan.variant % 3];
        typename W::Stage stage;
        if constexpr (requires { stage.resident_bytes; }) stage.resident_bytes = 100;
        Precision precision;
        if constexpr (requires { precision.seed; }) precision.seed = loads ? 5 : 99;
        zero::Settings settings = case_.settings;
        settings.initial_value = [&all](std::string_view name, std::size_t e) {
          using T = typename zero::detail::first_of<typename Model::elements>::type;
          const T value = all.initial<T>(oracle::index_of(name), e);
          return static_cast<double>(zero::element_traits<T>::load(value));
        };
        std::vector<Opt> first = options;
        if (adds) first.pop_back();
        zero::ZeroSharded optimizer{zero::Groups<Opt>(first),
                                    model.store(),
                                    comm,
                                    typename W::Partition{},
                                    view,
                                    stage,
                                    precision,
                                    settings};
        optimizer.clip_grad_norm(max_norm_);
        if (loads) {
          if (adds) {
            add_late(model, all);
            optimizer.add_param_group(options.back());
          }
          zero::load(optimizer, plan.load);
        }
        for (int step = loads ? saved_after : 0; step < steps; ++step) {
          if (step == late_step && adds) {
            add_late(model, all);
            optimizer.add_param_group(options.back());
          }
          if (step == saved_after && !plan.save.empty()) zero::save(optimizer, plan.save);
          take_step(optimizer, model, case_, step);
        }
        Trained mine;
        std::map<std::string, std::string> mine_known;
        collect(case_, model, optimizer, mine, mine_known);
        const std::scoped_lock lock(mutex);
        for (const auto& [what, bytes] : mine) {
          const std::string& seen = mine_known[what];
          if (bytes.empty()) merge(trained, known, what, 0, 0, {});
          for (std::size_t e = 0; e < bytes.size(); ++e) {
            if (seen[e] == 1) merge(trained, known, what, bytes.size(), e, {&bytes[e], 1});
          }
        }
      });
    });
    require_whole(known);
    return trained;
  }

  Case case_;
  std::vector<Opt> groups_;
  std::optional<double> max_norm_;
  std::vector<Run> runs_{};
};

}  // namespace runs
