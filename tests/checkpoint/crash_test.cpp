// SPDX-License-Identifier: Apache-2.0
// Processes that are killed while they save, at every call that changes a file and at any time:
// the folder holds the checkpoint before or the new one, whole.
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstddef>
#include <exception>
#include <map>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "catch.hpp"
#include "checkpoint/crash_calls.hpp"
#include "checkpoint/crash_training.hpp"
#include "checkpoint/folder.hpp"
#include "zero/checkpoint.hpp"

namespace {

using calls::Call;
using calls::Kind;
using checkpoints::Folder;
using training::Files;
using training::Snapshots;

/// Starts `f` in a process of its own.
template <class F>
pid_t start(F&& f) {
  const pid_t process = ::fork();
  if (process < 0) throw std::runtime_error("no further process");
  if (process != 0) return process;
  try {
    f();
  } catch (...) {
    ::_exit(2);
  }
  ::_exit(0);
}

/// Whether the process was killed; throws where it ended by anything else but itself.
bool was_killed(pid_t process) {
  int status = 0;
  if (::waitpid(process, &status, 0) != process) throw std::runtime_error("no such process");
  if (WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL) return true;
  if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) throw std::runtime_error("the save failed");
  return false;
}

/// A save of step `step` into a folder leaves exactly its own files, and is what it holds.
void check_next_save(int world, int step, const training::fs::path& folder) {
  training::save_step(world, step, folder);
  CHECK(training::files_of(folder).size() == static_cast<std::size_t>(world) + 1);
  CHECK(training::loaded(world, folder) == training::after(world, step));
}

}  // namespace

TEST_CASE("killed at any call, a save leaves the checkpoint before or the new one",
          "[checkpoint][crash]") {
  for (int world = 1; world <= 3; ++world) {
    const Folder folder;
    training::save_step(world, 1, folder.path());
    const Files before = training::files_of(folder.path());
    const Snapshots first = training::after(world, 1);
    const Snapshots second = training::after(world, 2);
    bool renamed = false;
    for (std::size_t at = 0;; ++at) {
      CAPTURE(world, at);
      training::put_files(folder.path(), before);
      const bool killed = was_killed(start([&] {
        const calls::KillAt kill(at);
        training::save_step(world, 2, folder.path());
      }));
      const Snapshots found = training::loaded(world, folder.path());
      // Once the new one is there it stays.
      renamed = renamed || found != first;
      CHECK(found == (renamed ? second : first));
      check_next_save(world, 3, folder.path());
      if (!killed) {
        CHECK(renamed);
        CHECK(at > 8 * static_cast<std::size_t>(world));
        break;
      }
    }
  }
}

TEST_CASE("killed at any call, the first save into a folder leaves none or a whole one",
          "[checkpoint][crash]") {
  constexpr int world = 2;
  const Folder folder;
  const training::fs::path made = folder / "new" / "one";
  bool there = false;
  for (std::size_t at = 0;; ++at) {
    CAPTURE(at);
    training::fs::remove_all(folder / "new");
    const bool killed = was_killed(start([&] {
      const calls::KillAt kill(at);
      training::save_step(world, 1, made);
    }));
    there = there || training::fs::exists(made / "index.json");
    if (there) {
      CHECK(training::loaded(world, made) == training::after(world, 1));
    } else {
      const std::string error = training::refusal_of([&] { (void)training::loaded(world, made); });
      CAPTURE(error);
      CHECK(error.find(made.string()) != std::string::npos);
    }
    check_next_save(world, 2, made);
    if (!killed) break;
  }
  CHECK(there);
}

TEST_CASE("killed at any time, a training that saves leaves a checkpoint of a step it took",
          "[checkpoint][crash]") {
  constexpr int world = 3;
  constexpr int most_steps = 6;
  std::vector<Snapshots> steps;
  for (int step = 0; step <= most_steps; ++step) steps.push_back(training::after(world, step));
  std::mt19937 random(1);
  for (int run = 0; run < 10; ++run) {
    CAPTURE(run);
    const Folder folder;
    training::save_step(world, 1, folder.path());
    const pid_t process = start([&] {
      for (;;) {
        training::on_ranks(world, [&](int rank, auto& model, auto& optimizer) {
          for (int step = 1; step <= most_steps; ++step) {
            training::train(model, optimizer, rank, step);
            zero::save(optimizer, folder.path());
          }
        });
      }
    });
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 40000));
    ::kill(process, SIGKILL);
    CHECK(was_killed(process));
    const Snapshots found = training::loaded(world, folder.path());
    CHECK(std::find(steps.begin() + 1, steps.end(), found) != steps.end());
    check_next_save(world, most_steps, folder.path());
  }
}

TEST_CASE("what a checkpoint needs lasts before its index names it, and what it replaces goes last",
          "[checkpoint][crash]") {
  constexpr std::size_t world = 3;
  const Folder folder;
  training::save_step(world, 1, folder.path());
  std::vector<Call> made;
  {
    const calls::Watch watch([&](const Call& call) {
      made.push_back(call);
      return 0;
    });
    training::save_step(world, 2, folder.path());
  }
  const auto first = [&](auto&& is, std::size_t from = 0) {
    return static_cast<std::size_t>(
        std::find_if(made.begin() + static_cast<std::ptrdiff_t>(from), made.end(), is) -
        made.begin());
  };
  const auto is = [](Kind kind, std::string path) {
    return [call = Call{kind, std::move(path)}](const Call& other) { return other == call; };
  };
  const std::string index = folder / "index.json";
  const std::size_t index_begins =
      first([&](const Call& call) { return call.of_index() && call.kind == Kind::open_new; });
  const std::size_t index_is_synced = first(is(Kind::sync, index + ".tmp"));
  const std::size_t index_is_named = first(is(Kind::rename, index));
  const std::size_t index_lasts = first(is(Kind::sync, folder.path()), index_is_named);
  REQUIRE(index_begins < index_is_synced);
  REQUIRE(index_is_synced < index_is_named);
  REQUIRE(index_is_named < index_lasts);
  REQUIRE(index_lasts < made.size());

  std::size_t shards = 0;
  std::size_t removed = 0;
  for (std::size_t i = 0; i < made.size(); ++i) {
    CAPTURE(i, made[i].path);
    if (made[i].kind == Kind::write && made[i].of_index()) CHECK(i < index_is_synced);
    if (!made[i].of_shard()) continue;
    if (made[i].kind == Kind::rename) {
      ++shards;
      const std::size_t synced = first(is(Kind::sync, made[i].path + ".tmp"));
      CHECK(synced < i);
      // Nothing is written to it after that.
      CHECK(first(is(Kind::write, made[i].path + ".tmp"), synced) == made.size());
      CHECK(first(is(Kind::sync, folder.path()), i) < index_begins);
    } else if (made[i].kind == Kind::remove && !made[i].path.ends_with(".tmp")) {
      ++removed;
      CHECK(index_lasts < i);
    }
  }
  CHECK(shards == world);
  CHECK(removed == world);
}
