// SPDX-License-Identifier: Apache-2.0
/// @file
/// One pass over gradients: their exact sum of squares, and whether all are finite.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "zero/config.hpp"
#include "zero/cuda/detail/block_reduce.cuh"
#include "zero/cuda/detail/fragments.cuh"
#include "zero/cuda/detail/launch.cuh"
#include "zero/cuda/detail/vectors.cuh"
#include "zero/cuda/stream.hpp"
#include "zero/detail/exact_sum.hpp"
#include "zero/detail/rounding.hpp"
#include "zero/detail/square_fold.hpp"
#include "zero/element.hpp"

namespace zero::cuda::detail {

/// A sum that blocks add to, without rounding: digit d counts multiples of 2^(32 d - 1074). Zeros
/// before the first addition.
struct DeviceDigits {
  static constexpr int count = 68;
  static constexpr int lowest_exponent = -1074;
  static constexpr unsigned long long infinite = 1;
  static constexpr unsigned long long nan = 2;

  unsigned long long digit[count];
  unsigned long long flags;  ///< which of the above were among the terms

  /// Adds `number` < 2^32 to digit `d`. A digit that reaches 2^63 hands that over to the next one,
  /// by the one thread that sees it happen: until then the others add less than another 2^63, so
  /// any number of additions is safe.
  __device__ void add(int d, unsigned long long number) {
    constexpr unsigned long long full = 1ULL << 63;
    while (number != 0) {
      const unsigned long long before = atomicAdd(&digit[d], number);
      if (before >= full || before + number < full) return;
      atomicAdd(&digit[d], full);  // modulo 2^64, takes it away
      number = full >> 32;
      ++d;
    }
  }
};

/// The sum in the form that ranks exchange.
ZERO_HOST_DEVICE inline zero::detail::ExactSum to_exact_sum(const DeviceDigits& digits) {
  zero::detail::ExactSum sum;
  for (int d = 0; d < DeviceDigits::count; ++d) {
    if (digits.digit[d] == 0) continue;  // not least: a limb behind the last one is never touched
    sum.add_integer(digits.digit[d], 32 * d + DeviceDigits::lowest_exponent);
  }
  if ((digits.flags & DeviceDigits::infinite) != 0) sum.add_infinity();
  if ((digits.flags & DeviceDigits::nan) != 0) sum.add_nan();
  return sum;
}

/// @tparam T the elements' type; sums have its arithmetic type
template <Element T>
struct LookTask {
  const DeviceFragment<T>* fragments;
  const Chunk* chunks;
  std::size_t chunk_count;
  const arithmetic_t<T>* sums;  ///< null: the fragments' own gradients, those that have one
  DeviceDigits* digits;         ///< what is found is added
};

/// A number's magnitude as bits.
template <class A>
ZERO_HOST_DEVICE inline zero::detail::FloatBits<A> magnitude_bits(A x) {
  using Bits = zero::detail::FloatBits<A>;
  return static_cast<Bits>(__builtin_bit_cast(Bits, x) & zero::detail::magnitude_mask<A>);
}

/// `DeviceDigits` flags of a magnitude.
template <class A>
ZERO_HOST_DEVICE inline unsigned not_finite_flags(zero::detail::FloatBits<A> magnitude) {
  if (magnitude < zero::detail::infinity_bits<A>) return 0;
  return static_cast<unsigned>(magnitude == zero::detail::infinity_bits<A> ? DeviceDigits::infinite
                                                                           : DeviceDigits::nan);
}

/// Terms as integers times powers of two: `zero::detail::SquareTerm` and `add_term` define them.
///
/// A thread sorts its terms by exponent, so that adding one costs a load, an addition and a store:
/// a bin holds those of 4 neighbouring exponents, in units of the smallest. The bins span 2^64
/// times what the terms' square roots are usually between; a term beyond goes to the digits at
/// once.
template <class A>
struct TermBins {
  using Term = zero::detail::SquareTerm<A>;
  using Bits = zero::detail::FloatBits<A>;

  static constexpr unsigned count = 32;
  static constexpr unsigned fields = 4;  ///< exponents a bin
  /// The first bin's exponent: of numbers from 2^-79 on (float), or of terms from 2^-103 on
  /// (double).
  static constexpr unsigned first_field = sizeof(A) == 4 ? 48 : 920;
  static constexpr int bin_shift = Term::per_exponent * fields;
  /// Terms that a bin has room for.
  static constexpr unsigned capacity =
      1U << (64 - Term::bits - Term::per_exponent * (int(fields) - 1));

  /// The first bin's unit is 2^position smallest doubles.
  static constexpr int position =
      Term::per_exponent * int(first_field) + Term::unit - DeviceDigits::lowest_exponent;
  static constexpr int first_digit = position / 32;
  /// Digits of a block's sum: its highest bin's 64 bits, and 8 more for the sum over threads.
  static constexpr int digits = (position % 32 + bin_shift * (int(count) - 1) + 64 + 8 + 31) / 32;
  static_assert(reducing_threads <= 256);
};

/// What a block found since it last added to the digits.
template <int count>
struct BlockDigits {
  unsigned long long digit[count];
  unsigned flags;
};

struct AddDigits {
  template <int count>
  ZERO_HOST_DEVICE BlockDigits<count> operator()(const BlockDigits<count>& a,
                                                 const BlockDigits<count>& b) const {
    BlockDigits<count> sum;
    ZERO_UNROLL
    for (int d = 0; d < count; ++d) sum.digit[d] = a.digit[d] + b.digit[d];
    sum.flags = a.flags | b.flags;
    return sum;
  }
};

/// A term that has no bin, given by its magnitude, which is not zero. Returns flags.
template <class A>
[[gnu::noinline]] __device__ unsigned add_outlier(DeviceDigits& to,
                                                  zero::detail::FloatBits<A> magnitude) {
  using Term = zero::detail::SquareTerm<A>;
  using Bits = zero::detail::FloatBits<A>;
  if (const unsigned flags = not_finite_flags<A>(magnitude); flags != 0) return flags;
  constexpr Bits leading = Bits{1} << zero::detail::mantissa_bits<A>;
  int field = static_cast<int>(magnitude >> zero::detail::mantissa_bits<A>);
  std::uint64_t number = magnitude & (leading - 1);
  if (field != 0) {
    number |= leading;
  } else {
    field = 1;
  }
  if constexpr (Term::per_exponent == 2) number *= number;
  const int position = Term::per_exponent * field + Term::unit - DeviceDigits::lowest_exponent;
  const int shift = position % 32;
  const std::uint64_t above = number >> (32 - shift);
  to.add(position / 32, static_cast<std::uint32_t>(number << shift));
  to.add(position / 32 + 1, static_cast<std::uint32_t>(above));
  to.add(position / 32 + 2, above >> 32);
  return 0;
}

template <Element T>
__global__ void __launch_bounds__(reducing_threads) add_squares_kernel(LookTask<T> task) {
  using A = arithmetic_t<T>;
  using Bins = TermBins<A>;
  using Bits = zero::detail::FloatBits<A>;
  // A column each: whichever bins they use, neighbouring threads meet in no bank.
  __shared__ unsigned long long columns[Bins::count][reducing_threads];
  unsigned long long* const bins = &columns[0][threadIdx.x];
  unsigned flags = 0;
  const auto empty = [&] {
    for (unsigned b = 0; b < Bins::count; ++b) bins[b * reducing_threads] = 0;
    flags = 0;
  };
  const auto hand_over = [&] {
    BlockDigits<Bins::digits> mine{};
    mine.flags = flags;
    ZERO_UNROLL
    for (unsigned b = 0; b < Bins::count; ++b) {
      const unsigned long long sum = bins[b * reducing_threads];
      const int at = Bins::position % 32 + Bins::bin_shift * int(b);
      const unsigned long long above = sum >> (32 - at % 32);
      mine.digit[at / 32] += static_cast<std::uint32_t>(sum << (at % 32));
      mine.digit[at / 32 + 1] += static_cast<std::uint32_t>(above);
      mine.digit[at / 32 + 2] += above >> 32;
    }
    const auto all = block_reduce(mine, AddDigits{});
    if (threadIdx.x == 0) {
      unsigned long long carry = 0;
      for (int d = 0; d < Bins::digits; ++d) {
        carry += all.digit[d];
        task.digits->add(Bins::first_digit + d, static_cast<std::uint32_t>(carry));
        carry >>= 32;
      }
      if (all.flags != 0) atomicOr(&task.digits->flags, static_cast<unsigned long long>(all.flags));
    }
    __syncthreads();
  };
  const auto add = [&](A x) {
    const Bits magnitude = magnitude_bits<A>(sizeof(A) == sizeof(double) ? x * x : x);
    constexpr Bits leading = Bits{1} << zero::detail::mantissa_bits<A>;
    const auto field = static_cast<unsigned>(magnitude >> zero::detail::mantissa_bits<A>);
    const unsigned place = field - Bins::first_field;
    if (place < Bins::count * Bins::fields) {
      // Normal numbers. A float that is shifted by an exponent has its square shifted by both.
      const Bits number =
          static_cast<Bits>(((magnitude & (leading - 1)) | leading) << place % Bins::fields);
      unsigned long long term = number;
      if constexpr (Bins::Term::per_exponent == 2) term *= number;
      bins[place / Bins::fields * reducing_threads] += term;
    } else if (magnitude != 0) {
      flags |= add_outlier<A>(*task.digits, magnitude);
    }
  };
  unsigned used = 0;  // terms that some thread's bin may hold by now
  const auto add_run = [&](const auto* from, unsigned count) {
    constexpr unsigned share = 64;
    for (unsigned done = 0; done < count; done += share * blockDim.x) {
      constexpr unsigned most = share + each_element_excess<std::remove_cvref_t<decltype(*from)>>;
      static_assert(most <= Bins::capacity);
      if (used + most > Bins::capacity) {
        hand_over();
        empty();
        used = 0;
      }
      used += most;
      const unsigned rest = count - done;
      const unsigned some = rest < share * blockDim.x ? rest : share * blockDim.x;
      each_element(from + done, some, [&](auto x) { add(zero::detail::load_element(x)); });
    }
  };
  empty();
  for (std::size_t c = blockIdx.x; c < task.chunk_count; c += gridDim.x) {
    const Chunk chunk = task.chunks[c];
    const auto& fragment = task.fragments[chunk.fragment];
    if (task.sums != nullptr) {
      add_run(task.sums + fragment.begin + chunk.begin, chunk.elements);
    } else if (fragment.gradient != nullptr) {
      add_run(fragment.gradient + chunk.begin, chunk.elements);
    }
  }
  hand_over();
}

template <Element T>
__global__ void find_not_finite_kernel(LookTask<T> task) {
  unsigned flags = 0;
  const auto look = [&](auto x) {
    using A = arithmetic_t<T>;
    flags |= not_finite_flags<A>(magnitude_bits<A>(zero::detail::load_element(x)));
  };
  for (std::size_t c = blockIdx.x; c < task.chunk_count; c += gridDim.x) {
    const Chunk chunk = task.chunks[c];
    const auto& fragment = task.fragments[chunk.fragment];
    if (task.sums != nullptr) {
      each_element(task.sums + fragment.begin + chunk.begin, chunk.elements, look);
    } else if (fragment.gradient != nullptr) {
      each_element(fragment.gradient + chunk.begin, chunk.elements, look);
    }
  }
  if (flags != 0) atomicOr(&task.digits->flags, static_cast<unsigned long long>(flags));
}

/// Adds the squares as the host's `SquareSum` does, to the bit.
template <Element T>
void add_squares(const LookTask<T>& task, StreamView stream) {
  // Blocks end with a reduction, so one takes several chunks where there are many.
  constexpr std::size_t many = 1024, several = 4;
  const std::size_t blocks = std::max(std::min(task.chunk_count, many), task.chunk_count / several);
  launch("add_squares", &add_squares_kernel<T>, one_block_each(blocks, reducing_threads), stream,
         task);
}

/// Sets flags alone. Of numbers as they are: doubles whose square is infinite are finite.
template <Element T>
void find_not_finite(const LookTask<T>& task, StreamView stream) {
  constexpr unsigned threads = 256;
  launch("find_not_finite", &find_not_finite_kernel<T>, one_block_each(task.chunk_count, threads),
         stream, task);
}

}  // namespace zero::cuda::detail
