// SPDX-License-Identifier: Apache-2.0
/// @file
/// Files of a checkpoint: read at any place by any thread, and written so that a file is either
/// whole or not there. POSIX.
#pragma once

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <limits>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "zero/detail/checksum.hpp"
#include "zero/error.hpp"

namespace zero::detail {

/// What a user can do about an error of the system; empty where nothing general can be said.
[[nodiscard]] constexpr std::string_view remedy_of(int error) noexcept {
  switch (error) {
    case ENOSPC: return ": free space there, or choose another folder";
    case EDQUOT: return ": the user's quota is used up; free space, or choose another folder";
    case EFBIG: return ": raise the limit on a file's size (ulimit -f), or use more ranks";
    case EACCES:
    case EPERM:
    case EROFS: return ": choose a folder that this user may write to, or files that it may read";
    case ENOENT:
    case ENOTDIR: return ": check the path, and that its folder exists";
    case EMFILE:
    case ENFILE: return ": raise the limit on open files (ulimit -n)";
    case EIO: return ": the disk or its connection fails; use another";
    default: return "";
  }
}

/// @param error of `errno`
/// @param operation e.g. "write"
[[noreturn]] inline void throw_file_error(const std::filesystem::path& path,
                                          std::string_view operation, int error) {
  throw CheckpointError("checkpoint file " + path.string() + ": " + std::string(operation) +
                        " failed: " + std::generic_category().message(error) + " (errno " +
                        std::to_string(error) + ")" + std::string(remedy_of(error)));
}

/// An open file's number, closed at the end.
class FileDescriptor {
 public:
  /// @param operation for the message, e.g. "open"
  /// @throws CheckpointError
  FileDescriptor(const std::filesystem::path& path, std::string_view operation, int flags) {
    do {
      number_ = ::open(path.c_str(), flags | O_CLOEXEC, 0666);
    } while (number_ < 0 && errno == EINTR);
    if (number_ < 0) throw_file_error(path, operation, errno);
  }
  ~FileDescriptor() {
    if (number_ >= 0) ::close(number_);
  }
  FileDescriptor(const FileDescriptor&) = delete;
  FileDescriptor& operator=(const FileDescriptor&) = delete;

  [[nodiscard]] int number() const noexcept { return number_; }

  /// Closes it now, to hear of errors that are told no earlier; 0, or of `errno`.
  [[nodiscard]] int close() noexcept {
    // Not tried again after EINTR: on Linux the number is free by then, and may be another's.
    return ::close(std::exchange(number_, -1)) == 0 || errno == EINTR ? 0 : errno;
  }

 private:
  int number_ = -1;
};

/// Some systems refuse to read or write more at once.
inline constexpr std::size_t largest_transfer = std::size_t{1} << 30U;

/// Whether all of `[offset, offset + bytes)` can be told to the system.
[[nodiscard]] constexpr bool is_offset(std::uint64_t offset, std::size_t bytes) noexcept {
  constexpr auto most = static_cast<std::uint64_t>(std::numeric_limits<off_t>::max());
  return offset <= most && bytes <= most - offset;
}

/// Writes all bytes. @throws CheckpointError
inline void write_all(int file, const std::filesystem::path& path, std::uint64_t offset,
                      std::span<const std::byte> bytes) {
  if (!is_offset(offset, bytes.size())) throw_file_error(path, "write", EFBIG);
  while (!bytes.empty()) {
    const ssize_t written = ::pwrite(file, bytes.data(), std::min(bytes.size(), largest_transfer),
                                     static_cast<off_t>(offset));
    if (written < 0) {
      if (errno == EINTR) continue;
      throw_file_error(path, "write", errno);
    }
    if (written == 0) throw_file_error(path, "write", ENOSPC);  // or this would never end
    bytes = bytes.subspan(static_cast<std::size_t>(written));
    offset += static_cast<std::uint64_t>(written);
  }
}

/// Has what was written reach the disk. 0, or of `errno`.
[[nodiscard]] inline int sync(int file) noexcept {
  int result = 0;
  do {
#ifdef F_FULLFSYNC
    result = ::fcntl(file, F_FULLFSYNC);  // fsync of macOS leaves it in the drive's cache
    if (result != 0 && errno != EINTR) result = ::fsync(file);  // not every file system has it
#else
    result = ::fsync(file);
#endif
  } while (result != 0 && errno == EINTR);
  return result == 0 ? 0 : errno;
}

/// Makes names in a folder last: what was made, renamed or removed there. Empty is the current one.
/// @throws CheckpointError
inline void sync_folder(const std::filesystem::path& path) {
  const std::filesystem::path folder = path.empty() ? "." : path;
  const FileDescriptor file(folder, "open folder", O_RDONLY | O_DIRECTORY);
  const int error = sync(file.number());
  // Some file systems can't, and have nothing to do.
  if (error != 0 && error != EINVAL) throw_file_error(folder, "fsync of the folder", error);
}

/// That no other save, of whatever process, is under way in a folder: they would write the same
/// files. The system lets go of it when a process dies.
class FolderLock {
 public:
  /// @throws CheckpointError where there is one
  explicit FolderLock(const std::filesystem::path& folder)
      : file_(folder, "open folder", O_RDONLY | O_DIRECTORY) {
    // Some file systems have no locks; there nobody looks.
    if (::flock(file_.number(), LOCK_EX | LOCK_NB) == 0 || errno != EWOULDBLOCK) return;
    throw CheckpointError(folder.string() +
                          ": another save into this folder has begun; finish that one first");
  }

 private:
  FileDescriptor file_;
};

/// A file to read. Every member may be called by several threads at once.
class ReadFile {
 public:
  /// @throws CheckpointError it is not there, may not be read or is no regular file
  explicit ReadFile(std::filesystem::path path)
      : path_(std::move(path)),
        file_(path_, "open", O_RDONLY | O_NONBLOCK) {  // or a pipe of that name would be waited for
    struct stat status{};
    if (::fstat(file_.number(), &status) != 0) throw_file_error(path_, "stat", errno);
    if (!S_ISREG(status.st_mode)) {
      throw CheckpointError("checkpoint file " + name() + ": this is no file; check the path");
    }
    bytes_ = static_cast<std::uint64_t>(status.st_size);
  }

  [[nodiscard]] const std::filesystem::path& path() const noexcept { return path_; }

  /// For messages.
  [[nodiscard]] std::string name() const { return path_.string(); }

  /// When it was opened.
  [[nodiscard]] std::uint64_t bytes() const noexcept { return bytes_; }

  /// Reads exactly `to.size()` bytes. @throws CheckpointError also where the file is shorter
  void read_at(std::uint64_t offset, std::span<std::byte> to) const {
    if (offset > bytes_ || to.size() > bytes_ - offset) throw_short(offset, to.size(), bytes_);
    const std::size_t wanted = to.size();
    const std::uint64_t begin = offset;
    while (!to.empty()) {
      const ssize_t read = ::pread(file_.number(), to.data(), std::min(to.size(), largest_transfer),
                                   static_cast<off_t>(offset));
      if (read < 0) {
        if (errno == EINTR) continue;
        throw_file_error(path_, "read", errno);
      }
      if (read == 0) throw_short(begin, wanted, offset);  // cut off since it was opened
      to = to.subspan(static_cast<std::size_t>(read));
      offset += static_cast<std::uint64_t>(read);
    }
  }

 private:
  [[noreturn]] void throw_short(std::uint64_t offset, std::size_t wanted, std::uint64_t has) const {
    throw CheckpointError("checkpoint file " + name() + ": " + std::to_string(wanted) +
                          " bytes were to be read at byte " + std::to_string(offset) +
                          ", but it ends at byte " + std::to_string(has) +
                          ": it was cut off; use another copy or checkpoint");
  }

  std::filesystem::path path_;
  FileDescriptor file_;
  std::uint64_t bytes_ = 0;
};

/// A file that comes into being all at once: written under another name, `path` + ".tmp", and
/// renamed by `commit`. Until then a file called `path` stays as it was. Without `commit` nothing
/// is left behind, except by a process that is killed; the next one replaces that.
class NewFile {
 public:
  /// @throws CheckpointError
  explicit NewFile(std::filesystem::path path)
      : path_(std::move(path)), temporary_(path_), file_(open()) {}

  ~NewFile() {
    if (pending_) ::unlink(temporary_.c_str());
  }
  NewFile(const NewFile&) = delete;
  NewFile& operator=(const NewFile&) = delete;

  /// Its name once it is committed.
  [[nodiscard]] const std::filesystem::path& path() const noexcept { return path_; }

  /// False as long as it surely has not.
  [[nodiscard]] bool may_have_its_name() const noexcept { return may_have_its_name_; }

  /// Writes all bytes; places never written to read as zeros. Several threads may.
  /// @throws CheckpointError
  void write_at(std::uint64_t offset, std::span<const std::byte> bytes) {
    write_all(file_.number(), temporary_, offset, bytes);
  }

  /// A hint that these bytes may go to the disk now, while others are still made, rather than all
  /// in `commit`.
  void start_writing_back(std::uint64_t offset, std::uint64_t bytes) noexcept {
#ifdef SYNC_FILE_RANGE_WRITE
    (void)::sync_file_range(file_.number(), static_cast<off_t>(offset), static_cast<off_t>(bytes),
                            SYNC_FILE_RANGE_WRITE);
#else
    (void)offset, (void)bytes;
#endif
  }

  /// Once, after the last write: all of it lasts, under its name, when this returns.
  /// @throws CheckpointError the file is removed, and what had its name stays; where only the
  ///         folder's fsync failed, the new one has its name, but may lose it with the power
  void commit() {
    if (const int error = sync(file_.number()); error != 0) {
      throw_file_error(temporary_, "fsync", error);
    }
    if (const int error = file_.close(); error != 0) throw_file_error(temporary_, "close", error);
    may_have_its_name_ = true;  // over a network it may, whatever is told
    if (::rename(temporary_.c_str(), path_.c_str()) != 0) {
      throw_file_error(path_, "rename from " + temporary_.string(), errno);
    }
    pending_ = false;
    sync_folder(path_.parent_path());
  }

 private:
  /// What a killed process left is removed first and not written over: it may be a link.
  FileDescriptor open() {
    temporary_ += ".tmp";
    if (::unlink(temporary_.c_str()) != 0 && errno != ENOENT) {
      throw_file_error(temporary_, "removal of an old one", errno);
    }
    return FileDescriptor(temporary_, "open", O_WRONLY | O_CREAT | O_EXCL);
  }

  std::filesystem::path path_;
  std::filesystem::path temporary_;
  FileDescriptor file_;
  bool pending_ = true;
  bool may_have_its_name_ = false;
};

/// Writes one span after the other to a file, small ones together, and sums up each tensor's bytes
/// on the way. The last ones are written by `flush`, not at the end of its life.
class Writer {
 public:
  /// @param buffer_bytes spans that are as large go to the file as they are, and no byte is copied
  /// @param begin where in the file the first byte goes
  Writer(NewFile& file, std::size_t buffer_bytes, std::uint64_t begin = 0)
      : file_(&file), room_(buffer_bytes), written_(begin), on_its_way_(begin) {
    buffer_.reserve(buffer_bytes);
  }

  /// Where in the file the next byte goes.
  [[nodiscard]] std::uint64_t position() const noexcept { return written_ + buffer_.size(); }

  /// From here on the next tensor's bytes are summed up.
  void start_tensor() noexcept { checksum_ = Checksum(); }

  /// Of all bytes since `start_tensor`, or the beginning.
  [[nodiscard]] const Checksum& checksum() const noexcept { return checksum_; }

  /// @throws CheckpointError bytes of earlier calls may be missing too: give the file up
  void write(std::span<const std::byte> bytes) {
    checksum_.add(bytes);
    if (bytes.size() > room_ - buffer_.size()) flush();
    if (bytes.size() >= room_) {
      write_out(bytes);
    } else {
      buffer_.insert(buffer_.end(), bytes.begin(), bytes.end());
    }
  }

  /// @throws CheckpointError as `write`
  void flush() {
    write_out(buffer_);
    buffer_.clear();
  }

 private:
  void write_out(std::span<const std::byte> bytes) {
    file_->write_at(written_, bytes);
    written_ += bytes.size();
    if (written_ - on_its_way_ < written_back_at_once) return;
    file_->start_writing_back(on_its_way_, written_ - on_its_way_);
    on_its_way_ = written_;
  }

  static constexpr std::uint64_t written_back_at_once = std::uint64_t{8} << 20U;

  NewFile* file_;
  std::size_t room_;
  std::uint64_t written_;
  std::uint64_t on_its_way_;  ///< up to where the system has been told to write
  std::vector<std::byte> buffer_{};
  Checksum checksum_{};
};

}  // namespace zero::detail
