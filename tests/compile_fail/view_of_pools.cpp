// SPDX-License-Identifier: Apache-2.0
// expect: this version keeps values and gradients with the caller or in an arena
#include <zero/zero.hpp>

#include <cstddef>
#include <memory>
#include <span>
#include <vector>

struct View {
#ifdef ZERO_COMPILE_FAIL
  static constexpr zero::Residency values = zero::Residency::pool;
#else
  static constexpr zero::Residency values = zero::Residency::caller;
#endif
  static constexpr zero::Residency gradients = zero::Residency::caller;
  std::size_t bucket_bytes = 1024;
};
struct Tensor {
  const char* name() const;
  std::span<const std::size_t> shape() const;
  std::span<float> values() const;
  std::span<float> gradient() const;
  void rebind(std::span<float> values, std::shared_ptr<const void> owner);
};
using Store = std::vector<Tensor>;

void construct(Store& store, zero::InProcessCommunicator& comm) {
  zero::ZeroSharded optimizer{zero::Adam{}, store, comm, View{}};
}
