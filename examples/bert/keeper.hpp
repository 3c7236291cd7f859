// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>

namespace bert {

/// Who keeps a model's weights and gradients where its tensors don't: told what the model is about
/// to use, and what it is done with. Tensors are named by index, and by `Shape::unit`.
template <class T>
class Keeper {
 public:
  /// The unit's tensors hold their values from now on until it is released.
  virtual void acquire(int unit) = 0;
  virtual void release(int unit) = 0;
  /// Where tensor i's gradient is to be written, over whatever is there.
  [[nodiscard]] virtual T* gradient(std::size_t i) = 0;
  /// Tensor i's gradient is complete.
  virtual void complete(std::size_t i) = 0;

 protected:
  Keeper() = default;
  Keeper(const Keeper&) = default;
  Keeper& operator=(const Keeper&) = default;
  ~Keeper() = default;
};

}  // namespace bert
