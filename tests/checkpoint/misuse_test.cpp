// SPDX-License-Identifier: Apache-2.0
// Save and load at the wrong moment, by some ranks alone, or with peers that fail: every rank gets
// a typed error in time, what was saved before stays whole, and where nothing is lost training goes
// on.
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "catch.hpp"
#include "checkpoint/folder.hpp"
#include "ranks.hpp"
#include "zero/checkpoint.hpp"
#include "zero/comm/fault_injector.hpp"
#include "zero/join.hpp"
#include "zero/optim/adam.hpp"

namespace {

using namespace std::chrono_literals;
using Catch::Matchers::ContainsSubstring;
using checkpoints::files_of;
using checkpoints::Folder;
using ranks::Failure;
using ranks::Model;
using zero::FaultAction;
using Kind = Failure::Kind;
using Files = std::map<std::string, std::string>;
using Path = std::filesystem::path;

constexpr int world = 3;

Model<> make_model() {
  Model<> model;
  model.emplace_back("a", std::vector<std::size_t>{40}, zero::Attributes{.unit = 0});
  model.emplace_back("b", std::vector<std::size_t>{3, 7}, zero::Attributes{.unit = 1});
  model.emplace_back("c", std::vector<std::size_t>{90}, zero::Attributes{.unit = 1});
  ranks::draw_values(model);
  return model;
}

/// One rank at a stage, the first or the last: stage 2 shards gradients as the last does, whose
/// communicator may go wrong.
template <class StageType>
struct Rank {
  using Stage = StageType;
  static constexpr bool shares = std::is_same_v<Stage, zero::Stage1>;
  using Comm = zero::FaultInjector<zero::InProcessCommunicator, shares>;
  using Optimizer = zero::ZeroSharded<zero::Adam, Model<>&, Comm&, zero::ContiguousPartition,
                                      zero::ParamView, Stage>;

  explicit Rank(const zero::InProcessCommunicator& in_process, zero::FaultPlan plan = {})
      : comm_inside(in_process),
        comm(in_process, std::move(plan)),
        rank(comm.rank()),
        model(make_model()),
        optimizer(zero::Adam{.lr = 0.01}, model, comm, zero::ParamView{64}) {}

  void backward(int number) {
    ranks::draw_gradients(model, rank, number);
    for (std::size_t i = 0; i < model.size(); ++i) write(i);
  }
  void write(std::size_t i) {
    if constexpr (Stage::shards_gradients) {
      const auto lease = optimizer.gradient(i);
      std::copy(model[i].own_gradient().begin(), model[i].own_gradient().end(),
                lease.values().begin());
    }
  }
  void step(int number) {
    backward(number);
    optimizer.step();
  }
  /// What this rank keeps, to the bit.
  [[nodiscard]] std::string everything() {
    if constexpr (Stage::shards_values) {
      for (const int unit : {0, 1}) optimizer.acquire(unit);
      std::string all = ranks::snapshot(model, optimizer);
      for (const int unit : {0, 1}) optimizer.release(unit);
      return all;
    } else {
      return ranks::snapshot(model, optimizer);
    }
  }

  zero::InProcessCommunicator comm_inside;
  Comm comm;
  int rank;
  Model<> model;
  Optimizer optimizer;
};

/// `f(rank)` on all ranks; what each says. An exception counts as "threw: ...".
template <class Stage, class F>
std::vector<std::string> said_by_ranks(F&& f, zero::InProcessOptions options = {.timeout = 20s}) {
  std::vector<std::string> said(world);
  const auto thrown = ranks::run(
      world,
      [&](zero::InProcessCommunicator& comm) {
        Rank<Stage> rank(comm);
        said[static_cast<std::size_t>(comm.rank())] = f(rank);
      },
      options);
  for (std::size_t r = 0; r < said.size(); ++r) {
    if (thrown[r]) said[r] = "threw: " + ranks::failure_of(thrown[r]).text;
  }
  return said;
}

/// The verbs, by name.
template <class Rank>
const std::vector<std::pair<std::string, std::function<void(Rank&, const Path&)>>>& verbs() {
  static const std::vector<std::pair<std::string, std::function<void(Rank&, const Path&)>>> all{
      {"save", [](Rank& r, const Path& path) { zero::save(r.optimizer, path); }},
      {"save_async",
       [](Rank& r, const Path& path) { zero::save_async(r.optimizer, path).finish(); }},
      {"load", [](Rank& r, const Path& path) { zero::load(r.optimizer, path); }},
  };
  return all;
}

/// `misuse(rank, wrongly, call)` calls each verb, on all or on one of the ranks wrongly. All must
/// get a `UsageError` that has `text`, and afterwards the next step is the one that it would have
/// been.
template <class Stage, class Misuse>
void check_refused(const std::string& text, Misuse misuse) {
  const std::vector<std::function<bool(int)>> choices{[](int) { return true; },
                                                      [](int rank) { return rank == 1; }};
  const Folder folder;
  said_by_ranks<Stage>([&](auto& rank) {
    rank.step(7);
    zero::save(rank.optimizer, folder / "saved");
    return std::string();
  });
  const Files before = files_of(folder / "saved");
  const auto control = said_by_ranks<Stage>([&](auto& rank) {
    rank.step(0);
    rank.step(1);
    return rank.everything();
  });
  for (const auto& misuses : choices) {
    for (const auto& [name, verb] : verbs<Rank<Stage>>()) {
      std::vector<Failure> failures(world);
      const auto said = said_by_ranks<Stage>([&](auto& rank) {
        rank.step(0);
        ranks::draw_gradients(rank.model, rank.rank, 5);  // of a backward that is given up
        const auto call = [&, &verb_called = verb] {
          failures[static_cast<std::size_t>(rank.rank)] =
              ranks::attempt([&] { verb_called(rank, folder / "saved"); });
        };
        misuse(rank, misuses(rank.rank), call);
        rank.step(1);
        return rank.everything();
      });
      INFO(name << ", " << text);
      CHECK(said == control);
      for (const Failure& failure : failures) {
        INFO(failure.text);
        CHECK(failure.kind == Kind::usage);
        CHECK_THAT(failure.text, ContainsSubstring(text));
        CHECK_THAT(failure.text, ContainsSubstring(name + ": "));
      }
      CHECK(files_of(folder / "saved") == before);
    }
  }
}

template <class Stage>
void check_all_misuse() {
  const std::string begun = "gradients were marked or leased, or accumulated, in this step";
  check_refused<Stage>(begun, [](auto& rank, bool wrongly, const auto& call) {
    if (wrongly) {
      rank.write(0);
      rank.optimizer.mark_ready(0);
    }
    call();
  });
  check_refused<Stage>(begun, [](auto& rank, bool wrongly, const auto& call) {
    std::optional<decltype(rank.optimizer.gradient(1))> lease;
    if (wrongly) lease.emplace(rank.optimizer.gradient(1));
    call();
  });
  check_refused<Stage>(begun, [](auto& rank, bool wrongly, const auto& call) {
    constexpr auto mode = zero::Accumulation::local;
    std::optional<decltype(rank.optimizer.accumulate(mode))> scope;
    if (wrongly) scope.emplace(rank.optimizer.accumulate(mode));
    call();
  });
}

TEST_CASE("Save and load amid a step are refused on all ranks, and change nothing") {
  SECTION("stage 1") { check_all_misuse<zero::Stage1>(); }
  SECTION("stage 3") { check_all_misuse<zero::Stage3>(); }
}

TEST_CASE("Save and load while a unit is acquired are refused on all ranks") {
  check_refused<zero::Stage3>("unit 1", [](auto& rank, bool wrongly, const auto& call) {
    rank.optimizer.acquire(1);
    if (!wrongly) rank.optimizer.release(1);
    call();
    if (wrongly) rank.optimizer.release(1);
  });
}

TEST_CASE("Save and load within a join are refused on all ranks, and their join ends") {
  const Folder folder;
  for (const auto& [name, verb] : verbs<Rank<zero::Stage1>>()) {
    std::vector<Failure> failures(world);
    const auto said = said_by_ranks<zero::Stage1>([&, &called = verb](auto& rank) -> std::string {
      rank.step(0);
      const Failure left =
          ranks::attempt([&] { rank.optimizer.join([&] { called(rank, folder / "saved"); }); });
      failures[static_cast<std::size_t>(rank.rank)] = left;
      rank.step(1);
      return std::to_string(rank.optimizer.steps());
    });
    CHECK(said == std::vector<std::string>(world, "2"));
    for (const Failure& failure : failures) {
      CHECK(failure.kind == Kind::usage);
      CHECK_THAT(failure.text, ContainsSubstring("this optimizer is in a join"));
    }
  }
}

TEST_CASE("Ranks that call different verbs between steps learn of it and go on") {
  struct Row {
    std::size_t of_rank_1;  // of verbs()
    std::size_t of_others;
  };
  const Folder folder;
  said_by_ranks<zero::Stage1>([&](auto& rank) {
    zero::save(rank.optimizer, folder / "saved");
    return std::string();
  });
  const Files before = files_of(folder / "saved");
  for (const Row row : {Row{0, 2}, Row{2, 0}, Row{1, 2}, Row{2, 1}}) {
    std::vector<Failure> failures(world);
    const auto said = said_by_ranks<zero::Stage1>([&](auto& rank) -> std::string {
      rank.step(0);
      const std::string held = rank.everything();
      const auto& verb =
          verbs<Rank<zero::Stage1>>()[rank.rank == 1 ? row.of_rank_1 : row.of_others];
      failures[static_cast<std::size_t>(rank.rank)] =
          ranks::attempt([&] { verb.second(rank, folder / "saved"); });
      if (rank.everything() != held) return "something changed";
      rank.step(1);
      return "";
    });
    CHECK(said == std::vector<std::string>(world));
    for (const Failure& failure : failures) {
      INFO(failure.text);
      CHECK(failure.kind == Kind::usage);
      CHECK_THAT(failure.text, ContainsSubstring("save") && ContainsSubstring("load"));
    }
    CHECK(files_of(folder / "saved") == before);
  }
}

template <class Stage>
void check_steps_beside(const Folder& folder) {
  for (const auto& [name, verb] : verbs<Rank<Stage>>()) {
    std::vector<Failure> failures(world);
    (void)said_by_ranks<Stage>(
        [&, &called = verb](auto& rank) {
          rank.step(0);
          failures[static_cast<std::size_t>(rank.rank)] = ranks::attempt([&] {
            if (rank.rank == 1) {
              rank.step(1);
            } else {
              called(rank, folder / "saved");
            }
          });
          return std::string();
        },
        {.timeout = 500ms});
    for (const Failure& failure : failures) {
      INFO(name << ": " << failure.text);
      // At stage 3 a step waits over a communicator of its own.
      CHECK((failure.kind == Kind::usage || failure.kind == Kind::communicator));
    }
  }
}

TEST_CASE("A rank that steps while others save or load: an error on each, and no hang") {
  const Folder folder;
  said_by_ranks<zero::Stage1>([&](auto& rank) {
    zero::save(rank.optimizer, folder / "saved");
    return std::string();
  });
  const Files before = files_of(folder / "saved");
  check_steps_beside<zero::Stage1>(folder);
  check_steps_beside<zero::Stage3>(folder);
  CHECK(files_of(folder / "saved") == before);
}

// Ranks that can't write, or write elsewhere.

/// Saves where rank r is told `path(r)`; returns what each rank got. Before and after nothing else
/// may be in `folder`, and all can go on.
std::vector<Failure> save_at(const Folder& folder, const std::function<Path(int)>& path,
                             bool async) {
  std::vector<Failure> failures(world);
  Files before;
  const auto said = said_by_ranks<zero::Stage3>([&](auto& rank) -> std::string {
    rank.step(0);
    zero::save(rank.optimizer, folder / "saved");
    if (rank.rank == 0) before = files_of(folder / "saved");
    rank.step(1);
    const std::string held = rank.everything();
    rank.comm.barrier().wait();
    failures[static_cast<std::size_t>(rank.rank)] = ranks::attempt([&] {
      if (async) {
        zero::save_async(rank.optimizer, path(rank.rank)).finish();
      } else {
        zero::save(rank.optimizer, path(rank.rank));
      }
    });
    if (rank.everything() != held) return "something changed";
    rank.comm.barrier().wait();
    if (files_of(folder / "saved") != before) return "the files are others";
    rank.comm.barrier().wait();
    rank.step(2);
    zero::save(rank.optimizer, folder / "saved");
    return std::to_string(zero::Checkpoint(folder / "saved").info().step);
  });
  CHECK(said == std::vector<std::string>(world, "3"));
  return failures;
}

TEST_CASE("A rank that can't write: the save fails on all, and the one before stays") {
  for (const bool async : {false, true}) {
    for (const int odd : {0, 1, 2}) {
      const Folder folder;
      std::ofstream(folder / "file") << "no folder";
      const auto failures = save_at(
          folder,
          [&](int rank) { return rank == odd ? folder / "file" / "below" : folder / "saved"; },
          async);
      for (const Failure& failure : failures) {
        CHECK(failure.kind == Kind::checkpoint);
        CHECK_THAT(failure.text,
                   ContainsSubstring("rank " + std::to_string(odd) + ": ") &&
                       ContainsSubstring((folder / "file" / "below").string()) &&
                       ContainsSubstring(odd == 0 ? "choose another path" : "check the path"));
      }
    }
  }
}

TEST_CASE("A rank that writes to another folder: the save fails on all, and leaves no file") {
  const Folder folder;
  std::filesystem::create_directories(folder / "other");
  const auto failures =
      save_at(folder, [&](int rank) { return folder / (rank == 2 ? "other" : "saved"); }, false);
  for (const Failure& failure : failures) {
    CHECK(failure.kind == Kind::checkpoint);
    CHECK_THAT(failure.text, ContainsSubstring("the file of rank 2") &&
                                 ContainsSubstring("give all ranks one folder"));
  }
  CHECK(files_of(folder / "other").empty());
}

// Saves that go on while training does.

TEST_CASE("save_async: what was there at the call is saved, although training went on") {
  const Folder folder;
  const auto run = [&](bool async) {
    return said_by_ranks<zero::Stage3>([&](auto& rank) {
      rank.step(0);
      rank.step(1);
      if (async) {
        auto pending = zero::save_async(rank.optimizer, folder / "async");
        for (int s = 2; s < 5; ++s) rank.step(s);
        pending.finish();
      } else {
        zero::save(rank.optimizer, folder / "sync");
        for (int s = 2; s < 5; ++s) rank.step(s);
      }
      return rank.everything();
    });
  };
  CHECK(run(true) == run(false));
  CHECK(files_of(folder / "async") == files_of(folder / "sync"));
  CHECK(files_of(folder / "async").size() == world + 1);
}

TEST_CASE("save_async: until it is finished the folder holds what it held, and for good if never") {
  const Folder folder;
  Files before;
  const auto said = said_by_ranks<zero::Stage1>([&](auto& rank) -> std::string {
    rank.step(0);
    zero::save(rank.optimizer, folder / "saved");
    if (rank.rank == 0) before = files_of(folder / "saved");
    rank.step(1);
    {
      const auto pending = zero::save_async(rank.optimizer, folder / "saved");
      while (!pending.written()) std::this_thread::yield();
      rank.comm.barrier().wait();
      if (zero::Checkpoint(folder / "saved").info().step != 1) return "there before the end";
      rank.comm.barrier().wait();
    }
    rank.comm.barrier().wait();
    if (files_of(folder / "saved") != before) return "something is left of it";
    rank.comm.barrier().wait();
    {  // The optimizer need not outlive what is given up.
      std::optional<Rank<zero::Stage1>> other(std::in_place, rank.comm_inside);
      const auto pending = zero::save_async(other->optimizer, folder / "saved");
      other.reset();
    }
    rank.comm.barrier().wait();
    if (files_of(folder / "saved") != before) return "something is left of the other";
    rank.comm.barrier().wait();
    rank.step(2);
    zero::save(rank.optimizer, folder / "saved");
    return std::to_string(zero::Checkpoint(folder / "saved").info().step);
  });
  CHECK(said == std::vector<std::string>(world, "3"));
}

TEST_CASE("save_async: finish is refused amid a step and can be called again, but not once done") {
  const Folder folder;
  std::vector<Failure> amid(world), twice(world), beside(world);
  const auto said = said_by_ranks<zero::Stage1>([&](auto& rank) -> std::string {
    const auto r = static_cast<std::size_t>(rank.rank);
    rank.step(0);
    auto pending = zero::save_async(rank.optimizer, folder / "saved");
    rank.backward(1);
    if (rank.rank == 1) rank.optimizer.mark_ready(0);
    amid[r] = ranks::attempt([&] { pending.finish(); });
    // One finishes while the others save anew.
    beside[r] = ranks::attempt([&] {
      if (rank.rank == 1) {
        pending.finish();
      } else {
        zero::save(rank.optimizer, folder / "other");
      }
    });
    rank.step(1);
    pending.finish();
    twice[r] = ranks::attempt([&] { pending.finish(); });
    return std::to_string(zero::Checkpoint(folder / "saved").info().step);
  });
  CHECK(said == std::vector<std::string>(world, "1"));
  for (std::size_t r = 0; r < world; ++r) {
    CHECK(amid[r].kind == Kind::usage);
    CHECK_THAT(amid[r].text, ContainsSubstring("finish: gradients were marked"));
    INFO(beside[r].text);
    CHECK(beside[r].kind == Kind::usage);
    CHECK_THAT(beside[r].text, ContainsSubstring("save") && ContainsSubstring("finish"));
    CHECK(twice[r].kind == Kind::usage);
    CHECK_THAT(twice[r].text, ContainsSubstring("finished already"));
  }
  CHECK_FALSE(std::filesystem::exists(folder / "other"));
}

TEST_CASE("save_async: two saves that ranks end in unlike order are both given up") {
  const Folder folder;
  std::vector<Failure> failures(world);
  const auto said = said_by_ranks<zero::Stage1>([&](auto& rank) -> std::string {
    rank.step(0);
    zero::save(rank.optimizer, folder / "b");  // so that the next there has another number
    rank.step(1);
    auto a = zero::save_async(rank.optimizer, folder / "a");
    auto b = zero::save_async(rank.optimizer, folder / "b");
    const bool odd = rank.rank == 2;
    failures[static_cast<std::size_t>(rank.rank)] = ranks::attempt([&] { (odd ? b : a).finish(); });
    const Failure second = ranks::attempt([&] { (odd ? a : b).finish(); });
    if (second.kind != Kind::checkpoint) return "the second ends: " + second.text;
    rank.step(2);
    zero::save(rank.optimizer, folder / "a");
    return std::to_string(zero::Checkpoint(folder / "a").info().step) + " " +
           std::to_string(zero::Checkpoint(folder / "b").info().step);
  });
  CHECK(said == std::vector<std::string>(world, "3 1"));
  for (const Failure& failure : failures) {
    CHECK(failure.kind == Kind::checkpoint);
    CHECK_THAT(failure.text, ContainsSubstring("rank 2 ends another save than rank 0"));
  }
  CHECK(files_of(folder / "b").size() == world + 1);
}

// Faults of the communicator.

/// Fails `verb` at each of its operations, one run each, by `action` on each rank; `after(rank)`
/// says what is wrong then.
template <class Stage>
void fail_each_operation(FaultAction action, const std::function<void(Rank<Stage>&)>& verb,
                         const std::function<std::string(Rank<Stage>&, const Failure&)>& after,
                         const std::function<void()>& afterwards) {
  std::uint64_t first = 0, last = 0;
  ranks::rethrow_any(ranks::run(world, [&](zero::InProcessCommunicator& in_process) {
    Rank<Stage> rank(in_process);
    rank.step(0);
    rank.comm.barrier().wait();
    if (rank.rank == 0) first = rank.comm.started();
    verb(rank);
    if (rank.rank == 0) last = rank.comm.started();
  }));
  REQUIRE(last >= first + 2);
  for (std::uint64_t operation = first; operation < last; ++operation) {
    for (const int faulty : {0, 1}) {
      std::vector<std::string> wrong(world);
      const zero::FaultPlan plan{
          .faults = {{.action = action, .rank = faulty, .operation = operation}}};
      const auto thrown = ranks::run(
          world,
          [&](zero::InProcessCommunicator& in_process) {
            Rank<Stage> rank(in_process, plan);
            rank.step(0);
            rank.comm.barrier().wait();
            const Failure failure = ranks::attempt([&] { verb(rank); });
            wrong[static_cast<std::size_t>(rank.rank)] = after(rank, failure);
          },
          {.timeout = action == FaultAction::stick ? 200ms : 5000ms}, ranks::Leaves::when_all_have);
      INFO("operation " << operation - first << " of rank " << faulty);
      for (std::size_t r = 0; r < world; ++r) CHECK(ranks::failure_of(thrown[r]).text == "");
      CHECK(wrong == std::vector<std::string>(world));
      afterwards();
    }
  }
}

template <class Stage>
void check_faults_of_save(FaultAction action, bool async) {
  const Folder folder;
  Files before;
  const auto save_first = [&] {
    said_by_ranks<Stage>([&](auto& rank) {
      for (int s = 0; s < 5; ++s) rank.step(s);
      zero::save(rank.optimizer, folder / "saved");
      return std::string();
    });
    before = files_of(folder / "saved");
  };
  save_first();
  fail_each_operation<Stage>(
      action,
      [&](Rank<Stage>& rank) {
        if (async) {
          zero::save_async(rank.optimizer, folder / "saved").finish();
        } else {
          zero::save(rank.optimizer, folder / "saved");
        }
      },
      [&](Rank<Stage>&, const Failure& failure) -> std::string {
        // A rank may have learnt that all went well before another failed.
        const bool typed = failure.kind == Kind::communicator || failure.kind == Kind::none;
        return typed ? "" : failure.text;
      },
      [&] {
        const zero::Checkpoint whole(folder / "saved");
        whole.verify();
        const auto step = whole.info().step;
        CHECK((step == 5 || step == 1));
        // What is left over goes with the next save.
        save_first();
        CHECK(before.size() == world + 1);
        CHECK(zero::Checkpoint(folder / "saved").info().step == 5);
      });
}

TEST_CASE("A communicator that fails amid a save: typed errors, and a whole checkpoint") {
  SECTION("fail, stage 1") { check_faults_of_save<zero::Stage1>(FaultAction::fail, false); }
  SECTION("fail, stage 3") { check_faults_of_save<zero::Stage3>(FaultAction::fail, false); }
  SECTION("fail, asynchronous") { check_faults_of_save<zero::Stage1>(FaultAction::fail, true); }
  SECTION("stick, stage 1") { check_faults_of_save<zero::Stage1>(FaultAction::stick, false); }
}

template <class Stage>
void check_faults_of_load(FaultAction action) {
  const Folder folder;
  said_by_ranks<Stage>([&](auto& rank) {
    for (int s = 0; s < 5; ++s) rank.step(s);
    zero::save(rank.optimizer, folder / "saved");
    return std::string();
  });
  const Files before = files_of(folder / "saved");
  std::vector<std::string> held(world);
  (void)said_by_ranks<Stage>([&](auto& rank) {
    rank.step(0);
    held[static_cast<std::size_t>(rank.rank)] = ranks::state_of(rank.optimizer);
    return std::string();
  });
  fail_each_operation<Stage>(
      action, [&](Rank<Stage>& rank) { zero::load(rank.optimizer, folder / "saved"); },
      [&](Rank<Stage>& rank, const Failure& failure) -> std::string {
        if (failure.kind == Kind::none) return "";  // had all before a peer failed
        if (failure.kind != Kind::communicator) return failure.text;
        std::string state;
        const Failure shown = ranks::attempt([&] { state = ranks::state_of(rank.optimizer); });
        if (shown.kind == Kind::none) {
          return state == held[static_cast<std::size_t>(rank.rank)] ? "" : "half loaded";
        }
        const Failure saving =
            ranks::attempt([&] { zero::save(rank.optimizer, folder / "never"); });
        if (saving.kind != Kind::usage) return "a failed optimizer saves: " + saving.text;
        return saving.text.find("can't go on") == std::string::npos ? saving.text : "";
      },
      [&] { CHECK(files_of(folder / "saved") == before); });
  CHECK_FALSE(std::filesystem::exists(folder / "never"));
}

TEST_CASE("A communicator that fails amid a load: nothing has changed, or the optimizer says so") {
  SECTION("fail, stage 1") { check_faults_of_load<zero::Stage1>(FaultAction::fail); }
  SECTION("fail, stage 3") { check_faults_of_load<zero::Stage3>(FaultAction::fail); }
  SECTION("stick, stage 1") { check_faults_of_load<zero::Stage1>(FaultAction::stick); }
}

TEST_CASE(
    "A load that fails amid its reading fails the optimizer, which then neither saves nor loads") {
  // The file shrinks between the two readings: by what the second peer does before its word.
  const Folder folder;
  said_by_ranks<zero::Stage1>([&](auto& rank) {
    zero::save(rank.optimizer, folder / "saved");
    return std::string();
  });
  std::vector<Failure> failures(world), later(world);
  const zero::FaultPlan slow{
      .faults = {{.action = FaultAction::delay_finish, .rank = -1, .every = 1, .delay = 60ms}}};
  (void)ranks::run(
      world,
      [&](zero::InProcessCommunicator& in_process) {
        Rank<zero::Stage1> rank(in_process, slow);
        const auto r = static_cast<std::size_t>(rank.rank);
        std::thread thief;
        const std::uint64_t before = rank.comm.started();
        if (rank.rank == 0) {
          thief = std::thread([&] {
            // The second operation of the load is the one after all have verified.
            while (rank.comm.started() < before + 2) std::this_thread::sleep_for(1ms);
            std::this_thread::sleep_for(20ms);
            for (const auto& entry : std::filesystem::directory_iterator(folder / "saved")) {
              if (entry.path().extension() == ".safetensors") {
                std::filesystem::resize_file(entry.path(), 100);
              }
            }
          });
        }
        failures[r] = ranks::attempt([&] { zero::load(rank.optimizer, folder / "saved"); });
        if (thief.joinable()) thief.join();
        later[r] = ranks::attempt([&] { zero::save(rank.optimizer, folder / "other"); });
      },
      {.timeout = 5s}, ranks::Leaves::when_all_have);
  for (std::size_t r = 0; r < world; ++r) {
    INFO(failures[r].text);
    CHECK((failures[r].kind == Kind::checkpoint || failures[r].kind == Kind::communicator));
    CHECK(later[r].kind == Kind::usage);
    CHECK_THAT(later[r].text, ContainsSubstring("can't go on; reload a checkpoint"));
  }
  CHECK_FALSE(std::filesystem::exists(folder / "other"));
}

}  // namespace
