// SPDX-License-Identifier: Apache-2.0
/// @file
/// Copies between many parameters and contiguous memory, and of small things from the host.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "zero/config.hpp"
#include "zero/cuda/detail/fragments.cuh"
#include "zero/cuda/stream.hpp"
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
};

/// Gradients into the bucket, rounded to nearest where it has fewer bits; zeros where there is no
/// gradient.
template <Element T, Element B>
void pack_gradients(const CopyTask<T, B>& task, StreamView stream);

/// Values into the bucket.
template <Element T>
void pack_values(const CopyTask<T>& task, StreamView stream);

/// The bucket into the values.
template <Element T>
void unpack_values(const CopyTask<T>& task, StreamView stream);

/// Bytes of the host into device memory. They travel with the launches: no memory of the host is
/// read after the return, nothing waits, and a graph that captures it keeps the bytes.
/// For small things: every 3.5 KiB are a launch.
inline void upload(void* device, std::span<const std::byte> bytes, StreamView stream);

/// A run of device memory.
struct ByteRange {
  std::byte* begin;
  std::size_t bytes;
};

/// The same memory in ranges of a size that blocks share well.
[[nodiscard]] inline std::vector<ByteRange> cut(std::span<const ByteRange> ranges);

/// Fills all `ranges`, a table in device memory, with zeros.
inline void clear(const ByteRange* ranges, std::size_t count, StreamView stream);

}  // namespace zero::cuda::detail
