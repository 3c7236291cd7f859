// SPDX-License-Identifier: Apache-2.0
#include "reference_loops.hpp"

#include <cmath>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

// Wider registers where the processor has them.
#if defined(__x86_64__) && defined(__linux__)
#define WIDE __attribute__((target_clones("avx2", "default")))
#else
#define WIDE
#endif

namespace bench {

WIDE void roof(float* __restrict p, const float* __restrict g, float* __restrict m,
               float* __restrict v, std::size_t n) {
  constexpr float little = 1e-9F;
  for (std::size_t i = 0; i < n; ++i) {
    m[i] += little * g[i];
    v[i] += little * g[i];
    p[i] -= little * m[i];
  }
}

WIDE void roof_16(std::uint16_t* __restrict p, const std::uint16_t* __restrict g,
                  float* __restrict w, float* __restrict m, float* __restrict v, std::size_t n) {
  constexpr float little = 1e-9F;
  for (std::size_t i = 0; i < n; ++i) {
    const float gradient = static_cast<float>(g[i]);
    m[i] += little * gradient;
    v[i] += little * gradient;
    w[i] -= little * m[i];
    p[i] = static_cast<std::uint16_t>(static_cast<int>(w[i]));
  }
}

WIDE void adam(float* __restrict p, const float* __restrict g, float* __restrict m,
               float* __restrict v, std::size_t n, const AdamScalars& scalars) {
  const AdamScalars s = scalars;
  for (std::size_t i = 0; i < n; ++i) {
    m[i] = m[i] * s.beta1 + g[i] * s.gain1;
    v[i] = v[i] * s.beta2 + g[i] * g[i] * s.gain2;
    p[i] -= m[i] * s.step_size / (std::sqrt(v[i]) * s.correction2 + s.eps);
  }
}

WIDE void adam_of_mean(float* __restrict p, const float* __restrict g, const float* __restrict h,
                       float* __restrict m, float* __restrict v, std::size_t n,
                       const AdamScalars& scalars) {
  const AdamScalars s = scalars;
  for (std::size_t i = 0; i < n; ++i) {
    const float mean = (g[i] + h[i]) * .5F;
    m[i] = m[i] * s.beta1 + mean * s.gain1;
    v[i] = v[i] * s.beta2 + mean * mean * s.gain2;
    p[i] -= m[i] * s.step_size / (std::sqrt(v[i]) * s.correction2 + s.eps);
  }
}

WIDE void mean_into(float* __restrict g, const float* __restrict h, std::size_t n) {
  for (std::size_t i = 0; i < n; ++i) g[i] = (g[i] + h[i]) * .5F;
}

WIDE void sum(float* __restrict out, const float* __restrict a, const float* __restrict b,
              std::size_t n) {
  for (std::size_t i = 0; i < n; ++i) out[i] = a[i] + b[i];
}

void streaming_sum(float* __restrict out, const float* __restrict a, const float* __restrict b,
                   std::size_t n) {
  std::size_t i = 0;
#if defined(__SSE2__)
  for (; i < n && reinterpret_cast<std::size_t>(out + i) % 16 != 0; ++i) out[i] = a[i] + b[i];
  for (; i + 4 <= n; i += 4) {
    _mm_stream_ps(out + i, _mm_add_ps(_mm_loadu_ps(a + i), _mm_loadu_ps(b + i)));
  }
  _mm_sfence();
#endif
  for (; i < n; ++i) out[i] = a[i] + b[i];
}

WIDE void copy(float* __restrict out, const float* __restrict a, std::size_t n) {
  for (std::size_t i = 0; i < n; ++i) out[i] = a[i];
}

void streaming_copy(float* __restrict out, const float* __restrict a, std::size_t n) {
  std::size_t i = 0;
#if defined(__SSE2__)
  for (; i < n && reinterpret_cast<std::size_t>(out + i) % 16 != 0; ++i) out[i] = a[i];
  for (; i + 4 <= n; i += 4) _mm_stream_ps(out + i, _mm_loadu_ps(a + i));
  _mm_sfence();
#endif
  for (; i < n; ++i) out[i] = a[i];
}

}  // namespace bench
