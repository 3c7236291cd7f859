// SPDX-License-Identifier: Apache-2.0
// Groups of ranks: state spread over shard groups, replicas over groups. Every rank ends on the
// bits of one thread that sums in the documented order, and what fails on one rank ends all of
// them.
#include "zero/comm/hybrid.hpp"

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <latch>
#include <limits>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "catch.hpp"
#include "conformance/communicator_suite.hpp"
#include "ranks.hpp"
#include "zero/bfloat16.hpp"
#include "zero/comm/fault_injector.hpp"
#include "zero/comm/in_process.hpp"
#include "zero/estimate.hpp"
#include "zero/optim/adam.hpp"
#include "zero/zero_sharded.hpp"

namespace {

using Catch::Matchers::ContainsSubstring;
using ranks::Failure;
using ranks::Model;
using Kind = ranks::Failure::Kind;
using Hybrid = zero::HybridCommunicator<zero::InProcessCommunicator>;

static_assert(zero::Communicator<Hybrid, float> && zero::Communicator<Hybrid, zero::bfloat16>);
static_assert(zero::ReplicatedCommunicator<Hybrid>);
static_assert(!zero::SharedMemoryCommunicator<Hybrid>);
static_assert(!zero::ReplicatedCommunicator<zero::InProcessCommunicator>);
static_assert(zero::ReplicatedCommunicator<zero::FaultInjector<Hybrid>>);
static_assert(zero::Duplicable<Hybrid> && zero::Duplicable<zero::FaultInjector<Hybrid>>);

/// How ranks are grouped.
struct Grid {
  int shards, replicas;
  [[nodiscard]] int ranks() const { return shards * replicas; }
};

constexpr int steps = 3;
constexpr double learning_rate = 1e-2;
constexpr double max_norm = 2;  // below what the drawn gradients have
constexpr std::size_t bias = 2;

template <class T>
Model<T> make_model() {
  Model<T> model;
  model.emplace_back("weight", std::vector<std::size_t>{7, 11});
  model.emplace_back("empty", std::vector<std::size_t>{0});
  model.emplace_back("bias", std::vector<std::size_t>{5});
  model.emplace_back("matrix", std::vector<std::size_t>{9, 17});
  ranks::draw_values(model);
  return model;
}

/// In step 1 the last group alone has a gradient of the bias, in step 2 nobody has.
bool has_gradient(Grid grid, int rank, int step, std::size_t i) {
  if (i != bias || step == 0) return true;
  return step == 1 && rank / grid.shards == grid.replicas - 1;
}

/// Magnitudes so far apart that the order of a sum shows, in bfloat16 too, which sums are wider
/// than.
template <class T>
void draw_apart(Model<T>& model, int rank, int step) {
  ranks::draw_gradients(model, rank, step);
  for (auto& tensor : model) {
    std::size_t e = static_cast<std::size_t>(rank);
    for (T& x : tensor.own_gradient()) {
      const float scale = std::array{1.F, 0x1p-10F, 0x1p-20F}[e++ % 3];
      x = zero::element_traits<T>::store(zero::element_traits<T>::load(x) * scale);
    }
  }
}

/// A part of one slot, or all of it.
struct Slice {
  std::string name;  ///< parameter and slot
  std::size_t first_byte = 0;
  std::string bytes{};
};

/// What training leaves behind on one rank.
struct Trained {
  std::string values{};
  std::vector<Slice> state{};
  std::optional<double> norm{};
  std::int64_t bias_steps = 0;

  /// Whether the slots here contain a slice.
  [[nodiscard]] bool contains(const Slice& slice) const {
    for (const Slice& whole : state) {
      if (whole.name != slice.name) continue;
      return whole.bytes.compare(slice.first_byte, slice.bytes.size(), slice.bytes) == 0;
    }
    return false;
  }
};

template <class T, class... P>
Trained train(Hybrid& groups, bool clips, P... policies) {
  const Grid grid{groups.size(), groups.replicas().size()};
  const int rank = groups.world().rank();
  Model<T> model = make_model<T>();
  zero::Settings settings;
  settings.poison_padding = true;
  zero::ZeroSharded optimizer{zero::Adam{.lr = learning_rate}, model, groups, policies...,
                              settings};
  if (clips) optimizer.clip_grad_norm(max_norm);
  Trained end;
  for (int step = 0; step < steps; ++step) {
    draw_apart(model, rank, step);
    for (std::size_t i = model.size(); i-- > 0;) {
      if (has_gradient(grid, rank, step, i)) {
        optimizer.mark_ready(i);
      } else {
        optimizer.mark_absent(i);
      }
    }
    end.norm = optimizer.step().outcome().gradient_norm;
  }
  optimizer.acquire(0);
  end.values = ranks::values_of(model);
  optimizer.release(0);
  for (const auto& slice : optimizer.state()) {
    end.state.push_back({std::string(slice.parameter) + "." + std::string(slice.slot),
                         slice.elements.begin * sizeof(slice.values[0]),
                         ranks::bytes_of(slice.values)});
  }
  end.bias_steps = optimizer.steps(bias);
  return end;
}

/// The same on one thread, on whole tensors: gradients summed over each group in rank order, then
/// over groups; or over all ranks in rank order.
enum class Order { nested, flat };
template <class T>
Trained serial(Grid grid, bool clips, Order order) {
  using S = zero::detail::Storage<T, zero::MixedPrecision>;
  using A = typename S::arithmetic;
  const auto load = [](T x) { return zero::element_traits<T>::load(x); };
  Model<T> model = make_model<T>();
  const zero::Adam adam{.lr = learning_rate};
  struct Kept {
    std::vector<A> master, sums;
    std::vector<typename S::slot> slots[zero::detail::slot_count<zero::Adam>];
    std::int64_t t = 0;
  };
  std::vector<Kept> kept(model.size());
  for (std::size_t i = 0; i < model.size(); ++i) {
    for (const T x : model[i].values()) kept[i].master.push_back(load(x));
    for (auto& slot : kept[i].slots) slot.resize(kept[i].master.size());
  }
  Trained end;
  for (int step = 0; step < steps; ++step) {
    std::vector<Model<T>> ranks_gradients;
    for (int r = 0; r < grid.ranks(); ++r) {
      draw_apart(ranks_gradients.emplace_back(make_model<T>()), r, step);
    }
    zero::detail::SquareSum squares;
    std::vector<bool> stepped(model.size());
    for (std::size_t i = 0; i < model.size(); ++i) {
      const auto of_rank = [&](int r, std::size_t e) {
        if (!has_gradient(grid, r, step, i)) return A(0);
        return load(ranks_gradients[static_cast<std::size_t>(r)][i].gradient()[e]);
      };
      for (int r = 0; r < grid.ranks(); ++r) {
        if (has_gradient(grid, r, step, i)) stepped[i] = true;
      }
      kept[i].sums.resize(kept[i].master.size());
      const int group = order == Order::nested ? grid.shards : grid.ranks();
      for (std::size_t e = 0; e < kept[i].sums.size(); ++e) {
        A total = 0;
        for (int first = 0; first < grid.ranks(); first += group) {
          A sum = of_rank(first, e);
          for (int r = first + 1; r < first + group; ++r) sum += of_rank(r, e);
          total = first == 0 ? sum : total + sum;
        }
        kept[i].sums[e] = total;
      }
      if (stepped[i]) squares.add(std::span<const A>(kept[i].sums));
    }
    double scale = 1.0 / grid.ranks();
    if (clips) {
      end.norm = std::sqrt(squares.value()) * scale;
      scale *= std::min(1.0, max_norm / (*end.norm + 1e-6));
    }
    for (std::size_t i = 0; i < model.size(); ++i) {
      Kept& of = kept[i];
      if (!stepped[i] || of.master.empty()) continue;
      ++of.t;
      for (A& x : of.sums) x *= static_cast<A>(scale);
      zero::detail::UpdateArrays<S, zero::detail::slot_count<zero::Adam>> arrays{
          model[i].values().data(), nullptr, {}};
      if constexpr (S::has_master) arrays.master = of.master.data();
      for (std::size_t s = 0; s < zero::used_slots(adam); ++s) {
        arrays.state[s] = of.slots[s].data();
      }
      zero::detail::update_elements(adam, adam.template scalars<A>(of.t), arrays,
                                    static_cast<const A*>(of.sums.data()), of.sums.size());
    }
  }
  end.values = ranks::values_of(model);
  for (std::size_t i = 0; i < model.size(); ++i) {
    for (std::size_t s = 0; s < zero::used_slots(adam); ++s) {
      end.state.push_back({model[i].name() + "." + std::string(zero::Adam::slots[s]), 0,
                           ranks::bytes_of(std::span(kept[i].slots[s]))});
    }
  }
  end.bias_steps = kept[bias].t;
  return end;
}

/// What each rank of a grid ends on.
template <class T, class... P>
std::vector<Trained> train_grid(Grid grid, bool clips, P... policies) {
  std::vector<Trained> ends(static_cast<std::size_t>(grid.ranks()));
  ranks::rethrow_any(ranks::run(grid.ranks(), [&](zero::InProcessCommunicator& comm) {
    Hybrid groups(comm, grid.shards);
    ends[static_cast<std::size_t>(comm.rank())] = train<T>(groups, clips, policies...);
  }));
  return ends;
}

constexpr Grid grids[] = {{2, 2}, {1, 4}, {4, 1}, {3, 2}};

/// Every rank against one thread.
template <class T, class... P>
void check_bits(P... policies) {
  for (const Grid grid : grids) {
    for (const bool clips : {false, true}) {
      INFO(grid.shards << " shards x " << grid.replicas << " replicas, clips " << clips);
      const Trained wanted = serial<T>(grid, clips, Order::nested);
      CHECK(wanted.bias_steps == 2);
      CHECK((!clips || *wanted.norm > max_norm));
      const Trained flat = serial<T>(grid, clips, Order::flat);
      const bool same = wanted.values == flat.values &&
                        std::all_of(wanted.state.begin(), wanted.state.end(),
                                    [&](const Slice& slice) { return flat.contains(slice); });
      CHECK(same == (grid.shards == 1 || grid.replicas == 1));
      const std::vector<Trained> ends = train_grid<T>(grid, clips, policies...);
      for (std::size_t r = 0; r < ends.size(); ++r) {
        INFO("rank " << r);
        CHECK((ends[r].values == wanted.values));  // no bytes in a message
        CHECK(ends[r].norm == wanted.norm);
        CHECK(ends[r].bias_steps == wanted.bias_steps);
        CHECK(!ends[r].state.empty());
        for (const Slice& slice : ends[r].state) {
          INFO(slice.name << " from byte " << slice.first_byte);
          CHECK(wanted.contains(slice));
        }
      }
    }
  }
}

/// What each rank of 2 x 2 threw.
template <class F>
std::vector<Failure> failures(F&& body, int ranks = 4) {
  std::vector<Failure> all;
  for (const auto& thrown : ranks::run(ranks, body)) all.push_back(ranks::failure_of(thrown));
  return all;
}

void check_all_refuse(const std::vector<Failure>& failures, const std::string& text) {
  for (std::size_t r = 0; r < failures.size(); ++r) {
    INFO("rank " << r << ": " << failures[r].text);
    CHECK(failures[r].kind == Kind::usage);
    CHECK_THAT(failures[r].text, ContainsSubstring(text));
  }
}

/// All but one rank fail because that one does, and not because they tired of waiting.
void check_peers_hear(const std::vector<Failure>& failures, std::size_t culprit) {
  for (std::size_t r = 0; r < failures.size(); ++r) {
    if (r == culprit) continue;
    INFO("rank " << r << ": " << failures[r].text);
    CHECK(failures[r].kind == Kind::communicator);
    CHECK(failures[r].cause != zero::CommunicatorFailure::timeout);
  }
}

}  // namespace

TEST_CASE("groups: the bits of the nested order, values in place", "[groups]") {
  check_bits<float>(zero::NoView{64}, zero::Stage1{});
}

TEST_CASE("groups: the bits of the nested order, values moved, bfloat16", "[groups]") {
  check_bits<zero::bfloat16>(zero::ParamView{64}, zero::Stage1{});
}

TEST_CASE("groups: the bits of the nested order, nothing sharded, bfloat16", "[groups]") {
  check_bits<zero::bfloat16>(zero::NoView{64}, zero::Replicated{});
}

TEST_CASE("groups: the bits of the nested order, gradients sharded", "[groups]") {
  check_bits<float>(zero::NoView{64}, zero::Stage2{});
}

TEST_CASE("groups: the bits of the nested order, values sharded", "[groups]") {
  check_bits<float>(zero::ParamView{64}, zero::Stage3{});
}

TEST_CASE("groups: gradients that the caller reduced, and a group added", "[groups]") {
  std::vector<std::string> of_one_group;
  for (const Grid grid : {Grid{4, 1}, Grid{2, 2}, Grid{1, 4}}) {
    INFO(grid.shards << " shards x " << grid.replicas << " replicas");
    std::vector<std::string> values(4);
    ranks::rethrow_any(ranks::run(4, [&](zero::InProcessCommunicator& comm) {
      Hybrid groups(comm, grid.shards);
      Model<float> model = make_model<float>();
      zero::Settings settings{.gradients = zero::Gradients::reduced};
      zero::ZeroSharded optimizer{zero::Adam{},     model,          groups,
                                  zero::NoView{64}, zero::Stage1{}, settings};
      optimizer.clip_grad_norm(max_norm);
      draw_apart(model, 0, 0);
      optimizer.step();
      model.emplace_back("added", std::vector<std::size_t>{9}, zero::Attributes{}, 1);
      optimizer.add_param_group(zero::Adam{.lr = 0.5});
      draw_apart(model, 0, 1);
      optimizer.step();
      values[static_cast<std::size_t>(comm.rank())] = ranks::values_of(model);
    }));
    if (of_one_group.empty()) of_one_group = values;
    CHECK((values == of_one_group));
    CHECK((values == std::vector<std::string>(4, values[0])));
  }
}

TEST_CASE("groups: a rank that has run out of input serves both groups", "[groups]") {
  // Rank 3 has one batch less: as if its gradients were absent.
  std::vector<std::string> joined(4), absent(4);
  ranks::rethrow_any(ranks::run(4, [&](zero::InProcessCommunicator& comm) {
    Hybrid groups(comm, 2);
    const auto train_on = [&](bool joins) {
      Model<float> model = make_model<float>();
      zero::ZeroSharded optimizer{zero::Adam{}, model, groups, zero::NoView{64}, zero::Stage1{}};
      const auto steps_of = [&](int batches) {
        for (int step = 0; step < batches; ++step) {
          draw_apart(model, comm.rank(), step);
          for (std::size_t i = 0; !joins && step == 2 && comm.rank() == 3 && i < model.size();
               ++i) {
            optimizer.mark_absent(i);
          }
          optimizer.step();
        }
      };
      if (joins) {
        optimizer.join([&] { steps_of(comm.rank() == 3 ? 2 : 3); });
      } else {
        steps_of(3);
      }
      return ranks::values_of(model);
    };
    joined[static_cast<std::size_t>(comm.rank())] = train_on(true);
    absent[static_cast<std::size_t>(comm.rank())] = train_on(false);
  }));
  CHECK((joined == absent));
  CHECK((joined == std::vector<std::string>(4, joined[0])));
}

TEST_CASE("groups: a rank keeps 1 / shard_size of the state, as estimated", "[groups]") {
  for (const Grid grid : grids) {
    INFO(grid.shards << " shards x " << grid.replicas << " replicas");
    std::vector<zero::MemoryReport> memory(static_cast<std::size_t>(grid.ranks()));
    std::vector<zero::MemoryReport> estimated = memory;
    ranks::rethrow_any(ranks::run(grid.ranks(), [&](zero::InProcessCommunicator& comm) {
      Hybrid groups(comm, grid.shards);
      Model<> model;
      model.emplace_back("weight", std::vector<std::size_t>{96});
      zero::ZeroSharded optimizer{zero::Adam{}, model, groups, zero::NoView{1024}, zero::Stage1{}};
      const auto rank = static_cast<std::size_t>(comm.rank());
      memory[rank] = optimizer.memory();
      estimated[rank] = zero::estimate(zero::Adam{}, model, zero::EstimateFor::member(groups),
                                       zero::NoView{1024}, zero::Stage1{})
                            .optimizer;
    }));
    for (std::size_t r = 0; r < memory.size(); ++r) {
      CHECK(memory[r].state == 2 * sizeof(float) * 96 / static_cast<std::size_t>(grid.shards));
      CHECK(memory[r].state == estimated[r].state);
      CHECK(memory[r].gradients == estimated[r].gradients);
      CHECK(memory[r].staging == estimated[r].staging);
    }
  }
}

TEST_CASE("groups: places in a grid, cut by size or made by hand", "[groups]") {
  struct Seen {
    int shard, shards, replica, replicas, first_of_group;
    bool operator==(const Seen&) const = default;
  };
  std::vector<std::vector<Seen>> seen(6);
  ranks::rethrow_any(ranks::run(6, [&](zero::InProcessCommunicator& comm) {
    const int rank = comm.rank();
    const auto look = [&](Hybrid& groups) {
      float first = static_cast<float>(rank);
      groups.broadcast(std::span<float>(&first, 1), 0).wait();
      seen[static_cast<std::size_t>(rank)].push_back(
          {groups.rank(), groups.size(), groups.replicas().rank(), groups.replicas().size(),
           static_cast<int>(first)});
    };
    Hybrid cut(comm, 3);
    look(cut);
    Hybrid every_second(comm, comm.split(rank % 2, rank), comm.split(rank / 2, rank));
    look(every_second);
  }));
  for (int r = 0; r < 6; ++r) {
    INFO("rank " << r);
    CHECK(seen[static_cast<std::size_t>(r)] ==
          std::vector<Seen>{{r % 3, 3, r / 3, 2, r / 3 * 3}, {r / 2, 3, r % 2, 2, r % 2}});
  }
}

/// What a rank's sums over its group, its replicas and the world tell.
std::vector<int> sums_of_ranks(Hybrid& groups, int rank) {
  float sums[] = {1, 1, 1};
  for (float& sum : sums) sum = static_cast<float>(1 << rank);
  auto a = groups.all_reduce(std::span<float>(&sums[0], 1));
  auto b = groups.replicas().all_reduce(std::span<float>(&sums[1], 1));
  auto c = groups.world().all_reduce(std::span<float>(&sums[2], 1));
  a.wait(), b.wait(), c.wait();
  return {static_cast<int>(sums[0]), static_cast<int>(sums[1]), static_cast<int>(sums[2])};
}

TEST_CASE("groups: a duplicate is apart in all its parts", "[groups]") {
  std::vector<std::vector<int>> original(6), duplicate(6);
  std::vector<std::array<Failure, 3>> heard(6);
  ranks::rethrow_any(ranks::run(6, [&](zero::InProcessCommunicator& comm) {
    const int rank = comm.rank();
    const auto r = static_cast<std::size_t>(rank);
    Hybrid groups(comm, 3);
    Hybrid kept = groups.duplicate();
    Hybrid first = groups.duplicate();
    Hybrid moved = std::move(first);
    for (int round = 0; round < 20; ++round) {
      zero_test::on_both(groups, kept, [&](Hybrid& each) {
        (&each == &groups ? original : duplicate)[r] = sums_of_ranks(each, rank);
      });
      if (original[r] != duplicate[r]) throw std::runtime_error("round " + std::to_string(round));
    }
    if (moved.rank() != groups.rank() || moved.replicas().rank() != groups.replicas().rank() ||
        moved.world().rank() != rank || moved.world().size() != 6) {
      throw std::runtime_error("a duplicate's places");
    }
    if (rank == 4) moved.abort("of the duplicate");
    heard[r] = {ranks::attempt([&] { moved.barrier().wait(); }),
                ranks::attempt([&] { moved.replicas().barrier().wait(); }),
                ranks::attempt([&] { moved.world().barrier().wait(); })};
    if (sums_of_ranks(groups, rank) != original[r] || sums_of_ranks(kept, rank) != original[r]) {
      throw std::runtime_error("after the abort of a duplicate");
    }
  }));
  for (int rank = 0; rank < 6; ++rank) {
    INFO("rank " << rank);
    const auto r = static_cast<std::size_t>(rank);
    CHECK(duplicate[r] == std::vector<int>{7 << rank / 3 * 3, 9 << rank % 3, 63});
    CHECK_THAT(heard[r][2].text, ContainsSubstring("of the duplicate"));
    if (rank / 3 == 1) CHECK_THAT(heard[r][0].text, ContainsSubstring("of the duplicate"));
    if (rank % 3 == 1) CHECK_THAT(heard[r][1].text, ContainsSubstring("of the duplicate"));
  }
}

TEST_CASE("groups: what is no grid is refused on all ranks", "[groups]") {
  check_all_refuse(failures([](auto& comm) { Hybrid(comm, 2); }, 3), "3 ranks can't be cut");
  check_all_refuse(failures([](auto& comm) { Hybrid(comm, 0); }, 2), "groups of 0");
  check_all_refuse(failures([](auto& comm) { Hybrid(comm, comm.rank() == 3 ? 4 : 2); }),
                   "rank 3 asks for shard groups of 4");
  check_all_refuse(failures([](auto& comm) {
                     const int pair = comm.rank() / 2;
                     Hybrid(comm, comm.split(pair, 0), comm.split(pair, 0));
                   }),
                   "no row and column");
  check_all_refuse(failures([](auto& comm) {  // ranks 2 and 3 have changed places in their group
                     const int rank = comm.rank();
                     Hybrid(comm, comm.split(rank / 2, rank < 2 ? rank : -rank),
                            comm.split(rank % 2, rank));
                   }),
                   "no row and column");
}

TEST_CASE("groups: a rank that differs or refuses is named by its place in the world", "[groups]") {
  check_all_refuse(failures([](zero::InProcessCommunicator& comm) {
                     Hybrid groups(comm, 2);
                     Model<> model = make_model<float>();
                     if (comm.rank() == 3) model[bias].values()[4] += 1;
                     zero::ZeroSharded{zero::Adam{}, model, groups, zero::NoView{64},
                                       zero::Stage1{}};
                   }),
                   "rank 3 differs from rank 0: parameter 2 ('bias') has other initial values");
  std::vector<bool> unchanged(4);
  check_all_refuse(failures([&](zero::InProcessCommunicator& comm) {
                     Hybrid groups(comm, 2);
                     Model<> model = make_model<float>();
                     zero::ZeroSharded optimizer{zero::Adam{}, model, groups, zero::NoView{64},
                                                 zero::Stage1{}};
                     ranks::draw_gradients(model, comm.rank(), 0);
                     const std::string before = ranks::snapshot(model, optimizer);
                     if (comm.rank() == 3) optimizer.group(0).lr = -1;
                     const Failure refused = ranks::attempt([&] { optimizer.step(); });
                     const bool same = ranks::snapshot(model, optimizer) == before;
                     optimizer.group(0).lr = learning_rate;
                     optimizer.step();  // all go on
                     if (same && optimizer.steps() == 1) throw zero::UsageError(refused.text);
                   }),
                   "rank 3 refused the step");
}

TEST_CASE("groups: what one rank throws reaches all ranks of all groups", "[groups]") {
  for (std::size_t culprit = 0; culprit < 4; ++culprit) {
    INFO("rank " << culprit << " throws");
    const auto thrown = failures([&](zero::InProcessCommunicator& comm) {
      Hybrid groups(comm, 2);
      Model<> model = make_model<float>();
      zero::ZeroSharded optimizer{zero::Adam{}, model, groups, zero::NoView{64}, zero::Stage1{}};
      ranks::draw_gradients(model, comm.rank(), 0);
      for (std::size_t i = model.size(); i-- > 0;) {
        if (static_cast<std::size_t>(comm.rank()) == culprit && i == bias) {
          throw std::runtime_error("backward failed");
        }
        optimizer.mark_ready(i);
      }
      optimizer.step();
    });
    CHECK(thrown[culprit].text == "backward failed");
    check_peers_hear(thrown, culprit);
  }
}

/// What each rank of 2 x 2 threw, where nobody leaves before all have ended: what they hear is no
/// rank's leaving. Rank 3 fails at its operation `failing`.
template <class F>
std::vector<Failure> failures_together(std::uint64_t failing, F&& body) {
  std::vector<Failure> heard(4);
  std::latch ended(4);
  const auto rank_main = [&](zero::InProcessCommunicator& comm) {
    zero::FaultPlan plan;
    if (comm.rank() == 3) plan.faults.push_back({.rank = -1, .operation = failing});
    zero::FaultInjector groups(Hybrid(comm, 2), plan);
    heard[static_cast<std::size_t>(comm.rank())] = ranks::attempt([&] {
      Model<> model = make_model<float>();
      zero::ZeroSharded optimizer{zero::Adam{}, model, groups, zero::NoView{256}, zero::Stage1{}};
      ranks::draw_gradients(model, comm.rank(), 0);
      body(comm, groups, optimizer);
    });
    ended.arrive_and_wait();
  };
  ranks::rethrow_any(ranks::run(4, rank_main, {.timeout = std::chrono::seconds(10)}));
  return heard;
}
constexpr auto never = std::numeric_limits<std::uint64_t>::max();

TEST_CASE("groups: abort reaches all ranks of all groups", "[groups]") {
  const auto heard = failures_together(never, [](auto& comm, auto& groups, auto& optimizer) {
    if (comm.rank() == 1) {
      groups.abort("rank 1 has had enough");
    } else {
      optimizer.step();
    }
  });
  check_peers_hear(heard, 1);
  CHECK_THAT(heard[2].text, ContainsSubstring("rank 1 has had enough"));
}

TEST_CASE("groups: a failure at any operation reaches all ranks of all groups", "[groups]") {
  std::uint64_t failing = 0;
  for (;; ++failing) {
    INFO("operation " << failing);
    const auto heard = failures_together(failing, [](auto& comm, auto&, auto& optimizer) {
      optimizer.clip_grad_norm(1.0);
      optimizer.step();
      comm.barrier().wait();  // by which a rank that was done with the step hears
    });
    if (heard[3].kind == Kind::none) break;
    CHECK(heard[3].cause == zero::CommunicatorFailure::injected);
    check_peers_hear(heard, 3);
  }
  CHECK(failing > 6);
}

TEST_CASE("a part of a world trains alone, by its own ranks", "[groups]") {
  const auto train_alone = [](zero::InProcessCommunicator& comm) {
    Model<> model = make_model<float>();
    zero::ZeroSharded optimizer{zero::Adam{.lr = learning_rate}, model, comm, zero::NoView{64},
                                zero::Stage1{}};
    for (int step = 0; step < steps; ++step) {
      ranks::draw_gradients(model, comm.rank(), step);
      optimizer.step();
    }
    return ranks::values_of(model);
  };
  std::vector<std::string> wanted(2), got(4);
  std::vector<float> sent(4);
  zero::run_ranks(2, [&](zero::InProcessCommunicator& comm) {
    wanted[static_cast<std::size_t>(comm.rank())] = train_alone(comm);
  });
  zero::run_ranks(4, [&](zero::InProcessCommunicator& comm) {
    const auto rank = static_cast<std::size_t>(comm.rank());
    zero::InProcessCommunicator part = comm.split(comm.rank() % 2, comm.rank());
    if (rank % 2 == 0) return;  // these leave
    sent[rank] = static_cast<float>(10 * rank);
    part.broadcast(std::span<float>(&sent[rank], 1), 1).wait();
    got[rank] = train_alone(part);
  });
  CHECK(sent == std::vector<float>{0, 30, 0, 30});
  CHECK((wanted[0] == wanted[1]));
  CHECK((got == std::vector<std::string>{"", wanted[0], "", wanted[0]}));
}
