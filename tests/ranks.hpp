// SPDX-License-Identifier: Apache-2.0
// Ranks that go wrong each in its own way, the two ways that a step takes through a communicator,
// and small models to train on them.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <random>
#include <span>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "zero/comm/fault_injector.hpp"
#include "zero/comm/in_process.hpp"
#include "zero/element.hpp"
#include "zero/zero_sharded.hpp"

namespace ranks {

/// When a rank that has returned gives up its communicator.
enum class Leaves { when_it_returns, when_all_have };

/// Calls `rank_main(comm)` on `size` threads and returns what each of them threw; null: nothing.
template <class F>
std::vector<std::exception_ptr> run(int size, F&& rank_main, zero::InProcessOptions options = {},
                                    Leaves leaves = Leaves::when_it_returns) {
  zero::InProcessWorld world(size, options);
  std::vector<std::optional<zero::InProcessCommunicator>> comms;
  for (int rank = 0; rank < size; ++rank) comms.emplace_back(world.communicator(rank));
  std::vector<std::exception_ptr> thrown(comms.size());
  std::vector<std::thread> threads;
  for (std::size_t r = 0; r < comms.size(); ++r) {
    threads.emplace_back([&, r] {
      try {
        zero::InProcessCommunicator comm = *comms[r];
        if (leaves == Leaves::when_it_returns) comms[r].reset();
        rank_main(comm);
      } catch (...) {
        thrown[r] = std::current_exception();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return thrown;
}

/// Throws the first rank's exception that there is.
inline void rethrow_any(const std::vector<std::exception_ptr>& thrown) {
  for (const std::exception_ptr& exception : thrown) {
    if (exception) std::rethrow_exception(exception);
  }
}

/// What went wrong, as a value that other threads may look at.
struct Failure {
  enum class Kind { none, usage, communicator, checkpoint, other };
  Kind kind = Kind::none;
  std::string text{};
  std::string operation{};
  std::optional<zero::CommunicatorFailure> cause{};
};

inline Failure failure_of(const std::exception_ptr& exception) {
  if (!exception) return {};
  try {
    std::rethrow_exception(exception);
  } catch (const zero::CommunicatorError& error) {
    return {Failure::Kind::communicator, error.what(), error.operation(), error.failure()};
  } catch (const zero::UsageError& error) {
    return {Failure::Kind::usage, error.what()};
  } catch (const zero::CheckpointError& error) {
    return {Failure::Kind::checkpoint, error.what()};
  } catch (const std::exception& error) {
    return {Failure::Kind::other, error.what()};
  } catch (...) {
    return {Failure::Kind::other, "no std::exception"};
  }
}

/// What `f` threw.
template <class F>
Failure attempt(F&& f) {
  try {
    f();
  } catch (...) {
    return failure_of(std::current_exception());
  }
  return {};
}

/// A parameter with memory of its own, which may be moved.
template <class T>
class Tensor {
 public:
  Tensor(std::string name, std::vector<std::size_t> shape, zero::Attributes attributes = {},
         std::size_t group = 0)
      : name_(std::move(name)), shape_(std::move(shape)), attributes_(attributes), group_(group) {
    std::size_t elements = 1;
    for (const std::size_t extent : shape_) elements *= extent;
    auto memory = std::make_shared<std::vector<T>>(elements);
    values_ = *memory;
    owner_ = std::move(memory);
    if (!attributes.frozen) gradient_.resize(elements);
  }

  [[nodiscard]] const std::string& name() const { return name_; }
  [[nodiscard]] std::span<const std::size_t> shape() const { return shape_; }
  [[nodiscard]] std::span<T> values() const { return values_; }
  [[nodiscard]] std::span<T> gradient() const { return gradient_; }
  [[nodiscard]] const zero::Attributes& attributes() const { return attributes_; }
  [[nodiscard]] std::size_t group() const { return group_; }
  void rebind(std::span<T> values, std::shared_ptr<const void> owner) {
    values_ = values;
    owner_ = std::move(owner);
  }

  /// For tests: what a caller may do to a tensor behind the library's back.
  std::vector<T>& own_gradient() { return gradient_; }
  void take_values(std::span<T> values) { values_ = values; }
  void free_all() {
    values_ = {};
    owner_.reset();
    std::vector<T>().swap(gradient_);
  }

 private:
  std::string name_;
  std::vector<std::size_t> shape_;
  zero::Attributes attributes_;
  std::size_t group_;
  std::shared_ptr<const void> owner_{};
  std::span<T> values_{};
  mutable std::vector<T> gradient_{};
};

template <class T = float>
using Model = std::vector<Tensor<T>>;

/// The same numbers for the same seeds, whatever the standard library.
class Draw {
 public:
  explicit Draw(std::uint32_t seed) : random_(seed) {}
  template <class T>
  void fill(std::span<T> out) {
    for (T& x : out) {
      const double number = (static_cast<double>(random_()) - 2147483648.0) / 2147483648.0;
      x = zero::element_traits<T>::store(static_cast<zero::arithmetic_t<T>>(number));
    }
  }
  /// 0, …, n - 1 in some order.
  std::vector<std::size_t> order(std::size_t n) {
    std::vector<std::size_t> all(n);
    for (std::size_t i = 0; i < n; ++i) all[i] = i;
    for (std::size_t i = n; i > 1; --i) std::swap(all[i - 1], all[random_() % i]);
    return all;
  }

 private:
  std::mt19937 random_;
};

template <class T>
void draw_values(Model<T>& model, std::uint32_t seed = 1) {
  Draw draw(seed);
  for (Tensor<T>& tensor : model) draw.fill(tensor.values());
}

/// The gradients of one rank in one step.
template <class T>
void draw_gradients(Model<T>& model, int rank, int step) {
  Draw draw(static_cast<std::uint32_t>(1000 * (rank + 1) + step));
  for (Tensor<T>& tensor : model) draw.fill(std::span<T>(tensor.own_gradient()));
}

template <class T>
std::string bytes_of(std::span<T> values) {
  if (values.data() == nullptr) return {};
  return {reinterpret_cast<const char*>(values.data()), values.size_bytes()};
}

template <class T>
std::string values_of(const Model<T>& model) {
  std::string all;
  for (const Tensor<T>& tensor : model) all += bytes_of(tensor.values());
  return all;
}

template <class Optimizer>
std::string state_of(const Optimizer& optimizer) {
  std::string all;
  for (const auto& slice : optimizer.state()) {
    all += std::string(slice.parameter) + "." + std::string(slice.slot) + "[" +
           std::to_string(slice.elements.begin) + "," + std::to_string(slice.elements.end) + ")" +
           bytes_of(slice.values);
  }
  return all;
}

/// All that a step may change on this rank, to the bit.
template <class T, class Optimizer>
std::string snapshot(const Model<T>& model, const Optimizer& optimizer) {
  std::string all = values_of(model) + state_of(optimizer);
  all += " steps " + std::to_string(optimizer.steps());
  for (std::size_t i = 0; i < model.size(); ++i) all += " " + std::to_string(optimizer.steps(i));
  return all;
}

/// One way through the engine: whether ranks look into each other's memory or buckets go through
/// the communicator, what is sharded, and where values lie.
template <bool shares_memory, class Stage, class View>
struct Way {
  using stage = Stage;
  using view = View;
  static constexpr bool shares = shares_memory;
  using faulty_comm = zero::FaultInjector<zero::InProcessCommunicator, shares_memory>;
  using comm = std::conditional_t<shares_memory, zero::InProcessCommunicator, faulty_comm>;

  static comm wrap(const zero::InProcessCommunicator& inner) { return comm(inner); }
  static faulty_comm wrap(const zero::InProcessCommunicator& inner, zero::FaultPlan plan) {
    return faulty_comm(inner, std::move(plan));
  }

  /// `options` may be a rule or `Groups` of them. Buckets are small, so that there are several.
  template <class Options, class Store, class Comm, class... More>
  static auto optimizer(Options options, Store& store, Comm& wrapped, zero::Settings settings = {},
                        std::size_t bucket_bytes = 64, More... more) {
    settings.poison_padding = true;
    return zero::ZeroSharded(std::move(options), store, wrapped, View{bucket_bytes}, Stage{},
                             settings, std::move(more)...);
  }
};

using MainWays =
    std::tuple<Way<true, zero::Stage1, zero::NoView>, Way<true, zero::Replicated, zero::NoView>,
               Way<false, zero::Stage1, zero::NoView>, Way<false, zero::Replicated, zero::NoView>>;
/// And where moving values could make a difference.
using AllWays =
    std::tuple<Way<true, zero::Stage1, zero::NoView>, Way<true, zero::Replicated, zero::NoView>,
               Way<false, zero::Stage1, zero::NoView>, Way<false, zero::Replicated, zero::NoView>,
               Way<true, zero::Stage1, zero::ParamView>, Way<false, zero::Stage1, zero::ParamView>>;

/// Each side of both choices, for what the ways share but for a line: all of them take minutes to
/// compile.
using TwoWays =
    std::tuple<Way<true, zero::Replicated, zero::NoView>, Way<false, zero::Stage1, zero::NoView>>;
/// And where moving values could make a difference.
using FewWays =
    std::tuple<Way<true, zero::Replicated, zero::NoView>, Way<false, zero::Stage1, zero::NoView>,
               Way<true, zero::Stage1, zero::ParamView>>;

}  // namespace ranks
