// SPDX-License-Identifier: Apache-2.0
// Saves that fail: a full disk, a disk that breaks, a folder that may not be written to. All ranks
// are told which file and why, the checkpoint before stays, nothing else is left behind, and
// training goes on.
#include <sched.h>
#include <sys/mount.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstddef>
#include <exception>
#include <filesystem>
#include <functional>
#include <iterator>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "catch.hpp"
#include "checkpoint/crash_calls.hpp"
#include "checkpoint/crash_training.hpp"
#include "checkpoint/folder.hpp"
#include "zero/checkpoint.hpp"

namespace {

using checkpoints::Folder;
using checkpoints::make_file;
using checkpoints::text_of_file;

using calls::Call;
using calls::Kind;
using training::Files;
using training::Snapshots;
namespace fs = std::filesystem;

constexpr int world = 3;

/// What the ranks of one training say to a save that fails.
struct Told {
  std::vector<std::string> errors = std::vector<std::string>(world);
  Snapshots at_end = Snapshots(world);  ///< two steps after
};

/// Trains to step 2, saves while calls fail as `fault` says, and goes on to step 4.
Told save_in_vain(const fs::path& folder, std::function<int(const Call&)> fault = {}) {
  Told told;
  const calls::Watch watch(std::move(fault));
  training::on_ranks(world, [&](int rank, auto& model, auto& optimizer) {
    const auto r = static_cast<std::size_t>(rank);
    training::train(model, optimizer, rank, 2);
    told.errors[r] = training::refusal_of([&] { zero::save(optimizer, folder); });
    training::train(model, optimizer, rank, 4);
    told.at_end[r] = ranks::snapshot(model, optimizer);
  });
  return told;
}

bool says(const std::string& text, const std::vector<std::string>& words) {
  for (const std::string& word : words) {
    if (text.find(word) == std::string::npos) return false;
  }
  return true;
}

/// Runs `f` in a process of its own, which may change what it sees of the system. Returns what it
/// returns.
template <class F>
std::string apart(F&& f) {
  std::array<int, 2> pipe{};
  if (::pipe(pipe.data()) != 0) throw std::runtime_error("no pipe");
  const pid_t process = ::fork();
  if (process < 0) throw std::runtime_error("no further process");
  if (process == 0) {
    std::string text;
    try {
      text = f();
    } catch (const std::exception& error) {
      text = std::string("it threw: ") + error.what();
    }
    const bool told = ::write(pipe[1], text.data(), text.size()) >= 0;
    ::_exit(told ? 0 : 1);
  }
  ::close(pipe[1]);
  std::string text;
  std::array<char, 4096> part{};
  for (ssize_t bytes = 0; (bytes = ::read(pipe[0], part.data(), part.size())) > 0;) {
    text.append(part.data(), static_cast<std::size_t>(bytes));
  }
  ::close(pipe[0]);
  int status = 0;
  if (::waitpid(process, &status, 0) != process || status != 0) text += " and it died";
  return text;
}

/// Empty where all holds that must after a save that failed.
std::string problem_after(const Told& told, const fs::path& folder, const Files& before,
                          const std::vector<std::string>& words) {
  for (const std::string& error : told.errors) {
    if (error != told.errors[0]) return "ranks are told different things";
    if (!says(error, words)) return "they are told: " + error;
  }
  if (training::files_of(folder) != before) return "the folder holds something else";
  if (training::loaded(world, folder) != training::after(world, 1)) return "another is loaded";
  if (told.at_end != training::after(world, 4)) return "training does not go on";
  return {};
}

/// Where it is in a namespace of mounts of its own, which root and, on some systems, users may
/// have.
bool own_mounts() {
  if (::unshare(CLONE_NEWNS) != 0 && ::unshare(CLONE_NEWUSER | CLONE_NEWNS) != 0) return false;
  return ::mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0;
}

constexpr const char* no_mounts = "no mount";

}  // namespace

TEST_CASE("what fails in a save is told to all ranks and changes nothing", "[checkpoint][crash]") {
  struct Case {
    const char* what;
    std::function<bool(const Call&)> at;
    std::vector<std::string> words;
  };
  const auto in = [](Kind kind, bool index, std::string rank) {
    return [=](const Call& call) {
      if (call.kind != kind) return false;
      return index ? call.of_index() : call.of_shard() && says(call.path, {rank + "-of-"});
    };
  };
  // The header goes last, into room that is left for it.
  const auto second_write = [in, n = 0](const Call& call) mutable {
    return in(Kind::write, false, "00001")(call) && ++n == 2;
  };
  const std::vector<Case> cases{
      {"no room for a file", in(Kind::open_new, false, "00002"), {"-00002-of-", "open"}},
      {"no room for a shard", in(Kind::write, false, "00001"), {"-00001-of-", "write"}},
      {"no room for a header", second_write, {"-00001-of-", "write"}},
      {"a shard that can't be synced", in(Kind::sync, false, "00000"), {"-00000-of-", "fsync"}},
      {"a shard that can't be renamed", in(Kind::rename, false, "00002"), {"-00002-", "rename"}},
      {"no room for the index", in(Kind::open_new, true, ""), {"index.json", "open"}},
      {"no room in the index", in(Kind::write, true, ""), {"index.json", "write"}},
      {"an index that can't be synced", in(Kind::sync, true, ""), {"index.json", "fsync"}},
  };
  for (const Case& each : cases) {
    for (const auto& [error, text] :
         {std::pair(ENOSPC, "No space left"), std::pair(EIO, "Input/output error")}) {
      CAPTURE(each.what, text);
      const Folder folder;
      training::save_step(world, 1, folder.path());
      const Files before = training::files_of(folder.path());
      const auto at = each.at;
      const Told told = save_in_vain(
          folder.path(), [at, e = error](const Call& call) { return at(call) ? e : 0; });
      std::vector<std::string> words = each.words;
      words.emplace_back(text);
      words.push_back(folder.path().string());
      CHECK(problem_after(told, folder.path(), before, words) == "");
      training::save_step(world, 2, folder.path());
      CHECK(training::files_of(folder.path()).size() == world + 1);
      CHECK(training::loaded(world, folder.path()) == training::after(world, 2));
    }
  }
}

TEST_CASE("where the index may be there all the same, nothing is removed", "[checkpoint][crash]") {
  // Told of by the file system after the name was made to last, or not.
  bool renamed = false;
  const Folder folder;
  training::save_step(world, 1, folder.path());
  const Told told = save_in_vain(folder.path(), [&](const Call& call) {
    if (renamed && call.kind == Kind::sync && call.path == folder.path()) return EIO;
    renamed = renamed || (call.kind == Kind::rename && call.of_index());
    return 0;
  });
  CHECK(says(told.errors[2], {"fsync of the folder", "Input/output error"}));
  CHECK(told.errors[0] == told.errors[2]);
  CHECK(training::loaded(world, folder.path()) == training::after(world, 2));
  CHECK(training::files_of(folder.path()).size() == 2 * world + 1);
  training::save_step(world, 3, folder.path());
  CHECK(training::files_of(folder.path()).size() == world + 1);
}

TEST_CASE("a file that can't be removed keeps no save from ending", "[checkpoint][crash]") {
  const Folder folder;
  training::save_step(world, 1, folder.path());
  {
    const calls::Watch watch([&](const Call& call) {
      return call.kind == Kind::remove && !call.path.ends_with(".tmp") ? EPERM : 0;
    });
    training::save_step(world, 2, folder.path());
  }
  CHECK(training::loaded(world, folder.path()) == training::after(world, 2));
  training::save_step(world, 3, folder.path());
  CHECK(training::files_of(folder.path()).size() == world + 1);
}

TEST_CASE("a disk that is full", "[checkpoint][crash]") {
  const Folder mounted;
  // With less and less room, so that it is full at every stage: pages of 4 KiB.
  for (int left = 0; left < 16; ++left) {
    CAPTURE(left);
    const std::string result = apart([&]() -> std::string {
      if (!own_mounts() || ::mount("none", mounted.path().c_str(), "tmpfs", 0, "size=256k") != 0) {
        return no_mounts;
      }
      const fs::path folder = mounted / "checkpoint";
      training::save_step(world, 1, folder);
      const Files before = training::files_of(folder);
      const auto room = static_cast<std::size_t>(fs::space(folder).available);
      const std::size_t kept = static_cast<std::size_t>(left) * 4096;
      make_file(mounted / "ballast", std::string(room - kept, 'x'));
      if (fs::file_size(mounted / "ballast") != room - kept) return "no ballast";
      const Told told = save_in_vain(folder);
      if (told.errors[0] == "nothing was thrown") return "saved";
      const std::string problem =
          problem_after(told, folder, before, {folder.string(), "No space left", "free space"});
      fs::remove(mounted / "ballast");
      training::save_step(world, 2, folder);
      if (training::loaded(world, folder) != training::after(world, 2)) return "not saved later";
      return problem;
    });
    if (result == no_mounts) {
      WARN("this user may mount nothing, so that full disks are only played, by calls that fail");
      return;
    }
    if (result == "saved") {
      CHECK(left > world);
      break;
    }
    CHECK(result == "");
  }
}

TEST_CASE("a folder that may not be written to", "[checkpoint][crash]") {
  for (const fs::perms rights : {fs::perms(0555), fs::perms(0333)}) {
    CAPTURE(rights);
    const Folder folder;
    training::save_step(world, 1, folder.path());
    const Files before = training::files_of(folder.path());
    fs::permissions(folder.path(), rights);
    const bool readable = (rights & fs::perms::others_read) != fs::perms::none;
    const std::string result = apart([&]() -> std::string {
      // Rights don't bind root.
      if (::geteuid() == 0 && ::setuid(65534) != 0) return "it stays root";
      const Told told = save_in_vain(folder.path());
      const std::vector<std::string> words{folder.path().string(), "Permission denied",
                                           "choose a folder"};
      if (readable) return problem_after(told, folder.path(), before, words);
      return says(told.errors[2], words) ? "" : "they are told: " + told.errors[2];
    });
    CHECK(result == "");
    fs::permissions(folder.path(), fs::perms::owner_all);
  }
  {
    const Folder folder;
    training::save_step(world, 1, folder.path());
    const Files before = training::files_of(folder.path());
    const std::string result = apart([&]() -> std::string {
      const char* const path = folder.path().c_str();
      if (!own_mounts() || ::mount(path, path, nullptr, MS_BIND, nullptr) != 0 ||
          ::mount(path, path, nullptr, MS_BIND | MS_REMOUNT | MS_RDONLY, nullptr) != 0) {
        return no_mounts;
      }
      return problem_after(save_in_vain(folder.path()), folder.path(), before,
                           {folder.path().string(), "Read-only file system", "may write to"});
    });
    if (result == no_mounts) {
      WARN("this user may mount nothing, so that there is no folder that is mounted read-only");
      return;
    }
    CHECK(result == "");
  }
}

TEST_CASE("paths that can't be a checkpoint's folder", "[checkpoint][crash]") {
  const Folder folder;
  make_file(folder / "file", "not a folder");
  fs::create_directories(folder / "odd" / "index.json" / "in it");
  for (const auto& [path, words] : std::vector<std::pair<fs::path, std::vector<std::string>>>{
           {folder / "file" / "below", {"can't be a folder", "is a file", "choose another path"}},
           {folder / "file", {"can't be a folder"}},
           {folder / "odd", {"index.json", "Is a directory"}},
           {"", {"making the folder failed"}}}) {
    CAPTURE(path);
    const Told told = save_in_vain(path);
    for (const std::string& error : told.errors) {
      CAPTURE(error);
      CHECK(error == told.errors[0]);
      CHECK(says(error, words));
      CHECK(says(error, {path.string()}));
    }
    CHECK(told.at_end == training::after(world, 4));
    CHECK(training::refusal_of([&, &p = path] {
            (void)training::loaded(2, p);
          }).starts_with("load: "));
  }
  // Of the last try alone: a rename that failed may have been made, over a network.
  CHECK(std::distance(fs::directory_iterator(folder / "odd"), {}) == world + 1);
  CHECK(text_of_file(folder / "file") == "not a folder");
}
