// SPDX-License-Identifier: Apache-2.0
// Steps through libtorch's tensors: against the same over plain pointers, and against libtorch's
// own optimizer with an all-reduce.
#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <torch/csrc/autograd/generated/variable_factories.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adam.h>
#if ZERO_BENCH_GLOO
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#endif

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>
#include <zero/interop/torch.hpp>
#include <zero/zero.hpp>

#include "bert_shapes.hpp"
#include "given_memory.hpp"
#include "harness.hpp"
#include "table.hpp"
#include "team.hpp"

namespace bench {
namespace {

constexpr int world = 2;
constexpr std::size_t spare = 1024;  // room for the padding of a few buckets

std::string milliseconds(const std::vector<double>& times) {
  return text(1e3 * spread_of(times).median, "ms");
}

/// One rank's tensors with gradients, as libtorch allocates them.
struct Tensors {
  std::vector<at::Tensor> values{}, gradients{};

  explicit Tensors(const std::vector<Shape>& shapes) {
    for (const Shape& shape : shapes) {
      const std::vector<std::int64_t> extents(shape.extents.begin(), shape.extents.end());
      values.push_back(torch::full(extents, 1e-2F).requires_grad_());
      gradients.push_back(torch::full(extents, 1e-3F));
      values.back().mutable_grad() = gradients.back();
    }
  }
};

/// The same sizes and gradients, as plain memory that may be moved.
struct Plain {
  std::string label;
  std::vector<std::size_t> extents;
  std::span<float> held;
  const float* gradients;
  std::shared_ptr<const void> owner{};

  [[nodiscard]] const std::string& name() const { return label; }
  [[nodiscard]] std::span<const std::size_t> shape() const { return extents; }
  [[nodiscard]] std::span<float> values() const { return held; }
  [[nodiscard]] std::span<float> gradient() const {
    return {const_cast<float*>(gradients), held.size()};
  }
  void rebind(std::span<float> values, std::shared_ptr<const void> by) {
    held = values;
    owner = std::move(by);
  }
};
std::vector<Plain> plain(const Tensors& tensors) {
  std::vector<Plain> store;
  for (std::size_t i = 0; i < tensors.values.size(); ++i) {
    const at::Tensor& tensor = tensors.values[i];
    const auto sizes = tensor.sizes();
    store.push_back({std::to_string(i),
                     {sizes.begin(), sizes.end()},
                     {tensor.data_ptr<float>(), static_cast<std::size_t>(tensor.numel())},
                     tensors.gradients[i].data_ptr<float>()});
  }
  return store;
}

zero::Settings unchecked(std::pmr::memory_resource* memory) {
  zero::Settings settings;
  settings.check_values = false;  // they are equal, and reading them all takes a while
  if (memory != nullptr) settings.memory = memory;
  return settings;
}

/// A world of optimizers, each on a thread.
template <class Store>
class Sharded {
 public:
  /// @param memory of each rank, or null
  Sharded(Team& team, std::array<std::optional<Store>, world>& stores,
          std::array<std::pmr::memory_resource*, world> memory = {})
      : team_(&team) {
    team.run([&](int r) {
      const auto rank = static_cast<std::size_t>(r);
      optimizers_[rank].emplace(zero::Adam{}, *stores[rank], world_.communicator(r),
                                zero::ParamView{}, unchecked(memory[rank]));
    });
  }
  void step() {
    team_->run([&](int r) { optimizers_[static_cast<std::size_t>(r)]->step(); });
  }

 private:
  using Optimizer = zero::ZeroSharded<zero::Adam, Store&, zero::InProcessCommunicator,
                                      zero::ContiguousPartition, zero::ParamView>;
  Team* team_;
  zero::InProcessWorld world_{world};
  std::array<std::optional<Optimizer>, world> optimizers_{};
};

using Params = zero::BasicTorchParams<float>;

/// Both optimizers have the same pages, one after the other.
void against_pointers(Sheet& sheet, const std::vector<Shape>& shapes, int repeats,
                      std::optional<Bound> bound, const std::string& what) {
  Team team(world);
  const std::size_t elements = elements_of(shapes) + spare * 64;
  std::array<std::optional<Tensors>, world> tensors{};
  std::array<std::optional<Params>, world> params{};
  std::array<std::optional<std::vector<Plain>>, world> pointers{};
  std::array<std::array<zero::HostArray<float>, 3>, world> pages{};
  std::array<std::optional<GivenMemory>, world> first{}, second{};
  std::array<std::pmr::memory_resource*, world> of_first{}, of_second{};
  team.run([&](int r) {
    const auto rank = static_cast<std::size_t>(r);
    tensors[rank].emplace(shapes);
    pointers[rank].emplace(plain(*tensors[rank]));
    params[rank].emplace(tensors[rank]->values);
    for (auto& array : pages[rank]) array = zero::HostArray<float>(elements);
    const std::vector arrays{&pages[rank][0], &pages[rank][1], &pages[rank][2]};
    of_first[rank] = &first[rank].emplace(arrays);
    of_second[rank] = &second[rank].emplace(arrays);
  });
  Sharded<std::vector<Plain>> raw(team, pointers, of_first);
  Sharded<Params> adapted(team, params, of_second);
  const auto times = [repeats](auto& optimizers) {
    return [&optimizers, repeats] {
      for (int i = 0; i < repeats; ++i) optimizers.step();
    };
  };
  const Pairs pairs = run_pairs(times(adapted), times(raw), 21);
  sheet.ratio("", pairs, bound,
              what + ", K=2: through tensors " + milliseconds(pairs.subject) +
                  ", through pointers " + milliseconds(pairs.reference));
}

const Row adapter("torch/adapter", [](Sheet& sheet) {
  against_pointers(sheet, bert_large_shapes(), 1, at_most(1.05), "BERT-large");
});
const Row small("torch/adapter_tiny", [](Sheet& sheet) {
  against_pointers(sheet, bert::shapes_of(bert::config_of("tiny"), bert::Head::pooler), 50, {},
                   "50 steps of BERT-tiny");
});

/// Training at stage 2, with hooks and without.
class Trained {
 public:
  Trained(Team& team, bool hooked) : team_(&team) {
    team.run([&](int r) {
      Rank& rank = ranks_[static_cast<std::size_t>(r)];
      for (int i = 0; i < layers; ++i) {
        rank.net.push_back(torch::nn::Linear(width, width));
        for (const at::Tensor& parameter : rank.net.back()->parameters()) {
          rank.tensors.push_back(parameter);
        }
      }
      rank.params.emplace(rank.tensors);
      zero::InProcessCommunicator comm = world_.communicator(r);
      zero::broadcast_values(*rank.params, comm);
      rank.optimizer.emplace(zero::Adam{}, *rank.params, std::move(comm), zero::ParamView{4 << 20},
                             zero::Stage2{});
      if (hooked) rank.hooks.emplace(*rank.optimizer);
      rank.input = torch::full({samples, width}, 1e-2F * static_cast<float>(r + 1));
    });
  }
  void step() {
    team_->run([&](int r) {
      Rank& rank = ranks_[static_cast<std::size_t>(r)];
      at::Tensor x = rank.input;
      for (auto& layer : rank.net) x = torch::relu(layer->forward(x));
      x.mean().backward();
      rank.optimizer->step();
    });
  }
  /// How much of the time that reductions took is hidden behind backward.
  [[nodiscard]] double hidden() const { return ranks_[0].optimizer->traffic().reduce.hidden(); }

 private:
  static constexpr int layers = 8, width = 1024, samples = 256;
  using Optimizer = zero::ZeroSharded<zero::Adam, Params&, zero::InProcessCommunicator,
                                      zero::ContiguousPartition, zero::ParamView, zero::Stage2>;
  struct Rank {
    std::vector<torch::nn::Linear> net{};
    std::vector<at::Tensor> tensors{};
    at::Tensor input{};
    std::optional<Params> params{};
    std::optional<Optimizer> optimizer{};
    std::optional<zero::TorchHooks> hooks{};
  };
  Team* team_;
  zero::InProcessWorld world_{world};
  std::array<Rank, world> ranks_{};
};

const Row overlap("torch/hooks", [](Sheet& sheet) {
  Team team(world);
  Trained hooked(team, true), plain(team, false);
  const Pairs pairs = run_pairs([&] { hooked.step(); }, [&] { plain.step(); }, 21);
  sheet.ratio("", pairs, {},
              "forward, backward and step of 8 layers of 1024 x 1024, K=2, Stage2: with hooks " +
                  milliseconds(pairs.subject) + " (" + text(100 * hooked.hidden(), "%") +
                  " of reducing hidden), without " + milliseconds(pairs.reference) + " (" +
                  text(100 * plain.hidden(), "%") + ")");
});

#if ZERO_BENCH_GLOO
/// What C++ has otherwise: a whole `torch::optim::Adam` on each rank, and gradients that lie in
/// buckets of 25 MiB (as those of DDP with gradient_as_bucket_view) which Gloo sums.
class Replicated {
 public:
  explicit Replicated(Team& team, const std::vector<Shape>& shapes) : team_(&team) {
    const auto store = c10::make_intrusive<c10d::HashStore>();
    team.run([&](int r) {
      Rank& rank = ranks_[static_cast<std::size_t>(r)];
      auto options = c10d::ProcessGroupGloo::Options::create();
      options->devices.push_back(c10d::ProcessGroupGloo::createDeviceForHostname("127.0.0.1"));
      rank.group = c10::make_intrusive<c10d::ProcessGroupGloo>(store, r, world, options);
      std::vector<at::Tensor> values;
      for (const Shape& shape : shapes) {
        const std::vector<std::int64_t> extents(shape.extents.begin(), shape.extents.end());
        values.push_back(torch::full(extents, 1e-2F).requires_grad_());
      }
      constexpr std::int64_t bucket_elements = (std::int64_t{25} << 20) / 4;
      for (std::size_t begin = 0; begin < values.size();) {
        std::int64_t sum = 0;
        std::size_t end = begin;
        while (end < values.size() &&
               (end == begin || sum + values[end].numel() <= bucket_elements))
          sum += values[end++].numel();
        const at::Tensor bucket = torch::full({sum}, 1e-3F);
        for (std::int64_t at = 0; begin < end; ++begin) {
          const std::int64_t count = values[begin].numel();
          values[begin].mutable_grad() =
              bucket.slice(0, at, at + count).view(values[begin].sizes());
          at += count;
        }
        rank.buckets.push_back(bucket);
      }
      rank.adam.emplace(values, torch::optim::AdamOptions(1e-3));
    });
  }
  void step() {
    team_->run([&](int r) {
      Rank& rank = ranks_[static_cast<std::size_t>(r)];
      std::vector<c10::intrusive_ptr<c10d::Work>> works;
      for (const at::Tensor& bucket : rank.buckets) {
        std::vector<at::Tensor> one{bucket};
        works.push_back(rank.group->allreduce(one));
      }
      for (std::size_t b = 0; b < works.size(); ++b) {
        works[b]->wait();
        rank.buckets[b].mul_(1.0 / world);
      }
      rank.adam->step();
    });
  }

 private:
  struct Rank {
    c10::intrusive_ptr<c10d::ProcessGroupGloo> group{};
    std::vector<at::Tensor> buckets{};
    std::optional<torch::optim::Adam> adam{};
  };
  Team* team_;
  std::array<Rank, world> ranks_{};
};

const Row gloo("torch/gloo", [](Sheet& sheet) {
  Team team(world);
  const std::vector<Shape> shapes = bert_large_shapes();
  std::array<std::optional<Params>, world> params{};
  team.run([&](int r) { params[static_cast<std::size_t>(r)].emplace(Tensors(shapes).values); });
  Sharded<Params> sharded(team, params);
  Replicated replicated(team, shapes);
  const Pairs pairs = run_pairs([&] { sharded.step(); }, [&] { replicated.step(); });
  sheet.ratio("", pairs, {},
              "BERT-large, K=2: sharded zero::Adam " + milliseconds(pairs.subject) +
                  ", torch::optim::Adam and Gloo's all-reduce " + milliseconds(pairs.reference));
});
#endif

}  // namespace
}  // namespace bench

int main(int argc, char** argv) {
  at::set_num_threads(1);  // a rank is a thread
  return bench::run(argc, argv, ZERO_BENCH_JSON);
}
