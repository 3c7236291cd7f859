// SPDX-License-Identifier: Apache-2.0
/// @file
/// The fused update gives the bits of the host's loop: for fragments of any length and alignment,
/// every kind of rule, and all types that values and state may have.
#include <array>
#include <cstddef>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "catch.hpp"
#include "device_array.hpp"
#include "zero/cuda/detail/update.cuh"
#include "zero/cuda/optim.cuh"
#include "zero/detail/update_loop.hpp"

namespace {

namespace gpu = zero::cuda::detail;
using zero::detail::Storage;

/// No optional slots.
struct Lion {
  double lr = 1e-2, beta1 = 0.9, beta2 = 0.99;
  static constexpr std::array<std::string_view, 1> slots{"exp_avg"};
  template <class Real>
  struct Scalars {
    Real lr, beta1, beta2;
  };
  template <class Real>
  ZERO_HOST_DEVICE Scalars<Real> scalars(std::int64_t) const {
    return {Real(lr), Real(beta1), Real(beta2)};
  }
  template <class X, class Real>
  ZERO_HOST_DEVICE static void update(X& value, const X& gradient, X& exp_avg,
                                      const Scalars<Real>& s) {
    const X direction = exp_avg * s.beta1 + gradient * (1 - s.beta1);
    value = value - zero::sign(direction) * s.lr;
    exp_avg = exp_avg * s.beta2 + gradient * (1 - s.beta2);
  }
};

/// Without any slot.
struct SignDescent {
  double lr = 1e-2;
  static constexpr std::array<std::string_view, 0> slots{};
  template <class Real>
  struct Scalars {
    Real lr;
  };
  template <class Real>
  ZERO_HOST_DEVICE Scalars<Real> scalars(std::int64_t) const {
    return {Real(lr)};
  }
  template <class X, class Real>
  ZERO_HOST_DEVICE static void update(X& value, const X& gradient, const Scalars<Real>& s) {
    value = value - s.lr * zero::sign(gradient);
  }
};

using AllHalf = zero::BasicPrecision<zero::OwnType, zero::OwnType, zero::Rounding::stochastic>;

/// Where arrays start: all where vectors do, all the same number of elements behind that, or each
/// somewhere.
enum class Placement { aligned, shifted, scattered };

enum class Source { own_gradients, sums };

/// A shard of several fragments, in device memory and in the host's.
template <class Rule, class S>
class Shard {
 public:
  using T = typename S::value;
  using A = typename S::arithmetic;
  using Slot = typename S::slot;
  static constexpr std::size_t slots = zero::detail::slot_count<Rule>;
  static constexpr std::uint64_t seed = 0x1234567890abcdefU;

  Shard(const Rule& rule, const std::vector<std::size_t>& lengths, Placement placement,
        unsigned random)
      : rule_(rule), used_(zero::used_slots(rule)), random_(random) {
    const bool scattered = placement == Placement::scattered;
    const std::size_t shift = placement == Placement::shifted ? 3 : 0;
    std::size_t begin = 0;
    std::vector<std::size_t> begins;
    for (const std::size_t length : lengths) {
      begin += scattered ? draw(5)
                         : (8 + shift - begin % 8) % 8;  // elements between that no one touches
      begins.push_back(begin);
      begin += length;
    }
    const std::size_t elements = begin + 3;
    fill_sums(elements);
    for (std::size_t p = 0; p < lengths.size(); ++p) {
      values_.push_back(numbers<T>(lengths[p]));
      gradients_.push_back(numbers<T>(lengths[p]));
      device_values_.emplace_back(values_[p], scattered ? draw(9) : shift);
      device_gradients_.emplace_back(gradients_[p], scattered ? draw(9) : shift);
      fragments_.push_back({.values = device_values_[p].data(),
                            .gradient = device_gradients_[p].data(),
                            .begin = begins[p],
                            .elements = lengths[p],
                            .parameter_begin = 0xfffffff0U + draw(1000),
                            .parameter = static_cast<std::uint32_t>(lengths.size() - 1 - p)});
      const auto t = static_cast<std::int64_t>(1 + draw(20));
      steps_.insert(steps_.begin(),
                    {.scalars = rule.template scalars<A>(t), .t = t, .stepping = 1});
    }
    if constexpr (S::has_master) {
      master_ = numbers<A>(elements);
      device_master_.emplace_back(master_, scattered ? draw(9) : 0);
    }
    for (std::size_t s = 0; s < used_; ++s) {
      state_[s] = numbers<Slot>(elements, true);
      device_state_.emplace_back(state_[s], scattered ? draw(9) : 0);
    }
  }

  void without_gradient(std::size_t fragment) { fragments_[fragment].gradient = nullptr; }
  void without_step(std::size_t fragment) { steps_[fragments_[fragment].parameter].stepping = 0; }
  void set_scale(double scale) { state_of_step_.scale = scale; }
  void skip() { state_of_step_.skip = 1; }

  /// On both sides.
  void step(Source source) {
    device_step(source, [](const gpu::UpdateTask<Rule, S>& task) {
      gpu::update(task, zero::cuda::StreamView{});
    });
    if (state_of_step_.skip == 0) host_step(source);
  }
  template <class Launch>
  void device_step(Source source, const Launch& launch) {
    const DeviceArray<gpu::DeviceFragment<T>> fragments(fragments_);
    const DeviceArray<gpu::Chunk> chunks(gpu::make_chunks<T>(fragments_));
    const DeviceArray<gpu::ParameterStep<gpu::rule_scalars<Rule, S>>> steps(steps_);
    const DeviceArray<gpu::StepState> state(std::vector<gpu::StepState>{state_of_step_});
    gpu::UpdateTask<Rule, S> task{.fragments = fragments.data(),
                                  .chunks = chunks.data(),
                                  .chunk_count = chunks.size(),
                                  .master = nullptr,
                                  .state = {},
                                  .sums = nullptr,
                                  .steps = steps.data(),
                                  .step = state.data(),
                                  .seed = seed};
    if constexpr (S::has_master) task.master = device_master_[0].data();
    for (std::size_t s = 0; s < used_; ++s) task.state[s] = device_state_[s].data();
    if (source == Source::sums) task.sums = device_sums_[0].data();
    launch(task);
    (void)fragments.host();  // waits before the tables are freed
  }
  void host_step(Source source) {
    for (std::size_t p = 0; p < fragments_.size(); ++p) {
      const auto& fragment = fragments_[p];
      const auto& step = steps_[fragment.parameter];
      if (step.stepping == 0) continue;
      zero::detail::UpdateArrays<S, slots> arrays{
          values_[p].data(),
          nullptr,
          {},
          zero::detail::noise_key(seed, std::uint64_t(step.t), fragment.parameter),
          static_cast<std::uint32_t>(fragment.parameter_begin)};
      if constexpr (S::has_master) arrays.master = master_.data() + fragment.begin;
      for (std::size_t s = 0; s < used_; ++s) arrays.state[s] = state_[s].data() + fragment.begin;
      const auto run = [&](const auto* gradient) {
        using G = std::remove_cvref_t<decltype(*gradient)>;
        zero::detail::update_elements<S>(
            rule_, step.scalars, arrays,
            zero::detail::GradientSum<G>{{&gradient, 1}, static_cast<A>(state_of_step_.scale)},
            fragment.elements);
      };
      if (source == Source::sums) {
        run(static_cast<const A*>(sums_.data() + fragment.begin));
      } else {
        const T* none = nullptr;
        run(fragment.gradient == nullptr ? none : gradients_[p].data());
      }
    }
  }

  [[nodiscard]] bool same() const {
    bool same = true;
    for (std::size_t p = 0; p < values_.size(); ++p) {
      same = same && same_bytes(values_[p], device_values_[p].host());
    }
    if constexpr (S::has_master) same = same && same_bytes(master_, device_master_[0].host());
    for (std::size_t s = 0; s < used_; ++s) {
      same = same && same_bytes(state_[s], device_state_[s].host());
    }
    return same;
  }

 private:
  std::size_t draw(std::size_t below) { return random_() % below; }
  /// Of many magnitudes, now and then zero or beyond what the type holds.
  template <class U>
  std::vector<U> numbers(std::size_t count, bool positive = false) {
    std::normal_distribution<double> normal;
    std::vector<U> all;
    for (std::size_t i = 0; i < count; ++i) {
      double x = normal(random_) * std::ldexp(1.0, int(draw(20)) - 15);
      if (draw(50) == 0) x = 0;
      if (draw(200) == 0) x *= 1e-42;
      if (draw(200) == 0) x *= 1e30;
      if (positive) x = std::abs(x);
      all.push_back(zero::element_traits<U>::store(zero::arithmetic_t<U>(x)));
    }
    return all;
  }
  void fill_sums(std::size_t elements) {
    sums_ = numbers<A>(elements);
    device_sums_.emplace_back(sums_);
  }

  Rule rule_;
  std::size_t used_;
  std::mt19937 random_;
  std::vector<std::vector<T>> values_, gradients_;
  std::vector<A> master_, sums_;
  std::array<std::vector<Slot>, slots> state_;
  std::vector<DeviceArray<T>> device_values_, device_gradients_;
  std::vector<DeviceArray<A>> device_master_, device_sums_;
  std::vector<DeviceArray<Slot>> device_state_;
  std::vector<gpu::DeviceFragment<T>> fragments_;
  std::vector<gpu::ParameterStep<gpu::rule_scalars<Rule, S>>> steps_;  // by parameter
  gpu::StepState state_of_step_{.scale = 1, .skip = 0};
};

const std::vector<std::size_t> lengths{1, 2, 0, 3, 7, 31, 64, 1000, 10007, 8192};

constexpr Placement placements[]{Placement::aligned, Placement::shifted, Placement::scattered};

template <class S, class Rule>
void matches(const Rule& rule) {
  for (const Placement placement : placements) {
    for (const Source source : {Source::own_gradients, Source::sums}) {
      INFO("placement " << int(placement) << ", sums " << (source == Source::sums));
      Shard<Rule, S> shard(rule, lengths, placement, 1);
      shard.set_scale(1 / 3.0);
      shard.without_gradient(3);
      shard.without_step(5);
      shard.step(source);
      shard.set_scale(0.7);
      shard.step(source);
      CHECK(shard.same());
    }
  }
}

using FloatLane = Storage<float, zero::MixedPrecision>;

}  // namespace

TEST_CASE("Rules step floats as on the host") {
  matches<FloatLane>(zero::cuda::FusedAdam{.weight_decay = 0.1});
  matches<FloatLane>(zero::cuda::FusedAdamW{.amsgrad = true, .maximize = true});
  matches<FloatLane>(zero::cuda::FusedSgd{.momentum = 0.9, .nesterov = true});
  matches<FloatLane>(zero::cuda::FusedSgd{.lr = 0.1});
  matches<FloatLane>(Lion{});
  matches<FloatLane>(SignDescent{});
}

TEMPLATE_TEST_CASE("All ways of keeping values and state step as on the host", "",
                   (Storage<double, zero::MixedPrecision>),
                   (Storage<zero::bfloat16, zero::MixedPrecision>),
                   (Storage<zero::float16, zero::MixedPrecision>),
                   (Storage<float, zero::Bfloat16Slots>),
                   (Storage<zero::bfloat16, zero::Bfloat16Slots>),
                   (Storage<zero::bfloat16, zero::StochasticPrecision>),
                   (Storage<zero::float16, zero::StochasticPrecision>),
                   (Storage<zero::bfloat16, AllHalf>), (Storage<zero::float16, AllHalf>)) {
  matches<TestType>(zero::Adam{.amsgrad = true});
  matches<TestType>(zero::Adam{});
  matches<TestType>(zero::Sgd{.momentum = 0.5});
  matches<TestType>(SignDescent{});
}

TEST_CASE("A skipped step changes nothing") {
  Shard<zero::Adam, FloatLane> shard({}, lengths, Placement::aligned, 1);
  shard.skip();
  shard.step(Source::own_gradients);
  CHECK(shard.same());
}

#if ZERO_CUDA_EMULATED
TEST_CASE("A whole shard is one launch") {
  Shard<zero::Adam, FloatLane> shard({}, lengths, Placement::scattered, 1);
  zero_emulation::reset();
  shard.step(Source::sums);
  CHECK(zero_emulation::counters().launches == 1);
}
#endif

TEST_CASE("Blocks and threads in any number and order give the same bits") {
  for (const gpu::LaunchShape shape : {gpu::LaunchShape{1, 1}, {3, 7}, {100, 256}}) {
    for (const Placement placement : placements) {
      Shard<zero::Adam, FloatLane> shard({}, lengths, placement, 3);
      scramble_blocks(shape.threads);
      shard.device_step(Source::own_gradients, [&](const auto& task) {
        gpu::launch("update", &gpu::update_kernel<zero::Adam, FloatLane, float, 2>, shape,
                    zero::cuda::StreamView{}, task);
      });
      scramble_blocks(0);
      shard.host_step(Source::own_gradients);
      CHECK(shard.same());
    }
  }
}

TEST_CASE("Chunks cover every element once, at aligned places") {
  std::vector<gpu::DeviceFragment<float>> fragments;
  std::size_t begin = 5;
  for (const std::size_t length : {1U, 0U, 100000U, 8192U, 16384U, 63U}) {
    fragments.push_back({.values = nullptr,
                         .gradient = nullptr,
                         .begin = begin,
                         .elements = length,
                         .parameter_begin = 0,
                         .parameter = 0});
    begin += length;
  }
  const auto chunks = gpu::make_chunks<float>(fragments);
  std::vector<std::size_t> covered(fragments.size());
  for (const gpu::Chunk& chunk : chunks) {
    CHECK(chunk.begin == covered[chunk.fragment]);
    CHECK(chunk.elements > 0);
    CHECK(chunk.elements <= gpu::chunk_elements);
    if (chunk.begin != 0) {
      CHECK((fragments[chunk.fragment].begin + chunk.begin) % gpu::chunk_alignment == 0);
    }
    covered[chunk.fragment] += chunk.elements;
  }
  for (std::size_t f = 0; f < fragments.size(); ++f) CHECK(covered[f] == fragments[f].elements);
}
