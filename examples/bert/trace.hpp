// SPDX-License-Identifier: Apache-2.0
// Timed spans of a run, one recorder a rank, written as a file that Perfetto (ui.perfetto.dev) and
// chrome://tracing open.
#pragma once

#include <chrono>
#include <cstddef>
#include <filesystem>
#include <span>
#include <string>
#include <vector>

namespace bert {

/// Spans of one thread. Others read them only after that thread has ended, so nothing is locked.
class Recorder {
 public:
  using TimePoint = std::chrono::steady_clock::time_point;

  struct Span {
    const char* name;
    TimePoint begin, end;
  };

  /// Keeps the first `capacity` spans and counts the others: recording never allocates.
  explicit Recorder(std::size_t capacity) : capacity_(capacity) { spans_.reserve(capacity); }

  /// @param name must live as long as the recorder: a string literal
  void add(const char* name, TimePoint begin, TimePoint end) {
    if (spans_.size() < capacity_) {
      spans_.push_back({name, begin, end});
    } else {
      ++dropped_;
    }
  }

  /// Counts spans that were dropped elsewhere.
  void drop(std::size_t spans) { dropped_ += spans; }

  [[nodiscard]] std::span<const Span> spans() const { return spans_; }
  [[nodiscard]] std::size_t dropped() const { return dropped_; }

 private:
  std::size_t capacity_, dropped_ = 0;
  std::vector<Span> spans_;
};

/// A line of the picture: a thread of a process, say "rank 1" of "sharded".
struct Track {
  std::string process, thread;
  const Recorder* spans;
};

/// Writes tracks in Chrome's trace format. Times are microseconds since the first span; processes
/// are numbered in the order of their first track, threads in the order of a process's tracks, so
/// that the tracks of ranks 0, 1, … get these as thread ids. Throws InputError where the file can't
/// be written.
void write_trace(const std::filesystem::path& path, std::span<const Track> tracks);

}  // namespace bert
