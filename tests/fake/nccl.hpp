// SPDX-License-Identifier: Apache-2.0
/// @file
/// What a test asks of the fake NCCL beyond nccl.h: faults on demand, and counts of what was
/// called.
///
/// Ranks of the fake are threads (or communicators of one thread), and devices are the fake
/// runtime's. What the real library leaves to luck is settled so that a careless caller fails:
///
///  - sums are not in rank order, and the order changes along an array: only a caller who adds up
///    by itself gets the same bits whatever the cuts. All ranks get the same bits.
///  - a communicator that isn't blocking puts nothing into a stream until `ncclCommGetAsyncError`
///    has said `ncclInProgress` once and is asked again.
///  - ranks that disagree (operation, count, type, reduction, root) are named on stderr, and all
///    get the asynchronous error `ncclInvalidUsage`; a rank that stays away is waited for. Either
///    way the operation blocks its stream, as a real kernel does, until `ncclCommAbort`.
///  - abort tells all peers `ncclRemoteError`.
///  - host pointers, misaligned ones, and buffers that overlap where NCCL's rules for in-place
///    operations forbid it are refused with `ncclInvalidArgument`.
#pragma once

#include <nccl.h>

#include <cstdint>
#include <string_view>

namespace zero_emulation::nccl {

/// Forgets faults and counts, and makes the version and the rule for devices what they were.
void reset();

/// Whether ranks may share a device, which NCCL refuses.
void allow_shared_devices(bool allowed = true);
/// What `ncclGetVersion` says.
void set_version(int code);

/// Calls of a function since `reset`, e.g. "ncclAllReduce"; grouped ones as well. Throws
/// std::invalid_argument for a name that the fake doesn't have.
[[nodiscard]] std::int64_t calls(std::string_view function);
/// The sum of count × size of type over these calls.
[[nodiscard]] std::int64_t bytes(std::string_view function);
/// Communicators that were neither destroyed nor aborted.
[[nodiscard]] std::int64_t communicators();

/// The nth call of a function from now on (1: the next), on whatever rank, does nothing but return
/// `error`. Of the last such order for a function.
void fail_call(std::string_view function, ncclResult_t error, int nth = 1);
/// The nth operation (collective, send or receive) that rank `rank` of any communicator starts from
/// now on fails in the stream: `error` there, `ncclRemoteError` on its peers.
void fail_operation(int rank, ncclResult_t error, int nth = 1);
/// As above, but the rank never arrives and nobody is told.
void lose_operation(int rank, int nth = 1);
/// The next communicator of rank `rank` fails while it is made: `error` there, `ncclRemoteError` on
/// its peers.
void fail_init(int rank, ncclResult_t error);
/// The next communicator of rank `rank` is never done, on no rank. For communicators that aren't
/// blocking: nothing ends the wait of others.
void hang_init(int rank);

}  // namespace zero_emulation::nccl
