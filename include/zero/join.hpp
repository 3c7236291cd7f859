// SPDX-License-Identifier: Apache-2.0
/// @file
/// Uneven inputs: ranks that have unlike numbers of batches train together.
///
/// A step is collective, so a rank that has run out of batches must take part in its peers' steps,
/// or they wait for it until they time out. Within `join` it does: it adds no gradient (whatever
/// its gradient memory holds), steps its part of the state, and has the same parameters and step
/// counts as all others once the last rank has ended.
///
/// @code
/// optimizer.join([&] {                      // or zero::join([&] { … }, muon, adamw)
///   for (const Batch& batch : my_batches) { // as many as this rank has, none at all too
///     backward(batch);
///     optimizer.step();
///   }
/// });
/// @endcode
///
///  - The last step of a join finds that nobody has input: it costs the traffic of one more step,
///    changes nothing, and is none to `steps()`.
///  - A parameter without a gradient on any rank that still has input is not stepped.
///  - Clipping, finite checks and the loss scale work as in any step.
///  - With `Gradients::reduced` there is nothing to serve with, so only `JoinEnd::raise` will do.
///  - Options that the body changes from step to step change on ranks that serve by
///    `JoinOptions::before_serving`; what differs is refused, as in any step.
///  - Other collective calls in the body (a loss summed over ranks, say) are the caller's to keep
///    even: a rank that serves takes part in steps alone.
#pragma once

#include <concepts>
#include <utility>

#include "zero/detail/join_scope.hpp"
#include "zero/join_options.hpp"  // IWYU pragma: export
#include "zero/zero_sharded.hpp"

namespace zero {

/// Collective: all ranks call it, with the same options, around the same steps. Calls `body`, which
/// loops over this rank's batches and steps each of the optimizers once a batch, in the order given
/// here; then serves the peers' steps until all ranks have ended. The optimizers may share one
/// communicator. With one rank it is a call of `body`.
///
/// What ends it early, on all ranks:
///  - `UsageError` from a step, with nothing changed, where a rank steps outside of the join or has
///    other options, where the options don't fit `Settings`, where a body ends amid a batch
///    (gradients marked or leased, or accumulation open), and where a rank refuses a step for any
///    other reason. The join is then over, since those who served have left: leave the body.
///  - `InputsEnded` from a step, with `JoinEnd::raise`. A body that catches it may return.
///    The optimizers and their communicator stay usable after both.
///  - Any other exception that leaves `body`: it leaves `join`, and the communicator is aborted
///    with its text, so that the peers throw `CommunicatorError` at once.
///
/// Throws `UsageError` at once where an optimizer is in a join already, or has failed. An optimizer
/// must stay where it is until its join has returned.
template <class Body, class... Optimizers>
  requires std::invocable<Body&>
void join(const JoinOptions& options, Body&& body, Optimizers&... optimizers) {
  static_assert(sizeof...(Optimizers) > 0,
                "zero: join was given no optimizer to serve; give it those that the body steps");
  detail::join(body, options, detail::EngineAccess::engine_of(optimizers)...);
}

/// With the default options.
template <class Body, class... Optimizers>
  requires std::invocable<Body&>
void join(Body&& body, Optimizers&... optimizers) {
  zero::join(JoinOptions{}, std::forward<Body>(body), optimizers...);
}

}  // namespace zero
