// SPDX-License-Identifier: Apache-2.0
/// @file
/// The checksum of a tensor's bytes in a checkpoint: XXH3, 64 bits, seed 0.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

// As static functions, so that there is nothing to link. A program's own inclusion of xxhash.h,
// before or after, sees the same functions under the same names; the macro itself is not left to
// it.
#ifndef XXH_INLINE_ALL
#define XXH_INLINE_ALL
#include <xxhash.h>
#undef XXH_INLINE_ALL
#else
#include <xxhash.h>
#endif

namespace zero::detail {

/// 16 lower-case hexadecimal digits, as `xxhsum -H3` prints them.
[[nodiscard]] inline std::string checksum_text(std::uint64_t sum) {
  constexpr const char* digits = "0123456789abcdef";
  std::string text(16, '0');
  for (auto it = text.rbegin(); it != text.rend(); ++it, sum >>= 4U) *it = digits[sum & 15U];
  return text;
}

/// The sum of all bytes added so far, in their order; how they were cut into spans does not matter.
class Checksum {
 public:
  Checksum() noexcept { XXH3_64bits_reset(&state_); }

  void add(std::span<const std::byte> bytes) noexcept {
    if (!bytes.empty()) XXH3_64bits_update(&state_, bytes.data(), bytes.size());
  }

  [[nodiscard]] std::uint64_t value() const noexcept { return XXH3_64bits_digest(&state_); }

  [[nodiscard]] std::string text() const { return checksum_text(value()); }

 private:
  XXH3_state_t state_;
};

}  // namespace zero::detail
