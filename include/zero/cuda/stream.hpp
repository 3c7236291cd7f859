// SPDX-License-Identifier: Apache-2.0
/// @file
/// Streams and events as strong types: what is the caller's is viewed, what is made here is owned.
#pragma once

#include <cuda_runtime_api.h>

#include <utility>

#include "zero/cuda/error.hpp"

namespace zero::cuda {

class Event;

/// A stream of somebody's. Not made from an integer or a null pointer by accident.
class StreamView {
 public:
  /// The legacy default stream.
  constexpr StreamView() noexcept = default;
  // NOLINTNEXTLINE(google-explicit-constructor): a stream is one, whoever made it
  constexpr StreamView(cudaStream_t stream) noexcept : stream_(stream) {}
  StreamView(int) = delete;
  StreamView(std::nullptr_t) = delete;

  [[nodiscard]] constexpr cudaStream_t get() const noexcept { return stream_; }

  /// What is enqueued from now on comes after what `event` was recorded behind.
  void wait(const Event& event) const;
  /// cudaErrorNotReady while the stream is not idle; likewise not left for cudaGetLastError.
  [[nodiscard]] cudaError_t query() const noexcept {
    const cudaError_t code = cudaStreamQuery(stream_);
    if (code == cudaErrorNotReady) (void)cudaGetLastError();
    return code;
  }
  /// Blocks the host until the stream is idle.
  void synchronize() const { check(cudaStreamSynchronize(stream_), "cudaStreamSynchronize"); }

  friend constexpr bool operator==(StreamView, StreamView) noexcept = default;

 private:
  cudaStream_t stream_ = nullptr;
};

/// A stream of one's own, on the device that is current when it is made, which does not wait for
/// the legacy default stream. Destroyed once idle, without waiting.
class Stream {
 public:
  Stream() {
    check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate");
  }
  Stream(Stream&& other) noexcept : stream_(std::exchange(other.stream_, nullptr)) {}
  Stream& operator=(Stream&& other) noexcept {
    std::swap(stream_, other.stream_);
    return *this;
  }
  ~Stream() {
    if (stream_ != nullptr) (void)cudaStreamDestroy(stream_);
  }

  [[nodiscard]] StreamView view() const noexcept { return StreamView(stream_); }
  // NOLINTNEXTLINE(google-explicit-constructor): an owner serves where a view is asked for
  operator StreamView() const noexcept { return view(); }
  void synchronize() const { view().synchronize(); }

 private:
  cudaStream_t stream_ = nullptr;
};

/// A mark in a stream, without timing. On the device that is current when it is made.
class Event {
 public:
  Event() {
    check(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming), "cudaEventCreateWithFlags");
  }
  Event(Event&& other) noexcept : event_(std::exchange(other.event_, nullptr)) {}
  Event& operator=(Event&& other) noexcept {
    std::swap(event_, other.event_);
    return *this;
  }
  ~Event() {
    if (event_ != nullptr) (void)cudaEventDestroy(event_);
  }

  [[nodiscard]] cudaEvent_t get() const noexcept { return event_; }
  void record(StreamView stream) const {
    check(cudaEventRecord(event_, stream.get()), "cudaEventRecord");
  }
  /// Whether what it was last recorded behind is done; true where it never was recorded. Throws the
  /// `CudaError` of what failed before it.
  [[nodiscard]] bool done() const {
    const cudaError_t code = query();
    if (code == cudaErrorNotReady) return false;
    check(code, "cudaEventQuery");
    return true;
  }
  /// cudaErrorNotReady while it is not done; it is not left for the next cudaGetLastError, where
  /// the caller's own code would take it for a failure.
  [[nodiscard]] cudaError_t query() const noexcept {
    const cudaError_t code = cudaEventQuery(event_);
    if (code == cudaErrorNotReady) (void)cudaGetLastError();
    return code;
  }
  /// Blocks the host.
  void synchronize() const { check(cudaEventSynchronize(event_), "cudaEventSynchronize"); }

 private:
  cudaEvent_t event_ = nullptr;
};

inline void StreamView::wait(const Event& event) const {
  check(cudaStreamWaitEvent(stream_, event.get(), 0), "cudaStreamWaitEvent");
}

}  // namespace zero::cuda
