// SPDX-License-Identifier: Apache-2.0
#include "config.hpp"

#include <cstdio>
#include <utility>

#include "input_error.hpp"

namespace bert {

const std::array<Config, 4>& published() {
  static const std::array<Config, 4> all{{{"tiny", 2, 128, 2, 512},
                                          {"mini", 4, 256, 4, 1024},
                                          {"base", 12, 768, 12, 3072},
                                          {"large", 24, 1024, 16, 4096}}};
  return all;
}

Config config_of(std::string_view name) {
  std::string names;
  for (const Config& config : published()) {
    if (config.name == name) return config;
    names += (names.empty() ? "" : ", ") + config.name;
  }
  throw InputError("--model " + std::string(name) + ": there is no such model; there are " + names);
}

std::vector<Shape> shapes_of(const Config& config, Head head) {
  std::vector<Shape> shapes;
  const std::size_t hidden = config.hidden;
  int unit = 0;
  const auto linear = [&](const std::string& name, std::size_t outputs, std::size_t inputs) {
    shapes.push_back({name + ".weight", {outputs, inputs}, true, unit});
    shapes.push_back({name + ".bias", {outputs}, false, unit});
  };
  const auto norm = [&](const std::string& name) {
    shapes.push_back({name + ".weight", {hidden}, false, unit});
    shapes.push_back({name + ".bias", {hidden}, false, unit});
  };
  const std::string embeddings = "bert.embeddings.";
  const auto embedding = [&](const char* name, std::size_t rows) {
    shapes.push_back({embeddings + name + ".weight", {rows, hidden}, true, unit});
  };
  embedding("word_embeddings", config.vocabulary);
  ++unit;
  embedding("position_embeddings", config.positions);
  embedding("token_type_embeddings", config.segments);
  norm(embeddings + "LayerNorm");
  for (std::size_t l = 0; l < config.layers; ++l) {
    ++unit;
    const std::string layer = "bert.encoder.layer." + std::to_string(l) + ".";
    linear(layer + "attention.self.query", hidden, hidden);
    linear(layer + "attention.self.key", hidden, hidden);
    linear(layer + "attention.self.value", hidden, hidden);
    linear(layer + "attention.output.dense", hidden, hidden);
    norm(layer + "attention.output.LayerNorm");
    linear(layer + "intermediate.dense", config.intermediate, hidden);
    linear(layer + "output.dense", hidden, config.intermediate);
    norm(layer + "output.LayerNorm");
  }
  ++unit;
  if (head == Head::pooler) {
    linear("bert.pooler.dense", hidden, hidden);
  } else {
    shapes.push_back({"cls.predictions.bias", {config.vocabulary}, false, unit});
    linear("cls.predictions.transform.dense", hidden, hidden);
    norm("cls.predictions.transform.LayerNorm");
  }
  return shapes;
}

std::string describe(const Config& config, Head head) {
  struct Group {
    std::string name;
    std::size_t tensors = 0, elements = 0;
  };
  std::array<Group, 5> groups{{{"embeddings"},
                               {"attention"},
                               {"feed-forward"},
                               {"layer norms"},
                               {head == Head::pooler ? "pooler" : "masked-LM head (tied)"}}};
  Group all{"total"};
  for (const Shape& shape : shapes_of(config, head)) {
    const auto has = [&](const char* part) { return shape.name.find(part) != std::string::npos; };
    const std::size_t index = has("embeddings")    ? 0
                              : !has("encoder")    ? 4
                              : has("LayerNorm")   ? 3
                              : has(".attention.") ? 1
                                                   : 2;
    for (Group* group : {&groups[index], &all}) {
      ++group->tensors;
      group->elements += shape.elements();
    }
  }
  char line[128];
  std::snprintf(line, sizeof line,
                "BERT-%s: %zu layers, hidden %zu, %zu heads, intermediate %zu, "
                "vocabulary %zu\n",
                config.name.c_str(), config.layers, config.hidden, config.heads,
                config.intermediate, config.vocabulary);
  std::string text = line;
  const auto add = [&](const Group& group) {
    std::snprintf(line, sizeof line, "  %-24s %4zu tensors %13zu parameters\n", group.name.c_str(),
                  group.tensors, group.elements);
    text += line;
  };
  for (const Group& group : groups) add(group);
  add(all);
  return text;
}

}  // namespace bert
