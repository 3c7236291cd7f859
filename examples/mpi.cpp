// Adam with its state spread over processes: mpirun -n 4 mpi_example. Each rank sees data of its
// own, and all end with the same weights; where one fails, the others say so and leave.
// docs/mpi.md.
#include <mpi.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <span>
#include <vector>
#include <zero/comm/mpi.hpp>
#include <zero/zero.hpp>

namespace {

/// Fits weights to samples that lie around 3; this rank's are its own.
void train(zero::MpiCommunicator& comm) {
  std::vector<float> weights(1000, 1.0F);  // the same on every rank
  std::vector<float> gradient(weights.size());
  std::vector parameters{zero::ParamRef("weights", weights, gradient)};
  zero::ZeroSharded optimizer{zero::Adam{.lr = 0.1}, parameters, comm};

  for (int step = 0; step < 200; ++step) {
    const float sample = 2.0F + 2.0F * static_cast<float>(comm.rank() % 2);
    for (std::size_t i = 0; i < weights.size(); ++i) gradient[i] = weights[i] - sample;
    optimizer.step();  // with the mean of all ranks' gradients
  }

  std::array<char, MPI_MAX_PROCESSOR_NAME> host{};
  int length = 0;
  MPI_Get_processor_name(host.data(), &length);
  std::printf("rank %d of %d: process %ld on %s, %zu bytes of state\n", comm.rank(), comm.size(),
              static_cast<long>(::getpid()), host.data(), optimizer.memory().state);

  std::vector<float> all(weights.size() * static_cast<std::size_t>(comm.size()));
  comm.exchange(std::as_bytes(std::span(weights)), std::as_writable_bytes(std::span(all))).wait();
  for (std::size_t i = 0; i < all.size(); ++i) {
    if (all[i] != weights[i % weights.size()]) {
      std::printf("rank %d differs from rank %zu\n", comm.rank(), i / weights.size());
      return;
    }
  }
  if (comm.rank() == 0) std::printf("the same weights on all ranks: %.2f\n", weights[0]);
}

}  // namespace

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  try {
    zero::MpiCommunicator comm(MPI_COMM_WORLD, {.timeout = std::chrono::seconds(30)});
    train(comm);
  } catch (const zero::CommunicatorError& error) {
    // A peer is gone, and MPI_Finalize would wait for it. The message names this rank and the
    // cause.
    std::fprintf(stderr, "%s\n", error.what());
    std::fflush(nullptr);
    std::_Exit(1);
  }
  MPI_Finalize();  // when the communicator is gone
}
