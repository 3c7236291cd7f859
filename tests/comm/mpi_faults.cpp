// SPDX-License-Identifier: Apache-2.0
// One of three processes goes wrong, in the ways that the arguments name, one after the other.
// Every rank that lives gets a typed error in time, leaves within a moment, and says so in a file
// of the working directory; mpi_faults.cmake reads it.
#include <mpi.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstddef>
#include <cstdlib>
#include <exception>
#include <fstream>
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

constexpr std::chrono::seconds timeout(2);    // where it is what is tested
constexpr std::chrono::seconds patience(60);  // where it must not be what ends an operation
constexpr std::chrono::seconds grace(20);     // what a loaded machine may take on top
constexpr int culprit = 1;

void require(bool condition, const std::string& what) {
  if (!condition) throw std::runtime_error("not so: " + what);
}

/// Into this rank's file: mpirun may be cut off, or lose what a process writes before a peer's
/// death.
void report(int rank, const std::string& verdict) {
  std::ofstream("rank." + std::to_string(rank)) << verdict << '\n';
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

/// Two parameters in a bucket each; `in_the_middle` is called when one has been reduced, and says
/// whether to go on.
template <class F>
void train(MpiCommunicator& comm, F in_the_middle) {
  std::vector<float> first(1000, 1), second(1000, 1), gradient(1000, 1);
  std::vector parameters{zero::ParamRef("first", first, gradient),
                         zero::ParamRef("second", second, gradient)};
  zero::ZeroSharded optimizer{zero::Sgd{.lr = 1e-2}, parameters, comm, zero::NoView{4000}};
  for (int i = 0; i < 3; ++i) optimizer.step();
  bool goes_on = true;
  while (goes_on) {
    optimizer.mark_ready(1);
    goes_on = in_the_middle();
    optimizer.step();
  }
}

/// That `f` fails on this rank with an `Error`, whose message has `word`.
template <class Error, class F>
void expect_refusal(const std::string& word, F f) {
  try {
    f();
  } catch (const Error& error) {
    require(std::string(error.what()).find(word) != std::string::npos,
            word + " in " + error.what());
    return;
  }
  require(false, "an error that says " + word);
}

/// Two ranks are told different options; both values stand in the error.
void check_options(bool guilty) {
  zero::MpiOptions options{.timeout = patience, .chunk_bytes = guilty ? 4096U : 8192U};
  const auto make = [&] { const MpiCommunicator comm(MPI_COMM_WORLD, options); };
  expect_refusal<zero::CommunicatorError>("mismatch", make);
  options = {.timeout = patience};
  if (guilty) options.reduction = zero::MpiReduction::native;
  expect_refusal<zero::CommunicatorError>("rank 1 has MpiReduction::native", make);
  options = {.timeout = patience, .chunk_bytes = guilty ? 4096U : 8192U};
  expect_refusal<zero::CommunicatorError>("4096", make);
  expect_refusal<zero::CommunicatorError>("8192", make);

  // A borrowed one learns of it by messages that are too large for it, or too small.
  MPI_Comm own = MPI_COMM_NULL;
  MPI_Comm_dup(MPI_COMM_WORLD, &own);
  zero::MpiCommunicatorRef borrowed(own, options);
  std::vector<float> data(5000, 1);
  const auto sum = [&] { borrowed.all_reduce(std::span(data)).wait(); };
  expect_refusal<zero::CommunicatorError>("mismatch", sum);
  expect_refusal<zero::CommunicatorError>("MpiOptions", sum);
}

/// MPI fails to duplicate a communicator, which by its error handler would end the process.
void check_error_while_duplicating() {
  const auto fails = [](MPI_Comm, int, void*, void*, void*, int*) { return MPI_ERR_OTHER; };
  const auto nothing = [](MPI_Comm, int, void*, void*) { return MPI_SUCCESS; };
  int key = MPI_KEYVAL_INVALID;
  MPI_Comm_create_keyval(fails, nothing, &key, nullptr);
  MPI_Comm_set_attr(MPI_COMM_WORLD, key, nullptr);
  expect_refusal<zero::CommunicatorError>(
      "MPI_Comm_idup", [] { const MpiCommunicator comm(MPI_COMM_WORLD, {.timeout = patience}); });
  MPI_Comm_delete_attr(MPI_COMM_WORLD, key);
  MPI_Comm_free_keyval(&key);
  MPI_Errhandler handler = MPI_ERRHANDLER_NULL;
  MPI_Comm_get_errhandler(MPI_COMM_WORLD, &handler);
  require(handler == MPI_ERRORS_ARE_FATAL, "the error handler is the caller's again");
}

/// The parameters of one rank are others: all ranks say which, and can go on.
void check_parameters(MpiCommunicator& comm, bool guilty) {
  std::vector<float> values(guilty ? 21 : 20, 1), gradient(values);
  std::vector parameters{zero::ParamRef("weight", values, gradient)};
  expect_refusal<zero::UsageError>("('weight') has 21 elements, not 20", [&] {
    zero::ZeroSharded optimizer{zero::Sgd{.lr = 1e-2}, parameters, comm, zero::NoView{4000}};
  });
  comm.barrier().wait();
}

/// The failure of a part is not the whole's.
void check_part(MpiCommunicator& comm, bool guilty) {
  MpiCommunicator part = comm.split(comm.rank() == 0 ? 0 : 1, 0);
  MPI_Barrier(MPI_COMM_WORLD);
  if (comm.rank() == 0) {
    part.barrier().wait();
  } else {
    expect_failure(part, {CommunicatorFailure::aborted}, grace, [&] {
      if (guilty) part.abort("the disk is full");
      part.barrier().wait();
    });
  }
  comm.barrier().wait();
}

void run(const std::string& fault, MpiCommunicator& comm) {
  const bool guilty = comm.rank() == culprit;
  const Clock::duration in_time = timeout + grace;
  std::vector<float> data(5000, 1), all(15000);
  const std::span<float> whole(data);
  comm.all_reduce(whole).wait();
  MPI_Barrier(MPI_COMM_WORLD);  // a rank may hear of a failure before it has seen that end

  if (fault == "kill" || fault == "stop") {
    const int signal = fault == "kill" ? SIGKILL : SIGSTOP;
    std::vector<pid_t> pids(3);
    const pid_t mine = getpid();
    comm.exchange(std::as_bytes(std::span(&mine, 1)), std::as_writable_bytes(std::span(pids)))
        .wait();
    // Who was stopped learns from its peers that they have given up.
    expect_failure(comm, {CommunicatorFailure::timeout}, 2 * in_time, [&] {
      train(comm, [&] {
        if (guilty) std::raise(signal);
        return false;
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
    // A rank that reads the other's memory may see for itself that it is gone.
    expect_failure(comm, {CommunicatorFailure::timeout, CommunicatorFailure::rank_left},
                   2 * in_time, [&] {
                     for (;;) comm.all_reduce(std::span(large)).wait();
                   });
    if (!kills && comm.rank() == 0) kill(pids[culprit], SIGCONT);
    if (other.joinable()) other.join();
  } else if (fault == "split") {
    expect_failure(comm, {CommunicatorFailure::timeout}, in_time, [&] {
      if (guilty) std::raise(SIGKILL);
      const MpiCommunicator part = comm.split(0, 0);
    });
  } else if (fault == "link") {
    // Somebody cuts it when he sees the file, some steps later.
    const Clock::time_point begin = Clock::now();
    expect_failure(comm, {CommunicatorFailure::timeout}, in_time + grace, [&] {
      std::ofstream("started");
      train(comm, [&] { return Clock::now() - begin < 2 * grace; });
    });
  } else if (fault == "notice_kill") {
    // Where MPI sends even a notice in two parts, only the first of which the dead one has sent.
    expect_failure(comm, {CommunicatorFailure::timeout, CommunicatorFailure::aborted}, in_time,
                   [&] {
                     if (guilty) {
                       comm.abort("to be killed");
                       std::raise(SIGKILL);
                     }
                     comm.barrier().wait();
                   });
  } else if (fault == "parameters") {
    check_parameters(comm, guilty);
  } else if (fault == "part") {
    check_part(comm, guilty);
  } else if (fault == "throw") {
    if (guilty) throw std::runtime_error("an error of the caller's");
    expect_failure(comm, {CommunicatorFailure::rank_left}, grace,
                   [&] { comm.all_reduce(whole).wait(); });
  } else if (fault == "operation") {
    expect_failure(comm, {CommunicatorFailure::mismatch}, grace, [&] {
      if (guilty) comm.all_gather(std::span<const float>(whole), std::span(all)).wait();
      comm.all_reduce(whole).wait();
    });
  } else if (fault == "size") {
    expect_failure(comm, {CommunicatorFailure::mismatch}, grace,
                   [&] { comm.all_reduce(guilty ? whole.first(4000) : whole).wait(); });
  } else if (fault == "counts") {
    const std::vector<std::size_t> ours{1, 2, 3}, theirs{1, 3, 2};
    const std::vector<std::size_t>& counts = guilty ? theirs : ours;
    const auto mine = static_cast<std::size_t>(comm.rank());
    expect_failure(comm, {CommunicatorFailure::mismatch}, grace, [&] {
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
    expect_failure(comm, {CommunicatorFailure::aborted}, grace, [&] {
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
    expect_failure(comm, {CommunicatorFailure::aborted}, grace, [&] {
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

/// Without MPI there is an error, and no more.
std::string uninitialised() {
  try {
    expect_refusal<zero::UsageError>("MPI_Init",
                                     [] { const MpiCommunicator comm(MPI_COMM_WORLD); });
    expect_refusal<zero::UsageError>("MPI_Init",
                                     [] { const zero::MpiCommunicatorRef comm(MPI_COMM_WORLD); });
  } catch (const std::exception& error) {
    return error.what();
  }
  return "ok";
}

/// Handles may outlive MPI, but can do nothing.
int after_finalize() {
  std::optional<zero::MpiCommunicatorRef> ref;
  {
    MpiCommunicator comm(MPI_COMM_WORLD, {.timeout = patience});
    ref = comm;
    comm.barrier().wait();
  }
  ref.emplace(MPI_COMM_WORLD);
  ref->barrier().wait();
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
  report(rank, verdict);
  return 0;
}

/// One rank never makes the communicator.
std::string unmade(int rank) {
  if (rank == culprit) {
    std::this_thread::sleep_for(2 * timeout);
    return "ok";
  }
  const Clock::time_point begin = Clock::now();
  try {
    const MpiCommunicator comm(MPI_COMM_WORLD, {.timeout = timeout});
  } catch (const zero::CommunicatorError& error) {
    if (error.failure() != CommunicatorFailure::timeout) return error.what();
    return Clock::now() - begin < timeout + grace ? "ok" : "too late";
  }
  return "a communicator without one of its ranks";
}

/// Whether nobody is lost, so that all can go on and end as if nothing had been.
bool all_live(const std::string& fault) {
  for (const char* word : {"kill", "stop", "absent", "unmade", "split", "link"}) {
    if (fault.find(word) != std::string::npos) return false;
  }
  return true;
}

/// Does what `fault` says, and makes sure that the communicator ends at once.
std::string verdict_of(const std::string& fault, int rank) {
  std::string verdict = "ok";
  Clock::time_point end = Clock::now();
  try {
    if (fault == "unmade") return unmade(rank);
    if (fault == "options") return check_options(rank == culprit), verdict;
    if (fault == "duplicate") return check_error_while_duplicating(), verdict;
    MpiCommunicator comm(MPI_COMM_WORLD,
                         {.timeout = all_live(fault) ? patience : timeout, .teardown = timeout});
    try {
      run(fault, comm);
    } catch (const std::exception& error) {
      if (fault != "throw" || rank != culprit) verdict = error.what();
    }
    end = Clock::now();
  } catch (const std::exception& error) {
    verdict = error.what();
  }
  return Clock::now() - end > timeout + grace ? "the destructor hung" : verdict;
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<std::string> faults(argv + 1, argv + argc);
  const std::string first = faults.empty() ? "" : faults.front();
  std::string verdict = first == "uninitialised" ? uninitialised() : "ok";
  int level = 0;
  MPI_Init_thread(&argc, &argv,
                  first == "abort_multiple" ? MPI_THREAD_MULTIPLE : MPI_THREAD_FUNNELED, &level);
  if (first == "finalized") return after_finalize();
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  bool live = true;
  for (const std::string& fault : faults) {
    if (fault == "uninitialised") continue;
    verdict = verdict_of(fault, rank);
    live = live && all_live(fault);
    if (verdict == "ok") continue;
    verdict = fault + ": " + verdict;
    break;
  }
  if (live && verdict == "ok") {
    try {
      MpiCommunicator again(MPI_COMM_WORLD, {.timeout = patience});
      again.barrier().wait();
    } catch (const std::exception& error) {
      verdict = std::string("a new communicator: ") + error.what();
    }
    MPI_Finalize();
  }
  report(rank, verdict);
  std::_Exit(verdict == "ok" ? 0 : 1);  // as a program must whose peers may be gone
}
