// SPDX-License-Identifier: Apache-2.0
/// @file
/// Saves an optimizer's state and its parameters, each rank what it owns.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "zero/checkpoint/info.hpp"
#include "zero/detail/checkpoint_agreement.hpp"
#include "zero/detail/checkpoint_file.hpp"
#include "zero/detail/checkpoint_pieces.hpp"
#include "zero/detail/checkpoint_writer.hpp"
#include "zero/detail/join_scope.hpp"
#include "zero/error.hpp"

namespace zero {

namespace detail {

/// One save, in the three parts that ranks agree after: this rank's file can be written, it has
/// been, and the index has.
class SaveJob {
 public:
  SaveJob(std::filesystem::path folder, std::map<std::string, std::string> notes)
      : folder_(std::move(folder)), notes_(std::move(notes)) {}

  /// Returns what keeps some rank from it, or nothing.
  template <class State>
  std::string begin(State& state) {
    if constexpr (State::has_replicas) writes_ = state.comm().replicas().rank() == 0;
    rank_ = state.rank();
    std::uint64_t generation = 0;
    const std::string error = error_of([&] {
      info_ = describe_state(state);
      info_.notes = std::move(notes_);
      for (const auto& [name, note] : info_.notes) {
        if (is_utf8(name) && is_utf8(note)) continue;
        throw UsageError(
            "the note " + in_quotes(name) +
            " is not UTF-8, which files of checkpoints are; write its bytes as text, say in "
            "hexadecimal digits");
      }
      (void)ArrayNames(info_);
      if (writes_) pieces_ = pieces_to_save(state);
      if (!leads()) return;
      make_folder(folder_);
      lock_.emplace(folder_);
      generation = next_generation(folder_);
    });
    const auto words =
        exchange_words(state, error, {generation, reinterpret_cast<std::uintptr_t>(this)});
    for (const CheckpointWord& word : words) generation_ = std::max(generation_, word.numbers[0]);
    identity_ = words[0].numbers[1];
    return first_error(words);
  }

  /// Of this rank alone. `read(piece, sink)` calls `sink(bytes)` for a piece's bytes, in order.
  template <class Read>
  void write(const Read& read) {
    if (!writes_) return;
    error_ = error_of([&] {
      file_ =
          write_shard(folder_, shard_name(generation_, rank_, info_.world), info_, pieces_, read);
    });
  }

  /// Returns what went wrong on some rank, or nothing: then the checkpoint is there.
  template <class State>
  std::string end(State& state) {
    const auto words =
        exchange_words(state, error_,
                       {file_.bytes, checksum_of(file_.header_checksum).value_or(0),
                        writes_ ? static_cast<std::uint64_t>(rank_) + 1 : 0, identity_});
    std::string error = first_error(words);
    for (std::size_t r = 0; error.empty() && r < words.size(); ++r) {
      if (words[r].numbers[3] == words[0].numbers[3]) continue;
      error = "rank " + std::to_string(r) + " ends another save than rank 0; end several in the " +
              "same order on all ranks";
    }
    if (!error.empty()) {
      give_up();
      return error;
    }
    std::vector<ShardFile> files;
    error = error_of([&] {
      if (!leads()) return;
      files = files_of(words);
      require_reachable(files);
    });
    error = first_error(exchange_words(state, error));
    if (!error.empty()) {
      give_up();
      return error;
    }
    std::optional<NewFile> index;
    error = error_of([&] {
      if (leads()) write_index(index.emplace(folder_ / index_name), info_, files);
    });
    const bool may_be_named = index && index->may_have_its_name();
    index.reset();
    const auto ended = exchange_words(state, error, {may_be_named ? 1U : 0U});
    // Where that failed the new index may be there all the same; then neither its files nor those
    // of the one before may be removed.
    if (leads() && error.empty()) remove_older_shards(folder_, generation_);
    error = first_error(ended);
    if (!error.empty() && std::ranges::all_of(ended, [](const CheckpointWord& word) {
          return word.numbers[0] == 0;
        })) {
      give_up();
    }
    return error;
  }

  /// Removes what this rank has written: no index names it.
  void give_up() noexcept {
    if (file_.name.empty()) return;
    std::error_code ignored;
    std::filesystem::remove(folder_ / file_.name, ignored);
  }

  [[nodiscard]] std::vector<MemoryPiece>& pieces() noexcept { return pieces_; }

 private:
  /// Who writes the index.
  [[nodiscard]] bool leads() const noexcept { return writes_ && rank_ == 0; }

  /// Else nobody could load it.
  void require_reachable(const std::vector<ShardFile>& files) const {
    for (std::size_t r = 0; r < files.size(); ++r) {
      std::error_code missing;
      if (std::filesystem::file_size(folder_ / files[r].name, missing) == files[r].bytes) continue;
      throw CheckpointError(folder_.string() + ": the file of rank " + std::to_string(r) + ", " +
                            files[r].name +
                            ", is not there; give all ranks one folder, on a file system that all "
                            "of them reach");
    }
  }

  [[nodiscard]] std::vector<ShardFile> files_of(const std::vector<CheckpointWord>& words) const {
    std::vector<ShardFile> files(static_cast<std::size_t>(info_.world));
    for (const CheckpointWord& word : words) {
      if (word.numbers[2] == 0) continue;
      const auto rank = static_cast<std::size_t>(word.numbers[2] - 1);
      files[rank] = {shard_name(generation_, static_cast<int>(rank), info_.world), word.numbers[0],
                     checksum_text(word.numbers[1])};
    }
    return files;
  }

  std::filesystem::path folder_;
  std::optional<FolderLock> lock_{};  ///< of the rank that leads
  std::map<std::string, std::string> notes_;
  CheckpointInfo info_{};
  std::vector<MemoryPiece> pieces_{};
  std::uint64_t generation_ = 0;
  std::uint64_t identity_ = 0;  ///< the same on all ranks, and of no other save that is under way
  int rank_ = 0;
  bool writes_ = true;  ///< not of further replicas, which have the same
  ShardFile file_{};
  std::string error_{};
};

/// What `SaveJob::write` is given while the state stands still.
template <class State>
[[nodiscard]] auto reader_of() {
  return [](const MemoryPiece& piece, const auto& sink) {
    State::Memory::read(static_cast<const std::byte*>(piece.data), piece.bytes(),
                        [&](std::size_t, std::span<const std::byte> part) { sink(part); });
  };
}

}  // namespace detail

/// Collective, between steps: saves parameters and optimizer state into `folder`, each rank what it
/// owns, into a file of its own; it is made if need be, and must be the same for all ranks. What
/// was saved there before stays whole, and is what the folder holds, until all ranks have written;
/// then its files are removed. Needs no memory but for tables and two buffers of 1 MiB (on a device
/// 5 MiB).
///
/// Saved are all values (of frozen parameters too), master copies, slots, step counts, groups'
/// options (`for_each_option`), the dynamic loss scale, the seed of stochastic rounding, and rank
/// 0's `notes`, in UTF-8: whatever else the program needs to go on, which it finds in
/// `Checkpoint::info`. Not: gradients, `clip_grad_norm`, settings, policies.
///
/// Throws `CheckpointError` on all ranks where one can't write; `UsageError` on all ranks where
/// gradients were marked or leased, a unit is acquired, or within a `join`. Then marks must be
/// given anew.
template <class Optimizer>
void save(Optimizer& optimizer, const std::filesystem::path& folder,
          const std::map<std::string, std::string>& notes = {}) {
  std::string error;
  detail::EngineAccess::engine_of(optimizer).between_steps(detail::Topic::save, "save",
                                                           [&]<class State>(State& state, bool&) {
                                                             detail::SaveJob job(folder, notes);
                                                             error = job.begin(state);
                                                             if (!error.empty()) return;
                                                             job.write(detail::reader_of<State>());
                                                             error = job.end(state);
                                                           });
  if (!error.empty()) throw CheckpointError("save: " + error);
}

/// A save that goes on while training does: see `save_async`.
template <class Engine>
class PendingSave {
 public:
  PendingSave(Engine& engine, std::unique_ptr<detail::SaveJob> job, std::vector<std::byte> snapshot)
      : engine_(&engine), job_(std::move(job)), snapshot_(std::move(snapshot)) {
    written_ = std::make_unique<std::atomic<bool>>(false);
    thread_ = std::thread([job = job_.get(), written = written_.get()] {
      job->write([](const detail::MemoryPiece& piece, const auto& sink) {
        sink(std::span<const std::byte>(piece.data, piece.bytes()));
      });
      written->store(true, std::memory_order_release);
    });
  }
  PendingSave(PendingSave&&) noexcept = default;
  PendingSave& operator=(PendingSave&&) = delete;
  /// Without `finish` nothing is saved: waits for this rank's file, and removes it.
  ~PendingSave() {
    if (!thread_.joinable()) return;
    thread_.join();
    job_->give_up();
  }

  /// Whether this rank's file is written, or can't be, so that `finish` waits for none but peers.
  [[nodiscard]] bool written() const noexcept { return written_->load(std::memory_order_acquire); }

  /// Collective, between steps, once: waits for all ranks' files, and makes them the folder's
  /// checkpoint. The optimizer must be alive, and may have gone on. Throws as `save`.
  void finish() {
    if (!thread_.joinable()) {
      throw UsageError("finish: this save has been finished already; begin another");
    }
    std::string error;
    engine_->between_steps(detail::Topic::finish, "finish", [&](auto& state, bool&) {
      thread_.join();
      error = job_->end(state);
    });
    snapshot_ = {};
    job_.reset();
    if (!error.empty()) throw CheckpointError("save: " + error);
  }

 private:
  Engine* engine_;
  std::unique_ptr<detail::SaveJob> job_;
  std::vector<std::byte> snapshot_;
  std::unique_ptr<std::atomic<bool>> written_{};
  std::thread thread_{};
};

/// Collective, between steps: as `save`, but copies what this rank owns to memory (its values and
/// state divided by the ranks) and returns; a thread writes it. The folder's checkpoint is the one
/// before until `PendingSave::finish` has returned, which all ranks call. Finish one before the
/// next into the same folder begins. Throws as `save`, and `std::bad_alloc` as `CheckpointError`.
template <class Optimizer>
[[nodiscard]] auto save_async(Optimizer& optimizer, const std::filesystem::path& folder,
                              const std::map<std::string, std::string>& notes = {}) {
  auto& engine = detail::EngineAccess::engine_of(optimizer);
  auto job = std::make_unique<detail::SaveJob>(folder, notes);
  std::vector<std::byte> snapshot;
  std::string error;
  engine.between_steps(
      detail::Topic::async_save, "save_async", [&]<class State>(State& state, bool&) {
        error = job->begin(state);
        if (!error.empty()) return;
        const std::string mine = detail::error_of([&] {
          std::size_t bytes = 0;
          for (const detail::MemoryPiece& piece : job->pieces()) bytes += piece.bytes();
          snapshot.resize(bytes);
          std::byte* to = snapshot.data();
          for (detail::MemoryPiece& piece : job->pieces()) {
            State::Memory::copy(static_cast<const std::byte*>(piece.data), piece.bytes(), to);
            piece.data = to;
            to += piece.bytes();
          }
        });
        error = detail::first_error(detail::exchange_words(state, mine));
      });
  if (!error.empty()) throw CheckpointError("save_async: " + error);
  using Engine = std::remove_reference_t<decltype(engine)>;
  return PendingSave<Engine>(engine, std::move(job), std::move(snapshot));
}

}  // namespace zero
