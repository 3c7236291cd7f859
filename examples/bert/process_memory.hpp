// SPDX-License-Identifier: Apache-2.0
// How much memory this process has, had and may still have, as Linux tells it.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>

namespace bert {

/// Bytes of this process that are in physical memory now (VmRSS); nothing where the system doesn't
/// say.
[[nodiscard]] std::optional<std::uint64_t> resident_bytes();

/// The most it was since the process began or `reset_peak` (VmHWM); nothing where the system
/// doesn't say.
[[nodiscard]] std::optional<std::uint64_t> peak_resident_bytes();

/// Makes the peak what is resident now, so that a phase can be measured alone. False where the
/// system won't: the peak then goes on from the process's beginning.
[[nodiscard]] bool reset_peak();

/// Bytes of address space that this process can still take (`ulimit -v`); nothing without a limit.
[[nodiscard]] std::optional<std::uint64_t> address_space_left();

/// Bytes that this process can still take before the system swaps or kills it: the least of what
/// the machine has available and what each limit on its control groups leaves, of version 1 or 2.
/// Cached files don't count as taken: the system drops them first. Nothing where the system says
/// neither.
/// @param root of the file system to read /proc and /sys of
[[nodiscard]] std::optional<std::uint64_t> available_bytes(const std::filesystem::path& root = "/");

}  // namespace bert
