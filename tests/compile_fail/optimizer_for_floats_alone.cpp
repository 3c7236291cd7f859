// SPDX-License-Identifier: Apache-2.0
// expect: an update that is generic in its numbers
#include <zero/zero.hpp>

#include <array>
#include <cstdint>
#include <vector>

struct Descent {
  double lr = 1e-3;
  static constexpr std::array<const char*, 0> slots{};
  template <class Real>
  Real scalars(std::int64_t) const {
    return static_cast<Real>(lr);
  }
#ifdef ZERO_COMPILE_FAIL
  static void update(float& value, const float& gradient, float lr) {
    value = value - gradient * lr;
  }
#else
  template <class X, class Real>
  static void update(X& value, const X& gradient, Real lr) {
    value = value - gradient * lr;
  }
#endif
};
using Store = std::vector<zero::ParamRef<float>>;

void construct(Store& store, zero::InProcessCommunicator& comm) {
  zero::ZeroSharded optimizer{Descent{}, store, comm};
}
