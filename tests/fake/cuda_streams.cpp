// SPDX-License-Identifier: Apache-2.0
/// @file
/// The fake CUDA runtime: streams and events as CUDA's functions see them.
#include <algorithm>
#include <utility>

#include "fake/cuda_state.hpp"

namespace zero_emulation {

namespace detail {

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
  if (stream->capture != nullptr) leave_capture(*stream);
  // Later work in the legacy stream comes after this stream's.
  if (device.legacy != nullptr && stream->is_blocking() &&
      stream->work != stream->work_seen_by_legacy) {
    Ticket* end = stream->mark();
    device.legacy->wait_for(end);
    end->drop();
  }
  std::erase(device.streams, stream);
  std::erase_if(device.draining, [](Ticket* ticket) {
    if (!ticket->has_passed()) return false;
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
  stream.push({.body = std::move(body), .always = work == Work::memory});
  ++stream.work;
  return cudaSuccess;
}

void wait_for_device(int device, Waits& waits) {
  Device& all = runtime().devices[device];
  for (Stream* stream : all.streams) {
    if (stream->capture == nullptr) waits.tickets.push_back(stream->mark());
  }
  if (all.legacy != nullptr) waits.tickets.push_back(all.legacy->mark());
  for (Ticket* ticket : all.draining) {
    ticket->hold();
    waits.tickets.push_back(ticket);
  }
}

void await(Waits& waits) {
  for (Ticket* ticket : waits.tickets) {
    ticket->wait();
    ticket->drop();
  }
}

}  // namespace detail

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
  return release_call("cudaStreamDestroy", [&] {
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
        const cudaError_t code = unsupported_in_capture(found);
        if (code != cudaSuccess) return code;
        waits.device = found.device;
        waits.tickets.push_back(found.mark());
        return cudaSuccess;
      },
      &waits);
}

cudaError_t cudaStreamQuery(cudaStream_t stream) {
  return call("cudaStreamQuery", [&] {
    Stream& found = *find(stream);
    const cudaError_t code = unsupported_in_capture(found);
    if (code != cudaSuccess) return code;
    return found.is_idle() ? broken(found.device) : cudaErrorNotReady;
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
    if (awaited.recorder == std::this_thread::get_id() && wait_to_ignore() != 0 &&
        --wait_to_ignore() == 0) {
      return cudaSuccess;
    }
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
  return release_call("cudaEventDestroy", [&] {
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
    recorded.recorder = std::this_thread::get_id();
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
    return asked.ticket == nullptr || asked.ticket->is_done() ? broken(asked.device)
                                                              : cudaErrorNotReady;
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
          waits.device = asked.device;
          waits.tickets.push_back(asked.ticket);
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
