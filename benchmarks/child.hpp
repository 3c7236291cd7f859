// SPDX-License-Identifier: Apache-2.0
// Measuring in a process of its own.
#pragma once

#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <exception>
#include <stdexcept>
#include <type_traits>

namespace bench {

/// What `body()` returns in a child, whose peak of memory nobody else has part in, and whose memory
/// is gone with it.
template <class F>
auto in_child(F&& body) {
  using Measured = decltype(body());
  static_assert(std::is_trivially_copyable_v<Measured>);
  std::array<int, 2> ends{};
  if (pipe(ends.data()) != 0) throw std::runtime_error("no pipe");
  std::fflush(nullptr);
  const pid_t child = fork();
  if (child < 0) throw std::runtime_error("no process");
  if (child == 0) {
    int status = 1;
    try {
      const Measured measured = body();
      status = write(ends[1], &measured, sizeof measured) == sizeof measured ? 0 : 1;
    } catch (const std::exception& exception) {
      std::fprintf(stderr, "%s\n", exception.what());
    }
    _exit(status);
  }
  close(ends[1]);
  Measured measured{};
  const bool whole = read(ends[0], &measured, sizeof measured) == sizeof measured;
  close(ends[0]);
  int status = 0;
  waitpid(child, &status, 0);
  if (!whole || status != 0) throw std::runtime_error("the measuring process failed");
  return measured;
}

}  // namespace bench
