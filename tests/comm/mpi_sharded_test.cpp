// SPDX-License-Identifier: Apache-2.0
// ZeroSharded over processes ends on the same bits as over threads.
#include <mpi.h>

#include <chrono>
#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "catch.hpp"
#include "ranks.hpp"
#include "zero/bfloat16.hpp"
#include "zero/comm/fault_injector.hpp"
#include "zero/comm/hybrid.hpp"
#include "zero/comm/in_process.hpp"
#include "zero/comm/mpi.hpp"
#include "zero/optim/adam.hpp"
#include "zero/partition/balanced.hpp"
#include "zero/zero_sharded.hpp"

namespace {

static_assert(zero::Communicator<zero::FaultInjector<zero::MpiCommunicatorRef>, float>);

template <class T>
ranks::Model<T> model() {
  ranks::Model<T> tensors;
  tensors.emplace_back("weight", std::vector<std::size_t>{7, 11});
  tensors.emplace_back("empty", std::vector<std::size_t>{0});
  tensors.emplace_back("bias", std::vector<std::size_t>{5});
  tensors.emplace_back("matrix", std::vector<std::size_t>{33, 17});
  ranks::draw_values(tensors);
  return tensors;
}

/// Which rank's gradients are drawn.
template <class Comm>
int drawn_rank(Comm& comm) {
  if constexpr (zero::ReplicatedCommunicator<Comm>) {
    return comm.world().rank();
  } else {
    return comm.rank();
  }
}

/// What a rank's parameters are after some steps. Clipped, so that the norm takes part.
template <class T, class Comm, class... Policies>
std::string train(Comm& comm, Policies... policies) {
  ranks::Model<T> tensors = model<T>();
  zero::ZeroSharded optimizer{zero::Adam{.lr = 1e-2}, tensors, comm, policies...};
  optimizer.clip_grad_norm(5.0);
  for (int step = 0; step < 4; ++step) {
    ranks::draw_gradients(tensors, drawn_rank(comm), step);
    optimizer.step();
  }
  return ranks::values_of(tensors);
}

/// The same where rank r has 3 + r batches, each of which weighs what the others of its step do.
template <class Comm>
std::string train_unevenly(Comm& comm) {
  ranks::Model<float> tensors = model<float>();
  zero::ZeroSharded optimizer{zero::Adam{.lr = 1e-2}, tensors, comm, zero::NoView{256},
                              zero::Stage1{}};
  optimizer.clip_grad_norm(5.0);
  optimizer.join(
      [&] {
        for (int step = 0; step < 3 + comm.rank(); ++step) {
          ranks::draw_gradients(tensors, comm.rank(), step);
          optimizer.step();
        }
      },
      {.mean = zero::JoinMean::ranks_with_input});
  return ranks::values_of(tensors) + " after " + std::to_string(optimizer.steps());
}

/// What `train(comm)` gives on ranks that are threads.
template <class Train>
std::string in_process(int size, Train train) {
  std::string values;
  zero::run_ranks(size, [&](zero::InProcessCommunicator& comm) {
    const std::string mine = train(comm);
    if (comm.rank() == 0) values = mine;
  });
  return values;
}

template <class T>
std::string expected(int size) {
  return in_process(size,
                    [](auto& comm) { return train<T>(comm, zero::NoView{256}, zero::Stage1{}); });
}

}  // namespace

TEST_CASE("MPI: the bits of in-process ranks", "[comm]") {
  zero::MpiCommunicator comm(MPI_COMM_WORLD, {.timeout = std::chrono::seconds(20)});
  const std::string f32 = expected<float>(comm.size());
  CHECK(train<float>(comm, zero::NoView{256}, zero::Stage1{}) == f32);
  CHECK(train<float>(comm, zero::ParamView{256}, zero::Replicated{}) == f32);
  CHECK(train<float>(comm, zero::ParamView{256}, zero::Stage1{}, zero::BalancedPartition{}) == f32);
  const std::string bf16 = expected<zero::bfloat16>(comm.size());
  CHECK(train<zero::bfloat16>(comm, zero::ParamView{256}, zero::Stage1{}) == bf16);
  CHECK(train<zero::bfloat16>(comm, zero::NoView{256}, zero::Replicated{}) == bf16);
}

TEST_CASE("MPI: rank r has 3 + r batches", "[comm]") {
  zero::MpiCommunicator comm(MPI_COMM_WORLD, {.timeout = std::chrono::seconds(20)});
  const std::string right =
      in_process(comm.size(), [](auto& ranks) { return train_unevenly(ranks); });
  CHECK(right.ends_with(" after " + std::to_string(2 + comm.size())));
  CHECK(train_unevenly(comm) == right);
}

TEST_CASE("MPI: groups of ranks, with the bits of in-process ones", "[comm]") {
  zero::MpiCommunicator comm(MPI_COMM_WORLD, {.timeout = std::chrono::seconds(20)});
  const int shard_size = comm.size() % 2 == 0 ? 2 : 1;
  std::string wanted;
  zero::run_ranks(comm.size(), [&](zero::InProcessCommunicator& world) {
    zero::HybridCommunicator groups(world, shard_size);
    const std::string mine = train<float>(groups, zero::NoView{256}, zero::Stage1{});
    if (world.rank() == 0) wanted = mine;
  });
  zero::HybridCommunicator groups(comm, shard_size);
  CHECK(groups.replicas().size() == comm.size() / shard_size);
  CHECK(train<float>(groups, zero::NoView{256}, zero::Stage1{}) == wanted);
}

TEST_CASE("MPI: what one rank aborts ends all ranks of all groups", "[comm]") {
  zero::MpiCommunicator comm(MPI_COMM_WORLD, {.timeout = std::chrono::seconds(20)});
  if (comm.size() == 1) return;
  zero::HybridCommunicator groups(comm, comm.size() % 2 == 0 ? 2 : 1);
  ranks::Model<float> tensors = model<float>();
  const bool last = comm.rank() == comm.size() - 1;
  const ranks::Failure failure = ranks::attempt([&] {
    zero::ZeroSharded optimizer{zero::Adam{}, tensors, groups, zero::NoView{256}, zero::Stage1{}};
    if (last) {
      groups.abort("the last rank has had enough");
    } else {
      optimizer.step();
    }
  });
  if (last) return;
  INFO(failure.text);
  CHECK(failure.kind == ranks::Failure::Kind::communicator);
  CHECK(failure.cause != zero::CommunicatorFailure::timeout);
}

TEST_CASE("MPI: a part of a world trains alone, by its own ranks", "[comm]") {
  zero::MpiCommunicator comm(MPI_COMM_WORLD, {.timeout = std::chrono::seconds(20)});
  zero::MpiCommunicator part = comm.split(comm.rank() % 2, comm.rank());
  if (comm.rank() % 2 == 0) return;
  float sent = static_cast<float>(comm.rank());
  part.broadcast(std::span<float>(&sent, 1), part.size() - 1).wait();
  CHECK(sent == static_cast<float>(2 * part.size() - 1));  // the last odd rank
  CHECK(train<float>(part, zero::NoView{256}, zero::Stage1{}) == expected<float>(part.size()));
}
