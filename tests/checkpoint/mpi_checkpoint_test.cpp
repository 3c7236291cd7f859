// SPDX-License-Identifier: Apache-2.0
// Saved by processes over MPI, loaded by others of another number and by threads. Two tests, which
// two runs of this program take: the first writes into the folder that ZERO_TEST_CHECKPOINT names,
// the second reads it.
#include "zero/checkpoint.hpp"

#include <cmath>
#include <cstddef>
#include <cstdlib>
#include <filesystem>
#include <stdexcept>
#include <string>
#include <vector>

#include "catch.hpp"
#include "mpi_process.hpp"
#include "ranks.hpp"
#include "zero/comm/in_process.hpp"
#include "zero/comm/mpi.hpp"
#include "zero/optim/adam.hpp"
#include "zero/zero_sharded.hpp"

namespace {

const MpiProcess mpi(MPI_THREAD_MULTIPLE);

constexpr int saved_after = 3;
constexpr int steps = 5;

std::filesystem::path folder() {
  const char* const path = std::getenv("ZERO_TEST_CHECKPOINT");
  if (path == nullptr) throw std::runtime_error("ZERO_TEST_CHECKPOINT names no folder");
  return path;
}

/// Gradients are the same on all ranks, and their sums exact, so that worlds of any size take the
/// same steps.
template <class Comm>
struct Rank {
  explicit Rank(Comm& comm, double lr = 0.01)
      : optimizer(zero::Adam{.lr = lr}, model, comm, zero::NoView{256}) {}
  static ranks::Model<> make_model() {
    ranks::Model<> model;
    model.emplace_back("weight", std::vector<std::size_t>{7, 11});
    model.emplace_back("bias", std::vector<std::size_t>{5});
    model.emplace_back("matrix", std::vector<std::size_t>{33, 17});
    ranks::draw_values(model);
    return model;
  }
  void train(int from, int to) {
    for (int step = from; step < to; ++step) {
      ranks::draw_gradients(model, 0, step);
      for (auto& tensor : model) {
        for (float& x : tensor.own_gradient()) x = std::round(x * 64) / 64;
      }
      optimizer.step();
    }
  }

  ranks::Model<> model = make_model();
  zero::ZeroSharded<zero::Adam, ranks::Model<>&, Comm&, zero::ContiguousPartition, zero::NoView>
      optimizer;
};

/// The values of a run that doesn't stop.
std::string uninterrupted() {
  std::string values;
  zero::run_ranks(1, [&](zero::InProcessCommunicator& comm) {
    Rank rank(comm);
    rank.train(0, steps);
    values = ranks::values_of(rank.model);
  });
  return values;
}

TEST_CASE("MPI: processes save", "[save]") {
  zero::MpiCommunicator comm(MPI_COMM_WORLD);
  Rank rank(comm);
  rank.train(0, saved_after);
  zero::save(rank.optimizer, folder());
  rank.train(saved_after, steps);
  CHECK((ranks::values_of(rank.model) == uninterrupted()));
  const zero::Checkpoint saved(folder());
  saved.verify();
  CHECK(saved.info().world == comm.size());
  CHECK(saved.info().step == saved_after);
}

TEST_CASE("MPI: other processes load and go on, and so do threads", "[load]") {
  zero::MpiCommunicator comm(MPI_COMM_WORLD);
  Rank rank(comm, 5);
  zero::load(rank.optimizer, folder());
  CHECK(rank.optimizer.steps() == saved_after);
  rank.train(saved_after, steps);
  CHECK((ranks::values_of(rank.model) == uninterrupted()));
  if (comm.rank() != 0) return;
  std::string values;
  zero::run_ranks(2, [&](zero::InProcessCommunicator& threads) {
    Rank thread(threads, 5);
    zero::load(thread.optimizer, folder());
    thread.train(saved_after, steps);
    if (threads.rank() == 0) values = ranks::values_of(thread.model);
  });
  CHECK((values == uninterrupted()));
}

}  // namespace
