// SPDX-License-Identifier: Apache-2.0
// One of three processes goes wrong, in the way that the argument names. Every rank that lives gets
// a typed error in time, leaves within a moment, and says so; mpi_faults.cmake reads it.
#include <mpi.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <initializer_list>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "zero/comm/mpi.hpp"
#include "zero/optim/sgd.hpp"
#include "zero/zero_sharded.hpp"

namespace {

using Clock = std::chrono::steady_clock;
using zero::CommunicatorFailure;
using zero::MpiCommunicator;

constexpr std::chrono::milliseconds timeout(1500);
constexpr std::chrono::milliseconds at_once(1000);  // that is before anybody's timeout
constexpr int culprit = 1;

void require(bool condition, const std::string& what) {
  if (!condition) throw std::runtime_error("not so: " + what);
}

/// That `f` fails in one of these ways, within `limit`, and that everything does from then on.
template <class F>
void expect_failure(MpiCommunicator& comm, std::initializer_list<CommunicatorFailure> ways,
                    Clock::duration limit, F f) {
  const Clock::time_point begin = Clock::now();
  std::optional<zero::CommunicatorError> error;
  try {
    f();
  } catch (const zero::CommunicatorError& thrown) {
    error = thrown;
  }
  const Clock::duration took = Clock::now() - begin;
  require(error.has_value(), "an error");
  const std::string text = error->what();
  bool expected = false;
  for (const CommunicatorFailure way : ways) expected = expected || error->failure() == way;
  require(expected, "the kind of: " + text);
  require(error->rank() == comm.rank() && !error->operation().empty(), "who fails: " + text);
  for (const char* word : {"rank ", "sequence "}) {
    require(text.find(word) != std::string::npos, std::string(word) + "is named in: " + text);
  }
  require(took < limit, "in time, and not after " +
                            std::to_string(std::chrono::duration<double>(took).count()) +
                            " s: " + text);
  try {
    comm.barrier().wait();
  } catch (const zero::CommunicatorError& again) {
    require(again.failure() == error->failure(), "the first cause stays: " + text);
    return;
  }
  require(false, "a poisoned communicator stays so");
}

/// Two parameters in a bucket each; `in_the_middle` is called when one has been reduced.
template <class F>
void step(MpiCommunicator& comm, F in_the_middle) {
  std::vector<float> first(1000, 1), second(1000, 1), gradient(1000, 1);
  std::vector parameters{zero::ParamRef("first", first, gradient),
                         zero::ParamRef("second", second, gradient)};
  zero::ZeroSharded optimizer{zero::Sgd{.lr = 1e-2}, parameters, comm, zero::NoView{4000}};
  for (int i = 0; i < 3; ++i) optimizer.step();
  optimizer.mark_ready(1);
  in_the_middle();
  optimizer.step();
}

void run(const std::string& fault, MpiCommunicator& comm) {
  const bool guilty = comm.rank() == culprit;
  const Clock::duration in_time = timeout + at_once;
  std::vector<float> data(5000, 1), all(15000);
  const std::span<float> whole(data);
  comm.all_reduce(whole).wait();

  if (fault == "kill" || fault == "stop") {
    const int signal = fault == "kill" ? SIGKILL : SIGSTOP;
    std::vector<pid_t> pids(3);
    const pid_t mine = getpid();
    comm.exchange(std::as_bytes(std::span(&mine, 1)), std::as_writable_bytes(std::span(pids)))
        .wait();
    // Who was stopped learns from its peers that they have given up.
    expect_failure(comm, {CommunicatorFailure::timeout}, 2 * in_time, [&] {
      step(comm, [&] {
        if (guilty) std::raise(signal);
      });
    });
    if (signal == SIGSTOP && comm.rank() == 0) kill(pids[culprit], SIGCONT);
  } else if (fault == "kill_large" || fault == "stop_large") {
    // Among messages that lie half in one process and half in another.
    const bool kills = fault == "kill_large";
    std::vector<pid_t> pids(3);
    const pid_t mine = getpid();
    comm.exchange(std::as_bytes(std::span(&mine, 1)), std::as_writable_bytes(std::span(pids)))
        .wait();
    std::thread other;
    if (guilty) {
      other = std::thread([&] {
        std::this_thread::sleep_for(std::chrono::milliseconds(150));
        std::raise(kills ? SIGKILL : SIGSTOP);
      });
    }
    std::vector<float> large(8'000'000, 1);
    expect_failure(comm, {CommunicatorFailure::timeout}, 2 * in_time, [&] {
      for (;;) comm.all_reduce(std::span(large)).wait();
    });
    if (!kills && comm.rank() == 0) kill(pids[culprit], SIGCONT);
    if (other.joinable()) other.join();
  } else if (fault == "throw") {
    if (guilty) throw std::runtime_error("an error of the caller's");
    expect_failure(comm, {CommunicatorFailure::rank_left}, at_once,
                   [&] { comm.all_reduce(whole).wait(); });
  } else if (fault == "operation") {
    expect_failure(comm, {CommunicatorFailure::mismatch}, at_once, [&] {
      if (guilty) comm.all_gather(std::span<const float>(whole), std::span(all)).wait();
      comm.all_reduce(whole).wait();
    });
  } else if (fault == "size") {
    expect_failure(comm, {CommunicatorFailure::mismatch}, at_once,
                   [&] { comm.all_reduce(guilty ? whole.first(4000) : whole).wait(); });
  } else if (fault == "counts") {
    const std::vector<std::size_t> ours{1, 2, 3}, theirs{1, 3, 2};
    const std::vector<std::size_t>& counts = guilty ? theirs : ours;
    const auto mine = static_cast<std::size_t>(comm.rank());
    expect_failure(comm, {CommunicatorFailure::mismatch}, at_once, [&] {
      comm.all_gather_v(std::span<const float>(whole.first(counts[mine])), std::span(all).first(6),
                        std::span(counts))
          .wait();
    });
  } else if (fault == "abort" || fault == "abort_multiple") {
    std::thread other;
    if (guilty) {
      other = std::thread([&] {
        std::this_thread::sleep_for(std::chrono::milliseconds(100));
        comm.abort("the disk is full");
      });
    }
    expect_failure(comm, {CommunicatorFailure::aborted}, at_once, [&] {
      // The others wait for rank 0, which only looks.
      if (comm.rank() == 0) {
        for (;;) {
          std::this_thread::sleep_for(std::chrono::milliseconds(20));
          zero::MpiRequest request = comm.barrier();
          while (!request.done()) {
          }
        }
      }
      comm.barrier().wait();
      for (;;) comm.barrier().wait();
    });
    if (guilty) other.join();
  } else if (fault == "drop") {
    expect_failure(comm, {CommunicatorFailure::aborted}, at_once, [&] {
      if (guilty) {
        std::this_thread::sleep_for(std::chrono::milliseconds(100));
        const zero::MpiRequest unfinished = comm.all_reduce(whole);
      }
      comm.all_reduce(whole).wait();
      comm.barrier().wait();
    });
  } else if (fault == "absent") {
    // Never comes to anything, not even to its own end.
    if (guilty) {
      std::this_thread::sleep_for(timeout + timeout / 2);
      return;
    }
    expect_failure(comm, {CommunicatorFailure::timeout}, in_time,
                   [&] { comm.all_reduce(whole).wait(); });
  } else {
    throw std::runtime_error("no such fault: " + fault);
  }
}

/// Handles may outlive MPI, but can do nothing.
int after_finalize() {
  std::optional<zero::MpiCommunicatorRef> ref;
  {
    MpiCommunicator comm(MPI_COMM_WORLD, {.timeout = timeout});
    ref = comm;
    comm.barrier().wait();
  }
  ref.emplace(MPI_COMM_WORLD);
  const int rank = ref->rank();
  MPI_Finalize();
  std::string verdict = "no error after MPI_Finalize";
  try {
    ref->barrier().wait();
  } catch (const zero::UsageError& error) {
    verdict =
        std::string(error.what()).find("finalised") != std::string::npos ? "ok" : error.what();
  }
  ref->abort("nobody hears this");
  ref.reset();
  std::printf("rank %d: %s\n", rank, verdict.c_str());
  return 0;
}

/// One rank never makes the communicator.
std::string unmade(int rank) {
  if (rank == culprit) {
    std::this_thread::sleep_for(timeout + at_once);
    return "ok";
  }
  const Clock::time_point begin = Clock::now();
  try {
    const MpiCommunicator comm(MPI_COMM_WORLD, {.timeout = timeout});
  } catch (const zero::CommunicatorError& error) {
    if (error.failure() != CommunicatorFailure::timeout) return error.what();
    return Clock::now() - begin < timeout + at_once ? "ok" : "too late";
  }
  return "a communicator without one of its ranks";
}

/// Does what `fault` says, and makes sure that the communicator ends at once.
std::string verdict_of(const std::string& fault, int rank) {
  std::string verdict = "ok";
  Clock::time_point end = Clock::now();
  try {
    MpiCommunicator comm(MPI_COMM_WORLD, {.timeout = timeout, .teardown = timeout});
    try {
      run(fault, comm);
    } catch (const std::exception& error) {
      if (fault != "throw" || rank != culprit) verdict = error.what();
    }
    end = Clock::now();
  } catch (const std::exception& error) {
    verdict = error.what();
  }
  return Clock::now() - end > timeout + at_once ? "the destructor hung" : verdict;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string fault = argc == 2 ? argv[1] : "";
  int level = 0;
  MPI_Init_thread(&argc, &argv,
                  fault == "abort_multiple" ? MPI_THREAD_MULTIPLE : MPI_THREAD_FUNNELED, &level);
  if (fault == "finalized") return after_finalize();
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  std::string verdict = fault == "unmade" ? unmade(rank) : verdict_of(fault, rank);
  // Where all live they can go on, and end as if nothing had been.
  const bool all_live = fault != "absent" && fault != "unmade" &&
                        fault.find("kill") == std::string::npos &&
                        fault.find("stop") == std::string::npos;
  if (all_live && verdict == "ok") {
    try {
      MpiCommunicator again(MPI_COMM_WORLD, {.timeout = 2 * timeout});
      again.barrier().wait();
    } catch (const std::exception& error) {
      verdict = std::string("a new communicator: ") + error.what();
    }
    MPI_Finalize();
  }
  std::printf("rank %d: %s\n", rank, verdict.c_str());
  std::fflush(stdout);
  std::_Exit(verdict == "ok" ? 0 : 1);  // as a program must whose peers may be gone
}
