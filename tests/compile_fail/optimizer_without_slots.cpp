// SPDX-License-Identifier: Apache-2.0
// expect: the optimizer must be an update rule .slots, scalars<Real>.t., an update
#include <zero/zero.hpp>

#include <array>
#include <cstdint>
#include <vector>

struct Descent {
  double lr = 1e-3;
#ifndef ZERO_COMPILE_FAIL
  static constexpr std::array<const char*, 0> slots{};
#endif
  template <class Real>
  Real scalars(std::int64_t) const {
    return static_cast<Real>(lr);
  }
  template <class X, class Real>
  static void update(X& value, const X& gradient, Real lr) {
    value = value - gradient * lr;
  }
};
using Store = std::vector<zero::ParamRef<float>>;

void construct(Store& store, zero::InProcessCommunicator& comm) {
  zero::ZeroSharded optimizer{Descent{}, store, comm};
}
