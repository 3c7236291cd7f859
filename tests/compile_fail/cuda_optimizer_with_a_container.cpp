// SPDX-License-Identifier: Apache-2.0
// expect: so it must be trivially copyable: numbers and flags
#include <array>
#include <cstdint>
#include <string_view>
#include <vector>
#include <zero/cuda.cuh>

/// As a user might write it, with a schedule among its options.
struct Scheduled {
  static constexpr std::array<std::string_view, 1> slots{"velocity"};
  float lr = 0.1F;
#ifdef ZERO_COMPILE_FAIL
  std::vector<float> schedule{};
#endif
  template <class Real>
  ZERO_HOST_DEVICE Real scalars(std::int64_t) const {
    return static_cast<Real>(lr);
  }
  template <class X, class Scalar>
  ZERO_HOST_DEVICE static void update(X& value, const X& gradient, X& velocity, Scalar rate) {
    velocity = velocity + gradient;
    value = value - velocity * rate;
  }
};

void construct(std::vector<zero::cuda::ParamRef<float>>& store,
               zero::cuda::InProcessCommunicator& comm) {
  zero::ZeroSharded optimizer{Scheduled{}, store, comm};
}
