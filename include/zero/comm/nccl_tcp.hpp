// SPDX-License-Identifier: Apache-2.0
/// @file
/// Ranks meet at a port of rank 0's host, as torchrun names it.
#pragma once

#include <nccl.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <string_view>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "zero/detail/nccl_error.hpp"
#include "zero/detail/nccl_id.hpp"
#include "zero/detail/nccl_socket.hpp"
#include "zero/error.hpp"

namespace zero {

/// Rank 0 listens at `port` on all its interfaces; the others connect to `host`, again and again
/// until it is there. Connections that don't speak as this does are left aside: strangers neither
/// disturb nor delay. What travels is neither secret nor authenticated, as NCCL's own bootstrap.
struct NcclTcp {
  std::string host;  ///< a name or an address of rank 0's host
  int port = 0;      ///< 1 to 65535, free on that host
  int rank = 0;
  int size = 1;
  int local_rank = 0;  ///< among the ranks of this host: which device to make current

  /// From MASTER_ADDR, MASTER_PORT, RANK, WORLD_SIZE and LOCAL_RANK. Where torchrun's agent listens
  /// at MASTER_PORT itself (it then sets TORCHELASTIC_USE_AGENT_STORE to True), `port` is
  /// MASTER_PORT + 1. Throws a `UsageError` that names each one that is missing or no number.
  [[nodiscard]] static NcclTcp from_environment() {
    std::string faults;
    const auto text = [&](const char* name) -> std::string {
      const char* value = std::getenv(name);
      if (value != nullptr && *value != '\0') return value;
      faults += std::string("; ") + name + " is not set";
      return {};
    };
    const auto number = [&](const char* name, int least, int most) {
      const std::string value = text(name);
      int x = least;
      const char* const end = value.data() + value.size();
      const auto [stopped, code] = std::from_chars(value.data(), end, x);
      if (!value.empty() && (code != std::errc() || stopped != end || x < least || x > most)) {
        faults += std::string("; ") + name + " is \"" + value + "\", not a number from " +
                  std::to_string(least) + " to " + std::to_string(most);
      }
      return x;
    };
    constexpr int most = 1 << 24;
    NcclTcp tcp;
    tcp.host = text("MASTER_ADDR");
    tcp.port = number("MASTER_PORT", 1, 65535);
    tcp.size = number("WORLD_SIZE", 1, most);
    tcp.rank = number("RANK", 0, most);
    tcp.local_rank = number("LOCAL_RANK", 0, most);
    if (faults.empty() && tcp.rank >= tcp.size) {
      faults = "; RANK is " + std::to_string(tcp.rank) + ", not less than WORLD_SIZE, which is " +
               std::to_string(tcp.size);
    }
    const char* const agent = std::getenv("TORCHELASTIC_USE_AGENT_STORE");
    if (agent != nullptr && std::string_view(agent) == "True" && ++tcp.port > 65535) {
      faults +=
          "; MASTER_PORT is 65535, where torchrun's agent listens "
          "(TORCHELASTIC_USE_AGENT_STORE), and the ranks' own port, the next, is none";
    }
    if (faults.empty()) return tcp;
    throw UsageError("NcclTcp::from_environment: " + faults.substr(2) +
                     "; start the program by torchrun, or set these variables for each process.");
  }

  /// Throws `UsageError`, and `CommunicatorError` where ranks don't come in time: all that have
  /// come then name those that have not. For that, a rank that has reached rank 0 waits longer than
  /// `timeout`, by a quarter of it and 5 s at most.
  [[nodiscard]] ncclUniqueId unique_id(std::chrono::nanoseconds timeout) const {
    detail::check_place("NcclTcp", rank, size);
    if (port < 1 || port > 65535) {
      throw UsageError("NcclTcp: port is " + std::to_string(port) + "; it must be 1 to 65535.");
    }
    if (size == 1) return detail::new_nccl_id();
    const Clock::time_point end = detail::deadline(timeout);
    return rank == 0 ? serve(end, timeout) : ask(end, timeout);
  }

 private:
  using Clock = std::chrono::steady_clock;

  struct Hello {
    char magic[8] = {'z', 'e', 'r', 'o', 'C', 'a', 'l', 'l'};
    std::int32_t rank = 0;
    std::int32_t size = 0;
    std::uint64_t token = 0;  // of the process
  };
  struct Answer {
    char magic[8] = {'z', 'e', 'r', 'o', 'N', 'C', 'C', 'L'};
    ncclUniqueId id{};
    std::int32_t gave_up = 0;  // 1: no fault of who is refused, but rank 0's time is over
    char refusal[512] = {};    // empty: none
  };
  /// Somebody who has connected.
  struct Guest {
    detail::Socket socket;
    Clock::time_point since{};
    std::size_t read = 0;  // bytes of `hello`
    Hello hello{};
  };

  [[nodiscard]] std::string address() const { return host + ":" + std::to_string(port); }

  [[noreturn]] void fail(const std::string& why) const {
    throw CommunicatorError(CommunicatorFailure::timeout, rank, "NcclTcp", 0,
                            "rank " + std::to_string(rank) + ": NcclTcp at " + address() + ": " +
                                why +
                                "; check that all ranks were started, that MASTER_ADDR is rank 0's "
                                "host and that no firewall closes the port, or allow more time "
                                "(NcclOptions::init_timeout).");
  }

  // Rank 0 --------------------------------------------------------------------------------------

  [[nodiscard]] ncclUniqueId serve(Clock::time_point end, std::chrono::nanoseconds timeout) const {
    const detail::Socket listener = detail::listen_at(port);
    Answer answer;
    answer.id = detail::new_nccl_id();
    std::vector<detail::Socket> called(static_cast<std::size_t>(size));
    std::vector<std::uint64_t> tokens(called.size());
    std::vector<Guest> guests;
    int missing = size - 1;
    std::string refused;
    while (missing > 0) {
      while (detail::Socket socket = listener.accept()) {
        guests.push_back({.socket = std::move(socket), .since = Clock::now()});
      }
      for (Guest& guest : guests) {
        if (!hear(guest)) continue;
        const std::string refusal = refuse(guest.hello, called, tokens);
        if (!refusal.empty()) {
          refused = "; refused: " + refusal;
          const Answer no = refusing(refusal);
          (void)guest.socket.send(&no, sizeof no);
          guest.socket = {};
          continue;
        }
        const auto r = static_cast<std::size_t>(guest.hello.rank);
        if (!called[r].is_open()) --missing;
        called[r] = std::move(guest.socket);
        tokens[r] = guest.hello.token;
      }
      std::erase_if(guests, [](const Guest& guest) { return !guest.socket.is_open(); });
      if (missing == 0) break;
      if (Clock::now() >= end) {
        const std::string why = "rank 0 waited " + detail::seconds_of(timeout) +
                                "; these ranks have not come:" + absent(called) + refused;
        Answer no = refusing(why);
        no.gave_up = 1;
        for (const detail::Socket& socket : called) {
          if (socket.is_open()) (void)socket.send(&no, sizeof no);
        }
        fail(why);
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
    for (std::size_t r = 1; r < called.size(); ++r) (void)called[r].send(&answer, sizeof answer);
    return answer.id;
  }

  static Answer refusing(const std::string& why) {
    Answer no;
    std::snprintf(no.refusal, sizeof no.refusal, "%s", why.c_str());
    return no;
  }

  /// " 1 2", with no more ranks than fit into a refusal.
  static std::string absent(const std::vector<detail::Socket>& called) {
    std::string ranks;
    int more = 0;
    for (std::size_t r = 1; r < called.size(); ++r) {
      if (called[r].is_open()) continue;
      if (ranks.size() < 200) {
        ranks += " " + std::to_string(r);
      } else {
        ++more;
      }
    }
    return more == 0 ? ranks : ranks + " and " + std::to_string(more) + " more";
  }

  /// Whether all of its hello is there. Closes those who are no ranks, or too slow for one.
  static bool hear(Guest& guest) {
    char* const to = reinterpret_cast<char*>(&guest.hello);
    const int got = guest.socket.receive(to + guest.read, sizeof guest.hello - guest.read);
    if (got > 0) guest.read += static_cast<std::size_t>(got);
    if (guest.read == sizeof guest.hello) {
      if (std::memcmp(guest.hello.magic, Hello{}.magic, sizeof guest.hello.magic) == 0) return true;
      guest.socket = {};
    } else if (got < 0 || Clock::now() - guest.since > std::chrono::seconds(5)) {
      guest.socket = {};
    }
    return false;
  }

  [[nodiscard]] std::string refuse(const Hello& hello, const std::vector<detail::Socket>& called,
                                   const std::vector<std::uint64_t>& tokens) const {
    if (hello.size != size) {
      return "rank " + std::to_string(hello.rank) + " says that there are " +
             std::to_string(hello.size) + " ranks, rank 0 that there are " + std::to_string(size);
    }
    if (hello.rank < 1 || hello.rank >= size) {
      return "there is no other rank " + std::to_string(hello.rank) + " among " +
             std::to_string(size);
    }
    const auto r = static_cast<std::size_t>(hello.rank);
    if (called[r].is_open() && tokens[r] != hello.token) {
      return "two processes say that they are rank " + std::to_string(hello.rank);
    }
    return {};
  }

  // The others ----------------------------------------------------------------------------------

  [[nodiscard]] ncclUniqueId ask(Clock::time_point end, std::chrono::nanoseconds timeout) const {
    const Hello hello{.rank = rank, .size = size, .token = detail::new_token()};
    // Rank 0, which may have come a little later, says who is missing when it gives up.
    const auto grace = std::min<std::chrono::nanoseconds>(timeout / 4, std::chrono::seconds(5));
    std::string trouble = "nobody listens there";
    while (Clock::now() < end) {
      detail::Socket socket = detail::connect_to(host, port, end, trouble);
      Answer answer;
      if (socket.is_open() && socket.send(&hello, sizeof hello)) {
        if (listen_for(socket, answer, end + grace)) {
          if (answer.refusal[0] == '\0') return answer.id;
          answer.refusal[sizeof answer.refusal - 1] = '\0';
          if (answer.gave_up != 0) fail(answer.refusal);
          throw UsageError("NcclTcp: rank " + std::to_string(rank) + " was refused at " +
                           address() + ": " + answer.refusal +
                           "; give each process its own RANK, and all the same WORLD_SIZE.");
        }
        trouble = "who listens there has not answered as rank 0 does";
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
    fail("waited " + detail::seconds_of(timeout) + ": " + trouble);
  }

  static bool listen_for(const detail::Socket& socket, Answer& answer, Clock::time_point end) {
    char* const to = reinterpret_cast<char*>(&answer);
    std::size_t read = 0;
    while (Clock::now() < end) {
      const int got = socket.receive(to + read, sizeof answer - read);
      if (got < 0) return false;
      read += static_cast<std::size_t>(got);
      constexpr std::size_t magic = sizeof answer.magic;
      if (read >= magic && std::memcmp(answer.magic, Answer{}.magic, magic) != 0) return false;
      if (read == sizeof answer) return true;
      if (got == 0) socket.wait_for_input(end);
    }
    return false;
  }
};

}  // namespace zero
