// SPDX-License-Identifier: Apache-2.0
#undef _FORTIFY_SOURCE  // which has definitions of its own of some of these
#include "checkpoint/crash_calls.hpp"

#include <dlfcn.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/types.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdarg>
#include <cstddef>
#include <cstdio>
#include <functional>
#include <mutex>
#include <string>
#include <utility>

namespace {

/// The next function of that name after this program's.
template <class F>
F next(const char* name) {
  return reinterpret_cast<F>(::dlsym(RTLD_NEXT, name));
}
using Open = int (*)(const char*, int, ...);
using Pwrite = ssize_t (*)(int, const void*, size_t, off_t);
using Fsync = int (*)(int);
using Rename = int (*)(const char*, const char*);
using Remove = int (*)(const char*);

Pwrite next_pwrite() {
  static const auto function = next<Pwrite>("pwrite");
  return function;
}

std::mutex mutex;  // of what follows
std::function<int(const calls::Call&)> before;
bool kills = false;
std::size_t left = 0;

[[noreturn]] void die() {
  ::raise(SIGKILL);
  ::_exit(1);
}

std::string path_of(int file) {
  std::array<char, 4096> path{};
  const ssize_t bytes =
      ::readlink(("/proc/self/fd/" + std::to_string(file)).c_str(), path.data(), path.size());
  return {path.data(), bytes < 0 ? 0 : static_cast<std::size_t>(bytes)};
}

/// 0, or the error that the call is to fail with.
template <class Half>
int refusal(calls::Kind kind, std::string path, Half&& half) {
  const std::lock_guard lock(mutex);
  if (kills && left-- == 0) {
    half();
    die();
  }
  return before ? before({kind, std::move(path)}) : 0;
}
int refusal(calls::Kind kind, std::string path) {
  return refusal(kind, std::move(path), [] {});
}

template <class F>
int unless_refused(int error, F&& call) {
  if (error == 0) return call();
  errno = error;
  return -1;
}

}  // namespace

namespace calls {

Watch::Watch(std::function<int(const Call&)> function) {
  const std::lock_guard lock(mutex);
  before = std::move(function);
}
Watch::~Watch() {
  const std::lock_guard lock(mutex);
  before = nullptr;
}

KillAt::KillAt(std::size_t last) {
  const std::lock_guard lock(mutex);
  kills = true;
  left = last;
}
KillAt::~KillAt() {
  const std::lock_guard lock(mutex);
  kills = false;
}

}  // namespace calls

// In place of the C library's.
extern "C" {

int open(const char* path, int flags, ...) {
  static const auto function = next<Open>("open");
  std::va_list more;
  va_start(more, flags);
  const unsigned mode = (flags & O_CREAT) != 0 ? va_arg(more, unsigned) : 0U;
  va_end(more);
  const int error = (flags & O_CREAT) != 0 ? refusal(calls::Kind::open_new, path) : 0;
  return unless_refused(error, [&] { return function(path, flags, mode); });
}

ssize_t pwrite(int file, const void* from, size_t bytes, off_t offset) {
  const int error = refusal(calls::Kind::write, path_of(file),
                            [&] { (void)next_pwrite()(file, from, bytes / 2, offset); });
  if (error == 0) return next_pwrite()(file, from, bytes, offset);
  errno = error;
  return -1;
}

int fsync(int file) {
  static const auto function = next<Fsync>("fsync");
  return unless_refused(refusal(calls::Kind::sync, path_of(file)), [&] { return function(file); });
}

int rename(const char* from, const char* to) {
  static const auto function = next<Rename>("rename");
  return unless_refused(refusal(calls::Kind::rename, to), [&] { return function(from, to); });
}

int unlink(const char* path) noexcept {
  static const auto function = next<Remove>("unlink");
  return unless_refused(refusal(calls::Kind::remove, path), [&] { return function(path); });
}

/// Which the standard library's `std::filesystem::remove` calls.
int remove(const char* path) {
  static const auto function = next<Remove>("remove");
  return unless_refused(refusal(calls::Kind::remove, path), [&] { return function(path); });
}

}  // extern "C"
