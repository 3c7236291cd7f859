// SPDX-License-Identifier: Apache-2.0
/// @file
/// The fake CUDA runtime: the threads of streams, and kernels that run in them.
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <mutex>
#include <numeric>
#include <utility>

#include "fake/cuda_state.hpp"
#include "fake/emulation.hpp"

#if defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define ZERO_FAKE_TSAN 1
#endif
#endif
#if defined(__SANITIZE_THREAD__)
#define ZERO_FAKE_TSAN 1
#endif

#if defined(ZERO_FAKE_TSAN)
extern "C" {
void AnnotateIgnoreSyncBegin(const char* file, int line);
void AnnotateIgnoreSyncEnd(const char* file, int line);
void AnnotateIgnoreReadsBegin(const char* file, int line);
void AnnotateIgnoreReadsEnd(const char* file, int line);
void AnnotateIgnoreWritesBegin(const char* file, int line);
void AnnotateIgnoreWritesEnd(const char* file, int line);
}
#define ZERO_FAKE_ANNOTATE(what) Annotate##what(__FILE__, __LINE__)
#else
#define ZERO_FAKE_ANNOTATE(what) static_cast<void>(0)
#endif

namespace zero_emulation {

thread_local uint3 thread_index{};
thread_local uint3 block_index{};
thread_local dim3 block_size{};
thread_local dim3 grid_size{};

namespace detail {

namespace {

std::mutex& host_mutex() {
  static std::mutex& mutex = *new std::mutex;
  return mutex;
}

// Through the system call itself, which ThreadSanitizer takes for no order.
void futex(const std::atomic<std::uint32_t>& word, int operation, std::uint32_t value) {
  static_assert(sizeof(word) == sizeof(std::uint32_t));
  (void)syscall(SYS_futex, &word, operation | FUTEX_PRIVATE_FLAG, value, nullptr, nullptr, 0);
}

// splitmix64
std::uint64_t next_random(std::uint64_t& state) {
  std::uint64_t z = state += 0x9e3779b97f4a7c15u;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

// At exit: what destroyed streams still run may use what static objects hold. Work that waits for
// ever does not hold up the process.
struct Drain {
  ~Drain() {
    for (int i = 0; i < 2000 && runtime().streams_draining.load(std::memory_order_relaxed) > 0; ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
};

}  // namespace

HostGuard::HostGuard() {
  ZERO_FAKE_ANNOTATE(IgnoreSyncBegin);
  host_mutex().lock();
  ZERO_FAKE_ANNOTATE(IgnoreSyncEnd);
  ZERO_FAKE_ANNOTATE(IgnoreReadsBegin);
  ZERO_FAKE_ANNOTATE(IgnoreWritesBegin);
}

HostGuard::~HostGuard() {
  ZERO_FAKE_ANNOTATE(IgnoreWritesEnd);
  ZERO_FAKE_ANNOTATE(IgnoreReadsEnd);
  ZERO_FAKE_ANNOTATE(IgnoreSyncBegin);
  host_mutex().unlock();
  ZERO_FAKE_ANNOTATE(IgnoreSyncEnd);
}

Runtime& runtime() {
  static Runtime& all = *new Runtime;
  return all;
}

std::uint64_t& wait_to_ignore() {
  thread_local std::uint64_t count = 0;
  return count;
}

int& current_device() {
  thread_local int device = 0;
  return device;
}

void Ticket::signal() {
  nanoseconds_.store(
      std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count(),
      std::memory_order_relaxed);
  state_.store(1, std::memory_order_release);
  futex(state_, FUTEX_WAKE, INT32_MAX);
}

bool Ticket::is_done() const {
  // An acquiring look at a ticket not yet reached would, to ThreadSanitizer, come after what the
  // ticket's earlier use came after.
  return state_.load(std::memory_order_relaxed) != 0 && state_.load(std::memory_order_acquire) != 0;
}

void Ticket::wait() const {
  while (!is_done()) futex(state_, FUTEX_WAIT, 0);
}

TicketPool::~TicketPool() {
  std::vector<Ticket*>& retired = runtime().retired;
  retired.insert(retired.end(), tickets_.begin(), tickets_.end());
}

Ticket* TicketPool::take() {
  for (Ticket* ticket : tickets_) {
    if (ticket->is_free()) {
      ticket->arm();
      return ticket;
    }
  }
  std::vector<Ticket*>& retired = runtime().retired;
  if (!retired.empty() && retired.back()->is_free()) {
    tickets_.push_back(retired.back());
    retired.pop_back();
  } else {
    tickets_.push_back(new Ticket);
  }
  tickets_.back()->arm();
  return tickets_.back();
}

Stream::Stream(int on_device, unsigned with_flags, int with_priority)
    : device(on_device),
      flags(with_flags),
      priority(with_priority),
      number_(runtime().streams_made++),
      tail_(new Node),
      head_(tail_) {
  static const Drain drain;
  std::thread([this] { work_loop(); }).detach();
}

Stream::~Stream() {
  if (last_signal_ != nullptr) last_signal_->drop();
  delete head_;
}

void Stream::push(Task task) {
  Node* node = new Node;
  node->task = std::move(task);
  ++pushed_;
  Node* before = std::exchange(tail_, node);
  before->next = node;
  before->has_next.store(1, std::memory_order_release);
  // The worker may have freed what is woken here, which wakes nobody then.
  futex(before->has_next, FUTEX_WAKE, 1);
}

Ticket* Stream::mark() {
  Ticket* ticket = tickets_.take();
  signal(ticket);
  return ticket;
}

void Stream::signal(Ticket* ticket) {
  ticket->hold();
  if (last_signal_ != nullptr) last_signal_->drop();
  last_signal_ = ticket;
  ticket->hold();
  push({.kind = Task::Kind::signal, .ticket = ticket});
}

void Stream::wait_for(Ticket* ticket) {
  ticket->hold();
  push({.kind = Task::Kind::wait, .ticket = ticket});
}

bool Stream::is_idle() const {
  return completed_.load(std::memory_order_relaxed) == pushed_ &&
         completed_.load(std::memory_order_acquire) == pushed_ &&
         (last_signal_ == nullptr || last_signal_->is_done());
}

void Stream::work_loop() {
  while (true) {
    // Acquired once it is there, so that a task comes after what came before it was pushed, and not
    // after what came before others were.
    while (head_->has_next.load(std::memory_order_relaxed) == 0)
      futex(head_->has_next, FUTEX_WAIT, 0);
    (void)head_->has_next.load(std::memory_order_acquire);
    delete std::exchange(head_, head_->next);
    if (head_->task.kind == Task::Kind::quit) break;
    run(head_->task);
  }
  {
    const HostGuard guard;
    delete this;
  }
  runtime().streams_draining.fetch_sub(1, std::memory_order_relaxed);
}

void Stream::run(Task& task) {
  Runtime& all = runtime();
  const unsigned longest = all.delay_microseconds.load(std::memory_order_relaxed);
  if (longest > 0) {
    std::uint64_t random = all.delay_seed.load(std::memory_order_relaxed) + (number_ << 32) +
                           completed_.load(std::memory_order_relaxed);
    std::this_thread::sleep_for(std::chrono::microseconds(next_random(random) % (longest + 1)));
  }
  std::atomic<int>& error = all.devices[device].broken;
  switch (task.kind) {
    case Task::Kind::run:
      if (task.always || error.load(std::memory_order_relaxed) == cudaSuccess) {
        try {
          task.body();
        } catch (...) {
          error.store(cudaErrorLaunchFailure, std::memory_order_relaxed);
        }
      }
      task.body = nullptr;
      completed_.fetch_add(1, std::memory_order_release);
      break;
    case Task::Kind::signal:
      // First, so that whoever has waited for the ticket finds the stream idle.
      completed_.fetch_add(1, std::memory_order_release);
      task.ticket->signal();
      task.ticket->drop();
      break;
    case Task::Kind::wait:
      task.ticket->wait();
      task.ticket->drop();
      completed_.fetch_add(1, std::memory_order_release);
      break;
    case Task::Kind::quit: break;
  }
}

cudaError_t launch_grid(cudaStream_t stream, dim3 blocks, dim3 threads,
                        std::function<void()> thread) {
  const std::uint64_t block_count = std::uint64_t{blocks.x} * blocks.y * blocks.z;
  const std::uint64_t thread_count = std::uint64_t{threads.x} * threads.y * threads.z;
  if (block_count == 0 || thread_count == 0 || thread_count > 1024 || blocks.x > INT32_MAX ||
      blocks.y > UINT16_MAX || blocks.z > UINT16_MAX)
    return cudaErrorInvalidConfiguration;
  Stream* found = find(stream);
  if (found->device != current_device()) return cudaErrorInvalidResourceHandle;
  return submit(*found, Work::kernel, [=, thread = std::move(thread)] {
    std::vector<std::uint64_t> order(block_count);
    std::iota(order.begin(), order.end(), std::uint64_t{0});
    std::uint64_t random = runtime().scramble_seed.load(std::memory_order_relaxed);
    if (random != 0) {
      for (std::size_t i = order.size(); i > 1; --i)
        std::swap(order[i - 1], order[next_random(random) % i]);
    }
    block_size = threads;
    grid_size = blocks;
    for (const std::uint64_t block : order) {
      block_index.x = static_cast<unsigned>(block % blocks.x);
      block_index.y = static_cast<unsigned>(block / blocks.x % blocks.y);
      block_index.z = static_cast<unsigned>(block / blocks.x / blocks.y);
      for (thread_index.z = 0; thread_index.z < threads.z; ++thread_index.z)
        for (thread_index.y = 0; thread_index.y < threads.y; ++thread_index.y)
          for (thread_index.x = 0; thread_index.x < threads.x; ++thread_index.x) thread();
    }
  });
}

}  // namespace detail

cudaError_t launch_function(cudaStream_t stream, unsigned blocks, unsigned threads,
                            std::function<void()> body) {
  return detail::call("cudaLaunchKernel", [&] {
    return detail::launch_grid(stream, dim3(blocks), dim3(threads), std::move(body));
  });
}

}  // namespace zero_emulation
