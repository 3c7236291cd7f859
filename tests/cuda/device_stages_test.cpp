// SPDX-License-Identifier: Apache-2.0
// What stages 2 and 3 promise on devices beside the right bits (device_stage_oracle_test.cpp): how
// much memory they take, in which order they reduce, what they wait for and what they refuse, and
// how ranks end that go wrong. Compared with stage 1 on the host, to the bit.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <limits>
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
#include "cuda/device_array.hpp"
#include "fake/cuda_runtime.hpp"
#include "ranks.hpp"
#include "zero/cuda.cuh"

namespace {

using namespace std::chrono_literals;
using Catch::Matchers::ContainsSubstring;
using ranks::Failure;
using zero::MemorySpace;
using zero::Phase;
using zero::Stage1;
using zero::Stage2;
using zero::Stage3;
using zero::cuda::Stream;
using zero::cuda::StreamView;
using Clock = std::chrono::steady_clock;
using Kind = Failure::Kind;
using Floats = std::vector<float>;

constexpr int units = 4;
constexpr zero::InProcessOptions patient{.timeout = 60s};
constexpr zero::InProcessOptions quick{.timeout = 300ms};

/// A name and a shape, and a gradient that lies in memory of the framework's, if anywhere.
template <MemorySpace space>
class Node {
 public:
  static constexpr MemorySpace memory_space = space;
  using Array = std::conditional_t<space == MemorySpace::cuda, DeviceArray<float>, Floats>;

  Node(std::string name, std::size_t elements, int unit, std::size_t group = 0)
      : name_(std::move(name)), shape_{elements}, attributes_{.unit = unit}, group_(group) {}
  [[nodiscard]] const std::string& name() const { return name_; }
  [[nodiscard]] std::span<const std::size_t> shape() const { return shape_; }
  [[nodiscard]] std::span<float> values() const { return values_; }
  [[nodiscard]] std::span<float> gradient() const {
    if (gradient_ == nullptr) return {};
    return {gradient_->data(), gradient_->size()};
  }
  [[nodiscard]] const zero::Attributes& attributes() const { return attributes_; }
  [[nodiscard]] std::size_t group() const { return group_; }
  void rebind(std::span<float> values, std::shared_ptr<const void> owner) {
    values_ = values;
    owner_ = std::move(owner);
    ++moved;
  }
  /// Whoever reads it was enqueued: as memory that is freed in stream order.
  void release_gradient() {
    freed_.push_back(std::exchange(gradient_, nullptr));
    ++released;
  }
  void make_gradient() { gradient_ = std::make_shared<Array>(Floats(shape_[0])); }

  int moved = 0;
  int released = 0;

 private:
  std::string name_;
  std::vector<std::size_t> shape_;
  zero::Attributes attributes_;
  std::size_t group_;
  std::span<float> values_{};
  std::shared_ptr<const void> owner_{};
  std::shared_ptr<Array> gradient_{};
  std::vector<std::shared_ptr<Array>> freed_{};
};

/// The first two units have one size, so that one could be taken for the other.
struct Shape {
  std::size_t elements;
  int unit;
};
const std::vector<Shape> small{{40, 0}, {40, 1}, {0, 1}, {400, 2}, {90, 2}, {7, 3}, {120, 3}};

double initial_value(std::string_view name, std::size_t element) {
  return 0.01 *
         static_cast<double>((name.size() + static_cast<std::size_t>(name.back()) + element) % 97);
}

/// In which order buckets were reduced.
struct Recorder {
  std::shared_ptr<std::vector<std::size_t>> reduced = std::make_shared<std::vector<std::size_t>>();
  void begin(const zero::Event& event) {
    if (event.phase == Phase::reduce) reduced->push_back(event.bucket);
  }
  void end(const zero::Event&) {}
};

template <MemorySpace space>
struct Path {
  using Comm = zero::InProcessCommunicator;
  struct NoStream {};
  using Backward = NoStream;
};
template <>
struct Path<MemorySpace::cuda> {
  using Comm = zero::cuda::InProcessCommunicator;
  using Backward = Stream;
};

void wait_for_device(const Stream& stream) { stream.synchronize(); }
template <class T>
void wait_for_device(const T&) {}

/// One rank's part of a run.
template <class Stage, MemorySpace space = MemorySpace::cuda>
struct Rank {
  static constexpr bool on_device = space == MemorySpace::cuda;
  using Comm = typename Path<space>::Comm;
  using Model = std::vector<Node<space>>;

  Rank(const Comm& a_comm, Stage stage = {}, zero::Settings settings = {},
       const std::vector<Shape>& shapes = small, std::size_t bucket_bytes = 512)
      : comm(a_comm),
        model(make_model(shapes)),
        optimizer(zero::Sgd{.lr = 0.1, .momentum = 0.9}, model, comm, zero::ParamView{bucket_bytes},
                  stage, recorder, with_values(std::move(settings))) {}
  static Model make_model(const std::vector<Shape>& shapes) {
    Model model;
    for (const Shape& shape : shapes) {
      model.emplace_back(std::string(1, static_cast<char>('a' + model.size())), shape.elements,
                         shape.unit);
    }
    return model;
  }
  static zero::Settings with_values(zero::Settings settings) {
    settings.initial_value = initial_value;
    settings.poison_padding = true;
    settings.poison_released = on_device;
    return settings;
  }

  [[nodiscard]] int rank() const { return comm.rank(); }
  void acquire(int unit) {
    if constexpr (on_device) {
      optimizer.acquire(unit, backward_stream);
    } else {
      optimizer.acquire(unit);
    }
  }
  void release(int unit) {
    if constexpr (on_device) {
      optimizer.release(unit, backward_stream);
    } else {
      optimizer.release(unit);
    }
  }
  void mark(std::size_t i) {
    if constexpr (on_device) {
      optimizer.mark_ready(i, backward_stream);
    } else {
      optimizer.mark_ready(i);
    }
  }
  [[nodiscard]] zero::Outcome step() {
    if constexpr (on_device) {
      return optimizer.step(stream).outcome();
    } else {
      return optimizer.step().outcome();
    }
  }

  /// What backward makes of parameter i.
  [[nodiscard]] Floats draw(int number, std::size_t i) const {
    Floats made(model[i].shape()[0]);
    ranks::Draw(static_cast<std::uint32_t>(1000 * (rank() + 1) + 50 * number) +
                static_cast<std::uint32_t>(i))
        .fill(std::span<float>(made));
    return made;
  }
  void fill(const Floats& made, std::span<float> to) {
    if (to.empty()) return;
    if constexpr (on_device) {
      zero::cuda::check(cudaMemcpyAsync(to.data(), made.data(), to.size_bytes(),
                                        cudaMemcpyHostToDevice, backward_stream.view().get()),
                        "cudaMemcpyAsync");
    } else {
      std::copy(made.begin(), made.end(), to.begin());
    }
  }
  void write(int number, std::size_t i, std::optional<float> first = {}) {
    Floats made = draw(number, i);
    if (first) made[0] = *first;
    if constexpr (Stage::shards_gradients) {
      const auto lease = optimizer.gradient(i, backward_stream);
      fill(made, lease.values());
    } else {
      model[i].make_gradient();
      fill(made, model[i].gradient());
    }
  }
  void forward() {
    for (int unit = 0; unit < units; ++unit) {
      acquire(unit);
      release(unit);
    }
  }
  void backward(int number, const std::function<void(int)>& in_unit = {}) {
    for (int unit = units; unit-- > 0;) {
      acquire(unit);
      if (in_unit) in_unit(unit);
      for (std::size_t i = model.size(); i-- > 0;) {
        if (model[i].attributes().unit != unit) continue;
        write(number, i);
        mark(i);
      }
      release(unit);
    }
  }
  void train(int number) {
    forward();
    backward(number);
    if (!step().applied) throw std::runtime_error("a skipped step");
  }
  /// All values.
  Floats values() {
    Floats all;
    for (int unit = 0; unit < units; ++unit) acquire(unit);
    wait_for_device(backward_stream);
    for (const Node<space>& node : model) {
      const std::span<float> here = node.values();
      const std::size_t before = all.size();
      all.resize(before + here.size());
      if (here.empty()) continue;
      if constexpr (on_device) {
        zero::cuda::check(
            cudaMemcpy(&all[before], here.data(), here.size_bytes(), cudaMemcpyDeviceToHost),
            "cudaMemcpy");
      } else {
        std::copy(here.begin(), here.end(), all.begin() + static_cast<std::ptrdiff_t>(before));
      }
    }
    for (int unit = 0; unit < units; ++unit) release(unit);
    return all;
  }

  Comm comm;
  Model model;
  Recorder recorder;
  typename Path<space>::Backward stream{};  ///< of steps
  typename Path<space>::Backward backward_stream{};
  zero::ZeroSharded<zero::Sgd, Model&, Comm&, zero::ContiguousPartition, zero::ParamView, Stage,
                    zero::MixedPrecision, Recorder>
      optimizer;
};

void require(bool holds, const char* what) {
  if (!holds) throw std::runtime_error(what);
}

/// Calls `body(comm)` on each rank; throws what one of them throws first.
template <class F>
void each(int world, F&& body, zero::InProcessOptions options = patient) {
  zero::cuda::run_ranks(world, body, options);
}

/// How a rank ended.
struct End {
  Failure failure;
  bool cuda = false;  ///< by a `CudaError`
  double seconds = 0;
};
/// The same, of each rank. Ranks keep their communicators until all have ended.
template <class F>
std::vector<End> ends(int world, F&& body, zero::InProcessOptions options = patient) {
  std::vector<End> all(static_cast<std::size_t>(world));
  each(
      world,
      [&](zero::cuda::InProcessCommunicator& comm) {
        End& end = all[static_cast<std::size_t>(comm.rank())];
        const auto start = Clock::now();
        try {
          body(comm);
        } catch (const zero::CudaError& error) {
          end.cuda = true;
          end.failure = {Kind::other, error.what(), {}, {}};
        } catch (...) {
          end.failure = ranks::failure_of(std::current_exception());
        }
        end.seconds = std::chrono::duration<double>(Clock::now() - start).count();
      },
      options);
  return all;
}

/// What stage 1 on the host has before each of `steps` steps, and after the last.
std::vector<Floats> reference(int world, int steps) {
  std::vector<Floats> all;
  zero::run_ranks(world, [&](zero::InProcessCommunicator& comm) {
    Rank<Stage1, MemorySpace::host> rank(comm);
    for (int step = 0; step <= steps; ++step) {
      Floats now = rank.values();
      if (comm.rank() == 0) all.push_back(std::move(now));
      if (step < steps) rank.train(step);
    }
  });
  return all;
}

}  // namespace

// Everything that an optimizer does, against stage 1.

namespace {

template <class Stage, MemorySpace space = MemorySpace::cuda>
std::vector<std::string> train_much(int world, Stage stage = {}) {
  std::vector<std::string> seen;
  const auto body = [&](auto& comm) {
    Rank<Stage, space> rank(comm, stage, {.loss_scale = zero::LossScale::dynamic(8)});
    const auto note = [&](const zero::Outcome& outcome) {
      const Floats now = rank.values();
      if (comm.rank() != 0) return;
      seen.push_back(ranks::bytes_of(std::span<const float>(now)) +
                     (outcome.applied ? "applied" : "skipped") +
                     std::to_string(outcome.gradient_norm.value_or(-1)) + " " +
                     std::to_string(rank.optimizer.loss_scale()));
    };
    const auto take = [&](int step) {
      rank.forward();
      rank.backward(step);
      note(rank.step());
    };
    take(0);
    rank.optimizer.clip_grad_norm(0.01);
    take(1);
    // One rank has something that is not finite.
    rank.forward();
    const bool last = comm.rank() == world - 1;
    rank.write(2, 4, last ? std::optional(std::numeric_limits<float>::infinity()) : std::nullopt);
    rank.mark(4);
    note(rank.step());
    take(3);
    // More parameters: of units that are there.
    for (int unit = 3; unit < 5; ++unit) {
      rank.model.emplace_back("new" + std::to_string(unit), 150, unit % 4, 1);
    }
    rank.optimizer.add_param_group({.lr = 0.3, .momentum = 0.5});
    rank.optimizer.clip_grad_norm({});
    for (int step = 4; step < 7; ++step) take(step);
  };
  if constexpr (space == MemorySpace::cuda) {
    zero::cuda::run_ranks(world, body);
  } else {
    zero::run_ranks(world, body);
  }
  return seen;
}

}  // namespace

TEST_CASE("device stages: clipping, skipped steps and groups that are added", "[cuda]") {
  for (const int world : {1, 3}) {
    INFO("world " << world);
    const std::vector<std::string> want = train_much<Stage1, MemorySpace::host>(world);
    REQUIRE(want.size() == 7);
    CHECK_THAT(want[2], ContainsSubstring("skipped"));
    CHECK((train_much<Stage2>(world) == want));
    CHECK((train_much<Stage3>(world) == want));
    // Units that stay, until they have grown.
    CHECK((train_much<Stage3>(world, {.resident_bytes = 500}) == want));
  }
}

TEST_CASE("device stages: the framework lets go of gradients as they are taken", "[cuda]") {
  for (const int world : {1, 2}) {
    const std::vector<Floats> want = reference(world, 3);
    each(world, [&](zero::cuda::InProcessCommunicator& comm) {
      Rank<Stage2> rank(comm);
      for (int step = 0; step < 3; ++step) {
        for (std::size_t i = rank.model.size(); i-- > 0;) {
          rank.model[i].make_gradient();
          // What is taken by the step is there when the step's stream comes to it.
          if (i < 2) zero_emulation::enqueue(rank.stream.view().get(), [] {});
          rank.fill(rank.draw(step, i), rank.model[i].gradient());
          if (i == 0) break;
          if (i == 1) {
            rank.optimizer.mark_ready(i);
            require(!rank.model[i].gradient().empty(), "kept until the step");
            continue;
          }
          rank.mark(i);
          require(rank.model[i].gradient().empty(), "freed when it is marked");
        }
        const zero::cuda::Event made;
        made.record(rank.backward_stream);
        rank.stream.view().wait(made);
        require(rank.step().applied, "applied");
      }
      for (const auto& node : rank.model) require(node.released == 3, "released");
      require(rank.values() == want[3], "values");
    });
  }
}

TEST_CASE("device stages: buckets go in the order that was learned in the first step", "[cuda]") {
  each(2, [](zero::cuda::InProcessCommunicator& comm) {
    Rank<Stage2> rank(comm);
    std::vector<std::size_t>& reduced = *rank.recorder.reduced;
    for (int step = 0; step < 3; ++step) {
      reduced.clear();
      std::vector<std::size_t> before_last;
      for (std::size_t i = 0; i < rank.model.size(); ++i) {
        rank.write(step, i);
        if (i + 1 == rank.model.size()) before_last = reduced;
        rank.mark(i);
      }
      require(before_last.empty() == (step == 0), "sent beside backward once it is learned");
      require(rank.step().applied, "applied");
      require(reduced.size() > 3, "all are reduced");
      if (step == 0) {
        require(std::is_sorted(reduced.rbegin(), reduced.rend()), "the last first");
      } else {
        require(std::is_sorted(reduced.begin(), reduced.end()), "as they were made");
      }
    }
  });
}

TEST_CASE("device stages: an optimizer moves between marks and step", "[cuda]") {
  const std::vector<Floats> want = reference(2, 1);
  each(2, [&](zero::cuda::InProcessCommunicator& comm) {
    Rank<Stage3> rank(comm);
    rank.forward();
    rank.backward(0);
    auto moved = std::move(rank.optimizer);
    require(moved.step(rank.stream).outcome().applied, "applied");
    rank.optimizer = std::move(moved);
    require(rank.values() == want[1], "values");
  });
}

TEST_CASE("device stages: several optimizers over one communicator", "[cuda]") {
  const std::vector<Floats> want = reference(3, 3);
  each(3, [&](zero::cuda::InProcessCommunicator& comm) {
    Rank<Stage3> one(comm);
    Rank<Stage2> two(comm);
    Rank<Stage3> three(comm, {.prefetch = 3});
    for (int step = 0; step < 3; ++step) {
      one.forward();
      three.forward();
      three.backward(step);
      one.backward(step);
      require(one.step().applied, "one");
      two.backward(step);
      require(three.step().applied && two.step().applied, "others");
    }
    for (const Floats& values : {one.values(), two.values(), three.values()}) {
      require(values == want[3], "values");
    }
  });
}

TEST_CASE("device stages: a rank alone captures a step into a graph, and steps on without",
          "[cuda]") {
  const auto run = [](auto stage, bool captures) {
    Floats values;
    each(1, [&](zero::cuda::InProcessCommunicator& comm) {
      Rank<decltype(stage)> rank(comm, stage);
      const StreamView stream = rank.stream;
      const auto make = [&](std::size_t i) {
        const auto lease = rank.optimizer.gradient(i, stream);
        zero::cuda::check(
            cudaMemsetAsync(lease.values().data(), 0x3c, lease.values().size_bytes(), stream.get()),
            "cudaMemsetAsync");
      };
      const auto enqueue = [&] {
        rank.optimizer.acquire(3, stream);
        make(6);
        rank.optimizer.mark_ready(6, stream);
        rank.optimizer.release(3, stream);
        (void)rank.optimizer.step(stream);
      };
      enqueue();
      if (captures) {
        cudaGraph_t graph = nullptr;
        cudaGraphExec_t ready = nullptr;
        zero::cuda::check(cudaStreamBeginCapture(stream.get(), cudaStreamCaptureModeThreadLocal),
                          "cudaStreamBeginCapture");
        enqueue();
        zero::cuda::check(cudaStreamEndCapture(stream.get(), &graph), "cudaStreamEndCapture");
        zero::cuda::check(cudaGraphInstantiate(&ready, graph, 0), "cudaGraphInstantiate");
        for (int k = 0; k < 3; ++k) {
          zero::cuda::check(cudaGraphLaunch(ready, stream.get()), "cudaGraphLaunch");
        }
        stream.synchronize();
        (void)cudaGraphExecDestroy(ready);
        (void)cudaGraphDestroy(graph);
      } else {
        for (int k = 0; k < 3; ++k) enqueue();
      }
      enqueue();
      require(rank.optimizer.last_outcome().step == 5, "steps");
      values = rank.values();
    });
    return values;
  };
  CHECK((run(Stage2{}, true) == run(Stage2{}, false)));
  CHECK((run(Stage3{}, true) == run(Stage3{}, false)));
}

// Memory and costs.

namespace {

/// Four equal units of two parameters, a bucket each.
constexpr std::size_t large = 4096;
constexpr std::size_t bucket = large * sizeof(float);
const std::vector<Shape> even{{large, 0}, {large, 0}, {large, 1}, {large, 1},
                              {large, 2}, {large, 2}, {large, 3}, {large, 3}};
constexpr std::size_t all_bytes = 8 * bucket;

/// Steps without looking at what they come to.
template <class Stage>
void train_blindly(Rank<Stage>& rank, int steps) {
  for (int step = 0; step < steps; ++step) {
    rank.forward();
    for (int unit = units; unit-- > 0;) {
      rank.acquire(unit);
      for (std::size_t i = rank.model.size(); i-- > 0;) {
        if (rank.model[i].attributes().unit != unit) continue;
        {
          const auto lease = rank.optimizer.gradient(i, rank.backward_stream);
          zero::cuda::check(cudaMemsetAsync(lease.values().data(), 0, lease.values().size_bytes(),
                                            rank.backward_stream.view().get()),
                            "cudaMemsetAsync");
        }
        rank.mark(i);
      }
      rank.release(unit);
    }
    (void)rank.optimizer.step(rank.stream);
  }
}

/// Bytes of all ranks: the peak of construction and steps, and what stays.
struct Taken {
  std::size_t peak = 0;
  std::size_t reported = 0;
};
template <class Stage>
Taken memory_of(int world, Stage stage, int steps) {
  Taken taken;
  zero_emulation::reset();
  const std::size_t before = zero_emulation::memory_in_use();
  std::mutex mutex;
  each(world, [&](zero::cuda::InProcessCommunicator& comm) {
    Rank<Stage> rank(comm, stage, {}, even, bucket);
    train_blindly(rank, steps);
    const std::size_t mine = rank.optimizer.memory().total();
    const std::scoped_lock lock(mutex);
    taken.reported += mine;
  });
  taken.peak = zero_emulation::peak_memory() - before;
  return taken;
}

}  // namespace

TEST_CASE("device stages: memory at its peak is what the stage promises, and doesn't grow",
          "[cuda]") {
  constexpr std::size_t tables = 12 << 10;
  for (const int world : {1, 2, 4}) {
    INFO("world " << world);
    const auto ranks = static_cast<std::size_t>(world);
    // Sums of gradients and momentum, of the own part; the pool, and one staging bucket.
    const std::size_t of_both = 2 * all_bytes / ranks + 2 * bucket + bucket + tables;
    const Taken two = memory_of(world, Stage2{}, 3);
    CHECK(two.peak <= ranks * (all_bytes + of_both));
    CHECK(two.peak >= two.reported);
    CHECK(memory_of(world, Stage2{}, 20).peak == two.peak);
    for (const std::size_t ahead : {0U, 1U, 3U}) {
      INFO("prefetch " << ahead);
      const std::size_t in_flight = world == 1 ? 0 : (1 + ahead) * 2 * bucket;
      const Stage3 stage{.prefetch = ahead};
      const Taken three = memory_of(world, stage, 3);
      CHECK(three.peak <= ranks * (all_bytes / ranks + in_flight + of_both));
      CHECK(three.peak >= three.reported);
      CHECK(memory_of(world, stage, 20).peak == three.peak);
    }
  }
}

TEST_CASE("device stages: units of many sizes take no more than those in flight", "[cuda]") {
  const std::vector<Shape> uneven{{1000, 0}, {30, 1}, {1000, 2}, {10, 3}};
  each(2, [&](zero::cuda::InProcessCommunicator& comm) {
    Rank<Stage3> rank(comm, {.prefetch = 1}, {}, uneven);
    for (int step = 0; step < 6; ++step) rank.train(step);
    require(rank.optimizer.memory().gathered <= 2 * 4352, "two of the largest");
    // Whoever holds more pays for more.
    require(rank.values().size() == 2040, "all at once");
    require(rank.optimizer.memory().gathered <= 4 * 4352, "four");
  });
}

TEST_CASE("device stages: after the second step nothing waits for a device or allocates",
          "[cuda]") {
  const auto check = [](auto stage, int world) {
    zero_emulation::Counters before{}, after{};
    each(world, [&](zero::cuda::InProcessCommunicator& comm) {
      Rank<decltype(stage)> rank(comm, stage, {}, even, bucket);
      train_blindly(rank, 2);
      const auto count = [&](zero_emulation::Counters& counters) {
        comm.barrier().wait();
        if (comm.rank() == 0) counters = zero_emulation::counters();
        comm.barrier().wait();
      };
      count(before);
      train_blindly(rank, 5);
      count(after);
    });
    INFO("world " << world);
    CHECK(after.allocations == before.allocations);
    CHECK(after.frees == before.frees);
    CHECK(after.host_synchronizations == before.host_synchronizations);
    CHECK(after.launches > before.launches);
  };
  for (const int world : {1, 2, 3}) {
    check(Stage2{}, world);
    check(Stage3{}, world);
    check(Stage3{.resident_bytes = 1 << 20, .prefetch = 0}, world);
  }
}

TEST_CASE("device stages: a pool of a fixed size is kept", "[cuda]") {
  const std::vector<Floats> want = reference(2, 2);
  const auto train = [&](zero::cuda::InProcessCommunicator& comm, std::size_t bytes, bool reverse) {
    Rank<Stage2> rank(comm, {.pool_bytes = bytes});
    for (int step = 0; step < 2; ++step) {
      for (std::size_t k = rank.model.size(); k-- > 0;) {
        const std::size_t i = reverse ? k : rank.model.size() - 1 - k;
        rank.write(step, i);
        rank.mark(i);
      }
      require(rank.step().applied, "applied");
    }
    require(rank.optimizer.memory().pooled <= bytes, "the pool");
    require(rank.values() == want[2], "values");
  };
  // The largest and its neighbours, from the last to the first as the first step sends them.
  each(2, [&](zero::cuda::InProcessCommunicator& comm) { train(comm, 2560, true); });
  // From the first to the last the first step keeps all.
  each(2, [&](zero::cuda::InProcessCommunicator& comm) { train(comm, 4096, false); });
  const auto all = ends(
      2, [&](zero::cuda::InProcessCommunicator& comm) { train(comm, 2560, comm.rank() == 0); });
  CHECK_THAT(all[1].failure.text, ContainsSubstring("pool_bytes larger"));
  CHECK(all[0].failure.kind == Kind::communicator);
  CHECK_THAT(all[0].failure.text, ContainsSubstring("rank 1"));
  for (const End& end : all) CHECK(end.seconds < 20);
}

// What is refused, and how ranks end.

TEST_CASE("device stages: units that are held, or not", "[cuda]") {
  for (const int world : {1, 2}) {
    INFO("world " << world);
    const std::vector<Floats> want = reference(world, 1);
    each(world, [&](zero::cuda::InProcessCommunicator& comm) {
      Rank<Stage3> rank(comm);
      const auto text = [](const auto& f) { return ranks::attempt(f).text; };
      const auto has = [](const std::string& all, const char* part) {
        return all.find(part) != std::string::npos;
      };
      require(has(text([&] { rank.release(1); }), "release: unit 1 is not acquired"), "release");
      require(has(text([&] { rank.acquire(9); }), "no unit 9"), "no such unit");
      rank.forward();
      rank.backward(0);
      rank.acquire(2);
      require(has(text([&] { (void)rank.step(); }), "unit 2 is still acquired"), "held");
      rank.release(2);
      rank.train(0);
      require(rank.values() == want[1], "values");
    });
  }
}

TEST_CASE("device stages: a rank refuses the first step, or another: all are told and go on",
          "[cuda]") {
  for (const int world : {1, 2, 3}) {
    const std::vector<Floats> want = reference(world, 2);
    for (const int refused : {0, 1}) {
      INFO("world " << world << ", step " << refused);
      const auto all = ends(world, [&](zero::cuda::InProcessCommunicator& comm) {
        Rank<Stage3> rank(comm);
        for (int step = 0; step < 2; ++step) {
          if (step == refused) {
            rank.forward();
            // One is written and not marked, and one not even written.
            rank.write(7, 5);
            rank.write(7, 3);
            rank.mark(3);
            const bool mine = comm.rank() == comm.size() - 1;
            if (mine) rank.optimizer.group(0).lr = -1;
            const Failure failure = ranks::attempt([&] { (void)rank.step(); });
            require(failure.kind == Kind::usage, failure.text.c_str());
            require(failure.text.find("lr") != std::string::npos, "the reason");
            rank.optimizer.group(0).lr = 0.1;
          }
          rank.train(step);
        }
        require(rank.values() == want[2], "values");
      });
      for (const End& end : all) {
        INFO(end.failure.text);
        CHECK(end.failure.kind == Kind::none);
      }
    }
  }
}

TEST_CASE("device stage 3: ranks acquire different units of one size: the step tells", "[cuda]") {
  const auto all = ends(3, [](zero::cuda::InProcessCommunicator& comm) {
    Rank<Stage3> rank(comm, {.prefetch = 0});
    rank.train(0);
    for (const int unit : {0, 1}) {
      const int mine = comm.rank() == 2 ? 1 - unit : unit;
      rank.acquire(mine);
      rank.release(mine);
    }
    (void)rank.step();
  });
  for (const End& end : all) {
    INFO(end.failure.text);
    CHECK(end.failure.kind == Kind::usage);
    CHECK_THAT(end.failure.text, ContainsSubstring("rank 2 has acquired or released other units"));
  }
}

TEST_CASE("device stage 3: ranks acquire different units of unlike sizes: all are told at once",
          "[cuda]") {
  const auto all = ends(3, [](zero::cuda::InProcessCommunicator& comm) {
    Rank<Stage3> rank(comm);
    rank.acquire(comm.rank() == 1 ? 2 : 0);
  });
  for (const End& end : all) {
    INFO(end.failure.text);
    CHECK(end.failure.kind == Kind::communicator);
    CHECK(end.seconds < 20);
  }
}

// Known limit of in-process ranks, whose operations wait for peers as they are enqueued.
TEST_CASE("device stage 3: ranks that mark and acquire in unlike order end by the timeout",
          "[cuda]") {
  const auto all = ends(
      2,
      [](zero::cuda::InProcessCommunicator& comm) {
        Rank<Stage3> rank(comm);
        rank.acquire(3);
        rank.write(0, 6);
        rank.write(0, 5);
        rank.mark(5);
        if (comm.rank() == 0) rank.mark(6);
        rank.acquire(2);
        if (comm.rank() == 1) rank.mark(6);
      },
      quick);
  for (const End& end : all) {
    INFO(end.failure.text);
    CHECK(end.failure.kind == Kind::communicator);
    CHECK(end.seconds < 20);
  }
}

TEST_CASE("device stages: a rank throws or destroys its optimizer within a unit: peers hear",
          "[cuda]") {
  for (const bool throws : {true, false}) {
    for (const int at : {3, 1}) {
      INFO("throws " << throws << ", unit " << at);
      const auto alive = zero_emulation::alive();
      const auto all = ends(3, [&](zero::cuda::InProcessCommunicator& comm) {
        zero_emulation::delay(static_cast<std::uint64_t>(at), 100);
        auto rank = std::make_unique<Rank<Stage3>>(comm);
        for (int step = 0; step < 2; ++step) {
          rank->forward();
          rank->backward(step, [&](int unit) {
            if (comm.rank() != 1 || step == 0 || unit != at) return;
            if (throws) throw std::runtime_error("no such token");
            rank->comm.abort("a rank goes");
            throw zero::UsageError("gone");
          });
          (void)rank->step();
        }
      });
      CHECK(all[1].failure.text == (throws ? "no such token" : "gone"));
      for (const std::size_t peer : {0U, 2U}) {
        INFO(all[peer].failure.text);
        CHECK(all[peer].failure.kind == Kind::communicator);
        CHECK(all[peer].seconds < 20);
      }
      CHECK(zero_emulation::alive().allocations == alive.allocations);
      CHECK(zero_emulation::alive().events == alive.events);
      CHECK(zero_emulation::alive().streams == alive.streams);
    }
  }
  zero_emulation::reset();
}

// ThreadSanitizer doesn't see what orders the ends of an exception's owners on several threads.
#ifndef __SANITIZE_THREAD__
TEST_CASE("device stages: any call to CUDA fails: every rank gets a typed error, nothing leaks",
          "[cuda]") {
  const auto alive = zero_emulation::alive();
  for (const char* function :
       {"cudaMallocAsync", "cudaEventRecord", "cudaStreamWaitEvent", "cudaLaunchKernel",
        "cudaMemcpyAsync", "cudaMemsetAsync", "cudaEventCreateWithFlags", "cudaMallocHost"}) {
    int failed = 0;
    for (int nth = 1; nth < 1000; nth += 1 + nth / 4) {
      INFO(function << " " << nth);
      zero_emulation::reset();
      zero_emulation::fail(function, nth, cudaErrorMemoryAllocation);
      bool stopped = false;
      std::vector<End> all;
      try {
        all = ends(2, [](zero::cuda::InProcessCommunicator& comm) {
          Rank<Stage3> rank(comm);
          for (int step = 0; step < 2; ++step) {
            rank.forward();
            rank.backward(step);
            (void)rank.step();
          }
        });
      } catch (const zero::Error&) {  // not even the ranks could be made
        stopped = true;
      }
      const bool well = std::all_of(all.begin(), all.end(),
                                    [](const End& end) { return end.failure.kind == Kind::none; });
      CHECK(zero_emulation::alive().allocations == alive.allocations);
      CHECK(zero_emulation::alive().events == alive.events);
      if (stopped || well) continue;
      ++failed;
      const auto is_typed = [](const End& end) {
        return end.cuda || end.failure.kind == Kind::communicator ||
               end.failure.kind == Kind::usage;
      };
      // A rank that had finished before may be well.
      CHECK(std::any_of(all.begin(), all.end(), [](const End& end) { return end.cuda; }));
      for (const End& end : all) {
        INFO(end.failure.text);
        CHECK((end.failure.kind == Kind::none || is_typed(end)));
        CHECK(end.seconds < 20);
      }
    }
    INFO(function);
    CHECK(failed > 0);
  }
  zero_emulation::reset();
}
#endif
