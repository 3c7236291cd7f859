// SPDX-License-Identifier: Apache-2.0
// What stages 2 and 3 promise beside the right bits (oracle/stage_oracle_test.cpp): how much is
// sent, in which order and beside what, how much memory waits, what acquire and release mean, and
// what is refused. Compared with stage 1, to the bit.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <mutex>
#include <numeric>
#include <optional>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "catch.hpp"
#include "ranks.hpp"
#include "zero/bfloat16.hpp"
#include "zero/join.hpp"
#include "zero/optim/sgd.hpp"
#include "zero/zero_sharded.hpp"

namespace {

using namespace std::chrono_literals;
using Catch::Matchers::ContainsSubstring;
using ranks::Failure;
using zero::Accumulation;
using zero::Phase;
using zero::Stage1;
using zero::Stage2;
using zero::Stage3;
using Kind = ranks::Failure::Kind;

/// A tensor that may be moved. Its gradient lies in memory of the framework's, or nowhere.
template <class T>
class Node {
 public:
  Node(std::string name, std::size_t elements, zero::Attributes attributes, bool has_gradient,
       std::size_t group = 0)
      : name_(std::move(name)), shape_{elements}, attributes_(attributes), group_(group) {
    auto memory = std::make_shared<std::vector<T>>(elements);
    values_ = *memory;
    owner_ = std::move(memory);
    if (has_gradient && !attributes.frozen) gradient_.resize(elements);
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
  void release_gradient() {
    std::vector<T>().swap(gradient_);
    ++released;
  }
  /// Backward makes a gradient of the framework's own.
  std::span<T> make_gradient() {
    gradient_.resize(shape_[0]);
    return gradient_;
  }
  /// The same memory under another name.
  void tie_to(const Node& other) {
    values_ = other.values_;
    owner_ = other.owner_;
  }

  int released = 0;

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
using Model = std::vector<Node<T>>;

constexpr std::size_t bucket_bytes = 512;  // some for each of the larger parameters
constexpr int units = 4;

/// @param own_gradients whether gradients lie in memory of the framework's, as stage 1 needs
Model<> make_model(bool own_gradients) {
  Model<> model;
  const auto add = [&](const char* name, std::size_t elements, int unit) {
    model.emplace_back(name, elements, zero::Attributes{.unit = unit}, own_gradients);
    ranks::Draw(static_cast<std::uint32_t>(model.size())).fill(model.back().values());
  };
  add("a", 40, 0);
  add("b", 7, 0);
  add("c", 400, 1);
  add("d", 90, 2);
  add("e", 120, 2);
  add("f", 60, 3);
  return model;
}

/// What is sent, and a chance to hold it up.
struct Wire {
  std::atomic<std::uint64_t> bytes{0};
  /// Called before an operation with elements starts: how many of its name have been before.
  std::function<void(const std::string& operation, int before)> hook{};
  std::mutex mutex{};
  std::vector<std::pair<std::string, int>> started{};
};

/// Ranks that can't look into each other's memory, whose payload is counted.
class Counted {
 public:
  static constexpr zero::MemorySpace memory_space = zero::MemorySpace::host;
  static constexpr bool supports(zero::ElementType) { return true; }
  static constexpr bool supports(zero::ReduceOp) { return true; }

  Counted(zero::InProcessCommunicator inner, std::shared_ptr<Wire> wire)
      : inner_(std::move(inner)), wire_(std::move(wire)) {}
  [[nodiscard]] int rank() const { return inner_.rank(); }
  [[nodiscard]] int size() const { return inner_.size(); }

  template <zero::Element T>
  [[nodiscard]] auto all_reduce(std::span<T> data, zero::ReduceOp op = zero::ReduceOp::sum) {
    send("all_reduce", 2 * (data.size_bytes() - data.size_bytes() / ranks()));
    return inner_.all_reduce(data, op);
  }
  template <zero::Element T>
  [[nodiscard]] auto reduce_scatter(std::span<const std::type_identity_t<T>> input,
                                    std::span<T> output, zero::ReduceOp op = zero::ReduceOp::sum) {
    send("reduce", input.size_bytes() - output.size_bytes());
    return inner_.reduce_scatter(input, output, op);
  }
  template <zero::Element T>
  [[nodiscard]] auto reduce_scatter_v(std::span<const std::type_identity_t<T>> input,
                                      std::span<T> output, std::span<const std::size_t> counts,
                                      zero::ReduceOp op = zero::ReduceOp::sum) {
    send("reduce", input.size_bytes() - output.size_bytes());
    return inner_.reduce_scatter_v(input, output, counts, op);
  }
  template <zero::Element T>
  [[nodiscard]] auto all_gather(std::span<const std::type_identity_t<T>> input,
                                std::span<T> output) {
    send("gather", input.size_bytes() * (ranks() - 1));
    return inner_.all_gather(input, output);
  }
  template <zero::Element T>
  [[nodiscard]] auto all_gather_v(std::span<const std::type_identity_t<T>> input,
                                  std::span<T> output, std::span<const std::size_t> counts) {
    send("gather", input.size_bytes() * (ranks() - 1));
    return inner_.all_gather_v(input, output, counts);
  }
  template <zero::Element T>
  [[nodiscard]] auto all_to_all(std::span<const std::type_identity_t<T>> input,
                                std::span<T> output) {
    send("reduce", input.size_bytes() - input.size_bytes() / ranks());
    return inner_.all_to_all(input, output);
  }
  template <zero::Element T>
  [[nodiscard]] auto all_to_all_v(std::span<const std::type_identity_t<T>> input,
                                  std::span<const std::size_t> send_counts, std::span<T> output,
                                  std::span<const std::size_t> receive_counts) {
    send("reduce", input.size_bytes() - send_counts[static_cast<std::size_t>(rank())] * sizeof(T));
    return inner_.all_to_all_v(input, send_counts, output, receive_counts);
  }
  template <zero::Element T>
  [[nodiscard]] auto broadcast(std::span<T> data, int root) {
    return inner_.broadcast(data, root);
  }
  [[nodiscard]] auto barrier() { return inner_.barrier(); }
  [[nodiscard]] auto exchange(std::span<const std::byte> mine, std::span<std::byte> all) {
    return inner_.exchange(mine, all);
  }
  void abort(std::string_view reason) const { inner_.abort(reason); }
  [[nodiscard]] auto batch() { return inner_.batch(); }
  [[nodiscard]] Counted duplicate() { return {inner_.duplicate(), wire_}; }
  [[nodiscard]] bool concurrent() const { return true; }

 private:
  [[nodiscard]] std::size_t ranks() const { return static_cast<std::size_t>(size()); }
  void send(const char* operation, std::size_t bytes) {
    wire_->bytes += bytes;
    if (!wire_->hook) return;
    int before = 0;
    {
      const std::scoped_lock lock(wire_->mutex);
      auto at = std::find_if(wire_->started.begin(), wire_->started.end(),
                             [&](const auto& entry) { return entry.first == operation; });
      if (at == wire_->started.end()) {
        at = wire_->started.insert(wire_->started.end(), {operation, 0});
      }
      before = at->second++;
    }
    wire_->hook(operation, before);
  }

  zero::InProcessCommunicator inner_;
  std::shared_ptr<Wire> wire_;
};
static_assert(zero::Communicator<Counted> && zero::Duplicable<Counted>);
static_assert(!zero::SharedMemoryCommunicator<Counted>);

/// Events as they came.
struct Recorder {
  struct Entry {
    zero::Event event;
    bool begins;
  };
  std::shared_ptr<std::vector<Entry>> log = std::make_shared<std::vector<Entry>>();
  void begin(const zero::Event& event) { log->push_back({event, true}); }
  void end(const zero::Event& event) { log->push_back({event, false}); }
};

std::vector<std::size_t> begun(const Recorder& recorder, Phase phase) {
  std::vector<std::size_t> buckets;
  for (const Recorder::Entry& entry : *recorder.log) {
    if (entry.begins && entry.event.phase == phase) buckets.push_back(entry.event.bucket);
  }
  return buckets;
}

/// One rank's part of a run.
template <class Stage, class T = float, class Precision = zero::MixedPrecision>
struct Rank {
  static constexpr bool own_gradients = !Stage::shards_gradients;

  Rank(zero::InProcessCommunicator in_process, Model<T> a_model, Stage stage = {},
       zero::Settings settings = {}, zero::Sgd rule = {.lr = 0.1, .momentum = 0.9},
       Precision precision = {})
      : comm(std::move(in_process), wire),
        model(std::move(a_model)),
        optimizer(rule, model, comm, zero::ParamView{bucket_bytes}, stage, recorder, precision,
                  with_poison(std::move(settings))) {}
  static zero::Settings with_poison(zero::Settings settings) {
    settings.poison_padding = true;
    return settings;
  }

  [[nodiscard]] int rank() const { return comm.rank(); }

  /// What backward makes of parameter i.
  void draw(int step, std::size_t i, std::span<T> to) const {
    ranks::Draw(static_cast<std::uint32_t>(1000 * (rank() + 1) + 50 * step) +
                static_cast<std::uint32_t>(i))
        .fill(to);
  }
  void write(int step, std::size_t i) {
    auto lease = optimizer.gradient(i);
    if (!lease.adds()) {
      draw(step, i, lease.values());
      return;
    }
    std::vector<T> more(lease.values().size());
    draw(step, i, more);
    for (std::size_t e = 0; e < more.size(); ++e) lease.values()[e] += more[e];
  }
  void forward(const std::function<void(int)>& look = {}) {
    for (int unit = 0; unit < units; ++unit) {
      optimizer.acquire(unit);
      if (look) look(unit);
      optimizer.release(unit);
    }
  }
  /// By units, the last first, unless another order of all parameters is asked for.
  void backward(int step, const std::vector<std::size_t>& order = {},
                const std::function<void(int)>& look = {}) {
    const auto done = [&](std::size_t i) {
      write(step, i);
      optimizer.mark_ready(i);
    };
    for (const std::size_t i : order) done(i);
    for (int unit = units; unit-- > 0;) {
      optimizer.acquire(unit);
      if (look) look(unit);
      for (std::size_t i = model.size(); i-- > 0 && order.empty();) {
        const zero::Attributes& attributes = model[i].attributes();
        if (attributes.unit == unit && !attributes.frozen) done(i);
      }
      optimizer.release(unit);
    }
  }
  void step(int number) {
    forward();
    backward(number);
    REQUIRE_FALSE(!optimizer.step().outcome().applied);
  }
  /// All values, as bytes.
  std::string values() {
    std::string all;
    for (int unit = 0; unit < units; ++unit) optimizer.acquire(unit);
    for (const Node<T>& node : model) all += ranks::bytes_of(node.values());
    for (int unit = 0; unit < units; ++unit) optimizer.release(unit);
    return all;
  }
  std::string values_of_unit(int unit) const {
    std::string all;
    for (const Node<T>& node : model) {
      if (node.attributes().unit == unit) all += ranks::bytes_of(node.values());
    }
    return all;
  }
  /// Bytes of all values, padding included.
  [[nodiscard]] std::size_t padded() const { return optimizer.layout().extent(0) * sizeof(T); }

  std::shared_ptr<Wire> wire = std::make_shared<Wire>();
  Counted comm;
  Model<T> model;
  Recorder recorder;
  zero::ZeroSharded<zero::Sgd, Model<T>&, Counted&, zero::ContiguousPartition, zero::ParamView,
                    Stage, Precision, Recorder>
      optimizer;
};

/// Calls `body(comm)` on each of `world` ranks; throws what one of them throws first.
template <class F>
void each(int world, F&& body) {
  zero::run_ranks(world, [&](zero::InProcessCommunicator& comm) { body(comm); });
}
/// The same, for what each of them throws.
template <class F>
std::vector<Failure> failures(int world, F&& body) {
  std::vector<Failure> all;
  for (const std::exception_ptr& thrown :
       ranks::run(world, [&](zero::InProcessCommunicator comm) { body(comm); })) {
    all.push_back(ranks::failure_of(thrown));
  }
  return all;
}

/// Catch's assertions are for one thread.
std::mutex asserting;
void require(bool holds, const char* what) {
  if (holds) return;
  throw std::runtime_error(what);
}
void require_text(const Failure& failure, Kind kind, const std::string& part) {
  const std::scoped_lock lock(asserting);
  INFO(failure.text);
  CHECK(failure.kind == kind);
  CHECK_THAT(failure.text, ContainsSubstring(part));
}

/// What stage 1 has before each of `steps` steps, and after the last.
std::vector<std::string> reference(int world, int steps) {
  std::vector<std::string> all;
  each(world, [&](zero::InProcessCommunicator& comm) {
    Rank<Stage1> rank(comm, make_model(true));
    for (int step = 0; step <= steps; ++step) {
      std::string now = rank.values();
      if (comm.rank() == 0) all.push_back(std::move(now));
      if (step < steps) rank.step(step);
    }
  });
  return all;
}

// Traffic.

template <class Stage>
void check_traffic(int world, std::uint64_t in_halves) {
  each(world, [&](zero::InProcessCommunicator& comm) {
    Rank<Stage> rank(comm, make_model(Rank<Stage>::own_gradients));
    const auto share = [&](std::uint64_t times) {
      return times * rank.padded() * static_cast<std::uint64_t>(world - 1) /
             static_cast<std::uint64_t>(world);
    };
    for (int step = 0; step < 3; ++step) {
      const zero::TrafficReport before = rank.optimizer.traffic();
      rank.wire->bytes = 0;
      rank.step(step);
      require(rank.wire->bytes == share(in_halves), "what was sent");
      if (!Stage::shards_gradients) continue;
      const zero::TrafficReport after = rank.optimizer.traffic();
      require(after.reduce.bytes - before.reduce.bytes == share(1), "what was reduced");
      require(after.gather.bytes - before.gather.bytes == share(in_halves - 1),
              "what was gathered");
    }
  });
}

TEST_CASE("stages: as many bytes are sent as the paper says, padding included") {
  for (int world = 1; world <= 4; ++world) {
    INFO("world " << world);
    check_traffic<Stage1>(world, 2);
    check_traffic<Stage2>(world, 2);
    check_traffic<Stage3>(world, 3);
  }
}

TEST_CASE("stages: prefetching sends nothing twice, and resident units less") {
  each(2, [](zero::InProcessCommunicator& comm) {
    for (const std::size_t ahead : {0, 2, 9}) {
      Rank<Stage3> rank(comm, make_model(false), {.prefetch = ahead});
      rank.step(0);
      rank.wire->bytes = 0;
      rank.step(1);
      require(rank.wire->bytes == 3 * rank.padded() / 2, "what was sent");
    }
    Rank<Stage3> rank(comm, make_model(false), {.resident_bytes = 1 << 20});
    rank.wire->bytes = 0;
    rank.step(0);
    require(rank.wire->bytes == rank.padded(), "as at stage 2");
  });
}

// Order.

TEST_CASE("stages: any order of gradients on any rank, the same sums; the first order is learned") {
  constexpr int world = 3;
  constexpr int steps = 4;
  const std::vector<std::string> want = reference(world, steps);
  for (std::uint32_t seed = 0; seed < 4; ++seed) {
    std::vector<std::vector<std::vector<std::size_t>>> reduced(world);  // by rank and step
    each(world, [&](zero::InProcessCommunicator& comm) {
      Rank<Stage2> rank(comm, make_model(false));
      std::vector<std::size_t> order(rank.model.size());
      std::iota(order.begin(), order.end(), std::size_t{0});
      for (int step = 0; step < steps; ++step) {
        if (seed == 1 && comm.rank() == 1) std::reverse(order.begin(), order.end());
        if (seed > 1) {
          order = ranks::Draw(seed * 100 + static_cast<std::uint32_t>(10 * step + comm.rank()))
                      .order(order.size());
        }
        rank.recorder.log->clear();
        rank.backward(step, order);
        rank.optimizer.step();
        reduced[static_cast<std::size_t>(comm.rank())].push_back(
            begun(rank.recorder, Phase::reduce));
      }
      require(rank.values() == want.back(), "values");
    });
    INFO("seed " << seed);
    for (const auto& of_rank : reduced) CHECK(of_rank == reduced[0]);
    std::vector<std::size_t> buckets(reduced[0][0].size());
    std::iota(buckets.begin(), buckets.end(), std::size_t{0});
    if (seed == 0) CHECK(reduced[0][1] == buckets);
    CHECK(reduced[0][2] == reduced[0][1]);
    CHECK(reduced[0][3] == reduced[0][1]);
    std::reverse(buckets.begin(), buckets.end());
    CHECK(reduced[0][0] == buckets);
  }
}

// Overlap.

/// Something that happens on one thread and is waited for, not for ever, on another.
class Happening {
 public:
  void happens() {
    {
      const std::scoped_lock lock(mutex_);
      there_ = true;
    }
    changed_.notify_all();
  }
  bool wait() {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, 20s, [&] { return there_; });
  }

 private:
  std::mutex mutex_{};
  std::condition_variable changed_{};
  bool there_ = false;
};

TEST_CASE("stages: buckets are reduced during the backward, updated and gathered during the step") {
  each(2, [](zero::InProcessCommunicator& comm) {
    Rank<Stage2> rank(comm, make_model(false));
    Happening reduced;
    Happening gathered;
    const auto buckets = static_cast<int>(rank.optimizer.layout().buckets(0));
    bool in_time = true;
    rank.wire->hook = [&](const std::string& operation, int before) {
      if (operation == "gather") gathered.happens();
      if (operation == "reduce" && before == 0) reduced.happens();
      // The last bucket's turn comes when the first has been updated and is being gathered.
      if (operation == "reduce" && before + 1 == buckets) in_time = gathered.wait();
    };
    const auto last = rank.model.size() - 1;
    rank.write(0, last);
    rank.optimizer.mark_ready(last);
    require(reduced.wait(), "reduced before the others are written");
    for (std::size_t i = last; i-- > 0;) {
      rank.write(0, i);
      rank.optimizer.mark_ready(i);
    }
    rank.optimizer.step();
    require(in_time, "gathered before the last bucket was reduced");
    const auto& log = *rank.recorder.log;
    const auto is = [](Phase phase, bool begins) {
      return [=](const Recorder::Entry& e) { return e.event.phase == phase && e.begins == begins; };
    };
    const auto first_update = std::find_if(log.begin(), log.end(), is(Phase::update, true));
    const auto last_reduce = std::find_if(log.rbegin(), log.rend(), is(Phase::reduce, false));
    require(first_update < last_reduce.base(), "updated before the last bucket was reduced");
  });
}

TEST_CASE("stage 3: the next unit is gathered while one is in use, from the second step on") {
  each(2, [](zero::InProcessCommunicator& comm) {
    Rank<Stage3> rank(comm, make_model(false));
    rank.step(0);
    rank.optimizer.acquire(0);
    Happening ahead;
    const auto more = [&] { return begun(rank.recorder, Phase::gather).size(); };
    (void)more;
    require(rank.optimizer.memory().gathered > 0, "gathered");
    rank.wire->hook = [&](const std::string&, int) { ahead.happens(); };
    rank.optimizer.release(0);
    rank.optimizer.acquire(1);
    rank.optimizer.release(1);
    require(ahead.wait(), "unit 2 is asked for with unit 1");
    rank.wire->hook = {};
  });
}

}  // namespace
