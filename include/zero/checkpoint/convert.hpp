// SPDX-License-Identifier: Apache-2.0
/// @file
/// Makes one form of a checkpoint of another: files alone, without an optimizer.
#pragma once

#include <algorithm>
#include <cstddef>
#include <filesystem>
#include <span>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "zero/checkpoint/checkpoint.hpp"
#include "zero/checkpoint/info.hpp"
#include "zero/checkpoint/safetensors.hpp"
#include "zero/detail/checkpoint_file.hpp"
#include "zero/detail/checkpoint_pieces.hpp"
#include "zero/detail/checkpoint_writer.hpp"
#include "zero/detail/element_bytes.hpp"
#include "zero/detail/single_file.hpp"
#include "zero/error.hpp"

namespace zero {

namespace detail {

/// `sink(bytes)` for an array's elements of an interval, in parts.
template <class Sink>
void read_in_parts(const Checkpoint& from, std::size_t parameter, std::size_t array,
                   Interval elements, std::vector<std::byte>& part, const Sink& sink) {
  const ElementType type = from.array(parameter, array).type;
  const std::size_t width = bytes_of(type);
  for (std::size_t at = elements.begin; at < elements.end;) {
    const std::size_t count = std::min(part.size() / width, elements.end - at);
    const std::span<std::byte> bytes = std::span(part).first(count * width);
    from.read(parameter, array, at, type, bytes);
    sink(at, std::span<const std::byte>(bytes));
    at += count;
  }
}

/// What is written from a checkpoint and is none itself must not take its place.
inline void require_other_file(const Checkpoint& from, const std::filesystem::path& file) {
  std::error_code missing;
  if (!std::filesystem::equivalent(from.path(), file, missing)) return;
  throw UsageError(file.string() +
                   " is the checkpoint that is read, whose state would be lost; write to another "
                   "file");
}

}  // namespace detail

/// Writes a checkpoint as one safetensors file: each parameter's values under its own name, in its
/// own shape, and beside them `PARAMETER.master` and `PARAMETER.SLOT`. Memory: a buffer of 1 MiB.
/// Throws `CheckpointError`. What is damaged is found by `Checkpoint::verify`, not here.
inline void consolidate(const Checkpoint& from, const std::filesystem::path& file) {
  CheckpointInfo info = from.info();
  info.world = 1;
  detail::SingleFile to(file, std::move(info), [&](std::size_t parameter, std::size_t array) {
    return from.array(parameter, array).type;
  });
  std::vector<std::byte> part(detail::transfer_bytes);
  to.for_each_array([&](std::size_t i, std::size_t a) {
    const std::size_t width = detail::bytes_of(from.array(i, a).type);
    detail::read_in_parts(from, i, a, {0, to.elements(i)}, part,
                          [&](std::size_t begin, std::span<const std::byte> bytes) {
                            to.write(i, a, begin, width, bytes);
                          });
  });
  to.commit();
}

/// Writes the values alone, as one safetensors file that readers of weights take: each parameter's
/// under its own name, in its own shape and type, of tied ones once; neither master copies nor
/// optimizer state. It is no checkpoint, so `load` refuses it. Memory: two buffers of 1 MiB. Throws
/// `UsageError` for the file that is read, and `CheckpointError`. What is damaged is found by
/// `Checkpoint::verify`, not here.
inline void save_weights(const Checkpoint& from, const std::filesystem::path& file) {
  detail::require_other_file(from, file);
  const std::vector<SavedParameter>& parameters = from.info().parameters;
  const auto type_of = [&](std::size_t i) { return from.array(i, Checkpoint::values).type; };
  std::vector<std::size_t> order;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    if (!parameters[i].tied()) order.push_back(i);
  }
  // Wider elements first, so that each tensor lies on a multiple of its elements' size.
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    return detail::bytes_of(type_of(a)) > detail::bytes_of(type_of(b));
  });
  std::vector<TensorEntry> tensors;
  for (const std::size_t i : order) {
    tensors.push_back(detail::entry_of(parameters[i].name, type_of(i), parameters[i].shape,
                                       tensors.empty() ? 0 : tensors.back().end));
  }
  detail::SummedFile to(file, std::move(tensors), {{"format", "pt"}});
  detail::Writer writer(to.file(), detail::transfer_bytes, to.data_begin());
  std::vector<std::byte> part(detail::transfer_bytes);
  for (std::size_t t = 0; t < order.size(); ++t) {
    writer.start_tensor();
    detail::read_in_parts(
        from, order[t], Checkpoint::values, {0, parameters[order[t]].elements()}, part,
        [&](std::size_t, std::span<const std::byte> bytes) { writer.write(bytes); });
    to.set_checksum(t, writer.checksum());
  }
  writer.flush();
  to.commit();
}

/// Writes a checkpoint into a folder, as `world` ranks might have: every array is cut into as many
/// equal parts. The folder may be the one that it is read from. Throws `UsageError` for a world
/// below 1, and `CheckpointError`.
inline void split(const Checkpoint& from, const std::filesystem::path& folder, int world) {
  if (world < 1) throw UsageError("split: there must be at least one rank");
  detail::make_folder(folder);
  const detail::FolderLock lock(folder);
  const std::uint64_t generation = detail::next_generation(folder);
  CheckpointInfo info = from.info();
  info.world = world;
  std::vector<detail::ShardFile> files;
  std::vector<std::byte> part(detail::transfer_bytes);
  for (int rank = 0; rank < world; ++rank) {
    std::vector<detail::MemoryPiece> pieces;
    for (std::size_t i = 0; i < info.parameters.size(); ++i) {
      const Interval mine =
          detail::even_share(info.parameters[i].elements(), static_cast<std::size_t>(rank),
                             static_cast<std::size_t>(world));
      for (std::size_t a = 0; a < from.arrays(); ++a) {
        if (!detail::has_array(info.parameters[i], a) || mine.empty()) continue;
        pieces.push_back({i, a, mine, from.array(i, a).type, nullptr});
      }
    }
    detail::put_wider_first(pieces);
    files.push_back(detail::write_shard(
        folder, detail::shard_name(generation, rank, world), info, pieces,
        [&](const detail::MemoryPiece& piece, const auto& sink) {
          detail::read_in_parts(
              from, piece.parameter, piece.array, piece.elements, part,
              [&](std::size_t, std::span<const std::byte> bytes) { sink(bytes); });
        }));
  }
  detail::NewFile index(folder / detail::index_name);
  detail::write_index(index, info, files);
  detail::remove_older_shards(folder, generation);
}

}  // namespace zero
