// SPDX-License-Identifier: Apache-2.0
/// @file
/// What construction does to arrays, wherever they lie. A step does none of this but the last two.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <memory_resource>
#include <span>
#include <string>
#include <utility>

#include "zero/element.hpp"
#include "zero/memory.hpp"

namespace zero::detail {

/// Arrays of one memory space and the few ways to get at them from the host. That of CUDA is
/// defined in zero/cuda/.
template <MemorySpace space>
struct Space;

template <>
struct Space<MemorySpace::host> {
  template <class T>
  using Array = HostArray<T>;
  /// Nothing runs but in the caller's thread.
  struct Stream {};

  /// Where arrays come from by default, or the user's.
  [[nodiscard]] static std::pmr::memory_resource* resource(std::pmr::memory_resource* given) {
    return given;
  }

  /// What callers have begun to write has been written.
  static void settle() {}
  /// Where an array of the caller's lies, if that is wrong, and what to do about it; or nothing.
  [[nodiscard]] static std::string unusable(const void*) { return {}; }

  template <class T>
  static void copy(const T* from, std::size_t count, T* to) {
    if (count != 0) std::memcpy(to, from, count * sizeof(T));
  }
  /// `f(begin, part)` for parts that together are the `count` elements at `from`.
  template <class T, class F>
  static void read(const T* from, std::size_t count, F&& f) {
    if (count != 0) std::forward<F>(f)(std::size_t{0}, std::span<const T>(from, count));
  }
  /// The same for elements that `f` fills in.
  template <class T, class F>
  static void write(T* to, std::size_t count, F&& f) {
    if (count != 0) std::forward<F>(f)(std::size_t{0}, std::span<T>(to, count));
  }
  /// As `copy`, within a step.
  template <class T>
  static void copy_within(const T* from, std::size_t count, T* to) {
    copy(from, count, to);
  }
  /// Fills with zeros, likewise.
  template <class T>
  static void clear(std::span<T> array) {
    std::fill(array.begin(), array.end(), zero_of<T>());
  }
};

/// Whether zero knows how to work there, in this translation unit.
template <MemorySpace space>
concept KnownSpace = requires { sizeof(Space<space>); };

}  // namespace zero::detail
