// SPDX-License-Identifier: Apache-2.0
#include "trace.hpp"

#include <algorithm>
#include <cerrno>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <system_error>

#include "input_error.hpp"

namespace bert {

namespace {

using nlohmann::json;

double microseconds(Recorder::TimePoint::duration duration) {
  return std::chrono::duration<double, std::micro>(duration).count();
}

json metadata(const char* what, std::size_t pid, std::size_t tid, const std::string& name) {
  return {{"ph", "M"}, {"name", what}, {"pid", pid}, {"tid", tid}, {"args", {{"name", name}}}};
}

}  // namespace

void write_trace(const std::filesystem::path& path, std::span<const Track> tracks) {
  Recorder::TimePoint origin = Recorder::TimePoint::max();
  std::size_t dropped = 0;
  for (const Track& track : tracks) {
    for (const Recorder::Span& span : track.spans->spans()) origin = std::min(origin, span.begin);
    dropped += track.spans->dropped();
  }

  struct Process {
    std::size_t pid, threads;
  };
  std::map<std::string, Process> processes;
  json events = json::array();
  for (const Track& track : tracks) {
    const auto [found, is_new] = processes.try_emplace(track.process, Process{processes.size(), 0});
    Process& process = found->second;
    const std::size_t tid = process.threads++;
    if (is_new) events.push_back(metadata("process_name", process.pid, tid, track.process));
    events.push_back(metadata("thread_name", process.pid, tid, track.thread));
    for (const Recorder::Span& span : track.spans->spans()) {
      events.push_back({{"ph", "X"},
                        {"name", span.name},
                        {"pid", process.pid},
                        {"tid", tid},
                        {"ts", microseconds(span.begin - origin)},
                        {"dur", microseconds(span.end - span.begin)}});
    }
  }
  json trace{{"traceEvents", std::move(events)}, {"displayTimeUnit", "ms"}};
  if (dropped > 0) trace["otherData"] = {{"dropped_spans", dropped}};

  errno = 0;
  std::ofstream file(path);
  file << trace << '\n';
  file.close();  // a full disk shows only now
  if (!file) {
    const std::string reason = errno != 0 ? std::generic_category().message(errno) : "unknown";
    throw InputError("can't write the trace '" + path.string() + "' (" + reason +
                     "): name a file in a folder that you can write to");
  }
}

}  // namespace bert
