// SPDX-License-Identifier: Apache-2.0
// What load brings back of a checkpoint, as a whole, in part and in other element types, and what
// it refuses: then nothing has changed on any rank, and training goes on.
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "catch.hpp"
#include "checkpoint/folder.hpp"
#include "ranks.hpp"
#include "zero/bfloat16.hpp"
#include "zero/checkpoint.hpp"
#include "zero/optim/adam.hpp"

namespace {

using Catch::Matchers::ContainsSubstring;
using checkpoints::Folder;
using ranks::Failure;
using ranks::Model;
using zero::bfloat16;
using zero::LoadOptions;
using Kind = Failure::Kind;

/// Of one parameter.
struct Spec {
  std::string name;
  std::vector<std::size_t> shape;
  zero::Attributes attributes{};
  std::size_t group = 0;
};
using Specs = std::vector<Spec>;

const Specs usual{{"weight", {7, 11}},
                  {"bias", {5}, {}, 1},
                  {"frozen", {6}, {.frozen = true}},
                  {"tied", {7, 11}, {.alias = 0}},
                  {"last", {40}, {}, 1}};

template <class T>
Model<T> model_of(const Specs& specs, std::uint32_t seed) {
  Model<T> model;
  for (const Spec& spec : specs) {
    model.emplace_back(spec.name, spec.shape, spec.attributes, spec.group);
    if (spec.attributes.alias) {
      model.back().take_values(model[*spec.attributes.alias].values());
    } else {
      ranks::Draw(seed + static_cast<std::uint32_t>(model.size())).fill(model.back().values());
    }
  }
  return model;
}

/// One rank's model and its optimizer.
template <class T = float, class Precision = zero::MixedPrecision>
struct Rank {
  using Comm = zero::InProcessCommunicator;
  using Optimizer = zero::ZeroSharded<zero::Adam, Model<T>&, Comm&, zero::ContiguousPartition,
                                      zero::ParamView, zero::Stage1, Precision>;

  static std::vector<zero::Adam> two(double lr = 0.01) {
    return {{.lr = lr}, {.lr = 2 * lr, .weight_decay = 0.1}};
  }

  Rank(Comm& comm, const Specs& specs, std::uint32_t seed, std::vector<zero::Adam> groups = two(),
       zero::Settings settings = {})
      : rank(comm.rank()),
        model(model_of<T>(specs, seed)),
        optimizer(zero::Groups<zero::Adam>(std::move(groups)), model, comm, zero::ParamView{64},
                  settings) {}

  void step(int number) {
    ranks::draw_gradients(model, rank, number);
    optimizer.step();
  }
  Rank& steps(int count) {
    for (int s = 0; s < count; ++s) step(s);
    return *this;
  }
  /// All that a load may change on this rank, to the bit.
  [[nodiscard]] std::string everything() {
    std::string all = ranks::snapshot(model, optimizer) + options();
    for (const auto& slice : optimizer.masters()) all += ranks::bytes_of(slice.values);
    return all + std::to_string(optimizer.loss_scale());
  }
  [[nodiscard]] std::string options() {
    std::string all;
    for (const zero::Adam& group : optimizer.groups()) {
      zero::Adam::for_each_option(
          group, [&](const char* name, auto value) { all += name + std::to_string(value) + " "; });
    }
    return all;
  }

  int rank;
  Model<T> model;
  Optimizer optimizer;
};

/// Saves what `world` ranks have after 3 steps.
template <class T = float, class Precision = zero::MixedPrecision>
void save_run(const std::filesystem::path& folder, const Specs& specs = usual, int world = 2,
              std::vector<zero::Adam> groups = Rank<>::two(), zero::Settings settings = {}) {
  zero::run_ranks(world, [&](auto& comm) {
    Rank<T, Precision> saved(comm, specs, 1, groups, settings);
    zero::save(saved.steps(3).optimizer, folder);
  });
}

/// What each of `size` ranks says at the end.
std::vector<std::string> said_by(
    int size, const std::function<std::string(zero::InProcessCommunicator&)>& f) {
  std::vector<std::string> said(static_cast<std::size_t>(size));
  zero::run_ranks(size, [&](auto& comm) { said[static_cast<std::size_t>(comm.rank())] = f(comm); });
  return said;
}

TEST_CASE("Load: twice is as once, and a load before training as one after it") {
  const Folder folder;
  save_run(folder / "saved");
  const auto run = [&](int steps_before, int loads) {
    return said_by(3, [&](auto& comm) {
      Rank<> rank(comm, usual, 50, Rank<>::two(9));
      rank.steps(steps_before);
      for (int k = 0; k < loads; ++k) zero::load(rank.optimizer, folder / "saved");
      const std::string loaded = rank.everything();
      rank.step(3);
      return loaded + rank.everything();
    });
  };
  const auto once = run(0, 1);
  CHECK(run(0, 2) == once);
  CHECK(run(2, 1) == once);
  CHECK(run(1, 3) == once);
}

TEST_CASE("Load: values alone, or without the options") {
  const Folder folder;
  save_run(folder / "saved");
  const auto said = said_by(3, [&](auto& comm) -> std::string {
    Rank<> whole(comm, usual, 50);
    zero::load(whole.optimizer, folder / "saved");

    // Values come, and all else stays, although something else was saved.
    Rank<> values(comm, usual, 60, Rank<>::two(9));
    values.steps(2);
    const std::string state = ranks::state_of(values.optimizer) + values.options();
    zero::load(values.optimizer, folder / "saved", {.state = false});
    if (ranks::values_of(values.model) != ranks::values_of(whole.model)) return "values";
    if (ranks::state_of(values.optimizer) + values.options() != state) return "state changed";
    if (values.optimizer.steps() != 2 || values.optimizer.steps(0) != 2) return "steps changed";

    // Everything but the options.
    Rank<> no_options(comm, usual, 70, Rank<>::two(9));
    const std::string options = no_options.options();
    zero::load(no_options.optimizer, folder / "saved", {.options = false});
    if (no_options.options() != options) return "options changed";
    if (whole.options() == options) return "options are those of before by chance";
    if (ranks::snapshot(no_options.model, no_options.optimizer) !=
        ranks::snapshot(whole.model, whole.optimizer)) {
      return "state";
    }
    for (std::size_t g = 0; g < 2; ++g) no_options.optimizer.group(g) = whole.optimizer.group(g);
    whole.step(3);
    no_options.step(3);
    return no_options.everything() == whole.everything() ? "" : "next step";
  });
  CHECK(said == std::vector<std::string>(3));
}

/// Reads a whole array of a checkpoint.
template <class T>
std::vector<T> read(const zero::Checkpoint& from, std::size_t parameter, std::size_t array) {
  std::vector<T> all(from.info().parameters[parameter].elements());
  from.read(parameter, array, 0, zero::element_traits<T>::type,
            std::as_writable_bytes(std::span(all)));
  return all;
}

/// A checkpoint of what has been loaded from another, as `T` and `Precision` keep it.
template <class T, class Precision = zero::MixedPrecision>
zero::Checkpoint reloaded(const Folder& folder, const std::string& to, LoadOptions options = {}) {
  zero::run_ranks(3, [&](auto& comm) {
    Rank<T, Precision> rank(comm, usual, 50);
    zero::load(rank.optimizer, folder / "saved", options);
    zero::save(rank.optimizer, folder / to);
  });
  return zero::Checkpoint(folder / to);
}

template <class To, class From>
std::vector<To> rounded(const std::vector<From>& from) {
  std::vector<To> to;
  for (const From x : from) {
    to.push_back(zero::element_traits<To>::store(
        static_cast<zero::arithmetic_t<To>>(zero::element_traits<From>::load(x))));
  }
  return to;
}
template <class T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return ranks::bytes_of(std::span<const T>(a)) == ranks::bytes_of(std::span<const T>(b));
}

constexpr std::size_t values = zero::Checkpoint::values;
constexpr std::size_t master = zero::Checkpoint::master;
constexpr std::size_t slot = zero::Checkpoint::first_slot;

TEST_CASE("Load: float values into bfloat16 with masters, and back, lose nothing") {
  const Folder folder;
  save_run(folder / "saved");
  const zero::Checkpoint saved(folder / "saved");
  const zero::Checkpoint halves = reloaded<bfloat16>(folder, "halves");
  for (const std::size_t i : {0, 1, 4}) {
    INFO("parameter " << i);
    const auto was = read<float>(saved, i, values);
    CHECK(same_bits(read<float>(halves, i, master), was));
    CHECK(same_bits(read<bfloat16>(halves, i, values), rounded<bfloat16>(was)));
    CHECK(same_bits(read<float>(halves, i, slot), read<float>(saved, i, slot)));
  }
  CHECK(same_bits(read<bfloat16>(halves, 2, values),
                  rounded<bfloat16>(read<float>(saved, 2, values))));  // frozen

  // Values of float are made of the masters, which know more than the values of 16 bits.
  const Folder other;
  zero::run_ranks(2, [&](auto& comm) {
    Rank<bfloat16> rank(comm, usual, 50);
    zero::load(rank.optimizer, folder / "saved");
    zero::save(rank.optimizer, other / "saved");
  });
  const zero::Checkpoint floats = reloaded<float>(other, "floats");
  for (const std::size_t i : {0, 1, 4}) {
    INFO("parameter " << i);
    CHECK(same_bits(read<float>(floats, i, values), read<float>(saved, i, values)));
    CHECK(same_bits(read<float>(floats, i, slot + 1), read<float>(saved, i, slot + 1)));
  }
}

TEST_CASE("Load: bfloat16 values come as they were, not as their masters are rounded anew") {
  const Folder folder;
  // Noise decides which way a value was rounded, so it can't be made of its master again.
  using Noisy = zero::BasicPrecision<float, float, zero::Rounding::stochastic>;
  save_run<bfloat16, Noisy>(folder / "saved");
  const zero::Checkpoint saved(folder / "saved");
  const auto was = read<bfloat16>(saved, 0, values);
  REQUIRE(!same_bits(was, rounded<bfloat16>(read<float>(saved, 0, master))));
  const zero::Checkpoint halves = reloaded<bfloat16>(folder, "halves");
  CHECK(same_bits(read<bfloat16>(halves, 0, values), was));
  CHECK(same_bits(read<float>(halves, 0, master), read<float>(saved, 0, master)));
}

TEST_CASE("Load: double into float, and float slots into bfloat16, to nearest") {
  const Folder folder;
  save_run<double>(folder / "saved");
  const zero::Checkpoint saved(folder / "saved");
  const zero::Checkpoint floats = reloaded<float>(folder, "floats");
  const auto was = read<double>(saved, 0, values);
  REQUIRE(!same_bits(rounded<double>(rounded<float>(was)), was));
  CHECK(same_bits(read<float>(floats, 0, values), rounded<float>(was)));
  CHECK(same_bits(read<float>(floats, 4, slot), rounded<float>(read<double>(saved, 4, slot))));
  // And wider again, as they are.
  const Folder other;
  save_run(other / "saved");
  const zero::Checkpoint wide = reloaded<double>(other, "wide");
  const zero::Checkpoint narrow(other / "saved");
  CHECK(same_bits(read<double>(wide, 0, values), rounded<double>(read<float>(narrow, 0, values))));

  const zero::Checkpoint slots = reloaded<float, zero::Bfloat16Slots>(other, "slots");
  const auto moments = read<float>(narrow, 0, slot + 1);
  REQUIRE(!same_bits(rounded<float>(rounded<bfloat16>(moments)), moments));
  CHECK(same_bits(read<bfloat16>(slots, 0, slot + 1), rounded<bfloat16>(moments)));
  CHECK(slots.array(0, slot).type == zero::ElementType::bfloat16);
}

TEST_CASE("Load: master copies are made of the values where none were saved") {
  const Folder folder;
  save_run<bfloat16, zero::StochasticPrecision>(folder / "saved");
  const zero::Checkpoint saved(folder / "saved");
  REQUIRE_FALSE(saved.info().parameters[0].has_master);
  const zero::Checkpoint masters = reloaded<bfloat16>(folder, "masters");
  const auto was = read<bfloat16>(saved, 0, values);
  CHECK(same_bits(read<float>(masters, 0, master), rounded<float>(was)));
  // Also where only values are loaded: the next step would undo them else.
  const zero::Checkpoint alone = reloaded<bfloat16>(folder, "alone", {.state = false});
  CHECK(same_bits(read<float>(alone, 0, master), rounded<float>(was)));
  CHECK(same_bits(read<bfloat16>(alone, 0, values), was));
}

TEST_CASE("Load: a fixed loss scale stays, a dynamic one is kept within its bounds of now") {
  const Folder folder;
  zero::Settings dynamic;
  dynamic.loss_scale = zero::LossScale::dynamic(4096);
  dynamic.loss_scale->interval = 1;
  save_run(folder / "saved", usual, 2, Rank<>::two(), dynamic);
  const auto loaded = [&](zero::LossScale scale) {
    return said_by(2, [&](auto& comm) {
      zero::Settings settings;
      settings.loss_scale = scale;
      Rank<> rank(comm, usual, 50, Rank<>::two(), settings);
      zero::load(rank.optimizer, folder / "saved");
      return std::to_string(static_cast<int>(rank.optimizer.loss_scale()));
    });
  };
  using Said = std::vector<std::string>;
  CHECK(loaded(zero::LossScale::dynamic(64)) == Said{"32768", "32768"});  // doubled 3 times
  zero::LossScale bounded = zero::LossScale::dynamic(64);
  bounded.maximum = 8192;
  CHECK(loaded(bounded) == Said{"8192", "8192"});
  CHECK(loaded(zero::LossScale::fixed(64)) == Said{"64", "64"});
}

// What does not fit.

Specs changed(const std::function<void(Specs&)>& change) {
  Specs specs = usual;
  change(specs);
  return specs;
}

/// Changes the text of a checkpoint's index, and its checksum with it.
void edit_index(const std::filesystem::path& folder, const std::string& from,
                const std::string& to) {
  std::string text = checkpoints::text_of_file(folder / "index.json");
  const std::size_t at = text.find(from);
  if (at == std::string::npos) throw std::runtime_error("the index has no " + from);
  text.replace(at, from.size(), to);
  text.resize(text.size() - zero::detail::index_end("").size());
  text += zero::detail::index_end(text);
  std::ofstream(folder / "index.json", std::ios::binary) << text;
}

/// Loads on 3 ranks into `specs` and `groups`; returns what was wrong with how that was refused,
/// or nothing. `text` is what the error says.
std::string refusal(const Specs& specs, const std::vector<zero::Adam>& groups,
                    const std::function<std::filesystem::path(int rank)>& path, LoadOptions options,
                    std::string& text) {
  const auto after = [&](bool loads) {
    return said_by(3, [&](auto& comm) -> std::string {
      Rank<> rank(comm, specs, 50, groups);
      rank.steps(2);
      const std::string before = rank.everything();
      if (loads) {
        const Failure failure =
            ranks::attempt([&] { zero::load(rank.optimizer, path(comm.rank()), options); });
        if (failure.kind != Kind::checkpoint) return "not refused: " + failure.text;
        if (comm.rank() == 0) text = failure.text;
        if (rank.everything() != before) return "something changed";
        comm.barrier().wait();
        if (failure.text != text) return "another text: " + failure.text;
      } else {
        comm.barrier().wait();
      }
      rank.step(2);
      return rank.everything();
    });
  };
  const auto with = after(true);
  const auto without = after(false);
  for (std::size_t r = 0; r < with.size(); ++r) {
    if (with[r] != without[r]) {
      return with[r].size() < 300 ? with[r] : std::string("the next step is another");
    }
  }
  return "";
}

TEST_CASE("Load: what does not fit is refused on all ranks, and nothing changes") {
  const Folder folder;
  save_run(folder / "saved");
  const auto before = checkpoints::files_of(folder / "saved");
  const auto add = [](Specs& s) { s.push_back({"more", {3}}); };
  struct Row {
    Specs specs;
    std::string text;
    std::vector<zero::Adam> groups = Rank<>::two();
    LoadOptions options{};
  };
  const std::vector<Row> rows{
      {changed([](Specs& s) { s.pop_back(); }),
       "its parameter \"last\" is not in the store; load into the same parameters, by name"},
      {changed(add), "parameter 5 ('more') is not in it; load into the same parameters, by name"},
      {changed([](Specs& s) { s[1].name = "Bias"; }), "parameter 1 ('Bias') is not in it"},
      {changed([](Specs& s) { s[0].shape = s[3].shape = {11, 7}; }),
       "parameter 0 ('weight') has the shape [11, 7], but was saved with [7, 11]"},
      {changed([](Specs& s) { s[1].shape = {}; }),
       "parameter 1 ('bias') has the shape [], but was saved with [5]"},
      {changed([](Specs& s) { s[4].attributes.frozen = true; }),
       "parameter 4 ('last') is frozen, but was not when it was saved"},
      {changed([](Specs& s) { s[2].attributes.frozen = false; }),
       "parameter 2 ('frozen') is not frozen, but was when it was saved"},
      {changed([](Specs& s) { s[3].attributes.alias = {}; }),
       "parameter 3 ('tied') was saved tied to another, so it has no state of its own there"},
      {changed([](Specs& s) { s[4].group = 0; }),
       "parameter 4 ('last') is in group 0, but was saved in group 1; form the same groups"},
      {usual, "it has 2 groups, but the optimizer 3", {zero::Adam{}, zero::Adam{}, zero::Adam{}}},
      {usual,
       "it has the slots 'exp_avg', 'exp_avg_sq', but the optimizer keeps 'exp_avg', "
       "'exp_avg_sq', 'max_exp_avg_sq'; construct with the optimizer that was saved",
       {zero::Adam{.amsgrad = true}, zero::Adam{}}},
      // Even of values alone.
      {changed(add), "parameter 5 ('more') is not in it", Rank<>::two(), {.state = false}},
      {changed([](Specs& s) { s[1].shape = {6}; }),
       "parameter 1 ('bias') has the shape [6], but was saved with [5]",
       Rank<>::two(),
       {.state = false}},
  };
  for (const Row& row : rows) {
    std::string text;
    INFO(row.text);
    CHECK(refusal(
              row.specs, row.groups, [&](int) { return folder / "saved"; }, row.options, text) ==
          "");
    CHECK_THAT(text, ContainsSubstring(row.text));
    CHECK_THAT(text, ContainsSubstring("load: rank 0: " + (folder / "saved").string()));
  }
  CHECK(checkpoints::files_of(folder / "saved") == before);  // reading changes nothing
}

TEST_CASE("Load: parameters that were saved untied can't be loaded into tied ones") {
  const Folder folder;
  save_run(folder / "saved", changed([](Specs& s) { s[3].attributes.alias = {}; }));
  std::string text;
  CHECK(refusal(
            usual, Rank<>::two(), [&](int) { return folder / "saved"; }, {.state = false}, text) ==
        "");
  CHECK_THAT(text, ContainsSubstring("parameter 3 ('tied') is tied to another, but was saved with "
                                     "values of its own; untie it"));
}

TEST_CASE("Load: values alone go into untied, otherwise frozen and regrouped parameters") {
  const Folder folder;
  save_run(folder / "saved");
  const Specs specs = changed([](Specs& s) {
    s[3].attributes.alias = {};
    s[2].attributes.frozen = false;
    s[4].attributes.frozen = true;
    s[1].group = 0;
    std::swap(s[0], s[1]);  // in another order, too
  });
  const auto said = said_by(2, [&](auto& comm) -> std::string {
    Rank<> whole(comm, usual, 50);
    zero::load(whole.optimizer, folder / "saved");
    Rank<> rank(comm, specs, 60);
    zero::load(rank.optimizer, folder / "saved", {.state = false});
    for (std::size_t i = 0; i < specs.size(); ++i) {
      const std::size_t of = i < 2 ? 1 - i : i == 3 ? 0 : i;
      if (ranks::bytes_of(rank.model[i].values()) != ranks::bytes_of(whole.model[of].values())) {
        return "values of " + specs[i].name;
      }
    }
    rank.step(0);
    return "";
  });
  CHECK(said == std::vector<std::string>(2));
}

TEST_CASE("Load: a description that makes no sense for the optimizer is refused") {
  struct Row {
    std::string from, to, text;
  };
  const std::vector<Row> rows{
      {"\"lr\"", "\"rate\"", "its group 0 lacks the option 'lr'; load with the optimizer"},
      {"\"lr\"", "\"rate\": 1, \"lr\"", "its group 0 has options that the optimizer lacks"},
      {"\"beta1\": 0.9", "\"beta1\": 1.5", "the options of its group 0: Adam: beta1"},
      {"\"amsgrad\": 0.0", "\"amsgrad\": 1.0",
       "the options of its group 0 need more state than is in it"},
  };
  for (const Row& row : rows) {
    const Folder folder;
    save_run(folder / "saved");
    edit_index(folder / "saved", row.from, row.to);
    std::string text;
    INFO(row.text);
    const auto path = [&](int) { return folder / "saved"; };
    CHECK(refusal(usual, Rank<>::two(), path, {}, text) == "");
    CHECK_THAT(text, ContainsSubstring(row.text));
    // Options are not what was asked for here.
    const auto said = said_by(2, [&](auto& comm) {
      Rank<> rank(comm, usual, 50);
      zero::load(rank.optimizer, folder / "saved", {.options = false});
      return std::to_string(rank.optimizer.steps());
    });
    CHECK(said == std::vector<std::string>{"3", "3"});
  }
}

TEST_CASE("Load: the state of another optimizer is refused, its values are not") {
  const Folder folder;
  save_run(folder / "saved");
  edit_index(folder / "saved", "\"optimizer\": \"Adam\"", "\"optimizer\": \"AdamW\"");
  std::string text;
  const auto path = [&](int) { return folder / "saved"; };
  CHECK(refusal(usual, Rank<>::two(), path, {}, text) == "");
  CHECK_THAT(text, ContainsSubstring("it holds the state of \"AdamW\", but this optimizer is "
                                     "\"Adam\""));
  CHECK_NOTHROW(said_by(2, [&](auto& comm) {
    Rank<> rank(comm, usual, 50);
    zero::load(rank.optimizer, folder / "saved", {.state = false});
    return std::string();
  }));
}

TEST_CASE("Load: a part of a checkpoint is no checkpoint, and says what is") {
  const Folder folder;
  save_run(folder / "saved");
  std::string text;
  for (const auto& entry : std::filesystem::directory_iterator(folder / "saved")) {
    const auto path = [&](int) { return entry.path(); };
    CHECK(refusal(usual, Rank<>::two(), path, {}, text) == "");
    CHECK_THAT(text, ContainsSubstring("give the path of the folder"));
  }
}

TEST_CASE("Load: another checkpoint on one rank, or none, is refused on all") {
  const Folder folder;
  save_run(folder / "saved");
  save_run(folder / "other", usual, 2, Rank<>::two(0.5));
  std::string text;
  const auto one_has = [&](int odd, const std::string& name) {
    return refusal(
        usual, Rank<>::two(),
        [&, odd, name](int rank) { return rank == odd ? folder / name : folder / "saved"; }, {},
        text);
  };
  CHECK(one_has(1, "other") == "");
  CHECK_THAT(text, ContainsSubstring(
                       "load: rank 1 was given another checkpoint than rank 0; give all ranks"));
  CHECK(one_has(0, "other") == "");
  CHECK_THAT(text, ContainsSubstring("load: rank 1 was given another checkpoint than rank 0"));
  for (const int rank : {0, 2}) {
    CHECK(one_has(rank, "none") == "");
    CHECK_THAT(text, ContainsSubstring("load: rank " + std::to_string(rank) + ": "));
    CHECK_THAT(text, ContainsSubstring((folder / "none").string()));
  }
  // The same checkpoint elsewhere is the same.
  std::filesystem::copy(folder / "saved", folder / "copy");
  const auto said = said_by(2, [&](auto& comm) {
    Rank<> rank(comm, usual, 50);
    zero::load(rank.optimizer, folder / (comm.rank() == 0 ? "saved" : "copy"));
    return std::to_string(rank.optimizer.steps());
  });
  CHECK(said == std::vector<std::string>{"3", "3"});
}

TEST_CASE("Load: other bytes than were written are found before anything changes") {
  const Folder folder;
  save_run(folder / "saved");
  std::size_t files = 0;
  for (const auto& entry : std::filesystem::directory_iterator(folder / "saved")) {
    if (entry.path().extension() != ".safetensors") continue;
    ++files;
    const std::string good = checkpoints::text_of_file(entry.path());
    std::string bad = good;
    bad[bad.size() - 10] = static_cast<char>(bad[bad.size() - 10] ^ 4);
    std::ofstream(entry.path(), std::ios::binary) << bad;
    std::string text;
    CHECK(refusal(usual, Rank<>::two(), [&](int) { return folder / "saved"; }, {}, text) == "");
    CHECK_THAT(text, ContainsSubstring(entry.path().filename().string() + ": tensor \""));
    CHECK_THAT(text, ContainsSubstring("its checksum does not match"));
    std::ofstream(entry.path(), std::ios::binary) << good;
  }
  CHECK(files == 2);
}

TEST_CASE("Save: parameters that can't be told apart are refused on all ranks, before any file") {
  struct Row {
    Specs specs;
    std::string text;
  };
  const std::vector<Row> rows{
      {changed([](Specs& s) { s[1].name = ""; }), "parameter 1 has no name"},
      {changed([](Specs& s) { s[2].name = "weight.exp_avg"; }),
       R"(parameters 0 ("weight") and 2 ("weight.exp_avg") both have an array "weight.exp_avg")"},
  };
  for (const Row& row : rows) {
    const Folder folder;
    std::vector<Failure> failures(3);
    const auto said = said_by(3, [&](auto& comm) -> std::string {
      Rank<> rank(comm, row.specs, 50);
      rank.step(0);
      const std::string before = rank.everything();
      failures[static_cast<std::size_t>(comm.rank())] =
          ranks::attempt([&] { zero::save(rank.optimizer, folder / "saved"); });
      if (rank.everything() != before) return "something changed";
      rank.step(1);
      return "";
    });
    CHECK(said == std::vector<std::string>(3));
    for (const Failure& failure : failures) {
      CHECK(failure.kind == Kind::checkpoint);
      CHECK_THAT(failure.text, ContainsSubstring("save: rank 0: "));
      CHECK_THAT(failure.text, ContainsSubstring(row.text));
    }
    CHECK(checkpoints::files_of(folder / "saved").empty());
  }
}

}  // namespace
