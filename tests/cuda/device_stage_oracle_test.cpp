// SPDX-License-Identifier: Apache-2.0
// Stages 2 and 3 over CUDA memory leave the bits of the serial run, whatever the streams in which
// gradients are made and units are read.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <list>
#include <map>
#include <optional>
#include <random>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "cuda/device_oracle.hpp"

namespace {

using oracle::Case;
using oracle::DeviceTensor;
using oracle::FixedDeviceTensor;
using oracle::Tensors;
using zero::cuda::StreamView;
using Either = std::variant<std::span<float>, std::span<double>>;
using Sixteen = std::variant<std::span<zero::bfloat16>, std::span<zero::float16>>;

const std::vector<zero::Adam> groups{{.lr = 0.1}, {.lr = 0.01, .weight_decay = 0.1}};

/// One rank's forward and backward passes. Streams of the caller's wait for each other only where
/// gradients in memory of the framework's, or of an earlier pass, are overwritten.
template <class Optimizer, class Model>
class StagedRank {
  using Stage = typename Optimizer::stage_type;

 public:
  StagedRank(Optimizer& optimizer, Model& model, const Case& c, int rank)
      : optimizer_(optimizer),
        model_(model),
        c_(c),
        rank_(rank),
        own_(c.seed * 8 + static_cast<std::uint32_t>(rank)),
        shared_(c.seed),
        units_(oracle::units_of(c)) {}

  /// @param before of each step, what the serial run's values are
  void take_steps(const std::vector<std::map<std::size_t, std::string>>& before) {
    for (int step = 0; step < c_.steps; ++step) {
      before_ = &before[static_cast<std::size_t>(step)];
      leases_.clear();
      for (std::size_t i = 0; i < c_.shapes.size(); ++i) leases_.push_back(own_() % 3 != 0);
      for (int pass = 0; pass < c_.backwards; ++pass) {
        const bool last = pass + 1 == c_.backwards;
        {
          std::optional<decltype(optimizer_.accumulate())> scope;
          if (!last) scope.emplace(optimizer_.accumulate(c_.accumulation));
          forward();
          backward(step, pass);
        }
        if (!last) begin_another_pass();
      }
      const zero::cuda::Step enqueued = optimizer_.step(stepping_);
      event_.record(stepping_);
      for (const zero::cuda::Stream& stream : making_) stream.view().wait(event_);
      const zero::Outcome outcome = enqueued.outcome();
      if (!outcome.applied || outcome.step != step + 1) throw std::runtime_error("step number");
      if (outcome.gradient_norm.has_value() != c_.max_norm.has_value()) {
        throw std::runtime_error("norm");
      }
      require_what_was_read();
    }
  }

 private:
  /// How all that share a gradient are treated in a pass.
  struct Way {
    StreamView stream;
    bool marked;
  };

  [[nodiscard]] StreamView any_stream() { return making_[own_() % making_.size()]; }

  void forward() {
    for (const int unit : units_) {
      const StreamView stream = any_stream();
      optimizer_.acquire(unit, stream);
      read(unit, stream);
      optimizer_.release(unit, stream);
    }
  }

  void backward(int step, int pass) {
    std::map<std::size_t, Way> ways;
    for (auto unit = units_.rbegin(); unit != units_.rend(); ++unit) {
      const StreamView stream = any_stream();
      optimizer_.acquire(*unit, stream);
      read(*unit, stream);
      const bool twice = shared_() % 3 == 0;
      const StreamView other = any_stream();
      if (twice) {
        optimizer_.acquire(*unit, other);
        read(*unit, other);
      }
      std::vector<std::size_t> order;
      for (std::size_t i = 0; i < c_.shapes.size(); ++i) {
        const zero::Attributes& attributes = c_.shapes[i].attributes;
        if (attributes.unit == *unit && !attributes.frozen) order.push_back(i);
      }
      make_alike(order, ways, pass + 1 == c_.backwards);
      std::shuffle(order.begin(), order.end(), own_);
      for (const std::size_t i : order) make_gradient(i, ways.at(c_.leader(i)), step, pass);
      optimizer_.release(*unit, stream);
      if (twice) optimizer_.release(*unit, other);
    }
  }

  /// Where units come and go, ranks mark in the same places.
  void make_alike(const std::vector<std::size_t>& order, std::map<std::size_t, Way>& ways,
                  bool last) {
    for (const std::size_t i : order) {
      const auto mine = own_(), everybodys = shared_();
      const bool marked = (Stage::shards_values ? everybodys : mine) % 4 != 0;
      StreamView stream = any_stream();
      if (!marked) stream = last ? stepping_.view() : StreamView();
      ways.emplace(c_.leader(i), Way{stream, marked});
    }
  }

  [[nodiscard]] bool any(int step, int passes, std::size_t leader) const {
    for (int k = 0; k < passes; ++k) {
      if (c_.present(rank_, Case::backward(step, k), leader)) return true;
    }
    return false;
  }

  void make_gradient(std::size_t i, const Way& way, int step, int pass) {
    const std::size_t leader = c_.leader(i);
    const bool local = c_.accumulation == zero::Accumulation::local;
    const bool here = c_.present(rank_, Case::backward(step, pass), leader);
    const bool adds = local && any(step, pass, leader);
    const bool first = last_written_.try_emplace(leader, -1, -1).first->second !=
                       std::pair(step, pass);  // of those that share it
    last_written_[leader] = {step, pass};
    model_.set_present(leader, !leases_[leader] && (here || adds));
    if (here && first) {
      zero::detail::visit_span(model_.memory(leader), [&]<class T>(std::span<T> memory) {
        const std::vector<T> made = made_in<T>(leader, step, pass, local);
        if (leases_[leader]) {
          const auto lease = optimizer_.template gradient<T>(i, way.stream);
          if (lease.adds() != adds) throw std::runtime_error("adds() of " + oracle::name_of(i));
          write(made, lease.values(), way.stream);
        } else {
          write(made, memory, way.stream);
        }
      });
    }
    if (local && pass + 1 < c_.backwards) return;
    if (!way.marked) {
      if (!Stage::shards_values && own_() % 2 == 0 && (here || adds)) optimizer_.mark_ready(i);
    } else if (here || adds) {
      optimizer_.mark_ready(i, way.stream);
    } else {
      optimizer_.mark_absent(i);
    }
  }

  template <class T>
  std::vector<T> made_in(std::size_t leader, int step, int pass, bool sums) const {
    if (sums) return oracle::gradient_after<T>(c_, pass + 1, rank_, step, leader);
    std::vector<T> made;
    for (std::size_t e = 0; e < c_.shapes[leader].elements; ++e) {
      made.push_back(c_.gradient<T>(rank_, Case::backward(step, pass), leader, e));
    }
    return made;
  }
  template <class T>
  static void write(const std::vector<T>& made, std::span<T> to, StreamView stream) {
    if (made.size() != to.size()) throw std::runtime_error("size of a gradient");
    if (made.empty()) return;
    zero::cuda::check(cudaMemcpyAsync(to.data(), made.data(), to.size_bytes(),
                                      cudaMemcpyHostToDevice, stream.get()),
                      "cudaMemcpyAsync");
  }

  /// Takes a copy of an acquired unit's values, to be looked at later.
  void read(int unit, StreamView stream) {
    oracle::for_each_in_unit(c_, unit, [&](std::size_t i) {
      zero::detail::visit_span(
          zero::detail::parameter_at(model_.store(), i).values(),
          [&]<class T>(std::span<T> values) {
            std::string& copy =
                read_.emplace_back(i, std::string(values.size_bytes(), '\0')).second;
            if (values.empty()) return;
            zero::cuda::check(cudaMemcpyAsync(copy.data(), values.data(), copy.size(),
                                              cudaMemcpyDeviceToHost, stream.get()),
                              "cudaMemcpyAsync");
          });
    });
  }
  void require_what_was_read() {
    for (const zero::cuda::Stream& stream : making_) stream.synchronize();
    for (const auto& [i, values] : read_) {
      if (values != before_->at(i)) throw std::runtime_error("values of " + oracle::name_of(i));
    }
    read_.clear();
  }

  /// Every stream comes after what all have made, and what was read at the end of the scope.
  void begin_another_pass() {
    for (const zero::cuda::Stream& stream : making_) {
      event_.record(stream);
      stepping_.view().wait(event_);
    }
    event_.record(StreamView());
    stepping_.view().wait(event_);
    event_.record(stepping_);
    for (const zero::cuda::Stream& stream : making_) stream.view().wait(event_);
    StreamView().wait(event_);
  }

  Optimizer& optimizer_;
  Model& model_;
  const Case& c_;
  int rank_;
  std::mt19937 own_;
  std::mt19937 shared_;
  std::vector<int> units_;
  const std::map<std::size_t, std::string>* before_ = nullptr;
  std::vector<bool> leases_{};  ///< by leader, in this step; or it has memory of its own
  std::map<std::size_t, std::pair<int, int>> last_written_{};
  std::list<std::pair<std::size_t, std::string>> read_{};  ///< stay where they are copied to
  zero::cuda::Stream stepping_{};
  std::vector<zero::cuda::Stream> making_{2};
  zero::cuda::Event event_{};
};

struct Staged : oracle::OnDevice {
  template <class Optimizer, class Model>
  static void take_steps(Optimizer& optimizer, Model& model, const Case& c, int rank,
                         const std::vector<std::map<std::size_t, std::string>>& before) {
    StagedRank<Optimizer, Model>(optimizer, model, c, rank).take_steps(before);
  }
};

/// Worlds of 1 to 5, all ways to accumulate, streams that lag; what is let go of is poisoned.
template <class Model, class Partition, class View, class Stage,
          class Precision = zero::MixedPrecision>
void check(std::uint32_t first_seed) {
#ifdef ZERO_TEST_EACH_ONCE
  constexpr std::uint32_t seeds = 15;  // every world with every number of passes
#else
  constexpr std::uint32_t seeds = 30;
#endif
  for (std::uint32_t seed = first_seed; seed < first_seed + seeds; ++seed) {
    Case c = oracle::draw(seed, groups.size());
    c.world = 1 + static_cast<int>(seed % 5);
    c.backwards = 1 + static_cast<int>(seed / 5 % 3);
    if (seed / 2 % 2 == 0) c.accumulation = zero::Accumulation::sharded;
    if (c.settings.gradients == zero::Gradients::reduced) {
      c.backwards = 1;
      c.accumulation = zero::Accumulation::local;
    }
    c.settings.poison_released = seed % 3 != 0;
    Stage stage;
    if constexpr (Stage::shards_values) {
      stage.prefetch = seed % 4;
      stage.resident_bytes = seed % 7 == 0 ? 4000 : 0;
    }
#if ZERO_CUDA_EMULATED
    zero_emulation::delay(seed, seed % 4 == 0 ? 100 : 0);
    zero_emulation::scramble_blocks(seed % 3);
#endif
    std::string found;
    try {
      found = oracle::run<Staged, Model, Partition, View, Stage, Precision>(c, groups, stage);
    } catch (const std::exception& error) {
      found = error.what();
    }
    INFO("seed " << seed);
    REQUIRE(found == "");
  }
#if ZERO_CUDA_EMULATED
  zero_emulation::reset();
#endif
}

}  // namespace

TEST_CASE("device, stage 2: same bits, parameters stay put", "[cuda]") {
  check<Tensors<FixedDeviceTensor, std::span<float>>, zero::ContiguousPartition, zero::NoView,
        zero::Stage2>(0);
}
TEST_CASE("device, stage 2: same bits, whole tensors sent in bfloat16", "[cuda]") {
  check<Tensors<DeviceTensor, std::span<float>>, zero::BalancedPartition, zero::ParamView,
        zero::Stage2, zero::Bfloat16Wire>(1000);
}
TEST_CASE("device, stage 3: same bits, float and double", "[cuda]") {
  check<Tensors<DeviceTensor, Either>, zero::ContiguousPartition, zero::ParamView, zero::Stage3>(
      2000);
}
TEST_CASE("device, stage 3: same bits, whole tensors of two kinds of 16 bits", "[cuda]") {
  check<Tensors<DeviceTensor, Sixteen>, zero::BalancedPartition, zero::ParamView, zero::Stage3>(
      3000);
}
