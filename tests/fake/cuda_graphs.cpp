// SPDX-License-Identifier: Apache-2.0
/// @file
/// The fake CUDA runtime: capture of streams, and graphs. A graph's branches run in streams of
/// their own, ordered by what was captured and nothing else.
#include <algorithm>
#include <utility>

#include "fake/cuda_state.hpp"

namespace zero_emulation::detail {

namespace {

thread_local cudaStreamCaptureMode thread_mode = cudaStreamCaptureModeGlobal;

struct Graph {
  std::vector<GraphNode> nodes;
  std::size_t lanes;
  int device;
};

struct Executable {
  Graph graph;
  std::vector<bool> awaited;          // by node: whether another lane waits for it
  std::vector<Stream*> streams = {};  // of all lanes but the first, which runs where it is launched
  TicketPool tickets = {};
  Ticket* last = nullptr;  // the end of the launch before
};

// Whether all that the streams hold comes before what the origin's next node would.
bool is_joined(const Capture& capture) {
  std::vector<bool> reached(capture.nodes.size(), false);
  for (const std::size_t node : capture.origin->frontier) reached[node] = true;
  for (std::size_t node = capture.nodes.size(); node-- > 0;) {
    if (!reached[node]) continue;
    for (const std::size_t dependency : capture.nodes[node].dependencies)
      reached[dependency] = true;
  }
  return std::all_of(capture.streams.begin(), capture.streams.end(), [&](const Stream* stream) {
    return std::all_of(stream->frontier.begin(), stream->frontier.end(),
                       [&](std::size_t node) { return reached[node]; });
  });
}

void release(Capture& capture) {
  for (Stream* stream : capture.streams) {
    stream->capture = nullptr;
    stream->frontier.clear();
  }
  runtime().captures.erase(capture.id);
}

void launch(Executable& executable, Stream& stream) {
  if (executable.last != nullptr) {
    stream.wait_for(executable.last);
    executable.last->drop();
    executable.last = nullptr;
  }
  std::vector<Stream*> lanes = {&stream};
  lanes.insert(lanes.end(), executable.streams.begin(), executable.streams.end());
  Ticket* start = executable.tickets.take();
  stream.signal(start);
  for (Stream* lane : executable.streams) lane->wait_for(start);
  start->drop();

  const std::vector<GraphNode>& nodes = executable.graph.nodes;
  std::vector<Ticket*> done(nodes.size(), nullptr);
  for (std::size_t i = 0; i < nodes.size(); ++i) {
    Stream& lane = *lanes[nodes[i].lane];
    for (const std::size_t dependency : nodes[i].dependencies) {
      if (nodes[dependency].lane != nodes[i].lane) lane.wait_for(done[dependency]);
    }
    lane.push({.body = nodes[i].body});
    if (executable.awaited[i]) {
      done[i] = executable.tickets.take();
      lane.signal(done[i]);
    }
  }
  for (Ticket* ticket : done) {
    if (ticket != nullptr) ticket->drop();
  }
  for (Stream* lane : executable.streams) {
    Ticket* end = executable.tickets.take();
    lane->signal(end);
    stream.wait_for(end);
    end->drop();
  }
  executable.last = executable.tickets.take();
  stream.signal(executable.last);
  ++stream.work;
}

}  // namespace

Capture* capture_of(const Event& event) {
  const auto found = runtime().captures.find(event.capture);
  return found == runtime().captures.end() ? nullptr : found->second.get();
}

void invalidate(Stream& stream) {
  if (stream.capture != nullptr) stream.capture->invalidated = true;
}

void leave_capture(Stream& stream) {
  Capture& capture = *stream.capture;
  if (capture.origin == &stream) {
    release(capture);
  } else {
    capture.invalidated = true;
    std::erase(capture.streams, &stream);
  }
}

cudaError_t capture_node(Stream& stream, std::function<void()> body) {
  Capture& capture = *stream.capture;
  if (capture.invalidated) return cudaErrorStreamCaptureInvalidated;
  capture.nodes.push_back({std::move(body), std::move(stream.frontier), stream.lane});
  stream.frontier = {capture.nodes.size() - 1};
  return cudaSuccess;
}

cudaError_t forbidden_by_capture() {
  if (thread_mode == cudaStreamCaptureModeRelaxed) return cudaSuccess;
  cudaError_t code = cudaSuccess;
  for (const auto& [id, capture] : runtime().captures) {
    const bool mine = capture->thread == std::this_thread::get_id();
    const bool forbids = capture->mode == cudaStreamCaptureModeGlobal
                             ? (mine || thread_mode == cudaStreamCaptureModeGlobal)
                             : (capture->mode == cudaStreamCaptureModeThreadLocal && mine);
    if (!forbids) continue;
    capture->invalidated = true;
    code = cudaErrorStreamCaptureUnsupported;
  }
  return code;
}

}  // namespace zero_emulation::detail

using namespace zero_emulation::detail;

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  return call("cudaThreadExchangeStreamCaptureMode", [&] {
    std::swap(*mode, thread_mode);
    return cudaSuccess;
  });
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
  return call("cudaStreamBeginCapture", [&] {
    if (stream == nullptr || stream == cudaStreamLegacy) return cudaErrorStreamCaptureUnsupported;
    Stream& origin = *find(stream);
    if (origin.capture != nullptr) return cudaErrorIllegalState;
    const std::uint64_t id = ++runtime().last_capture;
    auto capture =
        std::make_unique<Capture>(Capture{id, &origin, std::this_thread::get_id(), mode});
    capture->streams.push_back(&origin);
    origin.capture = capture.get();
    origin.lane = 0;
    origin.frontier.clear();
    runtime().captures.emplace(id, std::move(capture));
    return cudaSuccess;
  });
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  return call("cudaStreamEndCapture", [&] {
    Stream& origin = *find(stream);
    Capture* capture = origin.capture;
    if (graph != nullptr) *graph = nullptr;
    if (graph == nullptr || capture == nullptr) return cudaErrorIllegalState;
    if (capture->origin != &origin) return cudaErrorStreamCaptureUnmatched;
    if (capture->mode != cudaStreamCaptureModeRelaxed &&
        capture->thread != std::this_thread::get_id())
      return cudaErrorStreamCaptureWrongThread;
    cudaError_t code = cudaSuccess;
    if (capture->invalidated) {
      code = cudaErrorStreamCaptureInvalidated;
    } else if (!is_joined(*capture)) {
      code = cudaErrorStreamCaptureUnjoined;
    } else {
      *graph = reinterpret_cast<cudaGraph_t>(
          new Graph{std::move(capture->nodes), capture->streams.size(), origin.device});
      ++runtime().living.graphs;
    }
    release(*capture);
    return code;
  });
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  return call("cudaStreamIsCapturing", [&] {
    const Stream& asked = *find(stream);
    *status = cudaStreamCaptureStatusNone;
    if (stream == nullptr || stream == cudaStreamLegacy) {
      for (const Stream* other : runtime().devices[asked.device].streams) {
        if (other->is_blocking() && other->capture != nullptr)
          return cudaErrorStreamCaptureImplicit;
      }
    }
    if (asked.capture != nullptr)
      *status = asked.capture->invalidated ? cudaStreamCaptureStatusInvalidated
                                           : cudaStreamCaptureStatusActive;
    return cudaSuccess;
  });
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t graph,
                                 unsigned long long) {
  return call("cudaGraphInstantiate", [&] {
    if (executable == nullptr || graph == nullptr) return cudaErrorInvalidValue;
    const Graph& source = *reinterpret_cast<const Graph*>(graph);
    auto* made = new Executable{source, std::vector<bool>(source.nodes.size(), false)};
    for (const GraphNode& node : source.nodes) {
      for (const std::size_t dependency : node.dependencies) {
        if (source.nodes[dependency].lane != node.lane) made->awaited[dependency] = true;
      }
    }
    for (std::size_t lane = 1; lane < source.lanes; ++lane)
      made->streams.push_back(new Stream(source.device, cudaStreamNonBlocking, 0));
    ++runtime().living.graphs;
    *executable = reinterpret_cast<cudaGraphExec_t>(made);
    return cudaSuccess;
  });
}

cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* executable, cudaGraph_t graph,
                                          unsigned long long flags) {
  return cudaGraphInstantiate(executable, graph, flags);
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream) {
  return call("cudaGraphLaunch", [&] {
    if (executable == nullptr) return cudaErrorInvalidValue;
    Stream& found = *find(stream);
    if (found.capture != nullptr) {
      invalidate(found);
      return cudaErrorStreamCaptureUnsupported;
    }
    const cudaError_t code = order_with_legacy(found);
    if (code != cudaSuccess) return code;
    ++runtime().counted.graph_launches;
    launch(*reinterpret_cast<Executable*>(executable), found);
    return cudaSuccess;
  });
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  return release_call("cudaGraphDestroy", [&] {
    if (graph == nullptr) return cudaErrorInvalidValue;
    delete reinterpret_cast<Graph*>(graph);
    --runtime().living.graphs;
    return cudaSuccess;
  });
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
  return release_call("cudaGraphExecDestroy", [&] {
    if (executable == nullptr) return cudaErrorInvalidValue;
    auto* destroyed = reinterpret_cast<Executable*>(executable);
    for (Stream* stream : destroyed->streams) destroy(stream);
    if (destroyed->last != nullptr) destroyed->last->drop();
    delete destroyed;
    --runtime().living.graphs;
    return cudaSuccess;
  });
}
