// SPDX-License-Identifier: Apache-2.0
/// @file
/// Arithmetic in which denormal numbers count as 0.
#pragma once

#include "zero/config.hpp"

#if ZERO_SSE2
#include <xmmintrin.h>
#endif

namespace zero::detail {

#if ZERO_SSE2

inline constexpr bool can_flush_denormals = true;

/// While it lives, this thread's vector arithmetic reads denormals as 0 and writes 0 in their
/// place. Where `on` is false it does nothing.
class FlushDenormals {
 public:
  explicit FlushDenormals(bool on) : before_(_mm_getcsr()) {
    constexpr unsigned denormals_are_zero = 0x40, flush_to_zero = 0x8000;
    if (on) _mm_setcsr(before_ | denormals_are_zero | flush_to_zero);
  }
  FlushDenormals(const FlushDenormals&) = delete;
  FlushDenormals& operator=(const FlushDenormals&) = delete;
  /// Exceptions that were flagged meanwhile stay so.
  ~FlushDenormals() {
    constexpr unsigned flags = 0x3f;
    _mm_setcsr((before_ & ~flags) | (_mm_getcsr() & flags));
  }

 private:
  unsigned before_;
};

#else

inline constexpr bool can_flush_denormals = false;

class FlushDenormals {
 public:
  explicit FlushDenormals(bool) {}
  ~FlushDenormals() {}
};

#endif

}  // namespace zero::detail
