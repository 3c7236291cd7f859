// SPDX-License-Identifier: Apache-2.0
/// @file
/// A fast hash for comparing memory between ranks. Not for adversaries, not for files.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace zero::detail {

/// Mixes the words it is given; equal inputs in equal order give equal results. Four independent
/// lanes, so that it runs at the speed of memory; the multipliers are odd and of mixed bits
/// (fractional digits of square roots), the rotation brings high bits down.
class Hash {
 public:
  void add(std::uint64_t word) noexcept { lane_[0] = mix(lane_[0], word, 0x9e3779b97f4a7c15U); }

  void add(const void* memory, std::size_t bytes) noexcept {
    const auto* from = static_cast<const std::byte*>(memory);
    add(bytes);
    for (; bytes >= 32; bytes -= 32, from += 32) {
      std::uint64_t words[4];
      std::memcpy(words, from, 32);
      lane_[0] = mix(lane_[0], words[0], 0x9e3779b97f4a7c15U);
      lane_[1] = mix(lane_[1], words[1], 0xbb67ae8584caa73bU);
      lane_[2] = mix(lane_[2], words[2], 0x3c6ef372fe94f82bU);
      lane_[3] = mix(lane_[3], words[3], 0xa54ff53a5f1d36f1U);
    }
    std::uint64_t last[4] = {};
    if (bytes != 0) std::memcpy(last, from, bytes);
    for (std::uint64_t word : last) add(word);
  }

  [[nodiscard]] std::uint64_t value() const noexcept {
    std::uint64_t all = 0;
    for (const std::uint64_t lane : lane_) all = mix(all, lane, 0x510e527fade682d1U);
    return all ^ (all >> 32);
  }

 private:
  static std::uint64_t mix(std::uint64_t state, std::uint64_t word,
                           std::uint64_t multiplier) noexcept {
    return std::rotl((state ^ word) * multiplier, 29) + word;
  }
  std::uint64_t lane_[4] = {1, 2, 3, 4};
};

}  // namespace zero::detail
