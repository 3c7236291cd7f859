// SPDX-License-Identifier: Apache-2.0
// The oracle: the same compiled rule on whole tensors, on one thread. Whatever the world size,
// partition, view, stage or communicator, every bit must be the same.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
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
  std::size_t lane = 0;  // in stores with two lanes
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
  std::optional<double> max_norm;
  std::vector<Shape> shapes;
  int backwards = 1;  // of a step: what each of them makes is added up
  zero::Accumulation accumulation = zero::Accumulation::local;

  /// Names one backward of one step, as what `gradient` and `present` call a step.
  [[nodiscard]] static int backward(int step, int which) { return step + 1000 * which; }

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
    const double uniform = static_cast<double>(x >> 11) * 0x1p-53 * 2 - 1;
    if constexpr (zero::detail::is_16_bit<T>) {
      return zero::element_traits<T>::store(static_cast<float>(uniform));
    } else {
      return static_cast<T>(uniform);
    }
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
  c.bucket_bytes =
      std::array<std::size_t, 6>{1, 256, 1000, 4096, 1 << 20, zero::PerTensor{}}[pick(0, 5)];
  c.settings.poison_padding = true;
  if (pick(0, 5) == 0) c.settings.gradients = zero::Gradients::reduced;
  if (pick(0, 3) == 0) c.settings.gradient_scale = 0.3;
  if (pick(0, 2) == 0) c.max_norm = std::array<double, 3>{0.5, 3, 1e9}[pick(0, 2)];
  if (pick(0, 4) == 0) c.settings.loss_scale = zero::LossScale::dynamic(1024);
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
    s.lane = pick(0, 2) == 0 ? 1 : 0;
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

/// What a run leaves behind, as bytes: values by parameter, slots (and "master") by parameter and
/// name, step counts.
struct Result {
  std::map<std::size_t, std::string> values;
  std::vector<std::map<std::size_t, std::string>> before;  // values by step, before it
  std::map<std::pair<std::size_t, std::string>, std::string> slots;
  std::vector<std::int64_t> steps;
};

inline std::string name_of(std::size_t i) { return "p" + std::to_string(i); }

/// Where tensors lie, and how the host gets at them.
struct HostMemory {
  static constexpr zero::MemorySpace space = zero::MemorySpace::host;
  template <class T>
  using Array = std::vector<T>;
  template <class T>
  using FlatParams = zero::FlatParams<T>;
  static void copy(void* to, const void* from, std::size_t bytes) { std::memcpy(to, from, bytes); }
};

template <class Memory = HostMemory, class T>
std::string bytes_of(std::span<const T> from) {
  std::string bytes(from.size_bytes(), '\0');
  if (!from.empty()) Memory::copy(bytes.data(), from.data(), bytes.size());
  return bytes;
}

inline std::string difference_of_values(const Result& got, const Result& want) {
  for (const auto& [i, values] : want.values) {
    const auto found = got.values.find(i);
    if (found == got.values.end()) return "no values of " + name_of(i);
    if (found->second != values) return "values of " + name_of(i);
  }
  return {};
}
inline std::string difference_of_slots(const Result& got, const Result& want) {
  for (const auto& [key, slot] : want.slots) {
    const auto found = got.slots.find(key);
    if (found == got.slots.end() || found->second != slot) {
      return "slot " + key.second + " of " + name_of(key.first);
    }
  }
  return got.slots.size() == want.slots.size() ? "" : "slots of more than there should be";
}

template <class Opt>
std::size_t most_slots(const std::vector<Opt>& groups) {
  std::size_t used = 0;
  for (const Opt& group : groups) used = std::max(used, zero::used_slots(group));
  return used;
}

/// The serial run's parameters of one element type: whole tensors, and nothing else.
template <class S>
class SerialLane {
 public:
  using T = typename S::value;
  using A = typename S::arithmetic;

  SerialLane(const Case& c, std::size_t lane, bool all, std::size_t slot_count) {
    for (std::size_t i = 0; i < c.shapes.size(); ++i) {
      if ((!all && c.shapes[i].lane != lane) || c.leader(i) != i) continue;
      Tensor tensor;
      for (std::size_t e = 0; e < c.shapes[i].elements; ++e) {
        tensor.values.push_back(c.initial<T>(i, e));
        if constexpr (S::has_master) tensor.master.push_back(load(tensor.values.back()));
      }
      tensor.slots.resize(slot_count, std::vector<typename S::slot>(c.shapes[i].elements));
      tensors_[i] = std::move(tensor);
    }
  }

  /// Sums the step's gradients, in rank order, and adds their squares.
  void sum(const Case& c, int step, zero::detail::SquareSum& squares) {
    const int ranks = c.settings.gradients == zero::Gradients::local ? c.world : 1;
    for (auto& [i, tensor] : tensors_) {
      tensor.steps = false;
      for (int k = 0; k < c.backwards; ++k) {
        for (int r = 0; r < ranks; ++r) {
          tensor.steps = tensor.steps || c.present(r, Case::backward(step, k), i);
        }
      }
      if (c.shapes[i].attributes.frozen || tensor.values.empty()) tensor.steps = false;
      if (!tensor.steps) continue;
      tensor.gradient.resize(tensor.values.size());
      for (std::size_t e = 0; e < tensor.values.size(); ++e) {
        const auto sum_ranks = [&](auto&& of_rank) {
          A sum = of_rank(0);
          for (int r = 1; r < ranks; ++r) sum += of_rank(r);
          return sum;
        };
        const auto sent = [&](T of_rank) {  // a rank alone sends nothing
          if (c.world == 1 || c.settings.gradients == zero::Gradients::reduced) {
            return load(of_rank);
          }
          using W = typename S::wire;
          return zero::element_traits<W>::load(zero::element_traits<W>::store(load(of_rank)));
        };
        if (c.accumulation == zero::Accumulation::local) {
          tensor.gradient[e] = sum_ranks([&](int r) { return sent(local_sum(c, r, step, i, e)); });
          continue;
        }
        A total = 0;
        for (int k = 0; k < c.backwards; ++k) {
          const int backward = Case::backward(step, k);
          const A sum = sum_ranks([&](int r) {
            return c.present(r, backward, i) ? sent(c.gradient<T>(r, backward, i, e)) : A(0);
          });
          total = k == 0 ? sum : total + sum;
        }
        tensor.gradient[e] = total;
      }
      squares.add(std::span<const A>(tensor.gradient));
    }
  }

  template <class Opt>
  void step(const Case& c, const std::vector<Opt>& groups, double scale, std::uint64_t seed,
            std::vector<std::int64_t>& steps) {
    for (auto& [i, tensor] : tensors_) {
      if (!tensor.steps) continue;
      const std::int64_t t = ++steps[i];
      const Opt& optimizer = groups[c.shapes[i].group];
      for (A& g : tensor.gradient) g *= static_cast<A>(scale);
      const auto noise = zero::detail::noise_key(seed, static_cast<std::uint64_t>(t), i);
      if constexpr (zero::UpdateRule<Opt, A>) {
        zero::detail::UpdateArrays<S, zero::detail::slot_count<Opt>> arrays{
            tensor.values.data(), nullptr, {}, noise, 0};
        if constexpr (S::has_master) arrays.master = tensor.master.data();
        for (std::size_t s = 0; s < zero::used_slots(optimizer); ++s) {
          arrays.state[s] = tensor.slots[s].data();
        }
        zero::detail::update_elements(optimizer, optimizer.template scalars<A>(t), arrays,
                                      tensor.gradient.data(), tensor.values.size());
      } else {
        step_tensor(optimizer, c.shapes[i], t, noise, tensor);
      }
    }
  }

  template <class Opt>
  void collect(const Case& c, Result& result) const {
    for (const auto& [i, tensor] : tensors_) {
      result.values[i] = bytes_of(std::span<const T>(tensor.values));
      if (c.shapes[i].attributes.frozen || tensor.values.empty()) continue;
      for (std::size_t s = 0; s < tensor.slots.size(); ++s) {
        result.slots[{i, std::string(Opt::slots[s])}] =
            bytes_of(std::span<const typename S::slot>(tensor.slots[s]));
      }
      if (S::has_master) {
        result.slots[{i, "master"}] = bytes_of(std::span<const typename S::master>(tensor.master));
      }
    }
  }

  /// What a rank has of its backward passes, added up in the gradient's own type.
  static T local_sum(const Case& c, int rank, int step, std::size_t i, std::size_t e) {
    std::optional<T> sum;
    for (int k = 0; k < c.backwards; ++k) {
      const int backward = Case::backward(step, k);
      if (!c.present(rank, backward, i)) continue;
      const T next = c.gradient<T>(rank, backward, i, e);
      sum = sum ? zero::element_traits<T>::store(load(*sum) + load(next)) : next;
    }
    return sum.value_or(zero::detail::zero_of<T>());
  }

 private:
  struct Tensor {
    std::vector<T> values;
    std::vector<typename S::master> master;
    std::vector<std::vector<typename S::slot>> slots;
    std::vector<A> gradient;
    bool steps = false;
  };

  template <class U>
  static A load(U stored) {
    return zero::element_traits<U>::load(stored);
  }
  /// Everything in the arithmetic type, and rounded element by element afterwards.
  template <class Opt>
  static void step_tensor(const Opt& optimizer, const Shape& shape, std::int64_t t,
                          zero::detail::NoiseKey noise, Tensor& tensor) {
    std::vector<A> values;
    for (std::size_t e = 0; e < tensor.values.size(); ++e) {
      values.push_back(S::has_master ? load(tensor.master[S::has_master ? e : 0])
                                     : load(tensor.values[e]));
    }
    std::vector<std::vector<A>> slots;
    std::array<std::span<A>, zero::detail::slot_count<Opt>> spans{};
    for (const auto& slot : tensor.slots) {
      std::vector<A>& wide = slots.emplace_back();
      for (const auto stored : slot) wide.push_back(load(stored));
    }
    for (std::size_t s = 0; s < zero::used_slots(optimizer); ++s) spans[s] = slots[s];
    const std::span<const std::size_t> extents(shape.extents);
    std::vector<A> workspace(zero::workspace_elements(optimizer, extents));
    optimizer.update(zero::TensorRef<A>{extents, values, tensor.gradient, workspace}, spans, t);
    const auto round = [&]<class U>(A x, std::size_t e, std::uint32_t quantity, U& stored) {
      if constexpr (std::is_same_v<U, A>) {
        stored = x;
      } else {
        stored = zero::detail::round_to<U, S::rounding>(
            x, zero::detail::noise_bits(noise, static_cast<std::uint32_t>(e), quantity));
      }
    };
    for (std::size_t e = 0; e < values.size(); ++e) {
      if constexpr (S::has_master) tensor.master[e] = values[e];
      round(values[e], e, 0, tensor.values[e]);
      for (std::size_t s = 0; s < zero::used_slots(optimizer); ++s) {
        round(slots[s][e], e, static_cast<std::uint32_t>(s + 1), tensor.slots[s][e]);
      }
    }
  }

  std::map<std::size_t, Tensor> tensors_;
};

template <class Precision, class... T, class Opt>
Result run_serial(const Case& c, const std::vector<Opt>& groups, std::uint64_t seed,
                  zero::detail::TypeList<T...>) {
  Result result;
  result.steps.resize(c.shapes.size());
  const std::size_t slots = most_slots(groups);
  using Elements = zero::detail::TypeList<T...>;
  std::tuple<SerialLane<zero::detail::Storage<T, Precision>>...> lanes{
      SerialLane<zero::detail::Storage<T, Precision>>(c, zero::detail::lane_of<T, Elements>::value,
                                                      sizeof...(T) == 1, slots)...};
  const auto for_each_lane = [&](auto&& body) {
    std::apply([&](auto&... lane) { (body(lane), ...); }, lanes);
  };
  const int ranks = c.settings.gradients == zero::Gradients::local ? c.world : 1;
  const double loss_scale = c.settings.loss_scale ? c.settings.loss_scale->scale : 1;
  const double unclipped = c.settings.gradient_scale.value_or(1.0 / ranks) / loss_scale;
  for (int step = 0; step < c.steps; ++step) {
    zero::detail::SquareSum squares;
    Result now;
    for_each_lane([&](auto& lane) {
      lane.template collect<Opt>(c, now);
      lane.sum(c, step, squares);
    });
    result.before.push_back(std::move(now.values));
    double scale = unclipped;
    if (c.max_norm) {
      const double norm = std::sqrt(squares.value()) * unclipped;
      scale *= std::min(1.0, *c.max_norm / (norm + 1e-6));
    }
    for_each_lane([&](auto& lane) { lane.step(c, groups, scale, seed, result.steps); });
  }
  for_each_lane([&](auto& lane) { lane.template collect<Opt>(c, result); });
  return result;
}

/// A tensor of a framework that counts its references: the memory may be moved elsewhere.
template <class Span, class In>
class TensorIn {
 public:
  using Memory = In;
  static constexpr zero::MemorySpace memory_space = Memory::space;

  template <class T>
  TensorIn(std::string name, const Shape& shape, std::vector<T> values, bool has_gradient)
      : name_(std::move(name)), shape_(&shape) {
    using Array = typename Memory::template Array<T>;
    const auto owner = std::make_shared<Array>(std::move(values));
    values_ = std::span<T>(owner->data(), owner->size());
    owner_ = owner;
    const auto gradient =
        std::make_shared<Array>(std::vector<T>(has_gradient ? shape.elements : 0));
    memory_ = std::span<T>(gradient->data(), gradient->size());
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
  void rebind_gradient(Span gradient, std::shared_ptr<const void> owner) {
    memory_ = gradient_ = gradient;
    gradient_owner_ = std::move(owner);
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
template <class Span, class In>
class FixedTensorIn : public TensorIn<Span, In> {
 public:
  using TensorIn<Span, In>::TensorIn;
  void rebind(Span, std::shared_ptr<const void>) = delete;
  void rebind_gradient(Span, std::shared_ptr<const void>) = delete;
};

template <class Span>
using Tensor = TensorIn<Span, HostMemory>;
template <class Span>
using FixedTensor = FixedTensorIn<Span, HostMemory>;

template <class T>
std::vector<T> initial_values(const Case& c, std::size_t i) {
  std::vector<T> values(c.shapes[i].elements);
  for (std::size_t e = 0; e < values.size(); ++e) values[e] = c.initial<T>(i, e);
  return values;
}

/// Stores of tensors; the two-lane ones are typed at run time.
template <template <class> class TensorOf, class Span>
struct Tensors {
  using Memory = typename TensorOf<Span>::Memory;
  using elements = typename zero::detail::elements_of<Span>::type;
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
      [&]<class... T>(zero::detail::TypeList<T...>) {
        std::size_t lane = 0;
        ((lane++ == (sizeof...(T) == 1 ? 0 : c.shapes[i].lane)
              ? void(tensors.emplace_back(name_of(i), c.shapes[i], initial_values<T>(c, i),
                                          gradient))
              : void()),
         ...);
      }(elements{});
    }
  }
  [[nodiscard]] auto& store() { return tensors; }
  [[nodiscard]] auto memory(std::size_t i) const { return tensors[i].memory(); }
  void set_present(std::size_t i, bool present) { tensors[i].set_present(present); }
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
template <class T, class In = HostMemory>
struct Flat {
  using Memory = In;
  using Params = typename Memory::template FlatParams<T>;
  using elements = zero::detail::TypeList<T>;
  typename Memory::template Array<T> values, gradients;
  Params params;

  Flat(const Case& c, int)
      : values(flatten(c)),
        gradients(std::vector<T>(values.size())),
        params({values.data(), values.size()}, {gradients.data(), gradients.size()}, entries(c)) {}
  static std::vector<T> flatten(const Case& c) {
    std::vector<T> all;
    for (std::size_t i = 0; i < c.shapes.size(); ++i) {
      if (c.leader(i) != i) continue;  // takes no room
      for (std::size_t e = 0; e < c.shapes[i].elements; ++e) all.push_back(c.initial<T>(i, e));
    }
    return all;
  }
  static std::vector<typename Params::Entry> entries(const Case& c) {
    std::vector<typename Params::Entry> entries;
    for (std::size_t i = 0; i < c.shapes.size(); ++i) {
      entries.push_back(
          {name_of(i), c.shapes[i].extents, c.shapes[i].attributes, c.shapes[i].group});
    }
    return entries;
  }
  [[nodiscard]] auto& store() { return params; }
  [[nodiscard]] std::span<T> memory(std::size_t i) { return params.begin()[i].gradient(); }
  void set_present(std::size_t, bool) {}
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

/// The index that `name_of` made a name of.
inline std::size_t index_of(std::string_view name) {
  return std::stoul(std::string(name.substr(1)));
}

/// `f(i)` for each parameter that has a place in `unit`.
template <class F>
void for_each_in_unit(const Case& c, int unit, F&& f) {
  for (std::size_t i = 0; i < c.shapes.size(); ++i) {
    const zero::Attributes& attributes = c.shapes[i].attributes;
    if (attributes.unit == unit && !attributes.frozen && c.leader(i) == i) f(i);
  }
}

inline std::vector<int> units_of(const Case& c) {
  std::vector<int> units;
  for (const Shape& shape : c.shapes) units.push_back(shape.attributes.unit);
  std::sort(units.begin(), units.end());
  units.erase(std::unique(units.begin(), units.end()), units.end());
  return units;
}

/// Throws where an acquired unit's values aren't those that the serial run has before the step.
template <class Model>
void require_values(const Case& c, Model& model, int unit,
                    const std::map<std::size_t, std::string>& want) {
  for_each_in_unit(c, unit, [&](std::size_t i) {
    zero::detail::visit_span(
        zero::detail::parameter_at(model.store(), i).values(), [&]<class T>(std::span<T> values) {
          if (bytes_of<typename Model::Memory>(std::span<const T>(values)) != want.at(i)) {
            throw std::runtime_error("acquired values of " + name_of(i));
          }
        });
  });
}

/// All of a step's forward and backward passes, by leases and by gradients of the framework's own,
/// in an order of the rank's own within a unit.
template <class Optimizer, class Model>
void staged_backwards(Optimizer& optimizer, Model& model, const Case& c, int rank, int step,
                      const std::map<std::size_t, std::string>& values) {
  std::mt19937 random(c.seed + static_cast<std::uint32_t>(100 * step + rank));
  const std::vector<int> units = units_of(c);
  std::vector<bool>
      leases;  // or has memory of its own, which a store of one flat buffer can't lack
  for (std::size_t i = 0; i < c.shapes.size(); ++i) leases.push_back(random() % 3 != 0);
  const auto any = [&](std::size_t i) {
    for (int k = 0; k < c.backwards; ++k) {
      if (c.present(rank, Case::backward(step, k), i)) return true;
    }
    return false;
  };
  for (int k = 0; k < c.backwards; ++k) {
    const int backward = Case::backward(step, k);
    const bool last = k + 1 == c.backwards;
    std::optional<decltype(optimizer.accumulate())> scope;
    if (!last) scope.emplace(optimizer.accumulate(c.accumulation));
    for (const int unit : units) {
      optimizer.acquire(unit);
      require_values(c, model, unit, values);
      optimizer.release(unit);
    }
    std::vector<bool> written(c.shapes.size());
    for (auto unit = units.rbegin(); unit != units.rend(); ++unit) {
      optimizer.acquire(*unit);
      require_values(c, model, *unit, values);
      std::vector<std::size_t> order;
      for (std::size_t i = 0; i < c.shapes.size(); ++i) {
        if (c.shapes[i].attributes.unit == *unit && !c.shapes[i].attributes.frozen) {
          order.push_back(i);
        }
      }
      std::shuffle(order.begin(), order.end(), random);
      for (const std::size_t i : order) {
        const std::size_t leader = c.leader(i);
        const bool here = c.present(rank, backward, leader);
        const bool counts = last || c.accumulation == zero::Accumulation::sharded;
        const bool ready = c.accumulation == zero::Accumulation::local && last ? any(leader) : here;
        zero::detail::visit_span(model.memory(leader), [&]<class T>(std::span<T> memory) {
          if (written[leader]) return;  // by what is tied to it
          written[leader] = true;
          bool adds = false;
          for (int before = 0; before < k; ++before) {
            adds = adds || c.present(rank, Case::backward(step, before), leader);
          }
          adds = adds && c.accumulation == zero::Accumulation::local;
          const auto write = [&](std::span<T> to) {
            for (std::size_t e = 0; e < to.size(); ++e) {
              const T g = c.gradient<T>(rank, backward, leader, e);
              to[e] = adds ? zero::element_traits<T>::store(zero::element_traits<T>::load(to[e]) +
                                                            zero::element_traits<T>::load(g))
                           : g;
            }
          };
          if (leases[leader]) {
            model.set_present(leader, false);
            if (!here) return;
            auto lease = optimizer.template gradient<T>(i);
            if (lease.adds() != adds) throw std::runtime_error("adds() of " + name_of(i));
            write(lease.values());
          } else {
            model.set_present(leader, here || adds);
            if (here) write(memory);
          }
        });
        if (!counts || random() % 4 == 0) continue;  // taken at the end, as it is shown
        if (ready) {
          optimizer.mark_ready(i);
        } else {
          optimizer.mark_absent(i);
        }
      }
      optimizer.release(*unit);
    }
  }
}

/// What a rank shows. @param covered elements shown of each slot
template <class Model, class Optimizer>
void collect(const Case& c, Model& model, const Optimizer& optimizer, Result& result,
             std::map<std::pair<std::size_t, std::string>, std::size_t>& covered) {
  for (std::size_t i = 0; i < c.shapes.size(); ++i) {
    if (c.leader(i) != i) continue;
    zero::detail::visit_span(
        zero::detail::parameter_at(model.store(), i).values(), [&]<class T>(std::span<T> values) {
          result.values[i] = bytes_of<typename Model::Memory>(std::span<const T>(values));
        });
  }
  const auto add = [&](const auto& slices) {
    for (const auto& slice : slices) {
      const std::size_t i = index_of(slice.parameter);
      const std::size_t bytes = sizeof(slice.values[0]);
      std::string& slot = result.slots[{i, std::string(slice.slot)}];
      slot.resize(c.shapes[i].elements * bytes);
      if (slice.values.empty()) continue;
      Model::Memory::copy(slot.data() + slice.elements.begin * bytes, slice.values.data(),
                          slice.values.size_bytes());
      covered[{i, std::string(slice.slot)}] += slice.values.size();
    }
  };
  [&]<class... T>(zero::detail::TypeList<T...>) {
    (add(optimizer.template state<T>()), ...);
    (add(optimizer.template masters<T>()), ...);
  }(typename Model::elements{});
}

template <class Model>
inline constexpr bool is_flat =
    zero::FlatParamStore<std::remove_reference_t<decltype(std::declval<Model&>().store())>>;

/// @param before of each step, the values that the serial run has before it
template <class Optimizer, class Model>
void take_steps(Optimizer& optimizer, Model& model, const Case& c, int rank,
                const std::vector<std::map<std::size_t, std::string>>& before) {
  constexpr bool flat = is_flat<Model>;
  for (int step = 0; step < c.steps; ++step) {
    if constexpr (Optimizer::stage_type::shards_gradients) {
      staged_backwards(optimizer, model, c, rank, step, before[static_cast<std::size_t>(step)]);
    } else {
      model.backward(c, rank, step);
    }
    if (!Optimizer::stage_type::shards_gradients && step > 0) mark(optimizer, c, rank, step);
    if (flat && step == 0) {  // a flat buffer can't show absence
      for (std::size_t i = 0; i < c.shapes.size(); ++i) {
        if (!c.shapes[i].attributes.frozen && !c.present(rank, step, c.leader(i))) {
          optimizer.mark_absent(i);
        }
      }
    } else if (flat) {
      for (std::size_t i = 0; i < c.shapes.size(); ++i) {
        if (c.shapes[i].attributes.frozen || c.present(rank, step, c.leader(i))) continue;
        try {
          optimizer.mark_absent(i);
        } catch (const zero::UsageError&) {  // marked above already
        }
      }
    }
    const zero::Outcome outcome = optimizer.step().outcome();
    if (!outcome.applied || outcome.step != step + 1) throw std::runtime_error("step number");
    if (outcome.gradient_norm.has_value() != c.max_norm.has_value()) {
      throw std::runtime_error("norm");
    }
  }
}

struct OnHost {
  template <class F>
  static void run_ranks(int world, F&& rank_main) {
    zero::run_ranks(world, rank_main);
  }
  template <class... A>
  static void take_steps(A&&... a) {
    oracle::take_steps(std::forward<A>(a)...);
  }
};

/// How ranks reach each other: reading each other's memory, or only through the collectives.
struct SharedMemory : OnHost {
  static zero::InProcessCommunicator of(zero::InProcessCommunicator& comm) { return comm; }
};
struct CollectivesOnly : OnHost {
  static auto of(zero::InProcessCommunicator& comm) {
    return zero::FaultInjector<zero::InProcessCommunicator, false>(comm);
  }
};

/// Runs the drawn case and names the first difference from the serial run; "" if there is none.
template <class Path, class Model, class Partition, class View, class Stage, class Precision,
          class Opt>
std::string run(Case c, const std::vector<Opt>& groups, Stage stage = {}) {
  if (is_flat<Model> && c.settings.gradients == zero::Gradients::reduced) c.settings.gradients = {};
  if constexpr (requires(std::span<const std::size_t> shape) { groups[0].validate(shape); }) {
    for (Shape& shape : c.shapes) {  // takes matrices only
      while (shape.extents.size() < 2) shape.extents.push_back(1);
    }
  }
  Precision precision;
  if constexpr (requires { precision.seed; }) precision.seed = c.seed + 99;
  const Result want = run_serial<Precision>(c, groups, c.seed + 99, typename Model::elements{});
  std::vector<Result> got(static_cast<std::size_t>(c.world));
  std::vector<std::map<std::pair<std::size_t, std::string>, std::size_t>> covered(got.size());
  Path::run_ranks(c.world, [&](auto& in_process) {
    auto comm = Path::of(in_process);
    Model model(c, comm.rank());
    View view;
    view.bucket_bytes = c.bucket_bytes;
    zero::ZeroSharded optimizer{zero::Groups<Opt>(groups),
                                model.store(),
                                comm,
                                Partition{},
                                view,
                                stage,
                                precision,
                                c.settings};
    optimizer.clip_grad_norm(c.max_norm);
    Path::take_steps(optimizer, model, c, comm.rank(), want.before);
    const auto r = static_cast<std::size_t>(comm.rank());
    for (const int unit : units_of(c)) optimizer.acquire(unit);
    collect(c, model, optimizer, got[r], covered[r]);
    for (std::size_t i = 0; i < c.shapes.size(); ++i) {
      got[r].steps.push_back(c.leader(i) == i ? optimizer.steps(i) : 0);
    }
  });
  // Values must be right on every rank. Slots are spread: put them together, each element once.
  Result whole;
  std::map<std::pair<std::size_t, std::string>, std::size_t> total;
  for (std::size_t r = 0; r < got.size(); ++r) {
    const std::string who = "rank " + std::to_string(r) + " of " + std::to_string(c.world) + ": ";
    const std::string found = difference_of_values(got[r], want);
    if (!found.empty()) return who + found;
    if (got[r].steps != want.steps) return who + "step counts";
    if (!Stage::shards_state) {
      const std::string replica = difference_of_slots(got[r], want);
      if (!replica.empty()) return who + replica;
      continue;
    }
    for (const auto& [key, count] : covered[r]) total[key] += count;
    for (const auto& [key, slot] : got[r].slots) {  // others' elements are zero bits here
      std::string& merged = whole.slots[key];
      merged.resize(slot.size());
      for (std::size_t k = 0; k < slot.size(); ++k)
        merged[k] = static_cast<char>(merged[k] | slot[k]);
    }
  }
  for (const auto& [key, count] : total) {
    if (count != c.shapes[key.first].elements) return "coverage of " + key.second;
  }
  if (!Stage::shards_state) return {};
  const std::string found = difference_of_slots(whole, want);
  return found.empty() ? found : "all ranks: " + found;
}

}  // namespace oracle
