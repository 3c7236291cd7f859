// SPDX-License-Identifier: Apache-2.0
// A program that includes xxhash.h itself, before zero's headers, and calls it.
#include <xxhash.h>

#include "zero/detail/checksum.hpp"

std::uint64_t sum_where_xxhash_is_first(std::span<const std::byte> bytes);
std::uint64_t zero_sum_where_xxhash_is_first(std::span<const std::byte> bytes);

std::uint64_t sum_where_xxhash_is_first(std::span<const std::byte> bytes) {
  return XXH3_64bits(bytes.data(), bytes.size());
}

std::uint64_t zero_sum_where_xxhash_is_first(std::span<const std::byte> bytes) {
  zero::detail::Checksum sum;
  sum.add(bytes);
  return sum.value();
}
