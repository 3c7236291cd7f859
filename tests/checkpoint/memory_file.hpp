// SPDX-License-Identifier: Apache-2.0
/// @file
/// A file that is only in memory.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <span>
#include <string>

/// A `zero::ByteSource`. Nobody may ask for a byte that isn't there: that ends the process.
class MemoryFile {
 public:
  explicit MemoryFile(std::span<const std::byte> bytes) : bytes_(bytes) {}

  [[nodiscard]] std::string name() const { return "in memory"; }
  [[nodiscard]] std::uint64_t bytes() const { return bytes_.size(); }
  void read_at(std::uint64_t offset, std::span<std::byte> to) const {
    if (offset > bytes_.size() || to.size() > bytes_.size() - offset) std::abort();
    std::ranges::copy(bytes_.subspan(offset, to.size()), to.begin());
  }

 private:
  std::span<const std::byte> bytes_;
};
