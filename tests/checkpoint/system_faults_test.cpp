// SPDX-License-Identifier: Apache-2.0
// Files of a checkpoint over a system that interrupts calls, does a part of them only, or fails:
// this program's own pread, pwrite, fsync and rename stand before the C library's.
#undef _FORTIFY_SOURCE  // whose calls have other names
#include <zero/detail/checkpoint_file.hpp>
#include <zero/error.hpp>

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdio>
#include <limits>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "catch.hpp"
#include "folder.hpp"

namespace {

using checkpoints::bytes_of;
using checkpoints::Folder;
using checkpoints::make_file;
using checkpoints::text_of_file;

/// What the system does; reset by each test.
struct System {
  std::size_t most = std::numeric_limits<std::size_t>::max();  // bytes of one call
  bool interrupts = false;                                     // every other call
  int read_error = 0;                                          // these of `errno`
  int write_error = 0;
  int sync_error = 0;
  int folder_sync_error = 0;
  int rename_error = 0;
  bool writes_nothing = false;
  std::vector<std::string> calls{};
};
System the_system;

bool interrupted() { return the_system.interrupts && the_system.calls.size() % 2 == 1; }

template <class Result>
Result failed(int error) {
  errno = error;
  return Result{-1};
}

}  // namespace

extern "C" ssize_t pread(int file, void* to, std::size_t bytes, off_t offset) {
  the_system.calls.emplace_back("pread");
  if (interrupted()) return failed<ssize_t>(EINTR);
  if (the_system.read_error != 0) return failed<ssize_t>(the_system.read_error);
  return ::syscall(SYS_pread64, file, to, std::min(bytes, the_system.most), offset);
}

extern "C" ssize_t pwrite(int file, const void* from, std::size_t bytes, off_t offset) {
  the_system.calls.emplace_back("pwrite");
  if (interrupted()) return failed<ssize_t>(EINTR);
  if (the_system.write_error != 0) return failed<ssize_t>(the_system.write_error);
  if (the_system.writes_nothing) return 0;
  return ::syscall(SYS_pwrite64, file, from, std::min(bytes, the_system.most), offset);
}

extern "C" int fsync(int file) {
  struct stat status{};
  const bool folder = ::fstat(file, &status) == 0 && S_ISDIR(status.st_mode);
  the_system.calls.emplace_back(folder ? "fsync of the folder" : "fsync");
  if (interrupted()) return failed<int>(EINTR);
  const int error = folder ? the_system.folder_sync_error : the_system.sync_error;
  return error != 0 ? failed<int>(error) : static_cast<int>(::syscall(SYS_fsync, file));
}

extern "C" int rename(const char* from, const char* to) noexcept {
  the_system.calls.emplace_back("rename");
  if (the_system.rename_error != 0) return failed<int>(the_system.rename_error);
  return static_cast<int>(::syscall(SYS_renameat2, AT_FDCWD, from, AT_FDCWD, to, 0));
}

namespace {

using zero::detail::NewFile;
using zero::detail::ReadFile;
using Names = std::vector<std::string>;

void save(const std::filesystem::path& path, std::string_view text) {
  NewFile file(path);
  file.write_at(0, bytes_of(text));
  file.commit();
}

template <class F>
std::string error_of(F f) {
  try {
    f();
  } catch (const zero::CheckpointError& error) {
    return error.what();
  }
  return "(nothing thrown)";
}

bool contains(const std::string& text, std::string_view word) {
  return text.find(word) != std::string::npos;
}

}  // namespace

TEST_CASE("interrupted and partial calls are continued", "[checkpoint]") {
  const Folder folder;
  std::string text(1000, '\0');
  for (std::size_t i = 0; i < text.size(); ++i) text[i] = static_cast<char>(i * i);
  for (const bool interrupts : {false, true}) {
    for (const std::size_t most : {1U, 7U, 999U, 1000U}) {
      CAPTURE(interrupts, most);
      the_system = {.most = most, .interrupts = interrupts};
      save(folder / "f", text);
      CHECK(text_of_file(folder / "f") == text);
      std::string read(900, '\0');
      const ReadFile file(folder / "f");
      the_system.calls.clear();
      file.read_at(100, std::as_writable_bytes(std::span(read)));
      CHECK(read == text.substr(100));
      CHECK(the_system.calls.size() >= 900 / most);
    }
  }
  the_system = {};
}

TEST_CASE("a file lasts before it has its name, and the name before it is said to",
          "[checkpoint]") {
  const Folder folder;
  the_system = {};
  save(folder / "f", "text");
  CHECK(the_system.calls == Names{"pwrite", "fsync", "rename", "fsync of the folder"});
}

TEST_CASE("whatever fails, the old file stays and no other is left", "[checkpoint]") {
  const Folder folder;
  make_file(folder / "f", "old");
  struct Case {
    System system;
    std::string operation;
    std::string remedy;
  };
  const std::vector<Case> cases{
      {{.write_error = ENOSPC}, "write failed: No space left", "free space"},
      {{.write_error = EDQUOT}, "write failed: Disk quota", "free space"},
      {{.write_error = EIO}, "write failed: Input/output error", "use another"},
      {{.writes_nothing = true}, "write failed", "free space"},
      {{.sync_error = EIO}, "fsync failed: Input/output error", "use another"},
      {{.sync_error = ENOSPC}, "fsync failed: No space left", "free space"},
      {{.rename_error = EROFS}, "rename", "choose a folder"},
  };
  for (const Case& each : cases) {
    the_system = each.system;
    const std::string says = error_of([&] { save(folder / "f", "new"); });
    the_system = {};
    CAPTURE(each.operation, says);
    CHECK(contains(says, each.operation));
    CHECK(contains(says, each.remedy));
    CHECK(contains(says, (folder / "f").string()));
    CHECK(text_of_file(folder / "f") == "old");
    CHECK(folder.names() == Names{"f"});
  }
}

TEST_CASE("a folder that can't be synced is told, unless it has no such thing", "[checkpoint]") {
  const Folder folder;
  the_system = {.folder_sync_error = EIO};
  const std::string says = error_of([&] { save(folder / "f", "new"); });
  CHECK(contains(says, "fsync of the folder failed"));
  CHECK(folder.names() == Names{"f"});  // whole, and under its name
  CHECK(text_of_file(folder / "f") == "new");

  the_system = {.folder_sync_error = EINVAL};
  save(folder / "f", "newer");
  CHECK(text_of_file(folder / "f") == "newer");
  the_system = {};
}

TEST_CASE("a disk that can't be read is told", "[checkpoint]") {
  const Folder folder;
  make_file(folder / "f", "text");
  const ReadFile file(folder / "f");
  std::string read(4, '\0');
  the_system = {.read_error = EIO};
  const std::string says =
      error_of([&] { file.read_at(0, std::as_writable_bytes(std::span(read))); });
  the_system = {};
  CAPTURE(says);
  CHECK(contains(says, "read failed: Input/output error"));
  CHECK(contains(says, (folder / "f").string()));
}
