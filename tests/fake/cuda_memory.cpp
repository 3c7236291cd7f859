// SPDX-License-Identifier: Apache-2.0
/// @file
/// The fake CUDA runtime: memory and copies.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "fake/cuda_state.hpp"

namespace zero_emulation::detail {

namespace {

// The block that holds the address.
const Block* block_of(const void* pointer, std::uintptr_t* begin = nullptr) {
  const auto address = reinterpret_cast<std::uintptr_t>(pointer);
  auto after = runtime().blocks.upper_bound(address);
  if (after == runtime().blocks.begin()) return nullptr;
  --after;
  // One past the end belongs to nobody, but for an empty block.
  if (address - after->first >= std::max<std::size_t>(after->second.size, 1)) return nullptr;
  if (begin != nullptr) *begin = after->first;
  return &after->second;
}

bool counts_as_device_memory(const Block& block) { return block.type != cudaMemoryTypeHost; }

cudaError_t allocate(void** pointer, std::size_t bytes, cudaMemoryType type) {
  if (pointer == nullptr) return cudaErrorInvalidValue;
  *pointer = nullptr;
  if (bytes == 0) return type == cudaMemoryTypeManaged ? cudaErrorInvalidValue : cudaSuccess;
  Device& device = runtime().devices[current_device()];
  const Block block{bytes, type, current_device(), true};
  if (counts_as_device_memory(block) &&
      (device.in_use > runtime().total_memory || bytes > runtime().total_memory - device.in_use))
    return cudaErrorMemoryAllocation;
  // As aligned as CUDA's, and of the exact size, so that AddressSanitizer sees what lies behind.
  if (posix_memalign(pointer, 256, bytes) != 0) return cudaErrorMemoryAllocation;
  runtime().blocks.emplace(reinterpret_cast<std::uintptr_t>(*pointer), block);
  ++runtime().counted.allocations;
  ++runtime().living.allocations;
  if (counts_as_device_memory(block)) {
    device.in_use += bytes;
    device.peak = std::max(device.peak, device.in_use);
  }
  return cudaSuccess;
}

// What is not a number in any type, so that whoever reads what nobody wrote sees it.
void fill_with_garbage(void* pointer, std::size_t bytes) { std::memset(pointer, 0xFF, bytes); }

cudaError_t allocate_filled(const char* function, void** pointer, std::size_t bytes,
                            cudaMemoryType type) {
  const cudaError_t code = call(function, [&] {
    const cudaError_t refused = forbidden_by_capture();
    return refused != cudaSuccess ? refused : allocate(pointer, bytes, type);
  });
  if (code == cudaSuccess && bytes > 0) fill_with_garbage(*pointer, bytes);
  return code;
}

// No longer known; its memory is still there.
cudaError_t forget(void* pointer, bool of_host) {
  const auto found = runtime().blocks.find(reinterpret_cast<std::uintptr_t>(pointer));
  if (found == runtime().blocks.end() || !found->second.owned ||
      (found->second.type == cudaMemoryTypeHost) != of_host)
    return cudaErrorInvalidValue;
  if (counts_as_device_memory(found->second))
    runtime().devices[found->second.device].in_use -= found->second.size;
  runtime().blocks.erase(found);
  ++runtime().counted.frees;
  --runtime().living.allocations;
  return cudaSuccess;
}

// As CUDA's, a free waits for what the device may still do with the memory.
cudaError_t free_waiting(const char* function, void* pointer, bool of_host) {
  Waits waits;
  bool known = false;
  const cudaError_t code = release_call(
      function,
      [&] {
        if (pointer == nullptr) return cudaSuccess;
        const cudaError_t refused = forbidden_by_capture();
        if (refused != cudaSuccess) return refused;
        const Block* block = block_of(pointer);
        const int device = block == nullptr ? current_device() : block->device;
        const cudaError_t forgotten = forget(pointer, of_host);
        if (forgotten != cudaSuccess) return forgotten;
        known = true;
        ++runtime().counted.host_synchronizations;
        // Of pinned memory CUDA promises no such thing.
        if (!of_host) wait_for_device(device, waits);
        return cudaSuccess;
      },
      &waits);
  if (known) std::free(pointer);
  return code;
}

enum class Side { host, pinned, device };

Side side_of(const void* pointer) {
  const Block* block = block_of(pointer);
  if (block == nullptr) return Side::host;
  return block->type == cudaMemoryTypeHost ? Side::pinned : Side::device;
}

// Where the kind leaves no doubt it is believed, so that heap memory may stand for a device's.
Side source_of(const void* pointer, cudaMemcpyKind kind) {
  const bool device = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
  return device ? Side::device : side_of(pointer);
}
Side target_of(const void* pointer, cudaMemcpyKind kind) {
  const bool device = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
  return device ? Side::device : side_of(pointer);
}

// Copies as CUDA documents them: pageable sources are read at once, pageable targets are written
// when the call returns, between devices nothing waits.
cudaError_t copy(const char* function, void* to, const void* from, std::size_t bytes,
                 cudaMemcpyKind kind, cudaStream_t stream, bool async) {
  if (bytes == 0) return call(function, [] { return cudaSuccess; });
  std::vector<std::byte> staged;
  bool stage = false;
  const cudaError_t looked = call(function, [&] {
    const Stream* found = find(stream);
    stage = async && found->capture == nullptr && source_of(from, kind) == Side::host &&
            target_of(to, kind) == Side::device;
    return to == nullptr || from == nullptr ? cudaErrorInvalidValue : cudaSuccess;
  });
  if (looked != cudaSuccess) return looked;
  if (stage) {
    const auto* first = static_cast<const std::byte*>(from);
    staged.assign(first, first + bytes);
  }
  Waits waits;
  return call(
      "copy",
      [&] {
        Stream& found = *find(stream);
        const bool waits_for_end =
            async ? target_of(to, kind) == Side::host && found.capture == nullptr
                  : source_of(from, kind) != Side::device || target_of(to, kind) != Side::device;
        std::function<void()> body;
        if (stage) {
          body = [to, bytes, staged = std::move(staged)] { std::memcpy(to, staged.data(), bytes); };
        } else {
          body = [to, from, bytes] { std::memmove(to, from, bytes); };
        }
        const cudaError_t code = submit(found, Work::copy, std::move(body));
        if (code != cudaSuccess || !waits_for_end) return code;
        ++runtime().counted.host_synchronizations;
        waits.tickets.push_back(found.mark());
        return code;
      },
      &waits);
}

cudaError_t fill(const char* function, void* pointer, int value, std::size_t bytes,
                 cudaStream_t stream) {
  return call(function, [&] {
    if (bytes == 0) return cudaSuccess;
    if (pointer == nullptr) return cudaErrorInvalidValue;
    return submit(*find(stream), Work::fill,
                  [pointer, value, bytes] { std::memset(pointer, value, bytes); });
  });
}

}  // namespace

}  // namespace zero_emulation::detail

using namespace zero_emulation::detail;

cudaError_t cudaMalloc(void** pointer, std::size_t bytes) {
  return allocate_filled("cudaMalloc", pointer, bytes, cudaMemoryTypeDevice);
}
cudaError_t cudaMallocManaged(void** pointer, std::size_t bytes, unsigned) {
  return allocate_filled("cudaMallocManaged", pointer, bytes, cudaMemoryTypeManaged);
}
cudaError_t cudaMallocHost(void** pointer, std::size_t bytes) {
  return allocate_filled("cudaMallocHost", pointer, bytes, cudaMemoryTypeHost);
}
cudaError_t cudaHostAlloc(void** pointer, std::size_t bytes, unsigned) {
  return allocate_filled("cudaHostAlloc", pointer, bytes, cudaMemoryTypeHost);
}

cudaError_t cudaFree(void* pointer) { return free_waiting("cudaFree", pointer, false); }
cudaError_t cudaFreeHost(void* pointer) { return free_waiting("cudaFreeHost", pointer, true); }

cudaError_t cudaMallocAsync(void** pointer, std::size_t bytes, cudaStream_t stream) {
  return call("cudaMallocAsync", [&] {
    Stream& found = *find(stream);
    if (found.capture != nullptr) return cudaErrorStreamCaptureUnsupported;
    const int device = std::exchange(current_device(), found.device);
    cudaError_t code = allocate(pointer, bytes, cudaMemoryTypeDevice);
    current_device() = device;
    if (code != cudaSuccess || bytes == 0) return code;
    // In stream order, as the memory comes: who uses it elsewhere too early is seen to.
    return submit(found, Work::memory,
                  [pointer = *pointer, bytes] { fill_with_garbage(pointer, bytes); });
  });
}

cudaError_t cudaFreeAsync(void* pointer, cudaStream_t stream) {
  return release_call("cudaFreeAsync", [&] {
    if (pointer == nullptr) return cudaSuccess;
    Stream& found = *find(stream);
    if (found.capture != nullptr) return cudaErrorStreamCaptureUnsupported;
    const cudaError_t code = forget(pointer, false);
    if (code != cudaSuccess) return code;
    return submit(found, Work::memory, [pointer] { std::free(pointer); });
  });
}

cudaError_t cudaHostRegister(void* pointer, std::size_t bytes, unsigned) {
  return call("cudaHostRegister", [&] {
    if (pointer == nullptr || bytes == 0) return cudaErrorInvalidValue;
    if (block_of(pointer) != nullptr) return cudaErrorHostMemoryAlreadyRegistered;
    runtime().blocks.emplace(reinterpret_cast<std::uintptr_t>(pointer),
                             Block{bytes, cudaMemoryTypeHost, current_device(), false});
    return cudaSuccess;
  });
}

cudaError_t cudaHostUnregister(void* pointer) {
  return call("cudaHostUnregister", [&] {
    const auto found = runtime().blocks.find(reinterpret_cast<std::uintptr_t>(pointer));
    if (found == runtime().blocks.end() || found->second.owned)
      return cudaErrorHostMemoryNotRegistered;
    runtime().blocks.erase(found);
    return cudaSuccess;
  });
}

cudaError_t cudaHostGetDevicePointer(void** device, void* host, unsigned) {
  return call("cudaHostGetDevicePointer", [&] {
    const Block* block = block_of(host);
    if (block == nullptr || block->type != cudaMemoryTypeHost) return cudaErrorInvalidValue;
    *device = host;
    return cudaSuccess;
  });
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
  return call("cudaPointerGetAttributes", [&] {
    if (attributes == nullptr) return cudaErrorInvalidValue;
    *attributes = {};
    attributes->type = cudaMemoryTypeUnregistered;
    attributes->device = -2;  // as CUDA says of memory it does not know
    const Block* block = block_of(pointer);
    if (block == nullptr) return cudaSuccess;
    attributes->type = block->type;
    attributes->device = block->device;
    attributes->devicePointer = const_cast<void*>(pointer);
    if (block->type != cudaMemoryTypeDevice) attributes->hostPointer = const_cast<void*>(pointer);
    return cudaSuccess;
  });
}

cudaError_t cudaMemcpy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind) {
  return copy("cudaMemcpy", to, from, bytes, kind, cudaStreamLegacy, false);
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream) {
  return copy("cudaMemcpyAsync", to, from, bytes, kind, stream, true);
}
cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, std::size_t bytes,
                                cudaStream_t stream) {
  return copy("cudaMemcpyPeerAsync", to, from, bytes, cudaMemcpyDeviceToDevice, stream, true);
}
cudaError_t cudaMemset(void* pointer, int value, std::size_t bytes) {
  return fill("cudaMemset", pointer, value, bytes, cudaStreamLegacy);
}
cudaError_t cudaMemsetAsync(void* pointer, int value, std::size_t bytes, cudaStream_t stream) {
  return fill("cudaMemsetAsync", pointer, value, bytes, stream);
}
