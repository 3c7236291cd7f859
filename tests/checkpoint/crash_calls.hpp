// SPDX-License-Identifier: Apache-2.0
// The program's own calls of the system that write, sync, rename or remove files: each can be told
// of, be refused, or be the last that the process makes.
#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <vector>

namespace calls {

enum class Kind { open_new, write, sync, rename, remove };

/// What is about to be done. A folder's fsync is one of that folder.
struct Call {
  Kind kind;
  std::string path;  ///< of the file; renamed: as it will be called

  bool operator==(const Call&) const = default;
  [[nodiscard]] bool of_index() const { return path.find("index.json") != std::string::npos; }
  [[nodiscard]] bool of_shard() const { return path.find("shard-") != std::string::npos; }
};

/// While it lives, calls of all threads go to `before` first, one at a time: 0 lets the call be
/// made, an error of `errno` lets it fail.
class Watch {
 public:
  explicit Watch(std::function<int(const Call&)> before);
  ~Watch();
  Watch(const Watch&) = delete;
  Watch& operator=(const Watch&) = delete;
};

/// Kills the process in front of call number `last`, counted from 0. If that is a write, half of
/// its bytes are written first.
class KillAt {
 public:
  explicit KillAt(std::size_t last);
  ~KillAt();
  KillAt(const KillAt&) = delete;
  KillAt& operator=(const KillAt&) = delete;
};

}  // namespace calls
