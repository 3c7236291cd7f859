// SPDX-License-Identifier: Apache-2.0
/// @file
/// Reductions of the fake NCCL: every type, every operation, in an order that isn't that of ranks.
#pragma once

#include <nccl.h>

#include <array>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <type_traits>
#include <vector>

namespace zero_emulation::nccl {

/// A scalar of any type.
using Scalar = std::array<std::byte, 8>;

/// Calls `f(T{})` with the C++ type of a checked NCCL type.
template <class F>
decltype(auto) with_type(ncclDataType_t type, F&& f) {
  switch (type) {
    case ncclInt8: return f(static_cast<signed char>(0));
    case ncclUint8: return f(static_cast<unsigned char>(0));
    case ncclInt32: return f(0);
    case ncclUint32: return f(0U);
    case ncclInt64: return f(0LL);
    case ncclUint64: return f(0ULL);
    case ncclFloat16: return f(__half{});
    case ncclFloat64: return f(0.0);
    case ncclBfloat16: return f(__nv_bfloat16{});
    case ncclFloat8e4m3: return f(__nv_fp8_e4m3{});
    case ncclFloat8e5m2: return f(__nv_fp8_e5m2{});
    default: return f(0.0F);
  }
}

inline std::size_t size_of(ncclDataType_t type) {
  return with_type(type, [](auto zero) { return sizeof(zero); });
}

/// One step of a reduction, in the type itself as NCCL does it: floats of less than 32 bits are
/// rounded after every step, integers wrap around.
template <class T>
T combine(ncclRedOp_t op, T a, T b) {
  if constexpr (std::is_integral_v<T>) {
    using U = std::make_unsigned_t<T>;
    switch (op) {
      case ncclProd: return static_cast<T>(static_cast<U>(a) * static_cast<U>(b));
      case ncclMax: return a < b ? b : a;
      case ncclMin: return b < a ? b : a;
      default: return static_cast<T>(static_cast<U>(a) + static_cast<U>(b));
    }
  } else if constexpr (std::is_same_v<T, double> || std::is_same_v<T, float>) {
    switch (op) {
      case ncclProd: return a * b;
      case ncclMax: return std::fmax(a, b);
      case ncclMin: return std::fmin(a, b);
      default: return a + b;
    }
  } else {
    return T(combine(op, static_cast<float>(a), static_cast<float>(b)));
  }
}

/// What a rank's values are multiplied by in an average of floats.
inline Scalar reciprocal(ncclDataType_t type, std::size_t ranks) {
  Scalar scalar{};
  with_type(type, [&](auto zero) {
    using T = decltype(zero);
    if constexpr (!std::is_integral_v<T>) {
      const T value(static_cast<float>(1.0 / static_cast<double>(ranks)));
      std::memcpy(scalar.data(), &value, sizeof value);
    }
  });
  if (type == ncclFloat64) {
    const double value = 1.0 / static_cast<double>(ranks);
    std::memcpy(scalar.data(), &value, sizeof value);
  }
  return scalar;
}

/// Elements that are added up in the same order of ranks.
inline constexpr std::size_t run_length = 16;

/// Reduces `count` elements of each rank into every output; inputs may be outputs.
/// @param first where in the operation the elements begin, which decides the order of the sum
/// @param scales of pre-multiplied sums and of averages of floats, one a rank; else empty
template <class T>
void reduce(ncclRedOp_t op, std::size_t first, std::size_t count,
            const std::vector<const std::byte*>& inputs, const std::vector<Scalar>& scales,
            const std::vector<std::byte*>& outputs) {
  const std::size_t ranks = inputs.size();
  const auto value = [&](std::size_t rank, std::size_t i) {
    const T x = reinterpret_cast<const T*>(inputs[rank])[i];
    if (scales.empty()) return x;
    T scale;
    std::memcpy(&scale, scales[rank].data(), sizeof scale);
    return combine(ncclProd, x, scale);
  };
  for (std::size_t i = 0; i < count; ++i) {
    const std::size_t begin = ranks == 1 ? 0 : 1 + (first + i) / run_length % (ranks - 1);
    T sum = value(begin, i);
    for (std::size_t k = 1; k < ranks; ++k) {
      sum = combine(op, sum, value((begin + k) % ranks, i));
    }
    if constexpr (std::is_integral_v<T>) {
      if (op == ncclAvg) {
        using Wide = std::conditional_t<std::is_signed_v<T>, long long, unsigned long long>;
        sum = static_cast<T>(static_cast<Wide>(sum) / static_cast<Wide>(ranks));
      }
    }
    for (std::byte* output : outputs) reinterpret_cast<T*>(output)[i] = sum;
  }
}

}  // namespace zero_emulation::nccl
