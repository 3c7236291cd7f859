// SPDX-License-Identifier: Apache-2.0
// What the library is held against: loops over plain arrays, written by hand and built with all
// that a compiler can do for them (see CMakeLists.txt).
#pragma once

#include <cstddef>
#include <cstdint>
#include <zero/optim/adam.hpp>

namespace bench {

using AdamScalars = zero::Adam::Scalars<float>;

/// The roof of an Adam step: reads p, g, m and v, writes p, m and v, and computes next to nothing.
void roof(float* p, const float* g, float* m, float* v, std::size_t n);
inline constexpr double roof_bytes = 28;  ///< an element

/// The same for bfloat16 parameters with masters: reads p, g (2 bytes each), w, m and v, writes p,
/// w, m and v.
void roof_16(std::uint16_t* p, const std::uint16_t* g, float* w, float* m, float* v, std::size_t n);
inline constexpr double roof_16_bytes = 28;  ///< an element; p is written unread

/// Adam without weight decay.
void adam(float* p, const float* g, float* m, float* v, std::size_t n, const AdamScalars& s);
/// The same for the mean of two gradients.
void adam_of_mean(float* p, const float* g, const float* h, float* m, float* v, std::size_t n,
                  const AdamScalars& s);

/// `g = (g + h) / 2`
void mean_into(float* g, const float* h, std::size_t n);
/// `out = a + b`. Streaming: with stores that go past the caches, which saves reading `out` first.
void sum(float* out, const float* a, const float* b, std::size_t n);
void streaming_sum(float* out, const float* a, const float* b, std::size_t n);
/// `out = a`, which compilers make a memcpy of.
void copy(float* out, const float* a, std::size_t n);
void streaming_copy(float* out, const float* a, std::size_t n);

}  // namespace bench
