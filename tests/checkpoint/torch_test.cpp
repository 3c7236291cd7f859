// SPDX-License-Identifier: Apache-2.0
// PyTorch's optimizer state goes on in ours, and ours is written as PyTorch loads it. The files of
// data/torch are of a real PyTorch, which has loaded the *.zero.safetensors among them.
#include <zero/checkpoint.hpp>
#include <zero/optim/adam.hpp>
#include <zero/optim/lamb.hpp>
#include <zero/optim/sgd.hpp>
#include <zero/partition/balanced.hpp>
#include <zero/zero_sharded.hpp>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <span>
#include <sstream>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "catch.hpp"
#include "folder.hpp"
#include "torch_cases.hpp"

namespace {

using torch_cases::File;
using Json = nlohmann::ordered_json;

const std::filesystem::path data = ZERO_TEST_DATA_DIR "/torch";

/// What differs first, or nothing.
template <class T>
std::string difference(const std::vector<std::vector<T>>& got,
                       const std::vector<std::vector<T>>& right) {
  // As for golden values: float's rounding is told from wrong formulas, and so is double's.
  constexpr double tolerance = std::is_same_v<T, float> ? 1e-6 : 1e-14;
  for (std::size_t i = 0; i < right.size(); ++i) {
    if (got[i].size() != right[i].size()) return "another size";
    for (std::size_t e = 0; e < right[i].size(); ++e) {
      const auto a = static_cast<double>(got[i][e]), b = static_cast<double>(right[i][e]);
      if (std::abs(a - b) <= tolerance * std::max(1.0, std::abs(b))) continue;
      std::ostringstream out;
      out.precision(17);
      out << torch_cases::parameters[i].name << '[' << e << "] is " << a << ", not " << b;
      return out.str();
    }
  }
  return {};
}

void write(const std::filesystem::path& path, const File& file) {
  const std::string header = zero::format_safetensors_header(file.tensors, file.metadata);
  std::ofstream out(path, std::ios::binary);
  out << header;
  out.write(reinterpret_cast<const char*>(file.bytes.data()),
            static_cast<std::streamsize>(file.bytes.size()));
  REQUIRE(out.flush());
}

void add(File& file, const std::string& name, const char* dtype, std::vector<std::size_t> shape,
         std::span<const std::byte> bytes) {
  const std::size_t begin = file.bytes.size();
  file.bytes.insert(file.bytes.end(), bytes.begin(), bytes.end());
  file.tensors.push_back({name, dtype, std::move(shape), begin, file.bytes.size()});
}

void remove(File& file, const std::string& name) {
  File rest{{}, file.metadata, {}};
  for (const zero::TensorEntry& t : file.tensors) {
    if (t.name != name) add(rest, t.name, t.dtype.c_str(), t.shape, file.bytes_of(t));
  }
  REQUIRE(rest.tensors.size() + 1 == file.tensors.size());
  file = rest;
}

zero::TensorEntry& tensor(File& file, const std::string& name) {
  for (zero::TensorEntry& t : file.tensors) {
    if (t.name == name) return t;
  }
  throw std::runtime_error("no tensor " + name);
}

/// Changes `param_groups`.
void change_groups(File& file, const std::function<void(Json&)>& change) {
  Json groups = Json::parse(file.metadata.at("param_groups"));
  change(groups);
  file.metadata["param_groups"] = groups.dump();
}

/// Every tensor, under its parameter's name.
/// @param names whose `param_names` are those of `file`, if it has none
std::map<std::string, std::string> by_parameter(const File& file, const File& names) {
  const Json groups = Json::parse(file.metadata.at("param_groups"));
  const Json named = Json::parse(names.metadata.at("param_groups"));
  std::map<std::string, std::string> name_of, tensors;
  for (std::size_t g = 0; g < groups.size(); ++g) {
    for (std::size_t k = 0; k < groups[g]["params"].size(); ++k) {
      const Json& of = groups[g].contains("param_names") ? groups[g] : named[g];
      name_of["state." + groups[g]["params"][k].dump()] = of["param_names"][k].get<std::string>();
    }
  }
  for (const zero::TensorEntry& t : file.tensors) {
    const std::size_t dot = t.name.rfind('.');
    const auto bytes = file.bytes_of(t);
    tensors[name_of.at(t.name.substr(0, dot)) + t.name.substr(dot)] =
        t.dtype + Json(t.shape).dump() +
        std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  }
  return tensors;
}

const auto adam = torch_cases::Case<zero::Adam, double>{"adam", {zero::Adam{}}, {0, 0, 0, 0, 0}};
const auto sgd = torch_cases::Case<zero::Sgd, double>{
    "sgd", {zero::Sgd{.momentum = 0.1}, zero::Sgd{}, zero::Sgd{}}, {0, 1, 2, 1, 0}};
const auto adamw = torch_cases::Case<zero::AdamW, float>{
    "adamw", {zero::AdamW{.amsgrad = true}, zero::AdamW{}}, {0, 1, 1, 1, 0}};

/// Why two ranks refuse a file, both the same; nothing: they load it. Where they do, nothing about
/// them has changed.
template <class Case, class Change>
std::string refusal(const Case& of, const std::filesystem::path& file, const Change& change) {
  std::array<std::string, 2> errors;
  std::array<bool, 2> unchanged{};
  ranks::rethrow_any(ranks::run(2, [&](zero::InProcessCommunicator& comm) {
    const auto rank = static_cast<std::size_t>(comm.rank());
    auto model = torch_cases::model_of(of);
    change(model);
    auto optimizer = torch_cases::make_optimizer(of, model, comm);
    const std::string before = ranks::snapshot(model, optimizer);
    const double lr = optimizer.groups()[0].lr;
    try {
      zero::load_torch(optimizer, file);
    } catch (const zero::CheckpointError& error) {
      errors[rank] = error.what();
    }
    unchanged[rank] = ranks::snapshot(model, optimizer) == before && lr == optimizer.groups()[0].lr;
    (void)optimizer.step();  // goes on either way
  }));
  CHECK(errors[0] == errors[1]);
  CHECK((errors[0].empty() || (unchanged[0] && unchanged[1])));
  return errors[0];
}
template <class Case>
std::string refusal(const Case& of, const std::filesystem::path& file) {
  return refusal(of, file, [](auto&) {});
}

/// Why PyTorch's file of a case, changed, is refused.
template <class Case>
std::string refusal_of_changed(const Case& of, const std::function<void(File&)>& change) {
  const checkpoints::Folder folder;
  File file = torch_cases::read(data / (std::string(of.name) + ".torch.safetensors"));
  change(file);
  write(folder / "changed.safetensors", file);
  const std::string error = refusal(of, folder / "changed.safetensors");
  if (!error.empty()) CHECK(error.find("changed.safetensors: ") != std::string::npos);
  return error;
}

void contains(const std::string& text, const std::string& part) {
  CHECK_THAT(text, Catch::Contains(part));
}

}  // namespace

TEST_CASE("PyTorch's optimizers go on here, at any world size, as they would have there") {
  torch_cases::for_each([]<class Case>(const Case& of) {
    const File record = torch_cases::read(data / (std::string(of.name) + ".steps.safetensors"));
    const bool is_sgd = std::is_same_v<typename Case::optimizer, zero::Sgd>;
    for (const int world : {1, 2, 3}) {
      INFO(of.name << " on " << world << " ranks");
      const checkpoints::Folder folder;
      const auto history =
          torch_cases::go_on(of, data, world, folder.path(), [&](const auto& optimizer) {
            // PyTorch's SGD doesn't count.
            const std::int64_t steps = is_sgd ? 1 : torch_cases::steps_before;
            bool right = optimizer.steps() == steps && optimizer.steps(torch_cases::late) == 0;
            // Nor is there anything to count without momentum.
            right = right && optimizer.steps(0) == steps && optimizer.steps(2) == (is_sgd ? 0 : 4);
            if (!right) throw std::runtime_error("wrong step counts");
          });
      REQUIRE(history.size() == 1 + torch_cases::steps_after);
      for (int step = 0; step <= torch_cases::steps_after; ++step) {
        INFO("step " << step);
        CHECK(difference(history[static_cast<std::size_t>(step)],
                         torch_cases::recorded<Case>(record, "values", step)) == "");
      }
    }
  });
}

TEST_CASE("what is written is what PyTorch has loaded, byte by byte, at any world size") {
  torch_cases::for_each([](const auto& of) {
    const std::string name = of.name;
    for (const int world : {1, 2, 3}) {
      INFO(name << " on " << world << " ranks");
      const checkpoints::Folder folder;
      torch_cases::go_on(of, data, world, folder.path(), [](const auto&) {});
      const std::string right = checkpoints::text_of_file(data / (name + ".zero.safetensors"));
      REQUIRE(!right.empty());
      CHECK(checkpoints::text_of_file(folder / (name + ".zero.safetensors")) == right);
    }
    // And each tensor is the one that PyTorch has written.
    const File ours = torch_cases::read(data / (name + ".zero.safetensors"));
    const File theirs = torch_cases::read(data / (name + ".torch.safetensors"));
    CHECK(by_parameter(ours, ours) == by_parameter(theirs, ours));
  });
}

TEST_CASE("from a consolidated file the same is written, and loaded again") {
  const checkpoints::Folder folder;
  torch_cases::go_on(adamw, data, 2, folder.path(), [](const auto&) {});
  const zero::Checkpoint saved(folder / "adamw.saved");
  zero::consolidate(saved, folder / "single");
  zero::save_torch(zero::Checkpoint(folder / "single"), folder / "state");
  CHECK(checkpoints::text_of_file(folder / "state") ==
        checkpoints::text_of_file(folder / "adamw.after.safetensors"));
  CHECK(refusal(adamw, folder / "state") == "");

  // Its own files have checksums.
  for (const auto& [in_file, in_message] : {std::pair{"state.0.exp_avg", "\"body.weight.exp_avg"},
                                            {"state.0.step", "\"state.0.step"}}) {
    File damaged = torch_cases::read(folder / "state");
    damaged.bytes[tensor(damaged, in_file).begin] ^= std::byte{1};
    write(folder / "damaged", damaged);
    const std::string error = refusal(adamw, folder / "damaged");
    contains(error, std::string("damaged: tensor ") + in_message);
    contains(error, "checksum does not match");
  }
}

TEST_CASE("values can be left as they are when a checkpoint is loaded") {
  const checkpoints::Folder folder;
  torch_cases::go_on(adam, data, 2, folder.path(), [](const auto&) {});
  bool values_stay = false, state_comes = false;
  ranks::rethrow_any(ranks::run(1, [&](zero::InProcessCommunicator& comm) {
    auto model = torch_cases::model_of(adam);
    auto optimizer = torch_cases::make_optimizer(adam, model, comm);
    const std::string values = ranks::values_of(model), state = ranks::state_of(optimizer);
    zero::load(optimizer, folder / "adam.saved", {.values = false});
    values_stay = ranks::values_of(model) == values;
    state_comes = ranks::state_of(optimizer) != state && optimizer.steps() == 7;
  }));
  CHECK(values_stay);
  CHECK(state_comes);
}

TEST_CASE("PyTorch's options: which matter, and which don't") {
  const auto with = [](const char* option, Json value) {
    return refusal_of_changed(adam, [&](File& file) {
      change_groups(file, [&](Json& groups) { groups[0][option] = std::move(value); });
    });
  };
  // How it is computed, what a schedule remembers, what is off, what is a name.
  CHECK(with("foreach", true) == "");
  CHECK(with("fused", true) == "");
  CHECK(with("capturable", true) == "");
  CHECK(with("initial_lr", 0.5) == "");
  CHECK(with("momentum", 0) == "");
  CHECK(with("nesterov", false) == "");
  CHECK(with("name", "decays") == "");
  CHECK(with("decoupled_weight_decay", false) == "");

  contains(with("decoupled_weight_decay", true), "load into zero::AdamW");
  contains(with("nesterov", true), "the option \"nesterov\" with the value \"true\"");
  contains(with("momentum", 0.9), "which Adam lacks");
  contains(with("betas", 0.9), "'betas' that are not two numbers");
  contains(with("lr", "high"), "an option \"lr\" that is no number");
  contains(with("lr", -1), "lr is -1");
  contains(with("amsgrad", true), "group 0 needs the state 'max_exp_avg_sq'");
  contains(refusal_of_changed(adamw, [](File& file) { remove(file, "state.0.max_exp_avg_sq"); }),
           "\"head.weight\" has state, but no 'max_exp_avg_sq'");

  contains(refusal(sgd, data / "adam.torch.safetensors"), "it has 1 groups, but the optimizer 3");
  contains(refusal_of_changed(adam,
                              [](File& file) {
                                change_groups(file, [](Json& groups) { groups[0].erase("eps"); });
                              }),
           "lacks the option \"eps\"");
  // Files of older versions don't have them all.
  CHECK(refusal_of_changed(adam, [](File& file) {
          change_groups(file, [](Json& groups) {
            groups[0].erase("maximize");
            groups[0].erase("amsgrad");
          });
        }) == "");
}

TEST_CASE("PyTorch's state must fit: the file and the tensor that doesn't are named") {
  contains(refusal_of_changed(adam, [](File& file) { remove(file, "state.1.exp_avg_sq"); }),
           "the parameter \"body.bias\" has state, but no 'exp_avg_sq'");
  contains(refusal_of_changed(adam, [](File& file) { remove(file, "state.1.step"); }),
           "the parameter \"body.bias\" has state, but no 'step'");
  contains(
      refusal_of_changed(adam, [](File& file) { tensor(file, "state.0.exp_avg").shape = {3, 4}; }),
      "tensor \"state.0.exp_avg\" has another shape than the parameter \"body.weight\"");
  contains(refusal_of_changed(
               adam, [](File& file) { tensor(file, "state.0.exp_avg").name = "state.0.exp_inf"; }),
           "tensor \"state.0.exp_inf\" is nothing that the optimizer, zero::Adam, keeps");
  contains(refusal_of_changed(
               adam, [](File& file) { tensor(file, "state.0.exp_avg").name = "state.9.exp_avg"; }),
           "tensor \"state.9.exp_avg\" is of a parameter that no group");
  contains(refusal_of_changed(
               adam, [](File& file) { tensor(file, "state.0.exp_avg").name = "state.x.exp_avg"; }),
           "tensor \"state.x.exp_avg\" must be called state.INDEX.KEY");
  contains(
      refusal_of_changed(
          adam, [](File& file) { tensor(file, "state.0.exp_avg").name = "state.00.exp_avg_sq"; }),
      "is there twice");
  contains(refusal_of_changed(adam,
                              [](File& file) {
                                const float steps = 1.5;
                                remove(file, "state.0.step");
                                add(file, "state.0.step", "F32", {},
                                    std::as_bytes(std::span(&steps, 1)));
                              }),
           "tensor \"state.0.step\" is no whole number");
  contains(refusal_of_changed(adam,
                              [](File& file) {
                                const std::array<float, 2> steps{1, 1};
                                remove(file, "state.0.step");
                                add(file, "state.0.step", "F32", {2},
                                    std::as_bytes(std::span(steps)));
                              }),
           "tensor \"state.0.step\" must be one number");
  contains(refusal_of_changed(adam, [](File& file) { file.metadata.erase("param_groups"); }),
           "its metadata has no 'param_groups'");
  contains(refusal_of_changed(adam, [](File& file) { file.metadata["param_groups"] = "[{"; }),
           "its 'param_groups' is no JSON");
  contains(refusal_of_changed(adam, [](File& file) { file.metadata["param_groups"] = "[1]"; }),
           "group 0 of 'param_groups' is no object");
  const auto with_params = [](Json params) {
    return refusal_of_changed(adam, [&](File& file) {
      change_groups(file, [&](Json& groups) { groups[0]["params"] = std::move(params); });
    });
  };
  contains(with_params({0, 1, 2, 3}), "its group 0 has 4 parameters, but the optimizer's has 5");
  contains(with_params({0, 1, 2, 3, 3}), "has the index 3 twice");
  contains(with_params({0, 1, 2, 3, -4}), "'params' that are no indices");
  const auto with_names = [](Json names) {
    return refusal_of_changed(adamw, [&](File& file) {
      change_groups(file, [&](Json& groups) { groups[0]["param_names"] = std::move(names); });
    });
  };
  contains(with_names({"head.weight"}), "has 2 'params', but 1 'param_names'");
  contains(with_names({"head.weight", "neck.weight"}),
           "its parameter \"neck.weight\" is not in the store");
  contains(with_names({"head.weight", "head.weight"}), "are the parameter \"head.weight\"");
  contains(with_names({"head.weight", "body.bias"}), "are the parameter \"body.bias\"");

  const checkpoints::Folder folder;
  std::filesystem::copy_file(data / "adam.torch.safetensors", folder / "cut");
  std::filesystem::resize_file(folder / "cut", std::filesystem::file_size(folder / "cut") - 1);
  contains(refusal(adam, folder / "cut"), "cut: ");
  contains(refusal(adam, folder / "nowhere"), "nowhere");
}

TEST_CASE("frozen and tied parameters beside PyTorch's") {
  const auto freeze = [](std::size_t which) {
    return [which](auto& model) {
      const auto& old = model[which];
      model[which] = {old.name(), {old.shape().begin(), old.shape().end()}, {.frozen = true}};
    };
  };
  // PyTorch was given it all the same, and never stepped it.
  CHECK(refusal(adam, data / "adam.torch.safetensors", freeze(torch_cases::late)) == "");
  contains(refusal(adam, data / "adam.torch.safetensors", freeze(1)),
           "is of the parameter \"body.bias\", which is frozen here");
  // Neither a frozen nor a tied one that PyTorch doesn't know is in the way.
  CHECK(refusal(adam, data / "adam.torch.safetensors", [](auto& model) {
          model.emplace_back("table", std::vector<std::size_t>{7},
                             zero::Attributes{.frozen = true});
          auto& tied = model.emplace_back("tied", std::vector<std::size_t>{2, 4},
                                          zero::Attributes{.alias = 4});
          tied.take_values(model[4].values());
        }) == "");
  contains(refusal(adam, data / "adam.torch.safetensors",
                   [](auto& model) { model.emplace_back("new", std::vector<std::size_t>{7}); }),
           "its group 0 has 5 parameters, but the optimizer's has 6");
}

TEST_CASE("what PyTorch has no optimizer for is not written for it") {
  const checkpoints::Folder folder;
  ranks::rethrow_any(ranks::run(1, [&](zero::InProcessCommunicator& comm) {
    auto model = torch_cases::model_of(adam);
    zero::ZeroSharded optimizer{zero::Lamb{}, model, comm, zero::BalancedPartition{}};
    zero::save(optimizer, folder / "lamb");
  }));
  const zero::Checkpoint lamb(folder / "lamb");
  CHECK_THROWS_WITH(zero::save_torch(lamb, folder / "state"),
                    Catch::Contains("its optimizer is not Adam, AdamW or Sgd") &&
                        Catch::Contains("zero-checkpoint weights"));
  CHECK(!std::filesystem::exists(folder / "state"));
}
