// SPDX-License-Identifier: Apache-2.0
/// @file
/// How ranks that save or load together learn what each of them came to.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "zero/communicator.hpp"
#include "zero/detail/agreement.hpp"

namespace zero::detail {

/// What one rank says after each part of a save or a load.
struct CheckpointWord {
  std::array<std::uint64_t, 4> numbers{};
  std::array<char, 1000> error{};  ///< empty: it went well
};

/// What `body` says is wrong, or nothing.
template <class F>
[[nodiscard]] std::string error_of(F&& body) {
  try {
    body();
    return {};
  } catch (const std::exception& error) {
    return text_of(error);
  } catch (...) {
    return "an exception that is no std::exception";
  }
}

/// All ranks' words, in rank order.
template <class State>
[[nodiscard]] std::vector<CheckpointWord> exchange_words(
    State& state, const std::string& error, std::array<std::uint64_t, 4> numbers = {}) {
  CheckpointWord mine{numbers, {}};
  std::memcpy(mine.error.data(), error.data(), std::min(error.size(), mine.error.size() - 1));
  if (state.alone()) return {mine};
  return exchange_all(state.everyone(), std::span<const CheckpointWord>(&mine, 1));
}

/// The first rank's error, the same text on all; or nothing.
[[nodiscard]] inline std::string first_error(const std::vector<CheckpointWord>& words) {
  for (std::size_t r = 0; r < words.size(); ++r) {
    if (words[r].error[0] == '\0') continue;
    const std::string text = words[r].error.data();
    return words.size() == 1 ? text : "rank " + std::to_string(r) + ": " + text;
  }
  return {};
}

}  // namespace zero::detail
