// SPDX-License-Identifier: Apache-2.0
// Checkpoints against the disk they are written to and read from; what they need of memory; and how
// long it takes to find out what to read.
#include <benchmark/benchmark.h>
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>
#include <zero/checkpoint.hpp>
#include <zero/detail/checkpoint_writer.hpp>
#include <zero/zero.hpp>

#ifdef __GLIBC__
#include <malloc.h>
#endif

#include "../examples/bert/process_memory.hpp"
#include "child.hpp"
#include "table.hpp"
#include "team.hpp"

namespace bench {
namespace {

namespace fs = std::filesystem;

constexpr int world = 2;
constexpr std::size_t chunk_bytes = std::size_t{1} << 20;  // as dd bs=1M

/// A folder on the disk that is measured, gone at the end.
class Folder {
 public:
  explicit Folder(const std::string& name) : path_(fs::path(ZERO_BENCH_FOLDER) / name) {
    fs::remove_all(path_);
    fs::create_directories(path_);
  }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;
  ~Folder() {
    std::error_code ignored;
    fs::remove_all(path_, ignored);
  }
  [[nodiscard]] const fs::path& path() const { return path_; }

 private:
  fs::path path_;
};

/// What dd bs=1M conv=fsync does; then it takes the place of the file before.
void write_plain(const fs::path& path, std::uint64_t bytes) {
  static const std::vector<std::byte> chunk(chunk_bytes, std::byte{0x5a});
  zero::detail::NewFile file(path);
  for (std::uint64_t at = 0; at < bytes; at += chunk_bytes) {
    file.write_at(at, std::span(chunk).first(std::min<std::uint64_t>(chunk_bytes, bytes - at)));
  }
  file.commit();
}

/// The part of a file, from its beginning.
void read_plain(const fs::path& path, std::uint64_t bytes) {
  std::vector<std::byte> chunk(chunk_bytes);
  const zero::detail::ReadFile file(path);
  for (std::uint64_t at = 0; at < bytes; at += chunk_bytes) {
    file.read_at(at, std::span(chunk).first(std::min<std::uint64_t>(chunk_bytes, bytes - at)));
    benchmark::DoNotOptimize(chunk.data());
  }
}

/// Has the system forget what it keeps of the files in a folder.
void drop_from_cache(const fs::path& folder) {
  for (const auto& entry : fs::directory_iterator(folder)) {
    const zero::detail::FileDescriptor file(entry.path(), "open", O_RDONLY);
    if (fsync(file.number()) != 0 || posix_fadvise(file.number(), 0, 0, POSIX_FADV_DONTNEED) != 0) {
      throw std::runtime_error("the system keeps " + entry.path().string() + " in its cache");
    }
  }
}

using Store = std::vector<zero::ShapedParam<float>>;

/// A world of in-process ranks with float Adam over matrices of 4 MiB.
class Ranks {
 public:
  using Optimizer = zero::ZeroSharded<zero::Adam, Store&, zero::InProcessCommunicator,
                                      zero::ContiguousPartition, zero::ParamAndGradView>;

  explicit Ranks(std::size_t matrices) : shared_(world), ranks_(world), team_(world) {
    team_.run([&](int r) {
      zero::Settings settings;
      settings.check_values = false;  // they are equal, and reading them all takes a while
      settings.initial_value = [](std::string_view, std::size_t e) {
        return 1.0 / static_cast<double>(1 + e % 1000);
      };
      Rank& rank = ranks_[static_cast<std::size_t>(r)];
      for (std::size_t i = 0; i < matrices; ++i) {
        rank.store.emplace_back("layer" + std::to_string(i), std::vector<std::size_t>{1024, 1024});
      }
      rank.optimizer.emplace(zero::Adam{}, rank.store, shared_.communicator(r), settings);
      for (const auto& parameter : rank.store) {
        std::fill(parameter.gradient().begin(), parameter.gradient().end(), 1e-3F);
      }
      rank.optimizer->step();
    });
  }
  /// Calls `f(optimizer)` on each rank's thread.
  template <class F>
  void run(F&& f) {
    team_.run([&](int r) { f(*ranks_[static_cast<std::size_t>(r)].optimizer); });
  }
  [[nodiscard]] Team& team() { return team_; }

  /// Of all arrays once: values and two moments.
  [[nodiscard]] std::uint64_t bytes() const {
    return std::uint64_t{ranks_[0].store.size()} * matrix_bytes * 3;
  }
  static constexpr std::uint64_t matrix_bytes = std::uint64_t{4} << 20;

 private:
  struct Rank {
    Store store{};
    std::optional<Optimizer> optimizer{};
  };
  zero::InProcessWorld shared_;
  std::vector<Rank> ranks_;
  Team team_;
};

/// As many as one plain write takes about two seconds for, but for 1e8 elements at most.
std::size_t matrices_for(const Folder& folder) {
  constexpr std::uint64_t probe = std::uint64_t{192} << 20;
  const double time = seconds([&] { write_plain(folder.path() / "probe", probe); });
  fs::remove(folder.path() / "probe");
  const double bytes = 2 * static_cast<double>(probe) / time;
  return std::clamp<std::size_t>(
      static_cast<std::size_t>(bytes / (3 * static_cast<double>(Ranks::matrix_bytes))), 8, 96);
}

std::string described(const Ranks& ranks, const std::string& rest) {
  return text(static_cast<double>(ranks.bytes()) / 12, "elements of float Adam, K=2: ") + rest;
}

const Row save_row("checkpoint/save", [](Sheet& sheet) {
  const Folder folder("save"), plain("save_plain");
  Ranks ranks(matrices_for(plain));
  const auto file = [&](int r) { return plain.path() / std::to_string(r); };
  const Pairs pairs = run_pairs(
      [&] { ranks.run([&](auto& optimizer) { zero::save(optimizer, folder.path()); }); },
      [&] { ranks.team().run([&](int r) { write_plain(file(r), ranks.bytes() / world); }); });
  const auto bytes = static_cast<double>(ranks.bytes());
  sheet.ratio("", pairs, at_least(0.7),
              described(ranks, rate(bytes, pairs.subject) + " against the disk's " +
                                   rate(bytes, pairs.reference) +
                                   ", two files written by a thread each, with fsync"));
});

const Row load_row("checkpoint/load", [](Sheet& sheet) {
  const Folder folder("load");
  Ranks ranks(matrices_for(folder));
  ranks.run([&](auto& optimizer) { zero::save(optimizer, folder.path()); });
  std::vector<fs::path> files;
  for (const auto& entry : fs::directory_iterator(folder.path())) {
    if (entry.path().extension() == ".safetensors") files.push_back(entry.path());
  }
  std::sort(files.begin(), files.end());
  // What a load reads: a half each to compare checksums; then, at stage 1, all values and half of
  // each moment.
  const std::uint64_t half = ranks.bytes() / world, other_values = half / 3;
  const auto load = [&] {
    ranks.run([&](auto& optimizer) { zero::load(optimizer, folder.path()); });
  };
  const auto read = [&] {
    ranks.team().run([&](int r) {
      const auto mine = static_cast<std::size_t>(r);
      read_plain(files[mine], half);
      read_plain(files[mine], half);
      read_plain(files[1 - mine], other_values);
    });
  };
  const auto bytes = static_cast<double>(world * (2 * half + other_values));
  const auto line = [&](const std::string& part, const Pairs& pairs, std::optional<Bound> bound,
                        const std::string& state) {
    sheet.ratio(part, pairs, bound,
                described(ranks, text(bytes / 1e9, "GB") + " read, what is needed after it was " +
                                     "verified once more: " + rate(bytes, pairs.subject) +
                                     " against plain reads' " + rate(bytes, pairs.reference) +
                                     "; " + state));
  };
  line("", run_prepared_pairs([&] { drop_from_cache(folder.path()); }, load, read), at_least(0.7),
       "before each the files were dropped from the page cache");
  line("cached", run_pairs(load, read), std::nullopt, "all in the page cache");
});

/// Bytes by which a process grew at most.
struct Growth {
  std::uint64_t save = 0, load = 0;
};

const Row memory_row("checkpoint/memory", [](Sheet& sheet) {
  const Folder folder("memory");
  std::vector<double> save, load;
  for (int i = 0; i < 3; ++i) {
    const Growth growth = in_child([&] {
      Ranks ranks(24);
      const auto growth_of = [&](auto&& verb) {
#ifdef __GLIBC__
        malloc_trim(0);
#endif
        const std::uint64_t before = bert::resident_bytes().value_or(0);
        if (before == 0 || !bert::reset_peak()) {
          throw std::runtime_error("the system doesn't tell this process's memory");
        }
        ranks.run(verb);
        return (bert::peak_resident_bytes().value_or(before) - before) / world;
      };
      Growth measured;
      measured.save = growth_of([&](auto& optimizer) { zero::save(optimizer, folder.path()); });
      measured.load = growth_of([&](auto& optimizer) { zero::load(optimizer, folder.path()); });
      return measured;
    });
    save.push_back(static_cast<double>(growth.save) / chunk_bytes);
    load.push_back(static_cast<double>(growth.load) / chunk_bytes);
  }
  constexpr double two_buckets = 2 * 25;
  sheet.value("save", "MiB", spread_of(save), at_most(two_buckets),
              "by which a rank of K=2 grew at most, of what is resident; 25 MiB a bucket");
  sheet.value("load", "MiB", spread_of(load), at_most(two_buckets), "the same");
});

// Resharding.

/// GPT-2 XL's matrices (Radford et al., 2019: hidden 1600), in as many layers as make 1e9 elements.
std::vector<std::pair<std::string, std::vector<std::size_t>>> gpt2_shapes() {
  constexpr std::size_t hidden = 1600;
  std::vector<std::pair<std::string, std::vector<std::size_t>>> shapes{
      {"wte.weight", {50257, hidden}}, {"wpe.weight", {1024, hidden}}};
  for (int layer = 0; layer < 30; ++layer) {
    const std::string h = "h." + std::to_string(layer) + ".";
    for (const auto& [name, in, out] : {std::tuple{"attn.c_attn", hidden, 3 * hidden},
                                        {"attn.c_proj", hidden, hidden},
                                        {"mlp.c_fc", hidden, 4 * hidden},
                                        {"mlp.c_proj", 4 * hidden, hidden}}) {
      shapes.push_back({h + name + ".weight", {in, out}});
      shapes.push_back({h + name + ".bias", {out}});
    }
    for (const char* norm : {"ln_1", "ln_2"}) {
      shapes.push_back({h + norm + ".weight", {hidden}});
      shapes.push_back({h + norm + ".bias", {hidden}});
    }
  }
  return shapes;
}

zero::CheckpointInfo info_of_gpt2(int ranks) {
  zero::CheckpointInfo info;
  info.world = ranks;
  info.slots = {"exp_avg", "exp_avg_sq"};
  info.groups.resize(1);
  for (const auto& [name, shape] : gpt2_shapes()) {
    auto& parameter = info.parameters.emplace_back();
    parameter.name = name;
    parameter.shape = shape;
  }
  return info;
}

zero::Layout<> layout_of(const zero::CheckpointInfo& info, int ranks) {
  std::vector<zero::LayoutParameter> parameters;
  for (const zero::SavedParameter& p : info.parameters) {
    parameters.push_back({.elements = p.elements()});
  }
  const std::vector<zero::LayoutLane> lanes{
      {.element_bytes = sizeof(float), .bucket_bytes = zero::NoView{}.bucket_bytes}};
  return zero::Layout<>(parameters, lanes, ranks);
}

constexpr std::size_t arrays_of_adam = zero::detail::first_slot_array + 2;

/// `f(parameter, array, elements)` for all that a rank keeps of values and moments.
template <class F>
void for_each_kept(const zero::Layout<>& layout, int rank, F&& f) {
  for (std::size_t array = 0; array < arrays_of_adam; ++array) {
    if (array == zero::detail::master_array) continue;
    layout.for_each_owned(0, rank, [&](const zero::Fragment& part, std::size_t, std::size_t) {
      f(part.parameter, array,
        zero::Interval{part.parameter_begin, part.parameter_begin + part.elements});
    });
  }
}

/// The files as `save` names and heads them, with holes where the arrays would be.
void write_headers(const fs::path& folder, const zero::CheckpointInfo& info) {
  using namespace zero::detail;
  const zero::Layout<> layout = layout_of(info, info.world);
  std::vector<ShardFile> files;
  for (int rank = 0; rank < info.world; ++rank) {
    std::vector<zero::TensorEntry> tensors;
    for_each_kept(layout, rank, [&](std::size_t parameter, std::size_t array, zero::Interval run) {
      tensors.push_back(entry_of(run_name(array_name(info, parameter, array), run),
                                 zero::ElementType::float32, {run.size()},
                                 tensors.empty() ? 0 : tensors.back().end));
    });
    const std::string name = shard_name(1, rank, info.world);
    SummedFile file(folder / name, std::move(tensors), {});
    std::string sum = file.commit();
    fs::resize_file(folder / name, file.bytes());
    files.push_back({name, file.bytes(), std::move(sum)});
  }
  NewFile index(folder / index_name);
  write_index(index, info, files);
}

const Row reshard_row("checkpoint/reshard", [](Sheet& sheet) {
  constexpr int saved_by = 8, loaded_by = 3;
  const Folder folder("reshard");
  write_headers(folder.path(), info_of_gpt2(saved_by));
  std::vector<double> planning, opening;
  std::size_t reads = 0, pieces = 0, elements = 0;
  for (int i = 0; i < pair_count; ++i) {
    std::optional<zero::Checkpoint> from;
    opening.push_back(1e3 * seconds([&] { from.emplace(folder.path()); }));
    reads = elements = 0;
    planning.push_back(
        1e3 * seconds([&] {
          const zero::Layout<> layout = layout_of(from->info(), loaded_by);
          for (int rank = 0; rank < loaded_by; ++rank) {
            for_each_kept(layout, rank,
                          [&](std::size_t p, std::size_t array, zero::Interval wanted) {
                            from->for_each_part(
                                p, array, wanted,
                                [&](const auto& piece, std::uint64_t offset, zero::Interval run) {
                                  benchmark::DoNotOptimize(offset + piece.file);
                                  elements += array == 0 ? run.size() : 0;
                                  ++reads;
                                });
                          });
          }
        }));
    pieces = 0;
    from->for_each_piece([&](auto&&...) { ++pieces; });
  }
  sheet.value("", "ms", spread_of(planning), at_most(100),
              text(static_cast<double>(elements), "elements, K=8 to 3: ") +
                  "all ranks' shards by the new layout, and the " + std::to_string(reads) +
                  " reads that fill them");
  sheet.value("open", "ms", spread_of(opening), at_most(100),
              "the index and the headers of 8 files, " + std::to_string(pieces) + " tensors");
});

}  // namespace
}  // namespace bench
