// How much memory a rank will need, before anything is allocated: a model by name or by its number
// of parameters, replicated and in stages 1 to 3, with what each sends, and whether sharding pays.
#include <CLI/CLI.hpp>
#include <array>
#include <cinttypes>
#include <cstdint>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <zero/zero.hpp>

namespace {

struct Arguments {
  std::string model{}, precision = "mixed", optimizer = "adam";
  std::uint64_t parameters = 0;
  int ranks = 8;
  double memory_gb = 0;
  bool json = false;
};

/// A name and what an element costs.
struct Kind {
  const char* name;
  zero::ElementBytes bytes;
};

/// What an optimizer's elements cost, by the name of a precision.
template <class Opt>
std::array<Kind, 5> precisions(const Opt& optimizer) {
  using zero::bfloat16, zero::element_bytes;
  return {{{"float", element_bytes(optimizer)},
           {"double", element_bytes<double>(optimizer)},
           {"mixed", element_bytes<bfloat16>(optimizer)},
           {"bfloat16-slots", element_bytes<bfloat16, zero::Bfloat16Slots>(optimizer)},
           {"stochastic", element_bytes<bfloat16, zero::StochasticPrecision>(optimizer)}}};
}

zero::ElementBytes bytes_of(const Arguments& arguments) {
  const auto find = [&](const auto& optimizer) {
    std::string known;
    for (const Kind& kind : precisions(optimizer)) {
      if (kind.name == arguments.precision) return kind.bytes;
      known += (known.empty() ? "" : ", ") + std::string(kind.name);
    }
    throw zero::UsageError("there is no precision '" + arguments.precision + "'; there are " +
                           known);
  };
  const std::string& name = arguments.optimizer;
  if (name == "adam") return find(zero::Adam{});
  if (name == "adamw") return find(zero::AdamW{});
  if (name == "amsgrad") return find(zero::Adam{.amsgrad = true});
  if (name == "sgd") return find(zero::Sgd{});
  if (name == "momentum") return find(zero::Sgd{.momentum = .9});
  if (name == "lamb") return find(zero::Lamb{});
  if (name == "muon") return find(zero::Muon{});
  throw zero::UsageError("there is no optimizer '" + name +
                         "'; there are adam, adamw, amsgrad, sgd, momentum, lamb, muon");
}

double gb(std::uint64_t bytes) { return static_cast<double>(bytes) / 1e9; }

void print(const Arguments& arguments, const zero::ElementBytes& bytes, std::uint64_t count,
           const std::string& advice) {
  std::printf("%s: %" PRIu64
              " parameters, %s, %s: an element takes %zu bytes, its gradient %zu, its master copy "
              "%zu, its state %zu; %d ranks\n\n",
              arguments.model.c_str(), count, arguments.optimizer.c_str(),
              arguments.precision.c_str(), bytes.parameter, bytes.gradient, bytes.master,
              bytes.state, arguments.ranks);
  std::printf("GB a rank      parameters  gradients    master     state     total   sent a step\n");
  for (int stage = 0; stage <= 3; ++stage) {
    const zero::Estimate of = zero::estimate(bytes, count, arguments.ranks, stage);
    const std::string name = stage == 0 ? "replicated" : "stage " + std::to_string(stage);
    std::printf("%-13s  %10.3f %10.3f %9.3f %9.3f %9.3f     %9.3f\n", name.c_str(),
                gb(of.parameters), gb(of.gradients), gb(of.master), gb(of.state), gb(of.total()),
                gb(of.traffic.bytes));
  }
  std::printf(
      "\nNeither activations nor buffers are counted: zero::Replicated keeps 1/K of the gradients' "
      "sums\nbesides, views and traffic take buckets. (zero::ZeroSharded has stages 0 and 1 "
      "today.)\n%s\n",
      advice.c_str());
}

void print_json(const Arguments& arguments, const zero::ElementBytes& bytes, std::uint64_t count,
                const std::string& advice) {
  nlohmann::ordered_json all{{"parameters", count}, {"ranks", arguments.ranks}};
  for (int stage = 0; stage <= 3; ++stage) {
    const zero::Estimate of = zero::estimate(bytes, count, arguments.ranks, stage);
    all["stages"].push_back({{"stage", stage},
                             {"parameters", of.parameters},
                             {"gradients", of.gradients},
                             {"master", of.master},
                             {"state", of.state},
                             {"total", of.total()},
                             {"sent", of.traffic.bytes}});
  }
  all["advice"] = advice;
  std::printf("%s\n", all.dump(2).c_str());
}

}  // namespace

int main(int argc, char** argv) {
  Arguments arguments;
  CLI::App app{"Memory of one rank before anything is allocated (ZeRO, arXiv:1910.02054)"};
  app.add_option("--model", arguments.model, "a model's name, such as bert-large (the default)");
  app.add_option("--parameters", arguments.parameters, "or how many parameters it has")
      ->check([](const std::string& text) -> std::string {
        return text.starts_with('-') ? "must not be negative" : "";
      })
      ->excludes("--model");
  app.add_option("--ranks", arguments.ranks, "data-parallel ranks")->capture_default_str();
  app.add_option("--precision", arguments.precision,
                 "float, double, or of bfloat16 parameters: mixed, bfloat16-slots, stochastic")
      ->capture_default_str();
  app.add_option("--optimizer", arguments.optimizer,
                 "adam, adamw, amsgrad, sgd, momentum, lamb, muon")
      ->capture_default_str();
  app.add_option("--memory", arguments.memory_gb, "GB that a rank has for all this");
  app.add_flag("--json", arguments.json, "bytes, for programs");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  }
  try {
    const bool by_count = app.count("--parameters") > 0;
    if (by_count) arguments.model = "a model";
    if (arguments.model.empty()) arguments.model = "bert-large";
    const std::uint64_t count =
        by_count ? arguments.parameters : zero::model_parameters(arguments.model);
    const zero::ElementBytes bytes = bytes_of(arguments);
    std::optional<std::uint64_t> memory;
    if (app.count("--memory") > 0) {
      const double gigabytes = arguments.memory_gb;
      if (!(gigabytes >= 0 && gigabytes < 1e10)) {
        throw zero::UsageError("--memory " + std::to_string(gigabytes) +
                               ": give GB from 0 to below 1e10");
      }
      memory = static_cast<std::uint64_t>(gigabytes * 1e9);
    }
    if (count == 0) throw zero::UsageError("--parameters 0: give at least 1");
    const std::string advice = zero::advice(bytes, count, arguments.ranks, memory);
    (arguments.json ? print_json : print)(arguments, bytes, count, advice);
  } catch (const zero::UsageError& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 2;
  }
  return 0;
}
