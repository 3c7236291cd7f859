// SPDX-License-Identifier: Apache-2.0
/// @file
/// What kernels work on: runs of many parameters' elements, and how blocks share them. All of it
/// lies in device memory, as plain aggregates.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "zero/config.hpp"
#include "zero/cuda/detail/launch.cuh"

namespace zero::cuda::detail {

/// A run of one parameter's elements.
template <class T>
struct DeviceFragment {
  T* values;          ///< of the first element
  const T* gradient;  ///< of the first element; null: there is none in this step
  std::size_t begin;  ///< where the run starts among slots, masters and sums, or in a bucket
  std::size_t elements;
  std::uint64_t parameter_begin;  ///< the first element, counted in the parameter
  std::uint32_t parameter;        ///< index in the store
};

/// What one block works on at a time.
struct Chunk {
  std::uint32_t fragment;
  std::uint32_t elements;  ///< at most `chunk_elements`
  std::uint64_t begin;     ///< first element, counted in the fragment
};

/// Few enough that the last blocks to finish don't keep a large GPU waiting, enough to pay for
/// looking up fragment and scalars.
inline constexpr std::size_t chunk_elements = 8192;

/// Chunks start, where they do not start their fragment, at multiples of so many elements of
/// `DeviceFragment::begin`'s arrays: whole 128-byte lines of whatever type.
inline constexpr std::size_t chunk_alignment = 64;

/// All elements of all fragments in chunks, in order. Reads lengths and `begin` alone.
template <class T>
[[nodiscard]] std::vector<Chunk> make_chunks(std::span<const DeviceFragment<T>> fragments) {
  std::vector<Chunk> chunks;
  for (std::size_t f = 0; f < fragments.size(); ++f) {
    const auto& fragment = fragments[f];
    std::size_t length = chunk_elements - fragment.begin % chunk_alignment;
    for (std::size_t at = 0; at < fragment.elements;) {
      const std::size_t taken = std::min(length, fragment.elements - at);
      chunks.push_back({.fragment = static_cast<std::uint32_t>(f),
                        .elements = static_cast<std::uint32_t>(taken),
                        .begin = at});
      at += taken;
      length = chunk_elements;
    }
  }
  return chunks;
}

/// Written by the kernel that decides whether and how a parameter steps; one a parameter.
template <class Scalars>
struct ParameterStep {
  Scalars scalars;
  std::int64_t t;          ///< the step's number, counted by the parameter, from 1
  std::uint32_t stepping;  ///< 0: values and slots stay as they are
};

/// Of the step under way; one a rank.
struct StepState {
  double scale;        ///< gradients are multiplied by it, in the type they are computed in
  std::uint32_t skip;  ///< not 0: nothing is updated
};

/// One block for each of `count` pieces of work, which blocks take in strides.
[[nodiscard]] inline LaunchShape one_block_each(std::size_t count, unsigned threads) {
  constexpr std::size_t most_blocks = 0x7fffffff;
  return {static_cast<unsigned>(std::min(count, most_blocks)), threads};
}

}  // namespace zero::cuda::detail
