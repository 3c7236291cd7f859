// SPDX-License-Identifier: Apache-2.0
// The cases of data/torch/generate.py: a sharded optimizer takes over from PyTorch's.
#pragma once

#include <zero/checkpoint.hpp>
#include <zero/optim/adam.hpp>
#include <zero/optim/sgd.hpp>
#include <zero/zero_sharded.hpp>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "../ranks.hpp"

namespace torch_cases {

/// A safetensors file in memory.
struct File {
  std::vector<zero::TensorEntry> tensors{};
  std::map<std::string, std::string> metadata{};
  std::vector<std::byte> bytes{};  ///< of all tensors

  [[nodiscard]] const zero::TensorEntry* find(const std::string& name) const {
    const auto found = std::find_if(tensors.begin(), tensors.end(),
                                    [&](const zero::TensorEntry& t) { return t.name == name; });
    return found == tensors.end() ? nullptr : &*found;
  }
  [[nodiscard]] std::span<const std::byte> bytes_of(const zero::TensorEntry& tensor) const {
    return std::span(bytes).subspan(tensor.begin, tensor.end - tensor.begin);
  }
};

inline File read(const std::filesystem::path& path) {
  const zero::detail::ReadFile source(path);
  const zero::SafetensorsHeader header = zero::read_safetensors_header(source);
  File file{header.tensors, header.metadata, {}};
  file.bytes.resize(source.bytes() - header.data_begin);
  source.read_at(header.data_begin, file.bytes);
  return file;
}

struct Parameter {
  const char* name;
  std::vector<std::size_t> shape;
};
inline const std::vector<Parameter> parameters{{"body.weight", {4, 3}},
                                               {"body.bias", {4}},
                                               {"scale", {}},
                                               {"late", {3}},
                                               {"head.weight", {2, 4}}};
inline constexpr int steps_before = 4, steps_after = 3, late_steps_after = 2;
inline constexpr std::size_t late = 3;

/// @tparam Opt the optimizer, its groups with other options than PyTorch's had
template <class Opt, class T>
struct Case {
  using optimizer = Opt;
  using element = T;
  const char* name;
  std::vector<Opt> options;
  std::vector<std::size_t> groups;  ///< by parameter
};

/// `f(case)` for each.
template <class F>
void for_each(F&& f) {
  using zero::Adam, zero::AdamW, zero::Sgd;
  f(Case<Adam, double>{"adam", {Adam{}}, {0, 0, 0, 0, 0}});
  f(Case<AdamW, float>{
      "adamw", {AdamW{.amsgrad = true}, AdamW{.amsgrad = false}}, {0, 1, 1, 1, 0}});
  f(Case<Sgd, double>{"sgd", {Sgd{.momentum = 0.1}, Sgd{}, Sgd{}}, {0, 1, 2, 1, 0}});
  f(Case<Adam, float>{"redundancy", {Adam{}}, {0, 0, 0, 0, 0}});
}

template <class Case>
using Values = std::vector<std::vector<typename Case::element>>;  ///< by parameter

/// The recorded values or gradients of a step; empty where a parameter has none.
template <class Case>
Values<Case> recorded(const File& file, const std::string& what, int step) {
  using T = typename Case::element;
  Values<Case> all;
  for (const Parameter& parameter : parameters) {
    auto& values = all.emplace_back();
    const auto* tensor = file.find(what + "." + std::to_string(step) + "." + parameter.name);
    if (tensor == nullptr) continue;
    const auto bytes = file.bytes_of(*tensor);
    values.resize(bytes.size() / sizeof(T));
    std::memcpy(values.data(), bytes.data(), bytes.size());
  }
  return all;
}

template <class Case>
ranks::Model<typename Case::element> model_of(const Case& of) {
  ranks::Model<typename Case::element> model;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    model.emplace_back(parameters[i].name, parameters[i].shape, zero::Attributes{}, of.groups[i]);
  }
  return model;
}

template <class Case>
void set_values(ranks::Model<typename Case::element>& model, const Values<Case>& values) {
  for (std::size_t i = 0; i < model.size(); ++i) {
    std::copy(values[i].begin(), values[i].end(), model[i].values().begin());
  }
}

/// Small buckets, and the sum of what one rank has and zeros: no rounding that PyTorch hasn't.
template <class Case, class Model>
auto make_optimizer(const Case& of, Model& model, zero::InProcessCommunicator& comm) {
  return zero::ZeroSharded(zero::Groups<typename Case::optimizer>(of.options), model, comm,
                           zero::NoView{64}, zero::Settings{.gradient_scale = 1.0});
}

/// Loads CASE.torch.safetensors of `from` on `world` ranks, takes the recorded steps, and writes
/// into `to`: CASE.zero.safetensors, the state as loaded, and CASE.after.safetensors. Returns rank
/// 0's values after loading and after each step. `look(optimizer)` is called after loading, by
/// each rank, and what it throws is thrown.
template <class Case, class Look>
std::vector<Values<Case>> go_on(const Case& of, const std::filesystem::path& from, int world,
                                const std::filesystem::path& to, const Look& look) {
  const std::string name = of.name;
  const File record = read(from / (name + ".steps.safetensors"));
  std::vector<Values<Case>> history;
  ranks::rethrow_any(ranks::run(world, [&](zero::InProcessCommunicator& comm) {
    auto model = model_of(of);
    set_values<Case>(model, recorded<Case>(record, "values", 0));
    auto optimizer = make_optimizer(of, model, comm);
    const auto keep = [&] {
      if (comm.rank() != 0) return;
      auto& values = history.emplace_back();
      for (const auto& t : model) values.emplace_back(t.values().begin(), t.values().end());
    };
    // Rank 0 has read it all before it joins the next save.
    const auto write = [&](const char* ending) {
      const std::filesystem::path folder = to / (name + ".saved");
      zero::save(optimizer, folder);
      if (comm.rank() == 0) zero::save_torch(zero::Checkpoint(folder), to / (name + ending));
    };
    zero::load_torch(optimizer, from / (name + ".torch.safetensors"));
    look(optimizer);
    keep();
    write(".zero.safetensors");
    for (int step = 1; step <= steps_after; ++step) {
      const Values<Case> gradients = recorded<Case>(record, "gradients", step);
      for (std::size_t i = 0; i < model.size(); ++i) {
        model[i].own_gradient() = gradients[i];
        if (comm.rank() != 0) std::ranges::fill(model[i].own_gradient(), 0);
      }
      optimizer.step();
      keep();
    }
    write(".after.safetensors");
  }));
  return history;
}

}  // namespace torch_cases
