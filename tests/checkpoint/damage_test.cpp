// SPDX-License-Identifier: Apache-2.0
// Checkpoints that are damaged, in every byte, and that say what no save has written: all ranks
// refuse them, naming the file, and keep what they have.
#include <sys/resource.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <functional>
#include <ios>
#include <map>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "catch.hpp"
#include "checkpoint/crash_training.hpp"
#include "checkpoint/folder.hpp"
#include "zero/checkpoint.hpp"

namespace {

using checkpoints::Folder;
using checkpoints::make_file;
using checkpoints::text_of_file;

namespace fs = std::filesystem;
using training::Files;
using zero::detail::Json;

/// What a reader that verifies says of it; empty: that it is whole.
std::string complaint(const fs::path& path) {
  try {
    zero::Checkpoint(path).verify();
  } catch (const zero::CheckpointError& error) {
    return error.what();
  }
  return {};
}

/// Empty where two ranks refuse it in the same words, among which is `name`, and stay as they were.
std::string problem_of_load(const fs::path& path, const std::string& name) {
  std::vector<std::string> problems(2);
  std::vector<std::string> said(2);
  training::on_ranks(2, [&](int rank, auto& model, auto& optimizer) {
    const auto r = static_cast<std::size_t>(rank);
    training::train(model, optimizer, rank, 2);
    const std::string before = ranks::snapshot(model, optimizer);
    said[r] = training::refusal_of([&] { zero::load(optimizer, path); });
    if (!said[r].starts_with("load: ") || said[r].find(name) == std::string::npos) {
      problems[r] = "it says: " + said[r];
    }
    if (ranks::snapshot(model, optimizer) != before) problems[r] += "; it has changed";
    training::train(model, optimizer, rank, 3);
  });
  if (said[0] != said[1]) problems[0] += "; ranks are told different things";
  return problems[0] + problems[1];
}

/// A checkpoint by three ranks.
Files saved(int step) {
  const Folder folder;
  training::save_step(3, step, folder.path());
  return training::files_of(folder.path());
}
/// The same in one file.
std::string consolidated(int step) {
  const Folder folder;
  training::on_ranks(3, [&](int rank, auto& model, auto& optimizer) {
    training::train(model, optimizer, rank, step);
    zero::consolidate(optimizer, folder / "one.safetensors", 0);
  });
  return text_of_file(folder / "one.safetensors");
}

/// Any of the bits, but never none; twice changes nothing. In place: rewriting thousands of files
/// would be waited for.
void flip(const fs::path& path, std::size_t at) {
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  file.seekg(static_cast<std::streamoff>(at));
  const int byte = file.get();
  file.seekp(static_cast<std::streamoff>(at));
  file.put(static_cast<char>(static_cast<std::size_t>(byte) ^ (1 + (at * 37) % 255)));
  if (!file.flush()) throw std::runtime_error(path.string() + " can't be changed");
}

}  // namespace

TEST_CASE("a byte that changes in a folder is seen, wherever it is", "[checkpoint][damage]") {
  const Folder folder;
  const fs::path path = folder / "saved";
  const Files files = saved(2);
  training::put_files(path, files);
  REQUIRE(complaint(path) == "");
  REQUIRE(files.size() == 4);
  std::size_t tried = 0;
  for (const auto& [name, text] : files) {
    CAPTURE(name);
    for (std::size_t at = 0; at < text.size(); ++at) {
      flip(path / name, at);
      const std::string says = complaint(path);
      if (says.find((path / name).string()) == std::string::npos) {
        CAPTURE(at, says);
        FAIL_CHECK("it is taken for whole, or another file is named");
      }
      if (++tried % 101 == 0) CHECK(problem_of_load(path, (path / name).string()) == "");
      flip(path / name, at);
    }
  }
  CHECK(tried > 4000);
  CHECK(training::files_of(path) == files);
}

TEST_CASE("a byte that changes in a single file is seen, where it means anything",
          "[checkpoint][damage]") {
  const Folder folder;
  const fs::path path = folder / "one";
  const std::string text = consolidated(2);
  make_file(path, text);
  REQUIRE(complaint(path) == "");
  const training::Snapshots whole = training::loaded(2, path);
  std::size_t harmless = 0;
  for (std::size_t at = 0; at < text.size(); ++at) {
    CAPTURE(at);
    flip(path, at);
    const std::string says = complaint(path);
    if (says.empty()) {
      ++harmless;
      CHECK(training::loaded(2, path) == whole);
    } else if (says.find(path.string()) == std::string::npos) {
      FAIL_CHECK("it does not name the file: " + says);
    } else if (at % 101 == 0) {
      CHECK(problem_of_load(path, path.string()) == "");
    }
    flip(path, at);
  }
  // What metadata it has for others, and blanks.
  CHECK(harmless < 24);
}

TEST_CASE("a file that is cut off, or goes on, is seen", "[checkpoint][damage]") {
  const Folder folder;
  const fs::path path = folder / "saved";
  const auto check = [&](const fs::path& checkpoint, const fs::path& file,
                         const std::string& text) {
    std::size_t tried = 0;
    for (std::size_t bytes = 0; bytes < text.size(); bytes += 1 + bytes / 40) {
      CAPTURE(file, bytes);
      make_file(file, text.substr(0, bytes));
      CHECK(complaint(checkpoint).find(file.string()) != std::string::npos);
      if (++tried % 20 == 0) CHECK(problem_of_load(checkpoint, file.string()) == "");
    }
    for (const std::string& more : {std::string(1, '\0'), std::string(" "), text}) {
      CAPTURE(file, more.size());
      make_file(file, text + more);
      CHECK(complaint(checkpoint).find(file.string()) != std::string::npos);
    }
    make_file(file, text);
    CHECK(complaint(checkpoint) == "");
  };
  const Files files = saved(2);
  training::put_files(path, files);
  for (const auto& [name, text] : files) check(path, path / name, text);
  check(folder / "one", folder / "one", consolidated(2));
}

TEST_CASE("files that are not those of the index are seen", "[checkpoint][damage]") {
  const Folder folder;
  const fs::path path = folder / "saved";
  const Files files = saved(2);
  // Of the same sizes and names, but for the values.
  const Files others = saved(3);
  std::vector<std::string> names;
  for (const auto& [name, text] : files) names.push_back(name);
  REQUIRE(names[0] == "index.json");
  const auto check = [&](const std::function<void(Files&)>& change, const std::string& named) {
    Files changed = files;
    change(changed);
    training::put_files(path, changed);
    CAPTURE(named);
    CHECK(problem_of_load(path, named.empty() ? path.string() : (path / named).string()) == "");
  };
  for (std::size_t s = 1; s < names.size(); ++s) {
    CAPTURE(s);
    check([&](Files& all) { all.erase(names[s]); }, names[s]);
    check([&](Files& all) { all[names[s]] = others.at(names[s]); }, names[s]);
    const std::string& next = names[1 + s % 3];
    check([&](Files& all) { all[names[s]] = all[next]; }, names[s]);
    check([&](Files& all) { std::swap(all[names[s]], all[next]); }, names[std::min(s, 1 + s % 3)]);
  }
  check([&](Files& all) { all["index.json"] = others.at("index.json"); }, names[1]);
  check([&](Files& all) { all.erase("index.json"); }, "");
  // What the index does not name makes no difference.
  Files more = files;
  more["shard-00000009-00000-of-00001.safetensors"] = "another save's, half written";
  more["index.json.tmp"] = "{";
  training::put_files(path, more);
  CHECK(training::loaded(3, path) == training::after(3, 2));
}

namespace {

/// A file of a folder, in parts.
struct Shard {
  zero::SafetensorsHeader header;
  std::string data;

  [[nodiscard]] zero::TensorEntry& tensor(std::string_view name) {
    return *std::ranges::find(header.tensors, name, &zero::TensorEntry::name);
  }
  [[nodiscard]] std::string& sums() { return header.metadata["xxh3_64"]; }
  /// Of zeros.
  void add(const std::string& name, const std::string& dtype, std::vector<std::size_t> shape) {
    std::size_t bytes = static_cast<std::size_t>(zero::dtype_bytes(dtype));
    for (const std::size_t n : shape) bytes *= n;
    header.tensors.push_back({name, dtype, std::move(shape), data.size(), data.size() + bytes});
    data.resize(data.size() + bytes);
    sums() += " 0000000000000000";
  }
  [[nodiscard]] std::string header_text() const {
    return zero::format_safetensors_header(header.tensors, header.metadata);
  }
};

Shard shard_of(const fs::path& path) {
  Shard shard{zero::read_safetensors_header(zero::detail::ReadFile(path)), {}};
  shard.data = text_of_file(path).substr(static_cast<std::size_t>(shard.header.data_begin));
  return shard;
}

std::string checksum_of(std::string_view text) {
  zero::detail::Checksum sum;
  sum.add(std::as_bytes(std::span(text)));
  return sum.text();
}

/// With its checksum.
std::string index_text(const Json& index) {
  std::string text = index.dump(1);
  text.resize(text.size() - 2);
  return text + zero::detail::index_end(text);
}

/// A folder that one rank has saved, to be changed with all its checksums.
class Saved {
 public:
  Saved() {
    training::save_step(1, 2, path());
    index_ = Json::parse(text_of_file(path() / "index.json"));
    index_.erase("xxh3_64");
    shard_ = shard_of(shard_path());
  }
  [[nodiscard]] const fs::path& path() const { return folder_.path(); }
  [[nodiscard]] fs::path shard_path() const {
    return path() / std::string(index_["files"][0]["name"]);
  }
  /// What is said of it after these changes. All is whole again for the next ones.
  std::string with(
      const std::function<void(Json&)>& change_index,
      const std::function<void(Shard&)>& change_shard = [](Shard&) {}) const {
    Shard shard = shard_;
    change_shard(shard);
    const std::string header = shard.header_text();
    make_file(shard_path(), header + shard.data);
    Json index = index_;
    index["files"][0]["bytes"] = header.size() + shard.data.size();
    index["files"][0]["header_xxh3_64"] = checksum_of(header);
    change_index(index);
    make_file(path() / "index.json", index_text(index));
    return complaint(path());
  }

 private:
  Folder folder_{};
  Json index_{};
  Shard shard_{};
};

}  // namespace

TEST_CASE("an index that no save has written is refused, by each of its rules",
          "[checkpoint][damage]") {
  const Saved saved;
  REQUIRE(saved.with([](Json&) {}) == "");
  const std::string index = (saved.path() / "index.json").string();
  const auto parameter = [](std::size_t number, const char* key, Json value) {
    return [=](Json& json) { json["parameters"][number][key] = value; };
  };
  const auto set = [](const char* key, Json value) {
    return [=](Json& json) { json[key] = value; };
  };
  const auto file = [](const char* key, Json value) {
    return [=](Json& json) { json["files"][0][key] = value; };
  };
  const auto without = [](const char* key) { return [=](Json& json) { json.erase(key); }; };
  struct Case {
    std::function<void(Json&)> change;
    const char* rule;
  };
  for (const auto& [change, rule] : std::vector<Case>{
           {without("format"), "does not say that it is a zero-checkpoint"},
           {set("format", 7), "does not say that it is a zero-checkpoint"},
           {set("version", 2),
            "it is of version 2 of the format, but this library knows version 1"},
           {without("version"), "lacks 'version'"},
           {set("version", "1"), "has a 'version' that is no integer from 0"},
           {set("step", -1), "has a 'step' that is no integer from 0"},
           {set("step", 1.5), "has a 'step' that is no integer from 0"},
           {set("step", std::uint64_t{1} << 63), "has a 'step' that is no integer from 0"},
           {set("world", "3"), "has a 'world' that is no integer from 0"},
           {set("slots", 3), "has a 'slots' that is no array"},
           {set("slots", {1, 2, 3}), "has a slot that is no string"},
           {set("slots", {"exp_avg", "master"}), "slot \"master\" must have a name of its own"},
           {set("slots", {"exp_avg", "exp_avg"}), "slot \"exp_avg\" must have a name of its own"},
           {set("slots", {"exp.avg"}), "slot \"exp.avg\" must have a name of its own"},
           {set("slots", {""}), "slot \"\" must have a name of its own"},
           {set("loss_scale", 1), "(loss_scale) must be an object"},
           {set("loss_scale", {{"applied_in_a_row", 1}}), "(loss_scale) lacks 'scale'"},
           {set("loss_scale", {{"scale", "1"}, {"applied_in_a_row", 1}}),
            "(loss_scale) has a 'scale' that is no number"},
           {set("loss_scale", {{"scale", 1}, {"applied_in_a_row", std::uint64_t{1} << 31}}),
            "(loss_scale) has a 'applied_in_a_row' that is no integer from 0 to 2147483647"},
           {set("seed", -1), "has a 'seed' that is no integer from 0"},
           {set("notes", "epoch"), "has 'notes' that are no object"},
           {set("notes", Json::array({"epoch"})), "has 'notes' that are no object"},
           {set("notes", nullptr), "has 'notes' that are no object"},
           {set("notes", {{"data", "a"}, {"epoch", 3}}), "has a note \"epoch\" that is no string"},
           {set("notes", {{"epoch", nullptr}}), "has a note \"epoch\" that is no string"},
           {set("notes", {{"", Json::object()}}), "has a note \"\" that is no string"},
           {without("groups"), "lacks 'groups'"},
           {set("groups", Json::object()), "has a 'groups' that is no array"},
           {set("groups", {1}), "has a group that is no object"},
           {[](Json& json) { json["groups"][0]["lr"] = "fast"; },
            "has an option \"lr\" that is no number"},
           {set("parameters", "a"), "has a 'parameters' that is no array"},
           {set("parameters", {1}), "(parameter 0) must be an object"},
           {parameter(0, "name", 1), "(parameter 0) has a 'name' that is no string"},
           {parameter(0, "name", ""), "parameter 0 has no name"},
           {parameter(0, "name", "__metadata__"), "parameter 0 is called __metadata__"},
           {parameter(2, "name", "a"),
            "parameters 0 (\"a\") and 2 (\"a\") both have an array \"a\""},
           {parameter(2, "name", "a.exp_avg"), "both have an array \"a.exp_avg\""},
           {parameter(1, "shape", 5), "(parameter 1, \"b\") has a 'shape' that is no array"},
           {parameter(1, "shape", {-5}), "(parameter 1, \"b\") has a 'shape' that is no integer"},
           {parameter(1, "shape", {1U << 31, 1U << 31}), "has more elements than memory has room"},
           {parameter(0, "shape", {0, 1U << 31, 1U << 31}),
            "has more elements than memory has room"},
           {parameter(1, "group", 1), "has a parameter \"b\" of a group that it lacks"},
           {parameter(0, "steps", -1), "(parameter 0, \"a\") has a 'steps' that is no integer"},
           {parameter(0, "master", 1), "(parameter 0, \"a\") has a 'master' that is no bool"},
           {parameter(1, "frozen", "yes"), "(parameter 1, \"b\") has a 'frozen' that is no bool"},
           {parameter(1, "alias", 1), "(parameter 1, \"b\") is tied to none before it"},
           {parameter(1, "alias", 0), "ties \"b\" to what is tied itself, or of another size"},
           {[](Json& json) {
              for (std::size_t i : {1U, 2U}) {
                json["parameters"][i]["shape"] = {20};
                json["parameters"][i]["alias"] = i - 1;
              }
            },
            "ties \"c\" to what is tied itself"},
           {parameter(0, "quantum", 0), "(parameter 0, \"a\") has the quantum 0"},
           {parameter(0, "unit", 0.5), "(parameter 0, \"a\") has a 'unit' that is no int"},
           {parameter(0, "unit", 1e300), "(parameter 0, \"a\") has a 'unit' that is no int"},
           {without("files"), "lacks 'files'"},
           {set("files", {1}), "(files) must be an object"},
           {file("name", 1), "(files) has a 'name' that is no string"},
           {file("name", "../other"), "(files) names a file outside of its folder"},
           {file("name", ".."), "(files) names a file outside of its folder"},
           {file("name", ""), "(files) names a file outside of its folder"},
           {file("bytes", "5"), "(files) has a 'bytes' that is no integer"},
           {file("header_xxh3_64", 5), "(files) has a 'header_xxh3_64' that is no string"}}) {
    CAPTURE(rule);
    const std::string says = saved.with(change);
    CAPTURE(says);
    CHECK(says.starts_with(index + ": "));
    CHECK(says.find(rule) != std::string::npos);
  }
}

TEST_CASE("an index's notes are told apart by their whole names", "[checkpoint][damage]") {
  const Saved saved;
  const std::map<std::string, std::string> notes{{"", "of no name"},
                                                 {std::string("a\0b", 3), std::string("\0", 1)},
                                                 {"a", "\"1\\\n"},
                                                 {"\u00e9", ""},
                                                 {"a.exp_avg", "a"}};
  CHECK(saved.with([&](Json& json) { json["notes"] = notes; }) == "");
  CHECK(zero::Checkpoint(saved.path()).info().notes == notes);
  CHECK(saved.with([](Json& json) { json["notes"] = Json::object(); }) == "");
  CHECK(zero::Checkpoint(saved.path()).info().notes.empty());
}

TEST_CASE("notes that no index could say are refused before anything is written",
          "[checkpoint][damage]") {
  const Folder folder;
  training::save_step(2, 2, folder.path());
  const Files before = training::files_of(folder.path());
  const std::vector<std::map<std::string, std::string>> all{
      {{"epoch", "3"}, {"state", "\xff"}}, {{"state\xc3", "1"}}, {{"state", "\xed\xa0\x80"}}};
  for (const auto& notes : all) {
    std::vector<std::string> said(2);
    training::on_ranks(2, [&](int rank, auto& model, auto& optimizer) {
      training::train(model, optimizer, rank, 3);
      said[static_cast<std::size_t>(rank)] =
          training::refusal_of([&] { zero::save(optimizer, folder.path(), notes); });
    });
    CHECK(said[0].starts_with("save: rank 0: the note \"state"));
    CHECK(said[0].find("is not UTF-8") != std::string::npos);
    CHECK(said[1] == said[0]);
    CHECK(training::files_of(folder.path()) == before);
  }
}

TEST_CASE("an index whose files are others is refused", "[checkpoint][damage]") {
  const Saved saved;
  const std::string shard = saved.shard_path().string();
  const auto file = [](const char* key, Json value) {
    return [=](Json& json) { json["files"][0][key] = value; };
  };
  const auto check = [&](const std::string& says, const std::string& rule) {
    CAPTURE(says, rule);
    CHECK(says.find(rule) != std::string::npos);
  };
  check(saved.with(file("bytes", 5)), shard + ": it has ");
  check(saved.with(file("header_xxh3_64", "")), shard + ": its header is not the one");
  check(saved.with(file("name", "other")), (saved.path() / "other").string() + ": it is gone");
  check(saved.with(file("name", ".")), "this is no file");
  check(saved.with(file("name", "index.json")),
        (saved.path() / "index.json").string() + ": it has");
  check(saved.with([](Json& json) { json["files"].push_back(json["files"][0]); }),
        "is there twice before element");
  check(saved.with([](Json& json) { json["files"] = Json::array(); }),
        saved.path().string() + ": the tensor \"a\" is not there from element 0 on");
}

TEST_CASE("an index that is no JSON object is refused", "[checkpoint][damage]") {
  const Saved saved;
  const fs::path index = saved.path() / "index.json";
  const auto check = [&](std::string text, const std::string& rule) {
    make_file(index, text += zero::detail::index_end(text));
    const std::string says = complaint(saved.path());
    CAPTURE(says);
    CHECK(says.starts_with(index.string() + ": its description " + rule));
  };
  check("[1", "is no JSON (");
  check("", "is no JSON (");
  check("{\"a\": \"\xff\"", "is no JSON (");
  check("{\"a\": 1e999", "is no JSON (");
  check(std::string(100'000, '['), "is no JSON (");
  check("{\"format\": 1", "does not say that it is a zero-checkpoint");
  make_file(index, "[]");
  CHECK(complaint(saved.path()).find("has another checksum") != std::string::npos);
}

TEST_CASE("an index is refused whose end is not its checksum", "[checkpoint][damage]") {
  const Saved saved;
  REQUIRE(saved.with([](Json&) {}) == "");
  const fs::path index = saved.path() / "index.json";
  const std::string whole = text_of_file(index);
  const std::size_t end = whole.size() - zero::detail::index_end("").size();
  const std::string before = whole.substr(0, end);
  const std::string sum = checksum_of(before);
  const auto ended = [&](const std::string& digits) {
    return before + ",\n \"xxh3_64\": \"" + digits + "\"\n}\n";
  };
  REQUIRE(ended(sum) == whole);
  std::string large = sum;
  std::ranges::transform(large, large.begin(), [](char c) {
    return 'a' <= c && c <= 'f' ? static_cast<char>(c - 32) : c;
  });
  REQUIRE(large != sum);
  for (const std::string& text :
       {std::string(), std::string("{}"), whole.substr(end), before + "\n}\n", ended(""),
        ended("0000000000000000"), ended(large), ended(checksum_of(whole)),
        before + ",\"xxh3_64\":\"" + sum + "\"}", whole + "\n", whole + whole.substr(end)}) {
    make_file(index, text);
    const std::string says = complaint(saved.path());
    CAPTURE(text, says);
    CHECK(says.starts_with(index.string() + ": its description has another checksum"));
  }
  // Readers that look for the first one among several find another.
  CHECK(saved.with([](Json& json) { json["xxh3_64"] = 5; }) == "");
  make_file(index, whole);
  CHECK(complaint(saved.path()) == "");
}

TEST_CASE("a shard that no save has written is refused, by each of its rules",
          "[checkpoint][damage]") {
  const Saved saved;
  const auto rename = [](const char* from, const char* to) {
    return [=](Shard& shard) { shard.tensor(from).name = to; };
  };
  const auto add = [](const char* name, const char* dtype, std::vector<std::size_t> shape) {
    return [=](Shard& shard) { shard.add(name, dtype, shape); };
  };
  struct Case {
    std::function<void(Shard&)> change;
    const char* rule;
  };
  for (const auto& [change, rule] : std::vector<Case>{
           {[](Shard& shard) { shard.header.metadata.erase("xxh3_64"); },
            "metadata lacks 'xxh3_64'"},
           {[](Shard& shard) { shard.sums().pop_back(); },
            "must be 16 hexadecimal digits a tensor"},
           {[](Shard& shard) { shard.sums().clear(); }, "must be 16 hexadecimal digits a tensor"},
           {[](Shard& shard) { shard.sums()[3] = 'x'; }, "must be 16 hexadecimal digits a tensor"},
           {[](Shard& shard) { std::ranges::replace(shard.sums(), ' ', ','); },
            "must be 16 hexadecimal digits a tensor"},
           {[](Shard& shard) { shard.sums() += "0"; }, "must be 16 hexadecimal digits a tensor"},
           {[](Shard& shard) { shard.sums()[0] ^= 1; }, "has other bytes than were written"},
           {[](Shard& shard) { shard.data[9] ^= 1; }, "has other bytes than were written"},
           {rename("a[0:20]", "a"), "tensor \"a\" must be called ARRAY[BEGIN:END]"},
           {rename("a[0:20]", ""), "tensor \"\" must be called ARRAY[BEGIN:END]"},
           {rename("a[0:20]", "a[0:20"), "must be called ARRAY[BEGIN:END]"},
           {rename("a[0:20]", "a[]"), "must be called ARRAY[BEGIN:END]"},
           {rename("a[0:20]", "a[0:]"), "must be called ARRAY[BEGIN:END]"},
           {rename("a[0:20]", "a[20]"), "must be called ARRAY[BEGIN:END]"},
           {rename("a[0:20]", "a[-1:19]"), "must be called ARRAY[BEGIN:END]"},
           {rename("a[0:20]", "a[20:0]"), "must be called ARRAY[BEGIN:END]"},
           {rename("a[0:20]", "a[0:99999999999999999999]"), "must be called ARRAY[BEGIN:END]"},
           {rename("a[0:20]", "a[0:19]"), "must be called ARRAY[BEGIN:END] and have END - BEGIN"},
           {[](Shard& shard) { shard.tensor("a[0:20]").shape = {4, 5}; },
            "must be called ARRAY[BEGIN:END] and have END - BEGIN"},
           {rename("a[0:20]", "z[0:20]"), "tensor \"z[0:20]\" belongs to no parameter"},
           {rename("a.exp_avg[0:20]", "a.avg[0:20]"), "belongs to no parameter"},
           {add("a.master[0:20]", "F32", {20}), "\"a.master[0:20]\" belongs to no parameter"},
           {add("b.exp_avg[0:5]", "F32", {5}), "\"b.exp_avg[0:5]\" belongs to no parameter"},
           {[](Shard& shard) { shard.tensor("a[0:20]").dtype = "I32"; },
            "tensor \"a[0:20]\" has the type I32, which no array has"},
           {rename("a[0:20]", "a[1:21]"),
            "tensor \"a[1:21]\" has more elements than its parameter"},
           {rename("a[0:20]", "a[18446744073709551595:18446744073709551615]"),
            "has more elements than its parameter"},
           {add("a[3:4]", "F32", {1}), "the tensor \"a\" is there twice before element"},
           {add("a[0:20]", "F16", {20}), "is there twice"},
           {add("a[3:4]", "F16", {1}), "\"a[3:4]\" has another type than the rest of its array"},
           {rename("a.exp_avg[0:20]", "a[0:20] "), "must be called ARRAY[BEGIN:END]"}}) {
    CAPTURE(rule);
    std::string says;
    try {
      says = saved.with([](Json&) {}, change);
    } catch (const zero::CheckpointError& error) {
      says = error.what();  // of the writer, whose rules are the format's
    }
    CAPTURE(says);
    CHECK(says.find(rule) != std::string::npos);
  }
  // Every element has to be there.
  const auto shorter = [](Shard& shard) {
    zero::TensorEntry& last = shard.header.tensors.back();
    const std::string array = last.name.substr(0, last.name.find('['));
    last.shape[0] -= 1;
    last.end -= 4;
    last.name = array + "[0:" + std::to_string(last.shape[0]) + "]";
    shard.data.resize(shard.data.size() - 4);
  };
  CHECK(saved.with([](Json&) {}, shorter).find("is not there from element ") != std::string::npos);
}

TEST_CASE("a single file that no consolidation has written is refused", "[checkpoint][damage]") {
  const Folder folder;
  const fs::path path = folder / "one";
  make_file(path, consolidated(2));
  const Shard whole = shard_of(path);
  const auto info = [](const std::function<void(Json&)>& change) {
    return [=](Shard& file) {
      std::string& text = file.header.metadata["zero-checkpoint"];
      Json json = Json::parse(text);
      change(json);
      text = json.dump();
      file.header.metadata["zero-checkpoint xxh3_64"] = checksum_of(text);
    };
  };
  struct Case {
    std::function<void(Shard&)> change;
    const char* rule;
  };
  for (const auto& [change, rule] : std::vector<Case>{
           {[](Shard& file) { file.header.metadata.erase("zero-checkpoint"); },
            "no checkpoint of this library: its metadata has no 'zero-checkpoint'"},
           {[](Shard& file) { file.header.metadata["zero-checkpoint"] += " "; },
            "its description has another checksum than was written"},
           {[](Shard& file) { file.header.metadata.erase("zero-checkpoint xxh3_64"); },
            "its description has another checksum than was written"},
           {[](Shard& file) { file.header.metadata.erase("xxh3_64"); }, "metadata lacks 'xxh3_64'"},
           {info([](Json& json) { json["version"] = 9; }), "it is of version 9"},
           {info([](Json& json) { json["parameters"][0]["shape"] = {4, 5}; }),
            "tensor \"a\" has another shape than its parameter"},
           {info([](Json& json) { json["parameters"].erase(1); }),
            "tensor \"b\" belongs to no parameter of the checkpoint"},
           {info([](Json& json) { json["parameters"][0]["master"] = true; }),
            "the tensor \"a.master\" is not there from element 0 on"},
           {[](Shard& file) { file.tensor("c.exp_avg").name = "c.avg"; },
            "tensor \"c.avg\" belongs to no parameter"},
           {[](Shard& file) { file.tensor("c").shape = {5, 3}; },
            "tensor \"c\" has another shape than its parameter"},
           {[](Shard& file) { file.tensor("c").dtype = "U32"; },
            "tensor \"c\" has the type U32, which no array has"},
           {[](Shard& file) { file.data[5] ^= 4; }, "has other bytes than were written"}}) {
    Shard file = whole;
    change(file);
    make_file(path, file.header_text() + file.data);
    const std::string says = complaint(path);
    CAPTURE(rule, says);
    CHECK(says.starts_with(path.string() + ": "));
    CHECK(says.find(rule) != std::string::npos);
  }
}

TEST_CASE("a description asks for no more memory than its file's size allows",
          "[checkpoint][damage]") {
  const Saved saved;
  const auto many = [](std::size_t parameters, std::size_t slots, std::size_t slot_bytes) {
    return [=](Json& json) {
      Json names = Json::array();
      for (std::size_t s = 0; s < slots; ++s) {
        names.push_back(std::to_string(s) + std::string(slot_bytes, 's'));
      }
      json["slots"] = names;
      Json empty = json["parameters"][0];
      empty["shape"] = {0};
      json["parameters"] = Json::array();
      for (std::size_t i = 0; i < parameters; ++i) {
        empty["name"] = std::to_string(i);
        json["parameters"].push_back(empty);
      }
    };
  };
  const auto peak = [] {
    rusage usage{};
    ::getrusage(RUSAGE_SELF, &usage);
    return usage.ru_maxrss;  // KiB
  };
  const auto before = peak();
  CHECK(saved.with(many(3000, 3000, 0)).find("more parameters and slots than its files have") !=
        std::string::npos);
  // Names of all arrays would take 3 GB, in files of 2 MB.
  CHECK(saved.with(many(3000, 1, 1'000'000)).find("belongs to no parameter") != std::string::npos);
  CHECK(peak() - before < 500'000);
  // As many keys as fit: none is looked for among all.
  const auto keys = [](Json& json) {
    std::string text = "{";
    for (int i = 0; i < 200'000; ++i) text += "\"" + std::to_string(i) + "\":0,";
    json["groups"] = Json::array({nlohmann::json::parse(text + "\"x\":0}")});
  };
  CHECK(saved.with(keys) == "");
}
