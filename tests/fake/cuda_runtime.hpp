// SPDX-License-Identifier: Apache-2.0
/// @file
/// What tests ask of the fake CUDA runtime beyond CUDA's own functions: counts, faults, delays.
///
/// Where CUDA's documentation leaves open whether something is ordered, it is not; what it allows
/// to wait, waits. Beside that it is CUDA's behaviour, but for allocation in capture, which is
/// refused.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <utility>

namespace zero_emulation {

/// Since the last `reset()`.
struct Counters {
  std::uint64_t launches;               ///< of kernels by the host
  std::uint64_t graph_launches;         ///< of whole graphs; their kernels are not counted again
  std::uint64_t collectives;            ///< by `enqueue`
  std::uint64_t copies;                 ///< cudaMemcpy and its like
  std::uint64_t fills;                  ///< cudaMemset and its like
  std::uint64_t host_functions;         ///< cudaLaunchHostFunc
  std::uint64_t host_synchronizations;  ///< calls that may block the host until the device is done
  std::uint64_t allocations;            ///< of device, managed and pinned memory
  std::uint64_t frees;
  std::uint64_t event_records;
  std::uint64_t stream_waits;
};
[[nodiscard]] Counters counters();

/// What was made and not yet destroyed.
struct Alive {
  std::size_t streams;
  std::size_t events;
  std::size_t allocations;
  std::size_t graphs;  ///< executable ones too
};
[[nodiscard]] Alive alive();

/// Device and managed memory, in bytes as asked for.
[[nodiscard]] std::size_t memory_in_use(int device = 0);
/// The most since the last `reset()`.
[[nodiscard]] std::size_t peak_memory(int device = 0);

/// As a process starts: one device, a driver as new as the runtime, no faults, no delays, counters
/// at zero, no error remembered. What is alive stays so; the device must be idle.
void reset();

/// From now on this many devices; 0: every call fails with cudaErrorNoDevice. At most 64.
void set_devices(int count);
/// As cudaDriverGetVersion says it, e.g. 12040. Older than the runtime's major version: calls fail
/// with cudaErrorInsufficientDriver.
void set_driver_version(int version);
/// Of each device, in bytes.
void set_total_memory(std::size_t bytes);

/// The `nth` call from now on (1: the next) of that function of CUDA's returns `code` and does
/// nothing. A kernel's launch is "cudaLaunchKernel" here too.
void fail(const char* function, int nth, cudaError_t code);
/// The device's work is lost and every call returns `code`, as after an illegal address.
void break_device(int device, cudaError_t code);

/// Before each of its tasks a stream waits up to so long, drawn from the seed. 0: no more.
void delay(std::uint64_t seed, unsigned max_microseconds);
/// The calling thread's `nth` cudaStreamWaitEvent from now on (1: the next), for an event that this
/// thread was the last to record, is accepted and does nothing. 0: none. For tests that each is
/// needed: waits for what other threads recorded are a communicator's.
void ignore_wait(std::uint64_t nth);
/// Whether the wait that was to be ignored has come.
[[nodiscard]] bool wait_was_ignored();

/// Blocks of a kernel run in an order drawn from the seed. 0: in order.
void scramble_blocks(std::uint64_t seed);

/// Enqueues what is no kernel and no copy: a collective. Captured where the stream captures. A body
/// that blocks blocks its stream only. One that owns a `shared_ptr` orders more than CUDA does in
/// the eyes of ThreadSanitizer, by the count of references.
cudaError_t enqueue(cudaStream_t stream, std::function<void()> body);

/// Held by a thread while it is in the fake runtime, whose own allocations are nobody's.
class InRuntime {
 public:
  InRuntime();
  InRuntime(const InRuntime&) = delete;
  InRuntime& operator=(const InRuntime&) = delete;
  ~InRuntime();

  /// Whether the calling thread is.
  [[nodiscard]] static bool now() noexcept;
};

/// From pointers to a kernel's arguments, what a launch runs for each thread.
using Trampoline = std::function<std::function<void()>(void** arguments)>;
/// Makes a kernel that nvcc compiled run as this C++ function of the same parameters.
/// @param mangled_name the device function's, as nvcc registers it
void provide(const char* mangled_name, Trampoline trampoline);

namespace detail {

template <class... P, std::size_t... i>
std::function<void()> bind(void (*kernel)(P...), void** arguments, std::index_sequence<i...>) {
  return [kernel, ... values = *static_cast<P*>(arguments[i])] { kernel(values...); };
}

}  // namespace detail

template <class... P>
void provide(const char* mangled_name, void (*kernel)(P...)) {
  provide(mangled_name, Trampoline([kernel](void** arguments) {
            return detail::bind(kernel, arguments, std::index_sequence_for<P...>());
          }));
}

}  // namespace zero_emulation
