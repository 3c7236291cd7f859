// SPDX-License-Identifier: Apache-2.0
// What is saved on devices goes on on the host and back, at other stages and world sizes, to the
// bit: values and state, step counts, the dynamic loss scale. And what a device keeps of steps that
// were refused outlives a save, a load and a group that is added.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <limits>
#include <map>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "catch.hpp"
#include "checkpoint/folder.hpp"
#include "cuda/device_array.hpp"
#include "ranks.hpp"
#include "zero/checkpoint.hpp"
#include "zero/cuda.cuh"

namespace {

using checkpoints::Folder;
using ranks::Failure;
using zero::MemorySpace;
using zero::Stage1;
using zero::Stage3;
using Floats = std::vector<float>;

/// A name and a shape, and at stage 1 a gradient.
template <MemorySpace space>
class Node {
 public:
  static constexpr MemorySpace memory_space = space;
  using Array = std::conditional_t<space == MemorySpace::cuda, DeviceArray<float>, Floats>;

  Node(std::string name, std::size_t elements, int unit, bool has_gradient, std::size_t group = 0)
      : name_(std::move(name)), shape_{elements}, attributes_{.unit = unit}, group_(group) {
    if (has_gradient) gradient_ = std::make_shared<Array>(Floats(elements));
  }
  [[nodiscard]] const std::string& name() const { return name_; }
  [[nodiscard]] std::span<const std::size_t> shape() const { return shape_; }
  [[nodiscard]] std::span<float> values() const { return values_; }
  [[nodiscard]] std::span<float> gradient() const {
    if (gradient_ == nullptr) return {};
    return {gradient_->data(), gradient_->size()};
  }
  [[nodiscard]] const zero::Attributes& attributes() const { return attributes_; }
  [[nodiscard]] std::size_t group() const { return group_; }
  void rebind(std::span<float> values, std::shared_ptr<const void> owner) {
    values_ = values;
    owner_ = std::move(owner);
  }

 private:
  std::string name_;
  std::vector<std::size_t> shape_;
  zero::Attributes attributes_;
  std::size_t group_;
  std::span<float> values_{};
  std::shared_ptr<const void> owner_{};
  std::shared_ptr<Array> gradient_{};
};

constexpr int units = 2;
constexpr int steps = 7;
constexpr int saved_after = 4;
constexpr std::size_t large = 2;   // the parameter whose gradient overflows
constexpr std::size_t seldom = 3;  // is there in every second step

bool overflows(int step) { return step == 1 || step == 5; }

/// Sums of these over ranks are exact, so that all worlds take the same steps.
Floats gradient_of(std::size_t elements, int step, std::size_t i) {
  Floats made(elements);
  ranks::Draw(static_cast<std::uint32_t>(100 * step) + static_cast<std::uint32_t>(i))
      .fill(std::span<float>(made));
  for (float& x : made) x = std::round(x * 64) / 64;
  if (i == large && overflows(step)) made[200] = std::numeric_limits<float>::infinity();
  return made;
}

/// One rank's part of a run.
template <class Stage, MemorySpace space>
struct Rank {
  static constexpr bool on_device = space == MemorySpace::cuda;
  using Comm =
      std::conditional_t<on_device, zero::cuda::InProcessCommunicator, zero::InProcessCommunicator>;
  using Model = std::vector<Node<space>>;
  struct NoStream {};
  using Stream = std::conditional_t<on_device, zero::cuda::Stream, NoStream>;

  Rank(const Comm& a_comm, float first, double lr)
      : comm(a_comm),
        optimizer(zero::Adam{.lr = lr}, model, comm, zero::ParamView{512}, settings(first)) {}
  static Model make_model() {
    Model model;
    constexpr bool own = !Stage::shards_gradients;
    model.emplace_back("a", 40, 0, own);
    model.emplace_back("empty", 0, 0, own);
    model.emplace_back("large", 301, 1, own);
    model.emplace_back("seldom", 7, 1, own);
    return model;
  }
  static zero::Settings settings(float first) {
    zero::Settings settings;
    settings.initial_value = [first](std::string_view, std::size_t e) {
      return static_cast<double>(first) + 0.01 * static_cast<double>(e % 97);
    };
    settings.loss_scale = zero::LossScale::dynamic(1024);
    settings.loss_scale->interval = 2;
    settings.poison_padding = true;
    return settings;
  }

  void write(int step, std::size_t i) {
    const Floats made = gradient_of(model[i].shape()[0], step, i);
    const auto fill = [&](std::span<float> to) {
      if (to.empty()) return;
      if constexpr (on_device) {
        zero::cuda::check(
            cudaMemcpy(to.data(), made.data(), to.size_bytes(), cudaMemcpyHostToDevice),
            "cudaMemcpy");
      } else {
        std::copy(made.begin(), made.end(), to.begin());
      }
    };
    if constexpr (Stage::shards_gradients) {
      const auto lease = optimizer.gradient(i);
      fill(lease.values());
    } else {
      fill(model[i].gradient());
    }
  }
  zero::Outcome step() {
    if constexpr (on_device) {
      return optimizer.step(stream).outcome();
    } else {
      return optimizer.step().outcome();
    }
  }
  void train(int number) {
    for (int unit = units; unit-- > 0;) {
      optimizer.acquire(unit);
      for (std::size_t i = 0; i < model.size(); ++i) {
        if (model[i].attributes().unit != unit) continue;
        if (i == seldom && number % 2 == 1) {
          optimizer.mark_absent(i);
          continue;
        }
        write(number, i);
        if constexpr (on_device) {
          optimizer.mark_ready(i, zero::cuda::StreamView());
        } else {
          optimizer.mark_ready(i);
        }
      }
      optimizer.release(unit);
    }
    const std::int64_t before = applied;
    const zero::Outcome outcome = step();
    if (outcome.applied == overflows(number)) throw std::runtime_error("applied or skipped");
    applied = before + (outcome.applied ? 1 : 0);
    if (outcome.step != applied) throw std::runtime_error("number of the step");
  }
  /// The optimizer has taken as many steps as there were when it was saved.
  void require_loaded(const zero::CheckpointInfo& info) {
    applied = info.step;
    if (optimizer.steps() != info.step) throw std::runtime_error("steps");
    for (std::size_t i = 0; i < model.size(); ++i) {
      if (optimizer.steps(i) != info.parameters[i].steps) throw std::runtime_error("step counts");
    }
    if (optimizer.loss_scale() != info.loss_scale->scale) throw std::runtime_error("loss scale");
  }

  Comm comm;
  Model model = make_model();
  Stream stream{};
  zero::ZeroSharded<zero::Adam, Model&, Comm&, zero::ContiguousPartition, zero::ParamView, Stage>
      optimizer;
  std::int64_t applied = 0;
};

template <MemorySpace space, class F>
void each(int world, F&& body) {
  if constexpr (space == MemorySpace::cuda) {
    zero::cuda::run_ranks(world, body);
  } else {
    zero::run_ranks(world, body);
  }
}

/// All that a checkpoint holds, whoever saved it.
std::map<std::string, std::string> contents(const std::filesystem::path& folder) {
  const zero::Checkpoint saved(folder);
  saved.verify();
  zero::CheckpointInfo info = saved.info();
  info.world = 1;
  std::map<std::string, std::string> all{{"description", zero::detail::to_json(info).dump()}};
  for (std::size_t i = 0; i < info.parameters.size(); ++i) {
    for (std::size_t a = 0; a < saved.arrays(); ++a) {
      if (saved.array(i, a).pieces.empty()) continue;
      std::string& bytes = all[info.parameters[i].name + " " + std::to_string(a)];
      bytes.resize(info.parameters[i].elements() * sizeof(float));
      saved.read(i, a, 0, zero::ElementType::float32, std::as_writable_bytes(std::span(bytes)));
    }
  }
  return all;
}

/// What two checkpoints differ in first; nothing where they are the same.
using Contents = std::map<std::string, std::string>;
std::string difference(const Contents& got, const Contents& want) {
  for (const auto& [name, bytes] : want) {
    const auto found = got.find(name);
    if (found == got.end()) return "no " + name;
    if (found->second == bytes) continue;
    return name + (name == "description" ? ": " + found->second + " in place of " + bytes : "");
  }
  return got.size() == want.size() ? "" : "more than there should be";
}

/// Trains to the end, from the beginning or from `load`; saves amid that and at the end.
template <class Stage, MemorySpace space>
void run(int world, const std::filesystem::path& load, const std::filesystem::path& amid,
         const std::filesystem::path& end) {
  each<space>(world, [&](auto& comm) {
    const bool loads = !load.empty();
    Rank<Stage, space> rank(comm, loads ? 5.0F : 0.5F, loads ? 3 : 0.01);
    if (loads) {
      // Not from nothing: what the device counted before is forgotten.
      rank.train(0);
      zero::load(rank.optimizer, load);
      rank.require_loaded(zero::Checkpoint(load).info());
    }
    for (int step = loads ? saved_after : 0; step < steps; ++step) {
      if (step == saved_after && !amid.empty()) zero::save(rank.optimizer, amid);
      rank.train(step);
    }
    zero::save(rank.optimizer, end);
  });
}

constexpr MemorySpace host = MemorySpace::host;
constexpr MemorySpace device = MemorySpace::cuda;

}  // namespace

TEST_CASE("device checkpoints: between devices and the host, stages 1 and 3, to the bit",
          "[cuda]") {
  const Folder folder;
  run<Stage1, host>(1, {}, folder / "of host", folder / "want");
  const auto want = contents(folder / "want");
  const auto want_amid = contents(folder / "of host");
  run<Stage1, device>(3, {}, folder / "of stage 1", folder / "end");
  CHECK(difference(contents(folder / "of stage 1"), want_amid) == "");
  CHECK(difference(contents(folder / "end"), want) == "");
  run<Stage3, device>(2, {}, folder / "of stage 3", folder / "end");
  CHECK(difference(contents(folder / "of stage 3"), want_amid) == "");
  CHECK(difference(contents(folder / "end"), want) == "");
  for (const char* const from : {"of host", "of stage 1", "of stage 3"}) {
    for (const int world : {1, 2, 3}) {
      INFO(from << ", " << world);
      run<Stage1, device>(world, folder / from, {}, folder / "end");
      CHECK(difference(contents(folder / "end"), want) == "");
      run<Stage3, device>(world, folder / from, {}, folder / "end");
      CHECK(difference(contents(folder / "end"), want) == "");
      run<Stage1, host>(world, folder / from, {}, folder / "end");
      CHECK(difference(contents(folder / "end"), want) == "");
    }
  }
}

TEST_CASE("device checkpoints: what save_async copied is what was there at the call", "[cuda]") {
  const Folder folder;
  each<device>(2, [&](auto& comm) {
    Rank<Stage3, device> rank(comm, 0.5F, 0.01);
    for (int step = 0; step < 3; ++step) rank.train(step);
    zero::save(rank.optimizer, folder / "sync");
    auto pending = zero::save_async(rank.optimizer, folder / "async");
    for (int step = 3; step < 6; ++step) rank.train(step);
    pending.finish();
  });
  CHECK((checkpoints::files_of(folder / "async") == checkpoints::files_of(folder / "sync")));
}

namespace {

/// One rank has options that make no sense: all are told of that step.
template <class R>
void refuse(R& rank) {
  const double lr = rank.optimizer.group(0).lr;
  if (rank.comm.rank() == rank.comm.size() - 1) rank.optimizer.group(0).lr = -1;
  const Failure failure = ranks::attempt([&] { (void)rank.step(); });
  if (failure.kind != Failure::Kind::usage || failure.text.find("lr") == std::string::npos) {
    throw std::runtime_error("not told: " + failure.text);
  }
  rank.optimizer.group(0).lr = lr;
}

/// @param refuses before and after each verb that stands between steps
template <class Stage, MemorySpace space>
void run_verbs(int world, const std::filesystem::path& folder, bool refuses) {
  each<space>(world, [&](auto& comm) {
    Rank<Stage, space> rank(comm, 0.5F, 0.01);
    const auto may_refuse = [&] {
      if (refuses) refuse(rank);
    };
    rank.train(0);
    may_refuse();
    may_refuse();
    rank.model.emplace_back("new", 50, 1, !Stage::shards_gradients, 1);
    rank.optimizer.add_param_group({.lr = 0.02});
    may_refuse();
    rank.train(1);
    may_refuse();
    zero::save(rank.optimizer, folder / "amid");
    may_refuse();
    rank.train(2);
    may_refuse();
    zero::load(rank.optimizer, folder / "amid");
    rank.require_loaded(zero::Checkpoint(folder / "amid").info());
    may_refuse();
    rank.train(3);
    rank.train(4);
    zero::save(rank.optimizer, folder / "end");
  });
}

}  // namespace

TEST_CASE("device checkpoints: refused steps are told before and after a group, a save and a load",
          "[cuda]") {
  const Folder folder;
  run_verbs<Stage1, host>(1, folder / "host", false);
  const auto want = contents(folder / "host" / "end");
  for (const int world : {1, 3}) {
    INFO("world " << world);
    run_verbs<Stage1, device>(world, folder / "stage 1", true);
    CHECK(difference(contents(folder / "stage 1" / "end"), want) == "");
    run_verbs<Stage3, device>(world, folder / "stage 3", true);
    CHECK(difference(contents(folder / "stage 3" / "end"), want) == "");
  }
}
