// SPDX-License-Identifier: Apache-2.0
// Files of a checkpoint: read exactly or not at all, whole or not there, whatever fails in between.
#include <zero/detail/checkpoint_file.hpp>
#include <zero/error.hpp>

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>  // a program's own, after zero's

#include <algorithm>
#include <atomic>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <initializer_list>
#include <limits>
#include <random>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "catch.hpp"
#include "folder.hpp"

std::uint64_t sum_where_xxhash_is_first(std::span<const std::byte> bytes);
std::uint64_t zero_sum_where_xxhash_is_first(std::span<const std::byte> bytes);

namespace {

using checkpoints::bytes_of;
using checkpoints::Folder;
using checkpoints::make_file;
using checkpoints::text_of_file;

namespace fs = std::filesystem;
using zero::detail::Checksum;
using zero::detail::NewFile;
using zero::detail::ReadFile;
using zero::detail::Writer;

using Names = std::vector<std::string>;

std::string read_text(const ReadFile& file, std::uint64_t offset, std::size_t bytes) {
  std::string text(bytes, '\0');
  file.read_at(offset, std::as_writable_bytes(std::span(text)));
  return text;
}

/// That `f` throws a CheckpointError which says all that.
template <class F>
void refused(F f, std::initializer_list<std::string> words) {
  std::string says = "(nothing thrown)";
  try {
    f();
  } catch (const zero::CheckpointError& error) {
    says = error.what();
  }
  CAPTURE(says);
  for (const std::string& word : words) {
    CAPTURE(word);
    CHECK(says.find(word) != std::string::npos);
  }
}

/// Files may grow to so many bytes while it lives, and writing more is an error, not a signal.
class FileSizeLimit {
 public:
  explicit FileSizeLimit(rlim_t bytes) : handler_(std::signal(SIGXFSZ, SIG_IGN)) {
    ::getrlimit(RLIMIT_FSIZE, &before_);
    rlimit limit = before_;
    limit.rlim_cur = bytes;
    ::setrlimit(RLIMIT_FSIZE, &limit);
  }
  ~FileSizeLimit() {
    ::setrlimit(RLIMIT_FSIZE, &before_);
    (void)std::signal(SIGXFSZ, handler_);
  }
  FileSizeLimit(const FileSizeLimit&) = delete;
  FileSizeLimit& operator=(const FileSizeLimit&) = delete;

 private:
  void (*handler_)(int);
  rlimit before_{};
};

}  // namespace

TEST_CASE("a file is read where it is asked for", "[checkpoint]") {
  const Folder folder;
  make_file(folder / "f", "0123456789");
  const ReadFile file(folder / "f");
  CHECK(file.bytes() == 10);
  CHECK(file.path() == folder / "f");
  CHECK(read_text(file, 0, 10) == "0123456789");
  CHECK(read_text(file, 7, 3) == "789");
  CHECK(read_text(file, 10, 0).empty());
}

TEST_CASE("a file that is too short is told, with its name and where", "[checkpoint]") {
  const Folder folder;
  make_file(folder / "f", "0123456789");
  const ReadFile file(folder / "f");
  const std::string name = (folder / "f").string();
  refused([&] { (void)read_text(file, 8, 3); },
          {name, "3 bytes were to be read at byte 8", "ends at byte 10"});
  refused([&] { (void)read_text(file, 11, 0); }, {name, "at byte 11"});
  refused([&] { (void)read_text(file, std::numeric_limits<std::uint64_t>::max(), 2); }, {name});
  fs::resize_file(folder / "f", 4);  // after it was opened
  refused([&] { (void)read_text(file, 2, 3); },
          {name, "3 bytes were to be read at byte 2", "ends at byte 4"});
}

TEST_CASE("what is no file to read is told", "[checkpoint]") {
  const Folder folder;
  refused([&] { ReadFile(folder / "none"); },
          {(folder / "none").string(), "open failed", "No such file", "check the path"});
  refused([&] { ReadFile{folder.path()}; }, {folder.path().string(), "no file"});
  REQUIRE(::mkfifo((folder / "pipe").c_str(), 0600) == 0);
  refused([&] { ReadFile(folder / "pipe"); }, {"no file"});  // and is not waited for
  make_file(folder / "f", "");
  refused([&] { ReadFile(folder / "f" / "g"); }, {"Not a directory", "check the path"});
}

TEST_CASE("several threads read one file", "[checkpoint]") {
  const Folder folder;
  std::string text;
  for (int i = 0; i < 20000; ++i) text += std::to_string(i);
  make_file(folder / "f", text);
  const ReadFile file(folder / "f");
  std::atomic<int> wrong = 0;
  std::vector<std::thread> threads;
  for (unsigned seed = 0; seed < 4; ++seed) {
    threads.emplace_back([&, seed] {
      std::mt19937 random(seed);
      for (int i = 0; i < 300; ++i) {
        const std::size_t begin = random() % text.size();
        const std::size_t bytes = random() % (text.size() - begin);
        if (read_text(file, begin, bytes) != text.substr(begin, bytes)) ++wrong;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(wrong == 0);
}

TEST_CASE("a new file has its name when it is whole, and not before", "[checkpoint]") {
  const Folder folder;
  make_file(folder / "f", "the old one, which is longer");
  {
    NewFile file(folder / "f");
    file.write_at(4, bytes_of("4567"));
    file.write_at(0, bytes_of("0123"));
    file.write_at(8, {});
    CHECK(text_of_file(folder / "f") == "the old one, which is longer");
    CHECK(folder.names() == Names{"f", "f.tmp"});
    file.commit();
    CHECK(text_of_file(folder / "f") == "01234567");
  }
  CHECK(text_of_file(folder / "f") == "01234567");
  CHECK(folder.names() == Names{"f"});
}

TEST_CASE("a new file that is given up leaves nothing", "[checkpoint]") {
  const Folder folder;
  make_file(folder / "old", "old");
  for (const char* name : {"old", "new"}) {
    NewFile file(folder / name);
    file.write_at(0, bytes_of("half"));
  }
  CHECK(folder.names() == Names{"old"});
  CHECK(text_of_file(folder / "old") == "old");
}

TEST_CASE("what a killed process left is replaced", "[checkpoint]") {
  const Folder folder;
  make_file(folder / "f.tmp", "longer than what comes now");
  {
    NewFile file(folder / "f");
    file.write_at(0, bytes_of("new"));
    file.commit();
  }
  CHECK(text_of_file(folder / "f") == "new");

  SECTION("not through a link") {
    make_file(folder / "other", "another's");
    fs::create_symlink(folder / "other", folder / "f.tmp");
    NewFile file(folder / "f");
    file.write_at(0, bytes_of("NEW"));
    file.commit();
    CHECK(text_of_file(folder / "other") == "another's");
    CHECK(text_of_file(folder / "f") == "NEW");
    CHECK(folder.names() == Names{"f", "other"});
  }
  SECTION("a folder is not") {
    fs::create_directory(folder / "f.tmp");
    refused([&] { NewFile(folder / "f"); }, {(folder / "f.tmp").string(), "removal of an old one"});
    CHECK(text_of_file(folder / "f") == "new");
  }
}

TEST_CASE("a place that can't be written to is told", "[checkpoint]") {
  const Folder folder;
  refused(
      [&] { NewFile(folder / "none" / "f"); },
      {(folder / "none" / "f.tmp").string(), "open failed", "No such file", "its folder exists"});
  refused([&] { zero::detail::sync_folder(folder / "none"); },
          {(folder / "none").string(), "No such file"});
  make_file(folder / "f", "");
  refused([&] { NewFile(folder / "f" / "g"); }, {"Not a directory"});
  refused([&] { zero::detail::sync_folder(folder / "f"); }, {"Not a directory"});
  if (::geteuid() != 0) {  // root may write anywhere
    fs::permissions(folder.path(), fs::perms::owner_read | fs::perms::owner_exec);
    refused([&] { NewFile(folder / "g"); }, {"Permission denied", "choose a folder"});
    fs::permissions(folder.path(), fs::perms::owner_all);
  }
  CHECK(folder.names() == Names{"f"});
}

TEST_CASE("a new file can't take a folder's name", "[checkpoint]") {
  const Folder folder;
  fs::create_directory(folder / "f");
  {
    NewFile file(folder / "f");
    refused([&] { file.commit(); }, {(folder / "f").string(), "rename", "Is a directory"});
  }
  CHECK(folder.names() == Names{"f"});
}

TEST_CASE("a full disk is told, with what to do", "[checkpoint]") {
  const int full = ::open("/dev/full", O_WRONLY | O_CLOEXEC);
  if (full < 0) {
    WARN("no /dev/full here: not tested");
    return;
  }
  refused([&] { zero::detail::write_all(full, "a/b", 0, bytes_of("text")); },
          {"a/b", "write failed", "No space left", "errno 28", "free space"});
  ::close(full);
}

TEST_CASE("a file that may not grow leaves the old one, and nothing else", "[checkpoint]") {
  const Folder folder;
  make_file(folder / "f", "old");
  const std::string large(100000, 'x');
  {
    const FileSizeLimit limit(60000);
    NewFile file(folder / "f");
    refused([&] { file.write_at(0, bytes_of(large)); },
            {(folder / "f.tmp").string(), "write failed", "File too large", "ulimit -f"});
  }
  CHECK(folder.names() == Names{"f"});
  {
    const FileSizeLimit limit(60000);
    NewFile file(folder / "f");
    Writer writer(file, 1000);
    refused(
        [&] {
          for (int i = 0; i < 1000; ++i) writer.write(bytes_of(large).first(70));
        },
        {"File too large"});
  }
  CHECK(folder.names() == Names{"f"});
  CHECK(text_of_file(folder / "f") == "old");
}

TEST_CASE("a place that no file reaches is refused", "[checkpoint]") {
  const Folder folder;
  NewFile file(folder / "f");
  refused([&] { file.write_at(std::numeric_limits<std::uint64_t>::max(), bytes_of("ab")); },
          {"File too large"});
  refused([&] { file.write_at((std::uint64_t{1} << 63U) - 1, bytes_of("ab")); },
          {"File too large"});
}

TEST_CASE("a writer's spans lie one after the other, whatever its buffer", "[checkpoint]") {
  const Folder folder;
  std::string text(5000, '\0');
  std::mt19937 random(7);
  for (char& c : text) c = static_cast<char>(random());
  for (const std::size_t buffer : {0U, 1U, 7U, 64U, 1000U, 100000U}) {
    for (const std::size_t begin : {0U, 24U}) {
      CAPTURE(buffer, begin);
      NewFile file(folder / "f");
      file.write_at(0, bytes_of(std::string(begin, 'h')));
      Writer writer(file, buffer, begin);
      std::vector<std::uint64_t> sums;
      std::vector<std::uint64_t> expected;
      for (std::size_t at = 0; at < text.size();) {
        const std::size_t tensor = std::min<std::size_t>(random() % 700, text.size() - at);
        writer.start_tensor();
        CHECK(writer.position() == begin + at);
        for (std::size_t done = 0; done < tensor;) {
          const std::size_t few = std::min<std::size_t>(random() % 150, tensor - done);
          writer.write(bytes_of(text).subspan(at + done, few));
          done += few;
        }
        sums.push_back(writer.checksum().value());
        expected.push_back(XXH3_64bits(text.data() + at, tensor));
        at += tensor;
      }
      writer.flush();
      writer.flush();  // once more is nothing more
      CHECK(writer.position() == begin + text.size());
      file.commit();
      CHECK(text_of_file(folder / "f") == std::string(begin, 'h') + text);
      CHECK(sums == expected);
    }
  }
}

TEST_CASE("a checksum is XXH3's, however the bytes are cut", "[checkpoint]") {
  CHECK(Checksum().text() == "2d06800538d394c2");
  Checksum a;
  a.add(bytes_of("a"));
  CHECK(a.text() == "e6c632b61e964e1f");
  CHECK(a.value() == 0xe6c632b61e964e1fU);

  std::string text(3000, '\0');
  std::mt19937 random(3);
  for (char& c : text) c = static_cast<char>(random());
  for (const std::size_t size : {1U, 16U, 17U, 128U, 240U, 241U, 1024U, 3000U}) {
    const auto bytes = bytes_of(text).first(size);
    Checksum cut;
    for (std::size_t at = 0; at < size;) {
      const std::size_t few = std::min<std::size_t>(random() % 100, size - at);
      cut.add(bytes.subspan(at, few));
      at += few;
    }
    CHECK(cut.value() == XXH3_64bits(bytes.data(), size));
    CHECK(cut.value() == sum_where_xxhash_is_first(bytes));
    CHECK(cut.value() == zero_sum_where_xxhash_is_first(bytes));
  }
}

TEST_CASE("a checksum is 16 digits", "[checkpoint]") {
  for (unsigned i = 0; i < 300; ++i) {
    Checksum sum;
    const std::string text(i, static_cast<char>(i));
    sum.add(bytes_of(text));
    const std::string digits = sum.text();
    CHECK(digits.size() == 16);
    CHECK(std::stoull(digits, nullptr, 16) == sum.value());
  }
}
