// SPDX-License-Identifier: Apache-2.0
/// @file
/// NCCL's functions for ranks that are threads, on the streams of the fake CUDA runtime.
#include "fake/nccl.hpp"

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "fake/cuda_runtime.hpp"
#include "fake/nccl_clique.hpp"

namespace zero_emulation::nccl {
namespace {

// ---- What tests asked for, and counts. Only host threads come here.

constexpr std::array function_names = {
    "ncclGetVersion",
    "ncclGetUniqueId",
    "ncclCommInitRank",
    "ncclCommInitAll",
    "ncclCommInitRankConfig",
    "ncclCommInitRankScalable",
    "ncclCommFinalize",
    "ncclCommDestroy",
    "ncclCommAbort",
    "ncclCommSplit",
    "ncclCommGetAsyncError",
    "ncclCommCount",
    "ncclCommUserRank",
    "ncclCommCuDevice",
    "ncclRedOpCreatePreMulSum",
    "ncclRedOpDestroy",
    "ncclAllReduce",
    "ncclBroadcast",
    "ncclBcast",
    "ncclReduce",
    "ncclAllGather",
    "ncclReduceScatter",
    "ncclSend",
    "ncclRecv",
    "ncclGroupStart",
    "ncclGroupEnd",
};

struct CallFault {
  ncclResult_t error = ncclSuccess;
  int countdown = 0;
};
struct OperationFault {
  int rank;
  int countdown;
  ncclResult_t error;  ///< success: the operation is lost
};
struct InitFault {
  int rank;
  ncclResult_t error;  ///< success: it hangs
};

struct Control {
  std::mutex mutex;
  bool shared_devices = false;
  int version = NCCL_VERSION_CODE;
  std::array<CallFault, function_names.size()> call_faults;
  std::vector<OperationFault> operation_faults;
  std::vector<InitFault> init_faults;
};
Control& control() {
  static Control control;
  return control;
}
// Relaxed, and apart from the mutex, so that counting orders no threads.
std::atomic<bool> any_fault{false};
std::array<std::atomic<std::int64_t>, function_names.size()> call_counts{};
std::array<std::atomic<std::int64_t>, function_names.size()> byte_counts{};
std::atomic<std::int64_t> alive{0};

std::size_t index_of(std::string_view function) {
  const auto found = std::find(function_names.begin(), function_names.end(), function);
  if (found == function_names.end()) {
    throw std::invalid_argument("the fake NCCL has no function " + std::string(function));
  }
  return static_cast<std::size_t>(found - function_names.begin());
}

/// Counts a call. Other than success: what a test wants it to return at once.
ncclResult_t begin_call(std::string_view function, std::size_t bytes = 0) {
  const std::size_t i = index_of(function);
  call_counts[i].fetch_add(1, std::memory_order_relaxed);
  byte_counts[i].fetch_add(static_cast<std::int64_t>(bytes), std::memory_order_relaxed);
  if (!any_fault.load(std::memory_order_relaxed)) return ncclSuccess;
  const std::lock_guard lock(control().mutex);
  CallFault& fault = control().call_faults[i];
  if (fault.countdown == 0 || --fault.countdown != 0) return ncclSuccess;
  return fault.error;
}

void take_operation_fault(int rank, Operation& operation) {
  if (!any_fault.load(std::memory_order_relaxed)) return;
  const std::lock_guard lock(control().mutex);
  std::erase_if(control().operation_faults, [&](OperationFault& fault) {
    if (fault.rank != rank || --fault.countdown != 0) return false;
    operation.fault = fault.error;
    operation.lost = operation.lost || fault.error == ncclSuccess;
    return true;
  });
}

std::optional<InitFault> take_init_fault(int rank) {
  const std::lock_guard lock(control().mutex);
  auto& faults = control().init_faults;
  const auto found = std::find_if(faults.begin(), faults.end(),
                                  [&](const InitFault& fault) { return fault.rank == rank; });
  if (found == faults.end()) return std::nullopt;
  const InitFault fault = *found;
  faults.erase(found);
  return fault;
}

ncclResult_t refuse(ncclResult_t error, const std::string& why) {
  LastError::set(why);
  return error;
}

// ---- Communicators

/// How something that all ranks must come to has ended for one of them; ncclInProgress: not yet.
using Outcome = std::atomic<ncclResult_t>;

void conclude(Outcome& outcome, ncclResult_t result) {
  ncclResult_t pending = ncclInProgress;
  outcome.compare_exchange_strong(pending, result);
  outcome.notify_all();
}

class Setup;
struct Batch;

/// What makes a pre-multiplied sum.
struct Multiplier {
  ncclDataType_t type;
  Scalar value;
  const void* on_device;  ///< read when it is used; null: `value`
};

/// A rank's side of a communicator; what is in streams keeps it alive. A host's thread must not
/// drop a reference that a stream's thread may have dropped: reference counts would order the two.
struct Member {
  std::shared_ptr<Setup> setup;
  std::shared_ptr<Outcome> outcome = std::make_shared<Outcome>(ncclInProgress);
  std::shared_ptr<Clique> clique;  ///< once the outcome is success
  int rank = -1;
  int device = 0;
  bool blocking = true;

  // Of streams' threads, and of hosts' that wait for them.
  std::mutex streams_mutex;
  std::condition_variable left_stream;
  std::uint64_t finished = 0;  ///< jobs that were in streams
  int replayed = 0;            ///< jobs of graphs that are in streams

  // Of the host's threads, of which one may poll while another works.
  std::mutex mutex;
  std::shared_ptr<Outcome> split;  ///< that this communicator is being split
  std::shared_ptr<Setup> next_split;
  int splits = 0;
  std::shared_ptr<Batch> deferred;
  ncclResult_t launch_error = ncclSuccess;  ///< of what was deferred
  bool finalized = false;
  std::map<int, Multiplier> multipliers;  ///< of pre-multiplied sums, by handle
  std::uint64_t launched = 0;
  cudaStream_t last_stream = nullptr;
};

/// Ranks on their way to be communicators: those that came with one unique id, or the parts of one
/// communicator that is split.
class Setup {
 public:
  explicit Setup(std::size_t size) : size_(size) {}

  struct Arrival {
    std::shared_ptr<Member> member;  ///< null: it takes no part
    std::shared_ptr<Outcome> outcome;
    int color;
    int key;
    int rank;  ///< of those that come
  };

  void arrive(Arrival arrival, std::size_t size, bool distinct_keys) {
    const std::lock_guard lock(mutex_);
    if (closed_) return conclude(*arrival.outcome, ncclRemoteError);
    arrivals_.push_back(std::move(arrival));
    if (size != size_) {
      return fail(ncclInvalidUsage, "one rank said that there are " + std::to_string(size_) +
                                        " ranks, another " + std::to_string(size));
    }
    if (distinct_keys) {
      for (std::size_t i = 0; i + 1 < arrivals_.size(); ++i) {
        if (arrivals_[i].key != arrivals_.back().key) continue;
        return fail(ncclInvalidUsage,
                    "two ranks said that they are rank " + std::to_string(arrivals_[i].key));
      }
    }
    if (arrivals_.size() == size_) complete();
  }

  /// A rank gives up: no rank gets its communicator.
  void leave() {
    const std::lock_guard lock(mutex_);
    fail(ncclRemoteError, "a rank gave up a communicator that was being made");
  }

 private:
  void fail(ncclResult_t error, const std::string& why) {
    if (closed_) return;
    closed_ = true;
    LastError::set(why);
    for (Arrival& arrival : arrivals_) conclude(*arrival.outcome, error);
    arrivals_.clear();
  }

  void complete() {
    std::sort(arrivals_.begin(), arrivals_.end(), [](const Arrival& a, const Arrival& b) {
      return std::tuple(a.color, a.key, a.rank) < std::tuple(b.color, b.key, b.rank);
    });
    const bool shared_devices = [] {
      const std::lock_guard lock(control().mutex);
      return control().shared_devices;
    }();
    for (std::size_t i = 0; i < arrivals_.size() && !shared_devices; ++i) {
      for (std::size_t j = 0; j < i; ++j) {
        const Arrival &a = arrivals_[j], &b = arrivals_[i];
        if (a.member && b.member && a.color == b.color && a.member->device == b.member->device) {
          return fail(ncclInvalidUsage, "Duplicate GPU detected : rank " + std::to_string(a.key) +
                                            " and rank " + std::to_string(b.key) +
                                            " both on CUDA device " +
                                            std::to_string(a.member->device));
        }
      }
    }
    for (std::size_t begin = 0, end = 0; begin < arrivals_.size(); begin = end) {
      while (end < arrivals_.size() && arrivals_[end].color == arrivals_[begin].color) ++end;
      if (!arrivals_[begin].member) continue;
      const auto clique = std::make_shared<Clique>(end - begin);
      for (std::size_t i = begin; i < end; ++i) {
        arrivals_[i].member->clique = clique;
        arrivals_[i].member->rank = static_cast<int>(i - begin);
      }
    }
    for (Arrival& arrival : arrivals_) conclude(*arrival.outcome, ncclSuccess);
    arrivals_.clear();
    closed_ = true;
  }

  const std::size_t size_;
  std::mutex mutex_;
  bool closed_ = false;  ///< whoever still comes is too late
  std::vector<Arrival> arrivals_;
};

/// By unique id. An id is good for one communicator.
struct Registry {
  std::mutex mutex;
  std::uint64_t last = 0;
  std::map<std::string, std::shared_ptr<Setup>> setups;  ///< null: nobody came yet
};
Registry& registry() {
  static Registry registry;
  return registry;
}

}  // namespace
}  // namespace zero_emulation::nccl

// What a caller holds.
struct ncclComm {
  std::shared_ptr<zero_emulation::nccl::Member> member;
};

namespace zero_emulation::nccl {
namespace {

ncclComm_t make_handle(std::shared_ptr<Member> member) {
  alive.fetch_add(1, std::memory_order_relaxed);
  return new ncclComm{std::move(member)};
}
void destroy_handle(ncclComm_t comm) {
  alive.fetch_sub(1, std::memory_order_relaxed);
  delete comm;
}

// ---- Groups: what is called between start and end, or one call alone.

/// Operations of one communicator, all started together.
struct Part {
  std::shared_ptr<Member> member;
  std::vector<cudaStream_t> streams;  ///< distinct; all of it runs in the first
  std::vector<Operation> operations;
};

/// What one outermost `ncclGroupEnd` has to put into streams.
struct Batch {
  std::mutex mutex;
  std::atomic<bool> launched{false};  ///< or dropped
  bool asked = false;                 ///< by `ncclCommGetAsyncError`, once
  std::vector<Part> parts;
};

struct Waiting {
  std::shared_ptr<Outcome> outcome;
  ncclComm_t* handle;  ///< to be null again if it fails
};

struct Group {
  int depth = 0;
  ncclResult_t error = ncclSuccess;
  std::vector<Part> parts;
  std::vector<Waiting> waiting;
  bool nonblocking_setup = false;
};
Group& group() {
  thread_local Group group;
  return group;
}

/// The current device, for a while.
class DeviceScope {
 public:
  explicit DeviceScope(int device) {
    (void)cudaGetDevice(&before_);
    (void)cudaSetDevice(device);
  }
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;
  ~DeviceScope() { (void)cudaSetDevice(before_); }

 private:
  int before_ = 0;
};

bool capturing(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  return cudaStreamIsCapturing(stream, &status) == cudaSuccess &&
         status == cudaStreamCaptureStatusActive;
}

/// What comes in `stream` from now on waits for what is in `earlier`.
cudaError_t order(cudaStream_t earlier, cudaStream_t stream) {
  cudaEvent_t event = nullptr;
  cudaError_t error = cudaEventCreateWithFlags(&event, cudaEventDisableTiming);
  if (error != cudaSuccess) return error;
  error = cudaEventRecord(event, earlier);
  if (error == cudaSuccess) error = cudaStreamWaitEvent(stream, event, 0);
  (void)cudaEventDestroy(event);
  return error;
}

/// A job of a communicator has left its stream.
void finish(Member& member, bool captured) {
  const std::lock_guard lock(member.streams_mutex);
  if (captured) {
    --member.replayed;
  } else {
    ++member.finished;
  }
  member.left_stream.notify_all();
}

/// Returns once so many jobs have left streams.
void wait_for(Member& member, std::uint64_t jobs) {
  std::unique_lock lock(member.streams_mutex);
  member.left_stream.wait(lock, [&] { return member.finished >= jobs; });
}

/// Whether streams have nothing of a communicator's any more; `member.mutex` is locked.
bool idle(Member& member) {
  const std::lock_guard lock(member.streams_mutex);
  return member.finished == member.launched && member.replayed == 0;
}

void wait_for_streams(Member& member) {
  std::uint64_t launched = 0;
  {
    const std::lock_guard lock(member.mutex);
    launched = member.launched;
  }
  std::unique_lock lock(member.streams_mutex);
  member.left_stream.wait(lock,
                          [&] { return member.finished >= launched && member.replayed == 0; });
}

/// One stream's share of a batch: usually one communicator's. What its thread runs.
struct Job {
  std::vector<Part> parts;
  std::vector<std::uint64_t> after;  ///< by part: which job of its communicator has to be done
  bool captured;

  void run() const {
    std::vector<std::vector<Clique::Pending>> pending;
    for (std::size_t i = 0; i < parts.size(); ++i) {
      Member& member = *parts[i].member;
      wait_for(member, after[i]);
      if (captured) {
        const std::lock_guard lock(member.streams_mutex);
        ++member.replayed;
      }
      pending.push_back(member.clique->announce(member.rank, parts[i].operations));
    }
    for (std::size_t i = 0; i < parts.size(); ++i) {
      Member& member = *parts[i].member;
      member.clique->await(member.rank, pending[i]);
    }
    for (const Part& part : parts) finish(*part.member, captured);
  }
};

cudaError_t launch(std::vector<Part> parts) {
  const std::vector<std::vector<cudaStream_t>> streams = [&] {
    std::vector<std::vector<cudaStream_t>> all;
    for (const Part& part : parts) all.push_back(part.streams);
    return all;
  }();
  const cudaStream_t stream = streams.front().front();
  const DeviceScope device(parts.front().member->device);
  for (const auto& those : streams) {
    for (std::size_t i = 1; i < those.size(); ++i) {
      if (const cudaError_t error = order(those[i], stream)) return error;
    }
  }
  // A communicator's operations come one after the other, whatever their streams.
  auto job = std::make_shared<Job>();
  const bool captured = job->captured = capturing(stream);
  std::vector<Member*> members;  // alive, since their handles are
  for (const Part& part : parts) {
    Member& member = *part.member;
    const std::lock_guard lock(member.mutex);
    members.push_back(&member);
    const bool moved = !captured && member.launched != 0 && member.last_stream != stream;
    job->after.push_back(moved ? member.launched : 0);
    if (captured) continue;
    member.last_stream = stream;
    ++member.launched;
  }
  job->parts = std::move(parts);
  const cudaError_t error = enqueue(stream, [job = std::move(job)] { job->run(); });
  if (error != cudaSuccess) {
    for (Member* member : members) {
      if (!captured) finish(*member, false);
    }
    return error;
  }
  for (const auto& those : streams) {
    for (std::size_t i = 1; i < those.size(); ++i) {
      if (const cudaError_t failed = order(stream, those[i])) return failed;
    }
  }
  return cudaSuccess;
}

ncclResult_t launch_all(std::vector<Part> parts) {
  while (!parts.empty()) {
    // Communicators that share a stream wait in it side by side, so that none keeps the others out.
    std::vector<Part> together;
    const cudaStream_t stream = parts.front().streams.front();
    const int device = parts.front().member->device;
    std::vector<Part> rest;
    for (Part& part : parts) {
      const bool same = part.streams.front() == stream && part.member->device == device;
      (same ? together : rest).push_back(std::move(part));
    }
    parts = std::move(rest);
    if (const cudaError_t error = launch(std::move(together))) {
      return refuse(ncclUnhandledCudaError,
                    std::string("the CUDA runtime failed: ") + cudaGetErrorName(error));
    }
  }
  return ncclSuccess;
}

ncclResult_t end_group() {
  Group& mine = group();
  if (mine.depth == 0) return refuse(ncclInvalidUsage, "ncclGroupEnd: not in a group call");
  if (--mine.depth > 0) return mine.error;
  Group ended = std::exchange(mine, Group{});

  for (Waiting& waiting : ended.waiting) {
    waiting.outcome->wait(ncclInProgress);
    const ncclResult_t result = waiting.outcome->load();
    if (result == ncclSuccess) continue;
    if (ended.error == ncclSuccess) ended.error = result;
    if (*waiting.handle != nullptr) {
      destroy_handle(*waiting.handle);
      *waiting.handle = nullptr;
    }
  }
  if (ended.error != ncclSuccess) return ended.error;
  if (ended.parts.empty()) return ended.nonblocking_setup ? ncclInProgress : ncclSuccess;

  const bool blocking = ended.parts.front().member->blocking;
  for (const Part& part : ended.parts) {
    if (part.member->blocking != blocking) {
      return refuse(ncclInvalidArgument,
                    "blocking and nonblocking communicators are not allowed in the same group");
    }
  }
  if (blocking) return launch_all(std::move(ended.parts));
  const auto batch = std::make_shared<Batch>();
  batch->parts = std::move(ended.parts);
  for (const Part& part : batch->parts) {
    const std::lock_guard lock(part.member->mutex);
    part.member->deferred = batch;
  }
  return ncclInProgress;
}

/// One call is a group of its own where it isn't in one.
template <class F>
ncclResult_t grouped(F&& call) {
  ++group().depth;
  const ncclResult_t result = call();
  if (result != ncclSuccess && group().error == ncclSuccess) group().error = result;
  const bool inner = group().depth > 1;
  const ncclResult_t ended = end_group();
  return inner ? result : ended;
}

/// What `ncclCommGetAsyncError` says; moves on what it is asked for.
ncclResult_t poll(Member& member) {
  const ncclResult_t outcome = member.outcome->load();
  if (outcome != ncclSuccess) return outcome;
  const ncclResult_t error = member.clique->error(member.rank);
  if (error != ncclSuccess) return error;
  std::shared_ptr<Batch> batch;
  {
    const std::lock_guard lock(member.mutex);
    if (member.split && member.split->load() == ncclInProgress) return ncclInProgress;
    if (member.launch_error != ncclSuccess) return member.launch_error;
    if (member.finalized) {
      if (!idle(member)) return ncclInProgress;
      member.clique->leave(member.rank);
    }
    batch = member.deferred;
  }
  if (!batch) return ncclSuccess;
  ncclResult_t result = ncclSuccess;
  {
    const std::lock_guard lock(batch->mutex);
    if (!std::exchange(batch->asked, true)) return ncclInProgress;
    if (!batch->launched.exchange(true)) result = launch_all(std::exchange(batch->parts, {}));
  }
  const std::lock_guard lock(member.mutex);
  if (member.deferred == batch) member.deferred = nullptr;
  member.launch_error = result;
  return result;
}

/// As the real one before it does anything with a communicator: what is still being done or has
/// failed can't be used.
ncclResult_t ensure_ready(ncclComm_t comm) {
  if (comm == nullptr) return refuse(ncclInvalidArgument, "the communicator is null");
  Member& member = *comm->member;
  const ncclResult_t outcome = member.outcome->load();
  ncclResult_t state = outcome;
  if (outcome == ncclSuccess) {
    state = member.clique->error(member.rank);
    const std::lock_guard lock(member.mutex);
    const bool busy = (member.split && member.split->load() == ncclInProgress) ||
                      (member.finalized && !idle(member));
    const bool deferred = member.deferred && !member.deferred->launched;
    if (state == ncclSuccess && (busy || deferred)) state = ncclInProgress;
  }
  if (state == ncclInProgress) {
    return refuse(ncclInvalidArgument,
                  "Attempt to use communicator before the previous operation returned ncclSuccess");
  }
  return state;
}

// ---- Operations

bool overlap(const void* a, std::size_t a_bytes, const void* b, std::size_t b_bytes) {
  const auto x = reinterpret_cast<std::uintptr_t>(a);
  const auto y = reinterpret_cast<std::uintptr_t>(b);
  return a_bytes != 0 && b_bytes != 0 && x < y + b_bytes && y < x + a_bytes;
}

/// Why a pointer can't be used, or success.
ncclResult_t check_pointer(const void* pointer, std::size_t size, const Operation& operation) {
  if (pointer == nullptr) return refuse(ncclInvalidArgument, describe(operation) + ": null");
  if (reinterpret_cast<std::uintptr_t>(pointer) % size != 0) {
    return refuse(ncclInvalidArgument, describe(operation) + ": a misaligned pointer");
  }
  cudaPointerAttributes attributes{};
  if (cudaPointerGetAttributes(&attributes, pointer) != cudaSuccess ||
      attributes.type == cudaMemoryTypeUnregistered) {
    return refuse(ncclInvalidArgument,
                  describe(operation) + ": a host pointer, which a device can't use");
  }
  return ncclSuccess;
}

ncclResult_t check_buffers(const Member& member, const Operation& operation) {
  const std::size_t size = size_of(operation.type);
  const std::size_t bytes = operation.count * size;
  const auto ranks = static_cast<std::size_t>(member.clique->size());
  const bool root = operation.root == member.rank;
  const Kind kind = operation.kind;
  const bool reads = kind != Kind::recv && (kind != Kind::broadcast || root);
  const bool writes = kind != Kind::send && (kind != Kind::reduce || root);
  if (reads) {
    if (const ncclResult_t bad = check_pointer(operation.send, size, operation)) return bad;
  }
  if (writes) {
    if (const ncclResult_t bad = check_pointer(operation.recv, size, operation)) return bad;
  }
  if (!reads || !writes) return ncclSuccess;
  const std::size_t in = kind == Kind::reduce_scatter ? ranks * bytes : bytes;
  const std::size_t out = kind == Kind::all_gather ? ranks * bytes : bytes;
  const std::size_t offset = static_cast<std::size_t>(member.rank) * bytes;
  const auto* send = static_cast<const std::byte*>(operation.send);
  const auto* recv = static_cast<const std::byte*>(operation.recv);
  const bool in_place = kind == Kind::reduce_scatter ? recv == send + offset
                        : kind == Kind::all_gather   ? send == recv + offset
                                                     : send == recv;
  if (!in_place && overlap(send, in, recv, out)) {
    return refuse(ncclInvalidArgument,
                  describe(operation) + ": buffers overlap, and not as in place");
  }
  return ncclSuccess;
}

ncclResult_t add(ncclComm_t comm, Operation operation, cudaStream_t stream) {
  if (const ncclResult_t bad = ensure_ready(comm)) return bad;
  const std::shared_ptr<Member>& member = comm->member;
  if (member->finalized) {
    return refuse(ncclInvalidUsage, "an operation on a communicator that was finalized");
  }
  if (operation.type < 0 || operation.type >= ncclNumTypes) {
    return refuse(ncclInvalidArgument, "there is no data type " + std::to_string(operation.type));
  }
  if (operation.root < 0 || operation.root >= member->clique->size()) {
    return refuse(ncclInvalidArgument, "there is no rank " + std::to_string(operation.root));
  }
  if (operation.op >= ncclNumOps) {
    const std::lock_guard lock(member->mutex);
    const auto found = member->multipliers.find(operation.op);
    if (found == member->multipliers.end() || found->second.type != operation.type) {
      return refuse(ncclInvalidArgument,
                    "the reduction isn't of this communicator, or of another type");
    }
    operation.op = ncclNumOps;
    operation.scale = found->second.value;
    operation.device_scale = found->second.on_device;
  } else if (operation.op < 0) {
    return refuse(ncclInvalidArgument, "there is no reduction " + std::to_string(operation.op));
  }
  // NCCL does nothing for an empty collective, so nobody waits in it.
  if (operation.count == 0 && is_collective(operation.kind)) return ncclSuccess;
  if (operation.count != 0) {
    if (const ncclResult_t bad = check_buffers(*member, operation)) return bad;
  }
  int device = member->device;
  if (stream != nullptr && cudaStreamGetDevice(stream, &device) == cudaSuccess &&
      device != member->device) {
    return refuse(ncclUnhandledCudaError, "a stream of device " + std::to_string(device) +
                                              ", a communicator of device " +
                                              std::to_string(member->device));
  }
  take_operation_fault(member->rank, operation);

  std::vector<Part>& parts = group().parts;
  auto part =
      std::find_if(parts.begin(), parts.end(), [&](const Part& p) { return p.member == member; });
  if (part == parts.end()) part = parts.insert(part, Part{member, {}, {}});
  if (std::find(part->streams.begin(), part->streams.end(), stream) == part->streams.end()) {
    part->streams.push_back(stream);
  }
  part->operations.push_back(operation);
  return ncclSuccess;
}

ncclResult_t call(const char* function, ncclComm_t comm, const Operation& operation,
                  cudaStream_t stream) {
  const bool known = operation.type >= 0 && operation.type < ncclNumTypes;
  const std::size_t bytes = known ? operation.count * size_of(operation.type) : 0;
  return grouped([&] {
    if (const ncclResult_t injected = begin_call(function, bytes)) return injected;
    return add(comm, operation, stream);
  });
}

// ---- Making and ending communicators

ncclResult_t read_config(const ncclConfig_t* config, bool& blocking) {
  if (config == nullptr) return ncclSuccess;
  if (config->magic != 0xcafebeef) {
    return refuse(ncclInvalidArgument, "ncclConfig_t was not made by NCCL_CONFIG_INITIALIZER");
  }
  if (config->blocking == NCCL_CONFIG_UNDEF_INT) return ncclSuccess;
  if (config->blocking != 0 && config->blocking != 1) {
    return refuse(ncclInvalidArgument, "ncclConfig_t: blocking is neither 0 nor 1");
  }
  blocking = config->blocking == 1;
  return ncclSuccess;
}

/// A rank comes to a setup, unless a test wants otherwise.
/// @param rank as a test's faults name it
ncclResult_t come(const std::shared_ptr<Setup>& setup, int rank, Setup::Arrival arrival,
                  std::size_t size, bool distinct_keys, bool blocking, ncclComm_t* handle) {
  const std::optional<InitFault> fault =
      any_fault.load(std::memory_order_relaxed) ? take_init_fault(rank) : std::nullopt;
  if (arrival.member) *handle = make_handle(arrival.member);
  if (blocking) {
    group().waiting.push_back(Waiting{arrival.outcome, handle});
  } else {
    group().nonblocking_setup = true;
  }
  if (!fault) {
    setup->arrive(std::move(arrival), size, distinct_keys);
  } else if (fault->error != ncclSuccess) {
    LastError::set("rank " + std::to_string(rank) + " fails while it is made, as a test asked");
    conclude(*arrival.outcome, fault->error);
    setup->leave();
  }
  return ncclSuccess;
}

ncclResult_t init(ncclComm_t* comm, int ranks, const ncclUniqueId& id, int rank,
                  const ncclConfig_t* config) {
  if (comm == nullptr) return refuse(ncclInvalidArgument, "the place for a communicator is null");
  *comm = nullptr;
  if (ranks < 1 || rank < 0 || rank >= ranks) {
    return refuse(ncclInvalidArgument,
                  "there is no rank " + std::to_string(rank) + " of " + std::to_string(ranks));
  }
  const auto member = std::make_shared<Member>();
  if (const ncclResult_t bad = read_config(config, member->blocking)) return bad;
  if (const cudaError_t error = cudaGetDevice(&member->device)) {
    return refuse(ncclUnhandledCudaError,
                  std::string("cudaGetDevice failed: ") + cudaGetErrorName(error));
  }
  {
    const std::lock_guard lock(registry().mutex);
    const auto found = registry().setups.find(std::string(id.internal, sizeof id.internal));
    if (found == registry().setups.end()) {
      return refuse(ncclInvalidArgument, "the unique id isn't one of ncclGetUniqueId's");
    }
    if (!found->second) found->second = std::make_shared<Setup>(static_cast<std::size_t>(ranks));
    member->setup = found->second;
  }
  return come(member->setup, rank, {member, member->outcome, 0, rank, rank},
              static_cast<std::size_t>(ranks), true, member->blocking, comm);
}

}  // namespace

// ---- What tests ask

void reset() {
  const std::lock_guard lock(control().mutex);
  control().shared_devices = false;
  control().version = NCCL_VERSION_CODE;
  control().call_faults = {};
  control().operation_faults.clear();
  control().init_faults.clear();
  any_fault = false;
  for (auto& count : call_counts) count = 0;
  for (auto& count : byte_counts) count = 0;
}
void allow_shared_devices(bool allowed) {
  const std::lock_guard lock(control().mutex);
  control().shared_devices = allowed;
}
void set_version(int code) {
  const std::lock_guard lock(control().mutex);
  control().version = code;
}
std::int64_t calls(std::string_view function) { return call_counts[index_of(function)]; }
std::int64_t bytes(std::string_view function) { return byte_counts[index_of(function)]; }
std::int64_t communicators() { return alive; }
void fail_call(std::string_view function, ncclResult_t error, int nth) {
  const std::size_t i = index_of(function);
  const std::lock_guard lock(control().mutex);
  control().call_faults[i] = {error, nth};
  any_fault = true;
}
void fail_operation(int rank, ncclResult_t error, int nth) {
  const std::lock_guard lock(control().mutex);
  control().operation_faults.push_back({rank, nth, error});
  any_fault = true;
}
void lose_operation(int rank, int nth) { fail_operation(rank, ncclSuccess, nth); }
void fail_init(int rank, ncclResult_t error) {
  const std::lock_guard lock(control().mutex);
  control().init_faults.push_back({rank, error});
  any_fault = true;
}
void hang_init(int rank) { fail_init(rank, ncclSuccess); }

}  // namespace zero_emulation::nccl

// ---- NCCL's own functions

using namespace zero_emulation::nccl;

extern "C" {

ncclResult_t ncclGetVersion(int* version) {
  if (const ncclResult_t injected = begin_call("ncclGetVersion")) return injected;
  if (version == nullptr) return ncclInvalidArgument;
  const std::lock_guard lock(control().mutex);
  *version = control().version;
  return ncclSuccess;
}

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  if (const ncclResult_t injected = begin_call("ncclGetUniqueId")) return injected;
  if (id == nullptr) return ncclInvalidArgument;
  const std::lock_guard lock(registry().mutex);
  *id = ncclUniqueId{};
  const std::string name = "fake " + std::to_string(++registry().last);
  std::memcpy(id->internal, name.data(), name.size());
  registry().setups.emplace(std::string(id->internal, sizeof id->internal), nullptr);
  return ncclSuccess;
}

const char* ncclGetErrorString(ncclResult_t result) {
  switch (result) {
    case ncclSuccess: return "no error";
    case ncclUnhandledCudaError:
      return "unhandled cuda error (run with NCCL_DEBUG=INFO for details)";
    case ncclSystemError: return "unhandled system error (run with NCCL_DEBUG=INFO for details)";
    case ncclInternalError:
      return "internal error - please report this issue to the NCCL developers";
    case ncclInvalidArgument: return "invalid argument (run with NCCL_DEBUG=WARN for details)";
    case ncclInvalidUsage: return "invalid usage (run with NCCL_DEBUG=WARN for details)";
    case ncclRemoteError: return "remote process exited or there was a network error";
    case ncclInProgress: return "NCCL operation in progress";
    default: return "unknown result code";
  }
}

const char* ncclGetLastError(ncclComm_t) {
  thread_local std::string text;
  text = LastError::get();
  return text.c_str();
}

ncclResult_t ncclCommInitRank(ncclComm_t* comm, int ranks, ncclUniqueId id, int rank) {
  return grouped([&] {
    if (const ncclResult_t injected = begin_call("ncclCommInitRank")) return injected;
    return init(comm, ranks, id, rank, nullptr);
  });
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int ranks, ncclUniqueId id, int rank,
                                    ncclConfig_t* config) {
  return grouped([&] {
    if (const ncclResult_t injected = begin_call("ncclCommInitRankConfig")) return injected;
    return init(comm, ranks, id, rank, config);
  });
}

ncclResult_t ncclCommInitRankScalable(ncclComm_t* comm, int ranks, int rank, int ids,
                                      ncclUniqueId* id, ncclConfig_t* config) {
  return grouped([&] {
    if (const ncclResult_t injected = begin_call("ncclCommInitRankScalable")) return injected;
    if (id == nullptr || ids < 1 || ids > ranks) {
      return refuse(ncclInvalidArgument, "ncclCommInitRankScalable: a wrong number of ids");
    }
    return init(comm, ranks, *id, rank, config);
  });
}

ncclResult_t ncclCommInitAll(ncclComm_t* comms, int count, const int* devices) {
  if (const ncclResult_t injected = begin_call("ncclCommInitAll")) return injected;
  int present = 0;
  if (const cudaError_t error = cudaGetDeviceCount(&present)) {
    return refuse(ncclUnhandledCudaError,
                  std::string("cudaGetDeviceCount failed: ") + cudaGetErrorName(error));
  }
  if (comms == nullptr || count < 1) return refuse(ncclInvalidArgument, "no communicators");
  for (int rank = 0; rank < count; ++rank) {
    const int device = devices == nullptr ? rank : devices[rank];
    if (device < 0 || device >= present) {
      return refuse(ncclInvalidArgument, "there is no device " + std::to_string(device));
    }
  }
  const auto setup = std::make_shared<Setup>(static_cast<std::size_t>(count));
  return grouped([&] {
    for (int rank = 0; rank < count; ++rank) {
      const auto member = std::make_shared<Member>();
      member->setup = setup;
      member->device = devices == nullptr ? rank : devices[rank];
      if (const ncclResult_t bad =
              come(setup, rank, {member, member->outcome, 0, rank, rank},
                   static_cast<std::size_t>(count), true, true, comms + rank)) {
        return bad;
      }
    }
    return ncclSuccess;
  });
}

ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t* part,
                           ncclConfig_t* config) {
  return grouped([&] {
    if (const ncclResult_t injected = begin_call("ncclCommSplit")) return injected;
    if (part == nullptr) return refuse(ncclInvalidArgument, "the place for a part is null");
    *part = nullptr;
    if (const ncclResult_t bad = ensure_ready(comm)) return bad;
    if (color < 0 && color != NCCL_SPLIT_NOCOLOR) {
      return refuse(ncclInvalidArgument, "there is no color " + std::to_string(color));
    }
    Member& whole = *comm->member;
    std::shared_ptr<Member> member;
    bool blocking = whole.blocking;
    if (const ncclResult_t bad = read_config(config, blocking)) return bad;
    if (color != NCCL_SPLIT_NOCOLOR) {
      member = std::make_shared<Member>();
      member->blocking = blocking;
      member->device = whole.device;
    }
    const auto outcome = member ? member->outcome : std::make_shared<Outcome>(ncclInProgress);
    const auto size = static_cast<std::size_t>(whole.clique->size());
    std::shared_ptr<Setup> setup;
    {
      const std::lock_guard lock(registry().mutex);
      const std::string name =
          "split " + std::to_string(whole.clique->serial()) + " " + std::to_string(whole.splits++);
      std::shared_ptr<Setup>& found = registry().setups[name];
      if (!found) found = std::make_shared<Setup>(size);
      setup = found;
    }
    if (member) member->setup = setup;
    {
      const std::lock_guard lock(whole.mutex);
      whole.split = outcome;
      whole.next_split = setup;
    }
    // Equal keys: by rank in the whole.
    return come(setup, whole.rank, {member, outcome, color, key, whole.rank}, size, false,
                whole.blocking && blocking, part);
  });
}

ncclResult_t ncclCommFinalize(ncclComm_t comm) {
  if (const ncclResult_t injected = begin_call("ncclCommFinalize")) return injected;
  if (const ncclResult_t bad = ensure_ready(comm)) return bad;
  Member& member = *comm->member;
  {
    const std::lock_guard lock(member.mutex);
    if (std::exchange(member.finalized, true)) {
      return refuse(ncclInvalidArgument, "the communicator was finalized already");
    }
  }
  if (!member.blocking) return ncclInProgress;
  wait_for_streams(member);
  member.clique->leave(member.rank);
  return ncclSuccess;
}

ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  if (const ncclResult_t injected = begin_call("ncclCommDestroy")) return injected;
  if (comm == nullptr) return ncclSuccess;
  if (const ncclResult_t bad = ensure_ready(comm)) return bad;
  wait_for_streams(*comm->member);
  comm->member->clique->leave(comm->member->rank);
  destroy_handle(comm);
  return ncclSuccess;
}

ncclResult_t ncclCommAbort(ncclComm_t comm) {
  if (const ncclResult_t injected = begin_call("ncclCommAbort")) return injected;
  if (comm == nullptr) return ncclSuccess;
  Member& member = *comm->member;
  member.setup->leave();
  conclude(*member.outcome, ncclRemoteError);
  std::shared_ptr<Setup> split;
  std::shared_ptr<Batch> batch;
  {
    const std::lock_guard lock(member.mutex);
    split = member.next_split;
    batch = std::move(member.deferred);
  }
  if (split) split->leave();
  if (batch) {
    const std::lock_guard lock(batch->mutex);
    batch->launched = true;
    batch->parts.clear();
  }
  if (member.outcome->load() == ncclSuccess) member.clique->abort(member.rank);
  destroy_handle(comm);
  return ncclSuccess;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* error) {
  if (const ncclResult_t injected = begin_call("ncclCommGetAsyncError")) return injected;
  if (comm == nullptr || error == nullptr) return ncclInvalidArgument;
  *error = poll(*comm->member);
  return ncclSuccess;
}

ncclResult_t ncclCommCount(const ncclComm_t comm, int* count) {
  if (const ncclResult_t injected = begin_call("ncclCommCount")) return injected;
  if (count == nullptr) return ncclInvalidArgument;
  if (const ncclResult_t bad = ensure_ready(comm)) return bad;
  *count = comm->member->clique->size();
  return ncclSuccess;
}

ncclResult_t ncclCommUserRank(const ncclComm_t comm, int* rank) {
  if (const ncclResult_t injected = begin_call("ncclCommUserRank")) return injected;
  if (rank == nullptr) return ncclInvalidArgument;
  if (const ncclResult_t bad = ensure_ready(comm)) return bad;
  *rank = comm->member->rank;
  return ncclSuccess;
}

ncclResult_t ncclCommCuDevice(const ncclComm_t comm, int* device) {
  if (const ncclResult_t injected = begin_call("ncclCommCuDevice")) return injected;
  if (device == nullptr) return ncclInvalidArgument;
  if (const ncclResult_t bad = ensure_ready(comm)) return bad;
  *device = comm->member->device;
  return ncclSuccess;
}

ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t* op, void* scalar, ncclDataType_t type,
                                      ncclScalarResidence_t residence, ncclComm_t comm) {
  if (const ncclResult_t injected = begin_call("ncclRedOpCreatePreMulSum")) return injected;
  if (const ncclResult_t bad = ensure_ready(comm)) return bad;
  if (op == nullptr || scalar == nullptr || type < 0 || type >= ncclNumTypes) {
    return refuse(ncclInvalidArgument, "ncclRedOpCreatePreMulSum: a wrong argument");
  }
  Multiplier multiplier{type, {}, nullptr};
  if (residence == ncclScalarDevice) {
    multiplier.on_device = scalar;
  } else {
    std::memcpy(multiplier.value.data(), scalar, size_of(type));
  }
  // Different for all communicators, so that one's isn't taken for another's.
  static std::atomic<int> last{ncclNumOps};
  const int handle = last.fetch_add(1, std::memory_order_relaxed) + 1;
  const std::lock_guard lock(comm->member->mutex);
  comm->member->multipliers.emplace(handle, multiplier);
  *op = static_cast<ncclRedOp_t>(handle);
  return ncclSuccess;
}

ncclResult_t ncclRedOpDestroy(ncclRedOp_t op, ncclComm_t comm) {
  if (const ncclResult_t injected = begin_call("ncclRedOpDestroy")) return injected;
  if (comm == nullptr) return ncclInvalidArgument;
  const std::lock_guard lock(comm->member->mutex);
  if (comm->member->multipliers.erase(op) == 1) return ncclSuccess;
  return refuse(ncclInvalidArgument, "ncclRedOpDestroy: the reduction isn't this communicator's");
}

ncclResult_t ncclReduce(const void* send, void* recv, size_t count, ncclDataType_t type,
                        ncclRedOp_t op, int root, ncclComm_t comm, cudaStream_t stream) {
  return call("ncclReduce", comm,
              {.kind = Kind::reduce,
               .send = send,
               .recv = recv,
               .count = count,
               .type = type,
               .op = op,
               .root = root},
              stream);
}

ncclResult_t ncclBcast(void* buffer, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                       cudaStream_t stream) {
  return call("ncclBcast", comm,
              {.kind = Kind::broadcast,
               .send = buffer,
               .recv = buffer,
               .count = count,
               .type = type,
               .root = root},
              stream);
}

ncclResult_t ncclBroadcast(const void* send, void* recv, size_t count, ncclDataType_t type,
                           int root, ncclComm_t comm, cudaStream_t stream) {
  return call("ncclBroadcast", comm,
              {.kind = Kind::broadcast,
               .send = send,
               .recv = recv,
               .count = count,
               .type = type,
               .root = root},
              stream);
}

ncclResult_t ncclAllReduce(const void* send, void* recv, size_t count, ncclDataType_t type,
                           ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
  return call("ncclAllReduce", comm,
              {.kind = Kind::all_reduce,
               .send = send,
               .recv = recv,
               .count = count,
               .type = type,
               .op = op},
              stream);
}

ncclResult_t ncclReduceScatter(const void* send, void* recv, size_t count, ncclDataType_t type,
                               ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
  return call("ncclReduceScatter", comm,
              {.kind = Kind::reduce_scatter,
               .send = send,
               .recv = recv,
               .count = count,
               .type = type,
               .op = op},
              stream);
}

ncclResult_t ncclAllGather(const void* send, void* recv, size_t count, ncclDataType_t type,
                           ncclComm_t comm, cudaStream_t stream) {
  return call("ncclAllGather", comm,
              {.kind = Kind::all_gather, .send = send, .recv = recv, .count = count, .type = type},
              stream);
}

ncclResult_t ncclSend(const void* send, size_t count, ncclDataType_t type, int peer,
                      ncclComm_t comm, cudaStream_t stream) {
  return call("ncclSend", comm,
              {.kind = Kind::send, .send = send, .count = count, .type = type, .root = peer},
              stream);
}

ncclResult_t ncclRecv(void* recv, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
  return call("ncclRecv", comm,
              {.kind = Kind::recv, .recv = recv, .count = count, .type = type, .root = peer},
              stream);
}

ncclResult_t ncclGroupStart() {
  if (const ncclResult_t injected = begin_call("ncclGroupStart")) return injected;
  ++group().depth;
  return ncclSuccess;
}

ncclResult_t ncclGroupEnd() {
  const ncclResult_t injected = begin_call("ncclGroupEnd");
  if (injected != ncclSuccess && group().error == ncclSuccess) group().error = injected;
  return end_group();
}

}  // extern "C"
