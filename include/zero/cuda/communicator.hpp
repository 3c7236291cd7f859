// SPDX-License-Identifier: Apache-2.0
/// @file
/// What `ZeroSharded` asks of a communicator that works in CUDA memory, beyond `Communicator`.
#pragma once

#include <chrono>
#include <concepts>

#include "zero/communicator.hpp"
#include "zero/cuda/stream.hpp"
#include "zero/memory.hpp"

namespace zero::cuda {

/// A request whose operation runs in a stream. `enqueue()` returns once the operation stands in the
/// communicator's stream: what is enqueued there afterwards comes after it. It ends the request,
/// which needs no `wait` any more, and may block the host for peers to come, no longer than the
/// timeout, but never for the device. Throws as `wait` does.
template <class R>
concept StreamRequest = Request<R> && requires(R& request) { request.enqueue(); };

/// Intent: operations that wait for no host thread.
///
///  1. `stream()`: where operations run, in the order in which they were started. Given at
///     construction; inputs must be ready there, and outputs are, in stream order: whoever
///     computes in another stream records an event and lets the stream wait for it, both ways.
///  2. every operation's request is a `StreamRequest`. `exchange` and `barrier` are for the host:
///     `wait` for them.
///  3. `wait(event)`: blocks the host until an event that was recorded behind operations has
///     happened, no longer than the timeout; throws `CommunicatorError` (and poisons, as `wait` of
///     a request does) where it has not, or where a peer failed meanwhile, and `CudaError`.
///  4. `check()`: throws as `wait` where the communicator has failed; never blocks.
template <class C>
concept StreamCommunicator = Ranked<C> && Capable<C> && (C::memory_space == MemorySpace::cuda) &&
                             requires(C& comm, const Event& event, std::span<float> data) {
                               { comm.stream() } -> std::same_as<StreamView>;
                               comm.wait(event);
                               comm.check();
                               { comm.all_reduce(data, ReduceOp::sum) } -> StreamRequest;
                             };

}  // namespace zero::cuda
