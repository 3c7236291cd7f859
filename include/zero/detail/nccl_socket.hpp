// SPDX-License-Identifier: Apache-2.0
/// @file
/// The little of TCP that ranks need to meet. Nothing here blocks for long, or raises SIGPIPE.
#pragma once

#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <system_error>
#include <utility>

#include "zero/error.hpp"

namespace zero::detail {

/// Owns a descriptor that doesn't block.
class Socket {
 public:
  Socket() = default;
  explicit Socket(int descriptor) noexcept : descriptor_(descriptor) {
    if (descriptor_ >= 0) (void)::fcntl(descriptor_, F_SETFL, O_NONBLOCK);
  }
  Socket(Socket&& other) noexcept : descriptor_(std::exchange(other.descriptor_, -1)) {}
  Socket& operator=(Socket&& other) noexcept {
    Socket(std::move(other)).swap(*this);
    return *this;
  }
  ~Socket() {
    if (descriptor_ >= 0) (void)::close(descriptor_);
  }

  [[nodiscard]] bool is_open() const noexcept { return descriptor_ >= 0; }
  explicit operator bool() const noexcept { return is_open(); }
  [[nodiscard]] int get() const noexcept { return descriptor_; }

  /// Closed where nobody waits.
  [[nodiscard]] Socket accept() const noexcept {
    return Socket(::accept4(descriptor_, nullptr, nullptr, SOCK_CLOEXEC));
  }

  /// Whether all of it is on its way; little fits into the system's buffer at once.
  [[nodiscard]] bool send(const void* data, std::size_t bytes) const noexcept {
    return ::send(descriptor_, data, bytes, MSG_NOSIGNAL) == static_cast<ssize_t>(bytes);
  }

  /// How much there was; 0: nothing yet; less: the other end is gone.
  [[nodiscard]] int receive(void* to, std::size_t bytes) const noexcept {
    if (bytes == 0) return 0;
    const ssize_t got = ::recv(descriptor_, to, bytes, 0);
    if (got > 0) return static_cast<int>(got);
    if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) return 0;
    return -1;
  }

  void wait_for_input(std::chrono::steady_clock::time_point end) const noexcept {
    (void)wait_for(POLLIN, end);
  }
  /// Whether it has happened, within at most a second.
  bool wait_for(short events, std::chrono::steady_clock::time_point end) const noexcept {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(
        end - std::chrono::steady_clock::now());
    pollfd what{.fd = descriptor_, .events = events, .revents = 0};
    const auto most = std::clamp<std::chrono::milliseconds::rep>(left.count(), 0, 1000);
    return ::poll(&what, 1, static_cast<int>(most)) > 0;
  }

 private:
  void swap(Socket& other) noexcept { std::swap(descriptor_, other.descriptor_); }

  int descriptor_ = -1;
};

/// Throws `UsageError`.
inline Socket listen_at(int port) {
  const auto bind_to = [&](const auto& address, int family) {
    Socket socket(::socket(family, SOCK_STREAM | SOCK_CLOEXEC, 0));
    const int on = 1, off = 0;
    if (!socket) return socket;
    (void)::setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (family == AF_INET6) {  // for both families
      (void)::setsockopt(socket.get(), IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);
    }
    if (::bind(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0 ||
        ::listen(socket.get(), SOMAXCONN) != 0) {
      const int code = errno;
      socket = {};
      errno = code;
    }
    return socket;
  };
  sockaddr_in6 six{};
  six.sin6_family = AF_INET6;
  six.sin6_port = htons(static_cast<std::uint16_t>(port));
  Socket socket = bind_to(six, AF_INET6);
  if (!socket && errno != EADDRINUSE && errno != EACCES) {  // a host without IPv6
    sockaddr_in four{};
    four.sin_family = AF_INET;
    four.sin_port = six.sin6_port;
    socket = bind_to(four, AF_INET);
  }
  if (socket) return socket;
  const std::string reason = std::generic_category().message(errno);
  throw UsageError("NcclTcp: rank 0 can't listen at port " + std::to_string(port) + " (" + reason +
                   "); choose a free one, the same on all ranks (NcclTcp::port).");
}

/// Closed where it fails within a second; `trouble` then says why.
inline Socket connect_to(const std::string& host, int port,
                         std::chrono::steady_clock::time_point end, std::string& trouble) {
  addrinfo wanted{};
  wanted.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  const int code = ::getaddrinfo(host.c_str(), std::to_string(port).c_str(), &wanted, &found);
  if (code != 0) {
    trouble = "the host is not known (" + std::string(::gai_strerror(code)) + ")";
    return {};
  }
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> addresses(found, ::freeaddrinfo);
  for (const addrinfo* each = found; each != nullptr; each = each->ai_next) {
    Socket socket(::socket(each->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
    if (!socket) continue;
    int error = ::connect(socket.get(), each->ai_addr, each->ai_addrlen) == 0 ? 0 : errno;
    if (error == EINPROGRESS) {
      socklen_t length = sizeof error;
      if (!socket.wait_for(POLLOUT, end)) {
        error = ETIMEDOUT;
      } else if (::getsockopt(socket.get(), SOL_SOCKET, SO_ERROR, &error, &length) != 0) {
        error = errno;
      }
    }
    if (error == 0) return socket;
    trouble = "can't connect (" + std::generic_category().message(error) + ")";
  }
  return {};
}

}  // namespace zero::detail
