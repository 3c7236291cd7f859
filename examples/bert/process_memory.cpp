// SPDX-License-Identifier: Apache-2.0
#include "process_memory.hpp"

#ifdef __linux__
#include <sys/resource.h>
#endif

#include <algorithm>
#include <fstream>
#include <string>
#include <string_view>

namespace bert {

namespace {

using std::filesystem::path;

/// The number after `key` at the beginning of a line, as in "VmRSS:  1024 kB".
std::optional<std::uint64_t> number_after(const path& file, std::string_view key) {
  std::ifstream lines(file);
  for (std::string word; lines >> word; std::getline(lines, word)) {
    std::uint64_t number = 0;
    if (word == key && lines >> number) return number;
  }
  return {};
}

std::optional<std::uint64_t> bytes_after(const path& file, std::string_view key) {
  const auto kibibytes = number_after(file, key);
  return kibibytes ? std::optional(*kibibytes * 1024) : std::nullopt;
}

/// What a file says that holds one number; nothing for "max", which is no limit.
std::optional<std::uint64_t> number_in(const path& file) {
  std::uint64_t number = 0;
  return std::ifstream(file) >> number ? std::optional(number) : std::nullopt;
}

std::optional<std::uint64_t> least(std::optional<std::uint64_t> a, std::optional<std::uint64_t> b) {
  return a && b ? std::min(a, b) : a ? a : b;
}

/// Where a version of control groups keeps its files, and what it calls them.
struct Hierarchy {
  path mount;  // below the root
  const char *limit, *usage, *cached;
};

/// What the limits leave of a group and of those around it, whose limits hold for it too.
std::optional<std::uint64_t> left_by_limits(const path& root, const Hierarchy& hierarchy,
                                            std::string_view group) {
  std::optional<std::uint64_t> left;
  // A container may see its own group as the root of the mount, under the host's name: then only
  // the last turn of the loop finds files.
  for (path part = path(group).relative_path();; part = part.parent_path()) {
    const path folder = root / hierarchy.mount / part;
    const auto limit = number_in(folder / hierarchy.limit);
    const auto usage = number_in(folder / hierarchy.usage);
    if (limit && usage) {
      const std::uint64_t cached =
          std::min(*usage, number_after(folder / "memory.stat", hierarchy.cached).value_or(0));
      left = least(left, *limit - std::min(*limit, *usage - cached));
    }
    if (part.empty()) return left;
  }
}

std::optional<std::uint64_t> left_by_control_groups(const path& root) {
  const Hierarchy first{"sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes",
                        "total_inactive_file"};
  const Hierarchy second{"sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"};
  std::optional<std::uint64_t> left;
  std::ifstream lines(root / "proc/self/cgroup");
  // Each line is ID:CONTROLLERS:GROUP; version 2 has no controllers there.
  for (std::string line; std::getline(lines, line);) {
    const std::size_t controllers = line.find(':') + 1;
    const std::size_t group = line.find(':', controllers) + 1;
    if (controllers == 0 || group == 0) continue;
    const std::string names = "," + line.substr(controllers, group - controllers - 1) + ",";
    const std::string_view name = std::string_view(line).substr(group);
    if (names == ",,") left = least(left, left_by_limits(root, second, name));
    if (names.find(",memory,") != std::string::npos) {
      left = least(left, left_by_limits(root, first, name));
    }
  }
  return left;
}

}  // namespace

std::optional<std::uint64_t> resident_bytes() { return bytes_after("/proc/self/status", "VmRSS:"); }

std::optional<std::uint64_t> peak_resident_bytes() {
  return bytes_after("/proc/self/status", "VmHWM:");
}

bool reset_peak() {
  std::ofstream file("/proc/self/clear_refs");
  file << "5" << std::flush;
  return file.good();
}

std::optional<std::uint64_t> address_space_left() {
#ifdef __linux__
  rlimit limit{};
  if (getrlimit(RLIMIT_AS, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY) {
    const std::uint64_t used = bytes_after("/proc/self/status", "VmSize:").value_or(0);
    return limit.rlim_cur > used ? limit.rlim_cur - used : 0;
  }
#endif
  return std::nullopt;
}

std::optional<std::uint64_t> available_bytes(const path& root) {
  return least(bytes_after(root / "proc/meminfo", "MemAvailable:"), left_by_control_groups(root));
}

}  // namespace bert
