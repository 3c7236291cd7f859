// SPDX-License-Identifier: Apache-2.0
/// @file
/// Copies between many parameters and contiguous memory, and of small things from the host.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <type_traits>
#include <vector>

#include "zero/config.hpp"
#include "zero/cuda/detail/fragments.cuh"
#include "zero/cuda/detail/launch.cuh"
#include "zero/cuda/detail/vectors.cuh"
#include "zero/cuda/stream.hpp"
#include "zero/detail/rounding.hpp"
#include "zero/element.hpp"

namespace zero::cuda::detail {

/// Fragments, and the bucket that they lie in one after the other: each at its `begin`.
/// @tparam T the elements' type
/// @tparam B the bucket's: `T`, or 16 bits for gradients of float
template <Element T, Element B = T>
struct CopyTask {
  const DeviceFragment<T>* fragments;
  const Chunk* chunks;
  std::size_t chunk_count;
  B* bucket;
  /// Where given, nothing is copied if the step is skipped: a rank that refuses it may have done so
  /// because its values are not where they were.
  const StepState* step = nullptr;
};

inline constexpr unsigned copy_threads = 256;

template <Element T, Element B>
__global__ void pack_gradients_kernel(CopyTask<T, B> task) {
  for (std::size_t c = blockIdx.x; c < task.chunk_count; c += gridDim.x) {
    const Chunk chunk = task.chunks[c];
    const auto& fragment = task.fragments[chunk.fragment];
    B* const to = task.bucket + fragment.begin + chunk.begin;
    if (fragment.gradient == nullptr) {
      for (unsigned i = threadIdx.x; i < chunk.elements; i += blockDim.x) {
        to[i] = zero::detail::zero_of<B>();
      }
    } else {
      transform_elements(fragment.gradient + chunk.begin, to, chunk.elements, [](const T& x) {
        if constexpr (std::is_same_v<T, B>) {
          return x;
        } else {
          return zero::detail::round_to<B, Rounding::nearest>(zero::detail::load_element(x));
        }
      });
    }
  }
}

/// @tparam pack whether values go into the bucket, or come out of it
template <bool pack, Element T>
__global__ void copy_values_kernel(CopyTask<T> task) {
  if (task.step != nullptr && task.step->skip != 0) return;
  for (std::size_t c = blockIdx.x; c < task.chunk_count; c += gridDim.x) {
    const Chunk chunk = task.chunks[c];
    const auto& fragment = task.fragments[chunk.fragment];
    T* const values = fragment.values + chunk.begin;
    T* const bucket = task.bucket + fragment.begin + chunk.begin;
    transform_elements(pack ? values : bucket, pack ? bucket : values, chunk.elements,
                       [](const T& x) { return x; });
  }
}

/// Gradients into the bucket, rounded to nearest where it has fewer bits; zeros where there is no
/// gradient.
template <Element T, Element B>
void pack_gradients(const CopyTask<T, B>& task, StreamView stream) {
  launch("pack_gradients", &pack_gradients_kernel<T, B>,
         one_block_each(task.chunk_count, copy_threads), stream, task);
}

/// Values into the bucket.
template <Element T>
void pack_values(const CopyTask<T>& task, StreamView stream) {
  launch("pack_values", &copy_values_kernel<true, T>,
         one_block_each(task.chunk_count, copy_threads), stream, task);
}

/// The bucket into the values.
template <Element T>
void unpack_values(const CopyTask<T>& task, StreamView stream) {
  launch("unpack_values", &copy_values_kernel<false, T>,
         one_block_each(task.chunk_count, copy_threads), stream, task);
}

/// What a launch carries along; its parameters are 4 KiB at most.
template <std::size_t size>
struct Parcel {
  unsigned char bytes[size];
};

template <std::size_t size>
__global__ void upload_kernel(unsigned char* to, const __grid_constant__ Parcel<size> parcel,
                              unsigned count) {
  for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) {
    to[i] = parcel.bytes[i];
  }
}

/// Bytes of the host into device memory. They travel with the launches: no memory of the host is
/// read after the return, nothing waits, and a graph that captures it keeps the bytes.
/// For small things: every 3.5 KiB are a launch.
inline void upload(void* device, std::span<const std::byte> bytes, StreamView stream) {
  constexpr std::size_t size = 3584;
  auto* to = static_cast<unsigned char*>(device);
  while (!bytes.empty()) {
    Parcel<size> parcel;
    const std::size_t some = std::min(bytes.size(), size);
    std::memcpy(parcel.bytes, bytes.data(), some);
    const auto blocks = (some + copy_threads - 1) / copy_threads;
    launch("upload", &upload_kernel<size>, one_block_each(blocks, copy_threads), stream, to, parcel,
           static_cast<unsigned>(some));
    to += some;
    bytes = bytes.subspan(some);
  }
}

/// A run of device memory.
struct ByteRange {
  unsigned char* begin;
  std::size_t bytes;
};

/// The same memory in ranges of a size that blocks share well.
[[nodiscard]] inline std::vector<ByteRange> cut(std::span<const ByteRange> ranges) {
  constexpr std::size_t most = std::size_t{1} << 16;
  std::vector<ByteRange> pieces;
  for (ByteRange rest : ranges) {
    while (rest.bytes != 0) {
      const std::size_t some =
          std::min(rest.bytes, most - reinterpret_cast<std::uintptr_t>(rest.begin) % access_bytes);
      pieces.push_back({rest.begin, some});
      rest = {rest.begin + some, rest.bytes - some};
    }
  }
  return pieces;
}

template <unsigned width>
__global__ void clear_kernel(const ByteRange* ranges, std::size_t count) {
  for (std::size_t r = blockIdx.x; r < count; r += gridDim.x) {
    const ByteRange range = ranges[r];
    const std::size_t skipped = elements_to_vector<width>(range.begin);
    const std::size_t head = skipped < range.bytes ? skipped : range.bytes;
    const std::size_t end = head + (range.bytes - head) / width * width;
    for (std::size_t i = threadIdx.x; i < head + (range.bytes - end); i += blockDim.x) {
      range.begin[i < head ? i : i - head + end] = 0;
    }
    for (std::size_t i = head + threadIdx.x * width; i < end; i += blockDim.x * width) {
      store_vector<width>(Vector<unsigned char, width>{}, range.begin + i);
    }
  }
}

/// Fills all `ranges`, a table in device memory, with zeros.
inline void clear(const ByteRange* ranges, std::size_t count, StreamView stream) {
  launch("clear", &clear_kernel<access_bytes>, one_block_each(count, copy_threads), stream, ranges,
         count);
}

}  // namespace zero::cuda::detail
