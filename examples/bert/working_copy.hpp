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
/// they are stored; one unit after the other uses the same memory, but for the word embedding,
/// which both ends of the network use.
///
/// Unit 0 is the word embedding, 1 the other embeddings, 2 + l layer l, and the last one the head.
template <class T>
class WorkingCopy {
 public:
  using Real = compute_t<T>;
  static constexpr bool converts = !std::is_same_v<T, Real>;

  WorkingCopy(const std::vector<Shape>& shapes, std::size_t layers, Memory& memory) {
    constexpr std::size_t other_embeddings = 4, of_layer = 16;
    firsts_ = {0, 1, 1 + other_embeddings};
    for (std::size_t l = 0; l < layers; ++l) firsts_.push_back(firsts_.back() + of_layer);
    firsts_.push_back(shapes.size());
    if constexpr (converts) {
      std::size_t largest = 0;
      for (std::size_t unit = 0; unit < units(); ++unit) {
        std::size_t size = 0;
        for (std::size_t i = first(unit); i < last(unit); ++i) {
          offsets_.push_back(size);
          size += shapes[i].elements();
        }
        if (unit > 0) largest = std::max(largest, size);
      }
      for (Region& region : regions_) {
        const std::size_t size = &region == regions_ ? shapes.front().elements() : largest;
        region.weights = memory.take<Real>(size);
        region.gradients = memory.take<Real>(size);
      }
    }
  }

  [[nodiscard]] std::size_t units() const { return firsts_.size() - 1; }
  /// A unit's tensors are [first, last).
  [[nodiscard]] std::size_t first(std::size_t unit) const { return firsts_[unit]; }
  [[nodiscard]] std::size_t last(std::size_t unit) const { return firsts_[unit + 1]; }

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
  void store([[maybe_unused]] const std::vector<Tensor<T>>& tensors,
             [[maybe_unused]] std::size_t unit) {
    if constexpr (converts) {
      for (std::size_t i = first(unit); i < last(unit); ++i) {
        const Real* from = at(&Region::gradients, i);
        std::transform(from, from + tensors[i].size, tensors[i].gradient.get(),
                       [](Real x) { return static_cast<T>(x); });
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
  [[nodiscard]] Real* gradient(const std::vector<Tensor<T>>& tensors, std::size_t i) const {
    if constexpr (converts) {
      return at(&Region::gradients, i);
    } else {
      return tensors[i].gradient.get();
    }
  }

 private:
  struct Region {
    std::shared_ptr<Real> weights{}, gradients{};
  };
  [[nodiscard]] Real* at(std::shared_ptr<Real> Region::* part, std::size_t i) const {
    return (regions_[i == 0 ? 0 : 1].*part).get() + offsets_[i];
  }

  std::vector<std::size_t> firsts_;
  std::vector<std::size_t> offsets_;  ///< by tensor, in its region
  Region regions_[2];                 ///< of the word embedding, and of the unit at work
};

}  // namespace bert
