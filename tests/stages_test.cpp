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
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "catch.hpp"
#include "ranks.hpp"
#include "zero/bfloat16.hpp"
#include "zero/estimate.hpp"
#include "zero/join.hpp"
#include "zero/optim/sgd.hpp"
#include "zero/shaped_param.hpp"
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
    if (!optimizer.step().outcome().applied) throw std::runtime_error("a skipped step");
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
    rank.wire->hook = [&](const std::string&, int) { ahead.happens(); };
    rank.optimizer.release(0);
    rank.optimizer.acquire(1);
    require(ahead.wait(), "unit 2 is asked for with unit 1");
    rank.optimizer.release(1);
    rank.optimizer.step();  // ends what is on its way
    rank.wire->hook = {};
  });
}

// Acquire and release.

/// Throws unless the unit that is there has the values of `want`.
template <class R>
auto looks_like(const R& rank, const std::string& want) {
  return [&rank, want](int unit) {
    std::size_t at = 0;
    for (const auto& node : rank.model) {
      const std::string now = want.substr(at, node.values().size_bytes());
      at += now.size();
      if (node.attributes().unit != unit) continue;
      require(ranks::bytes_of(node.values()) == now, "values of an acquired unit");
    }
  };
}

TEST_CASE("stage 3: acquired values are right, wherever they are acquired, in memory that stays") {
  constexpr int world = 3;
  constexpr int steps = 3;
  const std::vector<std::string> want = reference(world, steps);
  for (const std::size_t ahead : {0, 1, 2, 7}) {
    for (const std::size_t resident : {0, 700}) {
      INFO("prefetch " << ahead << ", resident " << resident);
      each(world, [&](zero::InProcessCommunicator& comm) {
        Rank<Stage3> rank(comm, make_model(false), {.resident_bytes = resident, .prefetch = ahead});
        std::vector<float*> places;
        for (const Node<float>& node : rank.model) places.push_back(node.values().data());
        ranks::Draw draw(static_cast<std::uint32_t>(ahead));
        for (int step = 0; step <= steps; ++step) {
          const auto look = looks_like(rank, want[static_cast<std::size_t>(step)]);
          for (int pass = 0; pass < step;
               ++pass) {  // an evaluation, in the same order on all ranks
            for (const std::size_t unit : draw.order(units)) {
              rank.optimizer.acquire(static_cast<int>(unit));
              look(static_cast<int>(unit));
              rank.optimizer.release(static_cast<int>(unit));
            }
          }
          if (step == steps) break;
          rank.forward(look);
          rank.backward(step, {}, look);
          rank.optimizer.step();
        }
        if (resident > 0) {  // the first and the last unit are that small
          looks_like(rank, want.back())(0);
          looks_like(rank, want.back())(3);
        }
        for (std::size_t i = 0; i < places.size(); ++i) {
          require(rank.model[i].values().data() == places[i], "the same place");
        }
      });
    }
  }
}

TEST_CASE("stage 3: holds nest, and a unit is released as often as it was acquired") {
  const std::string want = reference(2, 0)[0];
  each(2, [&](zero::InProcessCommunicator& comm) {
    Rank<Stage3> rank(comm, make_model(false), {}, {.poison_released = true});
    const auto look = looks_like(rank, want);
    require_text(ranks::attempt([&] { rank.optimizer.release(2); }), Kind::usage, "unit 2");
    rank.optimizer.acquire(2);
    rank.optimizer.acquire(2);
    rank.optimizer.acquire(1);
    rank.optimizer.release(2);
    look(2);
    rank.optimizer.release(2);
    look(1);
    require_text(ranks::attempt([&] { rank.optimizer.release(2); }), Kind::usage,
                 "unit 2 is not acquired");
    rank.optimizer.release(1);
    for (const int unknown : {-1, 4}) {
      const std::string what = "there is no unit " + std::to_string(unknown);
      require_text(ranks::attempt([&] { rank.optimizer.acquire(unknown); }), Kind::usage, what);
      require_text(ranks::attempt([&] { rank.optimizer.release(unknown); }), Kind::usage, what);
    }
    rank.step(0);  // none of these has hurt anybody
  });
}

template <class Stage>
void check_verbs_do_nothing() {
  each(2, [](zero::InProcessCommunicator& comm) {
    Rank<Stage> rank(comm, make_model(Rank<Stage>::own_gradients));
    const std::string before = rank.values();
    rank.wire->bytes = 0;
    rank.optimizer.release(3);
    rank.optimizer.acquire(1);
    rank.optimizer.acquire(comm.rank());  // not even alike
    require(rank.wire->bytes == 0, "nothing was sent");
    require_text(ranks::attempt([&] { rank.optimizer.acquire(9); }), Kind::usage,
                 "there is no unit 9");
    require_text(ranks::attempt([&] { rank.optimizer.release(9); }), Kind::usage,
                 "there is no unit 9");
    rank.step(0);  // with units held
    require(rank.values() != before, "stepped");
  });
}
TEST_CASE("stages 1 and 2: acquire and release are legal, and do nothing") {
  check_verbs_do_nothing<Stage1>();
  check_verbs_do_nothing<Stage2>();
}

TEST_CASE("stage 3: a step with a unit held is refused by all, who can go on") {
  const std::vector<std::string> want = reference(3, 2);
  each(3, [&](zero::InProcessCommunicator& comm) {
    Rank<Stage3> rank(comm, make_model(false));
    rank.step(0);
    rank.optimizer.acquire(2);
    if (comm.rank() == 1) rank.optimizer.acquire(2);
    rank.backward(1);
    rank.optimizer.release(2);
    const Failure refused = ranks::attempt([&] { rank.optimizer.step(); });
    require_text(refused, Kind::usage, "unit 2 is still acquired");
    require_text(refused, Kind::usage, "rank 1");
    if (comm.rank() == 1) rank.optimizer.release(2);
    require(rank.optimizer.steps() == 1, "no step");
    require(rank.values() == want[1], "nothing has changed");
    rank.step(1);
    require(rank.values() == want[2], "values");
  });
}

TEST_CASE("stage 3: as much is gathered at once as is held and asked for ahead") {
  each(2, [](zero::InProcessCommunicator& comm) {
    std::vector<std::size_t> sizes;
    Rank<Stage3> alone(comm, make_model(false), {.prefetch = 0});
    alone.forward([&](int) { sizes.push_back(alone.optimizer.memory().gathered); });
    require(std::accumulate(sizes.begin(), sizes.end(), std::size_t{0}) == alone.padded(), "sizes");
    for (int step = 0; step < 3; ++step) alone.step(step);
    const zero::MemoryReport kept = alone.optimizer.memory();
    require(kept.gathered == 0, "nothing is left");
    require(kept.gathered_peak == *std::max_element(sizes.begin(), sizes.end()), "one unit");
    require(kept.values == alone.padded() / 2, "the own part");

    Rank<Stage3> ahead(comm, make_model(false), {.prefetch = 1});
    for (int step = 0; step < 3; ++step) ahead.step(step);
    std::size_t two = 0;
    for (std::size_t u = 0; u + 1 < sizes.size(); ++u) two = std::max(two, sizes[u] + sizes[u + 1]);
    require(ahead.optimizer.memory().gathered_peak == two, "two units");
    require(ahead.optimizer.memory().gathered == 0, "nothing is left");
  });
}

// What is used after it was let go of.

TEST_CASE("poison: values are NaN once released, and what is written to them is reported") {
  const std::vector<Failure> all = failures(2, [](const zero::InProcessCommunicator& comm) {
    Rank<Stage3> rank(comm, make_model(false), {.prefetch = 0}, {.poison_released = true});
    rank.step(0);
    const std::span<float> b = rank.model[1].values();
    require(std::isnan(b[0]) && std::isnan(b[6]), "NaN before");
    rank.optimizer.acquire(0);
    require(!std::isnan(b[0]), "a number");
    rank.optimizer.release(0);
    require(std::isnan(b[0]), "NaN after");
    b[6] = 1;
    rank.optimizer.acquire(1);  // another unit
    rank.optimizer.release(1);
    rank.optimizer.acquire(0);
  });
  for (const Failure& failure : all) {
    require_text(failure, Kind::usage, "'b'");
    require_text(failure, Kind::usage, "written after its unit 0 had been released");
  }
}

TEST_CASE("poison: a gradient that is written after it was sent is reported at the next lease") {
  for (const std::size_t leased : {0, 1}) {  // in the bucket of both
    const std::vector<Failure> all = failures(2, [&](const zero::InProcessCommunicator& comm) {
      Rank<Stage2> rank(comm, make_model(false), {}, {.poison_released = true});
      std::span<float> kept;
      {
        const auto lease = rank.optimizer.gradient(1);
        kept = lease.values();
        rank.draw(0, 1, kept);
      }
      rank.optimizer.mark_ready(1);
      rank.optimizer.step();
      require(std::isnan(kept[3]), "NaN after");
      kept[3] = 1;
      (void)rank.optimizer.gradient(leased);
    });
    for (const Failure& failure : all) {
      require_text(failure, Kind::usage, "the gradient of parameter 1 ('b')");
      require_text(failure, Kind::usage, "written after it had been marked and sent");
    }
  }
}

// The pool.

/// Some more than a bucket holds, the first of which become ready last.
const std::vector<std::size_t> in_store_order{0, 1, 2, 3, 4, 5};

TEST_CASE("pool: one that is too small for the order is exhausted, and says what it needs") {
  constexpr int world = 3;
  const std::vector<std::string> want = reference(world, 2);
  std::size_t pool = 1600;  // the largest gradient
  int tries = 0;
  for (; tries < 10; ++tries) {
    std::size_t needed = 0;
    const std::vector<Failure> all = failures(world, [&](const zero::InProcessCommunicator& comm) {
      // Of one rank alone: which memory it has is its own business.
      Rank<Stage2> rank(comm, make_model(false), {.pool_bytes = comm.rank() == 1 ? pool : 0});
      const auto start = std::chrono::steady_clock::now();
      try {
        for (int step = 0; step < 2; ++step) {
          rank.backward(step, in_store_order);
          rank.optimizer.step();
        }
        require(rank.values() == want[2], "values");
      } catch (const zero::PoolExhausted& error) {
        require(comm.rank() == 1, "on that rank");
        require(error.pool() == pool && error.needed() > pool, "needed()");
        needed = error.needed();
        require(rank.values() == want[0] && rank.optimizer.steps() == 0, "nothing has changed");
        throw;
      } catch (const zero::CommunicatorError& error) {
        require(error.failure() == zero::CommunicatorFailure::aborted, "aborted");
        require(std::chrono::steady_clock::now() - start < 30s, "soon");
        require(rank.values() == want[0] && rank.optimizer.steps() == 0, "nothing has changed");
        throw;
      }
    });
    if (needed == 0) {
      for (const Failure& failure : all) require_text(failure, Kind::none, "");
      break;
    }
    INFO("a pool of " << pool);
    require_text(all[1], Kind::usage, "parameter ");
    require_text(all[1], Kind::usage, std::to_string(needed));
    for (const std::size_t peer : {0, 2}) require_text(all[peer], Kind::communicator, "pool");
    pool = needed;
  }
  CHECK(tries > 1);
  CHECK(tries < 10);
}

TEST_CASE("pool: the step that finds it exhausted throws so, too") {
  const std::vector<Failure> all = failures(2, [](const zero::InProcessCommunicator& comm) {
    Rank<Stage2> rank(comm, make_model(false), {.pool_bytes = comm.rank() == 0 ? 1600U : 0U});
    for (std::size_t i = 0; i < rank.model.size(); ++i) {  // which nobody marks
      rank.draw(0, i, rank.model[i].make_gradient());
    }
    std::optional<zero::PoolExhausted> exhausted;
    try {
      if (comm.rank() == 0) {
        rank.optimizer.step();
      } else {
        {
          const auto scope = rank.optimizer.accumulate(Accumulation::local);
        }
        rank.optimizer.step();
      }
    } catch (const zero::PoolExhausted& error) {
      exhausted = error;
    }
    require(exhausted.has_value() == (comm.rank() == 0), "PoolExhausted");
    if (exhausted) throw *exhausted;
  });
  require_text(all[0], Kind::usage, "parameter 2 ('c')");
  require_text(all[1], Kind::communicator, "parameter 2 ('c')");
}

TEST_CASE("pool: a scope that finds it exhausted tells the step") {
  const std::vector<Failure> all = failures(2, [](const zero::InProcessCommunicator& comm) {
    Rank<Stage2> rank(comm, make_model(false), {.pool_bytes = comm.rank() == 0 ? 1600U : 0U});
    for (const std::size_t i : {1, 2}) rank.draw(0, i, rank.model[i].make_gradient());
    {
      const auto scope = rank.optimizer.accumulate();
    }
    rank.optimizer.step();
  });
  require_text(all[0], Kind::usage, "parameter 2 ('c')");
  require_text(all[1], Kind::communicator, "parameter 2 ('c')");
}

TEST_CASE("pool: one that the largest gradient has no room in is refused at once") {
  const std::vector<Failure> all = failures(2, [](const zero::InProcessCommunicator& comm) {
    Rank<Stage2> rank(comm, make_model(false), {.pool_bytes = comm.rank() == 0 ? 1000U : 0U});
  });
  for (const Failure& failure : all) {
    require_text(failure, Kind::usage,
                 "parameter 2 ('c') has a gradient of 1600 bytes, but pool_bytes is 1000");
  }
}

TEST_CASE("pool: two buckets are enough in the learned order, whatever the delays") {
  each(3, [](zero::InProcessCommunicator& comm) {
    Model<> model;
    for (int i = 0; i < 12; ++i) {  // none larger than a bucket
      model.emplace_back("p" + std::to_string(i), 40 + 7 * static_cast<std::size_t>(i),
                         zero::Attributes{}, false);
    }
    constexpr std::size_t bucket = bucket_bytes / 48 * 48;  // of slices of 16 bytes
    Rank<Stage2> rank(comm, model, {.pool_bytes = 2 * bucket});
    require(rank.optimizer.layout().bucket(0, 0).size() * sizeof(float) == bucket, "bucket");
    rank.wire->hook = [&](const std::string&, int before) {
      std::this_thread::sleep_for(std::chrono::microseconds(200 * (before % 3)));
    };
    for (int step = 0; step < 5; ++step) {
      for (std::size_t i = model.size(); i-- > 0;) {
        rank.write(step, i);
        rank.optimizer.mark_ready(i);
      }
      rank.optimizer.step();
      require(rank.optimizer.memory().pooled == 0, "nothing is left");
    }
    require(rank.optimizer.memory().pooled_peak <= 2 * bucket, "the peak");
  });
}

/// The first is tied to one behind, and one is frozen.
Model<> make_tied_model(bool own_gradients) {
  Model<> model = make_model(own_gradients);
  model.emplace_back("tied", 40, zero::Attributes{.alias = 0, .unit = 3}, own_gradients);
  model.back().tie_to(model.front());
  model.emplace_back("frozen", 33, zero::Attributes{.frozen = true, .unit = 1}, false);
  ranks::Draw(99).fill(model.back().values());
  return model;
}

template <class Stage>
std::string train_tied(int world, std::size_t* peak = nullptr) {
  std::string values;
  each(world, [&](zero::InProcessCommunicator& comm) {
    Rank<Stage> rank(comm, make_tied_model(Rank<Stage>::own_gradients));
    for (int step = 0; step < 3; ++step) rank.step(step);
    if (peak != nullptr && comm.rank() == 0) *peak = rank.optimizer.memory().pooled_peak;
    std::string now = rank.values();
    if (comm.rank() == 0) values = std::move(now);
  });
  return values;
}
TEST_CASE("stages: tied and frozen parameters; what is tied waits beside two buckets") {
  const std::string want = train_tied<Stage1>(2);
  std::size_t peak = 0;
  CHECK((train_tied<Stage2>(2, &peak) == want));
  CHECK(peak <= 400 * 4 + bucket_bytes + 40 * 4);  // the largest parameter, one bucket, the tied
  CHECK((train_tied<Stage3>(2, &peak) == want));
  CHECK(peak <= 400 * 4 + bucket_bytes + 40 * 4);
}

// Accumulation.

TEST_CASE("accumulation: one mode in a step, and sharded only where it makes sense") {
  each(2, [](zero::InProcessCommunicator& comm) {
    Rank<Stage2> rank(comm, make_model(false));
    const auto refused = [&](Accumulation mode) {
      return ranks::attempt([&] { (void)rank.optimizer.accumulate(mode); });
    };
    for (const bool leases : {false, true}) {
      for (const Accumulation first : {Accumulation::local, Accumulation::sharded}) {
        {
          const auto scope = rank.optimizer.accumulate(first);
          if (leases) rank.write(0, 3);
          require_text(refused(first), Kind::usage, "already accumulating");
        }
        const Accumulation other =
            first == Accumulation::local ? Accumulation::sharded : Accumulation::local;
        require_text(refused(other), Kind::usage, "one mode");
        {
          const auto scope = rank.optimizer.accumulate(first);
        }
        rank.write(0, 3);
        rank.optimizer.mark_ready(3);
        require_text(refused(first), Kind::usage, "marked already");
        rank.optimizer.step();
      }
    }
    rank.write(0, 3);
    require_text(refused(Accumulation::sharded), Kind::usage, "leased in this step");
    rank.optimizer.step();
    rank.optimizer.join([&] {
      require_text(refused(Accumulation::sharded), Kind::usage, "in a join");
      rank.step(1);
    });

    Rank<Stage2> reduced(comm, make_model(false), {}, {.gradients = zero::Gradients::reduced});
    require_text(ranks::attempt([&] { (void)reduced.optimizer.accumulate(); }), Kind::usage,
                 "Settings::gradients");
    Rank<Stage1> stage1(comm, make_model(true));
    require_text(ranks::attempt([&] { (void)stage1.optimizer.accumulate(Accumulation::sharded); }),
                 Kind::usage, "needs a stage that shards gradients");
    {
      const auto scope = stage1.optimizer.accumulate();
    }
  });
}

TEST_CASE("accumulation: a scope that ends with an open lease is refused once, by the step") {
  const std::vector<std::string> want = reference(2, 1);
  each(2, [&](zero::InProcessCommunicator& comm) {
    Rank<Stage3> rank(comm, make_model(false));
    {
      std::optional<decltype(rank.optimizer.gradient(0))> lease;
      {
        const auto scope = rank.optimizer.accumulate();
        rank.backward(7, {5, 4, 3});
        if (comm.rank() == 1) lease.emplace(rank.optimizer.gradient(0));
      }
      rank.optimizer.acquire(0);
      rank.optimizer.release(0);
    }
    require_text(ranks::attempt([&] { rank.optimizer.step(); }), Kind::usage, "is still leased");
    require(rank.values() == want[0], "nothing has changed");
    rank.step(0);
    require(rank.values() == want[1], "values");
  });
}

/// 1 and 256 times 2^-9, each in a backward of its own: a sum in 16 bits stays 1.
template <class R>
void accumulate_small(R& rank) {
  using T = typename std::remove_cvref_t<decltype(rank.model[0].values())>::value_type;
  for (int backward = 0; backward < 257; ++backward) {
    std::optional<decltype(rank.optimizer.accumulate())> scope;
    if (backward < 256) scope.emplace(rank.optimizer.accumulate());
    if (rank.rank() == backward % 2) {
      const auto lease = rank.optimizer.gradient(0);
      std::fill(lease.values().begin(), lease.values().end(),
                zero::element_traits<T>::store(backward == 0 ? 1 : 0x1p-9F));
    }
    if (rank.rank() == backward % 2) rank.optimizer.mark_ready(0);
  }
  require(rank.optimizer.step().outcome().applied, "applied");
}

// DeepSpeed issue 1800: sums of 16 bits over micro-steps.
TEST_CASE("DS #1800: sharded accumulation sums in float, of bfloat16 and over a wire of it") {
  const zero::Sgd plain{.lr = 1};
  each(2, [&](zero::InProcessCommunicator& comm) {
    Model<zero::bfloat16> model;
    model.emplace_back("p", 64, zero::Attributes{}, false);
    Rank<Stage3, zero::bfloat16> rank(comm, model, {}, {.gradient_scale = 1}, plain);
    accumulate_small(rank);
    rank.optimizer.acquire(0);
    require(static_cast<float>(model[0].values()[0]) == 0, "moved");
    for (const zero::bfloat16 x : rank.model[0].values()) {
      require(static_cast<float>(x) == -1.5F, "1.5");
    }
    rank.optimizer.release(0);
    // Loaded weights have no more bits than a parameter.
    {
      const auto lease = rank.optimizer.gradient(0);
      for (zero::bfloat16& x : lease.values()) x = zero::bfloat16(0x1p-11F);
    }
    rank.optimizer.step();
    for (const auto& slice : rank.optimizer.masters()) {
      for (const float x : slice.values) require(x == -1.5F - 0x1p-10F, "the master");
    }
    rank.optimizer.reload_masters();
    std::size_t covered = 0;
    for (const auto& slice : rank.optimizer.masters()) {
      covered += slice.values.size();
      for (const float x : slice.values) require(x == -1.5F, "the parameter");
    }
    require(covered == 32, "half of them");
  });
  each(2, [&](zero::InProcessCommunicator& comm) {
    Model<> model;
    model.emplace_back("p", 64, zero::Attributes{}, false);
    Rank<Stage3, float, zero::Bfloat16Wire> rank(comm, model, {}, {.gradient_scale = 1}, plain);
    accumulate_small(rank);
    rank.optimizer.acquire(0);
    for (const float x : rank.model[0].values()) require(x == -1.5F, "1.5");
    rank.optimizer.release(0);
  });
}

// Everything else that an optimizer does, against stage 1.

template <class Stage>
std::vector<std::string> train_much(int world, Stage stage = {}) {
  std::vector<std::string> seen;
  each(world, [&](zero::InProcessCommunicator& comm) {
    Rank<Stage> rank(comm, make_model(Rank<Stage>::own_gradients), stage,
                     {.loss_scale = zero::LossScale::dynamic(8)});
    const auto note = [&](const zero::Outcome& outcome) {
      std::string now = rank.values();
      if (comm.rank() != 0) return;
      seen.push_back(now + (outcome.applied ? "applied" : "skipped") +
                     std::to_string(outcome.gradient_norm.value_or(-1)) + " " +
                     std::to_string(rank.optimizer.loss_scale()));
    };
    const auto take = [&](int step) {
      rank.forward();
      rank.backward(step);
      note(rank.optimizer.step().outcome());
    };
    take(0);
    rank.optimizer.clip_grad_norm(0.01);
    take(1);
    // One rank has something that is not finite.
    rank.forward();
    {
      const auto lease = rank.optimizer.gradient(4);
      rank.draw(2, 4, lease.values());
      if (comm.rank() == world - 1) lease.values()[5] = std::numeric_limits<float>::infinity();
    }
    rank.optimizer.mark_ready(4);
    note(rank.optimizer.step().outcome());
    take(3);
    // More parameters: of units that are there, and of a new one.
    for (int unit = 3; unit < 5; ++unit) {
      rank.model.emplace_back("new" + std::to_string(unit), 150, zero::Attributes{.unit = unit % 4},
                              Rank<Stage>::own_gradients, 1);
      ranks::Draw(7).fill(rank.model.back().values());
    }
    rank.optimizer.add_param_group({.lr = 0.3, .momentum = 0.5});
    rank.optimizer.clip_grad_norm({});
    for (int step = 4; step < 7; ++step) take(step);
  });
  return seen;
}
TEST_CASE("stages: clipping, skipped steps and groups that are added") {
  for (const int world : {1, 3}) {
    INFO("world " << world);
    const std::vector<std::string> want = train_much<Stage1>(world);
    REQUIRE(want.size() == 7);
    CHECK_THAT(want[2], ContainsSubstring("skipped"));
    CHECK((train_much<Stage2>(world) == want));
    CHECK((train_much<Stage3>(world) == want));
    // Units that stay, until they have grown.
    CHECK((train_much<Stage3>(world, {.resident_bytes = 500}) == want));
  }
}

TEST_CASE("stages: no group is added once something waits to be stepped") {
  each(2, [](zero::InProcessCommunicator& comm) {
    Rank<Stage3> rank(comm, make_model(false));
    rank.model.emplace_back("new", 10, zero::Attributes{.unit = 3}, false, 1);
    const auto refused = [&] {
      return ranks::attempt([&] { rank.optimizer.add_param_group({.lr = 1}); });
    };
    const auto after = [&](const auto& prepare, const char* text, const auto& repair) {
      if (comm.rank() == 1) prepare();
      require_text(refused(), Kind::usage, text);
      if (comm.rank() == 1) repair();
    };
    const auto nothing = [] {};
    after([&] { rank.write(0, 1); }, "between steps", nothing);
    after(
        [&] {
          rank.write(0, 1);
          rank.optimizer.mark_ready(1);
        },
        "marked or leased", nothing);
    after([&] { const auto scope = rank.optimizer.accumulate(Accumulation::local); },
          "between steps", nothing);
    rank.optimizer.acquire(0);
    after([&] { rank.optimizer.acquire(0); }, "unit 0 is still acquired",
          [&] { rank.optimizer.release(0); });
    rank.optimizer.release(0);
    {
      const auto scope = rank.optimizer.accumulate();
    }
    require_text(refused(), Kind::usage, "between steps");
    rank.optimizer.add_param_group({.lr = 1});
    rank.step(0);
  });
}

TEST_CASE("stages: after a refused step gradients have to be made anew") {
  const std::vector<std::string> want = reference(2, 1);
  each(2, [&](zero::InProcessCommunicator& comm) {
    Rank<Stage2> rank(comm, make_model(false));
    rank.backward(0);
    {
      std::optional<decltype(rank.optimizer.accumulate())> open;
      const Failure refused = ranks::attempt([&] {
        if (comm.rank() == 0) rank.optimizer.group(0).lr = -1;
        rank.optimizer.step();
      });
      require_text(refused, Kind::usage, "lr");
    }
    rank.optimizer.group(0).lr = 0.1;
    rank.optimizer.step();  // of nothing: absent everywhere, and not zeros
    require(rank.optimizer.steps(0) == 0, "not stepped");
    require(rank.values() == want[0], "nothing has changed");
    require(!rank.optimizer.gradient(0).adds(), "overwritten");
    rank.step(0);
    require(rank.values() == want[1], "values");
  });
}

TEST_CASE("stages: several optimizers over one communicator") {
  const std::vector<std::string> want = reference(3, 3);
  each(3, [&](zero::InProcessCommunicator& comm) {
    Rank<Stage3> one(comm, make_model(false));
    Rank<Stage2> two(comm, make_model(false));
    Rank<Stage3> three(comm, make_model(false), {.prefetch = 3});
    for (int step = 0; step < 3; ++step) {
      one.forward();
      two.forward();
      three.forward();
      three.backward(step);
      one.backward(step);
      one.optimizer.step();
      two.backward(step);
      three.optimizer.step();
      two.optimizer.step();
    }
    for (std::string values : {one.values(), two.values(), three.values()}) {
      require(values == want[3], "values");
    }
  });
}

TEST_CASE("stages: the framework lets go of gradients as they are taken") {
  const std::vector<std::string> want = reference(2, 3);
  each(2, [&](zero::InProcessCommunicator& comm) {
    Rank<Stage2> rank(comm, make_model(false));
    for (int step = 0; step < 3; ++step) {
      for (std::size_t i = rank.model.size(); i-- > 0;) {
        rank.draw(step, i, rank.model[i].make_gradient());
        if (i == 0) break;  // taken by the step
        rank.optimizer.mark_ready(i);
        require(rank.model[i].gradient().empty(), "freed when it is marked");
      }
      rank.optimizer.step();
    }
    for (const Node<float>& node : rank.model) require(node.released == 3, "released");
    require(rank.values() == want[3], "values");
  });
}

template <class Stage>
std::string train_unevenly(int world) {
  std::string values;
  each(world, [&](zero::InProcessCommunicator& comm) {
    Rank<Stage> rank(comm, make_model(Rank<Stage>::own_gradients));
    rank.optimizer.join([&] {
      for (int step = 0; step < 1 + comm.rank(); ++step) rank.step(step);
    });
    std::string now = rank.values();
    if (comm.rank() == 1) values = std::move(now);
  });
  return values;
}
TEST_CASE("stages: ranks with unlike numbers of batches join at stage 2, and not at 3") {
  CHECK((train_unevenly<Stage2>(3) == train_unevenly<Stage1>(3)));
  each(2, [](zero::InProcessCommunicator& comm) {
    Rank<Stage3> rank(comm, make_model(false));
    require_text(ranks::attempt([&] { rank.optimizer.join([] {}); }), Kind::usage,
                 "join: at stage 3");
  });
}

}  // namespace

// What is refused in words.

TEST_CASE("stages: a refused step says that its gradients are gone") {
  const std::vector<Failure> all = failures(2, [](const zero::InProcessCommunicator& comm) {
    Rank<Stage2> rank(comm, make_model(false));
    rank.backward(0);
    rank.optimizer.group(0).lr = comm.rank() == 0 ? -1 : 0.1;
    rank.optimizer.step();
  });
  for (const Failure& failure : all) {
    require_text(failure, Kind::usage, "this step's gradients are gone, so run backward again");
  }
}

TEST_CASE("stages: ranks that accumulate unlike numbers of backward passes are told") {
  const std::vector<Failure> all = failures(2, [](const zero::InProcessCommunicator& comm) {
    // With less room the rank that has more passes would wait for the other in its last one.
    Rank<Stage2> rank(comm, make_model(false), {.pool_bytes = 1 << 20});
    for (int pass = 0; pass < 2 - comm.rank(); ++pass) {
      const auto scope = rank.optimizer.accumulate();
      rank.backward(pass);
    }
    rank.backward(2);
    rank.optimizer.step();
  });
  for (const Failure& failure : all) {
    CHECK(failure.kind != Kind::none);
    CHECK_THAT(failure.text, ContainsSubstring("rank 1 has accumulated 1 sharded backward passes "
                                               "for this step, but rank 0 2"));
  }
}

TEST_CASE("stage 3: a rank that steps where another acquires is told") {
  const std::vector<Failure> all = failures(2, [](const zero::InProcessCommunicator& comm) {
    Rank<Stage3> rank(comm, make_model(false));
    if (comm.rank() == 0) rank.optimizer.acquire(1);
    rank.optimizer.step();
  });
  for (const Failure& failure : all) {
    CHECK(failure.kind != Kind::none);
    CHECK_THAT(failure.text, ContainsSubstring("rank 1 steps where rank 0 acquires unit 1"));
  }
}

TEST_CASE("parameters without values: estimated, and refused where nothing makes them") {
  std::vector<zero::ShapedParam<float>> store;
  store.emplace_back("w", std::vector<std::size_t>{100});
  each(2, [&](zero::InProcessCommunicator& comm) {
    std::vector<zero::ShapedParam<float>> mine = store;
    const auto of = zero::EstimateFor::member(comm);
    const auto estimate = zero::estimate(zero::Sgd{.momentum = 0.9}, mine, of, Stage3{});
    zero::Settings settings;
    settings.initial_value = [](std::string_view, std::size_t e) { return double(e); };
    zero::ZeroSharded optimizer{zero::Sgd{.momentum = 0.9}, mine, comm, Stage3{}, settings};
    require(optimizer.memory().total() == estimate.optimizer.total(), "estimate");
    optimizer.acquire(0);
    require(mine[0].values().size() == 100 && mine[0].values()[99] == 99, "initial values");
    optimizer.release(0);
  });
  const std::vector<Failure> all = failures(2, [&](zero::InProcessCommunicator comm) {
    std::vector<zero::ShapedParam<float>> mine = store;
    zero::ZeroSharded optimizer{zero::Sgd{}, mine, comm, Stage3{}};
  });
  for (const Failure& failure : all) {
    require_text(failure, Kind::usage, "has a shape of 100 elements but no values");
    require_text(failure, Kind::usage, "Settings::initial_value");
  }
}

TEST_CASE("plain pointers without a gradient are leased one at stage 2") {
  each(2, [](zero::InProcessCommunicator& comm) {
    std::vector<float> values(10, 1.0F);
    std::vector parameters{zero::ParamRef("w", {10}, values.data(), nullptr)};
    zero::ZeroSharded optimizer{zero::Sgd{.lr = 1}, parameters, comm, Stage2{}};
    {
      const auto lease = optimizer.gradient(0);
      for (float& x : lease.values()) x = 0.25F;
    }
    optimizer.mark_ready(0);
    optimizer.step();
    require(values[9] == 0.75F, "stepped");
  });
}
