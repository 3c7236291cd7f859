// SPDX-License-Identifier: Apache-2.0
// What a caller may do to a store behind the optimizer's back, and policies that differ in data
// alone.
#include <algorithm>
#include <cstddef>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "catch.hpp"
#include "ranks.hpp"
#include "zero/optim/sgd.hpp"

namespace {

using Catch::Matchers::ContainsSubstring;
using Store = std::vector<zero::ParamRef<float>>;

/// What `body(optimizer, store)` throws on rank `rank` of `world` after a first step.
template <class Way, class Body>
std::vector<ranks::Failure> after_a_step(int world, Body body) {
  std::vector<ranks::Failure> failures(static_cast<std::size_t>(world));
  ranks::rethrow_any(ranks::run(world, [&](zero::InProcessCommunicator inner) {
    std::vector<float> a(13, 1.0F), b(5, 1.0F), ga(13, 0.5F), gb(5, 0.5F);
    Store store;
    store.reserve(4);
    store.emplace_back("a", a, ga);
    store.emplace_back("b", b, gb);
    auto comm = Way::wrap(inner);
    auto optimizer = Way::optimizer(zero::Sgd{.lr = 1}, store, comm);
    optimizer.step();
    failures[static_cast<std::size_t>(inner.rank())] =
        ranks::attempt([&] { body(optimizer, store, inner.rank()); });
    // Whatever was refused, what is put right again steps.
    store.erase(store.begin(), store.end());
    store.emplace_back("a", a, ga);
    store.emplace_back("b", b, gb);
    optimizer.step();
    if (a[12] != 0 || optimizer.steps() != 2) throw std::runtime_error("not stepped");
  }));
  return failures;
}

template <class Way, class Body>
void check_refused(Body body, const std::string& text) {
  for (const int world : {1, 3}) {
    for (const ranks::Failure& failure : after_a_step<Way>(world, body)) {
      CHECK(failure.kind == ranks::Failure::Kind::usage);
      CHECK_THAT(failure.text, ContainsSubstring(text));
    }
  }
}

/// `rebind` as a stub.
class Stub {
 public:
  explicit Stub(std::vector<float>& values) : values_(values), gradient_(values.size()) {}
  [[nodiscard]] std::string name() const { return "stub"; }
  [[nodiscard]] std::vector<std::size_t> shape() const { return {values_.size()}; }
  [[nodiscard]] std::span<float> values() const { return values_; }
  [[nodiscard]] std::span<float> gradient() const { return gradient_; }
  void rebind(std::span<float>, const std::shared_ptr<const void>&) {}

 private:
  std::span<float> values_;
  mutable std::vector<float> gradient_;
};

/// Divides as it is told.
struct Share {
  static constexpr bool cuts_tensors = true;
  std::size_t of_rank_0 = 4;
  [[nodiscard]] std::size_t cut(std::size_t elements, std::size_t, int world, int rank) const {
    if (rank == 0) return 0;
    return rank == world ? elements : std::min(of_rank_0, elements);
  }
};
struct Owner {
  static constexpr bool cuts_tensors = false;
  int all = 0;
  void assign(std::span<const std::size_t>, std::span<std::size_t>, std::span<int> owners) const {
    for (int& owner : owners) owner = all;
  }
};

template <class Way, class Partition>
void check_differing(Partition first, Partition other) {
  const auto thrown = ranks::run(2, [&](zero::InProcessCommunicator inner) {
    std::vector<float> a(40, 1.0F), g(40, 0.5F);
    Store store{{"a", {40}, a.data(), g.data()}};
    auto comm = Way::wrap(inner);
    auto optimizer =
        Way::optimizer(zero::Sgd{}, store, comm, {}, 4096, inner.rank() == 0 ? first : other);
    optimizer.step();
  });
  for (const auto& exception : thrown) {
    const ranks::Failure failure = ranks::failure_of(exception);
    CHECK(failure.kind == ranks::Failure::Kind::usage);
    CHECK_THAT(failure.text, ContainsSubstring("rank 1 differs from rank 0: its partition"));
  }
}

using Ways = std::tuple<ranks::Way<true, zero::Stage1, zero::NoView>,
                        ranks::Way<false, zero::Stage1, zero::NoView>>;

}  // namespace

TEMPLATE_LIST_TEST_CASE("a store that has changed is refused, and nothing has changed", "[misuse]",
                        Ways) {
  std::vector<float> more(3, 1.0F), moved(13, 1.0F);
  const auto grow = [&](Store& store) { store.emplace_back("c", more, more); };
  check_refused<TestType>(
      [&](auto& optimizer, Store& store, int) {
        grow(store);
        optimizer.step();
      },
      "the store shows 3 parameters, but this optimizer has 2; call add_param_group");
  check_refused<TestType>(
      [&](auto& optimizer, Store& store, int) {
        store.pop_back();
        optimizer.step();
      },
      "the store shows 1 parameters");
  check_refused<TestType>(
      [&](auto& optimizer, Store& store, int) {
        store.clear();
        optimizer.mark_ready(1);
      },
      "mark_ready: the store shows 0 parameters");
  check_refused<TestType>(
      [&](auto& optimizer, Store& store, int) {
        store.clear();
        optimizer.zero_grad();
      },
      "zero_grad: the store shows 0 parameters");
  check_refused<TestType>(
      [&](auto& optimizer, Store& store, int rank) {
        std::vector<float> gradient(13);
        if (rank == 0) store[0] = zero::ParamRef("a", moved, gradient);
        optimizer.step();
      },
      "parameter 0 ('a')'s values are no longer where they were");
}

TEST_CASE("a rebind that does nothing is noticed", "[misuse]") {
  for (const int world : {1, 2}) {
    const auto thrown = ranks::run(world, [](zero::InProcessCommunicator comm) {
      std::vector<float> values(5);
      std::vector<Stub> store{Stub(values)};
      zero::ZeroSharded optimizer{zero::Sgd{}, store, comm};
    });
    for (const auto& exception : thrown) {
      CHECK_THAT(ranks::failure_of(exception).text,
                 ContainsSubstring("parameter 0 ('stub') doesn't use what its rebind was given"));
    }
  }
}

TEST_CASE("partitions that differ in their data are refused", "[misuse]") {
  check_differing<std::tuple_element_t<0, Ways>>(Share{4}, Share{8});
  check_differing<std::tuple_element_t<1, Ways>>(Owner{0}, Owner{1});
}

TEST_CASE("a store may refuse a step before it begins, on all ranks", "[misuse]") {
  struct Watchful : Store {
    using Store::Store;
    int asked = 0;
    bool refuses = false;
    void before_step() {
      ++asked;
      if (refuses) throw zero::UsageError("the model has been taken apart");
    }
  };
  std::vector<ranks::Failure> failures(3);
  ranks::rethrow_any(ranks::run(3, [&](zero::InProcessCommunicator& comm) {
    std::vector<float> a(5, 1.0F), g(5, 0.5F);
    Watchful store;
    store.emplace_back("a", a, g);
    zero::ZeroSharded optimizer{zero::Sgd{.lr = 1}, store, comm};
    store.refuses = comm.rank() == 1;
    failures[static_cast<std::size_t>(comm.rank())] = ranks::attempt([&] { optimizer.step(); });
    if (a[0] != 1 || optimizer.steps() != 0) throw std::runtime_error("something has changed");
    store.refuses = false;
    optimizer.step();
    if (a[0] != 0.5F || store.asked != 2) throw std::runtime_error("not stepped");
  }));
  for (const ranks::Failure& failure : failures) {
    CHECK(failure.kind == ranks::Failure::Kind::usage);
    CHECK_THAT(failure.text, ContainsSubstring("step: the model has been taken apart"));
  }
}
