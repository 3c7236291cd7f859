// SPDX-License-Identifier: Apache-2.0
/// @file
/// Ranks meet at a file that all of them see.
#pragma once

#include <nccl.h>

#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <optional>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "zero/detail/nccl_error.hpp"
#include "zero/detail/nccl_id.hpp"
#include "zero/error.hpp"

namespace zero {

/// Each rank but 0 writes a call beside the file, PATH.RANK, with a number of its own; once
/// all have called, rank 0 writes PATH itself: the unique id, and the numbers that it answers. So
/// an answer that an earlier run has left, killed in the wrong moment, answers nobody, and is
/// replaced. Each rank removes its call when it has been answered, and rank 0 then its answer:
/// nothing stays. The directory must exist. Two runs at one time need two paths.
struct NcclFile {
  std::string path;
  int rank = 0;
  int size = 1;

  /// Throws `UsageError`, and `CommunicatorError` where a rank doesn't come in time.
  [[nodiscard]] ncclUniqueId unique_id(std::chrono::nanoseconds timeout) const {
    detail::check_place("NcclFile", rank, size);
    require_directory();
    const Clock::time_point end = detail::deadline(timeout);
    if (rank == 0) return answer(end, timeout);
    return call(end, timeout);
  }

 private:
  using Clock = std::chrono::steady_clock;
  using Bytes = std::vector<char>;
  static constexpr std::chrono::milliseconds interval{5};

  struct Call {
    char magic[8] = {'z', 'e', 'r', 'o', 'C', 'a', 'l', 'l'};
    std::int32_t rank = 0;
    std::int32_t size = 0;
    std::uint64_t token = 0;
  };
  /// Followed by one token a rank.
  struct Answer {
    char magic[8] = {'z', 'e', 'r', 'o', 'N', 'C', 'C', 'L'};
    ncclUniqueId id{};
    std::uint64_t size = 0;
  };

  /// Rank 0 writes only once all have called: it would wait in vain.
  void require_directory() const {
    const std::filesystem::path directory = std::filesystem::path(path).parent_path();
    std::error_code code;
    if (directory.empty() || std::filesystem::is_directory(directory, code)) return;
    refuse_to_write(path, code ? code : std::make_error_code(std::errc::not_a_directory));
  }

  [[noreturn]] void refuse_to_write(const std::string& to, const std::error_code& code) const {
    throw UsageError("NcclFile: rank " + std::to_string(rank) + " can't write " + to + " (" +
                     code.message() +
                     "); its directory must exist, and all ranks must be able to write there.");
  }

  [[nodiscard]] std::string call_path(int of) const { return path + "." + std::to_string(of); }

  [[noreturn]] void fail(std::chrono::nanoseconds timeout, const std::string& why) const {
    throw CommunicatorError(CommunicatorFailure::timeout, rank, "NcclFile", 0,
                            "rank " + std::to_string(rank) + ": waited " +
                                detail::seconds_of(timeout) + " at " + path + ": " + why +
                                "; check that all ranks were started and see the same directory, "
                                "or allow more time (NcclOptions::init_timeout).");
  }

  [[nodiscard]] ncclUniqueId answer(Clock::time_point end, std::chrono::nanoseconds timeout) const {
    const std::uint64_t token = detail::new_token();
    const Answer head{.id = detail::new_nccl_id(), .size = static_cast<std::uint64_t>(size)};
    std::vector<std::uint64_t> tokens(static_cast<std::size_t>(size));
    tokens[0] = token;
    bool answered = false;
    std::string differing;  // kept: who says so may give up first
    for (;;) {
      std::string missing, waiting;
      bool changed = false;
      for (int r = 1; r < size; ++r) {
        std::uint64_t& known = tokens[static_cast<std::size_t>(r)];
        const std::optional<Call> called = read_call(r);
        if (called && called->size == size) {
          waiting += " " + std::to_string(r);
          changed = changed || called->token != known;
          known = called->token;
        } else if (known == 0) {
          missing += " " + std::to_string(r);
          if (called) {
            differing = "; rank " + std::to_string(r) + " says that there are " +
                        std::to_string(called->size) + " ranks, not " + std::to_string(size);
          }
        }
      }
      if (missing.empty() && (changed || !answered) && size > 1) {
        Bytes bytes(sizeof head + tokens.size() * sizeof tokens[0]);
        std::memcpy(bytes.data(), &head, sizeof head);
        std::memcpy(bytes.data() + sizeof head, tokens.data(), tokens.size() * sizeof tokens[0]);
        write(path, bytes, token);
        answered = true;
      } else if (missing.empty() && waiting.empty()) {
        remove(path);
        return head.id;
      }
      if (Clock::now() >= end) {
        if (answered) remove(path);
        fail(timeout, missing.empty() ? "no sign that these ranks have read the answer:" + waiting
                                      : "these ranks have not come:" + missing + differing);
      }
      std::this_thread::sleep_for(interval);
    }
  }

  [[nodiscard]] ncclUniqueId call(Clock::time_point end, std::chrono::nanoseconds timeout) const {
    const Call mine{.rank = rank, .size = size, .token = detail::new_token()};
    Bytes bytes(sizeof mine);
    std::memcpy(bytes.data(), &mine, sizeof mine);
    write(call_path(rank), bytes, mine.token);
    for (;;) {
      bool other = false;
      const Bytes found = read(path);
      Answer head;
      if (found.size() >= sizeof head) {
        std::memcpy(&head, found.data(), sizeof head);
        std::uint64_t token = 0;
        const std::size_t at = sizeof head + static_cast<std::size_t>(rank) * sizeof token;
        if (at + sizeof token <= found.size()) std::memcpy(&token, found.data() + at, sizeof token);
        const bool ours = std::memcmp(head.magic, Answer{}.magic, sizeof head.magic) == 0 &&
                          head.size == static_cast<std::uint64_t>(size) && token == mine.token;
        if (ours) {
          remove(call_path(rank));
          return head.id;
        }
        other = true;
      }
      if (Clock::now() >= end) {
        remove(call_path(rank));
        fail(timeout, other ? "the file there is none that answers this run (of an earlier one?), "
                              "and rank 0 has not replaced it"
                            : "rank 0 has not answered");
      }
      std::this_thread::sleep_for(interval);
    }
  }

  [[nodiscard]] std::optional<Call> read_call(int of) const {
    const Bytes bytes = read(call_path(of));
    Call call;
    if (bytes.size() != sizeof call) return std::nullopt;
    std::memcpy(&call, bytes.data(), sizeof call);
    if (std::memcmp(call.magic, Call{}.magic, sizeof call.magic) != 0 || call.rank != of) {
      return std::nullopt;
    }
    return call;
  }

  /// Empty where there is nothing.
  static Bytes read(const std::string& from) {
    std::ifstream file(from, std::ios::binary);
    return Bytes(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
  }

  /// Whole or not at all, for whoever reads.
  void write(const std::string& to, const Bytes& bytes, std::uint64_t token) const {
    const std::string temporary = to + "." + std::to_string(token);
    std::ofstream file(temporary, std::ios::binary | std::ios::trunc);
    file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
    file.close();
    std::error_code code;
    if (file) {
      std::filesystem::rename(temporary, to, code);
      if (!code) return;
    } else {
      code = std::error_code(errno, std::generic_category());
    }
    remove(temporary);
    refuse_to_write(to, code);
  }
  static void remove(const std::string& what) {
    std::error_code ignored;
    std::filesystem::remove(what, ignored);
  }
};

}  // namespace zero
