// SPDX-License-Identifier: Apache-2.0
// expect: the store.s parameters have no rebind.values, owner., or are const
#include <zero/zero.hpp>

#include <cstddef>
#include <memory>
#include <span>
#include <vector>

struct Tensor {
  const char* name() const;
  std::span<const std::size_t> shape() const;
  std::span<float> values() const;
  std::span<float> gradient() const;
  void rebind(std::span<float> values, std::shared_ptr<const void> owner);
};
#ifdef ZERO_COMPILE_FAIL
using Store = const std::vector<Tensor>;
#else
using Store = std::vector<Tensor>;
#endif

void construct(Store& store, zero::InProcessCommunicator& comm) {
  zero::ZeroSharded optimizer{zero::Adam{}, store, comm, zero::ParamView{}};
}
