// SPDX-License-Identifier: Apache-2.0
/// @file
/// The fake CUDA runtime: devices, errors, and what tests control.
#include "fake/cuda_runtime.hpp"

#include <algorithm>
#include <cstdio>
#include <utility>

#include "fake/cuda_state.hpp"

namespace zero_emulation {

namespace detail {

namespace {

thread_local cudaError_t last_error = cudaSuccess;

struct ErrorName {
  cudaError_t code;
  const char* name;
  const char* text;
};
#define ZERO_FAKE_ERROR(code, text) {code, #code, text}
constexpr ErrorName error_names[] = {
    ZERO_FAKE_ERROR(cudaSuccess, "no error"),
    ZERO_FAKE_ERROR(cudaErrorInvalidValue, "invalid argument"),
    ZERO_FAKE_ERROR(cudaErrorMemoryAllocation, "out of memory"),
    ZERO_FAKE_ERROR(cudaErrorInitializationError, "initialization error"),
    ZERO_FAKE_ERROR(cudaErrorInvalidConfiguration, "invalid configuration argument"),
    ZERO_FAKE_ERROR(cudaErrorInvalidDeviceFunction, "invalid device function"),
    ZERO_FAKE_ERROR(cudaErrorInsufficientDriver,
                    "CUDA driver version is insufficient for CUDA runtime version"),
    ZERO_FAKE_ERROR(cudaErrorNoDevice, "no CUDA-capable device is detected"),
    ZERO_FAKE_ERROR(cudaErrorInvalidDevice, "invalid device ordinal"),
    ZERO_FAKE_ERROR(cudaErrorNoKernelImageForDevice,
                    "no kernel image is available for execution on the device"),
    ZERO_FAKE_ERROR(cudaErrorECCUncorrectable, "uncorrectable ECC error encountered"),
    ZERO_FAKE_ERROR(cudaErrorInvalidResourceHandle, "invalid resource handle"),
    ZERO_FAKE_ERROR(cudaErrorIllegalState,
                    "the operation cannot be performed in the present state"),
    ZERO_FAKE_ERROR(cudaErrorNotReady, "device not ready"),
    ZERO_FAKE_ERROR(cudaErrorIllegalAddress, "an illegal memory access was encountered"),
    ZERO_FAKE_ERROR(cudaErrorMisalignedAddress, "misaligned address"),
    ZERO_FAKE_ERROR(cudaErrorPeerAccessAlreadyEnabled, "peer access is already enabled"),
    ZERO_FAKE_ERROR(cudaErrorPeerAccessNotEnabled, "peer access has not been enabled"),
    ZERO_FAKE_ERROR(cudaErrorHostMemoryAlreadyRegistered,
                    "part or all of the requested memory range is already mapped"),
    ZERO_FAKE_ERROR(cudaErrorHostMemoryNotRegistered,
                    "pointer does not correspond to a registered memory region"),
    ZERO_FAKE_ERROR(cudaErrorLaunchFailure, "unspecified launch failure"),
    ZERO_FAKE_ERROR(cudaErrorLaunchOutOfResources, "too many resources requested for launch"),
    ZERO_FAKE_ERROR(cudaErrorNotSupported, "operation not supported"),
    ZERO_FAKE_ERROR(cudaErrorStreamCaptureUnsupported,
                    "operation not permitted when stream is capturing"),
    ZERO_FAKE_ERROR(cudaErrorStreamCaptureInvalidated,
                    "operation failed due to a previous error during capture"),
    ZERO_FAKE_ERROR(cudaErrorStreamCaptureMerge,
                    "operation would result in a merge of separate capture sequences"),
    ZERO_FAKE_ERROR(cudaErrorStreamCaptureUnmatched,
                    "capture was not ended in the same stream as "
                    "it began"),
    ZERO_FAKE_ERROR(cudaErrorStreamCaptureUnjoined, "capturing stream has unjoined work"),
    ZERO_FAKE_ERROR(cudaErrorStreamCaptureIsolation,
                    "dependency created on uncaptured work in another stream"),
    ZERO_FAKE_ERROR(cudaErrorStreamCaptureImplicit,
                    "operation would make the legacy stream depend on a capturing blocking "
                    "stream"),
    ZERO_FAKE_ERROR(cudaErrorCapturedEvent,
                    "operation not permitted on an event last recorded in a capturing stream"),
    ZERO_FAKE_ERROR(cudaErrorStreamCaptureWrongThread,
                    "attempt to terminate a thread-local capture sequence from another thread"),
    ZERO_FAKE_ERROR(cudaErrorUnknown, "unknown error"),
};
#undef ZERO_FAKE_ERROR

const ErrorName* find_error(cudaError_t code) {
  const auto* found = std::find_if(std::begin(error_names), std::end(error_names),
                                   [code](const ErrorName& each) { return each.code == code; });
  return found == std::end(error_names) ? nullptr : found;
}

bool driver_is_too_old() { return runtime().driver_version / 1000 < CUDART_VERSION / 1000; }

bool is_device(int device) { return device >= 0 && device < runtime().device_count; }

// A call that works without any device, or that must say why there is none.
template <class Body>
cudaError_t plain_call(const Body& body) {
  cudaError_t code = cudaSuccess;
  {
    const HostGuard guard;
    code = body();
  }
  return note(code);
}

int attribute(cudaDeviceAttr attr) {
  switch (attr) {
    case cudaDevAttrMaxThreadsPerBlock: return 1024;
    case cudaDevAttrMaxBlockDimX:
    case cudaDevAttrMaxBlockDimY: return 1024;
    case cudaDevAttrMaxBlockDimZ: return 64;
    case cudaDevAttrMaxGridDimX: return INT32_MAX;
    case cudaDevAttrMaxGridDimY:
    case cudaDevAttrMaxGridDimZ: return UINT16_MAX;
    case cudaDevAttrMaxSharedMemoryPerBlock: return 48 << 10;
    case cudaDevAttrWarpSize: return 32;
    case cudaDevAttrMultiProcessorCount: return 4;
    case cudaDevAttrMaxThreadsPerMultiProcessor: return 2048;
    case cudaDevAttrMaxBlocksPerMultiprocessor: return 32;
    case cudaDevAttrL2CacheSize: return 1 << 20;
    case cudaDevAttrComputeCapabilityMajor: return 9;
    case cudaDevAttrComputeCapabilityMinor: return 0;
    case cudaDevAttrConcurrentKernels:
    case cudaDevAttrUnifiedAddressing:
    case cudaDevAttrManagedMemory:
    case cudaDevAttrConcurrentManagedAccess:
    case cudaDevAttrStreamPrioritiesSupported:
    case cudaDevAttrHostRegisterSupported:
    case cudaDevAttrMemoryPoolsSupported: return 1;
    default: return 0;
  }
}

}  // namespace

cudaError_t note(cudaError_t code) {
  if (code != cudaSuccess) last_error = code;
  return code;
}

cudaError_t admit(const char* function) {
  Runtime& all = runtime();
  if (driver_is_too_old()) return cudaErrorInsufficientDriver;
  if (all.device_count == 0) return cudaErrorNoDevice;
  for (auto fault = all.faults.begin(); fault != all.faults.end(); ++fault) {
    if (fault->function != function || --fault->remaining > 0) continue;
    const cudaError_t code = fault->code;
    all.faults.erase(fault);
    return code;
  }
  return cudaSuccess;
}

}  // namespace detail

using namespace detail;

Counters counters() {
  const HostGuard guard;
  return runtime().counted;
}

Alive alive() {
  const HostGuard guard;
  return runtime().living;
}

std::size_t memory_in_use(int device) {
  const HostGuard guard;
  return runtime().devices[device].in_use;
}

std::size_t peak_memory(int device) {
  const HostGuard guard;
  return runtime().devices[device].peak;
}

void reset() {
  const HostGuard guard;
  Runtime& all = runtime();
  all.counted = {};
  all.faults.clear();
  all.device_count = 1;
  all.driver_version = CUDART_VERSION;
  all.total_memory = std::size_t{16} << 30;
  all.delay_microseconds = 0;
  all.scramble_seed = 0;
  for (Device& device : all.devices) {
    device.broken = cudaSuccess;
    device.peak = device.in_use;
    device.peers = 0;
  }
  last_error = cudaSuccess;
  current_device() = 0;
}

void set_devices(int count) {
  const HostGuard guard;
  runtime().device_count = std::clamp(count, 0, max_devices);
}

void set_driver_version(int version) {
  const HostGuard guard;
  runtime().driver_version = version;
}

void set_total_memory(std::size_t bytes) {
  const HostGuard guard;
  runtime().total_memory = bytes;
}

void fail(const char* function, int nth, cudaError_t code) {
  const HostGuard guard;
  runtime().faults.push_back({function, nth, code});
}

void ignore_wait(std::uint64_t nth) { detail::wait_to_ignore() = nth; }
bool wait_was_ignored() { return detail::wait_to_ignore() == 0; }

namespace {
thread_local int calls_under_way = 0;
}  // namespace

InRuntime::InRuntime() { ++calls_under_way; }
InRuntime::~InRuntime() { --calls_under_way; }
bool InRuntime::now() noexcept { return calls_under_way != 0; }

void break_device(int device, cudaError_t code) {
  runtime().devices[device].broken.store(code, std::memory_order_relaxed);
}

void delay(std::uint64_t seed, unsigned max_microseconds) {
  runtime().delay_seed.store(seed, std::memory_order_relaxed);
  runtime().delay_microseconds.store(max_microseconds, std::memory_order_relaxed);
}

void scramble_blocks(std::uint64_t seed) {
  runtime().scramble_seed.store(seed, std::memory_order_relaxed);
}

}  // namespace zero_emulation

using namespace zero_emulation::detail;

cudaError_t cudaGetLastError() {
  const cudaError_t lasting = broken(current_device());
  const cudaError_t code = std::exchange(last_error, cudaSuccess);
  return lasting != cudaSuccess ? lasting : code;
}

cudaError_t cudaPeekAtLastError() {
  const cudaError_t lasting = broken(current_device());
  return lasting != cudaSuccess ? lasting : last_error;
}

const char* cudaGetErrorName(cudaError_t code) {
  const ErrorName* found = find_error(code);
  return found == nullptr ? "unrecognized error code" : found->name;
}

const char* cudaGetErrorString(cudaError_t code) {
  const ErrorName* found = find_error(code);
  return found == nullptr ? "unrecognized error code" : found->text;
}

cudaError_t cudaDriverGetVersion(int* version) {
  return plain_call([&] {
    *version = runtime().driver_version;
    return cudaSuccess;
  });
}

cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}

cudaError_t cudaGetDeviceCount(int* count) {
  return plain_call([&] {
    *count = 0;
    if (driver_is_too_old()) return cudaErrorInsufficientDriver;
    *count = runtime().device_count;
    return *count == 0 ? cudaErrorNoDevice : cudaSuccess;
  });
}

cudaError_t cudaSetDevice(int device) {
  return plain_call([&] {
    if (driver_is_too_old()) return cudaErrorInsufficientDriver;
    if (runtime().device_count == 0) return cudaErrorNoDevice;
    if (!is_device(device)) return cudaErrorInvalidDevice;
    current_device() = device;
    return broken(device);
  });
}

cudaError_t cudaGetDevice(int* device) {
  return call("cudaGetDevice", [&] {
    *device = current_device();
    return cudaSuccess;
  });
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attr, int device) {
  return call("cudaDeviceGetAttribute", [&] {
    if (!is_device(device)) return cudaErrorInvalidDevice;
    *value = attribute(attr);
    return cudaSuccess;
  });
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  return call("cudaGetDeviceProperties", [&] {
    if (!is_device(device)) return cudaErrorInvalidDevice;
    *properties = {};
    std::snprintf(properties->name, sizeof(properties->name), "Fake device %d", device);
    properties->uuid.bytes[0] = static_cast<char>(device + 1);
    properties->totalGlobalMem = runtime().total_memory;
    properties->sharedMemPerBlock = std::size_t{48} << 10;
    properties->regsPerBlock = 65536;
    properties->warpSize = attribute(cudaDevAttrWarpSize);
    properties->maxThreadsPerBlock = attribute(cudaDevAttrMaxThreadsPerBlock);
    properties->maxThreadsDim[0] = 1024;
    properties->maxThreadsDim[1] = 1024;
    properties->maxThreadsDim[2] = 64;
    properties->maxGridSize[0] = INT32_MAX;
    properties->maxGridSize[1] = UINT16_MAX;
    properties->maxGridSize[2] = UINT16_MAX;
    properties->major = attribute(cudaDevAttrComputeCapabilityMajor);
    properties->multiProcessorCount = attribute(cudaDevAttrMultiProcessorCount);
    properties->maxThreadsPerMultiProcessor = attribute(cudaDevAttrMaxThreadsPerMultiProcessor);
    properties->maxBlocksPerMultiProcessor = attribute(cudaDevAttrMaxBlocksPerMultiprocessor);
    properties->l2CacheSize = attribute(cudaDevAttrL2CacheSize);
    properties->concurrentKernels = 1;
    properties->pciBusID = device;
    properties->unifiedAddressing = 1;
    properties->managedMemory = 1;
    properties->concurrentManagedAccess = 1;
    properties->memoryPoolsSupported = 1;
    properties->streamPrioritiesSupported = 1;
    properties->hostRegisterSupported = 1;
    return cudaSuccess;
  });
}

cudaError_t cudaDeviceGetPCIBusId(char* id, int length, int device) {
  return call("cudaDeviceGetPCIBusId", [&] {
    if (!is_device(device)) return cudaErrorInvalidDevice;
    std::snprintf(id, static_cast<std::size_t>(length), "0000:%02x:00.0", unsigned(device));
    return cudaSuccess;
  });
}

cudaError_t cudaDeviceCanAccessPeer(int* can, int device, int peer) {
  return call("cudaDeviceCanAccessPeer", [&] {
    if (!is_device(device) || !is_device(peer)) return cudaErrorInvalidDevice;
    *can = device != peer ? 1 : 0;
    return cudaSuccess;
  });
}

cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned flags) {
  return call("cudaDeviceEnablePeerAccess", [&] {
    if (flags != 0) return cudaErrorInvalidValue;
    if (!is_device(peer) || peer == current_device()) return cudaErrorInvalidDevice;
    std::uint64_t& peers = runtime().devices[current_device()].peers;
    const std::uint64_t bit = std::uint64_t{1} << peer;
    if ((peers & bit) != 0) return cudaErrorPeerAccessAlreadyEnabled;
    peers |= bit;
    return cudaSuccess;
  });
}

cudaError_t cudaMemGetInfo(std::size_t* free, std::size_t* total) {
  return call("cudaMemGetInfo", [&] {
    *total = runtime().total_memory;
    *free = *total - std::min(*total, runtime().devices[current_device()].in_use);
    return cudaSuccess;
  });
}

cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* pool, int device) {
  return call("cudaDeviceGetDefaultMemPool", [&] {
    if (!is_device(device)) return cudaErrorInvalidDevice;
    *pool = reinterpret_cast<cudaMemPool_t>(&runtime().devices[device]);
    return cudaSuccess;
  });
}

// A pool keeps no memory here, so attributes change nothing.
cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t, cudaMemPoolAttr, void*) {
  return call("cudaMemPoolSetAttribute", [] { return cudaSuccess; });
}
cudaError_t cudaMemPoolTrimTo(cudaMemPool_t, std::size_t) {
  return call("cudaMemPoolTrimTo", [] { return cudaSuccess; });
}
