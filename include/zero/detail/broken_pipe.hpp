// SPDX-License-Identifier: Apache-2.0
/// @file
/// Outlive a peer at the other end of a connection.
#pragma once

#include "zero/config.hpp"
#if ZERO_POSIX_SIGNALS
#include <pthread.h>
#include <signal.h>
#endif

namespace zero::detail {

/// While one lives this thread's writes to a connection whose other end is gone fail, as others do,
/// and don't raise the signal that ends the process (measured: Open MPI over TCP, when a peer has
/// died). The process's own handling of it stays as it is.
class BrokenPipeGuard {
#if ZERO_POSIX_SIGNALS
 public:
  BrokenPipeGuard() noexcept {
    sigemptyset(&pipe_);
    sigaddset(&pipe_, SIGPIPE);
    blocked_ = pthread_sigmask(SIG_BLOCK, &pipe_, &former_) == 0 &&
               sigismember(&former_, SIGPIPE) == 0;  // else it is somebody else's doing
  }
  ~BrokenPipeGuard() {
    if (!blocked_) return;
    sigset_t pending;
    int taken = 0;
    if (sigpending(&pending) == 0 && sigismember(&pending, SIGPIPE) == 1) sigwait(&pipe_, &taken);
    pthread_sigmask(SIG_SETMASK, &former_, nullptr);
  }

 private:
  sigset_t pipe_{}, former_{};
  bool blocked_ = false;
#else
 public:
  BrokenPipeGuard() noexcept {}
  ~BrokenPipeGuard() {}
#endif

 public:
  BrokenPipeGuard(const BrokenPipeGuard&) = delete;
  BrokenPipeGuard& operator=(const BrokenPipeGuard&) = delete;
};

}  // namespace zero::detail
