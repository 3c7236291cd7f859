// SPDX-License-Identifier: Apache-2.0
// The oracle: the same compiled rule on whole tensors, on one thread. Whatever the world size,
// partition, view, stage or communicator, every bit must be the same.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>
#include <zero/comm/fault_injector.hpp>
#include <zero/zero.hpp>

namespace oracle {

/// One drawn parameter.
struct Shape {
  std::vector<std::size_t> extents;
  std::size_t elements = 0;
  bool is_double = false;  // in stores with two lanes
  std::size_t group = 0;
  zero::Attributes attributes;
};

/// One drawn run. Everything follows from the seed.
struct Case {
  std::uint32_t seed = 0;
  int world = 1;
  int steps = 3;
  std::size_t bucket_bytes = 0;
  zero::Settings settings;
  std::vector<Shape> shapes;

  [[nodiscard]] std::size_t leader(std::size_t i) const {
    return shapes[i].attributes.alias.value_or(i);
  }
  /// A number that depends on nothing but its arguments.
  template <class T>
  [[nodiscard]] T number(std::size_t a, std::size_t b, std::size_t c, std::size_t d) const {
    std::uint64_t x = seed + 0x9e3779b97f4a7c15U * (a + 1);
    for (const std::size_t word : {b, c, d}) {
      x = (x ^ (word + 0x7f4a7c15U)) * 0xbf58476d1ce4e5b9U;
      x ^= x >> 29;
    }
    return static_cast<T>(static_cast<double>(x >> 11) * 0x1p-53 * 2 - 1);
  }
  template <class T>
  [[nodiscard]] T initial(std::size_t i, std::size_t e) const {
    return number<T>(1000, 0, leader(i), e);
  }
  template <class T>
  [[nodiscard]] T gradient(int rank, int step, std::size_t i, std::size_t e) const {
    if (settings.gradients == zero::Gradients::reduced) rank = 0;
    return number<T>(static_cast<std::size_t>(rank), static_cast<std::size_t>(step), i, e);
  }
  /// One parameter in six is absent on a rank in a step; one in eleven on all.
  [[nodiscard]] bool present(int rank, int step, std::size_t i) const {
    if (number<double>(7000, static_cast<std::size_t>(step), i, 0) < -0.82) return false;
    if (settings.gradients == zero::Gradients::reduced) return true;
    return number<double>(8000, static_cast<std::size_t>(step), i, static_cast<std::size_t>(rank)) >
           -0.67;
  }
};

inline Case draw(std::uint32_t seed, std::size_t groups) {
  std::mt19937 random(seed);
  const auto pick = [&](std::size_t low, std::size_t high) {
    return std::uniform_int_distribution<std::size_t>(low, high)(random);
  };
  Case c;
  c.seed = seed;
  c.world = static_cast<int>(1 + seed % 8);
  c.bucket_bytes = std::array<std::size_t, 5>{1, 256, 1000, 4096, 1 << 20}[pick(0, 4)];
  c.settings.poison_padding = true;
  if (pick(0, 5) == 0) c.settings.gradients = zero::Gradients::reduced;
  if (pick(0, 3) == 0) c.settings.gradient_scale = 0.3;
  const std::size_t count = pick(1, 9);
  for (std::size_t i = 0; i < count; ++i) {
    Shape s;
    switch (pick(0, 5)) {
      case 0: s.extents = {}; break;
      case 1: s.extents = {0}; break;
      case 2: s.extents = {pick(1, 9)}; break;
      case 3: s.extents = {pick(1, 40), pick(1, 40)}; break;
      case 4: s.extents = {pick(1, 5000)}; break;
      default: s.extents = {pick(2, 4), 3, pick(1, 50)}; break;
    }
    s.elements = 1;
    for (const std::size_t extent : s.extents) s.elements *= extent;
    s.is_double = pick(0, 2) == 0;
    s.group = pick(0, groups - 1);
    s.attributes.frozen = pick(0, 6) == 0;
    s.attributes.unsplittable = pick(0, 8) == 0;
    if (pick(0, 5) == 0) s.attributes.quantum = pick(1, 30);
    s.attributes.unit = static_cast<int>(i / pick(2, 6));
    c.shapes.push_back(s);
  }
  for (std::size_t i = 1; i < count; ++i) {  // tie some to the first
    if (count < 3 || pick(0, 7) != 0) continue;
    c.shapes[i] = c.shapes.front();
    c.shapes[i].attributes.alias = 0;
  }
  return c;
}

/// What a run leaves behind: values by parameter, slots by (parameter, slot), step counts.
template <class T>
struct Lane {
  std::map<std::size_t, std::vector<T>> values;
  std::map<std::pair<std::size_t, std::string>, std::vector<T>> slots;
};
struct Result {
  std::tuple<Lane<float>, Lane<double>> lanes;
  std::vector<std::int64_t> steps;
  template <class T>
  Lane<T>& lane() {
    return std::get<Lane<T>>(lanes);
  }
};

inline std::string name_of(std::size_t i) { return "p" + std::to_string(i); }

/// Same bits; NaN equals itself only as the same pattern.
template <class T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() &&
         (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0);
}
template <class T>
std::string difference(const Lane<T>& got, const Lane<T>& want, const char* what) {
  for (const auto& [i, values] : want.values) {
    const auto found = got.values.find(i);
    if (found == got.values.end()) return std::string(what) + ": no values of " + name_of(i);
    if (!same_bits(found->second, values)) return std::string(what) + ": values of " + name_of(i);
  }
  for (const auto& [key, slot] : want.slots) {
    const auto found = got.slots.find(key);
    if (found == got.slots.end() || !same_bits(found->second, slot)) {
      return std::string(what) + ": slot " + key.second + " of " + name_of(key.first);
    }
  }
  return {};
}

template <class Opt>
std::size_t most_slots(const std::vector<Opt>& groups) {
  std::size_t used = 0;
  for (const Opt& group : groups) used = std::max(used, zero::used_slots(group));
  return used;
}

/// Steps one whole parameter of the serial run.
template <class T, class Opt>
void step_whole(const Case& c, const Opt& rule, std::int64_t t, int step, std::size_t i,
                std::vector<T>& values, std::vector<std::vector<T>>& slots) {
  const int ranks = c.settings.gradients == zero::Gradients::local ? c.world : 1;
  const T scale = static_cast<T>(c.settings.gradient_scale.value_or(1.0 / ranks));
  std::vector<T> gradient(values.size());
  for (std::size_t e = 0; e < values.size(); ++e) {
    T sum = c.present(0, step, i) ? c.gradient<T>(0, step, i, e) : T(0);
    for (int r = 1; r < ranks; ++r) {
      sum += c.present(r, step, i) ? c.gradient<T>(r, step, i, e) : T(0);
    }
    gradient[e] = sum * scale;
  }
  zero::detail::UpdateArrays<T, zero::detail::slot_count<Opt>> arrays{
      values.data(), gradient.data(), {}};
  for (std::size_t s = 0; s < zero::used_slots(rule); ++s) arrays.state[s] = slots[s].data();
  zero::detail::update_elements(rule, rule.template scalars<T>(t), arrays, values.size());
}

/// @tparam T float: all parameters; or both lanes where `mixed`
template <class T, class Opt>
void run_serial_lane(const Case& c, const std::vector<Opt>& groups, bool all, Result& result) {
  for (std::size_t i = 0; i < c.shapes.size(); ++i) {
    const Shape& shape = c.shapes[i];
    if (!all && shape.is_double != std::is_same_v<T, double>) continue;
    if (c.leader(i) != i) continue;
    std::vector<T>& values = result.lane<T>().values[i];
    for (std::size_t e = 0; e < shape.elements; ++e) values.push_back(c.initial<T>(i, e));
    if (shape.attributes.frozen) continue;
    std::vector<std::vector<T>> slots(most_slots(groups), std::vector<T>(shape.elements));
    for (int step = 0; step < c.steps; ++step) {
      bool somewhere = false;
      for (int r = 0; r < c.world; ++r) somewhere = somewhere || c.present(r, step, i);
      if (!somewhere || shape.elements == 0) continue;
      const std::int64_t t = ++result.steps[i];
      step_whole<T>(c, groups[shape.group], t, step, i, values, slots);
    }
    for (std::size_t s = 0; s < slots.size(); ++s) {
      if (shape.elements > 0) result.lane<T>().slots[{i, std::string(Opt::slots[s])}] = slots[s];
    }
  }
}

/// A tensor of a framework that counts its references: the memory may be moved elsewhere.
template <class Span>
class Tensor {
 public:
  template <class T>
  Tensor(std::string name, const Shape& shape, std::vector<T> values, bool has_gradient)
      : name_(std::move(name)), shape_(&shape) {
    const auto owner = std::make_shared<std::vector<T>>(std::move(values));
    values_ = std::span<T>(*owner);
    owner_ = owner;
    const auto gradient = std::make_shared<std::vector<T>>(has_gradient ? shape.elements : 0);
    memory_ = std::span<T>(*gradient);
    gradient_ = std::span<T>();
    gradient_owner_ = gradient;
  }
  [[nodiscard]] const std::string& name() const { return name_; }
  [[nodiscard]] std::span<const std::size_t> shape() const { return shape_->extents; }
  [[nodiscard]] Span values() const { return values_; }
  [[nodiscard]] Span gradient() const { return gradient_; }
  [[nodiscard]] std::size_t group() const { return shape_->group; }
  [[nodiscard]] zero::Attributes attributes() const { return shape_->attributes; }
  void rebind(Span values, std::shared_ptr<const void> owner) {
    values_ = values;
    owner_ = std::move(owner);
  }
  /// Backward made a gradient, or none.
  void set_present(bool present) {
    if (present) {
      gradient_ = memory_;
    } else {
      zero::detail::visit_span(memory_, [&](auto span) { gradient_ = decltype(span){}; });
    }
  }
  [[nodiscard]] Span memory() const { return memory_; }
  /// The same memory under another name: a tied tensor.
  void rename(std::string name, const Shape& shape) {
    name_ = std::move(name);
    shape_ = &shape;
  }

 private:
  std::string name_;
  const Shape* shape_;
  Span values_, gradient_, memory_;
  std::shared_ptr<const void> owner_, gradient_owner_;
};

/// A tensor of a framework that doesn't let its memory move.
template <class Span>
class FixedTensor : public Tensor<Span> {
 public:
  using Tensor<Span>::Tensor;
  void rebind(Span, std::shared_ptr<const void>) = delete;
};

template <class T>
std::vector<T> initial_values(const Case& c, std::size_t i) {
  std::vector<T> values(c.shapes[i].elements);
  for (std::size_t e = 0; e < values.size(); ++e) values[e] = c.initial<T>(i, e);
  return values;
}

/// Stores of tensors; the two-lane ones are typed at run time.
template <template <class> class TensorOf, class Span>
struct Tensors {
  static constexpr bool mixed =
      !std::is_same_v<Span, std::span<float>> && !std::is_same_v<Span, std::span<double>>;
  std::vector<TensorOf<Span>> tensors;

  Tensors(const Case& c, int) {
    for (std::size_t i = 0; i < c.shapes.size(); ++i) {
      if (c.leader(i) != i) {
        auto tied = tensors[c.leader(i)];
        tied.rename(name_of(i), c.shapes[i]);
        tensors.push_back(std::move(tied));
        continue;
      }
      const bool gradient = !c.shapes[i].attributes.frozen;
      if constexpr (mixed) {
        if (c.shapes[i].is_double) {
          tensors.emplace_back(name_of(i), c.shapes[i], initial_values<double>(c, i), gradient);
        } else {
          tensors.emplace_back(name_of(i), c.shapes[i], initial_values<float>(c, i), gradient);
        }
      } else {
        using T = typename Span::value_type;
        tensors.emplace_back(name_of(i), c.shapes[i], initial_values<T>(c, i), gradient);
      }
    }
  }
  [[nodiscard]] auto& store() { return tensors; }
  void backward(const Case& c, int rank, int step) {
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      if (c.shapes[i].attributes.frozen || c.leader(i) != i) continue;
      tensors[i].set_present(c.present(rank, step, i));
      zero::detail::visit_span(tensors[i].memory(), [&](auto memory) {
        using T = typename decltype(memory)::value_type;
        for (std::size_t e = 0; e < memory.size(); ++e) {
          memory[e] = c.gradient<T>(rank, step, i, e);
        }
      });
    }
  }
};

/// One flat buffer of values and one of gradients. All gradients are always there.
template <class T>
struct Flat {
  static constexpr bool mixed = false;
  std::vector<T> values, gradients;
  zero::FlatParams<T> params;

  Flat(const Case& c, int)
      : values(flatten(c)), gradients(values.size()), params(values, gradients, entries(c)) {}
  static std::vector<T> flatten(const Case& c) {
    std::vector<T> all;
    for (std::size_t i = 0; i < c.shapes.size(); ++i) {
      if (c.leader(i) != i) continue;  // takes no room
      for (std::size_t e = 0; e < c.shapes[i].elements; ++e) all.push_back(c.initial<T>(i, e));
    }
    return all;
  }
  static std::vector<typename zero::FlatParams<T>::Entry> entries(const Case& c) {
    std::vector<typename zero::FlatParams<T>::Entry> entries;
    for (std::size_t i = 0; i < c.shapes.size(); ++i) {
      entries.push_back(
          {name_of(i), c.shapes[i].extents, c.shapes[i].attributes, c.shapes[i].group});
    }
    return entries;
  }
  [[nodiscard]] auto& store() { return params; }
  void backward(const Case& c, int rank, int step) {
    std::size_t at = 0;
    for (std::size_t i = 0; i < c.shapes.size(); ++i) {
      if (c.leader(i) != i) continue;
      for (std::size_t e = 0; e < c.shapes[i].elements; ++e) {
        gradients[at++] = c.gradient<T>(rank, step, i, e);
      }
    }
  }
};

/// Marks every parameter, in an order of the rank's own.
template <class Optimizer>
void mark(Optimizer& optimizer, const Case& c, int rank, int step) {
  std::vector<std::size_t> order;
  for (std::size_t i = 0; i < c.shapes.size(); ++i) {
    if (!c.shapes[i].attributes.frozen) order.push_back(i);
  }
  std::mt19937 random(c.seed + static_cast<std::uint32_t>(100 * step + rank));
  std::shuffle(order.begin(), order.end(), random);
  if (random() % 2 == 0) order.resize(order.size() / 2);  // the others count at step()
  for (const std::size_t i : order) {
    const std::size_t leader = c.leader(i);
    if (c.present(rank, step, leader)) {
      optimizer.mark_ready(i);
    } else {
      optimizer.mark_absent(i);
    }
  }
}

template <class T, class Store, class Optimizer>
void collect(const Case& c, Store& store, const Optimizer& optimizer, Lane<T>& lane,
             std::map<std::pair<std::size_t, std::string>, std::size_t>& covered) {
  for (std::size_t i = 0; i < c.shapes.size(); ++i) {
    zero::detail::visit_span(zero::detail::parameter_at(store, i).values(), [&](auto values) {
      if constexpr (std::is_same_v<typename decltype(values)::value_type, T>) {
        lane.values[i].assign(values.begin(), values.end());
      }
    });
  }
  for (const zero::StateSlice<T>& slice : optimizer.template state<T>()) {
    const std::size_t i = std::stoul(std::string(slice.parameter.substr(1)));
    auto& slot = lane.slots[{i, std::string(slice.slot)}];
    slot.resize(c.shapes[i].elements);
    std::copy(slice.values.begin(), slice.values.end(),
              slot.begin() + static_cast<std::ptrdiff_t>(slice.elements.begin));
    covered[{i, std::string(slice.slot)}] += slice.values.size();
  }
}

/// How ranks reach each other: reading each other's memory, or only through the collectives.
struct SharedMemory {
  static zero::InProcessCommunicator of(zero::InProcessCommunicator& comm) { return comm; }
};
struct CollectivesOnly {
  static auto of(zero::InProcessCommunicator& comm) {
    return zero::FaultInjector<zero::InProcessCommunicator, false>(comm);
  }
};

/// Runs the drawn case and names the first difference from the serial run; "" if there is none.
template <class Path, class Model, class Partition, class View, class Stage, class Opt>
std::string run(Case c, const std::vector<Opt>& groups) {
  const bool flat =
      zero::FlatParamStore<std::remove_reference_t<decltype(std::declval<Model&>().store())>>;
  if (flat && c.settings.gradients == zero::Gradients::reduced) c.settings.gradients = {};
  Result want;
  want.steps.resize(c.shapes.size());
  using Span = zero::detail::values_t<
      zero::parameter_t<std::remove_reference_t<decltype(std::declval<Model&>().store())>>>;
  if constexpr (Model::mixed) {
    run_serial_lane<float>(c, groups, false, want);
    run_serial_lane<double>(c, groups, false, want);
  } else {
    run_serial_lane<typename Span::value_type>(c, groups, true, want);
  }
  std::vector<Result> got(static_cast<std::size_t>(c.world));
  std::vector<std::map<std::pair<std::size_t, std::string>, std::size_t>> covered(got.size());
  std::vector<std::size_t> state_bytes(got.size());
  zero::run_ranks(c.world, [&](zero::InProcessCommunicator& in_process) {
    auto comm = Path::of(in_process);
    Model model(c, comm.rank());
    View view;
    view.bucket_bytes = c.bucket_bytes;
    zero::ZeroSharded optimizer{
        zero::Groups<Opt>(groups), model.store(), comm, Partition{}, view, Stage{}, c.settings};
    for (int step = 0; step < c.steps; ++step) {
      model.backward(c, comm.rank(), step);
      if (step > 0) mark(optimizer, c, comm.rank(), step);
      if (flat && step == 0) {  // a flat buffer can't show absence
        for (std::size_t i = 0; i < c.shapes.size(); ++i) {
          if (!c.shapes[i].attributes.frozen && !c.present(comm.rank(), step, c.leader(i))) {
            optimizer.mark_absent(i);
          }
        }
      } else if (flat) {
        for (std::size_t i = 0; i < c.shapes.size(); ++i) {
          if (c.shapes[i].attributes.frozen || c.present(comm.rank(), step, c.leader(i))) continue;
          try {
            optimizer.mark_absent(i);
          } catch (const zero::UsageError&) {  // marked above already
          }
        }
      }
      if (optimizer.step().outcome().step != step + 1) throw std::runtime_error("step number");
    }
    const auto r = static_cast<std::size_t>(comm.rank());
    if constexpr (Model::mixed) {
      collect<float>(c, model.store(), optimizer, got[r].lane<float>(), covered[r]);
      collect<double>(c, model.store(), optimizer, got[r].lane<double>(), covered[r]);
    } else {
      using T = typename Span::value_type;
      collect<T>(c, model.store(), optimizer, got[r].lane<T>(), covered[r]);
    }
    for (std::size_t i = 0; i < c.shapes.size(); ++i) {
      got[r].steps.push_back(c.leader(i) == i ? optimizer.steps(i) : 0);
    }
    state_bytes[r] = optimizer.memory().state;
  });
  // Values must be right on every rank. Slots are spread: put them together, each element once.
  Result whole = got[0];
  for (std::size_t r = 0; r < got.size(); ++r) {
    Result values_only = got[r];
    Result want_values = want;
    for (Result* result : {&values_only, &want_values}) {
      result->lane<float>().slots.clear();
      result->lane<double>().slots.clear();
    }
    const std::string who = "rank " + std::to_string(r) + " of " + std::to_string(c.world);
    for (const std::string& found :
         {difference(values_only.lane<float>(), want_values.lane<float>(), who.c_str()),
          difference(values_only.lane<double>(), want_values.lane<double>(), who.c_str())}) {
      if (!found.empty()) return found;
    }
    if (got[r].steps != want.steps) return who + ": step counts";
  }
  std::map<std::pair<std::size_t, std::string>, std::size_t> total;
  for (const auto& of_rank : covered) {
    for (const auto& [key, count] : of_rank) total[key] += count;
  }
  const std::size_t copies = Stage::shards_state ? 1 : got.size();
  for (const auto& [key, count] : total) {
    if (count != copies * c.shapes[key.first].elements) return "coverage of " + key.second;
  }
  const auto merge = [&]<class T>(T) -> std::string {
    Lane<T> merged;
    for (const auto& [key, slot] : want.lane<T>().slots) {
      std::vector<T>& all = merged.slots[key];
      all.resize(slot.size());
      for (std::size_t r = 0; r < got.size(); ++r) {
        const auto found = got[r].lane<T>().slots.find(key);
        if (found == got[r].lane<T>().slots.end()) continue;
        if (Stage::shards_state) {  // others' elements are zero bits here
          for (std::size_t e = 0; e < all.size(); ++e) {
            if (std::memcmp(&found->second[e], &(const T&)T(0), sizeof(T)) != 0) {
              all[e] = found->second[e];
            }
          }
        } else {
          if (!same_bits(found->second, slot)) return "a replica's slot " + key.second;
          all = found->second;
        }
      }
    }
    Lane<T> want_slots;
    want_slots.slots = want.lane<T>().slots;
    return difference(merged, want_slots, "all ranks");
  };
  for (const std::string& found : {merge(0.0F), merge(0.0)}) {
    if (!found.empty()) return found;
  }
  return {};
}

}  // namespace oracle
