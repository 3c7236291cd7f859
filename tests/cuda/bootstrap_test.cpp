// SPDX-License-Identifier: Apache-2.0
// How ranks meet before NCCL connects them: by a file, by TCP, over another communicator.
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <filesystem>
#include <fstream>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "catch.hpp"
#include "cuda/nccl_ranks.hpp"
#include "zero/comm/in_process.hpp"
#include "zero/comm/nccl.cuh"
#include "zero/comm/nccl_bootstrap.hpp"
#include "zero/cuda/stream.hpp"
#include "zero/detail/nccl_socket.hpp"

#if ZERO_CUDA_EMULATED
#include "fake/nccl.hpp"
#endif

namespace {

using namespace std::chrono_literals;
using Catch::Matchers::ContainsSubstring;
using zero::CommunicatorError;
using zero::NcclCommunicator;
using zero::NcclFile;
using zero::NcclTcp;

constexpr std::chrono::seconds patient{30};

/// A directory of this test's own, gone at its end.
class Directory {
 public:
  Directory() {
    std::string name = std::filesystem::temp_directory_path() / "zero_bootstrap_XXXXXX";
    if (::mkdtemp(name.data()) == nullptr) throw std::runtime_error("mkdtemp");
    path_ = name;
  }
  ~Directory() { std::filesystem::remove_all(path_); }
  [[nodiscard]] std::string file() const { return path_ / "meet"; }
  [[nodiscard]] bool is_empty() const { return std::filesystem::is_empty(path_); }

 private:
  std::filesystem::path path_;
};

/// What each rank got of `unique_id`, or threw.
struct Met {
  std::vector<ncclUniqueId> ids;
  std::vector<std::exception_ptr> thrown;

  [[nodiscard]] bool all_alike() const {
    for (std::size_t r = 0; r < ids.size(); ++r) {
      if (thrown[r] || std::memcmp(&ids[r], &ids[0], sizeof ids[r]) != 0) return false;
    }
    return true;
  }
  [[nodiscard]] std::string text(std::size_t rank) const {
    try {
      if (thrown[rank]) std::rethrow_exception(thrown[rank]);
    } catch (const std::exception& error) {
      return error.what();
    }
    return {};
  }
};

/// `get(rank)` on threads.
template <class F>
Met meet(int size, F get) {
  Met met{std::vector<ncclUniqueId>(static_cast<std::size_t>(size)),
          std::vector<std::exception_ptr>(static_cast<std::size_t>(size))};
  std::vector<std::thread> threads;
  for (int r = 0; r < size; ++r) {
    threads.emplace_back([&, r] {
      const auto at = static_cast<std::size_t>(r);
      try {
        met.ids[at] = get(r);
      } catch (...) {
        met.thrown[at] = std::current_exception();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return met;
}

/// One that nobody listens at.
int free_port() {
  const zero::detail::Socket socket(::socket(AF_INET, SOCK_STREAM, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  socklen_t length = sizeof address;
  if (::bind(socket.get(), reinterpret_cast<sockaddr*>(&address), sizeof address) != 0 ||
      ::getsockname(socket.get(), reinterpret_cast<sockaddr*>(&address), &length) != 0) {
    throw std::runtime_error("no free port");
  }
  return ntohs(address.sin_port);
}

/// Sets variables of the environment, for as long as it lives.
class Environment {
 public:
  Environment() {
    set("MASTER_ADDR", "127.0.0.1");
    set("MASTER_PORT", "29500");
    set("RANK", "1");
    set("WORLD_SIZE", "4");
    set("LOCAL_RANK", "0");
  }
  ~Environment() {
    for (const std::string& name : names_) ::unsetenv(name.c_str());
  }
  void set(const char* name, const char* value) {
    names_.emplace_back(name);
    ::setenv(name, value, 1);
  }
  void unset(const char* name) { ::unsetenv(name); }

 private:
  std::vector<std::string> names_{};
};

}  // namespace

TEST_CASE("file: ranks meet in any order, and nothing stays", "[bootstrap]") {
  const Directory directory;
  for (int size = 1; size <= 4; ++size) {
    const Met met = meet(size, [&](int rank) {
      // Rank 0 comes first, last, or in between.
      std::this_thread::sleep_for(std::chrono::milliseconds((rank * 7 + size * 5) % 11 * 3));
      return NcclFile{directory.file(), rank, size}.unique_id(patient);
    });
    CHECK(met.all_alike());
    CHECK(directory.is_empty());
  }
}

TEST_CASE("file: what an earlier run left answers nobody", "[bootstrap]") {
  const Directory directory;
  const std::string path = directory.file();
  const auto copy_of = [](const std::string& from) {
    while (!std::filesystem::exists(from)) std::this_thread::yield();
    std::filesystem::copy_file(from, from + "_kept");
  };
  const auto put_back = [](const std::string& name) {
    std::filesystem::rename(name + "_kept", name);
  };
  // Of a run of the same size: a call whose rank was killed, and the answer to it.
  (void)meet(2, [&](int rank) -> ncclUniqueId {
    if (rank == 1) return NcclFile{path, 2, 3}.unique_id(300ms);
    copy_of(path + ".2");
    return {};
  });
  put_back(path + ".2");
  const Met earlier = meet(3, [&](int rank) -> ncclUniqueId {
    if (rank != 2) return NcclFile{path, rank, 3}.unique_id(patient);
    copy_of(path);
    std::filesystem::rename(path + ".2", path + ".2_kept");
    return {};
  });
  CHECK(std::memcmp(&earlier.ids[0], &earlier.ids[1], sizeof earlier.ids[0]) == 0);
  put_back(path);
  put_back(path + ".2");

  for (const int last : {0, 1, 2}) {
    const Met met = meet(3, [&](int rank) {
      if (rank == last) std::this_thread::sleep_for(100ms);
      return NcclFile{path, rank, 3}.unique_id(patient);
    });
    CHECK(met.all_alike());
    CHECK(directory.is_empty());
    std::ofstream(path) << "something else altogether";
    std::ofstream(path + ".2") << "this too";
  }
}

TEST_CASE("file: who is missing is named, and nothing stays", "[bootstrap]") {
  const Directory directory;
  const auto ids = [&](int rank, int size) {
    return NcclFile{directory.file(), rank, size}.unique_id(200ms);
  };
  const Met alone = meet(1, [&](int) { return ids(0, 3); });
  CHECK_THAT(alone.text(0),
             ContainsSubstring("not come: 1 2") && ContainsSubstring("init_timeout"));
  CHECK(directory.is_empty());
  CHECK_THROWS_WITH(ids(1, 3), ContainsSubstring("rank 0 has not answered"));
  CHECK(directory.is_empty());
  std::ofstream(directory.file()) << std::string(4096, 'x');
  CHECK_THROWS_WITH(ids(1, 3), ContainsSubstring("earlier"));
  const Met differ = meet(2, [&](int rank) { return ids(rank, rank == 0 ? 2 : 3); });
  CHECK_THAT(differ.text(0), ContainsSubstring("rank 1 says that there are 3 ranks, not 2"));
  CHECK_THROWS_WITH(ids(2, 2), ContainsSubstring("rank is 2 of 2"));
  // A file is no directory either. Rank 0 doesn't wait for the others before it says so.
  const std::string file = directory.file();
  for (const std::string& path : {std::string("/no/such/directory/file"), file + "/file"}) {
    for (const int rank : {0, 1}) {
      const NcclFile misled{path, rank, 2};
      CHECK_THROWS_AS(misled.unique_id(patient), zero::UsageError);
      CHECK_THROWS_WITH(misled.unique_id(patient), ContainsSubstring("directory must exist"));
    }
  }
}

TEST_CASE("TCP: ranks meet in any order", "[bootstrap]") {
  for (int size = 1; size <= 4; ++size) {
    const int port = free_port();
    for (int round = 0; round < 2; ++round) {  // the same port again, at once
      const Met met = meet(size, [&](int rank) {
        std::this_thread::sleep_for(std::chrono::milliseconds((rank * 7 + size * 5) % 11 * 3));
        return NcclTcp{"localhost", port, rank, size}.unique_id(patient);
      });
      CAPTURE(met.text(0));
      CHECK(met.all_alike());
    }
  }
}

TEST_CASE("TCP: strangers neither disturb nor delay", "[bootstrap]") {
  const int port = free_port();
  const Met met = meet(3, [&](int rank) -> ncclUniqueId {
    if (rank == 0) return NcclTcp{"127.0.0.1", port, 0, 2}.unique_id(patient);
    if (rank == 1) {
      std::this_thread::sleep_for(300ms);
      return NcclTcp{"127.0.0.1", port, 1, 2}.unique_id(patient);
    }
    // One says nothing, one a little, one much, one goes.
    std::string trouble;
    std::vector<zero::detail::Socket> strangers;
    for (const std::string text : {"", "zero", "GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", "x"}) {
      zero::detail::Socket socket;
      while (!socket) {
        socket = zero::detail::connect_to("127.0.0.1", port, std::chrono::steady_clock::now() + 1s,
                                          trouble);
      }
      if (!socket.send(text.data(), text.size())) throw std::runtime_error("can't send");
      if (text != "x") strangers.push_back(std::move(socket));
    }
    std::this_thread::sleep_for(600ms);
    return {};
  });
  CHECK(met.text(0).empty());
  CHECK(met.text(1).empty());
  CHECK(std::memcmp(&met.ids[0], &met.ids[1], sizeof met.ids[0]) == 0);
}

TEST_CASE("TCP: a stranger at the port, then rank 0", "[bootstrap]") {
  const int port = free_port();
  const Met met = meet(2, [&](int rank) -> ncclUniqueId {
    if (rank == 1) return NcclTcp{"127.0.0.1", port, 1, 2}.unique_id(patient);
    {
      const zero::detail::Socket listener = zero::detail::listen_at(port);
      zero::detail::Socket guest;
      while (!guest) guest = listener.accept();
      const std::string text = "220 welcome to some other service, which says this to everybody";
      if (!guest.send(text.data(), text.size())) throw std::runtime_error("can't send");
      std::this_thread::sleep_for(50ms);
    }
    return NcclTcp{"127.0.0.1", port, 0, 2}.unique_id(patient);
  });
  CAPTURE(met.text(0), met.text(1));
  CHECK(met.all_alike());
}

TEST_CASE("TCP: what can't be is refused or times out, with names", "[bootstrap]") {
  const int port = free_port();
  {
    const Met met = meet(3, [&](int rank) {
      // Two processes that say rank 1, and one that counts differently.
      return NcclTcp{"127.0.0.1", port, rank == 0 ? 0 : 1, rank == 2 ? 4 : 3}.unique_id(700ms);
    });
    CHECK_THAT(met.text(0), ContainsSubstring("not come: 2") && ContainsSubstring("refused"));
    CHECK_THAT(met.text(2), ContainsSubstring("says that there are 4 ranks"));
  }
  {
    const Met met = meet(3, [&](int rank) {
      if (rank == 2) std::this_thread::sleep_for(100ms);
      return NcclTcp{"127.0.0.1", port, rank == 0 ? 0 : 1, 3}.unique_id(700ms);
    });
    CHECK_THAT(met.text(2), ContainsSubstring("two processes say that they are rank 1"));
  }
  CHECK_THROWS_WITH((NcclTcp{"127.0.0.1", port, 1, 2}.unique_id(200ms)),
                    ContainsSubstring("can't connect"));
  CHECK_THROWS_WITH((NcclTcp{"no.such.host.invalid", port, 1, 2}.unique_id(200ms)),
                    ContainsSubstring("no.such.host.invalid"));
  CHECK_THROWS_WITH((NcclTcp{"127.0.0.1", 0, 1, 2}.unique_id(200ms)),
                    ContainsSubstring("port is 0"));
  const zero::detail::Socket taken = zero::detail::listen_at(port);
  CHECK_THROWS_WITH((NcclTcp{"127.0.0.1", port, 0, 2}.unique_id(200ms)),
                    ContainsSubstring("can't listen at port " + std::to_string(port)));
}

TEST_CASE("TCP: all that have come name those that have not", "[bootstrap]") {
  const int port = free_port();
  for (const bool rank_0_is_last : {false, true}) {
    const Met met = meet(3, [&](int rank) -> ncclUniqueId {
      if (rank == 0 && rank_0_is_last) std::this_thread::sleep_for(100ms);
      if (rank == 0) return NcclTcp{"127.0.0.1", port, 0, 5}.unique_id(1200ms);
      // Rank 2 is patient, and need not be: it is told.
      return NcclTcp{"127.0.0.1", port, rank, 5}.unique_id(rank == 1 ? 1200ms : patient);
    });
    for (const std::size_t rank : {0U, 1U, 2U}) {
      CHECK_THAT(met.text(rank), ContainsSubstring("rank " + std::to_string(rank) + ": ") &&
                                     ContainsSubstring("rank 0 waited 1.2 s") &&
                                     ContainsSubstring("not come: 3 4;"));
      try {
        if (met.thrown[rank]) std::rethrow_exception(met.thrown[rank]);
      } catch (const CommunicatorError& error) {
        CHECK(error.failure() == zero::CommunicatorFailure::timeout);
        CHECK(error.rank() == static_cast<int>(rank));
      }
    }
  }
  const Met many = meet(2, [&](int rank) {
    return NcclTcp{"127.0.0.1", port, rank, 1000}.unique_id(rank == 0 ? 300ms : patient);
  });
  for (const std::size_t rank : {0U, 1U}) {
    CHECK_THAT(many.text(rank), ContainsSubstring("not come: 2 3 ") && ContainsSubstring(" more;"));
  }
}

TEST_CASE("TCP: the environment as torchrun sets it", "[bootstrap]") {
  Environment environment;
  const NcclTcp tcp = NcclTcp::from_environment();
  CHECK(tcp.host == "127.0.0.1");
  CHECK(tcp.port == 29500);
  CHECK(tcp.rank == 1);
  CHECK(tcp.size == 4);
  CHECK(tcp.local_rank == 0);

  // Whether torchrun's agent listens at MASTER_PORT itself.
  environment.set("TORCHELASTIC_USE_AGENT_STORE", "False");
  CHECK(NcclTcp::from_environment().port == 29500);
  environment.set("TORCHELASTIC_USE_AGENT_STORE", "True");
  CHECK(NcclTcp::from_environment().port == 29501);
  environment.set("MASTER_PORT", "65535");
  CHECK_THROWS_WITH(NcclTcp::from_environment(), ContainsSubstring("MASTER_PORT is 65535"));
  environment.unset("TORCHELASTIC_USE_AGENT_STORE");
  CHECK(NcclTcp::from_environment().port == 65535);

  environment.unset("RANK");
  environment.set("WORLD_SIZE", "four");
  environment.set("MASTER_PORT", "65536");
  environment.set("LOCAL_RANK", "");
  CHECK_THROWS_AS(NcclTcp::from_environment(), zero::UsageError);
  CHECK_THROWS_WITH(
      NcclTcp::from_environment(),
      ContainsSubstring("RANK is not set") && ContainsSubstring("LOCAL_RANK is not set") &&
          ContainsSubstring("WORLD_SIZE is \"four\"") &&
          ContainsSubstring("MASTER_PORT is \"65536\"") && ContainsSubstring("torchrun"));
  environment.set("MASTER_PORT", "29500");
  environment.set("LOCAL_RANK", "0");
  environment.set("RANK", "4");
  environment.set("WORLD_SIZE", "4");
  CHECK_THROWS_WITH(NcclTcp::from_environment(), ContainsSubstring("RANK is 4"));
  environment.set("RANK", "-1");
  environment.set("WORLD_SIZE", "4 ");
  CHECK_THROWS_WITH(NcclTcp::from_environment(),
                    ContainsSubstring("RANK is \"-1\"") && ContainsSubstring("\"4 \""));
}

TEST_CASE("NCCL: a process without devices has no ranks", "[bootstrap]") {
  CHECK_THROWS_AS(NcclCommunicator::local({}), zero::UsageError);
  CHECK_THROWS_WITH(NcclCommunicator::local({}), ContainsSubstring("no devices"));
}

TEST_CASE("NCCL: communicators by each way to meet", "[bootstrap]") {
  const int size = nccl_ranks::largest_world();
  const Directory directory;
  const int port = free_port();
  zero::InProcessWorld world(size);
  CHECK_NOTHROW(nccl_ranks::rethrow_any(nccl_ranks::run_threads(size, [&](int rank) {
    const zero::cuda::Stream stream;
    zero::InProcessCommunicator host = world.communicator(rank);
    const auto check = [&](NcclCommunicator comm) {
      if (comm.rank() != rank || comm.size() != size) throw std::runtime_error("who it is");
      comm.barrier().wait();
    };
    check(NcclCommunicator(NcclFile{directory.file(), rank, size}, stream));
    check(NcclCommunicator(NcclTcp{"127.0.0.1", port, rank, size}, stream));
    check(NcclCommunicator(zero::NcclOver(host), stream));
    host.barrier().wait();  // it is as it was
  })));
  CHECK(directory.is_empty());
}

#if ZERO_CUDA_EMULATED

TEST_CASE("NCCL: that rank 0 has no unique id is known to all", "[bootstrap]") {
  zero_emulation::nccl::reset();
  zero_emulation::nccl::fail_call("ncclGetUniqueId", ncclSystemError);
  zero::InProcessWorld world(3);
  const Met met = meet(3, [&](int rank) {
    zero::InProcessCommunicator host = world.communicator(rank);
    return zero::NcclOver(host).unique_id(patient);
  });
  for (std::size_t rank = 0; rank < 3; ++rank) {
    CHECK_THAT(met.text(rank), ContainsSubstring("ncclGetUniqueId"));
  }
  zero_emulation::nccl::reset();
}

#endif
