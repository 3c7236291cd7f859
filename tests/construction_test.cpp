// SPDX-License-Identifier: Apache-2.0
// How a ZeroSharded is constructed: what is deduced, what has a default, where arguments end up.
#include <zero/zero.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <memory>
#include <memory_resource>
#include <optional>
#include <span>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "archetypes.hpp"
#include "catch.hpp"

namespace {

using archetypes::BareParameter;
using archetypes::BareRebindable;
using archetypes::BareStore;
using archetypes::FirstRankOnly;
using archetypes::SmallBuckets;
using archetypes::SoloCommunicator;
using zero::Adam;
using zero::ContiguousPartition;
using zero::Groups;
using zero::InProcessCommunicator;
using zero::NativePrecision;
using zero::NoObserver;
using zero::NoView;
using zero::ParamView;
using zero::Replicated;
using zero::Settings;
using zero::Sgd;
using zero::Stage1;
using zero::ZeroSharded;

using Refs = std::vector<zero::ParamRef<float>>;
using Movable = BareStore<BareRebindable>;

struct OtherPrecision : NativePrecision {};
struct Watcher : NoObserver {
  int id = 0;
};

/// The type that construction deduces; `X&` stands for an lvalue, `X` for an rvalue.
template <class... Arguments>
using Deduced = decltype(ZeroSharded{std::declval<Arguments>()...});

template <class Type, class... Arguments>
constexpr bool deduces = std::is_same_v<Deduced<Arguments...>, Type>;

// ---- Defaults

static_assert(deduces<ZeroSharded<Adam, Refs&, InProcessCommunicator&>,  //
                      Adam, Refs&, InProcessCommunicator&>);
static_assert(std::is_same_v<ZeroSharded<Adam>,
                             ZeroSharded<Adam, Refs, InProcessCommunicator, ContiguousPartition,
                                         NoView, Stage1, zero::MixedPrecision, NoObserver>>);
static_assert(std::is_same_v<ZeroSharded<Adam, Movable&>,
                             ZeroSharded<Adam, Movable&, InProcessCommunicator, ContiguousPartition,
                                         ParamView, Stage1>>);

// The default view moves what can be moved.
template <class Store, class... Policies>
using ViewOf = typename Deduced<Adam, Store, SoloCommunicator, Policies...>::bucket_view_type;
static_assert(std::is_same_v<ViewOf<Refs&>, NoView>);
static_assert(std::is_same_v<ViewOf<zero::FlatParams<float>&>, NoView>);
static_assert(std::is_same_v<ViewOf<BareStore<BareParameter>&>, NoView>);
static_assert(std::is_same_v<ViewOf<Movable&>, ParamView>);
static_assert(std::is_same_v<ViewOf<std::vector<BareRebindable>>, ParamView>);
static_assert(std::is_same_v<ViewOf<const std::vector<BareRebindable>&>, NoView>,
              "a const store's parameters can't be moved");
static_assert(std::is_same_v<ViewOf<Movable&, NoView>, NoView>);

// ---- Lvalues are used where they are, rvalues kept

static_assert(deduces<ZeroSharded<Adam, Refs, InProcessCommunicator>,  //
                      Adam, Refs, InProcessCommunicator>);
static_assert(deduces<ZeroSharded<Adam, Refs&, InProcessCommunicator>,  //
                      Adam&, Refs&, InProcessCommunicator>);
static_assert(deduces<ZeroSharded<Adam, Refs, InProcessCommunicator&>,  //
                      const Adam&, Refs, InProcessCommunicator&>);
static_assert(deduces<ZeroSharded<Adam, const Refs&, SoloCommunicator&>,  //
                      Adam, const Refs&, SoloCommunicator&>);

// ---- Groups name the optimizer

static_assert(deduces<ZeroSharded<Adam, Refs&, InProcessCommunicator&>,  //
                      Groups<Adam>, Refs&, InProcessCommunicator&>);
static_assert(deduces<ZeroSharded<Sgd, Refs&, SoloCommunicator, FirstRankOnly>, const Groups<Sgd>&,
                      Refs&, SoloCommunicator, FirstRankOnly, Settings>);
static_assert(std::is_same_v<decltype(Groups{Adam{}, Adam{}}), Groups<Adam>>);
static_assert(std::is_same_v<decltype(Groups{std::vector<Sgd>{}}), Groups<Sgd>>);

// ---- Aliases

using AllNamed = ZeroSharded<Sgd, Refs&, SoloCommunicator, FirstRankOnly, SmallBuckets, Replicated,
                             OtherPrecision, Watcher>;
static_assert(std::is_same_v<AllNamed::optimizer_type, Sgd>);
static_assert(std::is_same_v<AllNamed::store_argument, Refs&>);
static_assert(std::is_same_v<AllNamed::communicator_argument, SoloCommunicator>);
static_assert(std::is_same_v<AllNamed::partition_type, FirstRankOnly>);
static_assert(std::is_same_v<AllNamed::bucket_view_type, SmallBuckets>);
static_assert(std::is_same_v<AllNamed::stage_type, Replicated>);
static_assert(std::is_same_v<AllNamed::precision_type, OtherPrecision>);
static_assert(std::is_same_v<AllNamed::observer_type, Watcher>);

// ---- Policies in any order: all 720 of five policies and the settings

using Policies =
    std::tuple<FirstRankOnly, SmallBuckets, Replicated, OtherPrecision, Watcher, Settings>;

/// The n-th order of k things.
template <std::size_t k>
constexpr std::array<std::size_t, k> order(std::size_t n) {
  std::array<std::size_t, k> all{};
  for (std::size_t i = 0; i < k; ++i) all[i] = i;
  for (std::size_t i = 0; i + 1 < k; ++i) {
    std::swap(all[i], all[i + n % (k - i)]);
    n /= k - i;
  }
  return all;
}

template <std::size_t n, std::size_t... I>
constexpr bool deduces_in_order(std::index_sequence<I...>) {
  return deduces<AllNamed, Sgd, Refs&, SoloCommunicator,
                 std::tuple_element_t<order<sizeof...(I)>(n)[I], Policies>...>;
}
template <std::size_t... N>
constexpr bool deduces_in_orders(std::index_sequence<N...>) {
  constexpr std::make_index_sequence<std::tuple_size_v<Policies>> each;
  for (const bool right : {deduces_in_order<N>(each)...}) {  // too many for a fold
    if (!right) return false;
  }
  return true;
}
static_assert(deduces_in_orders(std::make_index_sequence<720>{}));

// Some of them, and each alone.
static_assert(deduces<ZeroSharded<Sgd, Refs&, SoloCommunicator, ContiguousPartition, NoView,
                                  Replicated, zero::MixedPrecision, Watcher>,
                      Sgd, Refs&, SoloCommunicator, Watcher, Replicated>);
static_assert(std::is_same_v<Deduced<Sgd, Refs&, SoloCommunicator, FirstRankOnly>::partition_type,
                             FirstRankOnly>);
static_assert(std::is_same_v<Deduced<Sgd, Movable&, SoloCommunicator, ParamView&>::bucket_view_type,
                             ParamView>);
static_assert(
    std::is_same_v<Deduced<Sgd, Refs&, SoloCommunicator, const Watcher&>::observer_type, Watcher>);
static_assert(deduces<ZeroSharded<Sgd, Refs&, SoloCommunicator>,  //
                      Sgd, Refs&, SoloCommunicator, Settings>);

static_assert(!std::is_copy_constructible_v<ZeroSharded<Adam>>);
static_assert(std::is_nothrow_move_constructible_v<ZeroSharded<Adam>>);
static_assert(std::is_nothrow_move_assignable_v<ZeroSharded<Adam>>);

/// Twelve ones with gradients of one.
struct Model {
  std::vector<float> values = std::vector<float>(12, 1.0F);
  std::vector<float> gradient = std::vector<float>(12, 1.0F);
  Refs store{zero::ParamRef("w", values, gradient)};
};

/// One rank of in-process communicators.
InProcessCommunicator alone() { return zero::InProcessWorld(1).communicator(0); }

/// Counts what it hands out.
class CountingResource : public std::pmr::memory_resource {
 public:
  std::size_t allocations = 0;

 private:
  void* do_allocate(std::size_t bytes, std::size_t alignment) override {
    ++allocations;
    return std::pmr::new_delete_resource()->allocate(bytes, alignment);
  }
  void do_deallocate(void* memory, std::size_t bytes, std::size_t alignment) override {
    std::pmr::new_delete_resource()->deallocate(memory, bytes, alignment);
  }
  bool do_is_equal(const std::pmr::memory_resource& other) const noexcept override {
    return this == &other;
  }
};

/// Owns everything before `begin` on rank 0, the rest on rank 1.
struct Until {
  std::size_t begin = 0;
  static constexpr bool cuts_tensors = true;
  std::size_t cut(std::size_t n, std::size_t, int, int rank) const {
    return rank == 0 ? 0 : rank == 1 ? std::min(begin, n) : n;
  }
};

}  // namespace

TEST_CASE("the values of policies arrive, whatever their order") {
  const auto check = [](auto... policies) {
    Model model;
    ZeroSharded optimizer{Sgd{.lr = 1, .momentum = 0.5}, model.store, alone(),
                          std::move(policies)...};
    optimizer.step();
    CHECK(model.values[11] == 1 - 0.25F);  // gradient_scale
    CHECK(optimizer.layout().buckets(0) == 3);
    CHECK(optimizer.observer().id == 7);
  };
  CountingResource memory;
  const Settings settings{.gradient_scale = 0.25, .memory = &memory};
  Watcher watcher;
  watcher.id = 7;
  const SmallBuckets view{16};
  check(settings, watcher, view);
  check(settings, view, watcher);
  check(view, settings, watcher);
  check(view, watcher, settings);
  check(watcher, settings, view);
  check(watcher, view, settings, Stage1{}, ContiguousPartition{}, NativePrecision{});
  CHECK(memory.allocations == 6);
}

TEST_CASE("a partition's value arrives") {
  Model model[2];
  std::array<zero::Interval, 2> slices{};
  zero::run_ranks(2, [&](InProcessCommunicator& comm) {
    const auto r = static_cast<std::size_t>(comm.rank());
    ZeroSharded optimizer{Sgd{}, model[r].store, comm, Settings{}, Until{8}};
    slices[r] = optimizer.layout().slice(0, 0, comm.rank());
  });
  CHECK(slices[0] == zero::Interval{0, 8});
  CHECK(slices[1].begin == 8);
}

TEST_CASE("a store and a communicator are used where they are, or kept") {
  // Rebinding shows which store is used.
  std::vector<archetypes::Tensor<float>> tensors(1, {"w", {3}, {1, 2, 3}, {1, 1, 1}});
  SECTION("an lvalue store is the caller's") {
    BareStore<BareRebindable> store(tensors);
    const float* before = store.begin()[0].values().data();
    ZeroSharded optimizer{Sgd{}, store, SoloCommunicator(0)};
    CHECK(store.begin()[0].values().data() != before);
  }
  SECTION("an rvalue store lives as long as the optimizer") {
    std::vector<BareRebindable> store;
    store.emplace_back(tensors[0]);
    std::optional optimizer{ZeroSharded{Sgd{.lr = 1}, std::move(store), SoloCommunicator(0)}};
    CHECK(store.empty());
    CHECK(optimizer->step().outcome().applied);
    CHECK(optimizer->memory().values >= 3 * sizeof(float));
  }
  SECTION("a communicator") {
    Model model;
    zero::InProcessWorld world(1);
    {
      ZeroSharded optimizer{Sgd{}, model.store, world.communicator(0)};
      CHECK_THROWS_AS(world.communicator(0), zero::UsageError);  // the rank is still taken
      optimizer.step();
    }
    InProcessCommunicator comm = world.communicator(0);
    ZeroSharded optimizer{Sgd{}, model.store, comm};
    CHECK(optimizer.steps() == 0);
  }
}

TEST_CASE("ZeroSharded<Adam> is a usable type") {
  struct Trainer {  // as a member, made from lvalues
    ZeroSharded<Adam> optimizer;
    Trainer(Refs& store, InProcessCommunicator& comm) : optimizer(Adam{.lr = 0.5}, store, comm) {}
  };
  Model model;
  InProcessCommunicator comm = alone();
  Trainer trainer(model.store, comm);
  model.store.clear();  // it has its own
  trainer.optimizer.step();
  CHECK(model.values[0] < 0.6F);

  Model other;
  ZeroSharded<Adam> braces{{.lr = 0.5}, other.store, comm, Settings{}};
  braces.step();
  CHECK(other.values == model.values);

  Model third;
  const Adam rule{.lr = 0.5};
  ZeroSharded<Adam, Refs&, InProcessCommunicator&, ContiguousPartition, SmallBuckets, Replicated>
      named(rule, third.store, comm, Replicated{}, SmallBuckets{16});
  named.step();
  CHECK(third.values == model.values);
  CHECK(named.layout().buckets(0) == 3);
}

TEST_CASE("an optimizer may move") {
  Model model;
  ZeroSharded first{Adam{}, model.store, alone()};
  first.step();
  ZeroSharded second{std::move(first)};
  static_assert(std::is_same_v<decltype(first), decltype(second)>);
  second.step();
  std::vector<decltype(second)> several;
  several.push_back(std::move(second));
  several[0].step();
  CHECK(several[0].steps() == 3);
}

TEST_CASE("a const store's parameters stay where they are") {
  std::vector<archetypes::Tensor<float>> tensors(1, {"w", {3}, {1, 2, 3}, {1, 1, 1}});
  std::vector<BareRebindable> parameters;
  parameters.emplace_back(tensors[0]);
  const auto& store = parameters;
  ZeroSharded optimizer{Sgd{.lr = 1}, store, SoloCommunicator(0)};
  optimizer.step();
  CHECK(tensors[0].values == std::vector<float>{0, 1, 2});
}

TEST_CASE("groups") {
  std::vector<float> a(3, 1.0F), b(3, 1.0F), gradient(3, 1.0F);
  Refs store{zero::ParamRef("a", a, gradient), zero::ParamRef("b", b, gradient, {}, 1)};
  SECTION("as arguments") {
    ZeroSharded optimizer{Groups{Sgd{.lr = 0.5}, Sgd{.lr = 0.25}}, store, alone(), SmallBuckets{}};
    optimizer.step();
    CHECK(optimizer.groups().size() == 2);
  }
  SECTION("as a vector, for a named type") {
    const Groups two{std::vector{Sgd{.lr = 0.5}, Sgd{.lr = 0.25}}};
    ZeroSharded<Sgd> optimizer{two, store, alone()};
    optimizer.step();
  }
  SECTION("as an lvalue") {
    const Groups two{Sgd{.lr = 0.5}, Sgd{.lr = 0.25}};
    ZeroSharded optimizer{two, store, alone()};
    optimizer.step();
    CHECK(optimizer.group(1).lr == 0.25);
  }
  CHECK(a[0] == 0.5F);
  CHECK(b[0] == 0.75F);
}

TEST_CASE("what isn't given has its default") {
  Model model;
  ZeroSharded optimizer{Sgd{.lr = 1}, model.store, alone(), Watcher{}};
  optimizer.step();
  CHECK(model.values[0] == 0);
  CHECK(optimizer.observer().id == 0);
  CHECK(optimizer.layout().buckets(0) == 1);
}
