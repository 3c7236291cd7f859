// SPDX-License-Identifier: Apache-2.0
// What is made of a checkpoint without the optimizer that saved it: its weights alone, and a store
// that stage 3 gives memory to, unit by unit.
#include <cstddef>
#include <filesystem>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "catch.hpp"
#include "checkpoint/folder.hpp"
#include "ranks.hpp"
#include "zero/bfloat16.hpp"
#include "zero/checkpoint.hpp"
#include "zero/optim/adam.hpp"
#include "zero/shaped_param.hpp"
#include "zero/zero_sharded.hpp"

namespace {

using Catch::Matchers::ContainsSubstring;
using checkpoints::Folder;
using Shape = std::vector<std::size_t>;

template <class T = float>
ranks::Model<T> model_of(bool with_frozen) {
  ranks::Model<T> model;
  model.emplace_back("first", Shape{20, 5});
  model.emplace_back("number", Shape{});
  model.emplace_back("second", Shape{90});
  ranks::draw_values(model);
  auto& tied = model.emplace_back("tied", Shape{20, 5}, zero::Attributes{.alias = 0});
  tied.take_values(model[0].values());
  if (!with_frozen) return model;
  auto& table = model.emplace_back("table", Shape{4}, zero::Attributes{.frozen = true});
  ranks::Draw(5).fill(table.values());
  return model;
}

/// Of one of two types, each instance.
class EitherType {
 public:
  using Values = std::variant<std::span<float>, std::span<double>>;
  template <class T>
  EitherType(std::string name, std::vector<T> values)
      : name_(std::move(name)), shape_{values.size()}, values_(std::move(values)) {
    gradient_ = std::vector<T>(shape_[0]);
  }
  [[nodiscard]] const std::string& name() const { return name_; }
  [[nodiscard]] const Shape& shape() const { return shape_; }
  [[nodiscard]] Values values() const { return spans(values_); }
  [[nodiscard]] Values gradient() const { return spans(gradient_); }

 private:
  using Vectors = std::variant<std::vector<float>, std::vector<double>>;
  static Values spans(Vectors& vectors) {
    return std::visit([](auto& vector) { return Values(std::span(vector)); }, vectors);
  }

  std::string name_;
  Shape shape_;
  mutable Vectors values_;
  mutable Vectors gradient_{};
};

/// Two ranks' checkpoint after a step; returns the bytes of each parameter's values.
template <class T = float>
std::map<std::string, std::string> save(const std::filesystem::path& folder, bool with_frozen) {
  std::map<std::string, std::string> values;
  ranks::rethrow_any(ranks::run(2, [&](zero::InProcessCommunicator& comm) {
    auto model = model_of<T>(with_frozen);
    zero::ZeroSharded optimizer{zero::Adam{}, model, comm};
    ranks::draw_gradients(model, 0, 0);
    optimizer.step();
    zero::save(optimizer, folder);
    if (comm.rank() != 0) return;
    for (const auto& tensor : model) values[tensor.name()] = ranks::bytes_of(tensor.values());
  }));
  return values;
}

/// The bytes of each tensor of a safetensors file.
std::map<std::string, std::string> tensors_of(const std::filesystem::path& path) {
  const zero::detail::ReadFile file(path);
  const std::string text = checkpoints::text_of_file(path);
  const zero::SafetensorsHeader header = zero::read_safetensors_header(file);
  std::map<std::string, std::string> tensors;
  for (const zero::TensorEntry& tensor : header.tensors) {
    tensors[tensor.name] = text.substr(header.data_begin + tensor.begin, tensor.end - tensor.begin);
  }
  return tensors;
}

zero::Settings to_be_loaded() {
  zero::Settings settings;
  settings.initial_value = zero::to_be_loaded;
  return settings;
}

/// The bytes of all that a store has at stage 3, a unit at a time, by name.
template <class Store, class Optimizer>
std::map<std::string, std::string> values_by_unit(const Store& store, Optimizer& optimizer) {
  std::set<int> units;
  for (const auto& parameter : store) units.insert(parameter.attributes().unit);
  std::map<std::string, std::string> values;
  for (const int unit : units) {
    optimizer.acquire(unit);
    for (const auto& parameter : store) {
      if (parameter.attributes().unit != unit) continue;
      values[parameter.name()] = ranks::bytes_of(parameter.values());
    }
    optimizer.release(unit);
  }
  return values;
}

}  // namespace

TEST_CASE("weights alone are the parameters' values, shapes and types, of tied ones once") {
  const Folder folder;
  auto expected = save<zero::bfloat16>(folder / "saved", true);
  expected.erase("tied");
  zero::save_weights(zero::Checkpoint(folder / "saved"), folder / "weights");
  CHECK(tensors_of(folder / "weights") == expected);

  const zero::SafetensorsHeader header =
      zero::read_safetensors_header(zero::detail::ReadFile(folder / "weights"));
  std::map<std::string, Shape> shapes;
  for (const zero::TensorEntry& tensor : header.tensors) {
    shapes[tensor.name] = tensor.shape;
    CHECK(tensor.dtype == "BF16");
  }
  CHECK(shapes == std::map<std::string, Shape>{
                      {"first", {20, 5}}, {"number", {}}, {"second", {90}}, {"table", {4}}});
  CHECK(header.metadata.at("format") == "pt");
  std::string sums;
  for (const zero::TensorEntry& tensor : header.tensors) {
    zero::detail::Checksum sum;
    sum.add(checkpoints::bytes_of(expected.at(tensor.name)));
    sums += (sums.empty() ? "" : " ") + sum.text();
  }
  CHECK(header.metadata.at("xxh3_64") == sums);
  CHECK_THROWS_WITH(zero::Checkpoint(folder / "weights"),
                    ContainsSubstring("no checkpoint of this library"));
}

TEST_CASE("weights of several types lie wider ones first") {
  const Folder folder;
  ranks::rethrow_any(ranks::run(1, [&](zero::InProcessCommunicator& comm) {
    std::vector<EitherType> store{EitherType("narrow", std::vector<float>{1, 2, 3}),
                                  EitherType("wide", std::vector<double>{4, 5})};
    zero::ZeroSharded optimizer{zero::Adam{}, store, comm};
    zero::save(optimizer, folder / "saved");
  }));
  zero::save_weights(zero::Checkpoint(folder / "saved"), folder / "weights");
  const zero::SafetensorsHeader header =
      zero::read_safetensors_header(zero::detail::ReadFile(folder / "weights"));
  REQUIRE(header.tensors.size() == 2);
  CHECK(header.tensors[0].name == "wide");
  CHECK(header.tensors[1].name == "narrow");
  const std::vector<float> narrow{1, 2, 3};
  CHECK(tensors_of(folder / "weights").at("narrow") == ranks::bytes_of(std::span(narrow)));
}

TEST_CASE("weights that can't be written leave the file before") {
  const Folder folder;
  (void)save(folder / "saved", false);
  const zero::Checkpoint saved(folder / "saved");
  CHECK_THROWS_AS(zero::save_weights(saved, folder / "missing" / "file"), zero::CheckpointError);
  zero::save_weights(saved, folder / "weights");
  const std::string before = checkpoints::text_of_file(folder / "weights");
  for (const auto& entry : std::filesystem::directory_iterator(folder / "saved")) {
    if (entry.path().extension() == ".safetensors") std::filesystem::resize_file(entry, 900);
  }
  CHECK_THROWS_AS(zero::save_weights(saved, folder / "weights"), zero::CheckpointError);
  CHECK(checkpoints::text_of_file(folder / "weights") == before);
  CHECK(folder.names() == std::vector<std::string>{"saved", "weights"});
}

TEST_CASE("what is no checkpoint can't take the place of the one that is read") {
  const Folder folder;
  (void)save(folder / "saved", false);
  zero::consolidate(zero::Checkpoint(folder / "saved"), folder / "one");
  const zero::Checkpoint one(folder / "one");
  const std::string before = checkpoints::text_of_file(folder / "one");
  CHECK_THROWS_WITH(zero::save_weights(one, folder / "." / "one"),
                    ContainsSubstring("write to another file"));
  CHECK(checkpoints::text_of_file(folder / "one") == before);
}

TEST_CASE("a store made of a checkpoint may be given other units") {
  const Folder folder;
  const auto expected = save(folder / "saved", false);
  struct Rank {
    std::map<std::string, std::string> values{};
    std::size_t gathered_peak = 0;
  };
  const auto loaded = [&](const zero::CheckpointInfo& info) {
    Rank of_rank_0;
    ranks::rethrow_any(ranks::run(2, [&](zero::InProcessCommunicator& comm) {
      auto store = zero::shaped_params<float>(info);
      zero::ZeroSharded optimizer{
          zero::Adam{},      store,         comm, zero::Stage3{.prefetch = 0},
          zero::ParamView{}, to_be_loaded()};
      zero::load(optimizer, folder / "saved");
      auto values = values_by_unit(store, optimizer);
      const std::size_t peak = optimizer.memory().gathered_peak;
      if (comm.rank() == 0) of_rank_0 = {std::move(values), peak};
    }));
    return of_rank_0;
  };
  constexpr std::size_t all_bytes = (100 + 1 + 90) * sizeof(float);

  zero::CheckpointInfo info = zero::Checkpoint(folder / "saved").info();
  const Rank one_unit = loaded(info);
  CHECK(one_unit.values == expected);
  CHECK(one_unit.gathered_peak >= all_bytes);

  info.parameters[2].attributes.unit = 1;
  const Rank two_units = loaded(info);
  CHECK(two_units.values == expected);
  CHECK(two_units.gathered_peak < all_bytes * 2 / 3);
}

TEST_CASE("a frozen parameter is refused by name, and loads into a store with memory for it") {
  const Folder folder;
  const auto expected = save(folder / "saved", true);
  const zero::CheckpointInfo info = zero::Checkpoint(folder / "saved").info();
  CHECK_THROWS_AS(zero::shaped_params<float>(info), zero::UsageError);
  CHECK_THROWS_WITH(zero::shaped_params<float>(info),
                    ContainsSubstring("the parameter \"table\" is frozen") &&
                        ContainsSubstring("make the store yourself"));

  std::map<std::string, std::string> values;
  ranks::rethrow_any(ranks::run(2, [&](zero::InProcessCommunicator& comm) {
    std::vector<zero::ShapedParam<float>> store;
    for (const zero::SavedParameter& p : info.parameters) {
      store.emplace_back(p.name, p.shape, p.attributes, p.group);
      if (!p.attributes.frozen) continue;
      const auto memory = std::make_shared<std::vector<float>>(p.elements());
      store.back().rebind(*memory, memory);
    }
    zero::ZeroSharded optimizer{zero::Adam{}, store, comm, zero::Stage3{}, to_be_loaded()};
    zero::load(optimizer, folder / "saved");
    auto mine = values_by_unit(store, optimizer);
    if (comm.rank() == 0) values = std::move(mine);
  }));
  CHECK(values == expected);
}
