// SPDX-License-Identifier: Apache-2.0
/// @file
/// Fragments of a lane in device memory, bucket after bucket, and their gradients' whereabouts.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory_resource>
#include <span>
#include <utility>
#include <vector>

#include "zero/cuda/detail/copy.cuh"
#include "zero/cuda/detail/fragments.cuh"
#include "zero/cuda/memory.hpp"
#include "zero/cuda/stream.hpp"
#include "zero/detail/space.hpp"
#include "zero/layout.hpp"

namespace zero::cuda::detail {

/// An array on the device with what the host has.
template <class T>
[[nodiscard]] DeviceArray<T> device_copy(std::span<const T> from,
                                         std::pmr::memory_resource* memory) {
  DeviceArray<T> array(from.size(), memory);
  zero::detail::Space<MemorySpace::cuda>::copy(from.data(), from.size(), array.data());
  return array;
}

/// What kernels are given of one bucket, or of several.
template <class T>
struct FragmentRange {
  const DeviceFragment<T>* fragments;  ///< of the whole table: chunks count in it
  const Chunk* chunks;
  std::size_t chunk_count;
};

template <class T>
class FragmentTable {
 public:
  FragmentTable() = default;
  /// @param buckets each one's fragments
  FragmentTable(const std::vector<std::vector<DeviceFragment<T>>>& buckets,
                std::pmr::memory_resource* memory) {
    first_fragment_.push_back(0);
    first_chunk_.push_back(0);
    std::vector<Chunk> chunks;
    for (const auto& fragments : buckets) {
      for (Chunk chunk : make_chunks(std::span<const DeviceFragment<T>>(fragments))) {
        chunk.fragment += static_cast<std::uint32_t>(host_.size());
        chunks.push_back(chunk);
      }
      host_.insert(host_.end(), fragments.begin(), fragments.end());
      first_fragment_.push_back(host_.size());
      first_chunk_.push_back(chunks.size());
    }
    fragments_ = device_copy(std::span<const DeviceFragment<T>>(host_), memory);
    chunks_ = device_copy(std::span<const Chunk>(chunks), memory);
  }

  /// From now on what the device has may be older than what it was last given: graphs bring back
  /// what they were captured with.
  void upload_always() { always_ = true; }

  /// Lets the fragments of the buckets know where their gradients are in this step. Enqueues
  /// something only where that has changed.
  /// @param of a parameter's gradient by its index, or null
  template <class F>
  void find_gradients(Interval buckets, const F& of, StreamView stream) {
    const std::size_t begin = first_fragment_[buckets.begin];
    const std::size_t end = first_fragment_[buckets.end];
    std::size_t first = end, last = begin;  // of those that have changed
    for (std::size_t k = begin; k < end; ++k) {
      DeviceFragment<T>& f = host_[k];
      const T* const whole = of(f.parameter);
      const T* const now = whole == nullptr ? nullptr : whole + f.parameter_begin;
      if (f.gradient == now && !always_) continue;
      f.gradient = now;
      if (first == end) first = k;
      last = k + 1;
    }
    if (first >= last) return;
    upload(fragments_.data() + first, std::as_bytes(std::span(host_).subspan(first, last - first)),
           stream);
  }

  /// As the host knows them.
  [[nodiscard]] std::span<const DeviceFragment<T>> on_host(Interval buckets) const {
    const std::size_t begin = first_fragment_[buckets.begin];
    return std::span(host_).subspan(begin, first_fragment_[buckets.end] - begin);
  }
  [[nodiscard]] FragmentRange<T> of(Interval buckets) const {
    const std::size_t begin = first_chunk_[buckets.begin];
    return {fragments_.data(), chunks_.data() + begin, first_chunk_[buckets.end] - begin};
  }
  [[nodiscard]] std::size_t bytes() const { return fragments_.bytes() + chunks_.bytes(); }

 private:
  bool always_ = false;
  std::vector<DeviceFragment<T>> host_{};
  std::vector<std::size_t> first_fragment_{};  ///< by bucket, and one more
  std::vector<std::size_t> first_chunk_{};     ///< likewise
  DeviceArray<DeviceFragment<T>> fragments_{};
  DeviceArray<Chunk> chunks_{};
};

}  // namespace zero::cuda::detail
