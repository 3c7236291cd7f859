// SPDX-License-Identifier: Apache-2.0
// A training program that changes its mind, on the host and on devices: the same bits and outcomes.
#include <cuda_runtime_api.h>

#include <cmath>
#include <cstddef>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "catch.hpp"
#include "cuda/device_array.hpp"
#include "zero/cuda.cuh"

namespace {

/// What a rank came to.
template <class T>
struct Trace {
  std::vector<std::vector<T>> values{};
  std::vector<zero::Outcome> outcomes{};
  std::vector<double> loss_scales{};
  std::vector<std::int64_t> steps{};
};

template <class T>
bool same(const std::vector<Trace<T>>& a, const std::vector<Trace<T>>& b) {
  for (std::size_t r = 0; r < a.size(); ++r) {
    for (std::size_t i = 0; i < a[r].values.size(); ++i) {
      if (!same_bytes(a[r].values[i], b[r].values[i])) return false;
    }
    for (std::size_t k = 0; k < a[r].outcomes.size(); ++k) {
      const zero::Outcome &x = a[r].outcomes[k], &y = b[r].outcomes[k];
      if (x.applied != y.applied || x.step != y.step || x.gradient_norm != y.gradient_norm) {
        return false;
      }
    }
    if (a[r].loss_scales != b[r].loss_scales || a[r].steps != b[r].steps) return false;
    if (a[r].values.size() != b[r].values.size() || a[r].outcomes.size() != b[r].outcomes.size()) {
      return false;
    }
  }
  return a.size() == b.size();
}

template <class T>
T number(std::size_t i, std::size_t a, std::size_t b) {
  const float x = static_cast<float>((i * 7 + a * 11 + b * 13) % 37) * 0.03F - 0.5F;
  return zero::element_traits<T>::store(x);
}

struct OnHost {
  template <class T>
  using Array = std::vector<T>;
  template <class T>
  using Ref = zero::ParamRef<T>;
  static constexpr bool device = false;
  template <class F>
  static void run_ranks(int world, F&& f) {
    zero::run_ranks(world, f);
  }
  template <class T>
  static void write(std::vector<T>& to, const std::vector<T>& from) {
    to = from;
  }
  template <class T>
  static std::vector<T> read(const std::vector<T>& from) {
    return from;
  }
};
struct OnDevice {
  template <class T>
  using Array = DeviceArray<T>;
  template <class T>
  using Ref = zero::cuda::ParamRef<T>;
  static constexpr bool device = true;
  template <class F>
  static void run_ranks(int world, F&& f) {
    zero::cuda::run_ranks(world, f);
  }
  /// In the order of the legacy default stream, which the program steps in.
  template <class T>
  static void write(DeviceArray<T>& to, const std::vector<T>& from) {
    zero::cuda::check(cudaMemcpyAsync(to.data(), from.data(), from.size() * sizeof(T),
                                      cudaMemcpyHostToDevice, nullptr),
                      "cudaMemcpyAsync");
  }
  template <class T>
  static std::vector<T> read(const DeviceArray<T>& from) {
    return from.host();
  }
};

/// A schedule, clipping that comes and goes, an overflow, a third group that joins, masters that
/// are reloaded, accumulation, and gradients that are cleared.
template <class Where, class T, class Precision, class... Policy>
std::vector<Trace<T>> train(int world, Precision precision, Policy... policies) {
  std::vector<Trace<T>> traces(static_cast<std::size_t>(world));
  Where::run_ranks(world, [&](auto& comm) {
    const auto rank = static_cast<std::size_t>(comm.rank());
    Trace<T>& trace = traces[rank];
    std::vector<typename Where::template Array<T>> values, gradients;
    std::vector<typename Where::template Ref<T>> store;
    const auto numbers = [](std::size_t count, std::size_t a, std::size_t b) {
      std::vector<T> all;
      for (std::size_t e = 0; e < count; ++e) all.push_back(number<T>(e, a, b));
      return all;
    };
    const auto add = [&](std::size_t count, std::size_t group) {
      const std::size_t i = store.size();
      values.emplace_back(numbers(count, i, 50));
      gradients.emplace_back(numbers(count, i, 51));
      store.emplace_back("p" + std::to_string(i), std::vector<std::size_t>{count},
                         values.back().data(), gradients.back().data(), zero::Attributes{}, group);
    };
    values.reserve(9);  // what the store points into
    gradients.reserve(9);
    for (const std::size_t count : {700, 33, 0, 1500}) add(count, store.size() % 2);
    zero::Settings settings;
    settings.loss_scale = zero::LossScale{.scale = 256, .interval = 3};
    settings.poison_padding = true;
    zero::ZeroSharded optimizer{
        zero::Groups<zero::AdamW>{zero::AdamW{.lr = 0.1}, zero::AdamW{.lr = 0.02}},
        store,
        comm,
        zero::NoView{2000},
        settings,
        precision,
        policies...};
    const auto backward = [&](std::size_t step, bool overflow = false) {
      for (std::size_t i = 0; i < store.size(); ++i) {
        std::vector<T> made = numbers(values[i].size(), step, rank + i);
        if (overflow && i == 1) {
          made[7] = zero::element_traits<T>::store(std::numeric_limits<float>::infinity());
        }
        Where::write(gradients[i], made);
      }
    };
    const auto step = [&] {
      trace.outcomes.push_back(optimizer.step().outcome());
      trace.loss_scales.push_back(optimizer.loss_scale());
    };
    for (std::size_t s = 0; s < 4; ++s) {
      optimizer.group(s % 2).lr *= 0.7;  // a schedule
      if (s == 1) optimizer.clip_grad_norm(0.01);
      if (s == 3) optimizer.clip_grad_norm(std::nullopt);
      backward(s, s == 2 && rank == 0);
      optimizer.mark_ready(3);
      if (s == 1) optimizer.mark_absent(0);
      step();
    }
    add(900, 2);
    optimizer.add_param_group(zero::AdamW{.lr = 0.3, .weight_decay = 0.1});
    optimizer.clip_grad_norm(std::numeric_limits<double>::infinity());
    for (std::size_t s = 4; s < 7; ++s) {
      if (s == 5) {
        {
          const auto scope = optimizer.accumulate();
          backward(s);
          optimizer.mark_ready(0);
        }
        backward(s + 10);
      } else if (s == 6) {
        optimizer.zero_grad();
        if constexpr (Where::device) zero::cuda::check(cudaDeviceSynchronize(), "synchronize");
        Where::write(values[1], numbers(values[1].size(), 3, 3));
        if constexpr (Where::device) zero::cuda::check(cudaDeviceSynchronize(), "synchronize");
        optimizer.reload_masters();
      } else {
        backward(s);
      }
      step();
    }
    for (std::size_t i = 0; i < store.size(); ++i) {
      trace.steps.push_back(optimizer.steps(i));
      trace.values.push_back(Where::read(values[i]));
    }
  });
  return traces;
}

template <class T, class Precision, class... Policy>
void check_alike(Precision precision, Policy... policies) {
  for (const int world : {1, 2, 3}) {
    CAPTURE(world);
    const auto want = train<OnHost, T>(world, precision, policies...);
    REQUIRE_FALSE(want[0].outcomes[2].applied);
    REQUIRE(want[0].outcomes.back().step == 6);
    CHECK(same(want, train<OnDevice, T>(world, precision, policies...)));
  }
}

}  // namespace

TEST_CASE("device: a program's float16 training has the host's bits", "[cuda]") {
  check_alike<zero::float16>(zero::MixedPrecision{});
}
TEST_CASE("device: a program's replicated float training has the host's bits", "[cuda]") {
  check_alike<float>(zero::Bfloat16Slots{}, zero::Replicated{});
}
