// SPDX-License-Identifier: Apache-2.0
// Parameters in the type that is computed in, whatever they are stored in.
#pragma once

#include <algorithm>
#include <cstddef>
#include <memory>
#include <type_traits>
#include <vector>

#include "array.hpp"
#include "config.hpp"
#include "tensor.hpp"

namespace bert {

/// Stored in the type that is computed in, parameters are used where they lie. Stored in a narrower
/// one, a unit (a layer, say) is converted when it is loaded, and its gradients are rounded when
/// they are complete; one unit after the other uses the same memory, but for the word embedding,
/// which both ends of the network use.
template <class T>
class WorkingCopy {
 public:
  using Real = compute_t<T>;
  static constexpr bool converts = !std::is_same_v<T, Real>;

  WorkingCopy(const std::vector<Shape>& shapes, Memory& memory) {
    std::size_t largest = 0, size = 0;
    for (std::size_t i = 0; i < shapes.size(); ++i) {
      if (i == 0 || shapes[i].unit != shapes[i - 1].unit) {
        firsts_.push_back(i);
        size = 0;
      }
      offsets_.push_back(size);
      size += shapes[i].elements();
      if (firsts_.size() > 1) largest = std::max(largest, size);
    }
    firsts_.push_back(shapes.size());
    if constexpr (converts) {
      for (Region& region : regions_) {
        const std::size_t elements = &region == regions_ ? shapes.front().elements() : largest;
        region.weights = memory.take<Real>(elements);
        region.gradients = memory.take<Real>(elements);
      }
    }
  }

  [[nodiscard]] std::size_t units() const { return firsts_.size() - 1; }
  /// A unit's tensors are [first, last).
  [[nodiscard]] std::size_t first(std::size_t unit) const { return firsts_[unit]; }
  [[nodiscard]] std::size_t last(std::size_t unit) const { return firsts_[unit + 1]; }

  /// Afterwards a copy is used, where one is: the unit's values may go.
  void load([[maybe_unused]] const std::vector<Tensor<T>>& tensors,
            [[maybe_unused]] std::size_t unit) {
    if constexpr (converts) {
      for (std::size_t i = first(unit); i < last(unit); ++i) {
        const T* from = tensors[i].values.get();
        std::transform(from, from + tensors[i].size, at(&Region::weights, i),
                       [](T x) { return static_cast<Real>(x); });
      }
    }
  }
  /// Of a tensor whose unit was loaded last of those that share its memory.
  [[nodiscard]] const Real* weight(const std::vector<Tensor<T>>& tensors, std::size_t i) const {
    if constexpr (converts) {
      return at(&Region::weights, i);
    } else {
      return tensors[i].values.get();
    }
  }
  /// Where a tensor's gradient is computed before it is rounded.
  [[nodiscard]] Real* gradient(std::size_t i) const
    requires converts
  {
    return at(&Region::gradients, i);
  }

 private:
  struct Region {
    std::shared_ptr<Real> weights{}, gradients{};
  };
  [[nodiscard]] Real* at(std::shared_ptr<Real> Region::* part, std::size_t i) const {
    return (regions_[i == 0 ? 0 : 1].*part).get() + offsets_[i];
  }

  std::vector<std::size_t> firsts_;   ///< by unit; one more ends the last
  std::vector<std::size_t> offsets_;  ///< by tensor, in its region
  Region regions_[2];                 ///< of the word embedding, and of the unit at work
};

}  // namespace bert
