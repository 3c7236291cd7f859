// SPDX-License-Identifier: Apache-2.0
// Kernels alone: the fused update, and the pass that finds the gradients' norm.
#include <cstddef>
#include <optional>
#include <span>
#include <string>
#include <vector>
#include <zero/bfloat16.hpp>
#include <zero/cuda/detail/fragment_table.cuh>
#include <zero/cuda/detail/look.cuh>
#include <zero/cuda/detail/update.cuh>
#include <zero/cuda/optim.cuh>
#include <zero/precision.hpp>

#include "benchmarks.hpp"
#include "device.hpp"
#include "models.hpp"
#include "rows.hpp"

namespace bench {

namespace {

namespace cuda = zero::cuda::detail;
using zero::cuda::DeviceArray;
using zero::cuda::StreamView;

int pairs_of(bool tiny) { return tiny ? 1 : 15; }

/// A model, and where its tensors begin among slots and masters: back to back.
template <class T>
class Fragments {
 public:
  explicit Fragments(const Model& model) : model_(model) {
    std::vector<cuda::DeviceFragment<T>> fragments;
    std::size_t begin = 0;
    for (std::size_t k = 0; k < model.tensors.size(); ++k) {
      fragments.push_back({model_.values(k), model_.gradient(k), begin, model.tensors[k], 0,
                           static_cast<std::uint32_t>(k)});
      begin += model.tensors[k];
    }
    table_ = cuda::FragmentTable<T>({fragments}, zero::cuda::device_resource());
  }
  [[nodiscard]] cuda::FragmentRange<T> all() const { return table_.of({0, 1}); }

 private:
  DeviceModel<T> model_;
  cuda::FragmentTable<T> table_{};
};

/// All of a model and of its state, on one rank.
template <class Rule, class T>
class Shard {
  using S = zero::detail::Storage<T, zero::MixedPrecision>;
  using Slot = typename S::slot;
  using Step = cuda::ParameterStep<cuda::rule_scalars<Rule, S>>;

 public:
  static std::size_t moved_bytes(const Rule& rule, std::size_t elements) {
    const std::size_t values =
        S::has_master ? 2 * sizeof(typename S::master) + sizeof(T) : 2 * sizeof(T);
    return elements * (sizeof(T) + values + 2 * sizeof(Slot) * zero::used_slots(rule));
  }
  static std::size_t memory(const Rule& rule, std::size_t elements) {
    const std::size_t master = S::has_master ? sizeof(typename S::master) : 0;
    return elements * (2 * sizeof(T) + master + sizeof(Slot) * zero::used_slots(rule));
  }

  Shard(const Rule& rule, const Model& model)
      : fragments_(model), master_(S::has_master ? model.elements() : 0) {
    for (std::size_t s = 0; s < zero::used_slots(rule); ++s) state_.emplace_back(model.elements());
    DeviceModel<T>::fill(master_);
    std::vector<Step> steps(model.tensors.size());
    for (Step& step : steps) {
      step = {.scalars = rule.template scalars<typename S::arithmetic>(1), .t = 1, .stepping = 1};
    }
    steps_ = cuda::device_copy(std::span<const Step>(steps), zero::cuda::device_resource());
    const cuda::StepState step{.scale = 1, .skip = 0};
    step_ = cuda::device_copy(std::span<const cuda::StepState>(&step, 1),
                              zero::cuda::device_resource());
    const auto all = fragments_.all();
    task_.fragments = all.fragments;
    task_.chunks = all.chunks;
    task_.chunk_count = all.chunk_count;
    if constexpr (S::has_master) task_.master = master_.data();
    for (std::size_t s = 0; s < state_.size(); ++s) task_.state[s] = state_[s].data();
    task_.steps = steps_.data();
    task_.step = step_.data();
  }

  void operator()(StreamView stream) const { cuda::update(task_, stream); }

 private:
  Fragments<T> fragments_;
  DeviceArray<typename S::arithmetic> master_;
  std::vector<DeviceArray<Slot>> state_{};
  DeviceArray<Step> steps_{};
  DeviceArray<cuda::StepState> step_{};
  cuda::UpdateTask<Rule, S> task_{};
};

/// A row: as a fraction of the speed of a copy of the same bytes.
/// @param make makes the work
template <class Make>
void against_copy(const std::string& name, std::size_t memory, std::size_t moved,
                  std::optional<double> at_least, bool tiny, const Make& make) {
  trim_pool();
  const std::size_t needed = memory + moved;  // the copy has as much of its own
  if (needed > device_memory().free / 10 * 9) {
    return print_skipped(name, "needs " + std::to_string(needed >> 20) + " MiB of device memory");
  }
  const auto work = make();
  DeviceCopy copy(moved);
  const zero::cuda::Stream stream;
  const Pairs pairs =
      run_device_pairs(stream, [&] { work(stream); }, [&] { copy(stream); }, pairs_of(tiny));
  zero::cuda::check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  const auto bytes = static_cast<double>(moved);
  print_row(name, "of a copy's speed", pairs.speed_ratio(), at_least,
            rate(bytes, pairs.subject) + ", copy " + rate(bytes, pairs.reference));
}

template <class T, class Rule>
void update_row(const std::string& name, const Rule& rule, const Model& model,
                std::optional<double> at_least, bool tiny) {
  const std::size_t elements = model.elements();
  against_copy("update/" + name + "/" + model.name, Shard<Rule, T>::memory(rule, elements),
               Shard<Rule, T>::moved_bytes(rule, elements), at_least, tiny,
               [&] { return Shard<Rule, T>(rule, model); });
}

template <zero::Element T>
class Norm {
 public:
  explicit Norm(const Model& model) : fragments_(model), digits_(1) {}

  void operator()(StreamView stream) const {
    const auto all = fragments_.all();
    cuda::add_squares(cuda::LookTask<T>{all.fragments, all.chunks, all.chunk_count, nullptr,
                                        const_cast<cuda::DeviceDigits*>(digits_.data())},
                      stream);
  }

 private:
  Fragments<T> fragments_;
  DeviceArray<cuda::DeviceDigits> digits_;
};

template <zero::Element T>
void norm_row(const std::string& name, const Model& model, bool tiny) {
  const std::size_t moved = sizeof(T) * model.elements();
  against_copy("norm/" + name + "/" + model.name, 2 * moved, moved, {}, tiny,
               [&] { return Norm<T>(model); });
}

}  // namespace

void update(bool tiny) {
  const zero::cuda::FusedAdam adam{};
  const zero::cuda::FusedSgd momentum{.momentum = 0.9};
  for (const Model& model : update_models(tiny)) {
    const double limit = model.tensors.size() == 1 ? 0.92 : 0.85;
    update_row<float>("adam fp32", adam, model, tiny ? std::nullopt : std::optional(limit), tiny);
    update_row<zero::bfloat16>("adam bf16+master", adam, model, {}, tiny);
    update_row<float>("sgd fp32", momentum, model, {}, tiny);
    update_row<zero::bfloat16>("sgd bf16+master", momentum, model, {}, tiny);
  }
}

void norm(bool tiny) {
  for (const Model& model : update_models(tiny)) {
    norm_row<float>("fp32", model, tiny);
    norm_row<zero::bfloat16>("bf16", model, tiny);
  }
}

}  // namespace bench
