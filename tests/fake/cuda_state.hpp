// SPDX-License-Identifier: Apache-2.0
/// @file
/// The inside of the fake CUDA runtime: streams with a thread each, and what orders them.
///
/// ThreadSanitizer shall report work that CUDA does not order. So nothing here may order what CUDA
/// leaves open: state of the host's side is guarded by a lock that ThreadSanitizer does not see
/// (`HostGuard`) and workers take once they are done; a stream's thread and the host share only its
/// queue, whose one direction is from the host to the stream, and tickets, which order what waits
/// for one after what came before it in its stream. All else that both touch is relaxed.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "fake/cuda_runtime.hpp"

namespace zero_emulation::detail {

/// Held while the host's side of the runtime is read or changed, never while anything is awaited.
class HostGuard {
 public:
  HostGuard();
  HostGuard(const HostGuard&) = delete;
  HostGuard& operator=(const HostGuard&) = delete;
  ~HostGuard();
};

/// A point in a stream's work, reached once. Reused once nobody refers to it, and never freed while
/// the process runs, so that dropping it needs no order.
class Ticket {
 public:
  [[nodiscard]] bool is_free() const { return references_.load(std::memory_order_relaxed) == 0; }
  void arm() {
    state_.store(0, std::memory_order_relaxed);
    hold();
  }
  void hold() { references_.fetch_add(1, std::memory_order_relaxed); }
  void drop() { references_.fetch_sub(1, std::memory_order_relaxed); }

  /// What came before in the caller's thread comes before what waits for the ticket.
  void signal();
  [[nodiscard]] bool is_done() const;
  void wait() const;
  /// As `is_done`, but orders nothing.
  [[nodiscard]] bool has_passed() const { return state_.load(std::memory_order_relaxed) != 0; }
  /// When it was reached.
  [[nodiscard]] std::int64_t nanoseconds() const {
    return nanoseconds_.load(std::memory_order_relaxed);
  }

 private:
  std::atomic<std::uint32_t> state_{0};
  std::atomic<std::uint32_t> references_{0};
  std::atomic<std::int64_t> nanoseconds_{0};
};

/// Tickets of one owner.
class TicketPool {
 public:
  TicketPool() = default;
  TicketPool(const TicketPool&) = delete;
  TicketPool& operator=(const TicketPool&) = delete;
  ~TicketPool();

  /// Armed, held once.
  [[nodiscard]] Ticket* take();

 private:
  std::vector<Ticket*> tickets_;
};

struct Task {
  enum class Kind { run, signal, wait, quit };
  Kind kind = Kind::run;
  std::function<void()> body = {};
  Ticket* ticket = nullptr;
  bool always = false;  // be the device broken or not
};

struct Capture;

/// A queue and the thread that runs it. `destroy` ends the thread, which frees the stream.
class Stream {
 public:
  Stream(int on_device, unsigned with_flags, int with_priority);
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  void push(Task task);
  /// Pushes a signal. The ticket is held once more, for the caller.
  [[nodiscard]] Ticket* mark();
  void signal(Ticket* ticket);
  void wait_for(Ticket* ticket);
  /// Whether all that was pushed is done; if so, comes after it.
  [[nodiscard]] bool is_idle() const;
  [[nodiscard]] bool is_blocking() const { return (flags & cudaStreamNonBlocking) == 0; }

  const int device;
  const unsigned flags;
  const int priority;
  // Of work that others may have to wait for; not of signals.
  std::uint64_t work = 0;
  std::uint64_t work_seen_by_legacy = 0;
  std::uint64_t legacy_work_seen = 0;
  Capture* capture = nullptr;
  std::vector<std::size_t> frontier;  // of the capture: what the next node comes after
  std::size_t lane = 0;               // in the capture

 private:
  struct Node {
    Task task;
    Node* next = nullptr;
    std::atomic<std::uint32_t> has_next{0};
  };

  void work_loop();
  void run(Task& task);
  ~Stream();

  const std::uint64_t number_;
  TicketPool tickets_;
  std::uint64_t pushed_ = 0;
  Ticket* last_signal_ = nullptr;  // pushed last
  Node* tail_;
  std::atomic<std::uint64_t> completed_{0};
  Node* head_;  // the worker's; its task is done
};

struct Event {
  int device;
  unsigned flags;
  Ticket* ticket = nullptr;  // null: never recorded
  TicketPool tickets = {};
  std::uint64_t capture = 0;  // the one it was recorded in; 0: none
  std::vector<std::size_t> nodes = {};
  std::thread::id recorder = {};
};

enum class Work { kernel, copy, fill, host_function, collective, memory };

struct GraphNode {
  std::function<void()> body;
  std::vector<std::size_t> dependencies;
  std::size_t lane;
};

struct Capture {
  std::uint64_t id;
  Stream* origin;
  std::thread::id thread;
  cudaStreamCaptureMode mode;
  bool invalidated = false;
  std::vector<GraphNode> nodes = {};
  std::vector<Stream*> streams = {};  // by lane
};

struct Block {
  std::size_t size;
  cudaMemoryType type;
  int device;
  bool owned;  // not registered only
};

struct Device {
  Stream* legacy = nullptr;
  std::vector<Stream*> streams = {};   // without the legacy one
  std::vector<Ticket*> draining = {};  // the last of destroyed streams
  std::atomic<int> broken{cudaSuccess};
  std::size_t in_use = 0;
  std::size_t peak = 0;
  std::uint64_t peers = 0;  // bit d: access to device d is enabled
};

struct Fault {
  std::string function;
  int remaining;
  cudaError_t code;
};

inline constexpr int max_devices = 64;

/// All state of the host's side; guarded by `HostGuard`, but for the atomics.
struct Runtime {
  Device devices[max_devices];
  int device_count = 1;
  int driver_version = CUDART_VERSION;
  std::size_t total_memory = std::size_t{16} << 30;
  std::map<std::uintptr_t, Block> blocks = {};
  std::vector<Fault> faults = {};
  std::vector<Ticket*> retired = {};
  std::map<std::uint64_t, std::unique_ptr<Capture>> captures = {};
  std::uint64_t last_capture = 0;
  std::map<std::string, Trampoline> trampolines = {};
  std::map<const void*, std::string> kernels = {};  // by the host's stub: the device's name
  Counters counted = {};
  Alive living = {};
  std::atomic<std::uint64_t> delay_seed{0};
  std::atomic<unsigned> delay_microseconds{0};
  std::atomic<std::uint64_t> scramble_seed{0};
  std::uint64_t streams_made = 0;
  std::atomic<int> streams_draining{0};
};
[[nodiscard]] Runtime& runtime();

/// Of the calling thread.
[[nodiscard]] int& current_device();
/// How many waits from now one is ignored; 0: none.
[[nodiscard]] std::uint64_t& wait_to_ignore();

/// What a call waits for once it has let go of the lock, and the device that may have broken
/// meanwhile.
struct Waits {
  std::vector<Ticket*> tickets = {};
  int device = current_device();
};

[[nodiscard]] inline cudaError_t broken(int device) {
  return static_cast<cudaError_t>(runtime().devices[device].broken.load(std::memory_order_relaxed));
}

// In a call, under the lock:

/// The error that a call of this name ends with before it does anything, but for a broken device's.
[[nodiscard]] cudaError_t admit(const char* function);
/// What the handle stands for, which may be one of the default streams.
[[nodiscard]] Stream* find(cudaStream_t stream);
/// Of a call that CUDA calls unsafe while somebody captures.
[[nodiscard]] cudaError_t forbidden_by_capture();
/// Enqueues or captures.
[[nodiscard]] cudaError_t submit(Stream& stream, Work work, std::function<void()> body);
/// Before work goes into the stream: what the legacy default stream's rules make it wait for.
[[nodiscard]] cudaError_t order_with_legacy(Stream& stream);
void destroy(Stream* stream);
void wait_for_device(int device, Waits& waits);
[[nodiscard]] cudaError_t capture_node(Stream& stream, std::function<void()> body);
void invalidate(Stream& stream);
/// Of a stream that is destroyed while it captures.
void leave_capture(Stream& stream);
/// The live capture that the event was recorded in.
[[nodiscard]] Capture* capture_of(const Event& event);

/// Remembers the error for cudaGetLastError.
cudaError_t note(cudaError_t code);
void await(Waits& waits);

/// A function of CUDA's: refused, or its body under the lock; then waits.
template <class Body>
cudaError_t call(const char* function, const Body& body, Waits* waits = nullptr) {
  const InRuntime inside;
  cudaError_t code = cudaSuccess;
  {
    const HostGuard guard;
    code = admit(function);
    if (code == cudaSuccess) code = broken(current_device());
    if (code == cudaSuccess) code = body();
  }
  if (waits != nullptr && code == cudaSuccess) {
    await(*waits);
    code = broken(waits->device);
  }
  return note(code);
}

/// As `call`, of a function that gives something back: of a broken device too, though it fails.
template <class Body>
cudaError_t release_call(const char* function, const Body& body, Waits* waits = nullptr) {
  cudaError_t code = cudaSuccess;
  {
    const HostGuard guard;
    code = admit(function);
    if (code == cudaSuccess) code = body();
  }
  if (code != cudaSuccess) return note(code);
  if (waits != nullptr) await(*waits);
  return note(broken(current_device()));
}

/// A kernel over a grid; `thread` runs once for each thread.
[[nodiscard]] cudaError_t launch_grid(cudaStream_t stream, dim3 blocks, dim3 threads,
                                      std::function<void()> thread);

}  // namespace zero_emulation::detail
