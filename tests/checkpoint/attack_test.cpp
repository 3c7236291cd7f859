// SPDX-License-Identifier: Apache-2.0
// What careless users and other programs do to a checkpoint's folder.
#include <sys/wait.h>
#include <unistd.h>
#include <atomic>

#include <cstddef>
#include <filesystem>
#include <fstream>
#include <map>
#include <span>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "catch.hpp"
#include "checkpoint/folder.hpp"
#include "ranks.hpp"
#include "zero/checkpoint.hpp"
#include "zero/optim/adam.hpp"

namespace {

using Catch::Matchers::ContainsSubstring;
using checkpoints::Folder;
using ranks::Model;

Model<> small_model(const std::vector<std::pair<std::string, std::size_t>>& parameters = {
                        {"weight", 77}, {"bias", 5}}) {
  Model<> model;
  for (const auto& [name, elements] : parameters) {
    model.emplace_back(name, std::vector<std::size_t>{elements});
  }
  ranks::draw_values(model);
  return model;
}

struct Trained {
  explicit Trained(zero::InProcessCommunicator& comm, Model<> from = small_model())
      : rank(comm.rank()), model(std::move(from)), optimizer(zero::Adam{}, model, comm) {}
  Trained& steps(int count) {
    for (int s = 0; s < count; ++s) {
      ranks::draw_gradients(model, rank, s);
      optimizer.step();
    }
    return *this;
  }
  int rank;
  Model<> model;
  zero::ZeroSharded<zero::Adam, Model<>&, zero::InProcessCommunicator&> optimizer;
};

}  // namespace

TEST_CASE("Attack: saves that ranks end in different orders harm no folder") {
  const Folder folder;
  const auto one = folder / "one";
  const auto two = folder / "two";
  std::vector<std::string> said(2);
  zero::run_ranks(2, [&](auto& comm) {
    Trained trained(comm);
    zero::save(trained.steps(1).optimizer, one);
    zero::save(trained.optimizer, two);
    trained.steps(1);
    auto first = zero::save_async(trained.optimizer, one);
    trained.steps(1);
    auto second = zero::save_async(trained.optimizer, two);
    auto& mine = comm.rank() == 0 ? first : second;
    said[static_cast<std::size_t>(comm.rank())] = ranks::attempt([&] { mine.finish(); }).text;
  });
  CHECK_THAT(said[0], ContainsSubstring("another save"));
  CHECK(said[0] == said[1]);
  for (const auto& path : {one, two}) {
    CHECK(zero::Checkpoint(path).info().step == 1);
    zero::Checkpoint(path).verify();
  }
}

TEST_CASE("Attack: a save into a folder waits for the one before to be ended") {
  const Folder folder;
  std::vector<std::string> said(2);
  zero::run_ranks(2, [&](auto& comm) {
    Trained trained(comm);
    auto first = zero::save_async(trained.steps(1).optimizer, folder / "one");
    const auto again = [&] {
      return ranks::attempt([&] { zero::save(trained.optimizer, folder / "one/../one/"); });
    };
    auto& mine = said[static_cast<std::size_t>(comm.rank())];
    mine = again().text;
    first.finish();
    trained.steps(1);
    mine += again().text;
    {
      auto given_up = zero::save_async(trained.steps(1).optimizer, folder / "one");
    }
    mine += again().text;
  });
  CHECK_THAT(said[0], ContainsSubstring("another save into this folder has begun"));
  CHECK_THAT(said[0], Catch::Matchers::EndsWith("finish that one first"));
  CHECK(said[0] == said[1]);
  CHECK(zero::Checkpoint(folder / "one").info().step == 3);
}

TEST_CASE("Attack: an index too large to be read replaces none") {
  const Folder folder;
  std::string said;
  zero::run_ranks(1, [&](auto& comm) {
    Trained trained(comm);
    zero::save(trained.steps(1).optimizer, folder.path());
    trained.steps(1);
    said =
        ranks::attempt([&] {
          zero::save(trained.optimizer, folder.path(), {{"order", std::string(101'000'000, 'x')}});
        }).text;
  });
  CHECK_THAT(said, ContainsSubstring("index.json"));
  CHECK(zero::Checkpoint(folder.path()).info().step == 1);
}

TEST_CASE("Attack: text that is no UTF-8 is refused before any file, by name") {
  const Folder folder;
  std::string note, name;
  zero::run_ranks(2, [&](auto& comm) {
    Trained trained(comm);
    const auto said = ranks::attempt([&] {
      zero::save(trained.optimizer, folder / "a",
                 {{"or\xff"
                   "der",
                   "\xff"}});
    });
    Trained named(comm, small_model({{"w\xffq", 10}}));
    const auto named_said = ranks::attempt([&] { zero::save(named.optimizer, folder / "b"); });
    if (comm.rank() == 0) note = said.text;
    if (comm.rank() == 0) name = named_said.text;
  });
  CHECK_THAT(note, ContainsSubstring("UTF-8") && ContainsSubstring("note"));
  CHECK_THAT(name, ContainsSubstring("UTF-8") && ContainsSubstring("parameter 0"));
  CHECK(checkpoints::files_of(folder / "a").empty());
  CHECK(checkpoints::files_of(folder / "b").empty());
}

TEST_CASE("Attack: files of others in the folder stay") {
  const Folder folder;
  const std::vector<std::string> others{"shard-notes.txt",
                                        "shard-1-x.safetensors",
                                        "shard-00001-of-00002.safetensors",
                                        "shard-00000001-00000-of-00001.safetensors.bak",
                                        "model.safetensors",
                                        "shard-00000001-0-of-1.safetensors"};
  for (const std::string& other : others) std::ofstream(folder / other) << other;
  zero::run_ranks(2, [&](auto& comm) {
    Trained trained(comm);
    for (int n = 0; n < 3; ++n) zero::save(trained.steps(1).optimizer, folder.path());
  });
  for (const std::string& other : others) {
    CHECK(checkpoints::text_of_file(folder / other) == other);
  }
  CHECK(checkpoints::files_of(folder.path()).size() == others.size() + 3);
  zero::split(zero::Checkpoint(folder.path()), folder.path(), 3);
  for (const std::string& other : others) {
    CHECK(checkpoints::text_of_file(folder / other) == other);
  }
}

TEST_CASE("Attack: whatever a parameter is called") {
  const Folder folder;
  const std::vector<std::pair<std::string, std::size_t>> parameters{
      {"a", 3},
      {"a[0:3]", 3},
      {"a.b.c", 4},
      {"a[0:2]", 5},
      {"x]", 2},
      {"[", 1},
      {"]", 1},
      {"a/b", 2},
      {"../../x", 2},
      {"\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80", 3},
      {"\"q\"'\\", 2},
      {"line\nbreak\t\x01", 2},
      {std::string("nul\0in", 6), 2},
      {std::string(100'000, 'n'), 2},
      {" ", 1},
      {"xxh3_64", 2},
      {".", 1},
      {"exp_avg", 2},
      {".exp_avg2", 2},
      {"empty", 0},
      {"format", 1}};
  zero::run_ranks(3, [&](auto& comm) {
    Trained trained(comm, small_model(parameters));
    zero::save(trained.steps(2).optimizer, folder / "f");
    zero::consolidate(trained.optimizer, folder / "one.safetensors", 2);
    const std::string want = ranks::snapshot(trained.model, trained.optimizer);
    if (comm.rank() == 0) {
      zero::consolidate(zero::Checkpoint(folder / "f"), folder / "two.safetensors");
      zero::split(zero::Checkpoint(folder / "one.safetensors"), folder / "g", 5);
    }
    (void)zero::detail::exchange_all(comm, std::span<const int>(&trained.rank, 1));
    std::string got[4];
    int k = 0;
    for (const char* from : {"f", "one.safetensors", "two.safetensors", "g"}) {
      Trained other(comm, small_model(parameters));
      zero::load(other.optimizer, folder / from);
      got[k++] = ranks::snapshot(other.model, other.optimizer);
    }
    for (const std::string& g : got) {
      if (g != want) throw std::runtime_error("differs");
    }
  });
  CHECK(checkpoints::text_of_file(folder / "one.safetensors").size() ==
        checkpoints::text_of_file(folder / "two.safetensors").size());
}

TEST_CASE("Attack: a reader while another saves sees whole checkpoints") {
  const Folder folder;
  std::atomic<bool> done{false};
  zero::run_ranks(2, [&](auto& comm) {
    Trained trained(comm);
    zero::save(trained.steps(1).optimizer, folder.path());
  });
  std::thread writer([&] {
    zero::run_ranks(2, [&](auto& comm) {
      Trained trained(comm);
      for (int n = 0; n < 100; ++n) zero::save(trained.steps(1).optimizer, folder.path());
    });
    done = true;
  });
  std::map<std::string, int> errors;
  while (!done) {
    try {
      const zero::Checkpoint is(folder.path());
      is.verify();
    } catch (const std::exception& error) {
      ++errors[error.what()];
    }
  }
  writer.join();
  CHECK(errors.empty());
}

TEST_CASE("Attack: a rank that saves where another begins to is told so, and so is the other") {
  const Folder folder;
  std::vector<std::string> said(2);
  zero::run_ranks(2, [&](auto& comm) {
    Trained trained(comm);
    said[static_cast<std::size_t>(comm.rank())] =
        ranks::attempt([&] {
          if (comm.rank() == 0) return zero::save(trained.optimizer, folder.path());
          zero::save_async(trained.optimizer, folder.path()).finish();
        }).text;
  });
  for (const std::string& each : said) CHECK_THAT(each, ContainsSubstring("another verb"));
  CHECK(checkpoints::files_of(folder.path()).empty());
}

TEST_CASE("Attack: a folder in one that this user can't read") {
  const Folder folder;
  if (::geteuid() != 0) return;  // needs another user
  std::filesystem::permissions(folder.path(), std::filesystem::perms(0711));
  std::filesystem::create_directories(folder / "mine");
  REQUIRE(::chown((folder / "mine").c_str(), 65534, 65534) == 0);
  const pid_t child = ::fork();
  if (child == 0) {
    bool saved = ::setuid(65534) == 0;
    try {
      zero::run_ranks(1, [&](auto& comm) {
        Trained trained(comm);
        zero::save(trained.optimizer, folder / "mine");
        zero::save(trained.optimizer, folder / "mine/a/b");
      });
    } catch (const std::exception&) {
      saved = false;
    }
    ::_exit(saved ? 0 : 1);
  }
  int status = 1;
  ::waitpid(child, &status, 0);
  CHECK(status == 0);
}
