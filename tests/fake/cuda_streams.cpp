// SPDX-License-Identifier: Apache-2.0
/// @file
/// The fake CUDA runtime: streams, events, and kernels' threads.
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
    : device(on_device), flags(with_flags), priority(with_priority), tail_(new Node), head_(tail_) {
  static const Drain drain;
  sem_init(&ready_, 0, 0);
  std::thread([this] { work_loop(); }).detach();
}

Stream::~Stream() {
  if (last_signal_ != nullptr) last_signal_->drop();
  delete head_;
  sem_destroy(&ready_);
}

void Stream::push(Task task) {
  Node* node = new Node;
  node->task = std::move(task);
  ++pushed_;
  tail_->next.store(node, std::memory_order_release);
  tail_ = node;
  // From here on the stream may be gone, where this was its end.
  sem_post(&ready_);
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
  std::uint64_t random = runtime().streams_made.fetch_add(1, std::memory_order_relaxed);
  while (true) {
    while (sem_wait(&ready_) != 0) {  // interrupted by a signal
    }
    Node* next = head_->next.load(std::memory_order_acquire);
    delete std::exchange(head_, next);
    if (next->task.kind == Task::Kind::quit) break;
    run(next->task, random);
  }
  if (head_->task.ticket != nullptr) {
    head_->task.ticket->signal();
    head_->task.ticket->drop();
  }
  {
    const HostGuard guard;  // of the pool of tickets; the thread runs nothing any more
    delete this;
  }
  runtime().streams_draining.fetch_sub(1, std::memory_order_relaxed);
}

void Stream::run(Task& task, std::uint64_t& random) {
  Runtime& all = runtime();
  const unsigned longest = all.delay_microseconds.load(std::memory_order_relaxed);
  if (longest > 0) {
    random ^= all.delay_seed.load(std::memory_order_relaxed);
    std::this_thread::sleep_for(std::chrono::microseconds(next_random(random) % (longest + 1)));
  }
  std::atomic<int>& broken = all.devices[device].broken;
  switch (task.kind) {
    case Task::Kind::run:
      if (broken.load(std::memory_order_relaxed) == cudaSuccess) {
        try {
          task.body();
        } catch (...) {
          broken.store(cudaErrorLaunchFailure, std::memory_order_relaxed);
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

Stream* find(cudaStream_t stream) {
  if (stream == nullptr || stream == cudaStreamLegacy) {
    Device& device = runtime().devices[current_device()];
    if (device.legacy == nullptr)
      device.legacy = new Stream(current_device(), cudaStreamDefault, 0);
    return device.legacy;
  }
  if (stream == cudaStreamPerThread) {
    struct OfThread {
      std::map<int, Stream*> streams;
      ~OfThread() {
        const HostGuard guard;
        for (const auto& [device, each] : streams) destroy(each);
      }
    };
    thread_local OfThread mine;
    Stream*& found = mine.streams[current_device()];
    if (found == nullptr) {
      found = new Stream(current_device(), cudaStreamDefault, 0);
      runtime().devices[current_device()].streams.push_back(found);
    }
    return found;
  }
  return reinterpret_cast<Stream*>(stream);
}

void destroy(Stream* stream) {
  Device& device = runtime().devices[stream->device];
  if (stream->capture != nullptr) {
    stream->capture->invalidated = true;
    std::erase(stream->capture->streams, stream);
  }
  // Later work in the legacy stream comes after this stream's.
  if (device.legacy != nullptr && stream->is_blocking() &&
      stream->work != stream->work_seen_by_legacy) {
    Ticket* end = stream->mark();
    device.legacy->wait_for(end);
    end->drop();
  }
  std::erase(device.streams, stream);
  std::erase_if(device.draining, [](Ticket* ticket) {
    if (!ticket->is_done()) return false;
    ticket->drop();
    return true;
  });
  device.draining.push_back(stream->mark());
  runtime().streams_draining.fetch_add(1, std::memory_order_relaxed);
  stream->push({.kind = Task::Kind::quit});
}

cudaError_t order_with_legacy(Stream& stream) {
  if (!stream.is_blocking()) return cudaSuccess;
  Device& device = runtime().devices[stream.device];
  Stream* legacy = device.legacy;
  if (&stream == legacy) {
    for (Stream* other : device.streams) {
      if (other->is_blocking() && other->capture != nullptr) {
        invalidate(*other);
        return cudaErrorStreamCaptureImplicit;
      }
    }
    for (Stream* other : device.streams) {
      if (!other->is_blocking() || other->work == other->work_seen_by_legacy) continue;
      Ticket* ticket = other->mark();
      legacy->wait_for(ticket);
      ticket->drop();
      other->work_seen_by_legacy = other->work;
    }
  } else if (legacy != nullptr && legacy->work != stream.legacy_work_seen) {
    Ticket* ticket = legacy->mark();
    stream.wait_for(ticket);
    ticket->drop();
    stream.legacy_work_seen = legacy->work;
  }
  return cudaSuccess;
}

cudaError_t submit(Stream& stream, Work work, std::function<void()> body) {
  Counters& counted = runtime().counted;
  switch (work) {
    case Work::kernel: ++counted.launches; break;
    case Work::copy: ++counted.copies; break;
    case Work::fill: ++counted.fills; break;
    case Work::host_function: ++counted.host_functions; break;
    case Work::collective: ++counted.collectives; break;
    case Work::memory: break;
  }
  if (stream.capture != nullptr) return capture_node(stream, std::move(body));
  const cudaError_t code = order_with_legacy(stream);
  if (code != cudaSuccess) return code;
  stream.push({.body = std::move(body)});
  ++stream.work;
  return cudaSuccess;
}

void wait_for_device(int device, Waits& waits) {
  Device& all = runtime().devices[device];
  for (Stream* stream : all.streams) {
    if (stream->capture == nullptr) waits.push_back(stream->mark());
  }
  if (all.legacy != nullptr) waits.push_back(all.legacy->mark());
  for (Ticket* ticket : all.draining) {
    ticket->hold();
    waits.push_back(ticket);
  }
}

void await(Waits& waits) {
  for (Ticket* ticket : waits) {
    ticket->wait();
    ticket->drop();
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

cudaError_t launch(cudaStream_t stream, unsigned blocks, unsigned threads,
                   std::function<void()> body) {
  return detail::call("cudaLaunchKernel", [&] {
    return detail::launch_grid(stream, dim3(blocks), dim3(threads), std::move(body));
  });
}

cudaError_t enqueue(cudaStream_t stream, std::function<void()> body) {
  return detail::call("enqueue", [&] {
    return detail::submit(*detail::find(stream), detail::Work::collective, std::move(body));
  });
}

}  // namespace zero_emulation

using namespace zero_emulation::detail;

namespace {

cudaStream_t handle(Stream* stream) { return reinterpret_cast<cudaStream_t>(stream); }

cudaError_t create(cudaStream_t* stream, unsigned flags, int priority) {
  if (stream == nullptr || (flags & ~unsigned{cudaStreamNonBlocking}) != 0)
    return cudaErrorInvalidValue;
  Stream* made = new Stream(current_device(), flags, std::clamp(priority, -5, 0));
  runtime().devices[current_device()].streams.push_back(made);
  ++runtime().living.streams;
  *stream = handle(made);
  return cudaSuccess;
}

bool is_default(cudaStream_t stream) {
  return stream == nullptr || stream == cudaStreamLegacy || stream == cudaStreamPerThread;
}

// A call that waits for the stream or asks about it ends its capture.
cudaError_t unsupported_in_capture(Stream& stream) {
  if (stream.capture == nullptr) return cudaSuccess;
  invalidate(stream);
  return cudaErrorStreamCaptureUnsupported;
}

Event* find(cudaEvent_t event) { return reinterpret_cast<Event*>(event); }

}  // namespace

cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  return call("cudaStreamCreate", [&] { return create(stream, cudaStreamDefault, 0); });
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  return call("cudaStreamCreateWithFlags", [&] { return create(stream, flags, 0); });
}
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int priority) {
  return call("cudaStreamCreateWithPriority", [&] { return create(stream, flags, priority); });
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  return call("cudaStreamDestroy", [&] {
    if (is_default(stream)) return cudaErrorInvalidResourceHandle;
    --runtime().living.streams;
    destroy(find(stream));
    return cudaSuccess;
  });
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  Waits waits;
  return call(
      "cudaStreamSynchronize",
      [&] {
        Stream& found = *find(stream);
        ++runtime().counted.host_synchronizations;
        cudaError_t code = unsupported_in_capture(found);
        if (code == cudaSuccess) code = order_with_legacy(found);
        if (code == cudaSuccess) waits.push_back(found.mark());
        return code;
      },
      &waits);
}

cudaError_t cudaStreamQuery(cudaStream_t stream) {
  return call("cudaStreamQuery", [&] {
    Stream& found = *find(stream);
    const cudaError_t code = unsupported_in_capture(found);
    if (code != cudaSuccess) return code;
    return found.is_idle() ? cudaSuccess : cudaErrorNotReady;
  });
}

cudaError_t cudaStreamGetDevice(cudaStream_t stream, int* device) {
  return call("cudaStreamGetDevice", [&] {
    *device = find(stream)->device;
    return cudaSuccess;
  });
}
cudaError_t cudaStreamGetFlags(cudaStream_t stream, unsigned* flags) {
  return call("cudaStreamGetFlags", [&] {
    *flags = find(stream)->flags;
    return cudaSuccess;
  });
}
cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* priority) {
  return call("cudaStreamGetPriority", [&] {
    *priority = find(stream)->priority;
    return cudaSuccess;
  });
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  return call("cudaDeviceGetStreamPriorityRange", [&] {
    if (least != nullptr) *least = 0;
    if (greatest != nullptr) *greatest = -5;
    return cudaSuccess;
  });
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  return call("cudaStreamWaitEvent", [&] {
    if (event == nullptr) return cudaErrorInvalidResourceHandle;
    Stream& waiting = *find(stream);
    const Event& awaited = *find(event);
    ++runtime().counted.stream_waits;
    Capture* capture = capture_of(awaited);
    if (capture != nullptr) {
      if (waiting.capture == nullptr) {
        if (is_default(stream) && stream != cudaStreamPerThread)
          return cudaErrorStreamCaptureUnsupported;
        waiting.capture = capture;
        waiting.lane = capture->streams.size();
        capture->streams.push_back(&waiting);
        waiting.frontier.clear();
      } else if (waiting.capture != capture) {
        invalidate(waiting);
        capture->invalidated = true;
        return cudaErrorStreamCaptureMerge;
      }
      for (const std::size_t node : awaited.nodes) {
        if (std::find(waiting.frontier.begin(), waiting.frontier.end(), node) ==
            waiting.frontier.end())
          waiting.frontier.push_back(node);
      }
      return cudaSuccess;
    }
    if (waiting.capture != nullptr) {
      // Of an event that was never recorded nothing is known, so nothing crosses the boundary.
      if (awaited.ticket == nullptr) return cudaSuccess;
      invalidate(waiting);
      return cudaErrorStreamCaptureIsolation;
    }
    if (awaited.ticket == nullptr) return cudaSuccess;
    const cudaError_t code = order_with_legacy(waiting);
    if (code != cudaSuccess) return code;
    waiting.wait_for(awaited.ticket);
    ++waiting.work;
    return cudaSuccess;
  });
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
  return call("cudaLaunchHostFunc", [&] {
    return submit(*find(stream), Work::host_function, [function, data] { function(data); });
  });
}

cudaError_t cudaDeviceSynchronize() {
  Waits waits;
  return call(
      "cudaDeviceSynchronize",
      [&] {
        ++runtime().counted.host_synchronizations;
        for (Stream* stream : runtime().devices[current_device()].streams) {
          const cudaError_t code = unsupported_in_capture(*stream);
          if (code != cudaSuccess) return code;
        }
        wait_for_device(current_device(), waits);
        return cudaSuccess;
      },
      &waits);
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  return call("cudaEventCreateWithFlags", [&] {
    if (event == nullptr ||
        (flags & ~unsigned{cudaEventBlockingSync | cudaEventDisableTiming}) != 0)
      return cudaErrorInvalidValue;
    *event = reinterpret_cast<cudaEvent_t>(new Event{current_device(), flags});
    ++runtime().living.events;
    return cudaSuccess;
  });
}
cudaError_t cudaEventCreate(cudaEvent_t* event) {
  return cudaEventCreateWithFlags(event, cudaEventDefault);
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  return call("cudaEventDestroy", [&] {
    if (event == nullptr) return cudaErrorInvalidResourceHandle;
    if (find(event)->ticket != nullptr) find(event)->ticket->drop();
    delete find(event);
    --runtime().living.events;
    return cudaSuccess;
  });
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return call("cudaEventRecord", [&] {
    if (event == nullptr) return cudaErrorInvalidResourceHandle;
    Event& recorded = *find(event);
    Stream& behind = *find(stream);
    if (recorded.device != behind.device) return cudaErrorInvalidResourceHandle;
    ++runtime().counted.event_records;
    if (behind.capture != nullptr) {
      if (behind.capture->invalidated) return cudaErrorStreamCaptureInvalidated;
      recorded.capture = behind.capture->id;
      recorded.nodes = behind.frontier;
      return cudaSuccess;
    }
    const cudaError_t code = order_with_legacy(behind);
    if (code != cudaSuccess) return code;
    recorded.capture = 0;
    if (recorded.ticket != nullptr) recorded.ticket->drop();
    recorded.ticket = recorded.tickets.take();
    behind.signal(recorded.ticket);
    ++behind.work;
    return cudaSuccess;
  });
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
  return call("cudaEventQuery", [&] {
    if (event == nullptr) return cudaErrorInvalidResourceHandle;
    const Event& asked = *find(event);
    if (Capture* capture = capture_of(asked)) {
      capture->invalidated = true;
      return cudaErrorCapturedEvent;
    }
    const cudaError_t code = forbidden_by_capture();
    if (code != cudaSuccess) return code;
    return asked.ticket == nullptr || asked.ticket->is_done() ? cudaSuccess : cudaErrorNotReady;
  });
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  Waits waits;
  return call(
      "cudaEventSynchronize",
      [&] {
        if (event == nullptr) return cudaErrorInvalidResourceHandle;
        const Event& asked = *find(event);
        ++runtime().counted.host_synchronizations;
        if (Capture* capture = capture_of(asked)) {
          capture->invalidated = true;
          return cudaErrorCapturedEvent;
        }
        const cudaError_t code = forbidden_by_capture();
        if (code == cudaSuccess && asked.ticket != nullptr) {
          asked.ticket->hold();
          waits.push_back(asked.ticket);
        }
        return code;
      },
      &waits);
}

cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t end) {
  return call("cudaEventElapsedTime", [&] {
    if (start == nullptr || end == nullptr) return cudaErrorInvalidResourceHandle;
    const Event& from = *find(start);
    const Event& to = *find(end);
    if (((from.flags | to.flags) & cudaEventDisableTiming) != 0 || from.ticket == nullptr ||
        to.ticket == nullptr)
      return cudaErrorInvalidResourceHandle;
    if (!from.ticket->is_done() || !to.ticket->is_done()) return cudaErrorNotReady;
    *milliseconds =
        static_cast<float>(to.ticket->nanoseconds() - from.ticket->nanoseconds()) * 1e-6F;
    return cudaSuccess;
  });
}
