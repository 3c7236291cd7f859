// SPDX-License-Identifier: Apache-2.0
// expect: needs complete tensors, but this partition cuts them; use zero::BalancedPartition
#include <zero/zero.hpp>

#include <array>
#include <cstdint>
#include <span>
#include <vector>

/// Each tensor by its largest gradient.
struct ByLargest {
  static constexpr std::array<const char*, 0> slots{};
  void update(zero::TensorRef<float>, std::array<std::span<float>, 0>, std::int64_t) const {}
};
/// The same without looking around.
struct Descent {
  static constexpr std::array<const char*, 0> slots{};
  template <class Real>
  Real scalars(std::int64_t) const {
    return Real(1);
  }
  template <class X, class Real>
  static void update(X& value, const X& gradient, Real lr) {
    value = value - gradient * lr;
  }
};
#ifdef ZERO_COMPILE_FAIL
using Optimizer = ByLargest;
#else
using Optimizer = Descent;
#endif
using Store = std::vector<zero::ParamRef<float>>;

void construct(Store& store, zero::InProcessCommunicator& comm) {
  zero::ZeroSharded optimizer{Optimizer{}, store, comm, zero::ContiguousPartition{}};
}
