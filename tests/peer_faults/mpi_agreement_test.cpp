// SPDX-License-Identifier: Apache-2.0
// The peers' faults on agreement, between processes: what one rank finds all know, and nothing
// counts twice. agreement_faults_test.cpp has them between threads, in more ways.
#include <mpi.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "catch.hpp"
#include "ranks.hpp"
#include "zero/bfloat16.hpp"
#include "zero/comm/mpi.hpp"
#include "zero/float16.hpp"
#include "zero/optim/sgd.hpp"
#include "zero/zero_sharded.hpp"

namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();
constexpr double not_a_number = std::numeric_limits<double>::quiet_NaN();

zero::MpiCommunicator world() {
  return zero::MpiCommunicator(MPI_COMM_WORLD, {.timeout = std::chrono::seconds(20)});
}

template <class T>
T stored(double x) {
  return zero::element_traits<T>::store(static_cast<zero::arithmetic_t<T>>(x));
}

/// From zeros, in several buckets whose padding is NaN.
template <class T>
struct Trained {
  ranks::Model<T> model;
  zero::ZeroSharded<zero::Sgd, ranks::Model<T>&, zero::MpiCommunicator&, zero::ContiguousPartition,
                    zero::NoView>
      optimizer;

  Trained(zero::MpiCommunicator& comm, const std::vector<std::size_t>& sizes,
          zero::Settings settings = {})
      : model(model_of(sizes)),
        optimizer(zero::Sgd{.lr = 1}, model, comm, zero::NoView{64}, poisoned(settings)) {}

  template <class F>
  void set_gradients(F gradient) {
    std::size_t k = 0;
    for (auto& tensor : model) {
      for (T& g : tensor.own_gradient()) g = stored<T>(gradient(k++));
    }
  }
  [[nodiscard]] std::vector<double> values() const {
    std::vector<double> all;
    for (const auto& tensor : model) {
      for (const T value : tensor.values()) {
        all.push_back(static_cast<double>(zero::element_traits<T>::load(value)));
      }
    }
    return all;
  }
  [[nodiscard]] std::string everything() const {
    std::string all = ranks::snapshot(model, optimizer);
    for (const auto& slice : optimizer.masters()) all += ranks::bytes_of(slice.values);
    return all;
  }

 private:
  static ranks::Model<T> model_of(const std::vector<std::size_t>& sizes) {
    ranks::Model<T> model;
    for (const std::size_t n : sizes) {
      model.emplace_back("p" + std::to_string(model.size()), std::vector<std::size_t>{n});
    }
    return model;
  }
  static zero::Settings poisoned(zero::Settings settings) {
    settings.poison_padding = true;
    return settings;
  }
};

const std::vector<std::size_t> sizes{31, 3, 17, 1, 40, 11};

/// Whether each step was skipped, and changed nothing, in which some ranks (`guilty` ones) had
/// `bad` at one element; for elements in every rank's shard.
template <class T>
bool all_skipped(bool guilty, double bad, zero::Settings settings) {
  zero::MpiCommunicator comm = world();
  Trained<T> trained(comm, sizes, settings);
  trained.set_gradients([](std::size_t k) { return static_cast<double>(k % 5) - 2; });
  bool right = trained.optimizer.step().outcome().applied;
  const std::string before = trained.everything();
  for (auto& tensor : trained.model) {
    for (std::size_t i = 0; i < tensor.own_gradient().size(); i += 3) {
      T& g = tensor.own_gradient()[i];
      const T good = g;
      if (guilty) g = stored<T>(bad);
      const auto outcome = trained.optimizer.step().outcome();
      right = right && !outcome.applied && outcome.step == 1 && trained.everything() == before;
      g = good;
    }
  }
  const auto outcome = trained.optimizer.step().outcome();  // nobody is ahead
  return right && outcome.applied && outcome.step == 2;
}

}  // namespace

TEST_CASE("MPI, FS #179, DS #8415, PT #88015: not finite on some ranks, skipped on all",
          "[peer_faults]") {
  int rank = 0, size = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  const zero::Settings scaled{.loss_scale = zero::LossScale::fixed(4)};
  const zero::Settings checked{.finite_check = zero::FiniteCheck::always};
  CHECK(all_skipped<float>(rank == std::min(1, size - 1), infinity, scaled));
  CHECK(all_skipped<zero::float16>(rank == std::min(1, size - 1), infinity, scaled));
  CHECK(all_skipped<zero::bfloat16>(rank == std::min(2, size - 1), not_a_number, {}));
  CHECK(all_skipped<float>(rank == 0 || rank == size - 1, not_a_number, checked));
  CHECK(all_skipped<float>(true, infinity, checked));
}

TEST_CASE("MPI, LC PR 524, FS #263, LBANN #2376: one norm, of what is stepped, once",
          "[peer_faults]") {
  zero::MpiCommunicator comm = world();
  {
    Trained<float> trained(comm, {1, 2, 3, 4});
    trained.optimizer.clip_grad_norm(1);
    trained.set_gradients([](std::size_t k) { return static_cast<double>(k + 1); });
    const auto outcome = trained.optimizer.step().outcome();
    REQUIRE(outcome.gradient_norm.has_value());
    // Where 1/3 is rounded, the mean of equal gradients may be off in its last place.
    CHECK(std::abs(*outcome.gradient_norm - 19.6214169) < 1e-5);
    if (comm.size() != 3) CHECK(*outcome.gradient_norm == std::sqrt(385.0));
    const std::vector<double> values = trained.values();
    for (std::size_t k = 0; k < 10; ++k) {
      CHECK(std::abs(values[k] + 0.0509647 * static_cast<double>(k + 1)) < 1e-6);
    }
  }
  Trained<zero::float16> halves(comm, {40, 12});
  halves.optimizer.clip_grad_norm(infinity);
  halves.set_gradients([](std::size_t) { return 5000.0; });
  const auto outcome = halves.optimizer.step().outcome();
  REQUIRE(outcome.gradient_norm.has_value());
  CHECK(std::abs(*outcome.gradient_norm - 5000 * std::sqrt(52.0)) < 1e-2);
}

TEST_CASE("MPI, DS #2343: gradients are ready in another order on each rank", "[peer_faults]") {
  zero::MpiCommunicator comm = world();
  const auto train = [&](bool shuffled) {
    Trained<float> trained(comm, sizes);
    for (int step = 0; step < 3; ++step) {
      ranks::draw_gradients(trained.model, comm.rank(), step);
      std::vector<std::size_t> order{5, 4, 3, 2, 1, 0};
      if (shuffled) {
        order = ranks::Draw(static_cast<std::uint32_t>(10 * comm.rank() + step)).order(6);
      }
      for (const std::size_t i : order) trained.optimizer.mark_ready(i);
      trained.optimizer.step();
    }
    return trained.everything();
  };
  const std::string in_order = train(false);
  CHECK(train(true) == in_order);
}

TEST_CASE("MPI, DS #1800: small summands are summed in float", "[peer_faults]") {
  zero::MpiCommunicator comm = world();
  Trained<zero::bfloat16> trained(comm, {5}, {.gradient_scale = 1});
  trained.set_gradients([&](std::size_t) { return comm.rank() == 0 ? 1 : 0x1p-9; });
  trained.optimizer.step();
  const float right = -1 - static_cast<float>(comm.size() - 1) * 0x1p-9F;
  for (const auto& slice : trained.optimizer.masters()) {
    for (const float master : slice.values) CHECK(master == right);
  }
  for (const double value : trained.values()) {
    CHECK(value == static_cast<double>(static_cast<float>(zero::bfloat16(right))));
  }
}
